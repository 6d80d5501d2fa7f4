"""Recipes: one file, or one dict, for what a whole training run does with precision.

A recipe's keys are the arguments of `hmpx.convert` and `hmpx.attach`, and what the parameters are.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
import yaml

from hmpx.casts.fp32_kernels import KERNELS
from hmpx.casts.op_lists import LOW_DTYPES, LOW_PRECISION, SIDES, Listed, OpLists, read_lists, shipped
from hmpx.casts.policy import OPT_LEVELS, Policy, build_policy
from hmpx.errors import HmpxError, did_you_mean
from hmpx.recipes import nxd
from hmpx.rounding.stochastic import check_seed
from hmpx.updates.footprint import Footprint, footprint
from hmpx.updates.settings import Settings
from hmpx.updates.weights import WAYS

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_MAPPED = {"float32": torch.float32, "float64": torch.float64}
_SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
LISTS = tuple(f"{side}_file_path" for side in SIDES)
_SWITCHES = ("use_fp32_grad_acc", "use_master_weights_in_ckpt", "release_gradients", "fused")


@dataclass(frozen=True)
class Recipe:
    """What a run does with precision.

    Attributes:
        opt_level: "O1" or "O2" for `hmpx.convert`; None leaves torch's ops alone.
        bf16_file_path, fp32_file_path, promote_file_path: op lists; "" for the default ones.
        bf16, fp32, promote: the same, name by name, in place of a file.
        low_precision: "bfloat16" or "float16", what the ops in the bf16 list run in. None: what a list file says, else
            bfloat16.
        kernels: "auto", "native" or "float32", what computes the ops that run in it on a CPU; see `hmpx.convert`.
        dtype_map: dtypes that become others wherever one is asked for; see `hmpx.convert`, with dtypes by name.
        parameter_dtype: "bfloat16" or "float32", of the model's parameters.
        module_dtypes: exceptions, by the name of a module or a pattern (``"lm_head"``, ``"*.norm*"``); the last that
            fits a module, or one that it is in, decides.
        weights, state_dtype, use_fp32_grad_acc, use_master_weights_in_ckpt, release_gradients, fused, seed: see
            `hmpx.attach`, with dtypes by name (``"bf16"``, ``"fp32"`` for short).
    """

    opt_level: str | None = "O1"
    bf16_file_path: str = ""
    fp32_file_path: str = ""
    promote_file_path: str = ""
    bf16: Sequence[str] | None = None
    fp32: Sequence[str] | None = None
    promote: Sequence[str] | None = None
    low_precision: str | None = None
    kernels: str = "auto"
    dtype_map: Mapping[str, str] = field(default_factory=dict)
    parameter_dtype: str = "bfloat16"
    module_dtypes: Mapping[str, str] = field(default_factory=dict)
    weights: str = "stochastic"
    state_dtype: str = "float32"
    use_fp32_grad_acc: bool = False
    use_master_weights_in_ckpt: bool = False
    release_gradients: bool = False
    fused: bool = False
    seed: int | None = None

    @classmethod
    def from_nxd(cls, config: Mapping[str, bool] | None = None, *, with_zero: bool = False) -> Recipe:
        """The recipe that NeuronX Distributed's `mixed_precision_config` means: ``nxd-standard`` with what it changes.

        Args:
            config: any of NxD's keys, with its defaults for the others: ``use_master_weights`` (FP32 masters, else
                BF16 rounded to nearest) and ``use_fp32_grad_acc`` are true exactly under ZeRO-1,
                ``use_master_weights_in_ckpt`` is false.
            with_zero: whether the optimizer is a `ZeroRedundancyOptimizer`.

        Raises:
            HmpxError: another key, or a value that is neither True nor False.

        Example:
            >>> hmpx.Recipe.from_nxd({"use_master_weights": True}).weights
            'master'
        """
        return replace(read_recipe("nxd-standard"), **nxd.recipe_keys(config, with_zero))

    def __str__(self) -> str:
        """As a file, which reads back as this recipe."""
        changed = {key: value for key, value in asdict(self).items() if value != getattr(_DEFAULT, key)}
        return yaml.safe_dump(changed, sort_keys=False) if changed else "{}\n"

    def policy(self) -> Policy | None:
        """Which op runs under which rule; None where torch's ops are left alone.

        Raises:
            HmpxError: a list that does not do; a `low_precision`, or FP32 `kernels`, for ops that are left alone.
        """
        if self.opt_level is None:
            if self.low_precision is not None:
                raise HmpxError(f"low_precision {self.low_precision}: opt_level null leaves torch's ops as they are")
            if self.kernels == "float32":
                raise HmpxError("kernels float32: opt_level null leaves torch's ops as they are")
            return None
        files = read_lists(**{key: getattr(self, key) for key in LISTS})
        own = {side: _listed(side, getattr(self, side)) for side in SIDES}
        lists = replace(files, **{side: names for side, names in own.items() if names is not None})
        return build_policy(self.opt_level, lists, low_precision=self.low_precision and LOW_DTYPES[self.low_precision])

    def mapped(self) -> dict[torch.dtype, torch.dtype]:
        """`dtype_map` in torch's terms."""
        return {_MAPPED[old]: DTYPES[new] for old, new in self.dtype_map.items()}

    def footprint(self, states: int = 2) -> Footprint:
        """What a parameter takes, with so many tensors of its size that the optimizer keeps: 2 for Adam."""
        return footprint(self.settings(), DTYPES[self.parameter_dtype], states)

    def bytes_per_parameter(self, states: int = 2) -> dict[str, float]:
        """Bytes of weights, gradients, masters and state for each parameter, between backward and step.

        Args:
            states: tensors of a parameter's size that the optimizer keeps: 2 for Adam, 1 for momentum.
        """
        each = self.footprint(states)
        return {part: getattr(each, part) for part in ("weights", "gradients", "masters", "state")}

    def settings(self) -> Settings:
        """What `attach` is told."""
        own = {key: getattr(self, key) for key in ("weights", "seed", *_SWITCHES)}
        return Settings(state_dtype=DTYPES[self.state_dtype], **own)


