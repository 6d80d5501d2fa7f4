"""The dtype that a recipe gives to each parameter of a model, and which parameters keep theirs."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch

from hmpx.base.dtype_names import dtype_name
from hmpx.base.module_tree import modules_in, own_parameters
from hmpx.recipes.keys import DTYPES, dtype_of, dtypes_in_yaml
from hmpx.recipes.module_patterns import module_names
from hmpx.recipes.recipe import Recipe
from hmpx.updates.ranks.sharding import is_shell

_KEPT = ("_keep_in_fp32_modules_strict", "_keep_in_fp32_modules")  # classes list names of modules, or their ends, there
LOW = (torch.bfloat16, torch.float16)
# In a module: the dtype in which each of its parameters came that a recipe has cast to a low one.
CAST = "_hmpx_cast"
_SHOWN = 3
logger = logging.getLogger("hmpx")


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
