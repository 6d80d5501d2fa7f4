"""What a GPU would compute in which dtype, without one: fake CUDA tensors, in a build of torch that has CUDA.

A fake tensor has a device, a shape and a dtype, and goes through CUDA's own dispatch, autocast included. Forward only:
a backward pass wants a real device. Autocast's answers come from torch, those for other recipes from fake tensors of a
CPU, where the whole suite computes. `tests/README.md` has the command.
"""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.data import DataLoader, TensorDataset

import hmpx
from hmpx.ops.computing import matrix_products
from tests.downstream.comparing import made
from tests.downstream.zoo import NO_KERNEL, ZOO
from tests.support.recorded import escaped

pytestmark = [
    pytest.mark.skipif(torch.version.cuda is None, reason="this torch is built without CUDA"),
    pytest.mark.filterwarnings("ignore"),
]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# Ops that only move numbers stand elsewhere under casts of another kind, and say nothing of what is computed in what.
MOVES = set(
    "_to_copy _unsafe_view clone copy_ detach device empty_like expand permute reshape select slice split squeeze t"
    " transpose unbind unsqueeze view".split()
)


# What plain torch does not take fake CUDA tensors through, and why.
NOT_FAKE = {
    **dict.fromkeys(("mixtral", "torch lstm", "torch gru"), "asks for a driver"),
    **dict.fromkeys(("wav2vec2", "torch transformer"), "asks for a number of a tensor"),
}
FAKE = [name for name in ZOO if name not in {**NOT_FAKE, **NO_KERNEL}]


class Computed(TorchDispatchMode):
    """Names and result dtypes of the ops that torch's dispatcher sees."""

    def __init__(self):
        super().__init__()
        self.ops: list[tuple[str, ...]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        name = function._schema.name.partition("::")[2]
        if name not in MOVES:
            self.ops.append((name, *(str(x.dtype) for x in tree_leaves(out) if isinstance(x, torch.Tensor))))
        return out


@contextlib.contextmanager
def autocast_on_a_gpu(low):
    """`torch.autocast("cuda", low)`, which switches itself off where there is no GPU."""
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", low)
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        torch.set_autocast_enabled("cuda", False)
        torch.set_autocast_dtype("cuda", torch.float16)


def moved(model: nn.Module, inputs: dict, device: str) -> tuple[nn.Module, dict]:
    """The same on another device, as fake tensors of the mode that is on."""
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, x in held.items():
                if x is not None:
                    fake = torch.empty(x.shape, dtype=x.dtype, device=device)
                    held[name] = nn.Parameter(fake, requires_grad=False) if isinstance(x, nn.Parameter) else fake
    return model, tree_map_only(torch.Tensor, lambda x: torch.empty(x.shape, dtype=x.dtype, device=device), inputs)


def computed(model, inputs, around=contextlib.nullcontext, device="cuda") -> list[tuple[str, ...]]:
    """The ops of a forward pass inside of `around()`."""
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        model, inputs = moved(model, inputs, device)
        with around(), Computed() as seen:
            model(**inputs)
    return seen.ops


def differing(one, other):
    return [pair for pair in zip(one, other, strict=False) if pair[0] != pair[1]][:3] or (len(one), len(other))


@pytest.mark.parametrize("low", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", FAKE)
def test_ops_and_dtypes_are_those_of_autocast(name, low):
    recipe = {"extends": "autocast-cuda", "low_precision": low}
    expected = computed(*made(name), lambda: autocast_on_a_gpu(low))
    got = computed(*made(name), lambda: hmpx.activate(recipe))
    assert got == expected and len(got) > 5, differing(got, expected)


@pytest.mark.parametrize("name", NOT_FAKE)
def test_plain_torch_does_not_take_the_others(name):
    with pytest.raises(Exception, match=r"driver|_local_scalar_dense"):
        computed(*made(name))


class Net(nn.Module):
    """Attention by hand, a norm, five linear layers and a loss: all without a device's own kernels."""

    def __init__(self):
        super().__init__()
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 16)
        self.inward, self.out, self.up, self.down = (
            nn.Linear(i, j) for i, j in ((32, 96), (32, 32), (32, 64), (64, 32))
        )

    def forward(self, x, y):
        q, k, v = self.inward(self.norm(x)).chunk(3, -1)
        x = x + self.out(torch.softmax(q @ k.mT / 32**0.5, -1) @ v)
        x = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), y.flatten())


def net():
    return Net(), {"x": torch.randn(4, 8, 32), "y": torch.zeros(4, 8, dtype=torch.int64)}


GPU_RECIPES = [
    *("apex-o1", "apex-o1-bf16", "autocast-cuda", "bf16-norms-fp32", "flash", "fp32-head", "hmp-o1", "hmp-o2", "lean"),
    *("lean8", "neuron-bf16-sr", "neuron-bf16-fp32-params-copy", "nxd-standard", "torchao-bf16-sr", "xla-use-bf16"),
]


