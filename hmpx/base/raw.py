"""Reads and writes objects through Python's own storage, so that no code of their classes runs.

A class can put code of its own behind every way to look at an object: `values()` of a dict, `__len__`, `__eq__`, a
property called `__dict__`, the `__setattr__` of a metaclass. Here a dict is read by `dict.items`, a class by the
descriptors of `type`, an object through the slot in which the interpreter keeps its `__dict__`. Variables of a function
that runs are read so that it does not keep them. Garbage collections can be put off: they run finalizers.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import gc
import inspect
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any, NamedTuple

HEAP_TYPE = 1 << 9  # the flag of a type made by a class statement


class _Missing:
    def __repr__(self) -> str:
        return "<missing>"


MISSING: Any = _Missing()  # what a place, a target or a namespace holds that holds nothing
GENERATED = "__hmpx_generated__"  # a key of the globals of code that hmpx writes; Dynamo would import a `__name__`
Container = type[dict] | type[list] | type[tuple] | type[set] | type[frozenset] | type[deque]
_CONTAINERS: tuple[Container, ...] = (dict, list, tuple, set, frozenset, deque)
_DESCRIPTORS = (types.GetSetDescriptorType, types.MemberDescriptorType)
FUNCTIONS = (
    *(types.FunctionType, types.BuiltinFunctionType),
    *(types.MethodDescriptorType, types.WrapperDescriptorType),
)
_PLAIN_KEYS = (str, int, float, bool, bytes, type(None))

mro: Callable[[type], tuple[type, ...]] = type.__dict__["__mro__"].__get__
namespace: Callable[[type], Mapping[str, Any]] = type.__dict__["__dict__"].__get__
flags: Callable[[type], int] = type.__dict__["__flags__"].__get__
_qualname: Callable[[type], str] = type.__dict__["__qualname__"].__get__
module_globals: Callable[[types.ModuleType], dict] = vars(types.ModuleType)["__dict__"].__get__
function_globals: Callable[[types.FunctionType], dict] = vars(types.FunctionType)["__globals__"].__get__
func_of, args_of, keywords_of = (vars(functools.partial)[name].__get__ for name in ("func", "args", "keywords"))


def items(mapping: Any) -> list[tuple[Any, Any]]:
    """Return the items of a dict, a dict subclass or a class namespace.

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
    """Return the builtin container that a class derives from; None if it derives from none."""
    return next((base for base in _CONTAINERS if issubclass(kind, base)), None)


def attribute_dict(thing: Any) -> dict[str, Any] | None:
    """Return the `__dict__` of an object, a module or a function; None if it has none."""
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


def globals_of(holder: Any) -> dict:
    """Return the globals of a function; of a dict, the dict itself."""
    return holder if issubclass(type(holder), dict) else function_globals(holder)


def slots(kind: type) -> list[Any]:
    """Return the slots that Python classes declare; hmpx does not write to slots of C types."""
    return [
        slot
        for cls in mro(kind)
        if flags(cls) & HEAP_TYPE and "__slots__" in namespace(cls)
        for _, slot in items(namespace(cls))
        if type(slot) is types.MemberDescriptorType
    ]


def hashes_in_c(key: Any) -> bool:
    """Return whether a dict looks a key up without running Python code of its class."""
    if type(key) is tuple:
        return all(map(hashes_in_c, key))
    return all(_is_in_c(type(key), name) for name in ("__hash__", "__eq__"))


def _is_in_c(kind: type, name: str) -> bool:
    for cls in mro(kind):
        found = namespace(cls).get(name, MISSING)
        if found is not MISSING:
            return type(found) is types.WrapperDescriptorType or cls is enum.Enum
    return True


def with_subclasses(cls: type) -> list[type]:
    """Return a class and every class that derives from it, each once, a class before those that derive from it."""
    found = [cls]
    for each in found:
        derived: list[type] = type.__subclasses__(each)
        found += [sub for sub in derived if sub not in found]
    return found


# Names for reports


def text(name: Any) -> str:
    """Return a name as text, unless its class formats itself by code of its own."""
    return name if type(name) is str else "?"


def module_of(cls: type) -> str:
    """Return the module that a class names as its own."""
    return text(namespace(cls).get("__module__")) if flags(cls) & HEAP_TYPE else "builtins"


def module_name(module: types.ModuleType) -> str:
    return text(dict.get(module_globals(module), "__name__"))


def namespace_name(holder: Any) -> str:
    """Return the module that a function or its globals name; empty if they name none."""
    if not issubclass(type(holder), types.FunctionType):
        return text(dict.get(holder, "__name__", ""))
    name = dict.get(holder.__globals__, "__name__", holder.__module__)  # the methods of a dataclass know no other
    return "" if name is None else text(name)


