"""Reads bytecode: which functions does a class compare the one that its ``__torch_function__`` gets with?

The code is read, as bytecode, and not run: no import, no property.
"""

from __future__ import annotations

import dis
import functools
import importlib.util
import inspect
import sys
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

_TABLES = (dict, types.MappingProxyType, set, frozenset, list, tuple)


def functions_of(cls: type) -> Iterator[Any]:
    """Yield functions that ``__torch_function__``, and the code it calls in its package, compares or keeps in tables.

    There may be anything else among it.
    """
    for look_up, found in _looked_up(cls):
        if isinstance(found, _TABLES):
            yield from _members(found)
        elif look_up.is_compared:
            yield found


def _members(table: Any) -> Iterator[Any]:
    """Yield the functions in a table, or in tables by class."""
    yield from table
    if isinstance(table, (dict, types.MappingProxyType)):
        for each in table.values():
            yield from each if isinstance(each, _TABLES) else ()


def _looked_up(cls: type) -> Iterator[tuple[_LookUp, Any]]:
    for base in cls.__mro__:
        method = _function(vars(base).get("__torch_function__"))
        if method is None or base is torch.Tensor:
            continue
        package = str(method.__module__).partition(".")[0]
        for look_up in _look_ups(method.__code__):
            found = look_up.found(method, cls)
            yield look_up, found
            called = None if look_up.is_compared else _function(found)
            if called is not None and str(called.__module__).partition(".")[0] == package:
                yield from ((each, each.found(called, cls)) for each in _look_ups(called.__code__))


def _function(found: Any) -> types.FunctionType | None:
    """Return a function, also one read from a class."""
    if isinstance(found, (classmethod, staticmethod)):
        found = found.__func__
    found = inspect.unwrap(found) if isinstance(found, types.FunctionType) else found
    return found if isinstance(found, types.FunctionType) else None


class _LookUp(NamedTuple):
    """One look-up in the code of a function: a variable, and attributes from there on.

    where: "global", "closure", "first" for the first parameter of a class method, or "import" for a module.
    level: of a relative import.
    """

    where: str
    variable: str
    attributes: tuple[str, ...] = ()
    level: int = 0
    is_compared: bool = False

    def found(self, function: Any, cls: type) -> Any:
        """Return the object that the look-up finds now; None if there is none."""
        try:
            return functools.reduce(inspect.getattr_static, self.attributes, self._start(function, cls))
        except (ImportError, LookupError, ValueError, AttributeError, TypeError):
            return None

    def _start(self, function: Any, cls: type) -> Any:
        if self.where == "global":
            return function.__globals__[self.variable]
        if self.where == "closure":
            return function.__closure__[function.__code__.co_freevars.index(self.variable)].cell_contents
        if self.where == "first":
            return cls
        name = "." * self.level + self.variable
        return sys.modules[importlib.util.resolve_name(name, function.__globals__.get("__package__"))]


@functools.cache
def _look_ups(code: types.CodeType) -> list[_LookUp]:
    """Return the look-ups in code, and which of them are compared by ``is``, ``==`` or ``in``."""
    found: list[_LookUp] = []
    stack: list[_LookUp | None] = []  # the look-ups of an expression so far; None: a local variable
    imported, level = "", 0
    for each in dis.get_instructions(code):
        name, value = each.opname, each.argval
        if name in ("LOAD_ATTR", "LOAD_METHOD"):
            last = stack.pop() if stack else None
            is_of_table = value in ("get", "keys", "items", "__contains__", "__getitem__")
            stack.append(last if last is None or is_of_table else last._replace(attributes=(*last.attributes, value)))
        elif name == "LOAD_GLOBAL":
            stack.append(_LookUp("global", value))
        elif name == "LOAD_DEREF" and value in code.co_freevars:
            stack.append(_LookUp("closure", value))
        elif name == "LOAD_DEREF" or name.startswith("LOAD_FAST"):  # the first, where an inner function has it too
            loaded = value if isinstance(value, tuple) else (value,)
            stack += [_LookUp("first", v) if v == code.co_varnames[0] else None for v in loaded]
        elif name == "IMPORT_NAME":
            imported = value
        elif name == "IMPORT_FROM":
            found.append(_LookUp("import", imported, (value,), level))
        elif name in ("LOAD_CONST", "LOAD_SMALL_INT"):
            level = value if type(value) is int else level  # of an import, whose names are another constant
        elif not name.startswith(("BUILD_", "CACHE", "PUSH_NULL")):
            is_compared = name in ("IS_OP", "COMPARE_OP", "CONTAINS_OP")
            found += [each._replace(is_compared=is_compared) for each in stack if each is not None]
            stack.clear()
    return found
