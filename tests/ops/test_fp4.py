"""FP4: the numbers of torchao's quantizers, stochastic rounding by hmpx's counter, the Hadamard matrix, products."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import hmpx
from hmpx.base import process_state
from hmpx.insight.tensors import put_back
from hmpx.ops.policies.fp8_format import FORMATS, PRODUCTS, Format, in_parts, mixed, to_e2m1
from hmpx.rounding.shared import derive_key
from tests.support.numbers import quantize

NVFP4 = FORMATS["nvfp4"]


@pytest.fixture(autouse=True)
def _nothing_counted():
    yield
    process_state.gradients_rounded.clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_numbers_of_torchaos_quantizers(dtype):
    nvfp4 = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
    mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    kernels = pytest.importorskip("torchao.prototype.mx_formats.kernels")

    def unpacked(packed):
        return kernels.f4_unpacked_to_f32(kernels.unpack_uint4(packed))

    torch.manual_seed(0)
    for size in (1.0, 1e-5, 1e9):
        x = (size * torch.randn(150, 96) * torch.logspace(-6, 3, 96)).to(dtype)
        of_tensor = nvfp4.per_tensor_amax_to_scale(x.abs().amax())
        its_scale, its_codes = nvfp4.nvfp4_quantize(x, 16, of_tensor)
        codes, scale, whole = in_parts(x, "e2m1", NVFP4, -1, "nvfp4")
        assert torch.equal(codes.float(), unpacked(its_codes)) and torch.equal(whole, of_tensor)
        assert torch.equal(scale[:, ::16], its_scale.float().view(150, -1))
        for mode, rceil in ((mx.ScaleCalculationMode.FLOOR, False), (mx.ScaleCalculationMode.RCEIL, True)):
            its_scale, its_codes = mx.to_mx(x, torch.float4_e2m1fn_x2, 32, mode)
            codes, scale = quantize(x, "e2m1", Format("mx", "e2m1", "e2m1", rceil=rceil), -1, "mx")
            assert torch.equal(codes.float(), unpacked(its_codes)) and torch.equal(scale[:, ::32], its_scale.float())


# ---------------------------------------------------------------------------------------------------------------------
# Stochastic rounding


def test_stochastic_rounding_is_unbiased():
    """The mean of 10^6 roundings of a number lies within four sigma of it; only its two neighbours come."""
    neighbours = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    for at, number in enumerate((1e-3, 0.1, 0.7, 1.125, 1.75, 2.25, 3.9, 5.0, -0.3, -4.5)):
        rounded = to_e2m1(torch.full((1000, 1000), number), f"of number {at}").double()
        below = max(each for each in neighbours if each <= abs(number))
        above = min(each for each in neighbours if each >= abs(number))
        assert set(rounded.abs().unique().tolist()) <= {below, above}
        part = (abs(number) - below) / (above - below)
        sigma = (above - below) * math.sqrt(part * (1 - part) / rounded.numel())
        assert abs(rounded.mean() - number) < 4 * sigma, number
    exact = torch.tensor([sign * each for each in neighbours for sign in (1, -1)])
    assert torch.equal(to_e2m1(exact, "exact"), exact)


def test_the_random_numbers_are_those_of_stochastic_round():
    """By seed 0, the count of calls, the name and the index: a half step's part against the lower bits of an FP32."""
    parts = torch.randint(1, 2**16, (300, 70), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    for step in range(2):
        rounded = to_e2m1(parts / 2**17, "my gradient")
        ones = (parts + 0x3F800000).view(torch.float32)
        wanted = hmpx.stochastic_round(ones, seed=0, step=step, name="my gradient, 70 columns") > 1
        assert torch.equal(rounded > 0, wanted) and 0.4 < wanted.double().mean() < 0.6


def small() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)), torch.randn(8, 32, requires_grad=True)


def gradients(model: nn.Module, run, x: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(run(x).float().square().sum(), [x, *model.parameters()]))


