"""Casts the parameters of models in place, as a recipe says.

Parameters stay the same objects. Those that share elements without being one object (``Parameter(embedding.weight)``,
``a.data = b.data``) share them afterwards too. Each module notes which of its parameters were cast, and
from which dtype: a copy of the module has this note, and none of them counts as one that came in low precision.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import weakref
from collections.abc import Iterator, Sequence
from os.path import commonpath
from typing import Any

import torch

from hmpx.base import process_state
from hmpx.base.dtype_names import dtype_name
from hmpx.base.module_tree import modules_in, own_parameters
from hmpx.errors import HmpxError
from hmpx.recipes.keys import dtypes_in_yaml
from hmpx.recipes.parameter_dtypes import CAST, LOW, in_words, parameter_dtypes
from hmpx.recipes.recipe import Recipe
from hmpx.rounding.devices import is_lazy
from hmpx.updates.ranks.ddp import replicas
from hmpx.updates.ranks.sharding import is_sharded, refuse_shell, widened

logger = logging.getLogger("hmpx")
Tensor = torch.Tensor
Parameter = torch.nn.Parameter
_STEPS, _SAMPLE = 8, 1024  # how long frozen weights are looked at, and how many numbers of each


def tell_cast(cast: Sequence[Parameter]) -> None:
    """Log which parameters a recipe has cast."""
    if cast:
        numbers, dtypes = sum(p.numel() for p in cast), " and ".join({dtype_name(p.dtype): None for p in cast})
        logger.info("hmpx: %d parameters (%s numbers) were cast to %s by the recipe", len(cast), f"{numbers:,}", dtypes)


def cast_models(models: Sequence[torch.nn.Module], recipe: Recipe, undo: contextlib.ExitStack) -> list[Parameter]:
    """Cast the floating parameters of models in place, and their buffers where a recipe maps dtypes.

    Returns:
        The parameters that had another dtype.

    Raises:
        HmpxError: a parameter must be cast and is replicated or sharded already, or cannot be cast.
    """
    named = {p: name for model in reversed(models) for name, p in torch.nn.Module.named_parameters(model)}
    for p, name in named.items():
        if isinstance(p, torch.nn.parameter.UninitializedParameter):
            raise HmpxError(
                f"parameter {name!r} of a lazy module has no shape yet: run a batch through the model before"
            )
    dtypes = {p: dtype for model in models for p, dtype in parameter_dtypes(model, recipe).items()}
    others = {p: name for p, name in named.items() if p.is_floating_point() and p.dtype is not dtypes[p]}
    reduced = replicas()
    for p, name in others.items():
        refuse_shell(p, name)
        if p in reduced or is_sharded(p):
            raise HmpxError(
                f"parameter {name!r} is {p.dtype} and replicated or sharded already: cast it to {dtypes[p]} before the "
                f"model is wrapped{widened() if is_sharded(p) else ''}"
            )
        if p.is_cpu and p.is_shared():
            raise HmpxError(
                f"parameter {name!r} is {p.dtype} in memory that processes share: cast it to {dtypes[p]} before "
                "share_memory(), or the others would not see its updates"
            )
    to: dict[Tensor, torch.dtype] = {p: dtypes[p] for p in others}
    mapped = recipe.mapped()
    buffers = [buffer for model in models for buffer in model.buffers()]
    to.update((buffer, mapped[buffer.dtype]) for buffer in buffers if buffer.dtype in mapped)
    _note(models, others, dtypes, undo)
    parts: list[Tensor] = []
    for members in _by_storage([*to], [*named, *buffers]):
        new = _cast_together(members, to, named) if len(members) > 1 else {}
        if not new:
            new = {each: each.data.to(to[each]) for each in members if each in to}
        parts += [p for p, data in new.items() if p in others and _elements(p) > _elements(data)]
        for each, data in new.items():
            grad = each.grad if each in others else None
            undo.callback(_assign, each, each.data, grad)
            _assign(each, data, None if grad is None else grad.to(data.dtype))
    if parts:
        name = next(name for p, name in others.items() if p is parts[0])
        logger.warning("hmpx: %r and %d more were parts of larger storages, and are no more", name, len(parts) - 1)
    if frozen := {p for p in others if p.dtype in LOW and not p.requires_grad and not p.is_meta}:
        weights = FrozenWeights(models, frozen)
        process_state.first_steps.append(weights.look)
        undo.callback(weights.end)
    return [*others]


class FrozenWeights:
    """Frozen weights that a recipe has cast. A program that averages into them loses its updates, and is told so.

    In the first steps of optimizers each is compared with what it was: a write raises its version, or it is in other
    memory. One that two steps find written to is an average, and not a checkpoint that was loaded. No weight is held: a
    model may go, or be sharded, before the first step.
    """

    def __init__(self, models: Sequence[torch.nn.Module], frozen: set[Parameter]) -> None:
        self._places = {
            f"{prefix}.{name}".lstrip("."): (weakref.ref(module), name)
            for model in models
            for prefix, module in model.named_modules()
            for name, p in own_parameters(module).items()
            if p in frozen
        }
        self._moves, self._looks = dict.fromkeys(self._places, 0), 0
        self._marks: dict[str, tuple[tuple, Tensor]] = {}

    def end(self) -> None:
        with contextlib.suppress(ValueError):
            process_state.first_steps.remove(self.look)

    def look(self) -> None:
        """Compare each weight with what it was in the step before."""
        for place, (held_by, name) in self._places.items():
            module = held_by()
            p = None if module is None else module._parameters.get(name)
            # A weight that somebody has sharded, offloaded or cast again is another one.
            if p is None or is_sharded(p) or p.is_meta or p.layout is not torch.strided or p.dtype not in LOW:
                self._marks.pop(place, None)
                continue
            flat = p.data.as_strided((min(_SAMPLE, _extent(p)),), (1,))
            (at, numbers), before = ((p.data_ptr(), p._version), flat.clone()), self._marks.get(place)
            if before is not None and before[1].shape == numbers.shape and before[1].device == numbers.device:
                self._moves[place] += not (at == before[0] and torch.equal(numbers, before[1]))
            self._marks[place] = at, numbers
        self._looks += 1
        moved = [place for place, times in self._moves.items() if times > 1]
        if moved:
            logger.warning(
                "hmpx: %s were frozen in float32, were cast by the recipe, and are written to in each step: an average "
                "loses its small updates there. %s in the recipe keeps them in float32",
                *(in_words(moved), dtypes_in_yaml([_common(moved)])),
            )
        if moved or self._looks > _STEPS:
            self.end()


def _common(names: Sequence[str]) -> str:
    """Return the innermost module that has all parameters of these names."""
    return commonpath([name.rpartition(".")[0].replace(".", "/") for name in names]).replace("/", ".") or "*"


def _note(
    models: Sequence[torch.nn.Module],
    others: dict[Parameter, str],
    dtypes: dict[Parameter, torch.dtype],
    undo: contextlib.ExitStack,
) -> None:
    for module in (module for model in models for module in modules_in(model)):
        cast = {name: p.dtype for name, p in own_parameters(module).items() if p in others and dtypes[p] in LOW}
        if cast:
            before = vars(module).get(CAST)
            undo.callback(vars(module).pop if before is None else vars(module).__setitem__, CAST, before)
            vars(module)[CAST] = (before or {}) | cast


def _by_storage(cast: Sequence[Tensor], known: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield the tensors that are to be cast, each once, with the known tensors in the same memory."""
    members: dict[int, dict[int, Tensor]] = {_storage(each): {} for each in cast}
    for each in known:
        if (key := _storage(each)) in members:
            members[key][id(each)] = each
    for found in members.values():
        yield [*found.values()]


