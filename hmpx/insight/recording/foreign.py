"""A record from elsewhere, checked: each value is of the type that its attribute has, and no string holds a command.

A terminal obeys control characters in what it is given to show. They are left out of every string.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import MISSING, fields
from typing import Any, TypeVar

from hmpx.errors import HmpxError

T = TypeVar("T")
Check = Callable[[Any, str], Any]  # a value and its place in the file; returns the value, or raises


def text(value: Any, place: str) -> str:
    if not isinstance(value, str):
        raise _wrong(value, place, "a string")
    return "".join(each for each in value if each.isprintable())


def lines(value: Any, place: str) -> str:
    """Text of several lines."""
    if not isinstance(value, str):
        raise _wrong(value, place, "a string")
    return "\n".join(text(line, place) for line in value.split("\n"))


def count(value: Any, place: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise _wrong(value, place, "a whole number from 0 on")
    return value


def amount(value: Any, place: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise _wrong(value, place, "a finite number from 0 on")
    return value


def flag(value: Any, place: str) -> bool:
    if not isinstance(value, bool):
        raise _wrong(value, place, "true or false")
    return value


def optional(check: Check) -> Check:
    """What `check` says, or null."""
    return lambda value, place: None if value is None else check(value, place)


def each(check: Check, length: int | None = None) -> Check:
    """A list of what `check` says."""

    def checked(value: Any, place: str) -> list:
        if not isinstance(value, list) or len(value) != (length or len(value)):
            raise _wrong(value, place, f"a list of {length}" if length else "a list")
        return [check(item, f"{place}[{i}]") for i, item in enumerate(value)]

    return checked


def mapping(value: Any, place: str) -> dict[str, Any]:
    """An object of JSON."""
    if not isinstance(value, dict):
        raise _wrong(value, place, "an object")
    return value


def by_name(check: Check) -> Check:
    """An object whose values are what `check` says."""
    return lambda value, place: {
        text(key, place): check(each, f"{place}.{key}") for key, each in mapping(value, place).items()
    }


texts = by_name(text)


def named(checks: dict[str, Check], value: Any, place: str, optional: Collection[str] = ()) -> dict[str, Any]:
    """The values of an object by their names, each checked. Others are left out; those in `optional` may be missing."""
    found = mapping(value, place)
    for name in checks:
        if name not in found and name not in optional:
            raise HmpxError(f"{place}: a record that is not whole: KeyError: {name!r}")
    return {name: check(found[name], f"{place}.{name}") for name, check in checks.items() if name in found}


_BY_TYPE: dict[str, Check] = {
    "str": text,
    "int": count,
    "float": amount,
    "bool": flag,
    "int | None": optional(count),
    "dict[str, int]": by_name(count),
    "dict[str, dict[str, float]]": by_name(by_name(amount)),
    "list[str]": each(text),
    "tuple[str, ...]": each(text),
    "tuple[str, str]": each(text, 2),
    "tuple[str, str, str]": each(text, 3),
}


def made(cls: type[T]) -> Callable[[Any, str], T]:
    """A dataclass from an object with its fields, each of the type that it is declared with."""
    own = fields(cls)  # type: ignore[arg-type]
    checks = {field.name: _BY_TYPE[str(field.type)] for field in own}
    missing = [f.name for f in own if f.default is not MISSING or f.default_factory is not MISSING]

    def checked(value: Any, place: str) -> T:
        found = named(checks, value, place, missing)
        tuples = {f.name for f in own if str(f.type).startswith("tuple")}
        return cls(**{name: tuple(each) if name in tuples else each for name, each in found.items()})

    return checked


def updates(value: Any, place: str) -> dict[str, Any]:
    """What `Attachment.updates()` has counted of one optimizer."""

    def row(value: Any, place: str) -> dict[str, Any]:
        return {**mapping(value, place), **named({"name": text, "lost": amount}, value, place)}

    known = {"optimizer": text, "weights": text, "steps": count, "lost": amount, "needed": flag, "rows": each(row)}
    return {**mapping(value, place), **named(known, value, place)}


def _wrong(value: Any, place: str, wanted: str) -> HmpxError:
    kinds = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    said = kinds.get(type(value)) or ascii(value)[:30]
    return HmpxError(f"{place}: {wanted} is wanted, and it is {said}: no record that hmpx has saved")