def maker(thing: Any) -> str:
    """Return the module of a function's code; of anything else, that of its class."""
    is_function = issubclass(type(thing), types.FunctionType)
    return namespace_name(thing) if is_function else module_of(type(thing))


def class_name(cls: type) -> str:
    return text(_qualname(cls))


def function_name(function: Any) -> str:
    """Return the name of a Python or C function; for anything else, its type."""
    kind = type(function)
    return text(function.__qualname__) if any(kind is each for each in FUNCTIONS) else class_name(kind)


def described(key: Any) -> str:
    """Return a key as it reads in code, without the `__repr__` of its class."""
    kind = type(key)
    if any(kind is plain for plain in _PLAIN_KEYS):
        return repr(key)
    if kind is tuple:
        return f"({', '.join(map(described, key))})"
    return class_name(key) if issubclass(kind, type) else f"<{function_name(key)}>"


# Places


class Access(NamedTuple):
    """How one place in a holder is read and written: ``read(holder, key)`` and ``write(holder, key, value)``.

    Both get the holder as an argument, so that they keep none alive. A read gives `MISSING`, or None, for a value that
    is not there any more.
    """

    read: Callable[[Any, Any], Any]
    write: Callable[[Any, Any, Any], None]


def _attribute(dict_of: Callable[[Any], Any]) -> Access:
    return Access(
        lambda thing, name: dict.get(dict_of(thing) or {}, name),
        lambda thing, name, value: dict.__setitem__(dict_of(thing), name, value),
    )


def _set_on_class(cls: type, name: str, value: Any) -> None:
    """Set an attribute of a class past the `__setattr__` and the properties of its metaclass."""
    for meta in mro(type(cls)):
        descriptor = namespace(meta).get(name, MISSING)
        if descriptor is not MISSING and any("__set__" in namespace(base) for base in mro(type(descriptor))):
            raise TypeError("its metaclass has a descriptor of that name")
    type.__setattr__(cls, name, value)


def _read_index(sequence: list, index: int) -> Any:
    try:
        return list.__getitem__(sequence, index)
    except IndexError:
        return MISSING


def read_slot(thing: Any, slot: Any) -> Any:
    try:
        return slot.__get__(thing)
    except AttributeError:  # not filled
        return MISSING


def _cell(function: Any, index: int) -> types.CellType:
    return (function.__closure__ or ())[index]


def read_cell(function: Any, index: int) -> Any:
    try:
        return _cell(function, index).cell_contents
    except ValueError:  # not filled yet
        return MISSING


def _set_partial(partial: functools.partial, func: Callable, args: tuple) -> None:
    state = func, args, keywords_of(partial), attribute_dict(partial)
    functools.partial.__setstate__(partial, state)  # type: ignore[attr-defined]  # not in typeshed


ATTRIBUTE = _attribute(attribute_dict)  # of a module, an object, a function
GLOBAL = _attribute(globals_of)  # of a function that is in no module
CLASS_ATTRIBUTE = Access(lambda cls, name: namespace(cls).get(name), _set_on_class)
ITEM = Access(dict.get, dict.__setitem__)
INDEX = Access(_read_index, list.__setitem__)
CELL = Access(read_cell, lambda function, index, value: setattr(_cell(function, index), "cell_contents", value))
DEFAULTS = Access(lambda f, _: f.__defaults__, lambda f, _, value: setattr(f, "__defaults__", value))
FUNC = Access(lambda partial, _: func_of(partial), lambda p, _, func: _set_partial(p, func, args_of(p)))
ARGS = Access(lambda partial, _: args_of(partial), lambda p, _, args: _set_partial(p, func_of(p), args))


# Running functions, and collections of garbage

_HOLDERS = 3  # of the dict of a frame's variables: the frame, a name for it here, an argument of getrefcount


def variables(frame: FrameType) -> dict[str, Any]:
    """Return the variables of a function that runs in this thread, by name.

    Before Python 3.13, whoever asks a frame for its variables leaves a dict of them at the frame. What the function
    drops later would then live until it returns: a batch, or a model on a GPU. That dict is emptied, if nobody else has
    it (`locals()` returns the same one) and no debugger, which writes it back, is on.
    """
    kept: Any = frame.f_locals
    found = dict(kept)
    ours = type(kept) is dict and frame.f_code.co_flags & inspect.CO_OPTIMIZED  # else a module's or class's own dict
    if ours and sys.gettrace() is None and sys.getrefcount(kept) <= _HOLDERS:
        kept.clear()
    return found


@contextlib.contextmanager
def none_collected() -> Iterator[None]:
    """Suspend automatic garbage collection.

    A collection looks through everything that is alive, and takes longer than what hmpx does here; and it runs
    finalizers, which are code of others.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