def _storage(tensor: Tensor) -> int:
    """Return a number of the memory of a tensor; of a lazy, sharded or quantized one, of the tensor."""
    with contextlib.suppress(RuntimeError, NotImplementedError):
        if not is_lazy(tensor):
            return tensor.untyped_storage()._cdata  # on the meta device, all addresses are 0
    return id(tensor)


def _cast_together(members: Sequence[Tensor], to: dict[Tensor, torch.dtype], names: dict[Any, str]) -> dict:
    """Cast the memory of tensors of one storage, and return each one's view of it; none if they share no element.

    Raises:
        HmpxError: two share elements, and not both are cast to one dtype.
    """
    places = [(each.storage_offset(), _extent(each)) for each in members]
    begin, end = min(start for start, _ in places), max(start + extent for start, extent in places)
    in_order = sorted(zip(places, members, strict=True), key=lambda each: each[0])
    shared = [(a, b) for ((at, size), a), ((then, _), b) in itertools.pairwise(in_order) if then < at + size]
    dtypes = {(each.dtype, to.get(each, each.dtype)) for each in members}
    if shared and len(dtypes) > 1:
        both = " and ".join(f"{names.get(each, 'a buffer')!r} ({to.get(each, each.dtype)})" for each in shared[0])
        raise HmpxError(f"{both} share memory, and have two dtypes by the recipe: `parameters` can give them one")
    if not shared:
        return {}
    data = members[0].data.as_strided((end - begin,), (1,), begin).to(to[members[0]])
    return {m: data.as_strided(m.shape, m.stride(), m.storage_offset() - begin) for m in members}


def _elements(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes() // tensor.element_size()


def _extent(tensor: Tensor) -> int:
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in steps) if tensor.numel() else 0


def _assign(p: Tensor, data: Tensor, grad: Tensor | None) -> None:
    p.grad = None
    p.data = data
    p.grad = grad
