"""Reads op lists and recipes, and says what is wrong in each: `explain` of files.

Files may be a stranger's, and what a module does when it is imported may be anything; so nothing is imported.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch

from hmpx.base.files import composed
from hmpx.base.torch_features import exists
from hmpx.base.torch_private import FEATURES
from hmpx.errors import HmpxError, OpListError, Origin, did_you_mean
from hmpx.ops.policies.catalog import canonical, is_op, retired, unknown_op
from hmpx.ops.policies.lists import LIST_KEYS, SIDES, Listed, OpLists, text_of_list
from hmpx.ops.policies.policy import Policy, resolve_sides
from hmpx.ops.user_functions import shipped_names
from hmpx.recipes.keys import EXTENDS, NXD, NXD_MASTERS
from hmpx.recipes.reading import read_recipe, recipe_names
from hmpx.recipes.recipe import KEYS


class Remark(NamedTuple):
    """What is said of a file. is_fault: False for what only an import, which runs code, could decide."""

    text: str
    is_fault: bool = True

    def __str__(self) -> str:
        return self.text


def check_files(paths: Sequence[str]) -> Iterator[Remark]:
    """Yield the faults of each list in text, the first fault of other files, and what is not decided.

    A YAML or JSON file says which side a name is on; of a text file, its name does ("bf16", "fp32", "promote", "fp8").
    Text files for different sides are held against one another. A recipe is a YAML file with a key that only a recipe
    has, or the name of one that comes with hmpx.
    """
    together: dict[str, OpLists] = {}
    for path in paths:
        try:
            if path in recipe_names() or is_recipe(path):
                recipe = read_recipe(path)
                recipe.settings()
                policy = recipe.policy() or Policy()
                names = [
                    Listed(name, each.origins[name])
                    for each in (policy, *(overlay.over(policy) for overlay in recipe.overlays().values()))
                    for name in each.user_functions()
                ]
                yield from _of_user_functions(names)
                continue
            if not Path(path).suffix and not Path(path).exists():
                yield Remark(f"{path}: neither a file nor a recipe{did_you_mean(path, recipe_names())}")
                continue
            side = side_of(path)
            if Path(path).suffix.lower() in (".yaml", ".yml", ".json"):
                lists = OpLists.read(path, side)
                resolve_sides(lists)
            else:
                lists = yield from _of_text(path, side)
                together[side] = lists if side not in together else OpLists()
            yield from _of_user_functions([each for listed in lists.sides.values() for each in listed])
        except HmpxError as error:
            yield Remark(str(error))
    both = OpLists()
    for lists in together.values():
        both = lists.over(both)
    try:
        resolve_sides(both)
    except OpListError as error:
        yield Remark(str(error))


def side_of(path: str) -> str:
    """Return the side that the name of a list's file says, else "bf16"."""
    return next((side for side in SIDES if side in Path(path).name), "bf16")


def _of_text(path: str, side: str) -> Generator[Remark, None, OpLists]:
    """Yield what each line of a list says wrong, or in vain, and return the names of the others."""
    lines, found = text_of_list(path).splitlines(), dict[int, Remark]()
    lists = None
    while lists is None:
        try:
            lists = OpLists.of_text("\n".join(lines), path, side)
        except OpListError as error:
            line = error.place.line if isinstance(error.place, Origin) else 0
            if not line:
                raise
            found[line], lines[line - 1] = Remark(str(error)), ""
    good, first = list[Listed](), dict[str, int]()
    for each in lists.sides[side]:
        line, op = each.place.line if isinstance(each.place, Origin) else 0, canonical(each.name)
        try:
            resolve_sides(replace(OpLists(), **{side: (each,)}))  # type: ignore[arg-type]
        except OpListError as error:
            found[line] = Remark(str(error))
            continue
        good.append(each)
        if retired(op):
            found[line] = Remark(f"{each.where}: {unknown_op(each.name)}", is_fault=False)
        elif op in first:
            found[line] = Remark(f"{each.where}: {each.name!r} is the op of line {first[op]} again", is_fault=False)
        first.setdefault(op, line)
    yield from (found[line] for line in sorted(found))
    return replace(lists, **{side: tuple(good)})  # type: ignore[arg-type]


def features_table() -> str:
    """Return a table of the features that rest on names which torch does not document, and which of them are off."""
    lines = []
    for feature in FEATURES:
        replaced = [path for path in feature.names if path not in feature.missing and not exists(path)]
        lines.append(f"off  {feature.sentence()}" if feature.missing else f"on   {feature.title}")
        lines += [f"     without {path}, which something stands in for" for path in replaced]
    return "\n".join([f"torch {torch.__version__}", *lines])


def is_recipe(path: str) -> bool:
    """Return whether a YAML file has a key of a recipe, or a misspelt one."""
    if Path(path).suffix.lower() not in (".yaml", ".yml"):
        return False
    try:
        keys = [str(key.value) for key, _ in composed(Path(path), SIDES).value]
    except HmpxError:
        return False
    of_recipes = {NXD, NXD_MASTERS, EXTENDS, *KEYS} - set(LIST_KEYS)
    return any(key in of_recipes for key in keys) or any(
        did_you_mean(key, of_recipes) and not did_you_mean(key, LIST_KEYS) for key in keys
    )


def _of_user_functions(names: Sequence[Listed]) -> Iterator[Remark]:
    dotted = {name for name, _ in names if "." in name and not is_op(canonical(name))}
    said = {name: remark for name in dotted if (remark := of_user_function(name))}
    for name, place in names:
        if remark := said.pop(name, None):
            yield remark._replace(text=f"{place}: {remark}")
            if remark.is_fault:
                return


def of_user_function(name: str) -> Remark | None:
    """Return what is wrong with a dotted name outside torch, as far as imported modules tell."""
    prefix = name.rpartition(".")[0]
    while prefix and sys.modules.get(prefix) is None:
        prefix = prefix.rpartition(".")[0]
    value: Any = sys.modules.get(prefix)
    for part in name.removeprefix(f"{prefix}.").split(".") if prefix else ():
        try:
            value = inspect.getattr_static(value, part)  # a plain look would run `__getattr__`, which may import
        except AttributeError:
            own = vars(value) if isinstance(value, ModuleType | type) else {}
            may_come = {"__path__", "__getattr__"} & {*own, *dir(type(value))}  # by an import
            if not isinstance(value, ModuleType) or not may_come:
                return Remark(f"{prefix} has no {part!r}{did_you_mean(part, own)}")
            value = None
            break
    if value is None:
        said = f"not decided: {name} is in no module that is imported; it is cast once the program has imported it"
        return None if name in shipped_names() else Remark(said, is_fault=False)
    if isinstance(value, type):
        return Remark(f"{name!r} is a class, and a list names functions; {name}.forward may be what is meant")
    if callable(getattr(value, "__func__", value)):
        return None
    return Remark(f"{name!r} is no function but {type(value).__name__}")
