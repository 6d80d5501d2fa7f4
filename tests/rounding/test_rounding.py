"""Stochastic rounding: the numbers against pure Python integers, their quality, and the corners of the format."""

import hashlib
import struct

import numpy as np
import pytest
import torch

import hmpx
from hmpx.rounding import shared as keys_of
from hmpx.rounding import stochastic
from tests.support.numbers import special_values

KEYS = {"seed": 7, "step": 3, "name": "blocks.0.weight"}


# The oracle, written from the specification in Python integers: nothing shared with the kernel.


def oracle_key(seed, step, name, high):
    def link(value):
        value = (value + 0x9E3779B97F4A7C15) % 2**64
        value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        value = (value ^ value >> 27) * 0x94D049BB133111EB % 2**64
        return value ^ value >> 31

    identity = struct.unpack("<Q", hashlib.blake2b(name.encode(), digest_size=8).digest())[0]
    key = link(seed)
    for value in (step, identity, high):
        key = link(key ^ value)
    return key


def oracle_random(element, seed, step, name):
    key = oracle_key(seed, step, name, element >> 32)
    low, high = key % 2**32, key >> 32
    h = ((element % 2**32 >> 1) * 0x9E3779B9 + low) % 2**32
    h ^= h >> 16
    h = h * 0x21F0AAAD % 2**32
    h ^= h >> 15
    h ^= high
    h = h * 0x735A2D97 % 2**32
    h ^= h >> 15
    return h >> 16 if element % 2 else h % 2**16


def oracle(bits, element, seed, step, name):
    """The 16 result bits for 32 input bits; None stands for "round to nearest"."""
    if bits & 0x7FFFFFFF > 0x7F800000:  # NaN
        return bits >> 16 | 0x40
    if bits & 0x7FFFFFFF > 0x7F7F0000:  # past the largest BF16, or infinite
        return None
    return (bits + oracle_random(element, seed, step, name) >> 16) & 0xFFFF


def bits_of(x):
    return [int(b) & 0xFFFFFFFF for b in x.view(torch.int32).tolist()]


def check(x, offset, **keys):
    got = hmpx.stochastic_round(x, offset=offset, **keys).view(torch.int16).tolist()
    nearest = x.bfloat16().view(torch.int16).tolist()
    for i, bits in enumerate(bits_of(x)):
        expected = oracle(bits, offset + i, **keys)
        assert got[i] & 0xFFFF == (nearest[i] & 0xFFFF if expected is None else expected), (i, hex(bits))


def test_every_bit_is_the_oracles():
    for offset in (0, 1, 2, 12345, 2**31 - 3, 2**32 - 5, 2**32 + 1, 5 * 2**32 - 6):
        check(torch.randn(37), offset, **KEYS)
    for seed, step, name in ((0, 0, ""), (2**64 - 1, 2**40, "ü.weight"), (1, 0, "0")):
        check(torch.randn(16), 0, seed=seed, step=step, name=name)


def test_the_published_numbers_stay():
    """The first numbers of a parameter called "weight", as literals: a change here breaks every resumed run."""
    assert keys_of.derive_key(0, 0, "weight") == oracle_key(0, 0, "weight", 0) == 0xFA185ADD6E8C1FFC
    assert [oracle_random(i, 0, 0, "weight") for i in range(4)] == [0x7850, 0xD861, 0xD277, 0xFFFC]
    x = torch.full((8,), 1.0 + 2**-9)  # a quarter of the way from 1.0 to the next BF16 number
    up = [int(oracle_random(i, 0, 0, "weight") >= 0xC000) for i in range(8)]
    assert [int(v > 1) for v in hmpx.stochastic_round(x, seed=0, step=0, name="weight").tolist()] == up


def test_any_cut_of_a_parameter_gives_the_same_bits():
    x = torch.randn(2 * 32768 + 77)
    whole = hmpx.stochastic_round(x, **KEYS)
    for cut in (1, 2, 3, 1000, 32767, 32768, 32769, 65535):
        parts = [hmpx.stochastic_round(part, offset=o, **KEYS) for part, o in ((x[:cut], 0), (x[cut:], cut))]
        assert torch.equal(torch.cat(parts), whole), cut


def test_shapes_strides_and_in_place():
    x = torch.randn(6, 10)
    expected = hmpx.stochastic_round(x.reshape(-1), **KEYS).view(6, 10)
    assert torch.equal(hmpx.stochastic_round(x, **KEYS), expected)
    assert torch.equal(hmpx.stochastic_round(x.t().contiguous().t(), **KEYS), expected)
    out = torch.empty(10, 6, dtype=torch.bfloat16).t()
    assert hmpx.stochastic_round_(out, x, **KEYS) is out and torch.equal(out, expected)
    assert hmpx.stochastic_round(torch.randn(0, 3), **KEYS).shape == (0, 3)
    assert hmpx.stochastic_round(torch.tensor(1.5), **KEYS) == 1.5


def test_special_values():
    x, step = special_values(), 3
    got = hmpx.stochastic_round(x, seed=0, step=step, name="w")
    assert torch.equal(got.isnan(), x.isnan())
    past = x.abs() > torch.finfo(torch.bfloat16).max
    assert torch.equal(got[past & ~x.isnan()], x.bfloat16()[past & ~x.isnan()])
    in_eager = torch.empty_like(got)
    stochastic.round_(in_eager, x, keys_of.derive_key(0, step, "w"), 0)
    assert torch.equal(in_eager.isnan(), x.isnan()) and torch.equal(in_eager.nan_to_num(7.0), got.nan_to_num(7.0))
    finite = x.isfinite() & ~past
    for value, rounded in zip(x[finite].tolist(), got[finite].tolist(), strict=True):
        assert abs(rounded) <= torch.finfo(torch.bfloat16).max and (value == 0 or rounded * value >= 0)
    assert got[1].view(torch.int16).item() == -32768  # -0 stays -0
    check(x, 0, seed=0, step=step, name="w")


