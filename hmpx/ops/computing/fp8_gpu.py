"""The product of two matrices in FP8 on a GPU with FP8 tensor cores, and its gradients: each operand is cast once.

The three products of a layer take each of three matrices twice, summing along another dimension each time. A matrix is
cast in both directions at once (`cast_both`), and what the backward pass wants waits there as codes: one byte for the
two of an input, and one more for a weight while its layer waits for its backward pass. FSDP2 gathers BF16 weights and
they are cast after that; the codes of a whole weight wait on each rank, unless its layer is checkpointed.

`cast_both` runs kernels in Triton (`fp8_triton`). It reads a matrix twice (once where blocks share scales), and writes
both codings, laid out as the products want them. In launches: the largest magnitude and the codes, with one fill of
zeros in front where lines share scales; blocks need one. `fp8_format` computes the same codes in aten ops, which
compilers see into; that is what runs elsewhere.

Sums are taken as torchao and TransformerEngine take them: of the output with fast accumulation, of gradients without.
"""

from __future__ import annotations

import functools
import logging
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable
from torch.compiler import is_compiling

from hmpx.base.torch_private import FP8_KERNELS, base_of, in_torch_func, private
from hmpx.ops.policies.fp8_format import DTYPES, Format
from hmpx.ops.wrapping.overriding import PLAIN
from hmpx.ops.wrapping.weight_cache import current, open_caches

Tensor = torch.Tensor
aten = torch.ops.aten
logger = logging.getLogger("hmpx")


def fits(a: Tensor, b: Tensor, form: Format) -> bool:
    """Return whether `product_of_both` computes the product of (M, K) and (K, N) in this format."""
    if form.forward == "e5m2" or not can_cast(a, b):  # tensor cores have no product of two e5m2
        return False
    if form.scaling == "blockwise":
        aligned = not (a.shape[0] % 128 or a.shape[1] % 512 or b.shape[1] % 512)
        return aligned and not form.power_of_two and multiplies_blocks(a.device)
    return form.scaling in ("tensorwise", "rowwise")


def product_of_both(a: Tensor, b: Tensor, form: Format, weight: bool) -> Tensor:
    """Return ``a @ b`` of BF16 (M, K) and (K, N), with BF16 gradients. weight: whether `b` is one."""
    grad = torch.is_grad_enabled()
    if weight and not grad and open_caches and (kept := _kept(b, form)) is not None:
        lines, _ = cast_both(a, form, last=True, first=False)
        return times(lines, kept, a.dtype, fast=True)  # type: ignore[arg-type]
    return _Product.apply(a, b, form, weight, grad and a.requires_grad, grad and b.requires_grad)


