"""A step in slices: the optimizer sees a bounded number of elements at a time.

One pair of FP32 buffers, for weights and gradients, serves every slice of a step and stays in the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch

from hmpx.updates.gradients.shown import can_be_written
from hmpx.updates.layout import memory_order, unfolded
from hmpx.updates.optimizer_scope import by_memory
from hmpx.updates.optimizer_state import GatheredHandover, Handover, SlicedState
from hmpx.updates.ranks.sharding import held_part, like, local
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
    room = size
    for run in runs:
        count = run.count
        if batch and (count > room or run.overlaps is not None):
            yield batch
            batch, room = [], size
        pieces = [run] if count <= room and run.box is None else list(parts(run))
        if count <= room and not pieces[0].is_gathered and run.overlaps is None:
            batch += pieces
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
        self._state_dtype, self._by_memory = state_dtype, by_memory(optimizer)
        self._group = {p: i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
        with torch.no_grad():
            self._size = slice_size(sum(local(p).numel() for p in self._group))
        self._versions: dict[Tensor, dict[str, int] | None] = {}
        self.written: list[str] = []  # names of parameters whose weights or state may have changed
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
        together = [local(p), self._grads[p], *state.tensors(), *self._way.held(p)]
        if all(tensor.is_contiguous() for tensor in together):
            return run.parts(self._size, order=None)
        return run.parts(self._size, memory_order(p) if run.box is None else tuple(range(p.dim())))

    def _batch(self, batch: list[Run]) -> None:
        states = self._optimizer.state
        shadows = self._shadows(batch) if batch else []
        others, self._others = self._others, []
        whole: list[Handover] = []
        try:
            for run, shadow in zip(batch, shadows, strict=True):
                if run.start is None:
                    kind = GatheredHandover if run.is_gathered else Handover
                    whole.append(kind(self._optimizer, run, shadow, self._state_dtype, self._by_memory))
                else:
                    self._sliced[run.param].show(run, shadow)
            shown = {run.param: shadow for run, shadow in zip(batch, shadows, strict=True)}
            self._versions = {shadow: _versions(states.get(shadow)) for shadow in shadows}
            grads = [(shadow.grad, shadow.grad._version) for shadow in shadows]
            with self._only(shown | {p: p for p in others}):
                self._step(self._optimizer)
        except BaseException:
            self.written += [run.name for run, shadow in zip(batch, shadows, strict=True) if self._has_moved(shadow)]
            for handover in whole:
                handover.undo()
            for shadow in shadows:
                states.pop(shadow, None)
            raise
        self.written += [run.name for run in batch]
        for handover in whole:
            handover.finish(self._numbers)
        for run, shadow, grad in zip(batch, shadows, grads, strict=True):
            self._hand_back(run, shadow.grad, *grad)
            if run.start is not None:
                self._sliced[run.param].take(run, shadow, self._numbers)
                if run.is_last:
                    self._sliced.pop(run.param).finish()
            run.written()
            for block, x in run.spread(held_part(run.param, shadow) if run.is_gathered else shadow):
                self._way.write(block, x, self._numbers)

    def _shadows(self, batch: list[Run]) -> list[Tensor]:
        """FP32 weights with FP32 gradients; plain tensors, which the listed classes take for parameters."""
        counts = [run.count for run in batch]
        weights, grads = self._room(sum(counts), batch[0].param.device)
        shadows = [_laid_out(run, run.param, flat) for run, flat in zip(batch, weights.split(counts), strict=True)]
        self._way.read_all(*_blocks(batch, shadows))
        shadows = [_gathered(*each) if each[0].is_gathered else each[1] for each in zip(batch, shadows, strict=True)]
        copied, wide = [], []
        for run, shadow, flat in zip(batch, shadows, grads.split(counts), strict=True):
            grad = self._grads[run.param]
            if run.is_gathered:
                continue
            if grad.layout is not torch.strided:
                shadow.grad = grad.float()
                continue
            copied.append(run)
            wide.append(_laid_out(run, run.param if self._by_memory else grad, flat).data)  # a version of its own
            shadow.grad = wide[-1]
        if wide:
            runs, outs = _blocks(copied, wide)
            torch._foreach_copy_(outs, [run.of(self._grads[run.param]) for run in runs])
        return shadows

    def _has_moved(self, shadow: Tensor) -> bool:
        """Whether a step that raised has written to state that it was shown; kernels of torch's tell by the count."""
        before = self._versions.get(shadow)
        return before is not None and _versions(self._optimizer.state.get(shadow)) != before

    def _hand_back(self, run: Run, left: Tensor | None, shown: Tensor, version: int) -> None:
        """Do to the parameter's gradient what the step did to the one that it was shown."""
        scaled = getattr(self._optimizer, "grad_scale", None) is not None  # fused kernels unscale, and tell nobody
        if left is shown and left._version == version and not scaled:
            return
        p = run.param
        if left is None:
            p.grad = None if run.is_last else p.grad
            return
        if left.layout is not torch.strided:
            p.grad = left.to(p.grad.dtype)
            return
        if not can_be_written(p.grad):
            p.grad = p.grad.clone(memory_format=torch.contiguous_format)
            self._grads[p] = _held_gradient(run)
        for block, part in run.spread(held_part(p, left) if run.is_gathered else left):
            block.of(self._grads[p]).copy_(part)

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
    """`flat` as a run is shown: a part flat, a whole parameter in its shape and in the layout of `empty_like(like)`."""
    if run.start is not None:
        return flat
    held = local(like)
    return unfolded(flat, held.shape, memory_order(held))


def _blocks(runs: Iterable[Run], shown: Iterable[Tensor]) -> tuple[list[Run], list[Tensor]]:
    """The runs that can be cut out of tensors, and the places of each in what is shown."""
    spread = [each for run, tensor in zip(runs, shown, strict=True) for each in run.spread(tensor)]
    return [run for run, _ in spread], [tensor for _, tensor in spread]


def _versions(state: dict | None) -> dict[str, int] | None:
    return state and {key: value._version for key, value in state.items() if isinstance(value, Tensor)}
