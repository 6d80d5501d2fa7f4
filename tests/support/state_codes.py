"""State in codes, worked out another way: from a list of all numbers that a code has, without their bits."""

import math

import numpy as np
import torch

from tests.support.numbers import drawn

BLOCK = 128
PREFIXES = {"8bit": "hmpx_codes_", "fp8": "hmpx_fp8_", "4bit": "hmpx_4bit_"}
OF_TORCH = {"fp8": torch.float8_e4m3fn}  # codes that have the numbers of a dtype
SCALES = "hmpx_scales_"


def held_as(code, shape):
    """The code of a state tensor of this shape; None where it is in BF16. In rows of an odd length, two of 4 bits
    cannot share each byte."""
    if len(shape) < 2 or math.prod(shape) == 1:
        return None
    return "8bit" if code == "4bit" and row_length(shape) % 2 else code


def magnitudes(signed, code):
    """Those of a code of 8 bits in the order of its codes, for a scale of 1."""
    if code in OF_TORCH:
        return torch.arange(128, dtype=torch.uint8).view(OF_TORCH[code]).double().numpy()
    top = 7 if signed else 15
    numbers = [m / 16 * 2.0 ** (1 - top) for m in range(16)]
    numbers += [(1 + m / 16) * 2.0 ** (e - top) for e in range(1, top + 1) for m in range(16)]
    return np.array([*numbers[:-2], np.inf, np.nan])


def grid_of_4_bits(signed):
    """Sixteenths; or dynamic exponents (Li et al., 2023): of the i-th, the middles of 2^i parts of [.1, 1]."""
    if not signed:
        return ((np.arange(16) + 1) / 16).astype(np.float32)
    middles = []
    for i in range(3):
        ends = torch.linspace(0.1, 1, 2**i + 1)
        middles += ((ends[:-1] + ends[1:]) / 2).double().mul(10.0 ** (i - 2)).tolist()
    return np.array([*(-m for m in reversed(middles)), 0.0, *middles, 1.0], np.float32)


def meanings(signed, code):
    """What each code means, for a scale of 1."""
    if code == "4bit":
        return grid_of_4_bits(signed)
    found = magnitudes(signed, code)
    return np.concatenate([found, -found]) if signed or code in OF_TORCH else found


def row_length(shape):
    """A row is the last dimension, with those before it, but not the first, as long as it is shorter than a block."""
    length, rest = (shape[-1], list(shape[1:-1])) if shape else (1, [])
    while rest and length < BLOCK:
        length *= rest.pop()
    return length


def in_code(x, code="8bit", *, seed, step, name):
    """What FP32 `x` is after it was held in a code, the codes, and the scales in the order of their blocks."""
    values, r = x.double().contiguous().view(-1).numpy(), drawn(x.numel(), seed, step, name)
    row, held, codes, scales = row_length(x.shape), np.empty_like(values), np.empty(len(values), np.uint8), []
    for begin in range(0, len(values), row or 1):
        for at in range(begin, begin + row, BLOCK):
            here = slice(at, min(at + BLOCK, begin + row))
            found = _block_of_4_bits(values[here], r[here]) if code == "4bit" else _block(values[here], r[here], code)
            held[here], codes[here], scale = found
            scales.append(scale)
    shaped = torch.from_numpy(held).float().view(x.shape)
    return shaped, _packed(torch.from_numpy(codes), x.shape, code), torch.tensor(scales, dtype=torch.float64)


