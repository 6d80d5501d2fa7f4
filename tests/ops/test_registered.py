"""Operators whose authors have registered for autocast what they take: hmpx heeds it, as torch.autocast does."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hmpx
from tests.support.islands import off

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
seen: list[torch.dtype] = []
library = torch.library.Library("authors", "FRAGMENT")


def gram(values):
    product = values @ values.transpose(-1, -2)
    seen.extend((values.dtype, product.dtype))
    return product.float()


def _define(name, dtype, how):
    """Define an operator in one of the ways that torch has, and let autocast give it tensors of `dtype`."""
    if how == "custom_op":
        op = torch.library.custom_op(f"authors::{name}", gram, mutates_args=(), schema="(Tensor values) -> Tensor")
        op.register_fake(lambda values: values.new_empty(*values.shape[:-1], values.shape[-2], dtype=FP32))
        if dtype is not None:
            op.register_autocast("cpu", dtype)
        return op
    library.define(f"{name}(Tensor values) -> Tensor")
    library.impl(name, gram, "CPU")
    if how == "register_autocast":
        torch.library.register_autocast(f"authors::{name}", "cpu", dtype, lib=library)
    else:

        def in_dtype(values):
            with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)):
                return getattr(torch.ops.authors, name)(values.to(dtype))

        library.impl(name, in_dtype, "AutocastCPU")
    packet = getattr(torch.ops.authors, name)
    return packet.default if how == "overload" else packet


OPERATORS = {
    "custom_op": _define("a", FP32, "custom_op"),
    "register_autocast": _define("b", FP32, "register_autocast"),
    "a kernel": _define("c", FP32, "kernel"),
    "an overload": _define("d", FP32, "overload"),
    "in low precision": _define("e", BF16, "custom_op"),
    "in another": _define("f", FP16, "custom_op"),
    "nothing is registered": _define("g", None, "custom_op"),
}


class Net(nn.Module):
    def __init__(self, op):
        super().__init__()
        self.op, self.inner = op, nn.Linear(8, 8)

    def forward(self, x):
        return self.op(self.inner(x))


def _run(op, x):
    seen.clear()
    torch.manual_seed(0)
    with torch.no_grad():
        return Net(op)(x), (*seen,)


@pytest.mark.parametrize("recipe", ["autocast-cpu", "bf16-sr", "hmp-o1"])
def test_what_is_registered_for_autocast_is_heeded(recipe):
    """Its inputs have the dtype that its author has said, and no list casts what it computes inside."""
    x = torch.randn(3, 8)
    with torch.autocast("cpu", dtype=BF16):
        wanted = {name: _run(op, x) for name, op in OPERATORS.items()}
    with hmpx.activate(recipe):
        for name, op in OPERATORS.items():
            found, ours = _run(op, x)
            assert ours == wanted[name][1] and torch.equal(found, wanted[name][0]), name
    assert not torch.is_autocast_enabled("cpu")


def test_what_is_registered_is_nothing_where_no_list_casts():
    """Outside of models, in an island, in disable_casts() and after the conversion."""
    op, x = OPERATORS["custom_op"], torch.ones(3, 8).bfloat16()

    def in_an_island(h):
        with off():
            return op(h.bfloat16())

    with hmpx.convert(where="model", bf16=["linear"]):
        seen.clear()
        op(x)
        with torch.no_grad(), hmpx.disable_casts():
            op(x)
        Net(in_an_island)(x.float())
        assert set(seen) == {BF16}
        Net(lambda h: op(h.bfloat16()))(x.float())
        assert seen[-2:] == [FP32, FP32]
    seen.clear()
    op(x)
    assert set(seen) == {BF16}


def test_an_operator_that_is_registered_later_is_heeded_and_compiled_code_has_its_dtype():
    x = torch.randn(3, 8)
    with hmpx.activate("bf16-sr"):
        op = _define("later", FP32, "custom_op")
        torch.manual_seed(0)
        net = Net(op).requires_grad_(False)
        seen.clear()
        eager = net(x)
        assert (*seen,) == (FP32, FP32)
        seen.clear()
        assert torch.equal(torch.compile(net, backend="aot_eager", fullgraph=True)(x), eager)
        assert {*seen} == {FP32}
