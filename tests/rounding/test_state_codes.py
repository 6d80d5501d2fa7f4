"""State in codes: every code and scale against an oracle, the mean, the corners, parts of a tensor, torchao."""

import itertools
import math

import pytest
import torch

from hmpx.rounding import native
from hmpx.rounding.coding import BlockLayout
from hmpx.rounding.native import StoredTensor
from hmpx.rounding.shared import Span
from hmpx.rounding.state_codes import STATE_CODES
from hmpx.rounding.stochastic import join, split
from hmpx.updates.holding.held import HeldCodes, RoundingKey, Segment
from hmpx.updates.holding.sharding import Box
from tests.support.numbers import drawn, special_values, spread
from tests.support.oracle import to_24_bits
from tests.support.state_codes import beside_the_finest_steps, in_code, meanings, read, row_length


@pytest.fixture(params=["C", "eager"], autouse=True)
def kernel(request, monkeypatch):
    if request.param == "eager":
        monkeypatch.setattr(native, "can_read", lambda *tensors: False)
    elif native.library() is None:
        pytest.skip("no C kernels")


KEY = {"seed": 7, "step": 3}
SHAPES = [(5,), (300,), (128,), (3, 128), (5, 300), (40, 9), (8, 4, 3, 3), (2, 3, 130), (7, 1), (0,), (3, 0), (1, 1000)]


def shapes_of(code):
    """Two elements of 4 bits share a byte."""
    return [shape for shape in SHAPES if row_length(shape) % STATE_CODES[code].per_byte == 0]


def written(x, code="8bit", **key):
    held = HeldCodes.new(STATE_CODES[code], x)
    held.write(Segment(torch.nn.Parameter(x.bfloat16()), "w"), x, "w.exp_avg", RoundingKey(**(key or KEY)))
    return held


def check(x, code="8bit", **key):
    held, (values, codes, scales) = written(x, code, **key), in_code(x, code, **(key or KEY), name="w.exp_avg")
    assert torch.equal(held.tensor, codes)
    assert torch.equal(held.scales.double().view(-1).nan_to_num(nan=5e37), scales.nan_to_num(nan=5e37))
    assert torch.equal(held.whole().nan_to_num(nan=5e37), values.nan_to_num(nan=5e37))
    assert torch.equal(read(held.entries("m"), "m", x.shape).nan_to_num(nan=5e37), values.nan_to_num(nan=5e37))
    return held


of_every_code = pytest.mark.parametrize("code", STATE_CODES)


@pytest.mark.parametrize("code, shape", [(code, shape) for code in STATE_CODES for shape in shapes_of(code)], ids=str)
@torch.no_grad()
def test_every_code_and_scale_is_the_oracles(shape, code):
    """Signed, nowhere negative, and all above 0."""
    for seed in range(4):
        check(spread(shape, seed), code, seed=seed, step=seed + 1)
        check(spread(shape, seed).square() + 1e-3, code, seed=seed, step=seed + 1)


@of_every_code
@torch.no_grad()
def test_special_values_do_not_become_numbers(code):
    """In 8 bits they stay what they are, but where a code has no inf; in 4 bits the block is NaN."""
    x = special_values().repeat(2)
    seen = check(x, code).whole()
    has_inf = math.inf in meanings(True, code)
    unlike = torch.ones_like(x, dtype=torch.bool) if code == "4bit" else x.isnan() if has_inf else ~x.isfinite()
    assert torch.equal(seen.isnan(), unlike) and torch.equal(seen.isinf(), x.isinf() & has_inf)
    check(x.abs().nan_to_num(nan=1e-40)[x.abs() < 1e-30], code)  # a block of numbers below the normal range
    for value in (0.0, math.inf, math.nan, -math.inf, 1.0, -1.8125, 1.85 * 2.0**126, 3.4e38, -3.4e38, -1e-45):
        check(torch.full((130,), value), code)
    assert not written(torch.zeros(3, 200), code).whole().any()


