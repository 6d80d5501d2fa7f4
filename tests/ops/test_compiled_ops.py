"""Compiled code is one graph, with results and gradients to the bit of eager code.

A row for each op that has code of its own, and for each kind of list. `test_compile.py` has models, regions and steps.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import hmpx
from tests.support.compiling import nothing_compiled  # noqa: F401
from tests.support.parametrized import parametrized

BF16 = torch.bfloat16


class WideHead(nn.Sequential):
    """Its logits are FP32 numbers, of a product of BF16 ones."""

    def __init__(self):
        super().__init__(nn.Linear(16, 24), nn.Linear(24, 8))
        hmpx.policy_for(self[1], "bf16-to-fp32")


def mlp():
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))


def drawn(*shape, dtype=torch.float32):
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(sum(shape))).requires_grad_()


ENDS = torch.tensor(
    [32, 32, 96, 160], dtype=torch.int32
)  # of groups of rows: one is empty, and the last rows are in none
X, W, Y = drawn(16, 32), drawn(32, 64), drawn(2, 16, 32)
FUNCTIONS = {
    "matrix_exp": ({}, lambda x: torch.matrix_exp(x) + 1, drawn(3, 3, dtype=BF16)),
    "rfft": ({}, lambda x: torch.fft.rfft(x).abs() + 1, drawn(4)),
    "pow, of any arguments": ({"bf16": ["pow"]}, lambda x: torch.pow(x, 3.0), drawn(2, 2)),
    "pow of a number": ({"bf16": ["pow"]}, lambda x: torch.pow(2.0, x), drawn(2, 2)),
    "einsum by bmm": ({"bf16": ["bmm"]}, lambda x: torch.einsum("ij,jk", x, x), drawn(3, 3)),
    "@ by mm": ({"bf16": ["mm"]}, lambda x: x @ x, drawn(3, 3)),
    "linear by mm": ({"bf16": ["mm"]}, lambda x: F.linear(x, x), drawn(3, 3)),
    "FP8 @": ({"fp8": ["matmul"]}, lambda x, w: x @ w, X, W),
    "FP8 mm": ({"fp8": ["mm"]}, torch.mm, X, W),
    "FP8 einsum": ({"fp8": ["einsum"]}, lambda y, w: torch.einsum("bij,jk->bik", y, w), Y, W),
    "FP8 linear": ({"fp8": ["linear"]}, lambda x, w: F.linear(x, w.t()), X, W),
    "FP8 addmm": ({"fp8": ["addmm"]}, lambda x, w: torch.addmm(w.sum(0).bfloat16(), x, w), X, W),
    "FP8 bmm": ({"fp8": ["bmm"]}, lambda y, w: torch.bmm(y, w.expand(2, 32, 64)), Y, W),
    "FP8 method": ({"fp8": ["matmul"]}, lambda y, w: y.matmul(w), Y, W),
    "FP8 grouped_mm": (
        {"fp8": ["grouped_mm"], "fp8_format": "rowwise"},
        lambda a, b: torch._grouped_mm(a, b.mT, offs=ENDS),
        drawn(160, 64, dtype=BF16),
        drawn(4, 64, 64, dtype=BF16),
    ),
}
MODULES = {
    "sparse gradients": ({}, lambda: nn.Embedding(12, 4, sparse=True).bfloat16(), torch.tensor([[1, 2, 2]])),
    **{
        f"parametrized by {kind}": ({}, lambda kind=kind: parametrized(kind, BF16), drawn(2, 8))
        for kind in ("weight_norm", "spectral_norm", "matrix_exp", "older spectral_norm")
    },
    "FP32 logits": ({}, WideHead, drawn(4, 16)),
    **{
        f"FP8 {form}": ({"fp8": ["linear"], "fp8_format": form}, mlp, drawn(8, 32))
        for form in ("tensorwise", "rowwise", "mx", "blockwise")
    },
}
ROWS = {what: (lists, lambda f=function: f, *x) for what, (lists, function, *x) in FUNCTIONS.items()} | MODULES
ROWS |= {
    f"{what}, rowwise": ({**lists, "fp8_format": "rowwise"}, *row)
    for what, (lists, *row) in ROWS.items()
    if "fp8" in lists and "fp8_format" not in lists
}
SLOW = {"FP8 rowwise", "FP8 mx", "FP8 blockwise"} | {each for each in ROWS if each.endswith(", rowwise")}
SLOW |= {"parametrized by spectral_norm", "parametrized by older spectral_norm"}
SLOW -= {"FP8 linear, rowwise"}


def result_and_gradients(function, inputs, parameters):
    given = [each.detach().clone().requires_grad_(each.requires_grad) for each in inputs]
    result = function(*given)
    result.float().square().sum().backward()
    return [result.detach(), *(each.grad for each in (*given, *parameters))]


@pytest.mark.parametrize("what", [pytest.param(each, marks=[pytest.mark.slow] * (each in SLOW)) for each in ROWS])
def test_one_graph_with_the_bits_of_eager(what):
    """Of FP8 models and FP32 logits also where the graph is for any size, and where they are checkpointed."""
    if "grouped" in what and not hasattr(torch, "_grouped_mm"):
        pytest.skip("torch has no grouped products")
    lists, make, *inputs = ROWS[what]
    found = {}
    for way in ("eager", "compiled", *["any size", "checkpoint", "reentrant checkpoint"] * (make in (mlp, WideHead))):
        torch.manual_seed(0)
        run = function = make()
        if way in ("compiled", "any size"):
            dynamic = True if way == "any size" else None
            run = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=dynamic)
        elif way != "eager":
            run = lambda x, f=function, r="reentrant" in way: checkpoint(f, x, use_reentrant=r)  # noqa: E731
        with hmpx.convert(**lists):
            parameters = function.parameters() if isinstance(function, nn.Module) else ()
            found[way] = result_and_gradients(run, inputs, parameters)
    eager = found.pop("eager")
    for way, each in found.items():
        for one, other in zip(each, eager, strict=True):
            same = one is other or (one.dtype is other.dtype and torch.equal(one.to_dense(), other.to_dense()))
            assert same, way