def test_each_step_has_numbers_of_its_own_compiled_and_checkpointed_too():
    model, x = small()
    found = {}
    for name, run in {
        "plain": lambda: model,
        "again": lambda: model,
        "reentrant": lambda: lambda x: checkpoint(model, x, use_reentrant=True),
        "not reentrant": lambda: lambda x: checkpoint(model, x, use_reentrant=False),
        "compiled": lambda: torch.compile(model, backend="aot_eager", fullgraph=True),
    }.items():
        with hmpx.convert(fp8=["linear"], fp8_format="nvfp4"):
            called = run()
            if name == "reentrant":  # which takes no `torch.autograd.grad`
                steps = []
                for _ in range(2):
                    called(x).float().square().sum().backward()
                    steps.append([each.grad for each in (x, *model.parameters())])
                    x.grad = None
                    model.zero_grad()
                found[name] = steps
            else:
                found[name] = [gradients(model, called, x) for _ in range(2)]
    first, second = found.pop("plain")
    assert not any(map(torch.equal, first[:2], second[:2]))
    for name, (once, twice) in found.items():
        assert all(map(torch.equal, once, first)) and all(map(torch.equal, twice, second)), name


def test_runs_of_the_laboratory_leave_the_counts():
    model, x = small()
    with hmpx.convert(fp8=["linear"], fp8_format="nvfp4"):
        first, second = (gradients(model, model, x) for _ in range(2))
    with hmpx.convert(fp8=["linear"], fp8_format="nvfp4"):
        with put_back(model):
            assert all(map(torch.equal, gradients(model, model, x), first))
        assert all(map(torch.equal, gradients(model, model, x), first))
        batches = [(torch.randn(8, 32),) for _ in range(2)]
        hmpx.compare(model, batches, lambda model, x: model(x).float().square().mean(), progress=False)
        assert all(map(torch.equal, gradients(model, model, x), second))


def test_the_mean_of_the_gradients_of_many_draws_is_that_of_unrounded_ones():
    """Which the nearest numbers are not: what differs between a gradient and its numbers is the same in every step."""
    torch.manual_seed(0)
    x, w = torch.randn(32, 64), torch.randn(48, 64)
    g = (torch.randn(32, 48) + 0.1).bfloat16()
    errors = {}
    for stochastic in (True, False):
        form = {**NVFP4.keys(), "stochastic": stochastic, "hadamard": False, "products": ["weight_gradient"]}
        w.requires_grad_()
        with hmpx.convert(fp8=["linear"], fp8_format=form):
            drawn = [torch.autograd.grad(F.linear(x, w), w, g)[0].double() for _ in range(300)]
        codes, scale = quantize(x.bfloat16(), "e2m1", NVFP4, -2, "nvfp4")
        exact = g.double().T @ (codes.double() * scale.double())
        errors[stochastic] = float((sum(drawn) / len(drawn) - exact).norm() / exact.norm())
        single = float((drawn[0] - exact).norm() / exact.norm())
    assert errors[True] < 0.15 * single < 0.15 * 0.2 and errors[False] == pytest.approx(single)


# ---------------------------------------------------------------------------------------------------------------------
# The Hadamard matrix, and the products


def test_the_hadamard_matrix_is_orthogonal_has_random_signs_and_leaves_products_as_they_are():
    matrix = mixed(torch.eye(16), -2).double()
    assert torch.equal(matrix.abs(), torch.full((16, 16), 0.25).double())
    assert torch.equal(matrix.T @ matrix, torch.eye(16).double())
    signs = [derive_key(0, 0, "hadamard") >> i & 1 for i in range(16)]
    assert [bool(each) for each in signs] == (matrix[0] < 0).tolist()  # of its first row, which is 1/4 without them
    a, b = torch.randn(3, 40, 32), torch.randn(3, 40, 16)
    mixed_a, mixed_b = mixed(a, -2), mixed(b, -2)
    assert mixed_a.shape == (3, 48, 32)
    torch.testing.assert_close(mixed_a.mT @ mixed_b, a.mT @ b)
    outlier = torch.zeros(16, 1)
    outlier[3] = 100.0
    assert torch.equal(mixed(outlier, -2).abs(), torch.full((16, 1), 25.0))


