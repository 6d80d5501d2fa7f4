"""Puts replacements into what holds a function, in the way that fits the holder, without running code of its class.

Dicts, lists, attributes, slots, cells and defaults are written to, and so is a `functools.partial`, which stays the
same object, so that all who hold it get the replacement. A tuple, a bound method, a staticmethod or a property cannot
be written to: whatever holds it gets a new one. What remains is reported.
"""

from __future__ import annotations

import functools
import gc
import operator
import types
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

from hmpx.ops.captured_names import access, raw
from hmpx.ops.captured_names.places import Capture, Places

DEEPEST = 4  # containers within containers
HOLDERS = (
    *(functools.partial, functools._lru_cache_wrapper),
    *(types.MethodType, staticmethod, classmethod, property, types.CellType),
)
_SEQUENCES: dict[type, tuple[Callable, Callable]] = {
    list: (list.__getitem__, list.__setitem__),
    deque: (deque.__getitem__, deque.__setitem__),
}
_BOUND: tuple[type, ...] = (types.MethodType, staticmethod, classmethod)
_PARTS: dict[type, list[Any]] = {  # of what can only be made anew
    property: [vars(property)[name] for name in ("fget", "fset", "fdel")],
    **{kind: [vars(kind)["__func__"]] for kind in _BOUND},
}


