"""Reads a recipe: by its name, from a file or a dict that may extend another recipe, with options on top."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from hmpx.base.yaml_files import composed, lines_inside, value_of
from hmpx.errors import FEW, Fault, HmpxError, Origin, did_you_mean, raise_faults
from hmpx.ops.policies.op_lists import FP8_FORMAT, LOW_PRECISION, SIDES, OpLists, read_file, shipped
from hmpx.recipes.keys import EXTENDS, LISTS, MAPPINGS, MODULES, OF_OPS, faults, spelled_out
from hmpx.recipes.origins import Origins
from hmpx.recipes.recipe import DEFAULT, KEYS, USUAL, Recipe, changed, with_origins
from hmpx.recipes.vendors import NXD, NXD_MASTERS, nxd_keys, nxd_under_zero

Stated = str | os.PathLike[str] | Mapping[str, Any] | Recipe | None  # how a recipe may be given, everywhere


def as_recipe(recipe: Stated) -> Recipe:
    """Return a recipe from its name, its path, its keys, or a dict or file whose one key is NxD's
    `mixed_precision_config`. None is the default lists with FP32 weights."""
    if recipe is None:
        return DEFAULT
    if isinstance(recipe, Recipe):
        return recipe
    if isinstance(recipe, str | os.PathLike):
        return read_recipe(recipe)
    if not isinstance(recipe, Mapping):
        raise HmpxError(f"a recipe is a name, a path or a dict, not a {type(recipe).__name__}")
    if list(recipe) == [NXD]:
        return with_origins(Recipe.from_nxd(recipe[NXD]), Origins(under_zero=nxd_under_zero(recipe[NXD])))
    given = dict(recipe)
    base = given.pop(EXTENDS) if isinstance(given.get(EXTENDS), Recipe) else None
    values = checked(given)
    if EXTENDS in values:
        base = read_recipe(values.pop(EXTENDS))
    return laid_over(base or USUAL, values)


def checked(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Check the keys of a recipe, and return them with dtypes by their names.

    Raises:
        HmpxError: what is wrong with each.
    """
    values = {key: spelled_out(key, value) for key, value in keys.items()}
    raise_faults([*(fault for key, value in values.items() for fault in faults(key, value, KEYS)), *_twice(values)])
    return values


def laid_over(base: Recipe, keys: Mapping[str, Any], origins: Origins = USUAL._origins) -> Recipe:
    """Lay the keys of a file, a dict or an option over a recipe, and return the result. The nearest word wins.

    A list replaces the recipe's list of that side, whether each is a file or names. Another `opt_level` drops the
    lists of the recipe. The patterns of mappings follow those of the recipe. While all keys are about ops, parameters
    keep their dtype.
    """
    own: dict[str, Any] = dict(keys)
    if (own and base.parameter_dtype is None) or base is USUAL:
        ops_alone = own and own.keys() <= OF_OPS and own.get("opt_level", base.opt_level) is not None
        own.setdefault("parameter_dtype", None if ops_alone else USUAL.parameter_dtype)
    own |= {side: tuple(own[side]) for side in SIDES if own.get(side) is not None}
    other_level = own.get("opt_level", base.opt_level) != base.opt_level
    lists = _list_files(own)
    in_files = {side for side in SIDES for each in lists.values() if each.side(side) is not None}
    held = {side for side in SIDES if side in own or f"{side}_file_path" in own} | in_files
    gone = {
        key: getattr(USUAL, key) for side in SIDES if other_level or side in held for key in (side, f"{side}_file_path")
    }
    if other_level and own["opt_level"] is None:
        gone |= {key: getattr(USUAL, key) for key in (LOW_PRECISION, FP8_FORMAT, "kernels", "where", MODULES)}
    base = changed(base, **gone)
    for key in MAPPINGS:
        if key in own:
            around = {pattern: rule for pattern, rule in getattr(base, key).items() if pattern not in own[key]}
            own[key] = {**around, **own[key]}
    before = base._origins.without([key for key in own if key not in MAPPINGS])
    return with_origins(replace(base, **own), before.under(replace(origins, lists=lists)))