def test_what_bf16_can_hold_stays_itself():
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    numbers = every[~every.isnan()]
    got = hmpx.stochastic_round(numbers.float(), **KEYS)
    assert torch.equal(got.view(torch.int16), numbers.view(torch.int16))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"seed": -1}, "seed -1 is out of range"),
        ({"seed": 2**64}, "out of range"),
        ({"seed": 1.5}, "out of range"),
        ({"step": -1}, "step -1 is out of range"),
        ({"step": 2**64}, "step 18446744073709551616 is out of range"),
        ({"step": 1.5}, "step 1.5 is out of range"),
        ({"offset": -2}, "offset -2 is out of range"),
        ({"name": 5}, "the name is 5, not a string"),
    ],
)
def test_numbers_out_of_range_are_refused(change, message):
    with pytest.raises(hmpx.HmpxError, match=message):
        hmpx.stochastic_round(torch.ones(2), **{**KEYS, **change})


def test_other_dtypes_and_shapes_are_refused():
    with pytest.raises(hmpx.HmpxError, match="from float32 to bfloat16, not from"):
        hmpx.stochastic_round(torch.ones(2, dtype=torch.float64), **KEYS)
    with pytest.raises(hmpx.HmpxError, match="takes tensors, not list"):
        hmpx.stochastic_round([1.0], **KEYS)
    with pytest.raises(hmpx.HmpxError, match="the shapes differ"):
        hmpx.stochastic_round_(torch.empty(3, dtype=torch.bfloat16), torch.ones(2), **KEYS)


def test_an_average_of_weights_in_bf16_moves_only_with_stochastic_rounding():
    """An EMA with decay 0.999 moves by a thousandth of the distance: less than half a unit in BF16's last place."""
    weights, steps = torch.full((4096,), 2.0), 2000
    nearest, stochastic = (torch.ones(4096, dtype=torch.bfloat16) for _ in range(2))
    for step in range(steps):
        nearest.copy_(nearest.float().lerp(weights, 1e-3))
        hmpx.stochastic_round_(stochastic, stochastic.float().lerp(weights, 1e-3), seed=0, step=step, name="ema.w")
    exact = 2 - 0.999**steps
    assert (nearest == 1).all() and abs(stochastic.float().mean() - exact) < 1e-3


# Quality


def draws(count=1 << 20, **changes):
    """The 16-bit numbers of a run of elements, in NumPy; a test below holds this twin against the kernel."""
    keys = {**KEYS, **changes}
    key = keys_of.derive_key(**keys)
    i = np.arange(count, dtype=np.uint64)
    with np.errstate(over="ignore"):
        h = ((i >> 1).astype(np.uint32) * np.uint32(0x9E3779B9)) + np.uint32(key & 0xFFFFFFFF)
        h ^= h >> 16
        h *= np.uint32(0x21F0AAAD)
        h ^= h >> 15
        h ^= np.uint32(key >> 32)
        h *= np.uint32(0x735A2D97)
        h ^= h >> 15
    return np.where(i & 1, h >> 16, h & 0xFFFF).astype(np.uint16)


def chi_square_z(counts):
    expected = counts.sum() / counts.size
    freedom = counts.size - 1
    return (((counts - expected) ** 2 / expected).sum() - freedom) / np.sqrt(2 * freedom)


@pytest.mark.slow
def test_the_rounding_is_unbiased():
    """Mean error of 2^20 rounded numbers, in units of its own standard error."""
    x = torch.rand(1 << 20) + 1
    for step in range(4):
        error = (hmpx.stochastic_round(x, seed=1, step=step, name="w").double() - x.double()) * 2**7
        assert abs(error.mean() / (error.std() / 2**10)) < 4


@pytest.mark.slow
def test_numbers_are_uniform_and_neighbours_independent():
    runs = [draws(), draws(step=4), draws(name="blocks.1.weight"), draws(seed=8)]
    for numbers in runs:
        assert abs(chi_square_z(np.bincount(numbers >> 6, minlength=1024))) < 4.5
        for lag in (1, 2, 3, 64, 4096):
            pairs = (numbers[:-lag] >> 12).astype(int) * 16 + (numbers[lag:] >> 12)
            assert abs(chi_square_z(np.bincount(pairs, minlength=256))) < 4.5
    for other in runs[1:]:  # the same elements at another step, in another parameter, under another seed
        pairs = (runs[0] >> 12).astype(int) * 16 + (other >> 12)
        assert abs(chi_square_z(np.bincount(pairs, minlength=256))) < 4.5


@pytest.mark.slow
def test_the_numpy_twin_of_the_quality_tests_is_the_kernel():
    numbers = draws(70000)
    x = torch.full((70000,), 1.0) + torch.rand(70000)
    fraction = np.array([b & 0xFFFF for b in bits_of(x)])
    up = hmpx.stochastic_round(x, **KEYS).float().numpy() > x.numpy()
    assert np.array_equal(up, (fraction + numbers >= 0x10000))


def test_elements_past_the_last_one_that_has_a_number_are_refused():
    x = torch.full((5,), 1.001)
    last = hmpx.stochastic_round(x, seed=1, step=2, name="w", offset=2**64 - 5)
    assert last.shape == (5,)
    for offset in (2**64 - 4, 2**64 - 1):
        with pytest.raises(hmpx.HmpxError, match=r"offset \d+ and 5 elements reach past element 2\*\*64 - 1"):
            hmpx.stochastic_round(x, seed=1, step=2, name="w", offset=offset)
