"""A step in slices: the optimizer sees a bounded number of elements at a time.

One pair of FP32 buffers, for weights and gradients, serves every slice of a step and stays in the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch

from hmpx.sharding import held_part, like, local
from hmpx.updates.state import GatheredHandover, Handover, SlicedState
from hmpx.updates.weights import Numbers, Run, Stochastic

Tensor = torch.Tensor
Parameter = torch.nn.Parameter
Optimizer = torch.optim.Optimizer

_ALIGN = 64  # elements: where a slice begins, vectorised kernels would begin a vector in the whole parameter too
_FLOOR, _CEILING = 1 << 17, 1 << 20
# FP32 weight, gradient, new state and temporaries of this part of the elements are less than 0.5 bytes a parameter.
_PARTS = 60


def slice_size(elements: int) -> int:
    """How many elements of a model with so many the optimizer sees at once.

    A step then takes up to 0.5 bytes per parameter, or 2 MB where that is more. Below the floor, calls cost more than
    the update; above the ceiling, buffers leave the cache.
    """
    return min(max(elements // _PARTS, _FLOOR), _CEILING) // _ALIGN * _ALIGN


def cut(runs: Iterable[Run], size: int, parts: Callable[[Run], Iterable[Run]]) -> Iterator[list[Run]]:
    """Batches of at most `size` elements: small parameters together, large ones in `parts`.

    A sharded parameter is always given to `parts`; what has to be gathered is a batch of its own, so that all ranks
    gather in the same order. Parameters that share memory come one after the other, as they would without slices.
    """
    batch: list[Run] = []
    room, places = size, set()
    for run in runs:
        count, place = run.count, local(run.param).data_ptr()
        if batch and (count > room or place in places):
            yield batch
            batch, room, places = [], size, set()
        pieces = [run] if count <= room and run.box is None else list(parts(run))
        if count <= room and not pieces[0].is_gathered:
            batch += pieces
            places.add(place)
            room -= count
        else:
            yield from ([piece] for piece in pieces)
    if batch:
        yield batch


class SlicedStep:
    """One step of an optimizer that treats each element, or each parameter, by itself."""

    def __init__(
        self, optimizer: Optimizer, step: Callable, way: Stochastic, state_dtype: torch.dtype, numbers: Numbers
    ) -> None:
        self._optimizer, self._step, self._way, self._numbers = optimizer, step, way, numbers
        self._state_dtype = state_dtype
        self._group = {p: i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
        with torch.no_grad():
            self._size = slice_size(sum(local(p).numel() for p in self._group))
        self._buffers: tuple[Tensor, Tensor] | None = None
        self._sliced: dict[Parameter, SlicedState] = {}
        self._grads: dict[Parameter, Tensor] = {}
        self._others: list[Parameter] = []

    def run(self, runs: list[Run], others: list[Parameter], by_element: bool) -> None:
        """Step BF16 parameters, each given as a whole run, on FP32 shadows, and `others` as they are.

        Under `torch.no_grad()`, and without a closure.
        """
        self._others = others
        self._grads = {run.param: _held_gradient(run) for run in runs}
        for device in {run.param.device: None for run in runs}:
            here = [run for run in runs if run.param.device == device]
            if sum(run.param.numel() for run in here) > _FLOOR:  # not what this rank holds: ranks must agree
                here = self._each_group_first(here)
            for batch in cut(here, self._size, self._parts if by_element else lambda run: [run]):
                self._batch(batch)
        if self._others:
            self._batch([])

    def _each_group_first(self, runs: list[Run]) -> list[Run]:
        """The smallest parameter of each group in front: what is wrong with a group shows before a write-back."""
        smallest = {self._group[run.param]: run for run in sorted(runs, key=lambda run: -run.param.numel())}
        first = list(smallest.values())
        return first + [run for run in runs if run not in first]

    def _parts(self, run: Run) -> Iterable[Run]:
        p = run.param
        if not p.dim():
            return [run]
        self._sliced[p] = state = SlicedState(self._optimizer.state, p, self._state_dtype)
        flat = local(p).is_contiguous() and self._grads[p].is_contiguous() and state.is_contiguous()
        return run.parts(self._size, rows=not flat)

    def _batch(self, batch: list[Run]) -> None:
        states = self._optimizer.state
        shadows = self._shadows(batch) if batch else []
        others, self._others = self._others, []
        whole: list[Handover] = []
        try:
            for run, shadow in zip(batch, shadows, strict=True):
                if run.start is None:
                    kind = GatheredHandover if run.is_gathered else Handover
                    whole.append(kind(self._optimizer, run, shadow, self._state_dtype))
                else:
                    self._sliced[run.param].show(run, shadow)
            shown = {run.param: shadow for run, shadow in zip(batch, shadows, strict=True)}
            with self._only(shown | {p: p for p in others}):
                self._step(self._optimizer)
        except BaseException:
            for handover in whole:
                handover.undo()
            for shadow in shadows:
                states.pop(shadow, None)
            raise
        for handover in whole:
            handover.finish(self._numbers)
        for run, shadow in zip(batch, shadows, strict=True):
            if run.start is not None:
                self._sliced[run.param].take(run, shadow, self._numbers)
                if run.is_last:
                    self._sliced.pop(run.param).finish()
            run.written()
            self._way.write(run, held_part(run.param, shadow) if run.is_gathered else shadow, self._numbers)

    def _shadows(self, batch: list[Run]) -> list[Tensor]:
        """FP32 weights with FP32 gradients; plain tensors, which the listed classes take for parameters."""
        counts = [run.count for run in batch]
        weights, grads = self._room(sum(counts), batch[0].param.device)
        shadows = [
            _laid_out(run, run.of(run.param), flat) for run, flat in zip(batch, weights.split(counts), strict=True)
        ]
        self._way.read_all(batch, shadows)
        shadows = [_gathered(*each) if each[0].is_gathered else each[1] for each in zip(batch, shadows, strict=True)]
        narrow, wide = [], []
        for run, shadow, flat in zip(batch, shadows, grads.split(counts), strict=True):
            if run.is_gathered:
                continue
            grad = self._grads[run.param]
            if grad.dtype is torch.bfloat16 and grad.layout is torch.strided:
                narrow.append(run.of(grad))
                wide.append(_laid_out(run, narrow[-1], flat))
                shadow.grad = wide[-1]
            else:
                shadow.grad = run.of(grad).float()
        if wide:
            torch._foreach_copy_(wide, narrow)
        return shadows

    def _room(self, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
        if self._buffers is None or self._buffers[0].numel() < count or self._buffers[0].device != device:
            self._buffers = tuple(torch.empty(count, dtype=torch.float32, device=device) for _ in range(2))
        return self._buffers[0][:count], self._buffers[1][:count]

    def _only(self, shown: dict[Parameter, Tensor]) -> Showing:
        lists = [[] for _ in self._optimizer.param_groups]
        for p, q in shown.items():
            lists[self._group[p]].append(q)
        return Showing(self._optimizer.param_groups, lists)


class Showing:
    """`param_groups` hold other parameters inside the block; the lists themselves stay the same objects."""

    def __init__(self, groups: list[dict], lists: list[list[Tensor]]) -> None:
        self._groups, self._lists = groups, lists

    def __enter__(self) -> None:
        self._before = [list(group["params"]) for group in self._groups]
        for group, shown in zip(self._groups, self._lists, strict=True):
            group["params"][:] = shown

    def __exit__(self, *exception: object) -> None:
        for group, before in zip(self._groups, self._before, strict=True):
            group["params"][:] = before


def _held_gradient(run: Run) -> Tensor:
    """Of what this rank holds; a gradient that is sharded in another way is brought into this one, once a step."""
    return run.param.grad if run.box is None else held_part(run.param, run.param.grad)


def _gathered(run: Run, shadow: Tensor) -> Tensor:
    """The whole of a sharded parameter, for an optimizer that looks at whole ones; every rank computes the same."""
    whole = like(run.param, shadow).full_tensor()
    whole.grad = run.param.grad.full_tensor().float()
    return whole


def _laid_out(run: Run, like: Tensor, flat: Tensor) -> Tensor:
    """`flat` in the shape of `like`; a whole parameter in another memory layout as `like.float()` would be."""
    if run.start is None and not like.is_contiguous():
        return torch.empty_like(like, dtype=flat.dtype)
    return flat.view(like.shape)