def _kept(b: Tensor, form: Format) -> CodedLines | None:
    """Return the codes of a whole weight from `cached_weights()`; None if `b` is no weight, or no output is in FP8."""
    cache, value = current(), b if base_of(b) is None else base_of(b)
    weight = None if cache is None or "output" not in form.products else cache.weight_of(value)
    layouts = (value.shape, value.stride()), (value.shape[::-1], value.stride()[::-1])
    if cache is None or weight is None or (b.shape, b.stride()) not in layouts or value.dtype is not b.dtype:
        return None

    def packed(_: Tensor) -> Tensor:
        """Return the bytes of the codes and behind them those of the scales: the cache keeps one tensor."""
        lines = cast_both(b, form, last=False, first=True, square=form.scaling == "blockwise")[1] or ()
        return torch.cat([each.reshape(-1).view(torch.uint8) for each in lines])

    held = cache.get(weight, ("fp8", form, b.stride()), packed, views=int(value is weight))
    count = b.numel()
    scale = held[count:].view(torch.float32)
    shape = {"tensorwise": (), "rowwise": (-1,), "blockwise": (-(-b.shape[1] // 128), -1)}[form.scaling]
    return CodedLines(held[:count].view(DTYPES[form.forward]).view(b.shape[::-1]), scale.view(shape))


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, form: Format, weight: bool, of_a: bool, of_b: bool) -> Tensor:
        ctx.form, ctx.square = form, weight and form.scaling == "blockwise"
        output, input_gradient, weight_gradient = (
            each in form.products for each in ("output", "input_gradient", "weight_gradient")
        )
        one_scaling = not form.weight_tensorwise
        a_last, a_first = cast_both(a, form, last=output, first=of_b and weight_gradient)
        last = of_a and input_gradient and one_scaling
        b_last, b_first = cast_both(b, form, last=last, first=output, square=ctx.square)
        # What the backward pass multiplies: codes with their scale, or where it has none of them, the matrix.
        kept_a = a_first or ((a, None) if of_b else (None, None))
        kept_b = b_last or ((b, None) if of_a else (None, None))
        ctx.save_for_backward(*kept_a, *kept_b)
        ctx.turned = b.stride(0) == 1
        return aten.matmul(a, b) if a_last is None or b_first is None else times(a_last, b_first, a.dtype, fast=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        a, scale_a, b, scale_b = ctx.saved_tensors
        form, of_a, of_b = ctx.form, None, None
        in_a, in_b = b is not None and "input_gradient" in form.products, scale_a is not None
        g_last, g_first = cast_both(gradient, form, last=in_a, first=in_b, name=form.backward)
        if g_last is not None:
            whole = None
            if scale_b is None:
                whole, _ = cast_both(b, form, last=True, first=False, scaling="tensorwise")
            of_a = times(g_last, whole or CodedLines(b, scale_b), gradient.dtype)
        elif b is not None:
            of_a = aten.matmul(gradient, b.t())
        if g_first is not None:
            # As the weight lies, so that its gradient need not be copied.
            kept = CodedLines(a, scale_a)
            of_b = times(g_first, kept, gradient.dtype).t() if ctx.turned else times(kept, g_first, gradient.dtype)
        elif a is not None:
            of_b = aten.matmul(gradient.t(), a).t() if ctx.turned else aten.matmul(a.t(), gradient)
        return of_a, of_b, None, None, None, None


def times(a: CodedLines, b: CodedLines, dtype: torch.dtype, fast: bool = False) -> Tensor:
    """Return ``a @ b.t()`` of the numbers that (I, S) and (J, S) stand for. fast: with sums of fewer bits."""
    scale_a, scale_b = a.scale, b.scale
    if scale_a.dim() == 2:
        rows = F.ScalingType.BlockWise1x128
        kinds = [rows if len(each.scale) == len(each.codes) else F.ScalingType.BlockWise128x128 for each in (a, b)]
        scale_b = scale_b if kinds[1] == rows else scale_b.t()
        return F.scaled_mm(a.codes, b.codes.t(), scale_a, kinds[0], scale_b, kinds[1], output_dtype=dtype)
    if scale_a.dim():
        scale_a, scale_b = scale_a[:, None], scale_b.expand(len(b.codes))[None].contiguous()
    return aten._scaled_mm(a.codes, b.codes.t(), scale_a, scale_b, None, None, dtype, fast)


@functools.cache
def multiplies_blocks(device: torch.device) -> bool:
    """Return whether torch multiplies codes of 128 blocks there (sm_90, CUDA 12.9), by trying; it logs if not."""
    why = f"a GPU of capability {torch.cuda.get_device_capability(device)}"
    if torch.cuda.get_device_capability(device)[0] == 9:
        x = torch.linspace(-1, 1, 512 * 512, device=device, dtype=torch.bfloat16).view(512, 512)
        form = Format("blockwise", backward="e4m3")
        lines, squares = (cast_both(x, form, last=True, first=False, square=square)[0] for square in (False, True))
        exact, why = x.float() @ x.float().t(), "wrong numbers"
        try:
            made = [times(lines, each, torch.bfloat16) for each in (lines, squares) if lines and each]
            if all(((each - exact).norm() < 0.1 * exact.norm()).item() for each in made):
                return True
        except (RuntimeError, ValueError, AttributeError) as error:
            why = str(error).splitlines()[0]
    logger.info("hmpx: blocks of 128 are decoded and multiplied in FP32 on %s: %s", device, why)
    return False


# The casts in both directions at once

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
    x: Tensor, form: Format, *, last: bool, first: bool, square: bool = False, name: str = "", scaling: str = ""
) -> tuple[CodedLines | None, CodedLines | None]:
    """Return `x` in FP8 for a sum along its `last` dimension, and transposed for one along its `first`, or None.

    Args:
        x: BF16 (M, N) that `can_cast` agrees to. N is a multiple of 16, and M is 1 at least.
        square: whether blocks are 128 x 128.
        name: "e4m3" or "e5m2", where it is another than the format's in the forward pass.
        scaling: "tensorwise", "rowwise" or "blockwise", where it is another one than the format's.
    """
    if not (last or first):
        return None, None
    name, scaling = name or form.forward, scaling or form.scaling
    turned = x.stride(0) == 1 and x.stride(1) != 1 and not x.shape[0] % 16
    if turned:
        x, last, first = x.t(), first, last
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
    of_last = made((rows, columns), dtype=DTYPES[name]) if last else x
    of_first = made((columns, held), dtype=DTYPES[name]) if first else x
    shapes: dict[int, list[tuple[int, ...]]] = {
        _WHOLE: [(), ()], _LINES: [(rows,), (columns,)], _SQUARES: [blocks, blocks[::-1]],
        _BLOCKS: [(blocks[1], rows), (blocks[0], columns)],
    }  # fmt: skip
    scales = [made(shape, dtype=torch.float32) for shape in shapes[kind]]
    constants = kind, torch.finfo(DTYPES[name]).max, form.power_of_two, last, first
    _launch("encode", tiles, (x, found, of_last, of_first, *scales, *where, held, programs), *constants)
    if kind == _WHOLE:
        scales[1] = scales[0]
    if kind == _BLOCKS:
        scales = [scale.t() for scale in scales]
    both = CodedLines(of_last, scales[0]) if last else None, CodedLines(of_first, scales[1]) if first else None
    return both[::-1] if turned else both


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
