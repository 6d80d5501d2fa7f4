"""Casts of a matrix to FP8 in both directions, by kernels in Triton: for a GPU with FP8 tensor cores.

An operand takes part in two of the three products of a linear layer, and each sums along another dimension. `cast_both`
reads it twice (once where blocks share scales) and writes both, laid out as the products want them. In launches: the
largest magnitude and the codes, with one fill of zeros in front where lines share scales; blocks need one.

`fp8_casts` computes the same codes in aten ops, which compilers see into; that is what runs elsewhere.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch.compiler import is_compiling

from hmpx.base.torch_private import FP8_KERNELS, in_torch_func, private
from hmpx.ops.policies.fp8_format import CODES, Format
from hmpx.ops.wrapping.overriding import PLAIN

Tensor = torch.Tensor
_SIDE, _MATRIX = 128, 1024  # as in fp8_triton.py: of a tile, the most programs that look for the largest magnitude
_WHOLE, _LINES, _BLOCKS, _SQUARES = range(4)
_WARPS = 8
_mode, _PROXY = private("torch._C._get_dispatch_mode"), private("torch._C._TorchDispatchModeKey.PROXY")


class CodedLines(NamedTuple):
    """Codes (I, S) of a matrix, row by row, for a product that sums along S, and what decodes them.

    scale: in FP32, of the shape (), (I,), or of blocks (I, S / 128) with neighbours along I, or (I / 128, S / 128).
    """

    codes: Tensor
    scale: Tensor


@functools.cache
def _kernels() -> ModuleType | None:
    """Import the kernels when they are first asked for; None if there is no Triton."""
    try:
        from hmpx.ops.computing import fp8_triton
    except ImportError:
        return None
    return fp8_triton


def can_cast(*matrices: Tensor) -> bool:
    """Return whether the kernels exist here, and can read these matrices."""
    if is_compiling() or not FP8_KERNELS.is_on() or in_torch_func() is not None:
        return False
    if _mode(_PROXY) is not None:  # which sees no kernel of ours
        return False
    return all(x.is_cuda and x.dim() == 2 and type(x) in PLAIN for x in matrices) and _kernels() is not None


def cast_both(
    x: Tensor, name: str, form: Format, scaling: str, square: bool, last: bool, first: bool
) -> tuple[CodedLines | None, CodedLines | None]:
    """Return `x` in FP8 for a sum along its last dimension, and transposed for one along its first; None if not asked.

    Args:
        x: BF16 (M, N) that `can_cast` agrees to. N is a multiple of 16, and M is 1 at least.
        name: "e4m3" or "e5m2".
        scaling: "tensorwise", "rowwise" or "blockwise", which may be another one than the format's.
        square: whether blocks are 128 x 128.
    """
    if x.stride(0) == 1 and x.stride(1) != 1 and not x.shape[0] % 16:
        return cast_both(x.t(), name, form, scaling, square, first, last)[::-1]
    rows, columns = x.shape
    if x.stride(1) != 1 or rows == 1 or x.stride(0) % 16 or x.data_ptr() % 16:
        x = x.clone(memory_format=torch.contiguous_format).as_strided(x.shape, (columns, 1))
    held, made = -(-rows // 16) * 16, functools.partial(torch.empty, device=x.device)
    kind = {"tensorwise": _WHOLE, "rowwise": _LINES, "blockwise": _SQUARES if square else _BLOCKS}[scaling]
    blocks, tiles = (-(-rows // _SIDE), -(-columns // _SIDE)), -(-rows // _SIDE) * -(-columns // _SIDE)
    where = rows, columns, x.stride(0)
    found, programs = x, min(tiles, _MATRIX)
    if kind == _WHOLE:
        found = made(programs, dtype=torch.int32)
        _launch("largest_of_matrix", programs, (x, found, *where))
    elif kind == _LINES:
        found = torch.zeros(rows + columns, dtype=torch.int32, device=x.device)
        _launch("largest_of_lines", tiles, (x, found, *where), last, first)
    of_last = made((rows, columns), dtype=CODES[name]) if last else x
    of_first = made((columns, held), dtype=CODES[name]) if first else x
    shapes: dict[int, list[tuple[int, ...]]] = {
        _WHOLE: [(), ()], _LINES: [(rows,), (columns,)], _SQUARES: [blocks, blocks[::-1]],
        _BLOCKS: [(blocks[1], rows), (blocks[0], columns)],
    }  # fmt: skip
    scales = [made(shape, dtype=torch.float32) for shape in shapes[kind]]
    constants = kind, torch.finfo(CODES[name]).max, form.power_of_two, last, first
    _launch("encode", tiles, (x, found, of_last, of_first, *scales, *where, held, programs), *constants)
    if kind == _WHOLE:
        scales[1] = scales[0]
    if kind == _BLOCKS:
        scales = [scale.t() for scale in scales]
    return CodedLines(of_last, scales[0]) if last else None, CodedLines(of_first, scales[1]) if first else None


# Triton looks at each argument of a call to find what it has compiled, which takes longer than the launch. The kernels
# are compiled for their constants alone, so what it has compiled is launched itself.
_compiled: dict[tuple[Any, ...], Any] = {}


def _launch(kernel: str, programs: int, args: tuple[Any, ...], *constants: Any) -> None:
    key = kernel, args[0].device.index, constants
    compiled = _compiled.get(key)
    with torch.cuda.device_of(args[0]):  # Triton launches on the current device, which may be another one
        if compiled is None:
            function = getattr(_kernels(), kernel)
            _compiled[key] = function[programs, 1, 1](*args, *constants, num_warps=_WARPS, enable_fp_fusion=False)
        else:
            compiled[programs, 1, 1](*args, *constants)