_DEFAULT = Recipe()
_KEYS = [each.name for each in fields(Recipe)]


def _listed(side: str, names: Sequence[str] | None) -> tuple[Listed, ...] | None:
    return None if names is None else tuple(Listed(name, f"recipe, {side}", i) for i, name in enumerate(names, 1))


def recipe_names() -> list[str]:
    """The recipes that hmpx ships."""
    return sorted(each.stem for each in (shipped() / "recipes").glob("*.yaml"))


def read_recipe(name: str | os.PathLike, *, with_zero: bool = False) -> Recipe:
    """A recipe that hmpx ships, by name, or one in a YAML file, by path; list files are looked for beside it.

    `with_zero` is for a file that holds NxD's `mixed_precision_config`, see `Recipe.from_nxd`.

    Raises:
        HmpxError: with file and line, the key or value, and the nearest legal one.
    """
    path = Path(name)
    if path.suffix not in (".yaml", ".yml"):
        path = shipped() / "recipes" / f"{name}.yaml"
        if not path.is_file():
            legal = recipe_names()
            hint = did_you_mean(str(name), legal) or f" (there are {', '.join(legal)}, and files that end in .yaml)"
            raise HmpxError(f"there is no recipe {str(name)!r}{hint}")
    try:
        root = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except (OSError, UnicodeDecodeError) as error:
        raise HmpxError(f"{path}: cannot be read: {error}") from None
    except yaml.MarkedYAMLError as error:
        raise HmpxError(f"{path}:{error.problem_mark.line + 1}: not YAML: {error.problem}") from None
    if not isinstance(root, yaml.MappingNode):
        raise HmpxError(f"{path}:1: a recipe is a mapping of {', '.join(_KEYS)}")
    if [key.value for key, _ in root.value] == [nxd.KEY]:
        ((key, value),) = root.value
        config, where = _constructed(value), f"{path}:{key.start_mark.line + 1}: "
        return replace(read_recipe("nxd-standard"), **nxd.recipe_keys(config, with_zero, where))
    values: dict[str, Any] = {}
    lists: dict[str, tuple[Listed, ...]] = {}
    for key, value in root.value:
        where = f"{path}:{key.start_mark.line + 1}: "
        if not isinstance(key, yaml.ScalarNode):
            raise HmpxError(f"{where}a recipe's keys are {', '.join(_KEYS)}")
        if key.value in values:
            raise HmpxError(f"{where}{key.value!r} stands here for the second time")
        values[key.value] = _spelled_out(key.value, _constructed(value))
        _check(key.value, values[key.value], _KEYS, where)
        if key.value in LISTS and values[key.value]:
            values[key.value] = os.path.normpath(path.parent / values[key.value])
        if key.value in SIDES and values[key.value]:
            lists[key.value] = tuple(Listed(v.value, str(path), v.start_mark.line + 1) for v in value.value)
    if lists and values.get("opt_level", "O1") == "O1":
        build_policy("O1", OpLists(**lists))  # for its errors, which have a line here
    return _made(values, f"{path}: ")


def _constructed(value: yaml.Node) -> Any:
    return yaml.SafeLoader("").construct_object(value, deep=True)