@pytest.mark.parametrize(
    "code, value",
    [
        *(("8bit", value) for value in (4e-6, 0.013, 0.7, -1e-7, -2e-4, -0.3)),
        *(("fp8", value) for value in (3e-4, 0.7, -1e-7, -0.3)),
        *(("4bit", value) for value in (0.07, 0.99, -1e-4, -0.3, -0.93)),
    ],
)
@torch.no_grad()
def test_the_mean_is_kept_and_of_signed_blocks_below_the_least_number_too(code, value):
    """Beside a 1 in its block, in many steps."""
    x = torch.full((100, 128), value)
    x[:, 0] = 1.0
    found = torch.stack([written(x, code, seed=0, step=step).whole() for step in range(80)]).double()
    for part, mean in ((found[..., 1:], value), (found[..., 0], 1.0)):
        spacing = (part.max() - part.min()).item()
        noise = math.sqrt(abs(mean) * spacing / part.numel())  # at most, of a rounding between two neighbours
        assert abs(part.mean().item() - mean) < 4 * noise + abs(mean) * 2e-5


@pytest.mark.parametrize("signed", [False, True])
@torch.no_grad()
def test_below_the_least_exponent_numbers_are_rounded_to_the_finest_step_ties_to_even(signed):
    x, codes = beside_the_finest_steps(signed, torch.from_numpy(drawn(128, **KEY, name="w.exp_avg")))
    assert torch.equal(check(x).tensor[1:], codes[1:])


@torch.no_grad()
def test_torchao_reads_the_same_numbers_from_the_same_codes_and_scales():
    """Its 4 bits, signed and not, and its FP8, a block a row; it computes them in FP32, too."""
    four, fp8 = pytest.importorskip("torchao.optim.subclass_4bit"), pytest.importorskip("torchao.optim.subclass_fp8")
    maps = {True: four.get_qmap_signed(), False: four.get_qmap_unsigned()}
    for signed, meant in maps.items():
        x = torch.randn(64, 256, generator=torch.Generator().manual_seed(1))
        held = written(x if signed else x.square() + 1e-6, "4bit")
        assert held.tensor.shape == (64, 128) and bool((held.scales < 0).all()) is signed
        scales = held.scales.float().abs().view(-1)
        theirs = four.OptimState4bit(held.tensor.view(-1), scales, torch.tensor(meant), signed, x.shape)
        assert torch.equal(theirs.dequantize(), held.whole())
        held = written(x if signed else x.square(), "fp8")
        codes = held.tensor.view(torch.float8_e4m3fn).view(-1)
        assert torch.equal(
            fp8.OptimStateFp8(codes, held.scales.float().abs().view(-1)).dequantize().view(64, 256), held.whole()
        )


def test_blocks_lie_in_rows():
    code = STATE_CODES["8bit"]
    for shape in SHAPES:
        assert BlockLayout.of(shape).row == row_length(shape)
    for shape, scales in (
        ((64, 256, 1, 1), (64, 2)),  # a convolution of one pixel
        ((8, 64, 256), (8, 64, 2)),  # experts, each of them a matrix
        ((1000, 8), (1000, 1)),
    ):
        assert BlockLayout.of(shape).shapes(code, shape) == (shape, scales)
    assert BlockLayout.of((64, 8, 3, 3)).shapes(STATE_CODES["4bit"], (16, 8, 3, 3)) == ((16, 36), (16, 1))


def both(kernel, arguments, monkeypatch):
    """What a kernel makes of the same arguments in C and in eager torch; `arguments` makes them anew."""
    found = []
    for can_read in (native.can_read, lambda *tensors: False):
        with monkeypatch.context() as patch:
            patch.setattr(native, "can_read", can_read)
            made = arguments()
            kernel(*made)
            flat = [part for each in made for part in (each if isinstance(each, StoredTensor) else (each,))]
            found.append([each for each in flat if isinstance(each, torch.Tensor)])
    return found


