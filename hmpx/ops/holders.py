"""Who holds a function of torch: puts replacements there, in the way that fits the holder, and names who else has one.

Dicts, lists, attributes, closures and defaults are written to, and so is a `functools.partial`, which stays the same
object, so that all who hold it get the replacement. A tuple, a bound method or a staticmethod cannot be written to:
whatever holds it gets a new one. The rest (slots, sets, properties, caches) is reported. No code of their classes runs.
"""

from __future__ import annotations

import functools
import gc
import operator
import types
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from hmpx.base import raw
from hmpx.base.raw import MISSING, Access

DEEPEST = 4  # containers within containers
_BOUND: tuple[type, ...] = (types.MethodType, staticmethod, classmethod)
HOLDERS = (functools.partial, functools._lru_cache_wrapper, property, types.CellType, *_BOUND)


@dataclass(frozen=True)
class CapturedName:
    """A place that holds a function of torch under a name of its own. `reason`: why it still does."""

    where: str
    function: str
    reason: str = ""

    @property
    def rebound(self) -> bool:
        return not self.reason

    def __str__(self) -> str:
        return f"{self.where} holds {self.function}" + (f": {self.reason}" if self.reason else "")


class PlaceWriter(Protocol):
    """Writes `new` to a place that holds `old`."""

    def __call__(self, where: str, holder: Any, access: Access, key: Any, old: Any, new: Any) -> None: ...


