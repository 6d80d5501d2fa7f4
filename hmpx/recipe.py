"""Recipes: one file, or one dict, for what a whole training run does with precision.

A recipe's keys are the arguments of `hmpx.convert` and `hmpx.attach`, and what the parameters are.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
import yaml

from hmpx.errors import HmpxError, nearest
from hmpx.oplist import shipped
from hmpx.policy import OPT_LEVELS
from hmpx.updates.settings import Settings
from hmpx.updates.weights import WAYS

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
LISTS = ("bf16_file_path", "fp32_file_path", "promote_file_path")
_SWITCHES = ("use_fp32_grad_acc", "use_master_weights_in_ckpt", "release_gradients", "fused")
_NXD_KEYS = ("use_master_weights", "use_fp32_grad_acc", "use_master_weights_in_ckpt")


@dataclass(frozen=True)
class Recipe:
    """What a run does with precision.

    Attributes:
        opt_level: "O1" or "O2" for `hmpx.convert`; None leaves torch's ops alone.
        bf16_file_path, fp32_file_path, promote_file_path: op lists; "" for the default ones.
        parameter_dtype: "bfloat16" or "float32", of the model's parameters.
        module_dtypes: exceptions, by the name of a module or a pattern (``"lm_head"``, ``"*.norm*"``); the last that
            fits a module, or one that it is in, decides.
        weights, state_dtype, use_fp32_grad_acc, use_master_weights_in_ckpt, release_gradients, fused, seed: see
            `hmpx.attach`, with dtypes by name.
    """

    opt_level: str | None = "O1"
    bf16_file_path: str = ""
    fp32_file_path: str = ""
    promote_file_path: str = ""
    parameter_dtype: str = "bfloat16"
    module_dtypes: Mapping[str, str] = field(default_factory=dict)
    weights: str = "stochastic"
    state_dtype: str = "float32"
    use_fp32_grad_acc: bool = False
    use_master_weights_in_ckpt: bool = False
    release_gradients: bool = False
    fused: bool = False
    seed: int | None = None

    def __str__(self) -> str:
        """As a file, which reads back as this recipe."""
        changed = {key: value for key, value in asdict(self).items() if value != getattr(_DEFAULT, key)}
        return yaml.safe_dump(changed, sort_keys=False) if changed else "{}\n"

    def settings(self) -> Settings:
        """What `attach` is told."""
        own = {key: getattr(self, key) for key in ("weights", "seed", *_SWITCHES)}
        return Settings(state_dtype=DTYPES[self.state_dtype], **own)


_DEFAULT = Recipe()


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
        _check(key.value, values[key.value], _keys(), where)
        if key.value in LISTS and values[key.value]:
            values[key.value] = str(path.parent / values[key.value])
    return Recipe(**values)


def _keys() -> list[str]:
    return [each.name for each in fields(Recipe)]


def _check(key: Any, value: Any, keys: Collection[str], where: str = "") -> None:
    if key not in keys:
        raise HmpxError(f"{where}{key!r} is no key of a recipe{nearest(str(key), keys)}")
    legal = {
        "opt_level": (*OPT_LEVELS, None),
        "parameter_dtype": tuple(DTYPES),
        "state_dtype": tuple(DTYPES),
        "weights": tuple(WAYS),
        **dict.fromkeys((*_SWITCHES, "use_master_weights"), (True, False)),
    }
    if key in legal:
        _check_value(key, value, legal[key], where)
    elif key in LISTS and not isinstance(value, str):
        raise HmpxError(f"{where}{key} is {value!r}, not the path of a list")
    elif key == "module_dtypes":
        if not isinstance(value, Mapping) or not all(isinstance(pattern, str) for pattern in value):
            raise HmpxError(f"{where}{key} is {value!r}, not a mapping of modules' names to dtypes")
        for pattern, dtype in value.items():
            _check_value(f"{key}, {pattern!r}", dtype, tuple(DTYPES), where)


def _check_value(what: str, value: Any, legal: tuple, where: str) -> None:
    if not any(type(value) is type(each) and value == each for each in legal):
        words = ["null" if each is None else str(each).lower() if isinstance(each, bool) else each for each in legal]
        raise HmpxError(f"{where}{what} is {value!r}, none of {', '.join(words)}{nearest(str(value), words)}")


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
        _check(key, value, {*_keys(), *_NXD_KEYS})
    if not set(recipe) <= set(_NXD_KEYS):
        if "use_master_weights" in recipe:
            raise HmpxError("'use_master_weights' is NxD's key; beside a recipe's own keys say weights: master")
        return Recipe(**recipe)
    config = {"use_master_weights": with_zero, "use_fp32_grad_acc": with_zero, "use_master_weights_in_ckpt": False}
    config.update(recipe)
    weights = "master" if config.pop("use_master_weights") else "nearest"
    return replace(read_recipe("nxd-standard"), weights=weights, **config)