@of_every_code
def test_the_c_kernels_have_the_bits_of_the_eager_ones(code, kernel, monkeypatch):
    """Rows of any length, of a parameter of nearly 2^32 elements."""
    if native.can_read(torch.zeros(1)) is False:
        return  # nothing to compare
    coder = STATE_CODES[code]
    for i, (row, count) in enumerate(itertools.product((1, 5, 127, 128, 129, 250, 256, 300), (1, 7))):
        row += row % 2 if code == "4bit" else 0  # two elements share a byte
        x = spread((row * count,), i)
        special = special_values()[: len(x)]
        x[: len(special)] = special if i % 5 == 0 else x[: len(special)]
        begin = 2**32 - count * (row + 9) - 9 if i % 2 else i
        spans, keys = [Span(0, len(x), begin + i % 7, row, row + i % 9)], (1, 2, "w")

        def coded(x=x, row=row, count=count, spans=spans, keys=keys):
            codes = torch.empty(len(x) // coder.per_byte, dtype=torch.uint8)
            scales = torch.ones(count * -(-row // 128)).bfloat16()
            return StoredTensor(codes, coder.kind, beside=scales, row=row), x, spans, keys

        (codes, scales, _), (eager_codes, eager_scales, _) = both(coder.encode, coded, monkeypatch)
        assert torch.equal(codes, eager_codes), (row, count)
        assert torch.equal(*(each.float().nan_to_num(nan=3e30) for each in (scales, eager_scales))), (row, count)
        held = StoredTensor(codes, coder.kind, beside=scales, row=row)
        seen = both(coder.decode, lambda held=held, x=x: (torch.empty(len(x)), held), monkeypatch)
        assert torch.equal(*(each[0].nan_to_num(nan=3e30) for each in seen))


@of_every_code
@torch.no_grad()
def test_a_part_of_some_rows_has_the_codes_of_the_whole(code):
    """Rows 2 to 4, of a tensor of two dimensions, and of one of three that is cut along the second."""
    for whole, part in ((spread((6, 300)), (slice(2, 5),)), (spread((4, 6, 300)), (slice(None), slice(2, 5)))):
        held, x = written(whole, code), whole[part].contiguous()
        box = Box.cut(whole.shape, x.shape, (0,) * (whole.dim() - 2) + (2, 0))
        own = HeldCodes.new(STATE_CODES[code], x)
        own.write(Segment(torch.nn.Parameter(x.bfloat16()), "w", box), x, "w.exp_avg", RoundingKey(**KEY))
        assert torch.equal(own.tensor, held.tensor[part]) and torch.equal(own.scales, held.scales[part])


@torch.no_grad()
def test_numbers_of_24_bits_are_the_oracles():
    for x in (spread((1000,)), special_values(), special_values().repeat_interleave(256)):  # blocks of one number
        upper, lower, out = torch.empty(len(x)).bfloat16(), torch.empty(len(x), dtype=torch.int8), torch.empty(len(x))
        split(x, upper, lower, [Span(0, len(x), 0, len(x), 0)], (7, 3, "w"))
        join(upper, lower, out)
        expected = to_24_bits(x, seed=7, step=3, name="w")
        assert torch.equal(out.nan_to_num(nan=3e30), expected.nan_to_num(nan=3e30))
        assert torch.equal(out.isnan(), x.isnan()) and torch.equal(out.isinf(), x.isinf())


@torch.no_grad()
@pytest.mark.parametrize("width, stride", [(40, 0), (10, 2**31)])
def test_the_elements_after_the_first_2_32_have_numbers_of_their_own(width, stride):
    """Each element as it is alone."""
    x, begin, keys = spread((40,)) + 1, 2**32 - 3 * stride // 2 - 20, (7, 3, "w")

    def halved(x, *spans):
        upper, lower = torch.empty(len(x)).bfloat16(), torch.empty(len(x), dtype=torch.int8)
        split(x, upper, lower, [Span(*span) for span in spans], keys)
        return upper, lower

    together = halved(x, (0, 40, begin, width, stride))
    alone = [halved(x[i : i + 1], (0, 1, begin + i // width * stride + i % width, 1, 0)) for i in range(40)]
    for found, apart in zip(together, zip(*alone, strict=True), strict=True):
        assert torch.equal(found, torch.cat(apart))
