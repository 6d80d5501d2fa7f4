"""Checksums of BF16 weights, one sixteenth of a byte a weight: they show that somebody wrote to the weights.

A checksum is 16 bits over a block of `BLOCK` weights that follow one another in row-major order::

    checksum = (u_0 * m_0 + u_1 * m_1 + ... mod 2^32) >> 16      u: the bits of a weight, m: odd constants

It depends on values alone, not on where they lie in memory or how often they were written. Of 65536 blocks with other
values than before, one has the checksum that it had. A parameter of at most `SMALL` weights has blocks of one weight,
whose checksum, with m = 2^16, is the weight itself: there each weight is told apart, at 2 bytes each.

Source: MULTILINEAR of Lemire and Kaser, "Strongly universal string hashing is fast" (The Computer Journal, 2014).

All functions want `torch.no_grad()`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import torch

from hmpx.rounding import native
from hmpx.rounding.devices import is_on_host, lacks_data, reinterpreted, shifted
from hmpx.rounding.eager import GOLDEN, MULTIPLY_1, MULTIPLY_2, signed

Tensor = torch.Tensor

BLOCK = 32
SMALL = 4096
_CHUNK = 1 << 18  # elements that are looked at at a time, where that takes temporaries: 8 bytes each
_PARTS = 16  # of a tensor that are looked at one after the other, on an accelerator


def checksums(weights: Tensor) -> Tensor:
    """Compute the checksum of each block of BF16 `weights`, int16."""
    block = block_of(weights)
    out = torch.empty(-(-weights.numel() // block), dtype=torch.int16, device=weights.device)
    if weights.numel() and native.can_read(weights):
        native.block_checksums(weights, out, block)
        return out
    at, known = 0, _multipliers.__wrapped__ if lacks_data(weights) else _multipliers
    multipliers = known(block, weights.device)
    for part in _parts(weights, block):
        rest = -part.numel() % block
        bits = reinterpreted(part, torch.int16).to(torch.int32) & 0xFFFF
        if rest:
            bits = torch.cat([bits, bits.new_zeros(rest)])
        sums = (bits.view(-1, block) * multipliers).sum(1, dtype=torch.int32)
        out[at : at + sums.numel()] = shifted(sums, 16).to(torch.int16)
        at += sums.numel()
    return out


def clear_written(weights: Tensor, before: Tensor, beside: Tensor) -> None:
    """Zero `beside` (contiguous, shaped like `weights`) in every block whose checksum differs from `before`."""
    same = checksums(weights) == before
    if is_on_host(weights) and bool(same.all()):
        return
    block, flat = block_of(weights), beside.view(-1)
    whole = flat.numel() // block
    flat[: whole * block].view(whole, block).mul_(same[:whole, None])
    flat[whole * block :].mul_(same[whole:])


def block_of(weights: Tensor) -> int:
    """Return how many weights share a checksum."""
    return 1 if weights.numel() <= SMALL else BLOCK


def _parts(weights: Tensor, block: int) -> Iterator[Tensor]:
    """Yield the weights flat in row-major order, in parts that begin where a block begins."""
    size = _CHUNK if is_on_host(weights) else max(weights.numel() // _PARTS // block * block + block, _CHUNK)
    if weights.is_contiguous():
        yield from weights.view(-1).split(size)
        return
    row = weights.numel() // weights.shape[0]
    together = block // math.gcd(row, block)  # rows that fill whole blocks
    for rows in weights.split(max(size // row // together, 1) * together):
        yield rows.reshape(-1)


@functools.lru_cache(maxsize=64)
def _multipliers(block: int, device: torch.device) -> Tensor:
    values = [1 << 16] if block == 1 else [_mixed(i) | 1 for i in range(block)]
    return torch.tensor([signed(value) for value in values], dtype=torch.int32, device=device)


def _mixed(i: int) -> int:
    h = (i + 1) * GOLDEN & 0xFFFFFFFF
    h = (h ^ h >> 16) * MULTIPLY_1 & 0xFFFFFFFF
    h = (h ^ h >> 15) * MULTIPLY_2 & 0xFFFFFFFF
    return h ^ h >> 15