def test_three_products_beside_fp64():
    """Output and both gradients of a recipe with all it has lie within half a last place of the codes' FP64 product."""
    torch.manual_seed(0)
    x, w, g = torch.randn(40, 64).bfloat16(), torch.randn(48, 64).bfloat16(), torch.randn(40, 48).bfloat16()
    x[5] *= 100

    def decoded(t, dim, weight=False, site=""):
        codes, scale = quantize(t, "e2m1", NVFP4, dim, "nvfp4", weight, site)
        return codes.double() * scale.double()

    x.requires_grad_(), w.requires_grad_()
    with hmpx.convert(fp8=["linear"], fp8_format="nvfp4"):
        y = F.linear(x, w)
        found = y, *torch.autograd.grad(y, (x, w), g)
    x, w = x.detach(), w.detach()
    with hmpx.convert():  # counts from the beginning
        of_input = decoded(g, -1, site="gradient of the input") @ decoded(w, -2, weight=True)
        of_weight = decoded(mixed(g, -2), -2, site="gradient of the weight").T @ decoded(mixed(x, -2), -2)
    wanted = decoded(x, -1) @ decoded(w.T, -2, weight=True), of_input, of_weight
    for name, ours, exact in zip(PRODUCTS, found, wanted, strict=True):
        half_a_place = torch.exp2(exact.abs().log2().floor() - 8)
        assert ((ours.double() - exact).abs() <= half_a_place + 1e-5 * exact.abs().max()).all(), name


# ---------------------------------------------------------------------------------------------------------------------
# What is seen


def test_record_counts_by_block():
    """Of two blocks in the first row one is too small beside the largest of the tensor, and becomes zero."""
    x = torch.zeros(16, 32)
    x[0, :16], x[0, 16:], x[1, 0] = 2**-9, 1.0, 2.0**14  # scales of blocks reach from 2^-6 to 448, and x[1, 0] is there
    with hmpx.convert(fp8=["linear"], fp8_format="nvfp4"), hmpx.record() as log:
        F.linear(x, torch.eye(32))
    (site,) = (site for site in log.sites if site.op == "linear")
    wanted = {"largest": 2.0**14, "elements": 512.0, "underflowed": 16.0, "saturated": 0.0}
    blocks = {"blocks": 32.0, "blocks_underflowed": 1.0, "blocks_saturated": 0.0}
    assert site.fp8["inputs"] == wanted | blocks and site.fp8["weights"]["blocks"] == 4
    assert "inputs up to 1.6e+04, 3.1 % underflowed, 3.1 % of blocks as a whole" in str(log)
    x = torch.full((16, 32), 7.5)  # beyond 6, and the exponent of 7.5 is that of 4
    with hmpx.convert(fp8=["linear"], fp8_format="mxfp4"), hmpx.record() as log:
        F.linear(x, torch.eye(32))
    (site,) = (site for site in log.sites if site.op == "linear")
    assert site.fp8["inputs"]["saturated"] == 512 and site.fp8["inputs"]["blocks_saturated"] == 16


def test_compare_and_tune():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 16))
    batches = [(torch.randn(64, 16), torch.randint(16, (64,))) for _ in range(6)]

    def loss(model, x, y):
        return F.cross_entropy(model(x).float(), y)

    def compared(form):
        return hmpx.compare(model, batches, loss, lists={"fp8": ["linear"], "fp8_format": form}).gradient_error

    errors = [compared(form) for form in ("tensorwise", "nvfp4", "nvfp4")]
    assert 2 * errors[0] < errors[1] == errors[2] < 1  # the same numbers are drawn again
    tuned = hmpx.tune(model, batches, loss, low="nvfp4", tolerance=0.15, progress=False)
    assert tuned.met and 0 < tuned.share < 1 and tuned.recipe.policy().fp8_format == NVFP4
    assert "of the product FLOPs run in FP4" in str(tuned)
    assert {choice.dtype for choice in tuned.choices if choice.name == "linear"} == {"float4", "bfloat16"}