def _spelled_out(key: Any, value: Any) -> Any:
    """The value of a key with dtypes by their names in torch, for ``bf16``, ``fp32`` and torch's own dtypes."""
    if isinstance(value, Mapping):
        return {_dtype_name(k) if key == "dtype_map" else k: _dtype_name(v) for k, v in value.items()}
    return _dtype_name(value) if key in ("parameter_dtype", "state_dtype", LOW_PRECISION) else value


def _dtype_name(value: Any) -> Any:
    name = str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value
    return _SHORT.get(name, name) if isinstance(name, str) else name


def _check(key: Any, value: Any, keys: Sequence[str], where: str = "") -> None:
    if key in (nxd.KEY, nxd.MASTERS):
        raise HmpxError(
            f"{where}{key!r} is NxD's, and no key beside a recipe's own: NxD's keys stand in {nxd.KEY} alone "
            f"({{{nxd.KEY!r}: {{{nxd.MASTERS!r}: True}}}}); in a recipe's own terms it is weights: master"
        )
    if key not in keys:
        raise HmpxError(f"{where}{key!r} is no key of a recipe{did_you_mean(str(key), keys)}")
    legal = {
        "opt_level": (*OPT_LEVELS, None),
        "parameter_dtype": tuple(DTYPES),
        "state_dtype": tuple(DTYPES),
        LOW_PRECISION: ("bfloat16", "float16", None),
        "kernels": KERNELS,
        "weights": tuple(WAYS),
        **dict.fromkeys(_SWITCHES, (True, False)),
    }
    if key in legal:
        _check_value(key, value, legal[key], where)
    elif key == "seed" and value is not None:
        try:
            check_seed(value)
        except HmpxError as error:
            raise HmpxError(f"{where}{error}") from None
    elif key in LISTS and not isinstance(value, str):
        raise HmpxError(f"{where}{key} is {value!r}, not the path of a list")
    elif key in SIDES and value is not None:
        if not isinstance(value, Sequence) or isinstance(value, str) or not all(isinstance(v, str) for v in value):
            raise HmpxError(f"{where}{key} is {value!r}, not a list of names; a file goes to {key}_file_path")
    elif key in ("module_dtypes", "dtype_map"):
        what = "modules' names" if key == "module_dtypes" else "dtypes"
        if not isinstance(value, Mapping) or not all(isinstance(each, str) for each in value):
            raise HmpxError(f"{where}{key} is {value!r}, not a mapping of {what} to dtypes")
        for old, new in value.items():
            if key == "dtype_map":
                _check_value(key, old, tuple(_MAPPED), where)
            _check_value(f"{key}, {old!r}", new, tuple(DTYPES), where)


def _check_value(what: str, value: Any, legal: tuple, where: str) -> None:
    if not any(type(value) is type(each) and value == each for each in legal):
        words = ["null" if each is None else str(each).lower() if isinstance(each, bool) else each for each in legal]
        raise HmpxError(f"{where}{what} is {value!r}, none of {', '.join(words)}{did_you_mean(str(value), words)}")


def _made(values: Mapping[str, Any], where: str = "") -> Recipe:
    for side in SIDES:
        if values.get(side) is not None and values.get(f"{side}_file_path"):
            raise HmpxError(f"{where}{side} and {side}_file_path: which of the two?")
    lists = {side: tuple(values[side]) for side in SIDES if values.get(side) is not None}
    return Recipe(**{**values, **lists})


def as_recipe(recipe: str | os.PathLike | Mapping | Recipe, *, with_zero: bool = False) -> Recipe:
    """A recipe from its name, its path, its keys, or a dict or file whose one key is NxD's `mixed_precision_config`:
    its defaults depend on whether ZeRO-1 is in use."""
    if isinstance(recipe, Recipe):
        return recipe
    if isinstance(recipe, str | os.PathLike):
        return read_recipe(recipe, with_zero=with_zero)
    if not isinstance(recipe, Mapping):
        raise HmpxError(f"a recipe is a name, a path or a dict, not a {type(recipe).__name__}")
    if list(recipe) == [nxd.KEY]:
        return Recipe.from_nxd(recipe[nxd.KEY], with_zero=with_zero)
    recipe = {key: _spelled_out(key, value) for key, value in recipe.items()}
    for key, value in recipe.items():
        _check(key, value, _KEYS)
    return _made(recipe)


def with_and_without_zero(recipe: str | os.PathLike | Mapping | Recipe) -> tuple[Recipe, Recipe]:
    """A recipe for optimizers that nobody has seen yet: what it says under ZeRO-1, and what otherwise."""
    return as_recipe(recipe, with_zero=True), as_recipe(recipe)