class Rewriting:
    """`by_id`: what to put where the function of that identity is held. `leads`: whether something leads to one.

    keys: whether keys of dicts and members of sets are exchanged as well, for good.
    """

    def __init__(self, by_id: dict[int, Any], places: Places, leads: Callable[[Any, int], bool], keys: bool) -> None:
        self.captures: list[Capture] = []
        self.done: dict[int, Any] = {}  # by identity: what takes its place, or itself where that was written to
        self._by_id, self._places, self._leads, self._keys = by_id, places, leads, keys
        self._kept: list[Any] = []  # so that no identity of these is given to something else

    def let_go(self) -> None:
        """Drop every reference to objects that were found."""
        self.done.clear()
        self._kept.clear()

    # The things whose attributes hold one

    def module(self, module: types.ModuleType) -> None:
        self._attributes(module, raw.globals_of, raw.module_name(module))

    def namespace(self, holder: Any) -> None:
        """The globals of code that is in no module."""
        name = raw.namespace_name(holder) or "code in no module"
        self._attributes(holder, access.globals_of, name)

    def of_class(self, cls: type) -> None:
        where = f"{raw.module_of(cls)}.{raw.class_name(cls)}"
        for name, value in raw.items(raw.namespace(cls)):
            if type(name) is str:
                read = functools.partial(access.read_class, name)
                write = functools.partial(access.write_class, name)
                self._replace(cls, read, write, value, f"{where}.{name}")

    def of_object(self, thing: Any) -> None:
        kind = type(thing)
        where = raw.class_name(kind)
        self._attributes(thing, raw.attribute_dict, where)
        for slot in raw.slots(kind):
            value = raw.slot_value(slot, thing, access.MISSING)
            if value is not access.MISSING:
                read = functools.partial(raw.slot_value, slot)
                self._replace(thing, read, slot.__set__, value, f"{where}.{slot.__name__}")

    def function(self, function: types.FunctionType) -> None:
        """Attributes, default arguments and closure."""
        code, where = function.__code__, f"{raw.text(function.__module__)}.{raw.function_name(function)}"
        self._attributes(function, operator.attrgetter("__dict__"), where)
        defaults = function.__defaults__ or ()
        first = code.co_argcount - len(defaults)
        new = tuple(
            [
                self.replaced(value, f"the default of {code.co_varnames[first + i]} in {where}", 0)
                for i, value in enumerate(defaults)
            ]
        )
        if any(map(operator.is_not, new, defaults)):
            self._places.put(where, function, operator.attrgetter("__defaults__"), access.set_defaults, defaults, new)
        if function.__kwdefaults__:
            for name, value in raw.items(function.__kwdefaults__):
                self._item(function.__kwdefaults__, name, value, f"the default of {name} in {where}", 0)
        for index, (name, cell) in enumerate(zip(code.co_freevars, function.__closure__ or (), strict=True)):
            value = access.content(cell)
            if value is not access.MISSING:
                read = functools.partial(access.read_closure, index)
                write = functools.partial(access.write_closure, index)
                self._replace(function, read, write, value, f"{name} in the closure of {where}")

    def _attributes(self, thing: Any, dict_of: Callable[[Any], dict | None], where: str) -> None:
        for name, value in raw.items(dict_of(thing) or {}):
            if type(name) is str:
                read = functools.partial(access.read_attribute, dict_of, name)
                write = functools.partial(access.write_attribute, dict_of, name)
                self._replace(thing, read, write, value, f"{where}.{name}")

    # What they hold

    def replaced(self, value: Any, where: str, depth: int) -> Any:
        """The replacement of a value; the value itself if nothing changes or it was changed in place."""
        if id(value) in self._by_id:
            self.captures.append(Capture(where, raw.function_name(value)))
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
            if self._keys:
                self._exchange_keys(value, kind, where, depth)
        elif base in _SEQUENCES:
            get, put = _SEQUENCES[base]
            for index, held in enumerate(list(base.__iter__(value))):
                read, write = (
                    functools.partial(access.read_index, get, index),
                    functools.partial(access.write_index, put, index),
                )
                self._replace(value, read, write, held, f"{where}[{index}]", depth + 1)
        elif base is tuple:
            return self._tuple(value, kind, where, depth)
        elif base is frozenset and self._keys and kind is frozenset:
            return frozenset([self._key(held, where, depth) for held in value])
        elif base is set and self._keys:
            self._exchange_members(value, where, depth)
        elif base is not None:
            for held in list(base.__iter__(value)):
                self._unchangeable(held, where, depth + 1, f"a {base.__name__} cannot be changed")
        elif issubclass(kind, functools.partial):
            self._partial(value, where, depth)
        elif kind is functools._lru_cache_wrapper:
            for held in gc.get_referents(value):
                if id(held) in self._by_id:
                    self._unchangeable(held, where, depth, "a functools.lru_cache cannot be changed")
        elif kind is types.CellType:
            content = access.content(value)
            if content is not access.MISSING:
                self._replace(value, access.content, access.fill, content, where, depth)
        else:
            return self._made_anew(value, kind, where, depth)
        return value

    def _item(self, mapping: dict, key: Any, held: Any, where: str, depth: int) -> None:
        if raw.hashes_in_c(key):
            read, write = functools.partial(access.read_item, key), functools.partial(access.write_item, key)
            self._replace(mapping, read, write, held, where, depth)
        else:
            self._unchangeable(held, where, depth, f"a {raw.class_name(type(key))} as a key runs code of its own")

    def _exchange_keys(self, table: dict, kind: type, where: str, depth: int) -> None:
        """Exchange keys of a dict and keep their order."""
        own: Any = OrderedDict if issubclass(kind, OrderedDict) else dict  # which has a list of its own
        keys = {key: self._key(key, where, depth) for key, _ in raw.items(table) if raw.hashes_in_c(key)}
        if any(new is not key and new not in keys for key, new in keys.items()):
            for key, new in keys.items():
                held = own.pop(table, key, access.MISSING)
                if held is not access.MISSING:
                    own.__setitem__(table, key if new in keys else new, held)

    def _exchange_members(self, members: set, where: str, depth: int) -> None:
        for held in list(set.__iter__(members)):
            new = self._key(held, where, depth)
            if new is not held:
                set.discard(members, held)
                set.add(members, new)

    def _key(self, key: Any, where: str, depth: int) -> Any:
        return self.replaced(key, f"a key of {where}", depth + 1) if raw.hashes_in_c(key) else key

    def _tuple(self, value: tuple, kind: type, where: str, depth: int) -> Any:
        before, count = list(tuple.__iter__(value)), len(self.captures)
        after = [self.replaced(held, f"{where}[{index}]", depth + 1) for index, held in enumerate(before)]
        if not any(map(operator.is_not, before, after)):
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
        self._replace(value, access.FUNC, access.set_func, access.FUNC(value), where, depth)
        before = access.ARGS(value)
        after = tuple([self.replaced(held, where, depth) for held in before])
        if any(map(operator.is_not, before, after)):
            self._places.put(where, value, access.ARGS, access.set_args, before, after)
        for name, held in raw.items(access.KEYWORDS(value)):
            self._item(access.KEYWORDS(value), name, held, where, depth)
        self._attributes(value, raw.attribute_dict, where)

    def _made_anew(self, value: Any, kind: type, where: str, depth: int) -> Any:
        count = len(self.captures)
        base = next(base for base in _PARTS if issubclass(kind, base))
        before = [part.__get__(value) for part in _PARTS[base]]
        after = [self.replaced(held, where, depth) for held in before]
        if not any(map(operator.is_not, before, after)):
            return value
        if kind is not base:  # to make one is to run code of its class
            self._failed(count, f"a {raw.class_name(kind)} cannot be changed")
            return value
        if kind is property:
            fget, fset, fdel = after
            return property(fget, fset, fdel, value.__doc__)
        if kind is types.MethodType:
            (new,) = after
            binds = type(new) is types.MethodDescriptorType
            return new.__get__(value.__self__) if binds else types.MethodType(new, value.__self__)
        return kind(*after)

    def _replace(self, holder: Any, read: Callable, write: Callable, value: Any, where: str, depth: int = 0) -> None:
        """Write the replacement of a value to its place; note it if that fails."""
        count = len(self.captures)
        try:
            new = self.replaced(value, where, depth)
            if new is not value:
                self._places.put(where, holder, read, write, value, new)
        except Exception as error:
            self._failed(count, f"it could not be written: {error}")

    def _unchangeable(self, held: Any, where: str, depth: int, reason: str) -> None:
        count = len(self.captures)
        if self.replaced(held, where, depth) is not held:
            self._failed(count, reason)

    def _failed(self, count: int, reason: str) -> None:
        """Mark the captures from `count` on as places that could not be changed."""
        self.captures[count:] = [Capture(c.where, c.function, c.reason or reason) for c in self.captures[count:]]

    def escaped(self, value: Any, where: str, reason: str) -> None:
        if id(value) in self._by_id:
            self.captures.append(Capture(where, raw.function_name(value), reason))
