"""Casts the parameters of models in place, as a recipe says.

Parameters stay the same objects. Those that share elements without being one object (``Parameter(embedding.weight)``,
``a.data = b.data``) share them afterwards too. Each module notes which of its parameters were cast, and
from which dtype: a copy of the module has this note, and none of them counts as one that came in low precision.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import re
import weakref
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from os.path import commonpath
from typing import Any
from weakref import WeakKeyDictionary

import torch

from hmpx.base import process_state
from hmpx.base.tensors import dtype_name, is_lazy, modules_in, own_parameters
from hmpx.errors import HmpxError
from hmpx.ops.module_rules import has_forward
from hmpx.recipes.keys import DTYPES, dtype_of, dtypes_in_yaml
from hmpx.recipes.module_patterns import deciding_patterns, module_names
from hmpx.recipes.recipe import Recipe
from hmpx.updates.holding.sharding import is_sharded, is_shell, refuse_shell, widened
from hmpx.updates.ranks import replicas

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
    memory. One that two steps find written to is an average, and not a checkpoint that was loaded. A write through
    `.data` that changes no number leaves no trace here. No weight is held: a model may go, or be sharded, before the
    first step.
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


# The dtype of each parameter

_KEPT = ("_keep_in_fp32_modules_strict", "_keep_in_fp32_modules")  # classes list names of modules, or their ends, there
LOW = (torch.bfloat16, torch.float16)
# In a module: the dtype in which each of its parameters came that a recipe has cast to a low one.
CAST = "_hmpx_cast"
_SHOWN = 3


def parameter_dtypes(model: torch.nn.Module, recipe: Recipe) -> dict[torch.nn.Parameter, torch.dtype]:
    """Return the dtype that each parameter is to have; for a tied one, the first module that holds it decides.

    A rule of the recipe that names the parameter or its module decides. Without one, these keep their dtype:

    - a frozen parameter in low precision, which has no updates to lose
    - a frozen shell around tensors, such as a quantized parameter, which cannot be cast
    - FP64, under a recipe of FP32 weights
    - FP32 that is meant to stay FP32 (`_kept_in_fp32`), under a recipe of BF16 weights: a warning names it

    A `dtype_map` maps the last two like all others. A warning also names FP64 that is cast without a rule.
    """
    found: dict[torch.nn.Parameter, torch.dtype] = {}
    mapped, on_purpose, kept, narrowed = recipe.mapped(), _kept_in_fp32(model, recipe), [], []
    for module_name, module in zip(module_names(model), model.modules(), strict=True):
        for own_name, p in module.named_parameters(recurse=False):
            if p in found:
                continue
            name = f"{module_name}.{own_name}" if module_name else own_name
            stated = dtype_of(name, recipe.parameters)
            by_default = mapped.get(p.dtype, p.dtype)
            if recipe.parameter_dtype is not None and not mapped:
                by_default = DTYPES[recipe.parameter_dtype]
            to_fp32, was_double = by_default is torch.float32, p.dtype is torch.float64
            is_frozen = not p.requires_grad and ((p.dtype in LOW and to_fp32) or is_shell(p))
            if stated is not None:
                found[p] = stated
            elif is_frozen or (was_double and to_fp32 and not mapped):
                found[p] = p.dtype
            elif p in on_purpose and by_default in LOW and not mapped:
                kept.append(name)
                found[p] = p.dtype
            else:
                found[p] = by_default
                if was_double and by_default is not p.dtype:
                    narrowed.append(name)
    if kept:
        logger.warning(
            "hmpx: %s stay in float32, in which they came; %s in the recipe casts them",
            *(in_words(kept), dtypes_in_yaml([_module_of(kept[0])], "bfloat16")),
        )
    if narrowed:
        to = mapped.get(torch.float64, torch.bfloat16)
        way_out = f"; {dtypes_in_yaml([_module_of(narrowed[0])])} in the recipe keeps more" if to in LOW else ""
        logger.warning("hmpx: %s came in float64 and are cast to %s%s", in_words(narrowed), dtype_name(to), way_out)
    return found


# For each model: the recipe that has cast it, and by name whether a parameter was to stay in FP32 then.
_decided: WeakKeyDictionary[torch.nn.Module, tuple[object, dict[str, bool]]] = WeakKeyDictionary()


def _kept_in_fp32(model: torch.nn.Module, recipe: Recipe) -> set[torch.nn.Parameter]:
    """Return FP32 parameters of a model that also has low-precision ones, or that a class names for its loader.

    A recipe that casts a model again, as a trainer's does, decides as it did before: adapters that a checkpoint has
    loaded in FP32 in between are not meant to stay FP32.
    """
    before, known = _decided.get(model, (None, {}))
    if before is not recipe:
        known = {}
        _decided[model] = recipe, known
    found, kept = _kept(model), set[torch.nn.Parameter]()
    for name, p in torch.nn.Module.named_parameters(model):
        if known.setdefault(name, p in found) and p.dtype is torch.float32:
            kept.add(p)
    return kept


def _kept(model: torch.nn.Module) -> set[torch.nn.Parameter]:
    named = [(name, p) for name, p in torch.nn.Module.named_parameters(model) if p.is_floating_point()]
    wide = [(name, p) for name, p in named if p.dtype is torch.float32]
    ours = {
        p for each in modules_in(model) for name, p in own_parameters(each).items() if name in vars(each).get(CAST, ())
    }
    if any(p.dtype in LOW and p not in ours for _, p in named):
        return {p for _, p in wide}
    kept: set[torch.nn.Parameter] = set()
    for prefix, module in model.named_modules():
        of_diffusers = any(cls.__module__.startswith("diffusers.") for cls in type(module).__mro__)
        keys = _KEPT if of_diffusers else _KEPT[:1]  # in transformers the weaker key is for FP16 alone
        words = {word for key in keys for word in getattr(type(module), key, None) or ()}
        if words:
            pattern = re.compile("|".join(rf"(^|\.){word.replace('*', '.*')}($|\.)" for word in words))
            start = f"{prefix}." if prefix else ""
            kept |= {p for name, p in wide if name.startswith(start) and pattern.search(name.removeprefix(start))}
    return kept


def in_words(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"parameters {', '.join(map(repr, names[:_SHOWN]))}{more}"


def _module_of(name: str) -> str:
    return name.rpartition(".")[0]


# Scripted code in a model

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def tell_scripted(models: Iterable[torch.nn.Module], recipe: Recipe) -> None:
    """Log where models hold scripted code, and the rules that keep in FP32 what calls it, unless it has them."""
    for model in models if recipe.opt_level is not None else ():
        modules = dict(zip(module_names(model), model.modules(), strict=True))
        decided = deciding_patterns(model, [*recipe.modules])
        found: dict[str, str] = {}  # by name: the module that calls it; "" for the model
        for name, module in modules.items():
            around = [name[: dot.start()] for dot in re.finditer(r"\.", name)]
            around = ["", *around] if name else []
            holds = any(isinstance(value, torch.jit.ScriptFunction) for value in vars(module).values())
            if (holds or _is_scripted(module)) and not any(_is_scripted(modules[each]) for each in around):
                calling = [each for each in [*around, *[name] * holds] if has_forward(modules[each])]
                caller = calling[-1] if calling else ""
                if not any(modules[each] in decided for each in [*around, name]) or not _is_wide(caller, recipe):
                    found[name] = caller
        if found:
            callers = {*found.values()}
            alike = {each: _NUMBER.sub("*", each) for each in callers}  # of many layers; it may fit others, too
            fits = {each: {name for name in modules if fnmatchcase(name, alike[each])} <= callers for each in callers}
            _warn([*found], [alike[each] if fits[each] else each for each in found.values()], recipe)


def _is_wide(module: str, recipe: Recipe) -> bool:
    stated = dtype_of(f"{module}.", recipe.parameters)
    return stated is torch.float32 if stated is not None else recipe.parameter_dtype == "float32"


def _is_scripted(module: torch.nn.Module) -> bool:
    return isinstance(module, torch.jit.ScriptModule)


def _warn(found: list[str], callers: list[str], recipe: Recipe) -> None:
    names = [repr(name) if name else "the model itself" for name in found]
    more = f" and {len(names) - 2} more" if names[2:] else ""
    keys = ["modules", *["parameters"] * (recipe.parameter_dtype != "float32")]
    cure = f"{' and '.join(dtypes_in_yaml(callers, key=key) for key in keys)} in the recipe keep float32 there"
    if "" in callers:
        cure = "called in a module of its own, it stays in float32 by a rule in `modules` and one in `parameters`"
    logger.warning(
        "hmpx: %s: scripted code, which no list reaches, and which computes in the dtypes that it gets; %s",
        *(", ".join(names[:2]) + more, cure),
    )
