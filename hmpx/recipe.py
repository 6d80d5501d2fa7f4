"""Recipes: one file, or one dict, for what a whole training run does with precision; and `prepare`, which does it.

A recipe's keys are the arguments of `hmpx.convert` and `hmpx.attach`, and `parameter_dtype`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
import yaml

from hmpx import conversion
from hmpx.errors import HmpxError, nearest
from hmpx.oplist import shipped
from hmpx.policy import OPT_LEVELS
from hmpx.sharding import is_sharded
from hmpx.updates import zero
from hmpx.updates.agreement import compare
from hmpx.updates.attachment import attach
from hmpx.updates.gradients import replicas
from hmpx.updates.settings import Settings
from hmpx.updates.weights import WAYS

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_LISTS = ("bf16_file_path", "fp32_file_path", "promote_file_path")
_SWITCHES = ("use_fp32_grad_acc", "use_master_weights_in_ckpt", "release_gradients", "fused")
_NXD_KEYS = ("use_master_weights", "use_fp32_grad_acc", "use_master_weights_in_ckpt")


@dataclass(frozen=True)
class Recipe:
    """What a run does with precision.

    Attributes:
        opt_level: "O1" or "O2" for `hmpx.convert`; None leaves torch's ops alone.
        bf16_file_path, fp32_file_path, promote_file_path: op lists; "" for the default ones.
        parameter_dtype: "bfloat16" or "float32", of the model's parameters.
        weights, state_dtype, use_fp32_grad_acc, use_master_weights_in_ckpt, release_gradients, fused, seed: see
            `hmpx.attach`, with dtypes by name.
    """

    opt_level: str | None = "O1"
    bf16_file_path: str = ""
    fp32_file_path: str = ""
    promote_file_path: str = ""
    parameter_dtype: str = "bfloat16"
    weights: str = "stochastic"
    state_dtype: str = "float32"
    use_fp32_grad_acc: bool = False
    use_master_weights_in_ckpt: bool = False
    release_gradients: bool = False
    fused: bool = False
    seed: int | None = None

    def settings(self) -> Settings:
        """What `attach` is told."""
        own = {key: getattr(self, key) for key in ("weights", "seed", *_SWITCHES)}
        return Settings(state_dtype=_DTYPES[self.state_dtype], **own)


def read_recipe(name: str | os.PathLike) -> Recipe:
    """A recipe that hmpx ships, by name, or one in a YAML file, by path; list files are looked for beside it.

    Raises:
        HmpxError: with file and line, the key or value, and the nearest legal one.
    """
    path = Path(name)
    if path.suffix not in (".yaml", ".yml"):
        folder = shipped() / "recipes"
        path = folder / f"{name}.yaml"
        if not path.is_file():
            legal = sorted(each.stem for each in folder.glob("*.yaml"))
            hint = nearest(str(name), legal) or f" (there are {', '.join(legal)}, and files that end in .yaml)"
            raise HmpxError(f"there is no recipe {str(name)!r}{hint}")
    try:
        root = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except (OSError, UnicodeDecodeError) as error:
        raise HmpxError(f"{path}: cannot be read: {error}") from None
    except yaml.MarkedYAMLError as error:
        raise HmpxError(f"{path}:{error.problem_mark.line + 1}: not YAML: {error.problem}") from None
    if not isinstance(root, yaml.MappingNode):
        raise HmpxError(f"{path}:1: a recipe is a mapping of {', '.join(_keys())}")
    values: dict[str, Any] = {}
    for key, value in root.value:
        where = f"{path}:{key.start_mark.line + 1}: "
        if not isinstance(key, yaml.ScalarNode):
            raise HmpxError(f"{where}a recipe's keys are {', '.join(_keys())}")
        if key.value in values:
            raise HmpxError(f"{where}{key.value!r} stands here for the second time")
        values[key.value] = yaml.SafeLoader("").construct_object(value, deep=True)
        _check(key.value, values[key.value], where)
        if key.value in _LISTS and values[key.value]:
            values[key.value] = str(path.parent / values[key.value])
    return Recipe(**values)


def _keys() -> list[str]:
    return [field.name for field in fields(Recipe)]


def _check(key: Any, value: Any, where: str = "") -> None:
    legal = {
        "opt_level": (*OPT_LEVELS, None),
        "parameter_dtype": tuple(_DTYPES),
        "state_dtype": tuple(_DTYPES),
        "weights": tuple(WAYS),
        **dict.fromkeys((*_SWITCHES, "use_master_weights"), (True, False)),
    }
    if key not in _keys() and key not in _NXD_KEYS:
        raise HmpxError(f"{where}{key!r} is no key of a recipe{nearest(str(key), _keys())}")
    if key in legal and not any(value is each or (value == each and type(value) is type(each)) for each in legal[key]):
        words = ", ".join(
            "null" if each is None else str(each).lower() if isinstance(each, bool) else each for each in legal[key]
        )
        raise HmpxError(f"{where}{key} is {value!r}, none of {words}{nearest(str(value), map(str, legal[key]))}")
    if key in _LISTS and not isinstance(value, str):
        raise HmpxError(f"{where}{key} is {value!r}, not the path of a list")


def as_recipe(recipe: str | os.PathLike | Mapping | Recipe, *, with_zero: bool = False) -> Recipe:
    """A recipe from its name, its path, its keys, or from NxD's `mixed_precision_config`, whose defaults depend on
    whether ZeRO-1 is in use."""
    if isinstance(recipe, Recipe):
        return recipe
    if isinstance(recipe, str | os.PathLike):
        return read_recipe(recipe)
    if not isinstance(recipe, Mapping):
        raise HmpxError(f"a recipe is a name, a path or a dict, not a {type(recipe).__name__}")
    for key, value in recipe.items():
        _check(key, value)
    if not set(recipe) <= set(_NXD_KEYS):
        if "use_master_weights" in recipe:
            raise HmpxError("'use_master_weights' is NxD's key; beside a recipe's own keys say weights: master")
        return Recipe(**recipe)
    config = {"use_master_weights": with_zero, "use_fp32_grad_acc": with_zero, "use_master_weights_in_ckpt": False}
    config.update(recipe)
    weights = "master" if config.pop("use_master_weights") else "nearest"
    return replace(read_recipe("nxd-standard"), weights=weights, **config)


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
    compare("hmpx.prepare", asdict(recipe))
    with contextlib.ExitStack() as undo:
        _cast(model, _DTYPES[recipe.parameter_dtype], undo)
        if recipe.parameter_dtype == "bfloat16":
            undo.callback(attach(optimizer, model=model, **vars(settings)).detach)
        if recipe.opt_level is not None:
            conversion.convert(recipe.opt_level, **{key: getattr(recipe, key) for key in _LISTS})
        undo.pop_all()
    return model, optimizer


def _cast(model: torch.nn.Module, dtype: torch.dtype, undo: contextlib.ExitStack) -> None:
    """Cast the floating parameters of a model in place."""
    others = {p: name for name, p in model.named_parameters() if p.is_floating_point() and p.dtype is not dtype}
    reduced = replicas()
    for p, name in others.items():
        if p in reduced or is_sharded(p):
            raise HmpxError(
                f"parameter {name!r} is {p.dtype} and replicated or sharded already: cast the model before it is "
                f"wrapped, model.to({dtype})"
            )
    for p in others:
        undo.callback(_assign, p, p.data, p.grad)
        _assign(p, p.data.to(dtype), None)


def _assign(p: torch.nn.Parameter, data: torch.Tensor, grad: torch.Tensor | None) -> None:
    p.grad = None
    p.data = data
    p.grad = grad
