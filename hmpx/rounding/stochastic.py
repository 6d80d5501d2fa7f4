"""Stochastic rounding of FP32 to BF16, and masters in two halves. Random numbers follow from seed, step, name, index.

**The problem.** A BF16 weight has 8 bits of precision. An update smaller than half a unit in the last place rounds to
nothing under round-to-nearest, every time, and training stalls. Rounding up with a probability equal to the part that
is cut off keeps the expected value right.

**The numbers.** Other libraries draw them from the global generator, so replicas drift apart and a resumed run differs.
Here the number of an element depends on (seed, step, parameter name, index in the whole parameter) and nothing else.
All of it is uint32 with logical shifts and wraparound, except the key, which is uint64::

    key    = chain over seed, step, blake2b-64(name), e >> 32       each link splitmix64(previous ^ value)
    k1, k2 = low and high 32 bits of key
    i      = (e mod 2^32) >> 1                                      e: row-major index in the whole parameter
    h      = i * 0x9E3779B9 + k1
    h ^= h >> 16;  h *= 0x21F0AAAD;  h ^= h >> 15;  h ^= k2;  h *= 0x735A2D97;  h ^= h >> 15
    r      = low 16 bits of h for even e, high 16 bits for odd e
    out    = bf16 with the bits (bits(x) + r) >> 16

The index is multiplied before a key comes in: a counter under a key by XOR alone failed tests of pairs.

A value that BF16 can hold stays itself. inf and finite values past BF16's maximum round to nearest. NaN stays NaN: its
upper 16 bits with the quiet bit (0x40) set.

**Halves.** A master is held as a BF16 weight and an integer beside it, an int16 without loss::

    upper  = (bits + 0x8000) >> 16        the number rounded to nearest, ties away from zero
    lower  = int16(bits)
    bits   = (upper << 16) + lower

Exact for every number and for inf. NaN stays NaN in the upper half and in the whole; payloads that rounding would carry
out of the NaNs become the quiet NaN's. An upper half that somebody has written keeps the lower half that is there;
beside a written 0 or inf it is left out where it would make a NaN.

With an int8 beside it, a number has 24 bits: ``bits = (upper << 16) + (lower << 8)``. FP32 numbers are rounded to it
stochastically, ``(bits + (r >> 8)) & ~0xFF``; those past the largest one are cut off.

Sources: the 32-bit mixer is of the family searched by Wellons, "Prospecting for hash functions" (2018); splitmix64 is
Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (OOPSLA 2014); stochastic rounding for training
is Gupta et al., "Deep learning with limited numerical precision" (ICML 2015).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import NamedTuple

import torch

from hmpx.base.tensors import is_on_host
from hmpx.errors import HmpxError
from hmpx.rounding import eager
from hmpx.rounding.devices import kernels_for, reinterpreted, shifted
from hmpx.rounding.shared import MAX_UINT64, Keys, Span, derive_key
from hmpx.rounding.table import TableRow, launch_once, row_of_rounding

Tensor = torch.Tensor


class Rounding(NamedTuple):
    """FP32 `x` to round into BF16 `out`, of the same shape; `spans`: where its elements lie in the parameter `name`."""

    out: Tensor
    x: Tensor
    name: str
    spans: Sequence[Span]


def check_seed(seed: int) -> int:
    """Return `seed` if it is an integer in [0, 2^64).

    Raises:
        HmpxError: it is something else.
    """
    return _check_number("seed", seed)


def _check_number(what: str, number: int) -> int:
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number <= MAX_UINT64:
        raise HmpxError(f"{what} {number!r} is out of range: an integer from 0 to 2**64 - 1")
    return number


def stochastic_round(x: Tensor, *, seed: int, step: int, name: str, offset: int = 0) -> Tensor:
    """Round an FP32 tensor to BF16 stochastically.

    Args:
        x: float32, any shape and device.
        seed, step, name: what the numbers depend on; integers in [0, 2^64) and any string.
        offset: index of the first element of `x` in the whole (unsharded, flattened) parameter.

    Returns:
        bfloat16, the shape of `x`, contiguous. Element `e` of the whole parameter gets the same bits however it is cut.

    Raises:
        HmpxError: `x` is not float32, or a number is out of range, that of an element included.

    Example:
        >>> x = torch.full((100_000,), 1 + 2**-9)  # a quarter of the way from 1 to the next BF16 number, 1 + 2**-7
        >>> rounded = hmpx.stochastic_round(x, seed=0, step=0, name="x")
        >>> rounded.dtype, sorted(set(rounded.tolist()))
        (torch.bfloat16, [1.0, 1.0078125])
        >>> abs((rounded > 1).float().mean().item() - 0.25) < 0.01
        True
    """
    if not isinstance(x, Tensor):
        raise HmpxError(f"stochastic rounding takes tensors, not {type(x).__name__}")
    out = torch.empty(x.shape, dtype=torch.bfloat16, device=x.device)
    stochastic_round_(out, x, seed=seed, step=step, name=name, offset=offset)
    return out


def stochastic_round_(out: Tensor, x: Tensor, *, seed: int, step: int, name: str, offset: int = 0) -> Tensor:
    """Round stochastically into an existing bfloat16 tensor of the same shape, contiguous or not; return `out`.

    Example:
        >>> average, weight = torch.zeros(3, dtype=torch.bfloat16), torch.ones(3)
        >>> for step in range(10):
        ...     _ = hmpx.stochastic_round_(average, average.float().lerp(weight, 0.5), seed=0, step=step, name="ema")
        >>> average.dtype
        torch.bfloat16
    """
    if not isinstance(x, Tensor) or not isinstance(out, Tensor):
        raise HmpxError(f"stochastic rounding takes tensors, not {type(x).__name__}")
    if not isinstance(name, str):
        raise HmpxError(f"the name is {name!r}, not a string")
    if x.dtype is not torch.float32 or out.dtype is not torch.bfloat16:
        raise HmpxError(f"stochastic rounding goes from float32 to bfloat16, not from {x.dtype} to {out.dtype}")
    if x.shape != out.shape:
        raise HmpxError(f"the shapes differ: {tuple(x.shape)} into {tuple(out.shape)}")
    for what, number in (("seed", seed), ("step", step), ("offset", offset)):
        _check_number(what, number)
    if offset + x.numel() > 2**64:
        raise HmpxError(
            f"offset {offset} and {x.numel()} elements reach past element 2**64 - 1, the last one that has a number"
        )
    with torch.no_grad():
        spans = [Span(0, x.numel(), offset, max(x.numel(), 1), 0)]
        round_all([Rounding(out.detach(), x.detach(), name, spans)], seed, step)
    return out


def round_all(roundings: Iterable[Rounding], seed: int, step: int) -> None:
    """Round many tensors under `torch.no_grad()`: in one kernel call for each device where kernels can read them."""
    together: dict[torch.device, tuple[ModuleType, list[TableRow]]] = {}
    copied: list[tuple[Tensor, Tensor]] = []
    for out, x, name, spans in roundings:
        source = x.contiguous()
        target = out if out.is_contiguous() else torch.empty_like(source, dtype=out.dtype)
        kernels, flat, bits = kernels_for(source, target), source.view(-1), target.view(-1)
        for span in spans:
            for start, stop, offset, *rows in span.within_keys():
                key, at = derive_key(seed, step, name, offset >> 32), offset % 2**32
                if kernels is None:
                    eager.round_(bits[start:stop], flat[start:stop], key, at, *rows)
                else:
                    row = row_of_rounding(bits[start:stop], flat[start:stop], key, at, *rows)
                    together.setdefault(x.device, (kernels, []))[1].append(row)
        if target is not out:
            copied.append((out, target))
        elif kernels is not None and flat.numel():
            torch.autograd.graph.increment_version(out)  # autograd sees no write of our kernels
    for kernels, table_rows in together.values():
        launch_once(kernels, table_rows)
    for out, target in copied:
        out.copy_(target)


def random_numbers(like: Tensor, spans: Sequence[Span], keys: Keys) -> Tensor:
    """Return the random numbers by which the elements of a flat tensor are rounded: r above, in int32."""
    out = torch.empty(like.numel(), dtype=torch.int32, device=like.device)
    for span in spans:
        for start, stop, offset, width, stride in span.within_keys():
            eager.numbers_(out[start:stop], derive_key(*keys, offset >> 32), offset % 2**32, width, stride)
    return out


# Halves in torch's operators, on any device. All functions want `torch.no_grad()`.


def split(x: Tensor, upper: Tensor, lower: Tensor, spans: Sequence[Span] = (), keys: Keys = (0, 0, "")) -> None:
    """Write the halves of FP32 `x` to BF16 `upper` and int16 or int8 `lower`; `join` is the inverse.

    spans, keys: for int8, what the random numbers of the elements of `x`, row by row, depend on.
    """
    bits = _kept_bits(x)
    if lower.dtype is torch.int8:
        r = shifted(random_numbers(x, spans, keys), 8).view(x.shape)
        bits = bits + torch.where((bits & 0x7FFFFFFF) <= 0x7F7FFF00, r, 0)
        lower.copy_(shifted(bits, 8))  # to the low 8 bits, as C casts
        bits = bits & -0x100
    else:
        lower.copy_(bits)  # to the low 16 bits, as C casts
    upper.copy_(_upper(bits))


def join(upper: Tensor, lower: Tensor, out: Tensor) -> None:
    """Write the FP32 numbers with these halves to `out`."""
    rest = lower.to(torch.int32) * (0x100 if lower.dtype is torch.int8 else 1)
    # The opposite sign beside 0 and inf would make NaNs.
    rest = torch.where(upper == 0, rest.clamp(min=0), torch.where(upper.isinf(), rest.clamp(max=0), rest))
    out.copy_(reinterpreted(reinterpreted(upper, torch.int16).to(torch.int32) * 0x10000 + rest, torch.float32))


def read_masters(masters: Tensor, weights: Tensor, out: Tensor) -> None:
    """Copy FP32 `masters` into `out`. Where a master does not round to its BF16 weight, copy the weight."""
    out.copy_(masters)
    # A tie may have been rounded either way.
    written = (masters.to(torch.bfloat16) != weights) & (_upper(_kept_bits(masters)) != weights)
    if not is_on_host(out) or written.any():
        out.copy_(torch.where(written, weights.float(), masters))


def _upper(bits: Tensor) -> Tensor:
    """Return the BF16 number that the FP32 number with these bits rounds to, ties away from zero."""
    return reinterpreted(shifted(bits + 0x8000, 16).to(torch.int16), torch.bfloat16)


def _kept_bits(x: Tensor) -> Tensor:
    """Return the bits of `x`. NaNs that rounding would turn into another number are made quiet first."""
    bits = reinterpreted(x, torch.int32)
    magnitude = bits & 0x7FFFFFFF
    lost = ((magnitude > 0x7F800000) & (magnitude < 0x7F808000)) | (magnitude >= 0x7FFF8000)
    if not is_on_host(bits) or lost.any():
        bits = torch.where(lost, bits & -0x80000000 | 0x7FC00000, bits)
    return bits
