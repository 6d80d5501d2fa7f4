"""Reads a recipe: by its name, from a file or a dict that may extend another recipe, or from the environment."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from hmpx.base.files import composed, path_from, places_inside, value_of
from hmpx.errors import HmpxError, Origin, Places, did_you_mean, errors_at
from hmpx.ops.policies.catalog import canonical
from hmpx.ops.policies.lists import (
    FP8_FORMAT,
    LIST_KEYS,
    LOW_PRECISION,
    MORE,
    SIDES,
    Listed,
    OpLists,
    default_lists,
    read_lists,
    shipped,
)
from hmpx.recipes.keys import (
    EXTENDS,
    LISTS,
    MAPPINGS,
    MODULES,
    NXD,
    NXD_MASTERS,
    OF_OPS,
    check,
    nxd_keys,
    nxd_under_zero,
    spelled_out,
)
from hmpx.recipes.recipe import DEFAULT, KEYS, LEGAL, USUAL, Recipe, changed, naming_lines, noted

logger = logging.getLogger("hmpx")
Stated = str | os.PathLike[str] | Mapping[str, Any] | Recipe | None  # how a recipe may be given, everywhere


def as_recipe(recipe: Stated, **keys: Any) -> Recipe:
    """Return the recipe that a name, a path, keys or NxD's configuration state; None: default lists, FP32 weights.

    keys: those of a recipe that lie over it, as over one that `extends` names.
    """
    if EXTENDS in keys:
        raise HmpxError(f"{EXTENDS} goes into a file or a dict; the recipe is given already")
    if keys:
        return laid_over(as_recipe(recipe), checked(keys))
    if recipe is None:
        return DEFAULT
    if isinstance(recipe, Recipe):
        return recipe
    if isinstance(recipe, str | os.PathLike):
        return read_recipe(recipe)
    if not isinstance(recipe, Mapping):
        raise HmpxError(f"a recipe is a name, a path or a dict, not a {type(recipe).__name__}")
    if list(recipe) == [NXD]:
        return noted(Recipe.from_nxd(recipe[NXD]), {}, nxd_under_zero(recipe[NXD]))
    given = dict(recipe)
    base = given.pop(EXTENDS) if isinstance(given.get(EXTENDS), Recipe) else None
    values = checked(given)
    if EXTENDS in values:
        base = read_recipe(values.pop(EXTENDS))
    return laid_over(base or USUAL, values)


def checked(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Check the keys of a recipe, and return them with dtypes by their names."""
    values = {key: spelled_out(key, value) for key, value in keys.items()}
    for key, value in values.items():
        check(key, value, KEYS, LEGAL)
        if key in LIST_KEYS:
            OpLists.of({key: value}, "", may_add=True)
    for side in SIDES:
        if values.get(side) is not None and values.get(f"{side}_file_path"):
            raise HmpxError(f"{side} and {side}_file_path: which of the two?", key=(side,))
    return values


def laid_over(base: Recipe, keys: Mapping[str, Any], places: Places | None = None) -> Recipe:
    """Return `base` with these keys, of a file, a dict or options, in the place of its own.

    A list replaces the base's list of that side (bf16, fp32, promote, fp8), as names or as a file; "..." in it stands
    for the base's names. Another `opt_level` drops the base's lists. In a mapping, the base's patterns come first.
    While all keys are about ops, parameters keep their dtype.

    Args:
        keys: with values as `check` wants them. places: of these keys and of what is in them.
    """
    own: dict[str, Any] = dict(keys)
    unsaid = (base is USUAL or base._keeps_dtype) and "parameter_dtype" not in own
    keeps = bool(unsaid and own and own.keys() <= OF_OPS and own.get("opt_level", base.opt_level) is not None)
    if unsaid and own:
        own["parameter_dtype"] = None if keeps else USUAL.parameter_dtype
    other_level = own.get("opt_level", base.opt_level) != base.opt_level
    if any(MORE in (own.get(side) or ()) for side in SIDES):
        own, places = _with_names_of(USUAL if other_level else base, own, places or {})
    own |= {side: tuple(own[side]) for side in SIDES if own.get(side) is not None}
    paths = {key: own[key] for key in LISTS if own.get(key)}
    with naming_lines(places or {}, paths):
        files = [OpLists.read(path, key.removesuffix("_file_path")) for key, path in paths.items()]
    held = {side for side in SIDES if side in own or f"{side}_file_path" in own}
    held = held.union(*(each.sides for each in files))
    gone = [key for side in SIDES if other_level or side in held for key in (side, f"{side}_file_path")]
    if other_level and own["opt_level"] is None:
        gone += [LOW_PRECISION, FP8_FORMAT, "kernels", "where", "dtype_map", MODULES]
    base = changed(base, **{key: getattr(USUAL, key) for key in gone})
    kept = {
        key: place
        for key, place in base._places.items()
        if key[0] not in own or (key[0] in MAPPINGS and len(key) > 1 and key[1] not in own[key[0]])
    }
    for key in MAPPINGS:
        if key in own:
            around = {pattern: rule for pattern, rule in getattr(base, key).items() if pattern not in own[key]}
            own[key] = {**around, **own[key]}
    zero = {key: value for key, value in base._under_zero.items() if key not in own}
    return noted(replace(base, **own), {**kept, **(places or {})}, zero, keeps)