class Rewriting:
    """Replaces functions in holders.

    by_id: the replacement of the function of that identity. leads: whether an object leads to one within a
    depth. keys: whether keys of dicts and members of sets are exchanged as well, for good.
    """

    def __init__(self, by_id: dict[int, Any], put: PlaceWriter, leads: Callable[[Any, int], bool], keys: bool) -> None:
        self.captures: list[CapturedName] = []
        self.done: dict[int, Any] = {}  # by identity: its replacement, or itself if it was written to
        self._by_id, self._put, self._leads, self._keys = by_id, put, leads, keys
        self._kept: list[Any] = []  # so that no identity of these is given to something else

    def let_go(self) -> None:
        """Drop every reference to objects that were found."""
        self.done.clear()
        self._kept.clear()

    # Objects whose attributes hold one

    def module(self, module: types.ModuleType) -> None:
        self._attributes(module, raw.attribute_dict(module), raw.ATTRIBUTE, raw.module_name(module))

    def namespace(self, holder: Any) -> None:
        """Look through the globals of code that is in no module."""
        name = raw.namespace_name(holder) or "code in no module"
        self._attributes(holder, raw.globals_of(holder), raw.GLOBAL, name)

    def of_class(self, cls: type) -> None:
        where = f"{raw.module_of(cls)}.{raw.class_name(cls)}"
        self._attributes(cls, raw.namespace(cls), raw.CLASS_ATTRIBUTE, where)

    def of_object(self, thing: Any) -> None:
        where = raw.class_name(type(thing))
        self._attributes(thing, raw.attribute_dict(thing), raw.ATTRIBUTE, where)
        for slot in raw.slots(type(thing)):
            self._unchangeable(raw.read_slot(thing, slot), f"{where}.{slot.__name__}", 0, "a slot is not changed")

    def function(self, function: types.FunctionType) -> None:
        """Look through attributes, default arguments and closure."""
        code, where = function.__code__, f"{raw.text(function.__module__)}.{raw.function_name(function)}"
        self._attributes(function, function.__dict__, raw.ATTRIBUTE, where)
        defaults = function.__defaults__ or ()
        names = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
        new = self._all(defaults, [f"the default of {name} in {where}" for name in names], 0)
        if new is not defaults:
            self._put(where, function, raw.DEFAULTS, None, defaults, new)
        keyword_only = function.__kwdefaults__ or {}
        for name, value in raw.items(keyword_only):
            self._item(keyword_only, name, value, f"the default of {name} in {where}", 0)
        for index, name in enumerate(code.co_freevars):
            held = raw.read_cell(function, index)
            self._replace(function, raw.CELL, index, held, f"{name} in the closure of {where}")

    def _attributes(self, thing: Any, attributes: Any, access: Access, where: str) -> None:
        for name, value in raw.items(attributes or {}):
            if type(name) is str:
                self._replace(thing, access, name, value, f"{where}.{name}")

    # Values that they hold

    def replaced(self, value: Any, where: str, depth: int) -> Any:
        """Return the replacement of a value; the value itself if nothing changes or it was changed in place."""
        if id(value) in self._by_id:
            self.captures.append(CapturedName(where, raw.function_name(value)))
            return self._by_id[id(value)]
        if id(value) in self.done:
            return self.done[id(value)]
        kind = type(value)
        base = raw.container_type(kind)
        if (base is None and not issubclass(kind, HOLDERS)) or depth >= DEEPEST:
            return value
        if not self._leads(value, DEEPEST - depth):
            return value
        self._kept.append(value)
        self.done[id(value)] = value
        self.done[id(value)] = new = self._inside(value, kind, base, where, depth)
        return new

    def _inside(self, value: Any, kind: type, base: raw.Container | None, where: str, depth: int) -> Any:
        if base is dict:
            for key, held in raw.items(value):
                self._item(value, key, held, f"{where}[{raw.described(key)}]", depth + 1)
                if not self._keys:
                    self._unchangeable(key, f"a key of {where}", depth + 1, "a key of a table is not changed")
            if self._keys:
                self._exchange_keys(value, kind, where, depth)
        elif base is list:
            for index, held in enumerate(list(list.__iter__(value))):
                self._replace(value, raw.INDEX, index, held, f"{where}[{index}]", depth + 1)
        elif base is tuple:
            return self._tuple(value, kind, where, depth)
        elif base is frozenset and self._keys and kind is frozenset:
            return frozenset([self._key(held, where, depth) for held in value])
        elif base is set and self._keys:
            for held in list(set.__iter__(value)):
                new = self._key(held, where, depth)
                if new is not held:
                    set.discard(value, held)
                    set.add(value, new)
        elif base is not None:
            for held in list(base.__iter__(value)):
                self._unchangeable(held, where, depth + 1, f"a {base.__name__} is not changed")
        elif issubclass(kind, functools.partial):
            self._partial(value, where, depth)
        elif issubclass(kind, _BOUND):
            return self._made_anew(value, kind, where, depth)
        else:  # a cache, a property, a cell
            for held in gc.get_referents(value):
                self.escaped(held, where, f"a {raw.class_name(kind)} is not changed")
        return value

    def _all(self, values: tuple, where: list[str], depth: int) -> tuple:
        """Return a tuple of the replacements; the same tuple if nothing changes."""
        new = tuple([self.replaced(value, each, depth) for value, each in zip(values, where, strict=True)])
        return new if any(map(operator.is_not, new, values)) else values

    def _item(self, mapping: dict, key: Any, held: Any, where: str, depth: int) -> None:
        if raw.hashes_in_c(key):
            self._replace(mapping, raw.ITEM, key, held, where, depth)
        else:
            self._unchangeable(held, where, depth, f"a {raw.class_name(type(key))} as a key runs code of its own")

    def _exchange_keys(self, table: dict, kind: type, where: str, depth: int) -> None:
        """Exchange keys of a dict and keep their order."""
        own: Any = OrderedDict if issubclass(kind, OrderedDict) else dict  # which has a list of its own
        keys = {key: self._key(key, where, depth) for key, _ in raw.items(table) if raw.hashes_in_c(key)}
        if any(new is not key and new not in keys for key, new in keys.items()):
            for key, new in keys.items():
                held = own.pop(table, key, MISSING)
                if held is not MISSING:
                    own.__setitem__(table, key if new in keys else new, held)

    def _key(self, key: Any, where: str, depth: int) -> Any:
        return self.replaced(key, f"a key of {where}", depth + 1) if raw.hashes_in_c(key) else key

    def _tuple(self, value: tuple, kind: type, where: str, depth: int) -> Any:
        before, count = tuple(tuple.__iter__(value)), len(self.captures)
        after = self._all(before, [f"{where}[{index}]" for index in range(len(before))], depth + 1)
        if after is before:
            return value
        try:
            new: tuple[Any, ...] = tuple.__new__(kind, after)
        except TypeError:  # one that C code makes
            self._failed(count, f"a {raw.class_name(kind)} cannot be changed")
            return value
        attributes, own = raw.attribute_dict(value), raw.attribute_dict(new)
        if attributes and own is not None:
            own.update(raw.items(attributes))
        return new

    def _partial(self, value: functools.partial, where: str, depth: int) -> None:
        self._replace(value, raw.FUNC, None, raw.func_of(value), where, depth)
        before = raw.args_of(value)
        after = self._all(before, [where] * len(before), depth)
        if after is not before:
            self._put(where, value, raw.ARGS, None, before, after)
        for name, held in raw.items(raw.keywords_of(value)):
            self._item(raw.keywords_of(value), name, held, where, depth)
        self._attributes(value, raw.attribute_dict(value), raw.ATTRIBUTE, where)

    def _made_anew(self, value: Any, kind: type, where: str, depth: int) -> Any:
        count = len(self.captures)
        base = next(base for base in _BOUND if issubclass(kind, base))
        before = vars(base)["__func__"].__get__(value)
        new = self.replaced(before, where, depth)
        if new is before:
            return value
        if kind is not base:  # to make one is to run code of its class
            self._failed(count, f"a {raw.class_name(kind)} cannot be changed")
            return value
        if kind is types.MethodType:
            binds = type(new) is types.MethodDescriptorType
            return new.__get__(value.__self__) if binds else types.MethodType(new, value.__self__)
        return kind(new)

    def _replace(self, holder: Any, access: Access, key: Any, value: Any, where: str, depth: int = 0) -> None:
        """Write the replacement of a value to its place; note it if that fails."""
        count = len(self.captures)
        try:
            new = self.replaced(value, where, depth)
            if new is not value:
                self._put(where, holder, access, key, value, new)
        except Exception as error:
            self._failed(count, f"it could not be written: {error}")

    def _unchangeable(self, held: Any, where: str, depth: int, reason: str) -> None:
        count = len(self.captures)
        if self.replaced(held, where, depth) is not held:
            self._failed(count, reason)

    def _failed(self, count: int, reason: str) -> None:
        """Mark the captures from `count` on as places that could not be changed."""
        self.captures[count:] = [CapturedName(c.where, c.function, c.reason or reason) for c in self.captures[count:]]

    def escaped(self, value: Any, where: str, reason: str) -> None:
        if id(value) in self._by_id:
            self.captures.append(CapturedName(where, raw.function_name(value), reason))


# Whoever else holds one: a generator, a map, a context variable, a table too deep or too long to be searched.
# Everything that is alive is asked what it refers to, whatever it is, and what torch, hmpx and the search account for
# is taken off. The rest is named by going up from holder to holder

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