def _list_files(keys: Mapping[str, Any]) -> dict[str, OpLists]:
    """Read the list files among the keys. `policy` reads one that has a fault again, and says the fault."""
    found = {}
    for side, key in zip(SIDES, LISTS, strict=True):
        if keys.get(key):
            with contextlib.suppress(HmpxError):
                found[key] = read_file(keys[key], side)
    return found


def recipe_names() -> list[str]:
    """Return the names of the recipes that hmpx ships."""
    return sorted(each.stem for each in (shipped() / "recipes").glob("*.yaml"))


def recipe_path(name: str | os.PathLike[str], folder: str | os.PathLike[str] = "") -> Path:
    """Return the file of a recipe that hmpx ships, by its name; or the path itself if it ends in .yaml.

    folder: what a path is relative to.

    Raises:
        HmpxError: no such recipe, with the nearest one.
    """
    path = Path(name)
    if path.suffix in (".yaml", ".yml"):
        return Path(os.path.normpath(folder / path)) if folder else path
    if path.suffix in (".txt", ".json"):
        base = f"; under Gaudi's autocast that is extends: gaudi-autocast, bf16_file_path: {name}"
        raise HmpxError(
            f"{name} holds op lists, and is no recipe: hmpx.convert(bf16_file_path={str(name)!r}) takes it, "
            f"or a recipe's key, bf16_file_path: {name}{base if path.suffix == '.json' else ''}"
        )
    legal = recipe_names()
    if str(name) not in legal:
        others = f" (there are {', '.join(legal)}, and files that end in .yaml)"
        hint = did_you_mean(str(name), legal) or others
        raise HmpxError(f"there is no recipe {str(name)!r}{hint}")
    return shipped() / "recipes" / f"{name}.yaml"


def read_recipe(name: str | os.PathLike[str]) -> Recipe:
    """Read a recipe that hmpx ships, by name, or a recipe in a file, by path; paths in it are relative to it.

    Raises:
        HmpxError: each fault with file and line, the key or value, and the nearest legal one.
    """
    read = _read_with_rules(recipe_path(name))
    raise_faults(read.faults)
    return read.recipe


def faults_of(path: Path) -> list[Fault]:
    """Return all faults of a recipe's file, also those that `read_recipe` leaves to `policy` and `settings`.

    Raises:
        HmpxError: it cannot be read, or extends itself.
    """
    read = _read_with_rules(path)
    return read.and_those_of(read.recipe.settings, path).and_those_of(read.recipe.policy, path).faults


class _Read(NamedTuple):
    """The recipe in a file, without the keys that have faults, and the faults of the file and of those it extends."""

    recipe: Recipe
    faults: list[Fault]

    def and_those_of(self, look: Callable[[], Any], path: Path) -> _Read:
        """Add the faults that `look` raises, without those of keys that have faults anyhow and were left out."""
        faulty = {fault.key[0] for fault in self.faults if fault.key}
        try:
            look()
        except HmpxError as error:
            new = [fault for fault in error.faults if not fault.key or fault.key[0] not in faulty]
            return self._replace(faults=[*self.faults, *new])
        return self


def _read_with_rules(path: Path) -> _Read:
    """Read a file, and look up the names of ops that the recipe itself lists."""
    read = _read(path, ())
    if any(getattr(read.recipe, side) for side in SIDES):
        read = read.and_those_of(changed(read.recipe, **dict.fromkeys(LISTS, "")).policy, path)
    return read.and_those_of(read.recipe.overlays, path)


def _read(path: Path, above: tuple[Path, ...]) -> _Read:
    """Read a file and those that it extends. above: the files that extend this one."""
    keys, origins, found = _keys_of_yaml(path)
    around, named = USUAL, keys.pop(EXTENDS, None)
    if named is not None:
        around, others = _extended(named, [*above, path], origins.by_key[EXTENDS,])
        found = [*found, *others]
    return _Read(laid_over(around, keys, origins), found)


