"""The command `check`: finds every problem in op lists and recipes.

Files may be a stranger's, and what a module does when it is imported may be anything; so nothing is imported.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

from hmpx.base.yaml_files import composed
from hmpx.errors import FEW, Fault, HmpxError, OpListError, Origin, did_you_mean
from hmpx.ops.policies.build_policy import may_be_user_function, unknown_op
from hmpx.ops.policies.catalog import aten_only, canonical, catalog, retired
from hmpx.ops.policies.op_lists import LOW_PRECISION, SIDES, Listed, read_file
from hmpx.ops.policies.policy import Policy
from hmpx.ops.user_functions import shipped_names
from hmpx.recipes.keys import EXTENDS, LISTS
from hmpx.recipes.reading import faults_of, read_recipe, recipe_names, recipe_path
from hmpx.recipes.recipe import Recipe
from hmpx.recipes.vendors import NXD, NXD_MASTERS

_UNKNOWN = "unknown"


class Undecided(HmpxError):
    """The kind of what is neither a fault nor right: only an import, which runs code, could decide."""


def check_files(paths: Sequence[str]) -> Iterator[Fault]:
    """Yield every fault in some op list files and recipes, and what is not decided.

    A YAML or JSON file says which side a name is on; of a text file, its name does ("bf16", "fp32", "promote", "fp8").
    Text files are held against one another: all of them if no two are on the same side, else those of one folder. A
    recipe is a YAML file with a key that only a recipe has, or the name of one that comes with hmpx.
    """
    text_files = [path for path in paths if Path(path).suffix.lower() not in (".yaml", ".yml", ".json")]
    text_files = [path for path in text_files if path not in recipe_names()]
    sides = {path: next((side for side in SIDES if side in Path(path).name), path) for path in text_files}
    one_set = len(set(sides.values())) == len(text_files)
    folders: dict[str, dict[str, tuple[str, Listed]]] = {}
    for path in paths:
        if path in recipe_names() or is_recipe(path):
            yield from _check_recipe(path)
            continue
        if not Path(path).suffix and not Path(path).exists():
            yield Fault(f"neither a file nor a recipe{did_you_mean(path, recipe_names())}", Origin(path))
            continue
        try:
            lists = read_file(path, "bf16")
        except OpListError as error:
            yield from error.faults
            continue
        yield from lists.faults
        folder = "" if one_set else str(Path(path).parent)
        seen = folders.setdefault(folder, {}) if path in sides else {}
        in_this_file = Counter[str]()
        for side in SIDES:
            for listed in lists.side(side) or ():
                yield from _check_name(listed, sides.get(path, side), seen, in_this_file)


def is_recipe(path: str) -> bool:
    """Return whether a YAML file has a key of a recipe, or a misspelt one."""
    if Path(path).suffix.lower() not in (".yaml", ".yml"):
        return False
    try:
        keys = [str(key.value) for key, _ in composed(Path(path), SIDES).value]
    except HmpxError:
        return False
    of_lists = (*SIDES, LOW_PRECISION)
    of_recipes = {NXD, NXD_MASTERS, EXTENDS, *vars(Recipe())} - set(of_lists)
    return any(key in of_recipes for key in keys) or any(
        did_you_mean(key, of_recipes) and not did_you_mean(key, of_lists) for key in keys
    )


def _check_recipe(name: str) -> Iterator[Fault]:
    """Yield the faults of a recipe and of its lists, in the order of its lines."""
    path = recipe_path(name)
    found: list[Fault] = []
    try:
        found += _check_lists(path)
        found += faults_of(path)
        if all(each.kind is Undecided for each in found):
            known = {each.text.rpartition(": ")[2] for each in found}
            found += [each for each in _undecided(path) if each.text.rpartition(": ")[2] not in known]
    except HmpxError as error:
        found += error.faults
    once: dict[str, Fault] = {}
    for fault in found:
        once.setdefault(str(fault).partition("; ")[0], fault)

    def line(fault: Fault) -> int:
        return fault.origin.line if fault.origin and fault.origin.path == str(path) else 0

    yield from sorted(once.values(), key=line)


def _check_lists(path: Path) -> Iterator[Fault]:
    """Yield the faults of the lists of a recipe, read from its YAML, whatever else is wrong in it."""
    root = composed(path, SIDES)
    seen: dict[str, tuple[str, Listed]] = {}
    in_this_file = Counter[str]()
    for key, value in root.value:
        if key.value in LISTS and isinstance(value, yaml.ScalarNode) and value.value:
            origin = Origin(str(path), key.start_mark.line + 1)
            for fault in check_files([os.path.normpath(path.parent / value.value)]):
                yield fault._replace(text=f"{key.value}: {fault}", origin=origin)
        elif key.value in SIDES and isinstance(value, yaml.SequenceNode):
            names = [each for each in value.value if isinstance(each, yaml.ScalarNode)]
            for listed in (Listed(each.value, str(path), each.start_mark.line + 1) for each in names):
                yield from _check_name(listed, key.value, seen, in_this_file)


def _undecided(path: Path) -> Iterator[Fault]:
    """Yield what is not decided in a recipe without faults, with its rules of modules and what it extends."""
    with contextlib.suppress(HmpxError):
        recipe = read_recipe(path)
        policy = recipe.policy() or Policy()
        for each in (policy, *(overlay.over(policy) for overlay in recipe.overlays().values())):
            for name in each.user_functions():
                if (fault := of_user_function(name)) and fault.kind is Undecided:
                    yield fault._replace(origin=Origin(each.origins[name]))


def _check_name(
    listed: Listed, side: str, seen: dict[str, tuple[str, Listed]], in_this_file: Counter[str]
) -> Iterator[Fault]:
    name = canonical(listed.name)
    if listed.problem:
        yield Fault(listed.problem, listed.origin)
        return
    if retired(name):
        return
    if name not in catalog():
        if aten_only(name):
            yield Fault(f"{listed.name!r} has no Python entry point; it will not be reached", listed.origin)
        elif not may_be_user_function(name):
            in_this_file[_UNKNOWN] += 1  # the nearest name is sought in two thousand
            said = unknown_op(listed.name) if in_this_file[_UNKNOWN] <= FEW else f"unknown op {listed.name!r}"
            yield Fault(said, listed.origin)
            return
        elif fault := of_user_function(name):
            yield fault._replace(origin=listed.origin)
            if fault.kind is not Undecided:
                return
    first_side, first = seen.setdefault(name, (side, listed))
    if first_side != side and "promote" not in (first_side, side):
        yield Fault(f"{listed.name!r} is on both sides; the other has it at {first.where}", listed.origin)
    elif first_side == side and f"{side} {name}" in in_this_file:
        yield Fault(f"{listed.name!r} is a duplicate of {first.name!r} at {first.where}", listed.origin)
    in_this_file[f"{side} {name}"] += 1


def of_user_function(name: str) -> Fault | None:
    """Return the fault of a dotted name outside torch, as far as imported modules tell."""
    prefix = name.rpartition(".")[0]
    while prefix and sys.modules.get(prefix) is None:
        prefix = prefix.rpartition(".")[0]
    found: Any = sys.modules.get(prefix)
    for part in name.removeprefix(f"{prefix}.").split(".") if prefix else ():
        try:
            found = inspect.getattr_static(found, part)  # a plain look would run `__getattr__`, which may import
        except AttributeError:
            own = vars(found) if isinstance(found, ModuleType | type) else {}
            may_come = {"__path__", "__getattr__"} & {*own, *dir(type(found))}  # by an import
            if not isinstance(found, ModuleType) or not may_come:
                return Fault(f"{prefix} has no {part!r}{did_you_mean(part, own)}")
            found = None
            break
    if found is None:
        said = f"not decided: {name} is in no module that is imported; it is cast once the program has imported it"
        return None if name in shipped_names() else Fault(said, kind=Undecided)
    if isinstance(found, type):
        return Fault(f"{name!r} is a class, and a list names functions; {name}.forward may be what is meant")
    if callable(getattr(found, "__func__", found)):
        return None
    return Fault(f"{name!r} is no function but {type(found).__name__}")
