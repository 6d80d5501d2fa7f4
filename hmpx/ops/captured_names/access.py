"""Readers and writers of one place in a holder. They get the holder as an argument, so that they keep none alive.

Readers give `MISSING`, or None, for what is not there any more.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

from hmpx.ops.captured_names import raw

MISSING = object()
_GLOBALS = vars(types.FunctionType)["__globals__"].__get__
FUNC, ARGS, KEYWORDS = (vars(functools.partial)[name].__get__ for name in ("func", "args", "keywords"))


def globals_of(holder: Any) -> dict:
    """The namespace of a function, or a namespace itself."""
    return holder if issubclass(type(holder), dict) else _GLOBALS(holder)


def read_class(name: str, cls: type) -> Any:
    return raw.namespace(cls).get(name)


def write_class(name: str, cls: type, value: Any) -> None:
    raw.set_on_class(cls, name, value)


def read_attribute(dict_of: Callable, name: str, thing: Any) -> Any:
    return dict.get(dict_of(thing) or {}, name)


def write_attribute(dict_of: Callable, name: str, thing: Any, value: Any) -> None:
    dict.__setitem__(dict_of(thing), name, value)


def read_item(key: Any, mapping: dict) -> Any:
    return dict.get(mapping, key)


def write_item(key: Any, mapping: dict, value: Any) -> None:
    dict.__setitem__(mapping, key, value)


def read_index(get: Callable, index: int, sequence: Any) -> Any:
    try:
        return get(sequence, index)
    except IndexError:
        return MISSING


def write_index(put: Callable, index: int, sequence: Any, value: Any) -> None:
    put(sequence, index, value)


def read_closure(index: int, function: types.FunctionType) -> Any:
    return content((function.__closure__ or ())[index])


def write_closure(index: int, function: types.FunctionType, value: Any) -> None:
    (function.__closure__ or ())[index].cell_contents = value


def content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return MISSING


def fill(cell: types.CellType, value: Any) -> None:
    cell.cell_contents = value


def set_defaults(function: types.FunctionType, defaults: tuple) -> None:
    function.__defaults__ = defaults


def set_func(partial: functools.partial, func: Callable) -> None:
    set_state(partial, func, ARGS(partial))


def set_args(partial: functools.partial, args: tuple) -> None:
    set_state(partial, FUNC(partial), args)


def set_state(partial: functools.partial, func: Callable, args: tuple) -> None:
    attributes = raw.attribute_dict(partial)
    state = func, args, KEYWORDS(partial), attributes
    functools.partial.__setstate__(partial, state)  # type: ignore[attr-defined]  # not in typeshed
