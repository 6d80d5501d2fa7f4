"""Scripted code in a model: no list reaches its ops, which compute in the dtypes that they are handed."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from fnmatch import fnmatchcase

import torch

from hmpx.ops.module_rules import has_forward
from hmpx.recipes.keys import dtype_of, dtypes_in_yaml
from hmpx.recipes.module_patterns import deciding_patterns, module_names
from hmpx.recipes.recipe import Recipe

logger = logging.getLogger("hmpx")
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