def _extended(named: str, chain: Sequence[Path], origin: Origin) -> tuple[Recipe, list[Fault]]:
    """Read the recipe that the last file of a chain extends.

    Args:
        named: its name, or its path from there.
        origin: the line that names it.
    """

    def fault(text: object) -> tuple[Recipe, list[Fault]]:
        return USUAL, [Fault(f"{EXTENDS}: {text}", origin)]

    try:
        base = recipe_path(named, chain[-1].parent)
    except HmpxError as error:
        return fault(error)
    if base.resolve() in (each.resolve() for each in chain):
        return fault(f"a circle: {' extends '.join(map(str, [*chain, base]))}")
    if len(chain) > _LONGEST:
        return fault(f"more than {_LONGEST} recipes that extend one another")
    try:
        return _read(base, tuple(chain))
    except HmpxError as error:
        (wrong,) = error.faults  # it cannot be read
        return (USUAL, [wrong]) if wrong.origin and wrong.origin.line else fault(wrong)


_LONGEST = 32  # chain of files that extend one another
_Keys = tuple[dict[str, Any], Origins, list[Fault]]  # the keys of a file without faults, their origins, and the faults


def _keys_of_yaml(path: Path) -> _Keys:
    """Read the keys of a recipe's file and check each. Paths of lists are relative to the file."""
    root = composed(path, KEYS)
    if [key.value for key, _ in root.value] == [NXD]:
        return _keys_of_nxd(path, root)
    values: dict[str, Any] = {}
    lines: dict[tuple, int] = {}
    found: list[Fault] = []

    def wrong(fault: Fault, line: int) -> None:
        found.append(fault._replace(origin=Origin(str(path), lines.get(fault.key, line))))

    for key, value in root.value:
        name, line = key.value, key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarNode):
            wrong(Fault(f"a recipe's keys are {', '.join(KEYS)}"), line)
            continue
        if name in values:
            wrong(Fault(f"{name!r} stands here for the second time"), line)
        lines |= {(name,): line, **lines_inside(value, name)}
        try:
            values[name] = spelled_out(name, value_of(path, value))
        except HmpxError as error:
            found += [fault._replace(key=(name,)) for fault in error.faults]
            continue
        if len(found) >= FEW and name not in (*KEYS, EXTENDS):  # without the nearest key
            wrong(Fault(f"{name!r} is no key of a recipe", key=(name,)), line)
            continue
        for fault in faults(name, values[name], KEYS):
            wrong(fault, line)
        if name in LISTS and isinstance(values[name], str) and values[name]:
            values[name] = os.path.normpath(path.parent / values[name])
    for fault in _twice(values):
        wrong(fault, 1)
    faulty = {fault.key[0] for fault in found if fault.key}
    return {key: values[key] for key in values if key not in faulty}, Origins.of_file(path, lines), found


def _keys_of_nxd(path: Path, root: yaml.MappingNode) -> _Keys:
    """Read a file that holds NxD's configuration."""
    ((key, value),) = root.value
    config = value_of(path, value)
    lines = {(NXD,): key.start_mark.line + 1, **lines_inside(value, NXD)}
    with Origins.of_file(path, lines).named({}):
        keys = nxd_keys(config, False)
    where = {(own,): lines.get((NXD, NXD_MASTERS if own == "weights" else own), lines[NXD,]) for own in keys}
    return keys, replace(Origins.of_file(path, where), under_zero=nxd_under_zero(config)), []


def _twice(values: Mapping[str, Any]) -> list[Fault]:
    """Return a fault for each list that is given both name by name and as a file."""
    both = [side for side in SIDES if values.get(side) is not None and values.get(f"{side}_file_path")]
    return [Fault(f"{side} and {side}_file_path: which of the two?", key=(side,)) for side in both]
