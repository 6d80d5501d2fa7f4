"""Reads and writes objects through Python's own storage, so that no code of their classes runs.

A class can put code of its own behind every way to look at an object: `values()` of a dict, `__len__`, `__eq__`, a
property called `__dict__`, the `__setattr__` of a metaclass. Here a dict is read by `dict.items`, a class by the
descriptors of `type`, an object through the slot in which the interpreter keeps its `__dict__`.
"""

from __future__ import annotations

import enum
import types
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

HEAP_TYPE = 1 << 9  # of a type made by a class statement
_DESCRIPTORS = (types.GetSetDescriptorType, types.MemberDescriptorType)
_MISSING = object()
GENERATED = "__hmpx_generated__"  # a key of the globals of code that hmpx writes; Dynamo would import a `__name__`
Container = type[dict] | type[list] | type[tuple] | type[set] | type[frozenset] | type[deque]
_CONTAINERS: tuple[Container, ...] = (dict, list, tuple, set, frozenset, deque)
_FUNCTIONS = (
    *(types.FunctionType, types.BuiltinFunctionType),
    *(types.MethodDescriptorType, types.WrapperDescriptorType),
)
_PLAIN_KEYS = (str, int, float, bool, bytes, type(None))

mro: Callable[[type], tuple[type, ...]] = type.__dict__["__mro__"].__get__
namespace: Callable[[type], Mapping[str, Any]] = type.__dict__["__dict__"].__get__
flags: Callable[[type], int] = type.__dict__["__flags__"].__get__
_qualname: Callable[[type], str] = type.__dict__["__qualname__"].__get__
globals_of: Callable[[types.ModuleType], dict] = vars(types.ModuleType)["__dict__"].__get__


def items(mapping: Any) -> list[tuple[Any, Any]]:
    """The items of a dict, a dict subclass or a class namespace.

    Raises:
        RuntimeError: it changed its size each time that it was read.
    """
    view = dict.items(mapping) if issubclass(type(mapping), dict) else types.MappingProxyType.items(mapping)
    for _ in range(100):
        try:
            return list(view)
        except RuntimeError:  # another thread, or a weak reference that died, changed it
            continue
    raise RuntimeError("it changes its size while it is read")


def container_type(kind: type) -> Container | None:
    """The builtin container that a class derives from; None if it derives from none."""
    return next((base for base in _CONTAINERS if issubclass(kind, base)), None)


def module_of(cls: type) -> str:
    """The module that a class names as its own."""
    return text(namespace(cls).get("__module__")) if flags(cls) & HEAP_TYPE else "builtins"


def module_name(module: types.ModuleType) -> str:
    return text(dict.get(globals_of(module), "__name__"))


def namespace_name(holder: Any) -> str:
    """The module that a function or its globals name; empty if they name none."""
    if not issubclass(type(holder), types.FunctionType):
        return text(dict.get(holder, "__name__", ""))
    name = dict.get(holder.__globals__, "__name__", holder.__module__)  # the methods of a dataclass know no other
    return "" if name is None else text(name)


def class_name(cls: type) -> str:
    return text(_qualname(cls))


def text(name: Any) -> str:
    """A name as text, unless its class formats itself by code of its own."""
    return name if type(name) is str else "?"


def attribute_dict(thing: Any) -> dict[str, Any] | None:
    """The `__dict__` of an object; None if it has none."""
    kind = type(thing)
    for cls in mro(kind):
        descriptor: Any = namespace(cls).get("__dict__")
        if any(type(descriptor) is kind_of for kind_of in _DESCRIPTORS):
            try:
                found = descriptor.__get__(thing, kind)
            except (AttributeError, TypeError):
                return None
            return found if issubclass(type(found), dict) else None
    return None


def slots(kind: type) -> list[Any]:
    """The slots that Python classes declare; slots of C types are not ours to write."""
    return [
        slot
        for cls in mro(kind)
        if flags(cls) & HEAP_TYPE and "__slots__" in namespace(cls)
        for _, slot in items(namespace(cls))
        if type(slot) is types.MemberDescriptorType
    ]


def slot_value(slot: Any, thing: Any, default: Any = None) -> Any:
    try:
        return slot.__get__(thing)
    except AttributeError:  # not filled
        return default


def set_on_class(cls: type, name: str, value: Any) -> None:
    """Set an attribute of a class past the `__setattr__` and the properties of its metaclass.

    Raises:
        TypeError: the metaclass is one that cannot be passed by.
    """
    for meta in mro(type(cls)):
        descriptor = namespace(meta).get(name, _MISSING)
        if descriptor is not _MISSING and any("__set__" in namespace(base) for base in mro(type(descriptor))):
            raise TypeError("its metaclass has a descriptor of that name")
    type.__setattr__(cls, name, value)


def hashes_in_c(key: Any) -> bool:
    """Whether looking a key up in a dict runs no Python code of its class."""
    if type(key) is tuple:
        return all(map(hashes_in_c, key))
    return all(_is_in_c(type(key), name) for name in ("__hash__", "__eq__"))


def _is_in_c(kind: type, name: str) -> bool:
    for cls in mro(kind):
        found = namespace(cls).get(name, _MISSING)
        if found is not _MISSING:
            return type(found) is types.WrapperDescriptorType or cls is enum.Enum
    return True


def described(key: Any) -> str:
    """A key as it reads in code, without the `__repr__` of its class."""
    kind = type(key)
    if any(kind is plain for plain in _PLAIN_KEYS):
        return repr(key)
    if kind is tuple:
        return f"({', '.join(map(described, key))})"
    return class_name(key) if issubclass(kind, type) else f"<{function_name(key)}>"


def function_name(function: Any) -> str:
    """The name of a Python or C function; for anything else, its type."""
    kind = type(function)
    return text(function.__qualname__) if any(kind is each for each in _FUNCTIONS) else class_name(kind)
