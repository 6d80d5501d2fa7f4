"""Finds tensors in arguments and results of ops, reads what may be read of them, and puts back what a run changes."""

from __future__ import annotations

import contextlib
import math
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from hmpx.base import process_state, run_in_region
from hmpx.base.changes import Changes
from hmpx.base.compiling import when_imported
from hmpx.base.tensors import dtype_name, tensors_in
from hmpx.base.torch_private import in_torch_func, private, tree_map_only
from hmpx.ops.wrapping.overriding import PLAIN
from hmpx.updates.holding.sharding import local

Tensor = torch.Tensor
LOW = frozenset({torch.bfloat16, torch.float16})
EXACT_UP_TO = {torch.bfloat16: 256, torch.float16: 2048}  # up to these, every integer is a number of the dtype
_sum, _detach, _isfinite, _all = Tensor.sum, Tensor.detach, torch.isfinite, Tensor.all
_item = Tensor.item
_SUMMED = frozenset(
    {torch.bfloat16, torch.float32, torch.float64}
)  # whose sums seldom overflow; in their own dtype it is quick
_unseen = private("torch._C._DisableTorchDispatch")


def floating(values: Iterable[Any], complex_too: bool = False) -> list[Tensor]:
    """Return the floating tensors in `values`, in order, in lists, tuples and mappings too."""
    found = tensors_in(values)
    return [t for t in found if t.is_floating_point() or (complex_too and t.is_complex())]


def widened(value: Any) -> Any:
    """Return a tensor of low precision in FP32, and anything else as it is."""
    return value.float() if isinstance(value, Tensor) and value.dtype in LOW else value


def dtypes(value: object) -> set[torch.dtype]:
    """Return the dtypes of the floating tensors in `value`."""
    return {tensor.dtype for tensor in floating((value,))}


