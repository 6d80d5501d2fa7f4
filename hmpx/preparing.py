"""`prepare`: set a model and its optimizer up as a recipe says."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Mapping
from dataclasses import asdict
from fnmatch import fnmatchcase
from pathlib import Path

import torch

from hmpx import conversion
from hmpx.errors import HmpxError, nearest
from hmpx.recipe import DTYPES, LISTS, Recipe, as_recipe
from hmpx.sharding import is_sharded
from hmpx.updates import zero
from hmpx.updates.agreement import compare
from hmpx.updates.attachment import attach, attached
from hmpx.updates.gradients import replicas
from hmpx.updates.names import plain_names

logger = logging.getLogger("hmpx")


def prepare(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, recipe: str | os.PathLike | Mapping | Recipe
) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Set a model and its optimizer up as a recipe says: cast the parameters, `hmpx.convert`, `hmpx.attach`.

    Parameters stay the same objects, so schedulers, tied weights and the optimizer go on as they are. A model that is
    to be replicated or sharded is cast before it is wrapped (``model.bfloat16()``) and prepared after that. Taken back
    by `hmpx.restore()` and `hmpx.detach(optimizer)`; the parameters keep their dtype.

    Args:
        recipe: a name (``"nxd-standard"``), the path of a YAML file, a dict of a recipe's keys, or a dict in NxD's
            terms: ``use_master_weights``, ``use_fp32_grad_acc`` (both true, if absent, exactly when the optimizer is a
            `ZeroRedundancyOptimizer`), ``use_master_weights_in_ckpt`` (false). NxD's rounds to nearest.

    Returns:
        The model and the optimizer, the same objects.

    Raises:
        HmpxError: something does not fit, or differs between ranks; model, torch and optimizer are as they were.
    """
    if not isinstance(model, torch.nn.Module):
        raise HmpxError(f"model is a {type(model).__name__}, not a torch.nn.Module")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise HmpxError(f"prepare needs a torch.optim.Optimizer, not {type(optimizer).__name__}")
    recipe = as_recipe(recipe, with_zero=zero.inner(optimizer) is not None)
    settings = recipe.settings()
    compare("hmpx.prepare", {**asdict(recipe), **{key: _content(getattr(recipe, key)) for key in LISTS}})
    with contextlib.ExitStack() as undo:
        _cast(model, recipe, undo)
        if any(p.dtype is torch.bfloat16 for p in model.parameters()):
            before, attachment = attached(optimizer), attach(optimizer, model=model, **vars(settings))
            if attachment is not before:
                undo.callback(attachment.detach)
        if recipe.opt_level is not None:
            conversion.convert(recipe.opt_level, **{key: getattr(recipe, key) for key in LISTS})
        undo.pop_all()
    logger.info("hmpx: prepared by this recipe:\n%s", recipe)
    return model, optimizer


def _content(path: str) -> str:
    """Of a list: ranks on several machines may have it in different places."""
    with contextlib.suppress(OSError, UnicodeDecodeError):  # convert() says it better
        return Path(path).read_text(encoding="utf-8") if path else ""
    return path


def _cast(model: torch.nn.Module, recipe: Recipe, undo: contextlib.ExitStack) -> None:
    """Cast the floating parameters of a model in place."""
    dtypes = _dtypes(model, recipe)
    others = {p: name for name, p in model.named_parameters() if p.is_floating_point() and p.dtype is not dtypes[p]}
    reduced = replicas()
    for p, name in others.items():
        if p in reduced or is_sharded(p):
            raise HmpxError(
                f"parameter {name!r} is {p.dtype} and replicated or sharded already: cast it to {dtypes[p]} before the "
                "model is wrapped"
            )
    for p in others:
        undo.callback(_assign, p, p.data, p.grad)
        _assign(p, p.data.to(dtypes[p]), None)


def _dtypes(model: torch.nn.Module, recipe: Recipe) -> dict[torch.nn.Parameter, torch.dtype]:
    """What each parameter is to be. A tied one is what the first module that has it says."""
    _, *inside = (f"{name}." for name, _ in model.named_modules())
    names = ["", *(name.removesuffix(".") for name in plain_names(inside))]
    for pattern in recipe.module_dtypes:
        if not any(fnmatchcase(name, pattern) for name in names):
            known = [name for name in names if name]
            raise HmpxError(f"module_dtypes: {pattern!r} is the name of no module{nearest(pattern, known)}")
    found: dict[torch.nn.Parameter, torch.dtype] = {}
    for name, module in zip(names, model.modules(), strict=True):
        parts = name.split(".")
        within = [".".join(parts[: i + 1]) for i in range(len(parts))]
        dtype = recipe.parameter_dtype
        for pattern, exception in recipe.module_dtypes.items():
            dtype = exception if any(fnmatchcase(each, pattern) for each in within) else dtype
        for p in module.parameters(recurse=False):
            found.setdefault(p, DTYPES[dtype])
    return found


def _assign(p: torch.nn.Parameter, data: torch.Tensor, grad: torch.Tensor | None) -> None:
    p.grad = None
    p.data = data
    p.grad = grad