def _with_names_of(base: Recipe, own: Mapping[str, Any], places: Places) -> tuple[dict[str, Any], Places]:
    """Put the names of the base's lists into the place of "...", and return the keys with the places of all names.

    A name that `own` lists leaves the other lists of the base.
    """
    keys, found = dict(own), {key: place for key, place in places.items() if key[0] not in SIDES or len(key) == 1}
    around = dict[str, tuple[Listed, ...]]()
    if own.get("opt_level", base.opt_level) == "O1":  # others take no list, as `Recipe.policy` says
        with base.naming_lines():
            files = read_lists(**{key: getattr(base, key) for key in LISTS})
            around = base.lists.over(files).over(default_lists()).sides
    named = {canonical(name) for side in SIDES for name in own.get(side) or ()}
    for side in SIDES:
        inherited = around.get(side, ())
        rest = [(each.name, each.place) for each in inherited if canonical(each.name) not in named]
        said = [(name, places.get((side, i), "")) for i, name in enumerate(own.get(side) or ())]
        if said:
            both = [one for each in said for one in (rest if each[0] == MORE else [each])]
        elif side in own or f"{side}_file_path" in own or len(rest) == len(inherited):
            continue
        else:
            both = rest
        keys[side] = [name for name, _ in both]
        found |= {(side, i): place for i, (_, place) in enumerate(both) if isinstance(place, Origin)}
    return keys, found


def recipe_names() -> list[str]:
    return sorted(each.stem for each in (shipped() / "recipes").glob("*.yaml"))


def recipe_path(name: str | os.PathLike[str], folder: str | os.PathLike[str] = "") -> Path:
    """Return the file of a recipe that hmpx ships, by its name; or the path itself if it ends in .yaml.

    folder: what a path is relative to.

    Raises:
        HmpxError: no such recipe, with the nearest one.
    """
    path = Path(name)
    if path.suffix in (".yaml", ".yml"):
        return Path(path_from(folder, path)) if folder else path
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
        HmpxError: the first that is wrong, with file and line, the key or value, and the nearest legal one.
    """
    recipe = _read(recipe_path(name), ())
    if recipe.lists.sides or recipe.opt_level is None:
        changed(recipe, **dict.fromkeys(LISTS, "")).policy()
    recipe.overlays()
    return recipe


def _read(path: Path, above: tuple[Path, ...]) -> Recipe:
    """Read a file and those that it extends. above: the files that extend this one."""
    root, base = composed(path, KEYS), USUAL
    if [key.value for key, _ in root.value] == [NXD]:
        return _of_nxd(path, *root.value[0])
    values: dict[str, Any] = {}
    places: dict[tuple, Origin] = {}
    for key, node in root.value:
        name, line = key.value, Origin(str(path), key.start_mark.line + 1)
        with errors_at(places, line):
            if not isinstance(key, yaml.ScalarNode):
                raise HmpxError(f"a recipe's keys are {', '.join(KEYS)}")
            places |= {(name,): line, **places_inside(path, node, name)}
            values |= checked({name: value_of(path, node)})
            if name in LISTS and values[name]:
                values[name] = path_from(path.parent, values[name])
    if EXTENDS in values:
        base = _extended(values.pop(EXTENDS), [*above, path], places[EXTENDS,])
    with errors_at(places):
        return laid_over(base, checked(values), places)


def _extended(named: str, chain: Sequence[Path], line: Origin) -> Recipe:
    """Read the recipe that the last file of a chain extends, in this line, by its name or its path from there."""
    with errors_at({}, line, before=f"{EXTENDS}: "):
        base = recipe_path(named, chain[-1].parent)
        if base.resolve() in (each.resolve() for each in chain):
            raise HmpxError(f"a circle: {' extends '.join(map(str, [*chain, base]))}")
        if len(chain) > _LONGEST:
            raise HmpxError(f"more than {_LONGEST} recipes that extend one another")
    try:
        return _read(base, tuple(chain))
    except HmpxError as error:
        if isinstance(error.place, Origin) and error.place.line:
            raise
        raise HmpxError(f"{EXTENDS}: {error}", line) from None  # it cannot be read


def _of_nxd(path: Path, key: yaml.Node, node: yaml.Node) -> Recipe:
    line, config = Origin(str(path), key.start_mark.line + 1), value_of(path, node)
    inside = {(NXD,): line, **places_inside(path, node, NXD)}
    with errors_at(inside):
        keys = nxd_keys(config, False)
    places = {(own,): inside.get((NXD, NXD_MASTERS if own == "weights" else own), line) for own in keys}
    return noted(laid_over(USUAL, keys), places, nxd_under_zero(config))


_LONGEST = 32  # chain of files that extend one another


# The recipe that environment variables stand for where none is named: those of PyTorch/XLA and Neuron. Sources:
# PyTorch/XLA (removed after 2.8); AWS Neuron documentation, "Migration From XLA_USE_BF16/XLA_DOWNCAST_BF16" and
# "Neuron Rounding Modes".

_ROUNDING, _SEED = "NEURON_RT_STOCHASTIC_ROUNDING_EN", "NEURON_RT_STOCHASTIC_ROUNDING_SEED"
# The first of these that is on decides, as in PyTorch/XLA.
_RECIPES = {"XLA_USE_BF16": "xla-use-bf16", "XLA_DOWNCAST_BF16": "xla-downcast-bf16", _ROUNDING: "neuron-bf16-sr"}
# Gaudi's, which name files of ops, and their older names: hmpx does not read these variables.
_GAUDI = {"PT_HPU_AUTOCAST_LOWER_PRECISION_OPS_LIST": "bf16", "PT_HPU_AUTOCAST_FP32_OPS_LIST": "fp32"}
_GAUDI |= {"LOWER_LIST": "bf16", "FP32_LIST": "fp32"}


def _is_on(value: str) -> bool:
    """Return what PyTorch/XLA makes of a variable: C's `atoi` of it, but for true."""
    return value == "true" or bool(re.match(r"\s*[+-]?0*[1-9]", value))