def sample(tensor: Tensor, most: int = 1024) -> Tensor:
    """Return at most `most` elements of what this rank holds, evenly spaced, flat; none where its memory was freed."""
    part = local(tensor).detach()
    if not has_numbers(part):
        return part.new_empty(0)
    flat = (torch.view_as_real(part.resolve_conj()) if part.is_complex() else part).reshape(-1)
    step = -(-flat.numel() // most)
    return flat[:: step + (step % 2 == 0)] if step > 1 else flat  # an odd step does not stay in one column of a matrix


def held_here(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor. One that is on its way from other ranks is waited for."""
    part = local(tensor)
    return part.trigger_wait() if hasattr(part, "trigger_wait") else part


def has_numbers(tensor: Tensor) -> bool:
    """Return whether the storage is as large as the tensor: FSDP2 frees that of whole ones, and to read it crashes."""
    if type(tensor) not in PLAIN or tensor.layout is not torch.strided or not tensor.numel():
        return True
    if tensor.is_contiguous():
        last = tensor.numel() - 1
    else:
        last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.untyped_storage().nbytes() > (tensor.storage_offset() + last) * tensor.element_size()


def low_dtype(tensor: Tensor) -> torch.dtype | None:
    """Return the low precision that all of some FP32 numbers are numbers of, where some are not 0; None for none."""
    fits = (dtype for dtype in (torch.bfloat16, torch.float16) if torch.equal(tensor.to(dtype).float(), tensor))
    return next(fits, None) if bool(tensor.any()) else None


def memory(tensor: Tensor) -> int:
    """Return the address at which the storage of a tensor begins; its views have the same one.

    A tensor without an address has a number of its own. Of a sharded tensor it is this rank's part.
    """
    part = local(tensor)
    try:
        return part.untyped_storage().data_ptr() or -id(part)
    except RuntimeError:  # it is sparse, or a shell around other tensors
        return -id(part)


View = tuple[int, torch.Size, tuple[int, ...], torch.dtype]  # address, shape, strides, dtype


def view_of(tensor: Tensor) -> View:
    """Return what two tensors have in common that are one view of the same memory."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def called_in_fp32(func: Callable, args: tuple, kwargs: dict[str, Any], of: Callable[[Tensor], Tensor]) -> Any:
    """Call an op with ``of(tensor)`` for each tensor, and with FP32 where it is told a dtype of low precision."""

    def again(value: Any) -> Any:
        return torch.float32 if isinstance(value, torch.dtype) and value in LOW else value

    args, kwargs = tree_map_only(Tensor, of, (args, kwargs))
    return func(*map(again, args), **{key: again(value) for key, value in kwargs.items()})


def differentiable(dtype: torch.dtype) -> bool:
    """Return whether tensors of a dtype have gradients: they are numbers, no indices or masks."""
    return dtype.is_floating_point or dtype.is_complex


def is_readable(tensor: Tensor) -> bool:
    """Return whether a tensor's values can be read without waiting for a device: it is plain, dense and on the CPU.

    Not inside torch.func, where a tensor stands for several.
    """
    return type(tensor) in PLAIN and tensor.is_cpu and tensor.layout is torch.strided and in_torch_func() is None


def is_finite(tensor: Tensor) -> bool:
    """Return whether a readable tensor has neither inf nor NaN. One sum tells, unless that overflows.

    No dispatch mode sees what is computed here.
    """
    with _unseen():
        tensor = _detach(tensor)
        tensor = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
        dtype = None if tensor.dtype in _SUMMED else torch.float32
        return math.isfinite(_item(_sum(tensor, dtype=dtype))) or bool(_item(_all(_isfinite(tensor))))


_WRITE_CONSTANTS = frozenset(
    "masked_fill where index_fill fill full pad constant_pad_nd index_put masked_scatter".split()
)


def is_masked(op: str, inputs: Iterable[Tensor], result: Tensor) -> bool:
    """Return whether the only non-finite values of a result are -inf from a mask."""
    with _unseen(), torch.no_grad(), run_in_region.region(False):
        odd = result[~torch.isfinite(result)]
        if not bool((odd == -math.inf).all()):
            return False
        return op in _WRITE_CONSTANTS or any(bool((each == -math.inf).any()) for each in inputs if is_readable(each))


def rounded_positions(values: Tensor, dtype: torch.dtype) -> str:
    """Say which whole numbers, as of positions, a cast to low precision makes others of; "" where it makes none."""
    exact = EXACT_UP_TO.get(dtype, math.inf)
    if values.numel() <= exact or type(values) not in PLAIN or values.layout is not torch.strided:
        return ""
    with _unseen():
        values = _detach(values)
        largest = _item(values.max())
        if not exact < largest < math.inf or not torch.equal(values, values.round()):
            return ""
    return f"positions above {exact} in {dtype_name(dtype)}, up to {largest:.0f}"


def ulp(weights: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the distance of each weight to the next larger number of a dtype."""
    return torch.ldexp(torch.full_like(weights, torch.finfo(dtype).eps), exponents_of(weights, dtype))


def exponents_of(weights: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the exponents of two of these numbers, in FP32; of 0 and of smaller ones, that of its least normal one."""
    return torch.frexp(weights.abs().clamp(min=torch.finfo(dtype).tiny))[1] - 1


# What a run of a model changes beside its results: random generators and buffers

_cat, _cpu = torch.cat, torch.default_generator  # torch's own: an observer asks for the state while ops are patched


def random_state() -> torch.Tensor:
    """Return the state of torch's generators (CPU and GPUs in use) as bytes; it changes when a number is drawn."""
    state = _cpu.get_state()
    if not torch.cuda.is_initialized():
        return state
    return _cat([state, *torch.cuda.get_rng_state_all()])


def set_random_state(state: torch.Tensor) -> None:
    """Restore a state from `random_state`, so that the same numbers are drawn again."""
    of_cpu = _cpu.get_state().numel()
    _cpu.set_state(state[:of_cpu])
    if state.numel() > of_cpu:
        devices = torch.cuda.device_count()
        torch.cuda.set_rng_state_all([*state[of_cpu:].view(devices, -1)])


@contextlib.contextmanager
def put_back(model: Any) -> Iterator[None]:
    """Put back the random generators of torch, Python and NumPy, the counts of gradients that were rounded by hmpx's
    numbers, and the buffers of a module, at the end.
    """
    modules = list(model.modules()) if isinstance(model, torch.nn.Module) else []
    tables = [vars(module).get("_buffers", {}) for module in modules]
    buffers = [(each, dict(each)) for each in tables]  # those that are None too
    values = {id(b): b.detach().clone() for _, owned in buffers for b in owned.values() if b is not None}
    python, numpy = random.getstate(), sys.modules.get("numpy")
    rounded, before = process_state.gradients_rounded, dict(process_state.gradients_rounded)
    drawn = numpy.random.get_state() if numpy is not None else None
    with torch.random.fork_rng():
        try:
            yield
        finally:
            random.setstate(python)
            rounded.clear()
            rounded.update(before)
            if numpy is not None:
                numpy.random.set_state(drawn)
            with torch.no_grad():
                for now, owned in buffers:
                    now.update(owned)
                    for buffer in owned.values():
                        if buffer is not None:
                            buffer.copy_(values[id(buffer)])


@contextlib.contextmanager
def eager() -> Iterator[None]:
    """Run compiled functions as they are written, also where Dynamo is imported only meanwhile."""
    with contextlib.ExitStack() as stack:
        changes = Changes()
        stack.callback(changes.close)
        when_imported("torch._dynamo", lambda _: stack.enter_context(torch.compiler.set_stance("force_eager")), changes)
        yield