def _packed(codes, shape, code):
    """Two of 4 bits in a byte."""
    row, outer = row_length(shape), len(shape) - 1
    if code != "4bit":
        return codes.view(shape)
    while math.prod(shape[outer:]) != row:
        outer -= 1
    return (codes[::2] * 16 + codes[1::2]).view(*shape[:outer], row // 2)


def _block(x, r, name):
    finite, signed = np.abs(x[np.isfinite(x)]), bool((x < 0).any())
    most, code = max(finite, default=0.0), magnitudes(signed, name)
    code, has_inf = code[np.isfinite(code)], bool(np.isinf(code).any())
    spacing = torch.finfo(OF_TORCH[name]).eps if name in OF_TORCH else 1 / 16
    finest = round(2**23 * spacing)  # steps between two codes, 2^16 of them random
    exponent = math.ceil(math.log2(most / code[-1])) if most > 0 else -126
    scale = 2.0 ** min(max(exponent, -126), 126, 127 - math.floor(math.log2(code[-1])))
    held, codes = x.copy(), np.zeros(len(x), np.uint8)
    for i, value in enumerate(x):
        sign = 128 if value < 0 else 0
        if not math.isfinite(value):
            codes[i] = sign + len(code) + (has_inf and math.isnan(value))
            held[i] = value if has_inf else math.nan
            continue
        y = abs(value) / scale
        below = int(np.searchsorted(code, y, side="right")) - 1
        if below < len(code) - 1:
            part = (y - code[below]) / (code[below + 1] - code[below])
            below += round(part * finest) + finest // 2**16 * int(r[i]) + finest // 2**17 >= finest
        if value > 0 and not signed:
            below = max(below, 1)
        codes[i], held[i] = sign + below, math.copysign(code[below], value) * scale
    return held, codes, -scale if signed else scale


def _block_of_4_bits(x, r):
    """Steps that round are done in FP32, as they are specified."""
    x, signed, negative = x.astype(np.float32), bool((x <= 0).any()), bool((x < 0).any())
    if not np.isfinite(x).all():
        return np.full(len(x), math.nan), np.zeros(len(x), np.uint8), math.nan  # nobody looks at these codes
    grid, ends = grid_of_4_bits(signed), np.float32(1 / 0.8875)
    needed = max([*x[x > 0], *(-x[x < 0] * ends), np.float32(0)])
    bits = max(-(-int(needed.view(np.uint32)) // 2**16), 0x80)  # of BF16, and of a normal number
    bits += signed and bits % 2 == negative  # the last one says that no element is negative
    while bits > 0x7F7F:  # the largest one
        bits -= 1 + signed
    scale = np.uint32(bits * 2**16).view(np.float32)
    y = x / scale
    low = np.clip(np.searchsorted(grid, y, side="right") - 1, 0, 14)
    up = (y - grid[low]) * np.float32(65536) > (r + 0.5).astype(np.float32) * (grid[low + 1] - grid[low])
    codes = np.where((x > 0) & signed & (not negative), np.maximum(low + up, 8), low + up)
    return (grid[codes] * scale).astype(np.float64), codes.astype(np.uint8), float(-scale if signed else scale)


def beside_the_finest_steps(signed, r):
    """A block of numbers below the least exponent, with these random numbers, and its codes but for the first one.

    They lie a quarter, a half and three quarters of the finest step, 2^-19 of a code, below where rounding goes up.
    """
    i, top = torch.arange(len(r)), 7 if signed else 15
    upper, below = 2 + i % 5, torch.tensor([0.0, 0.25, 0.5, 0.75])[i % 4]
    steps = upper.double() * 2**19 - 8 * r - 4 - below
    x = (steps * 2.0 ** -(top + 22)).float()
    assert torch.equal(x.double() * 2.0 ** (top + 22), steps)
    x[0] = -1.8125 if signed else 1.8125
    return x, (upper - (below > 0.5).long()).to(torch.uint8)


def read(state, key, shape=None):
    """A state tensor in FP32, also one that is held in codes. shape: the parameter's; None: that of the codes."""
    name = next((name for name, prefix in PREFIXES.items() if prefix + key in state), None)
    if name is None:
        return state[key]
    codes, scales = state[PREFIXES[name] + key], state[SCALES + key].double().view(-1).numpy()
    shape = codes.shape if shape is None else torch.Size(shape)
    flat, row, meaning = codes.reshape(-1).numpy(), row_length(shape), [meanings(signed, name) for signed in (0, 1)]
    if codes.shape != shape:
        flat = np.stack([flat // 16, flat % 16], 1).reshape(-1)
    per_row, out = -(-row // BLOCK), np.empty(len(flat), np.float32)
    for i, code in enumerate(flat):
        scale = scales[i // row * per_row + i % row // BLOCK]
        out[i] = np.float32(meaning[int(scale < 0)][code]) * np.float32(abs(scale))
    return torch.from_numpy(out).view(shape)


def widened(state, shape=None):
    """The state of a parameter with what is held in codes in FP32, by the optimizer's own keys."""
    found = {}
    for key in state:
        if not str(key).startswith(SCALES):
            own = key
            for prefix in PREFIXES.values():
                own = own.removeprefix(prefix) if isinstance(own, str) else own
            found[own] = read(state, own, shape)
    return found