def recipe_of_environment() -> tuple[Recipe, str] | None:
    """Return `recipe_of` this process, and unset XLA's variables: torch_xla would store FP32 tensors as BF16."""
    found = recipe_of(os.environ)
    for name in ("XLA_USE_BF16", "XLA_DOWNCAST_BF16"):
        os.environ.pop(name, None)
    return found


def recipe_of(environment: Mapping[str, str]) -> tuple[Recipe, str] | None:
    """Return the recipe that these variables stand for, and a sentence that says so; None if none of them is on.

    A variable is on where its owner takes it so: "true" and numbers other than 0. With XLA_USE_BF16 or
    XLA_DOWNCAST_BF16, weights are rounded stochastically, as Neuron does it, unless NEURON_RT_STOCHASTIC_ROUNDING_EN is
    off. A variable that is off by another word than 0 and false, and Gaudi's, which are not read, get a warning.

    Raises:
        HmpxError: NEURON_RT_STOCHASTIC_ROUNDING_SEED is not an integer in [0, 2^64).
    """
    asked = {name: environment[name] for name in (*_RECIPES, _SEED) if environment.get(name)}
    for name, side in _GAUDI.items():
        if environment.get(name):
            keys = f"extends: gaudi-autocast, {side}_file_path: {environment[name]}"
            logger.warning("hmpx: %s is not read; a recipe with %s does the same", name, keys)
    for name in _RECIPES:
        if name in asked and not _is_on(asked[name]) and asked[name] not in ("0", "false"):
            logger.warning("hmpx: %s=%s is off: 1 and true switch it on", name, asked[name])
    deciding = next((name for name in _RECIPES if _is_on(asked.get(name, ""))), None)
    if deciding is None:
        return None
    recipe = read_recipe(_RECIPES[deciding])
    if _ROUNDING in asked and not _is_on(asked[_ROUNDING]):
        recipe = changed(recipe, weights="nearest")
    if _SEED in asked:
        if not asked[_SEED].isdecimal() or int(asked[_SEED]) >= 2**64:
            raise HmpxError(f"{_SEED}={asked[_SEED]} is no seed: an integer from 0 to 2**64 - 1")
        recipe = changed(recipe, seed=int(asked[_SEED]))
    differs = {key: getattr(recipe, key) for key in ("weights", "seed")}
    settings = "".join(f", {key} {value}" for key, value in differs.items() if value is not None)
    said = " ".join(f"{name}={value}" for name, value in asked.items())
    return recipe, f"{said} is recipe {_RECIPES[deciding]}{settings}"
