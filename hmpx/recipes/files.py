"""The files of recipes: which there are, and the keys that one holds, with the line of each."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from hmpx.errors import HmpxError, did_you_mean
from hmpx.ops.policies.op_lists import SIDES, shipped
from hmpx.recipes import gaudi, nxd
from hmpx.recipes.keys import EXTENDS, LISTS, problems, spelled_out
from hmpx.recipes.origins import Origins
from hmpx.yaml_files import composed, lines_inside, shown, value_of


class Read(NamedTuple):
    """What a file says.

    keys: those without fault. base: the file that this one extends; None where it is a recipe of its own.
    wrong: each problem with file and line. faulty: the keys that they are about.
    """

    keys: dict[str, Any]
    origins: Origins
    base: Path | None = None
    wrong: Sequence[str] = ()
    faulty: Collection[str] = ()


def recipe_names() -> list[str]:
    """The recipes that hmpx ships."""
    return sorted(each.stem for each in (shipped() / "recipes").glob("*.yaml"))


def recipe_path(name: str | os.PathLike[str], beside: str | os.PathLike[str] = "") -> Path:
    """The file of a recipe that hmpx ships, by name; a path that ends in .yaml, or in Gaudi's .json, is that file.

    beside: the folder that a path is relative to.

    Raises:
        HmpxError: no such recipe, with the nearest one.
    """
    path = Path(name)
    if path.suffix in (".yaml", ".yml", ".json"):
        return Path(os.path.normpath(beside / path)) if beside else path
    if path.suffix == ".txt":
        raise HmpxError(
            f"{shown(name)} is an op list, and not a recipe: hmpx.convert(bf16_file_path={shown(name)!r}) takes it, "
            f"or a recipe's key, bf16_file_path: {shown(name)}"
        )
    legal = recipe_names()
    if str(name) not in legal:
        others = f" (there are {', '.join(legal)}, and files that end in .yaml or .json)"
        hint = did_you_mean(str(name), legal) or others
        raise HmpxError(f"there is no recipe {shown(name)!r}{hint}")
    return shipped() / "recipes" / f"{name}.yaml"


def read_keys(path: Path, legal: Sequence[str], *, with_zero: bool = False) -> Read:
    """The keys of a recipe's file, checked one by one; list files, and the recipe that it extends, are beside it.

    Args:
        legal: the names of every key that a recipe has.
        with_zero: what the defaults of NxD's `mixed_precision_config` depend on, see `Recipe.from_nxd`.

    Raises:
        HmpxError: it cannot be read, or is no mapping, or what Gaudi's or NxD's configuration says is wrong.
    """
    if path.suffix == ".json":
        keys, stands = gaudi.recipe_keys(path)
        return Read(keys, Origins.of_file(path, stands))
    root = composed(path, legal)
    if [key.value for key, _ in root.value] == [nxd.KEY]:
        ((key, value),) = root.value
        return _nxds(path, key, value, with_zero)
    values: dict[str, Any] = {}
    lines: dict[tuple, int] = {}
    wrong: dict[str, None] = {}
    faulty: set[str] = set()
    for key, value in root.value:
        line = key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarNode):
            wrong[f"{path}:{line}: a recipe's keys are {', '.join(legal)}"] = None
            continue
        if key.value in values:
            wrong[f"{path}:{line}: {key.value!r} stands here for the second time"] = None
        lines |= {(key.value,): line, **lines_inside(key.value, value)}
        try:
            values[key.value] = spelled_out(key.value, value_of(path, value))
        except HmpxError as error:
            wrong[str(error)] = None
            faulty.add(key.value)
            continue
        for inside, problem in problems(key.value, values[key.value], legal):
            wrong[f"{path}:{lines.get((key.value, inside), line)}: {problem}"] = None
            faulty.add(key.value)
        if key.value in LISTS and isinstance(values[key.value], str) and values[key.value]:
            values[key.value] = os.path.normpath(path.parent / values[key.value])
    for side, both in named_twice(values):
        wrong[f"{path}:{lines[side,]}: {both}"] = None
        faulty.add(side)
    keys = {key: value for key, value in values.items() if key not in faulty}
    lists = {key: keys[key] for key in LISTS if keys.get(key)}
    base = keys.pop(EXTENDS, None)
    if base is not None:
        try:
            base = recipe_path(base, path.parent)
        except HmpxError as error:
            wrong[f"{path}:{lines[EXTENDS,]}: {EXTENDS}: {error}"] = base = None
    return Read(keys, Origins.of_file(path, lines, lists), base, list(wrong), faulty)


def _nxds(path: Path, key: yaml.Node, value: yaml.Node, with_zero: bool) -> Read:
    """Of a file with NxD's configuration."""
    line = key.start_mark.line + 1
    lines = {inner: at for (_, inner), at in lines_inside(nxd.KEY, value).items()}
    keys = nxd.recipe_keys(value_of(path, value), with_zero, lambda inner: f"{path}:{lines.get(inner, line)}: ")
    where = {(own,): lines.get(nxd.MASTERS if own == "weights" else own, line) for own in keys}
    return Read(keys, Origins.of_file(path, where), recipe_path(nxd.BASE))


def named_twice(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The lists that are given name by name and as a file too, each with that in words."""
    both = [side for side in SIDES if values.get(side) is not None and values.get(f"{side}_file_path")]
    return [(side, f"{side} and {side}_file_path: which of the two?") for side in both]