@pytest.mark.parametrize("recipe", GPU_RECIPES)
def test_a_recipe_computes_on_a_gpu_what_it_computes_on_a_cpu(recipe):
    """What an op gives first: of the norm's statistics, which come after it, each device has its own opinion."""
    found = []
    for device in ("cpu", "cuda"):
        model, inputs = net()
        optimizer = torch.optim.AdamW(model.named_parameters(), lr=1e-3)
        hmpx.prepare(model, optimizer, {"extends": recipe, "kernels": "native"})
        found.append([op[:2] for op in computed(model, inputs, device=device)])
        hmpx.restore(optimizer)
    assert found[0] == found[1] and len(found[0]) > 5, differing(*found)


@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
def test_fp8_products_are_those_of_the_gpu_where_it_has_them(scaling, monkeypatch):
    for capable in (True, False):
        monkeypatch.setattr(matrix_products, "_has_scaled_mm", lambda device, capable=capable: capable)
        recipe = {"fp8": ["linear"], "fp8_format": scaling, "parameter_dtype": "float32"}
        ops = computed(*net(), lambda recipe=recipe: hmpx.activate(recipe))
        assert ops.count(("_scaled_mm", "torch.bfloat16")) == (5 if capable else 0), ops
        assert sum(name in ("mm", "addmm") for name, *_ in ops) == (0 if capable else 5), ops


def test_bf16_to_fp32_is_one_product_that_hands_on_fp32():
    def under_the_rule():
        stack = contextlib.ExitStack()
        stack.enter_context(hmpx.convert())
        stack.enter_context(hmpx.casts("bf16-to-fp32"))
        return stack

    model, inputs = nn.Sequential(nn.Linear(16, 32, bias=False), nn.Linear(32, 8)), {"input": torch.randn(4, 16)}
    ops = computed(model, inputs, under_the_rule)
    assert [op[:2] for op in ops if op[0] != "add"] == [("mm", "torch.float32")] * 2, ops


def test_regions_and_rules_hold_on_a_gpu():
    layer, x = nn.Linear(8, 8), torch.randn(2, 8)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        layer, inputs = moved(layer, {"x": x}, "cuda")
        x = inputs["x"]
        with hmpx.convert():
            assert (x.device.type, layer(x).dtype) == ("cuda", BF16)
            with hmpx.disable_casts():
                assert layer(x).dtype is FP32
            with hmpx.casts(fp32=["linear"]):
                assert layer(x).dtype is FP32
            rule = hmpx.policy_for(layer, "fp32")
            assert layer(x).dtype is FP32
            rule.remove()
            assert torch.softmax(layer(x), -1).dtype is FP32 and layer(x).dtype is BF16


def test_copies_from_pinned_memory_have_the_dtype_that_is_mapped():
    made = TensorDataset(torch.ones(4, 2))
    with hmpx.convert(dtype_map={FP32: BF16}):
        (batch,) = next(iter(DataLoader(made, batch_size=4)))
        with FakeTensorMode(allow_non_fake_inputs=True):
            pinned = torch.empty(4, 2, pin_memory=True)
            copies = [
                pinned.to("cuda", non_blocking=True),
                pinned.cuda(non_blocking=True),
                pinned.to(device="cuda", dtype=FP32, non_blocking=True, copy=True),
                torch.empty(4, 2, dtype=torch.float64).to("cuda", FP32, non_blocking=True),
            ]
    assert [x.dtype for x in (batch, pinned, *copies)] == [FP32, *[BF16] * 5]
    assert {x.device.type for x in copies} == {"cuda"}


def test_cached_weights_compute_the_same_on_a_gpu():
    """Fake weights themselves are not kept: they have no memory that could be written to."""
    layer, x = nn.Linear(8, 8), torch.randn(2, 8)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        layer, inputs = moved(layer, {"x": x}, "cuda")
        with hmpx.convert(), hmpx.cached_weights() as cache:
            assert [layer(inputs["x"]).dtype for _ in range(3)] == [BF16] * 3
            assert "0 casts" in repr(cache)


def test_record_sees_on_a_gpu_what_it_sees_on_a_cpu():
    said = []
    for device in ("cpu", "cuda"):
        with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
            model, inputs = moved(*net(), device)
            with hmpx.activate({"extends": "autocast-cuda", "kernels": "native"}):
                with hmpx.record() as seen:
                    model(**inputs)
                found = escaped(lambda x: torch.ops.aten.mm(x, x.t()), inputs["x"][0])
        said.append(([(site.op, site.module, site.rule, site.calls) for site in seen.sites], str(found)))
    assert said[0] == said[1] and "aten.mm" in said[1][1] and said[1][0]
