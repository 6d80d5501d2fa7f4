"""Stochastic rounding: the numbers against pure Python integers, their quality, and the corners of the format."""

import numpy as np
import pytest
import torch

import hmpx
from hmpx.rounding import shared as keys_of
from hmpx.rounding import stochastic
from tests.support.numbers import drawn, key_of, special_values

KEYS = {"seed": 7, "step": 3, "name": "blocks.0.weight"}


def check(x, offset, **keys):
    """Each bit of a rounding: 16 random ones are added to a number, and its lower half goes."""
    bits = x.view(torch.int32).numpy().astype(np.int64) % 2**32
    expected = bits + drawn(len(bits), **keys, first=offset) >> 16 & 0xFFFF
    expected = np.where(bits & 0x7FFFFFFF > 0x7F800000, bits >> 16 | 0x40, expected)  # NaN
    nearest = x.bfloat16().view(torch.int16).numpy().astype(np.int64) % 2**16
    is_past = (bits & 0x7FFFFFFF > 0x7F7F0000) & (bits & 0x7FFFFFFF <= 0x7F800000)  # the largest BF16, or infinite
    expected = np.where(is_past, nearest, expected)
    found = hmpx.stochastic_round(x, offset=offset, **keys).view(torch.int16).numpy().astype(np.int64) % 2**16
    assert found.tolist() == expected.tolist(), offset


def test_every_bit_is_the_oracles():
    for offset in (0, 1, 2, 12345, 2**31 - 3, 2**32 - 5, 2**32 + 1, 5 * 2**32 - 6):
        check(torch.randn(37), offset, **KEYS)
    for seed, step, name in ((0, 0, ""), (2**64 - 1, 2**40, "ü.weight"), (1, 0, "0")):
        check(torch.randn(16), 0, seed=seed, step=step, name=name)


def test_the_published_numbers_stay():
    """The first numbers of a parameter called "weight", as literals: a change here breaks every resumed run."""
    assert keys_of.derive_key(0, 0, "weight") == key_of(0, 0, "weight") == 0xFA185ADD6E8C1FFC
    assert drawn(4, 0, 0, "weight").tolist() == [0x7850, 0xD861, 0xD277, 0xFFFC]
    x = torch.full((8,), 1.0 + 2**-9)  # a quarter of the way from 1.0 to the next BF16 number
    up = drawn(8, 0, 0, "weight") >= 0xC000
    assert (hmpx.stochastic_round(x, seed=0, step=0, name="weight") > 1).tolist() == up.tolist()


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
    x, keys = special_values(), {"seed": 0, "step": 3, "name": "w"}
    check(x, 0, **keys)
    in_eager = torch.empty_like(x, dtype=torch.bfloat16)
    stochastic.round_(in_eager, x, keys_of.derive_key(**keys), 0)
    assert torch.equal(in_eager.view(torch.int16), hmpx.stochastic_round(x, **keys).view(torch.int16))


def test_what_bf16_can_hold_stays_itself():
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    numbers = every[~every.isnan()]
    got = hmpx.stochastic_round(numbers.float(), **KEYS)
    assert torch.equal(got.view(torch.int16), numbers.view(torch.int16))


def test_numbers_out_of_range_are_refused():
    for key, values in (("seed", (-1, 2**64, 1.5)), ("step", (-1, 2**64, 1.5)), ("offset", (-2,))):
        for value in values:
            with pytest.raises(hmpx.HmpxError, match=f"{key} {value} is out of range"):
                hmpx.stochastic_round(torch.ones(2), **{**KEYS, key: value})
    with pytest.raises(hmpx.HmpxError, match="the name is 5, not a string"):
        hmpx.stochastic_round(torch.ones(2), **{**KEYS, "name": 5})


def test_other_dtypes_and_shapes_are_refused():
    with pytest.raises(hmpx.HmpxError, match="from float32 to bfloat16, not from"):
        hmpx.stochastic_round(torch.ones(2, dtype=torch.float64), **KEYS)
    with pytest.raises(hmpx.HmpxError, match="takes tensors, not list"):
        hmpx.stochastic_round([1.0], **KEYS)
    with pytest.raises(hmpx.HmpxError, match="the shapes differ"):
        hmpx.stochastic_round_(torch.empty(3, dtype=torch.bfloat16), torch.ones(2), **KEYS)


# Quality


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
    changes = {}, {"step": 4}, {"name": "blocks.1.weight"}, {"seed": 8}
    runs = [drawn(1 << 20, **{**KEYS, **each}) for each in changes]
    for numbers in runs:
        assert abs(chi_square_z(np.bincount(numbers >> 6, minlength=1024))) < 4.5
        for lag in (1, 2, 3, 64, 4096):
            pairs = (numbers[:-lag] >> 12) * 16 + (numbers[lag:] >> 12)
            assert abs(chi_square_z(np.bincount(pairs, minlength=256))) < 4.5
    for other in runs[1:]:  # the same elements at another step, in another parameter, under another seed
        pairs = (runs[0] >> 12) * 16 + (other >> 12)
        assert abs(chi_square_z(np.bincount(pairs, minlength=256))) < 4.5


def test_elements_past_the_last_one_that_has_a_number_are_refused():
    x = torch.full((5,), 1.001)
    last = hmpx.stochastic_round(x, seed=1, step=2, name="w", offset=2**64 - 5)
    assert last.shape == (5,)
    for offset in (2**64 - 4, 2**64 - 1):
        with pytest.raises(hmpx.HmpxError, match=r"offset \d+ and 5 elements reach past element 2\*\*64 - 1"):
            hmpx.stochastic_round(x, seed=1, step=2, name="w", offset=offset)
