"""Parameters that a recipe leaves in the dtype that they come in, and which of them it says so about.

FP64 stays under a recipe of FP32 weights. FP32 stays under one of BF16 weights where it stands on purpose: beside
weights that come in BF16, or named by the class of the model, as transformers and diffusers load it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Sequence
from weakref import WeakKeyDictionary

import torch

from hmpx.base.dtype_names import dtype_name

_KEPT = ("_keep_in_fp32_modules_strict", "_keep_in_fp32_modules")  # of classes: names of modules, or ends of names
_LOW = (torch.bfloat16, torch.float16)
_SHOWN = 3
logger = logging.getLogger("hmpx")


# Of a model: the recipe that has cast it, and of each parameter's name whether it was to stay in FP32 then.
_decided: WeakKeyDictionary[torch.nn.Module, tuple[object, dict[str, bool]]] = WeakKeyDictionary()


def kept_in_fp32(model: torch.nn.Module, recipe: object) -> set[torch.nn.Parameter]:
    """Return the FP32 parameters of a model that stand beside others of low precision, or that a class names.

    A recipe that casts a model again, as a trainer's does, decides as it did: adapters that a checkpoint has loaded in
    FP32 meanwhile do not stand there on purpose.
    """
    before, known = _decided.get(model, (None, {}))
    if before is not recipe:
        known = {}
        _decided[model] = recipe, known
    found, kept = _kept(model), set[torch.nn.Parameter]()
    for name, p in model.named_parameters():
        if known.setdefault(name, p in found) and p.dtype is torch.float32:
            kept.add(p)
    return kept


def _kept(model: torch.nn.Module) -> set[torch.nn.Parameter]:
    named = [(name, p) for name, p in model.named_parameters() if p.is_floating_point()]
    wide = [(name, p) for name, p in named if p.dtype is torch.float32]
    if len(wide) < len(named) and any(p.dtype in _LOW for _, p in named):
        return {p for _, p in wide}
    kept: set[torch.nn.Parameter] = set()
    for prefix, module in model.named_modules():
        keys = _KEPT if _is_of_diffusers(module) else _KEPT[:1]
        words = {word for key in keys for word in getattr(type(module), key, None) or ()}
        if words:
            pattern = re.compile("|".join(rf"(^|\.){word.replace('*', '.*')}($|\.)" for word in words))
            start = f"{prefix}." if prefix else ""
            kept |= {p for name, p in wide if name.startswith(start) and pattern.search(name.removeprefix(start))}
    return kept


def _is_of_diffusers(module: torch.nn.Module) -> bool:
    """Return whether the weaker key holds in BF16 too; in transformers it is for FP16 alone."""
    return any(cls.__module__.startswith("diffusers.") for cls in type(module).__mro__)


def tell_kept(kept: Sequence[str], dtype: torch.dtype, wanted: torch.dtype) -> None:
    """Warn of parameters that stay as they are, though the recipe is one of other weights."""
    if kept:
        logger.warning(
            "hmpx: %s stay in %s, in which they came; `module_dtypes: {%s: %s}` in the recipe casts them",
            *(_in_words(kept), dtype_name(dtype), kept[0].rpartition(".")[0] or "'*'", dtype_name(wanted)),
        )


def tell_narrowed(cast: Iterable[str], wanted: torch.dtype) -> None:
    """Warn of FP64 parameters that are cast down."""
    if cast := list(cast):
        logger.warning(
            "hmpx: %s came in float64 and are cast to %s; `module_dtypes: {%s: float32}` in the recipe keeps more",
            *(_in_words(cast), dtype_name(wanted), cast[0].rpartition(".")[0] or "'*'"),
        )


def _in_words(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"parameters {', '.join(map(repr, names[:_SHOWN]))}{more}"
