"""The Triton kernels that cast a matrix to FP8 in both directions, as `fp8_gpu` launches them.

A matrix is read as (M, N) with neighbours along N. `last` are its codes for a product that sums along N, row by row;
`first` are those for a sum along M, of the transposed matrix, whose rows are padded with zeros to `HELD` codes, as
hardware wants the length of a sum.

The numbers are those of `fp8_format`, to the bit. There a factor is taken in FP64; of a BF16 number, a division in FP32
that is rounded to nearest comes to the same. Magnitudes are compared as the bits of FP32, which are ordered as the
numbers are, with inf and then NaN above all.
"""

from __future__ import annotations

import triton
import triton.language as tl

LEAST, INF = tl.constexpr(17 << 23), tl.constexpr(0x7F800000)  # LEAST: 2^-110, so that a scale is finite
WHOLE, LINES, BLOCKS, SQUARES = (tl.constexpr(number) for number in range(4))  # who shares a scale
MATRIX, SIDE = tl.constexpr(1024), tl.constexpr(128)  # the most programs of `largest_of_matrix`; of a tile

# All other arguments are multiples of 16, so what is compiled for a few constants can be launched with any numbers.
_compiled_once = triton.jit(do_not_specialize=["M", "programs"])


@triton.jit
def place_of(tile, across):
    """Return the indices of the rows and the columns of a tile."""
    at = tl.arange(0, SIDE)
    return tile // across * SIDE + at, tile % across * SIDE + at


@triton.jit
def tile_of(x, m, n, M, N, row):
    """Return the numbers of a tile, zeros outside of the matrix, and the bits of their magnitudes in FP32."""
    inside = (m[:, None] < M) & (n[None, :] < N)
    value = tl.load(x + m[:, None].to(tl.int64) * row + n[None, :], mask=inside, other=0.0)
    bits = value.to(tl.int16, bitcast=True).to(tl.int32) << 16
    return bits.to(tl.float32, bitcast=True), bits & 0x7FFFFFFF


@_compiled_once
def largest_of_matrix(x, found, M, N, row):
    """Write the largest magnitude that each program has seen."""
    across, most = tl.cdiv(N, SIDE), tl.zeros([SIDE], tl.int32)
    for tile in range(tl.program_id(0), tl.cdiv(M, SIDE) * across, tl.num_programs(0)):
        m, n = place_of(tile, across)
        _, bits = tile_of(x, m, n, M, N, row)
        most = tl.maximum(most, tl.max(bits, 1))
    tl.store(found + tl.program_id(0), tl.max(most, 0))


@_compiled_once
def largest_of_lines(x, found, M, N, row, LAST: tl.constexpr, FIRST: tl.constexpr):
    """Raise zeros to the largest magnitudes: of M rows, and behind them of N columns."""
    m, n = place_of(tl.program_id(0), tl.cdiv(N, SIDE))
    _, bits = tile_of(x, m, n, M, N, row)
    if LAST:
        tl.atomic_max(found + m, tl.max(bits, 1), mask=m < M, sem="relaxed")
    if FIRST:
        tl.atomic_max(found + M + n, tl.max(bits, 0), mask=n < N, sem="relaxed")


@triton.jit
def factor_of(bits, MOST: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    factor = tl.div_rn(MOST, tl.maximum(bits, LEAST).to(tl.float32, bitcast=True))
    if POWER_OF_TWO:
        factor = (factor.to(tl.int32, bitcast=True) & INF).to(tl.float32, bitcast=True)
    return tl.where(bits >= INF, float("nan"), factor)


@_compiled_once
def encode(
    x, found, last, first, scale_last, scale_first, M, N, row, HELD, programs,
    SCALING: tl.constexpr, MOST: tl.constexpr, POWER_OF_TWO: tl.constexpr, LAST: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """Write the codes and scales of a tile. found: what the kernels above have found; blocks do not need it."""
    across, down = tl.cdiv(N, SIDE), tl.cdiv(M, SIDE)
    over, beside = tl.program_id(0) // across, tl.program_id(0) % across
    m, n = place_of(tl.program_id(0), across)
    value, bits = tile_of(x, m, n, M, N, row)
    if SCALING == WHOLE:
        at = tl.arange(0, MATRIX)
        of_rows = factor_of(tl.max(tl.load(found + at, mask=at < programs, other=0), 0), MOST, POWER_OF_TWO)
        if tl.program_id(0) == 0:
            tl.store(scale_last, tl.div_rn(1.0, of_rows))
        of_columns = of_rows
    elif SCALING == SQUARES:
        of_rows = factor_of(tl.max(tl.max(bits, 1), 0), MOST, POWER_OF_TWO)
        scale = tl.div_rn(1.0, of_rows)
        tl.store(scale_last + over * across + beside, scale)
        tl.store(scale_first + beside * down + over, scale)
        of_columns = of_rows
    else:
        if LAST:
            most = tl.max(bits, 1) if SCALING == BLOCKS else tl.load(found + m, mask=m < M, other=0)
            factor = factor_of(most, MOST, POWER_OF_TWO)
            begin = scale_last + beside.to(tl.int64) * M if SCALING == BLOCKS else scale_last
            tl.store(begin + m, tl.div_rn(1.0, factor), mask=m < M)
            of_rows = factor[:, None]
        if FIRST:
            most = tl.max(bits, 0) if SCALING == BLOCKS else tl.load(found + M + n, mask=n < N, other=0)
            factor = factor_of(most, MOST, POWER_OF_TWO)
            begin = scale_first + over.to(tl.int64) * N if SCALING == BLOCKS else scale_first
            tl.store(begin + n, tl.div_rn(1.0, factor), mask=n < N)
            of_columns = factor[None, :]
    # No number exceeds the format's largest but by an ulp of FP32, which the cast rounds away.
    if LAST:
        inside = (m[:, None] < M) & (n[None, :] < N)
        code = (value * of_rows).to(last.dtype.element_ty)
        tl.store(last + m[:, None].to(tl.int64) * N + n[None, :], code, mask=inside)
    if FIRST:
        inside = (m[:, None] < HELD) & (n[None, :] < N)
        code = tl.where(m[:, None] < M, value * of_columns, 0.0).to(first.dtype.element_ty)
        tl.store(first + n[None, :].to(tl.int64) * HELD + m[:, None], code, mask=inside)
