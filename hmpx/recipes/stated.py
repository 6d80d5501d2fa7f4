"""A recipe however it is stated: by name, as a file or a dict that may extend another one, with options on top."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hmpx.errors import HmpxError, few
from hmpx.ops.policies.op_lists import FP8_FORMAT, LOW_PRECISION, SIDES, read_file
from hmpx.recipes.files import Origins, is_about, named_twice, read_keys, recipe_path, without_text
from hmpx.recipes.keys import EXTENDS, LISTS, MAPPINGS, MODULES, OF_OPS, problems, spelled_out
from hmpx.recipes.recipe import DEFAULT, KEYS, USUAL, Recipe, changed, with_origins
from hmpx.recipes.vendors import NXD, nxd_under_zero

Stated = str | os.PathLike[str] | Mapping[str, Any] | Recipe | None  # how a recipe may be given, everywhere


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
    held = {side for side in SIDES if side in own or f"{side}_file_path" in own} | _in_several(own)
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
    return with_origins(replace(base, **own), before.under(origins))


def _in_several(keys: Mapping[str, Any]) -> set[str]:
    """Return the sides that the list files hold: a YAML or JSON file may hold several."""
    found: set[str] = set()
    for side, key in zip(SIDES, LISTS, strict=True):
        if keys.get(key):
            with contextlib.suppress(HmpxError):  # `policy` says it, with the line of the key
                lists = read_file(keys[key], side)
                found |= {each for each in SIDES if lists.side(each) is not None}
    return found


def read_recipe(name: str | os.PathLike[str]) -> Recipe:
    """Read a recipe that hmpx ships, by name, or a recipe in a file, by path; paths in it are relative to it.

    A file is YAML, or a Gaudi configuration, whose name ends in .json.

    Raises:
        HmpxError: each problem with file and line, the key or value, and the nearest legal one.
    """
    recipe, wrong, _ = _read_with_rules(recipe_path(name))
    if wrong:
        kinds = set(wrong.values())
        raise (kinds.pop() if len(kinds) == 1 else HmpxError)(few([*wrong]))
    return recipe


def faults(path: Path) -> list[str]:
    """Return everything that is wrong in a recipe's file, also what `read_recipe` leaves to `policy` and `settings`.

    Raises:
        HmpxError: it cannot be read, or extends itself.
    """
    recipe, wrong, faulty = _read_with_rules(path)
    return list(wrong | _of_others(_raised(recipe.settings, faulty) | _raised(recipe.policy, faulty), path))


_Wrong = dict[str, type[HmpxError]]  # each problem, and what is raised for it


def _read_with_rules(path: Path) -> tuple[Recipe, _Wrong, Collection[str]]:
    """Do what `_read` does, and look up the names of ops that the recipe itself lists."""
    recipe, wrong, faulty = _read(path, ())
    if any(getattr(recipe, side) for side in SIDES):
        wrong = wrong | _raised(changed(recipe, **dict.fromkeys(LISTS, "")).policy, faulty)
    return recipe, _of_others(wrong | _raised(recipe.overlays, faulty), path), faulty


def _of_others(wrong: _Wrong, path: Path) -> _Wrong:
    """Return the problems of a file and of others that it names, those of the others without their text."""
    return {each if each.startswith(f"{path}:") else without_text(each): kind for each, kind in wrong.items()}


def _read(path: Path, above: tuple[Path, ...]) -> tuple[Recipe, _Wrong, Collection[str]]:
    """Return the recipe in a file, the problems in it and in the files that it extends, and the keys of the problems.

    above: the files that extend this one.
    """
    keys, origins, base, wrong, faulty = read_keys(path, KEYS)
    around, found = USUAL, _Wrong()
    others: Collection[str] = ()
    if base is not None:
        chain, extends = [*above, path], f"{origins.where(EXTENDS)}: {EXTENDS}: "
        if base.resolve() in (each.resolve() for each in chain):
            raise HmpxError(f"{extends}a circle: {' extends '.join(map(str, [*chain, base]))}")
        if len(chain) > _LONGEST:
            raise HmpxError(f"{extends}more than {_LONGEST} recipes that extend one another")
        try:
            around, found, others = _read(base, tuple(chain))
        except HmpxError as error:
            said = "\n".join(map(without_text, str(error).splitlines()))
            raise type(error)(said if re.match(r".*:\d+: ", said) else f"{extends}{said}") from None
    recipe = laid_over(around, keys, origins)
    return recipe, dict.fromkeys(wrong, HmpxError) | found, {*faulty, *others}


_LONGEST = 32  # chain of files that extend one another


def _raised(look: Callable[[], Any], faulty: Collection[str]) -> _Wrong:
    """Return the problems that `look` raises, without those about keys that are faulty anyhow and were left out."""
    try:
        look()
    except HmpxError as error:
        return {
            line: type(error) for line in str(error).splitlines() if not any(is_about(line, (key,)) for key in faulty)
        }
    return {}


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
    wrong = [problem for key, value in values.items() for _, problem in problems(key, value, KEYS)]
    wrong += [both for _, both in named_twice(values)]
    if wrong:
        raise HmpxError(few(wrong))
    return values
