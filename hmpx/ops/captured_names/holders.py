"""Whoever else holds a function: a generator, a map, a context variable, a table too deep or too long to be searched.

Everything that is alive is asked what it refers to, whatever it is, and what torch, hmpx and the search account for is
taken off. The rest is named by going up from holder to holder.
"""

from __future__ import annotations

import gc
import types
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch

from hmpx.base import raw
from hmpx.ops.captured_names.rewriting import CapturedName

_BUNCH = 64  # things at once
_SUSPENDED = {types.GeneratorType: "gi_frame", types.CoroutineType: "cr_frame", types.AsyncGeneratorType: "ag_frame"}
_IN_C = frozenset({"builtins", "collections", "functools", "itertools", "operator"})  # their classes name no owner


class Holders:
    """Everything that is alive.

    Args:
        is_off: whether the code of these globals stays as it is: torch's, hmpx's. stays: the same of a module's name.
        variables: each local variable of a function that runs now, in words, and its value.
    """

    def __init__(
        self,
        is_off: Callable[[dict], bool],
        stays: Callable[[Any], bool],
        variables: Callable[[], Iterable[tuple[str, Any]]],
    ) -> None:
        self._is_off, self._stays, self._kinds = is_off, stays, dict[int, str | None]()
        everything = gc.get_objects()
        # No modules, but their namespaces: Python 3.12.1 never returns when it is asked for what `_asyncio` refers to.
        self._things = [each for each in everything if not issubclass(type(each), types.ModuleType)]
        modules = [each for each in everything if issubclass(type(each), types.ModuleType)]
        self._spaces = {id(raw.module_globals(module)): raw.module_name(module) for module in modules}
        classes = [object]  # in C, of which the collector tracks the namespace alone
        for cls in classes:
            classes += [each for each in type.__subclasses__(cls) if not raw.flags(each) & raw.HEAP_TYPE]
        self._spaces |= {id(space): "builtins" for space in gc.get_referents(*map(raw.namespace, classes))}
        self._variables = list(variables())

    def unaccounted(self, functions: Collection[Any], reached: Collection[int]) -> Iterator[CapturedName]:
        """Yield each that holds one of these functions and is not among those that the search has reached."""
        wanted = set(map(id, functions))
        direct = [each for each in self._that_hold(wanted) if id(each) not in reached and self._owner(each) != ""]
        owners = self._owners(direct)
        alone = None if gc.get_freeze_count() else ""  # gc.freeze() hides who torch's own belong to
        for holder in direct:
            kind, owner = raw.class_name(type(holder)), owners.get(id(holder), alone)
            named = self._owner(holder)
            where = named or f"a {'ContextVar' if kind.startswith('hamt') else kind}"
            if named or owner is not None:
                held = {id(each): each for each in gc.get_referents(holder)}
                for key in held.keys() & wanted:
                    name = raw.function_name(held[key])
                    yield CapturedName(
                        f"{where} of {owner}" if owner else where, name, "no search for names reaches there"
                    )

    def _that_hold(self, wanted: Collection[int]) -> list[Any]:
        found, wanted = [], set(wanted)
        for start in range(0, len(self._things) if wanted else 0, _BUNCH):
            bunch = self._things[start : start + _BUNCH]
            if not wanted.isdisjoint(map(id, gc.get_referents(*bunch))):
                found += [thing for thing in bunch if not wanted.isdisjoint(map(id, gc.get_referents(thing)))]
        return found

    def _owners(self, holders: list[Any]) -> dict[int, str | None]:
        """Return to whom holders belong, by their identities: a name, or None for torch's and hmpx's own."""
        owners: dict[int, str | None] = {}
        leads = {id(each): {id(each)} for each in holders if self._owner(each) is None}
        seen = defaultdict[int, set[int]](set)
        while leads:
            above = defaultdict[int, set[int]](set)
            for thing in self._that_hold(leads):
                owner = self._owner(thing)
                for held in {id(each) for each in gc.get_referents(thing)} & leads.keys():
                    if owner is None:
                        above[id(thing)] |= leads[held]
                    else:
                        name = _attribute(owner, thing, held) if owner else None
                        owners |= {key: owners.get(key) or name for key in leads[held]}
            for where, value in self._variables:
                owners |= dict.fromkeys(leads.get(id(value), ()), where)
            for key, to in leads.items():
                seen[key] |= to
            leads = {key: to - seen[key] for key, to in above.items() if to - seen[key]}
        return owners

    def _owner(self, thing: Any) -> str | None:
        """Return the name of a thing: "" if it is torch's or hmpx's; None for a container, which has none."""
        kind = type(thing)
        if kind is dict:
            name = self._spaces.get(id(thing))
            return name if name is None or not self._stays(name) else ""
        if issubclass(kind, type):
            return "" if self._stays(raw.module_of(thing)) else f"{raw.module_of(thing)}.{raw.class_name(thing)}"
        if kind is types.FunctionType:
            return "" if self._is_off(thing.__globals__) else f"{raw.text(thing.__module__)}.{raw.function_name(thing)}"
        if kind in _SUSPENDED or kind is types.FrameType:
            frame = getattr(thing, _SUSPENDED[kind]) if kind in _SUSPENDED else thing
            off = frame is None or self._is_off(frame.f_globals)
            return "" if off else f"{frame.f_code.co_name}, which is suspended"
        if kind is torch.fx.Node and "example_value" in thing.meta:  # of Dynamo, which has traced the casts too
            return ""
        if id(kind) not in self._kinds:
            self._kinds[id(kind)] = self._owner_of(kind)
        return self._kinds[id(kind)]

    def _owner_of(self, kind: type) -> str | None:
        """Return what the instances of a class are called; "" and None as `_owner`."""
        if not raw.flags(kind) & raw.HEAP_TYPE or raw.module_of(kind) in _IN_C:
            return None
        ours = issubclass(kind, (torch.nn.Module, torch.fx.Node)) or not self._stays(raw.module_of(kind))
        return f"a {raw.class_name(kind)}" if ours else ""


def _attribute(owner: str, thing: Any, held: int) -> str:
    """Return the name of the attribute of an owner that holds the object of that identity, if it has a name."""
    attributes = thing if type(thing) is dict else raw.attribute_dict(thing)
    return next((f"{owner}.{name}" for name, value in raw.items(attributes or {}) if id(value) == held), owner)
