"""Cuts a step into batches: segments of the parameters with a bounded number of elements.

Only an optimizer that reads each element, or each parameter, by itself can be stepped so; others step whole.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from hmpx.rounding.devices import is_lazy, kernels_for
from hmpx.rounding.state_codes import SCALES, code_of
from hmpx.updates.holding.held import Segment, memory_order
from hmpx.updates.holding.state_forms import form_of
from hmpx.updates.ranks.sharding import local
from hmpx.updates.stepping.optimizer_classes import scope_of

Tensor = torch.Tensor
Optimizer = torch.optim.Optimizer

_ALIGN = 64  # elements: where a slice begins, vectorised kernels would begin a vector in the whole parameter too
_FLOOR, _CEILING = 1 << 17, 1 << 20
_FLOOR_OF_ACCELERATORS = 1 << 20
# FP32 weight, gradient, new state and temporaries of this part of the elements are less than 0.5 bytes a parameter.
_PARTS = 60
_PARTS_FUSED, _PARTS_FUSED_READ = 20, 34  # torch's fused kernels have no temporaries; the latter where state is read
_BYTES = 0.4  # a parameter, that a step in so many parts takes
_MOST_OF_PART = 1 << 24  # elements of a step in backward, or the usual part of all
_SHARE = 32  # of a GPU's memory, this part of which a step may take: activations are gone by then


def slice_size(elements: int, parts: int = _PARTS, device: torch.device | None = None) -> int:
    """Return the number of elements that the optimizer sees at once, for a model of `elements` elements.

    A step then takes up to 0.5 bytes per parameter, or 2 MB if that is more. Smaller slices than `_FLOOR` spend more
    time on calls than on updates; the buffers of larger ones than `_CEILING` do not stay in the cache of a CPU. On an
    accelerator, where calls cost more and there is no such cache, the step of any model has about `parts` parts, or as
    few as fit into a `_SHARE` of the memory.
    """
    size = max(elements // parts, _FLOOR)
    if device is None or device.type == "cpu":
        return min(size, _CEILING) // _ALIGN * _ALIGN
    return max(size, _FLOOR_OF_ACCELERATORS, int(_memory(device) / _SHARE / (_BYTES * parts))) // _ALIGN * _ALIGN


@functools.cache
def _memory(device: torch.device) -> int:
    """Return the bytes of memory of a GPU; 0 of another device, and of a GPU that is not here."""
    is_here = device.type == "cuda" and torch.cuda.is_available()
    return torch.cuda.get_device_properties(device).total_memory if is_here else 0


def batches_of(
    segments: list[Segment],
    optimizer: Optimizer,
    elements: int,
    beside: Callable[[Segment], Sequence[Tensor]],
    *,
    is_part: bool = False,
) -> Iterator[list[Segment]]:
    """Cut segments, each a whole parameter of one device, into batches.

    Args:
        elements: of all parameters of the optimizer, held here.
        is_part: they are stepped in backward, while activations are there.
        beside: returns the tensors that are stepped along with a parameter: its gradient, state and masters.
    """

    def parts(segment: Segment, size: int) -> Iterable[Segment]:
        p, together = segment.param, beside(segment)
        if not p.dim() or any(tensor.layout is not torch.strided for tensor in together):
            return [segment]
        ends = form_of(segment).ends(p)
        if all(tensor.is_contiguous() for tensor in (local(p), *together)):
            return segment.parts(size, ends)
        # Rows are ranges of elements. Where they lie apart, a fused kernel would walk parts of them in another order.
        count, held = segment.count, local(p)
        rows = math.lcm(count // len(held), _ALIGN) if ends is None and memory_order(held)[0] == 0 else count
        return segment.parts(size, lambda element: element // rows * rows, by_rows=True)

    if not segments:
        return iter(())
    if sum(segment.param.numel() for segment in segments) > _FLOOR:  # not what this rank holds: ranks must agree
        segments = _each_group_first(segments, optimizer)
    number = _parts_of(optimizer, segments)
    size = slice_size(elements, number, segments[0].param.device)
    size = min(size, max(elements // number // _ALIGN * _ALIGN, _MOST_OF_PART)) if is_part else size
    largest = size if size > _CEILING else None  # there is no cache for the sake of which parts are to be equal
    return cut(segments, size, parts if scope_of(optimizer) == "element" else lambda segment, _: [segment], largest)


def cut(
    segments: Iterable[Segment],
    size: int,
    parts: Callable[[Segment, int], Iterable[Segment]],
    largest: int | None = None,
) -> Iterator[list[Segment]]:
    """Yield batches of at most `size` elements: small parameters together, a large one by itself, in equal parts.

    The small ones in front come first; those between large ones wait until there are enough of them for a batch.

    The parts of a large parameter are equal, so the batches of its parts use the same addresses of the shared FP32
    memory in the same way. Each thread then finds its data in its own cache, and cores send each other nothing.

    A sharded parameter always goes through `parts`. One that must be gathered is a batch of its own, so that all ranks
    gather in the same order.

    Args:
        parts: gets a parameter and the size of a part.
        largest: the most elements of a small parameter; a quarter of `size` if None.
    """
    batch: list[Segment] = []
    free, is_first = size, True
    for segment in segments:
        count = segment.count
        alone = count > (size // 4 if largest is None else largest)
        if batch and (is_first if alone else count > free):
            yield batch
            batch, free = [], size
        is_first = is_first and not alone
        is_cut = segment.box is not None or count > size
        cuts = list(parts(segment, even_part(count, size))) if is_cut else [segment]
        if alone or cuts[0].is_gathered:
            yield from ([each] for each in cuts)
            continue
        for each in cuts:
            batch.append(each)
            free -= each.count
    if batch:
        yield batch


def even_part(count: int, size: int) -> int:
    """Return the size of equal parts of `count` elements, none larger than `size`."""
    number = max(-(-count // size), 1)
    part = -(-count // number)
    return min(-(-part // _ALIGN) * _ALIGN, size)


def _each_group_first(segments: list[Segment], optimizer: Optimizer) -> list[Segment]:
    """Put the smallest parameter of each group first: a wrong setting then raises before much is written."""
    group = {p: i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
    smallest = {group[segment.param]: segment for segment in sorted(segments, key=lambda each: -each.param.numel())}
    first = list(smallest.values())
    return first + [segment for segment in segments if segment not in first]


def _parts_of(optimizer: Optimizer, segments: list[Segment]) -> int:
    """Return the number of parts in which these parameters are stepped."""
    if not all(group.get("fused") for group in optimizer.param_groups):
        return _PARTS
    p = segments[0].param
    if p.device.type != "cpu" and kernels_for(p) is None:
        return _PARTS  # the temporaries are those of a transfer by torch's operators
    return _PARTS_FUSED if all(form_of(segment).as_left for segment in segments) else _PARTS_FUSED_READ


def can_be_cut(optimizer: Optimizer, segments: Iterable[Segment]) -> bool:
    """Whether the step of a listed class can be taken in batches: gradients are dense, and state lies as its parameter.

    False on XLA, where a step is one graph and the compiler bounds its memory.
    """
    by_element = scope_of(optimizer) == "element"
    for segment in segments:
        p, state = segment.param, optimizer.state.get(segment.param)
        if is_lazy(p) or (p.grad is not None and p.grad.layout is not torch.strided):
            return False
        for key, value in state.items() if by_element and isinstance(state, dict) else ():
            is_apart = isinstance(value, Tensor) and value.dim() and value.shape != p.shape
            if is_apart and code_of(key) is None and not str(key).startswith(SCALES):
                return False
    return True
