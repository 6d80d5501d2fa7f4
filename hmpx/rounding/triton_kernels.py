"""The Triton kernels: optimizer steps of a list of parameters, and moving a list of tensors from one form to another.

As in `native_stored.c`, a tensor is read to FP32 from the form in which it is stored between two steps, and written
back. A program takes a tile of elements: `TILE` blocks of `BLOCK`. A table has a row of words for each parameter:
`HEAD` for the parameter, `STORED` for each of its tensors. A list says of which row each program takes a part. To add
a way of holding a tensor, write it into `opened` and `closed`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hmpx.rounding import shared
from hmpx.rounding.triton_bits import (
    are_one,
    bits_of,
    coded,
    decoded,
    decoded_of_four,
    encoded_in_four,
    float_of,
    kept_bits,
    mixed,
    nearest,
    rounded,
    scale_of_four,
    ties_away,
)

TILE, BLOCK = tl.constexpr(8), tl.constexpr(128)
SCALARS = tl.constexpr(shared.SCALARS)
ADAM, SGD, LION, ADAGRAD, RMSPROP, NADAM = (tl.constexpr(number) for number in range(len(shared.KERNELS)))

# Kinds, of `native_stored.c`; none at all; in FOUR, two codes are in a byte. Those behind it are codes of 8 bits.
ABSENT, FP32, BF16, NEAREST, MASTER, SPLIT, SPLIT8, FOUR = (
    tl.constexpr(kind) for kind in range(len(shared.HALF_BYTES))
)

# How the elements of a tile lie: in blocks that end where a row ends; one after the other; the same, with pointers and
# counts that are multiples of 16.
UNEVEN, EVEN, ALIGNED = (tl.constexpr(number) for number in range(3))
WARPS = 4, 4, 2  # of a program, by how elements lie: a thread of two warps has 16 elements, and shares more among them

# Words of a row, in front of those of tensors: the first program that takes a part, elements, blocks, the index of the
# first element in the parameter. Of uneven ones: elements of a row; and rows in the parameter, of so many elements, so
# far apart.
FIRST, COUNT, BLOCKS, OFFSET, ROW, WIDTH, STRIDE, HEAD = (tl.constexpr(number) for number in range(8))
# Words of a tensor: its address, its key, the address of `native.StoredTensor.beside`, its kind, which is for C.
AT, KEY, BESIDE, _, STORED = (tl.constexpr(number) for number in range(5))


@triton.jit
def tile_of(one, part, LIE: tl.constexpr):
    """Return a program's row and part; the indices of its elements in their tensors and in the parameter, and which of
    them exist; the indices of its blocks among all blocks, and which of them exist.

    Those of elements are [TILE, BLOCK], those of blocks are [TILE].
    """
    column = tl.arange(0, BLOCK)[None, :]
    block = part * TILE + tl.arange(0, TILE)
    has_block = block < tl.load(one + BLOCKS)
    if LIE == UNEVEN:
        row = tl.load(one + ROW)
        parts = (row + BLOCK - 1) // BLOCK
        begin = block % parts * BLOCK
        count = tl.minimum(begin + BLOCK, row) - begin
        at = block // parts * row + begin
        width = tl.load(one + WIDTH)
        element = tl.load(one + OFFSET) + at // width * tl.load(one + STRIDE) + at % width
        inside = (column < count[:, None]) & has_block[:, None]
        at, element = at[:, None] + column, element[:, None] + column
        ends = True
    else:
        at = (part * TILE + tl.arange(0, TILE))[:, None] * BLOCK + column
        count, offset = tl.load(one + COUNT), tl.load(one + OFFSET)
        if LIE == ALIGNED:
            inside = at < tl.multiple_of(count, 16)
        else:
            at -= offset & 1  # a tile begins with an even element of the parameter
            inside = (at >= 0) & (at < count)
        element, ends = offset + at, (part + 1) * TILE * BLOCK > count
    return one, part, at, element, inside, block, has_block, ends


@triton.jit
def drawn(tile, held, LIE: tl.constexpr):
    """Return the random numbers of a tile. One hash serves an even element and the odd one after it."""
    one, part, _, element, _, _, _, _ = tile
    key = tl.load(held + KEY).to(tl.uint64, bitcast=True)
    k1, k2 = key.to(tl.uint32), (key >> 32).to(tl.uint32)
    if LIE == UNEVEN:
        h = mixed((element >> 1).to(tl.uint32), k1, k2)
        r = (h >> (16 * (element & 1)).to(tl.uint32)) & 0xFFFF
    else:
        HALF: tl.constexpr = BLOCK // 2
        block = part * TILE + tl.arange(0, TILE)
        pair = (tl.load(one + OFFSET) >> 1) + block[:, None] * HALF + tl.arange(0, HALF)[None, :]
        h = mixed(pair.to(tl.uint32), k1, k2)
        r = tl.interleave(h & 0xFFFF, h >> 16)
    return r


@triton.jit
def pointer(held, word: tl.constexpr, TYPE: tl.constexpr, LIE: tl.constexpr):
    address = tl.load(held + word).to(tl.pointer_type(TYPE))
    if LIE == ALIGNED:
        address = tl.multiple_of(address, 16)
    return address


@triton.jit
def scales_at(held, block, has_block, LIE: tl.constexpr):
    """Return the bits of the scales of blocks, [blocks, 1] in int32."""
    return tl.load(pointer(held, BESIDE, tl.uint16, LIE) + block, mask=has_block, other=0).to(tl.int32)[:, None]


@triton.jit
def halved(x):
    """Return every second column of a tile."""
    first, _ = tl.split(tl.reshape(x, [TILE, BLOCK // 2, 2]))
    return first


@triton.jit
def opened(tile, held, KIND: tl.constexpr, LIE: tl.constexpr):
    """Read a tile of a tensor to FP32; zeros outside of the tensor."""
    _, _, at, _, inside, block, has_block, _ = tile
    if KIND == ABSENT:
        x = tl.full([TILE, BLOCK], 0.0, tl.float32)
    elif KIND == FP32:
        x = tl.load(pointer(held, AT, tl.float32, LIE) + at, mask=inside, other=0.0)
    elif KIND >= FOUR:
        if KIND == FOUR:
            pair, there = halved(at) // 2, halved(inside.to(tl.int32)) != 0  # [TILE, BLOCK / 2], a byte each
            two = tl.load(pointer(held, AT, tl.uint8, LIE) + pair, mask=there, other=0).to(tl.int32)
            code = tl.interleave(two >> 4, two & 15)
        else:
            code = tl.load(pointer(held, AT, tl.uint8, LIE) + at, mask=inside, other=0).to(tl.int32)
        scale = scales_at(held, block, has_block, LIE)
        x = decoded_of_four(code, scale) if KIND == FOUR else decoded(code, scale >> 7 & 0xFF, scale >> 15, KIND)
    else:
        upper = tl.load(pointer(held, AT, tl.uint16, LIE) + at, mask=inside, other=0).to(tl.uint32)
        x = float_of(upper << 16)
        if KIND == MASTER:
            master = tl.load(pointer(held, BESIDE, tl.float32, LIE) + at, mask=inside, other=0.0)
            bits = bits_of(master)
            is_its = are_one(upper, nearest(bits)) | are_one(upper, ties_away(kept_bits(bits)))
            x = tl.where(is_its, master, x)
        if KIND == SPLIT:
            lower = tl.load(pointer(held, BESIDE, tl.int16, LIE) + at, mask=inside, other=0).to(tl.int32)
        if KIND == SPLIT8:
            lower = tl.load(pointer(held, BESIDE, tl.int8, LIE) + at, mask=inside, other=0).to(tl.int32) * 256
        if (KIND == SPLIT) | (KIND == SPLIT8):
            lower = tl.where((upper & 0x7FFF) == 0, tl.maximum(lower, 0), lower)  # 0 and inf that were written by hand
            lower = tl.where((upper & 0x7FFF) == 0x7F80, tl.minimum(lower, 0), lower)
            x = float_of((upper << 16) + lower.to(tl.uint32, bitcast=True))
    return x


@triton.jit
def closed(tile, held, x, KIND: tl.constexpr, LIE: tl.constexpr):
    """Write a tile of FP32 numbers to a tensor."""
    _, _, at, _, inside, block, has_block, ends = tile
    bits = bits_of(x)
    if KIND == ABSENT:
        pass
    elif KIND == FP32:
        tl.store(pointer(held, AT, tl.float32, LIE) + at, x, mask=inside)
    elif KIND >= FOUR:
        r = drawn(tile, held, LIE)
        NOTHING: tl.constexpr = 1e-45 if KIND == FOUR else 0.0  # which no scale is made of
        if LIE == ALIGNED:
            if ends:
                x = tl.where(inside, x, NOTHING)
        else:
            x = tl.where(inside, x, NOTHING)
        if KIND == FOUR:
            scale = scale_of_four(x)
            code = encoded_in_four(x, r, scale[:, None])
        else:
            scale, code = coded(x, r, KIND)
        tl.store(pointer(held, BESIDE, tl.uint16, LIE) + block, scale.to(tl.uint16), mask=has_block)
        if KIND == FOUR:
            first, second = tl.split(tl.reshape(code, [TILE, BLOCK // 2, 2]))  # two codes in a byte
            code, at, inside = first * 16 + second, halved(at) // 2, halved(inside.to(tl.int32)) != 0
        tl.store(pointer(held, AT, tl.uint8, LIE) + at, code.to(tl.uint8), mask=inside)
    else:
        if KIND == BF16:
            upper = rounded(x, drawn(tile, held, LIE))
        elif (KIND == NEAREST) | (KIND == MASTER):
            upper = nearest(bits)
        else:
            bits = kept_bits(bits)
            if KIND == SPLIT8:
                r = drawn(tile, held, LIE) >> 8
                bits += tl.where((bits & 0x7FFFFFFF) <= 0x7F7FFF00, r, 0)
                lower = (bits >> 8).to(tl.uint8)
                tl.store(pointer(held, BESIDE, tl.uint8, LIE) + at, lower, mask=inside)
                bits &= 0xFFFFFF00
            else:
                tl.store(pointer(held, BESIDE, tl.uint16, LIE) + at, bits.to(tl.uint16), mask=inside)
            upper = ties_away(bits)
        if KIND == MASTER:
            tl.store(pointer(held, BESIDE, tl.float32, LIE) + at, x, mask=inside)
        tl.store(pointer(held, AT, tl.uint16, LIE) + at, upper.to(tl.uint16), mask=inside)


@triton.jit
def own_part(table, rows, WORDS: tl.constexpr):
    """Return the number of the parameter that this program takes a part of, and the number of the part.

    rows: the parameter of each program; None where there is but one parameter.
    """
    program = tl.program_id(0)
    number = program - program if rows is None else tl.load(rows + program)
    return number, program - tl.load(table + number * WORDS + FIRST)


@triton.jit
def move_list(table, rows, SOURCE: tl.constexpr, TARGET: tl.constexpr, LIE: tl.constexpr):
    """Read tensors held in one way, and write them in another way."""
    number, part = own_part(table, rows, HEAD + 2 * STORED)
    one = table + number * (HEAD + 2 * STORED)
    source, target = one + HEAD, one + HEAD + STORED
    tile = tile_of(one, part, LIE)
    x = opened(tile, source, SOURCE, LIE)
    closed(tile, target, x, TARGET, LIE)


@triton.jit
def stepped(KERNEL: tl.constexpr, p, x, a, b, c, s, MOMENTUM: tl.constexpr, CENTERED: tl.constexpr):
    """Step as the loops of `native_steps.c`: weight, signed gradient with L2 penalty, three states, the scalars."""
    if KERNEL == ADAM:
        a = tl.load(s + 3) * a + tl.load(s + 4) * x
        b = tl.load(s + 5) * b + tl.load(s + 6) * x * x
        p = tl.load(s + 2) * p - tl.load(s + 7) * tl.div_rn(a, tl.sqrt_rn(b) + tl.load(s + 8))
    elif KERNEL == SGD:
        if MOMENTUM:
            a = tl.load(s + 4) * a + tl.load(s + 5) * x
            x = tl.where(tl.load(s + 6) != 0, x + tl.load(s + 3) * a, a)
        p -= tl.load(s + 2) * x
    elif KERNEL == LION:
        u = tl.load(s + 3) * a + tl.load(s + 4) * x
        direction = tl.where(u > 0, 1.0, 0.0) - tl.where(u < 0, 1.0, 0.0)
        p = tl.load(s + 2) * p - tl.load(s + 7) * direction
        a = tl.load(s + 5) * a + tl.load(s + 6) * x
    elif KERNEL == ADAGRAD:
        a += x * x
        p -= tl.load(s + 2) * tl.div_rn(x, tl.sqrt_rn(a) + tl.load(s + 3))
    elif KERNEL == RMSPROP:
        a = tl.load(s + 3) * a + tl.load(s + 4) * x * x
        variance = a
        if CENTERED:
            c += tl.load(s + 4) * (x - c)
            variance = a - c * c
        x = tl.div_rn(x, tl.sqrt_rn(variance) + tl.load(s + 5))
        if MOMENTUM:
            b = tl.load(s + 6) * b + x
            x = b
        p -= tl.load(s + 2) * x
    else:  # NAdam
        a += tl.load(s + 3) * (x - a)
        b = tl.load(s + 4) * b + tl.load(s + 5) * x * x
        root = tl.sqrt_rn(tl.div_rn(b, tl.load(s + 9))) + tl.load(s + 8)
        p = tl.load(s + 2) * p - tl.load(s + 6) * tl.div_rn(x, root) - tl.load(s + 7) * tl.div_rn(a, root)
    return p, a, b, c


@triton.jit
def step_list(
    table, rows, scalars, KERNEL: tl.constexpr, P: tl.constexpr, G: tl.constexpr, A: tl.constexpr, B: tl.constexpr,
    C: tl.constexpr, LIE: tl.constexpr,
):  # fmt: skip
    """Step parameters whose weight, gradient and states are held in these ways."""
    number, part = own_part(table, rows, HEAD + 5 * STORED)
    one = table + number * (HEAD + 5 * STORED)
    weight, state, s = one + HEAD, one + HEAD + 2 * STORED, scalars + number * SCALARS
    tile = tile_of(one, part, LIE)
    p = opened(tile, weight, P, LIE)
    grad = opened(tile, weight + STORED, G, LIE)
    a = opened(tile, state, A, LIE)
    b = opened(tile, state + STORED, B, LIE)
    c = opened(tile, state + 2 * STORED, C, LIE)
    l2, grad = tl.load(s + 1), tl.load(s) * grad
    grad = tl.where(l2 != 0, grad + l2 * p, grad)  # 0 times an infinite weight would be NaN
    MOMENTUM: tl.constexpr = (A if KERNEL == SGD else B) != ABSENT
    p, a, b, c = stepped(KERNEL, p, grad, a, b, c, s, MOMENTUM, C != ABSENT)
    closed(tile, weight, p, P, LIE)
    closed(tile, state, a, A, LIE)
    closed(tile, state + STORED, b, B, LIE)
    closed(tile, state + 2 * STORED, c, C, LIE)
