"""The files of recipes: which there are, and the keys that one holds, with the line of each."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from hmpx.errors import HmpxError, did_you_mean
from hmpx.ops.op_lists import SIDES, shipped
from hmpx.recipes import gaudi, nxd
from hmpx.recipes.keys import LISTS, problems, spelled_out
from hmpx.recipes.origins import Origins
from hmpx.recipes.yaml_nodes import composed, constructed, lines_inside


class Read(NamedTuple):
    """What a file says.

    base: the shipped recipe that the keys change; None where they are a recipe of their own.
    """

    keys: dict[str, Any]
    origins: Origins
    base: str | None = None


def recipe_names() -> list[str]:
    """The recipes that hmpx ships."""
    return sorted(each.stem for each in (shipped() / "recipes").glob("*.yaml"))


def recipe_path(name: str | os.PathLike[str]) -> Path:
    """The file of a recipe that hmpx ships, by name; a path that ends in .yaml, or in Gaudi's .json, is that file.

    Raises:
        HmpxError: no such recipe, with the nearest one.
    """
    path = Path(name)
    if path.suffix in (".yaml", ".yml", ".json"):
        return path
    if path.suffix == ".txt":
        raise HmpxError(
            f"{name} is an op list, and not a recipe: hmpx.convert(bf16_file_path={str(name)!r}) takes it, "
            f"or a recipe's key, bf16_file_path: {name}"
        )
    path = shipped() / "recipes" / f"{name}.yaml"
    if not path.is_file():
        legal = recipe_names()
        others = f" (there are {', '.join(legal)}, and files that end in .yaml or .json)"
        hint = did_you_mean(str(name), legal) or others
        raise HmpxError(f"there is no recipe {str(name)!r}{hint}")
    return path


def read_keys(path: Path, legal: Sequence[str], *, with_zero: bool = False) -> Read:
    """The keys of a recipe's file, checked one by one; list files are looked for beside it.

    Args:
        legal: the names of every key that a recipe has.
        with_zero: what the defaults of NxD's `mixed_precision_config` depend on, see `Recipe.from_nxd`.

    Raises:
        HmpxError: each problem with file and line, the key or value, and the nearest legal one.
    """
    if path.suffix == ".json":
        keys, lines = gaudi.recipe_keys(path)
        return Read(keys, Origins(str(path), lines))
    root = composed(path, legal)
    if [key.value for key, _ in root.value] == [nxd.KEY]:
        ((key, value),) = root.value
        return _nxds(path, key, value, with_zero)
    values: dict[str, Any] = {}
    lines = {}
    wrong: dict[str, None] = {}
    for key, value in root.value:
        line = key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarNode):
            wrong[f"{path}:{line}: a recipe's keys are {', '.join(legal)}"] = None
            continue
        if key.value in values:
            wrong[f"{path}:{line}: {key.value!r} stands here for the second time"] = None
        values[key.value] = spelled_out(key.value, constructed(value))
        lines |= {(key.value,): line, **lines_inside(key.value, value)}
        for inside, problem in problems(key.value, values[key.value], legal):
            wrong[f"{path}:{lines.get((key.value, inside), line)}: {problem}"] = None
        if key.value in LISTS and isinstance(values[key.value], str) and values[key.value]:
            values[key.value] = os.path.normpath(path.parent / values[key.value])
    wrong |= dict.fromkeys(f"{path}:{lines[side,]}: {both}" for side, both in named_twice(values))
    if wrong:
        raise HmpxError("\n".join(wrong))
    return Read(values, Origins(str(path), lines, {key: values[key] for key in LISTS if values.get(key)}))


def _nxds(path: Path, key: yaml.Node, value: yaml.Node, with_zero: bool) -> Read:
    """Of a file with NxD's configuration."""
    line = key.start_mark.line + 1
    lines = {inner: at for (_, inner), at in lines_inside(nxd.KEY, value).items()}
    keys = nxd.recipe_keys(constructed(value), with_zero, lambda inner: f"{path}:{lines.get(inner, line)}: ")
    where = {(own,): lines.get(nxd.MASTERS if own == "weights" else own, line) for own in keys}
    return Read(keys, Origins(str(path), where), nxd.BASE)


def named_twice(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The lists that are given name by name and as a file too, each with that in words."""
    both = [side for side in SIDES if values.get(side) is not None and values.get(f"{side}_file_path")]
    return [(side, f"{side} and {side}_file_path: which of the two?") for side in both]
