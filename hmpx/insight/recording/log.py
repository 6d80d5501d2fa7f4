"""`Log`: what was recorded, to be printed, saved, compared with another, or handed on."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, NewType, NoReturn, TypedDict, get_args, get_origin, get_type_hints, is_typeddict

from hmpx.errors import HmpxError
from hmpx.insight.recording.diff import LogDiff, difference
from hmpx.insight.recording.recorded import SCHEMA, Recorded
from hmpx.insight.recording.table import as_page, as_text
from hmpx.insight.text_table import terminal_width

Rows = Callable[[list[dict[str, Any]]], object]  # a function of the rows of a log


@dataclass
class Log(Recorded):
    """What `record` saw. It prints as a table, the dearest sites first, with what calls for attention beneath it.

    Attributes:
        sites: a `Site` for each op, line, module and set of dtypes. round_trips: tensors that were cast there and back.
        unmatched: names in op lists of yours that no call matched. unmatched_of_hmpx: the same of the lists that come
            with hmpx, which serve many models. escaped: listed ops that ran in another dtype than their list says,
            since no patch in Python reaches them, one sentence each. steps: of optimizers, meanwhile.
            updates: what `Attachment.updates()` has counted of these, where it was asked for, by its `as_json()`.
        unchosen: the sites that ran in a dtype nobody chose. first_nonfinite: the site of the first call of all with a
            result that was not finite; None if there is none. totals: sums over the sites, and the casts' share of
            the time.
        policy: the op lists, as a list file; "" where nothing was converted. about: versions of hmpx, torch and Python;
            what this CPU has.

    `html(path)` writes a page. `json(path)` saves it, and `load(path)` reads that; `as_json()` is the same as objects.
    `diff(other)` sets another beside it. `every(n, callback)` hands the rows on while it records.

    Example:
        >>> with hmpx.convert(), hmpx.record() as log:
        ...     y = inputs.matmul(inputs.t())
        >>> site = log.sites[0]
        >>> site.op, site.rule, site.dtypes, site.shapes, site.casts
        ('matmul', 'bf16', 'float32 -> bfloat16', ['2x4, 4x2'], 2)
    """

    _callbacks: list[tuple[int, Rows]] = field(default_factory=list, repr=False, compare=False)

    def __str__(self) -> str:
        return as_text(self, terminal_width())

    def every(self, n: int, callback: Rows) -> None:
        """While this records, hand the rows of `sites` to `callback` after every n steps of optimizers.

        The rows are dicts with the names and values of `Site`, summed up since the beginning. See `steps`.

        Raises:
            HmpxError: n is no positive integer, or `callback` cannot be called.
        """
        if not isinstance(n, int) or n < 1:
            raise HmpxError(f"every takes a number of steps from 1 on, not {n!r}")
        if not callable(callback):
            raise HmpxError(f"every takes a function of one argument, the rows, not {callback!r}")
        self._callbacks.append((n, callback))

    def _stepped(self) -> None:
        """Count a step of an optimizer, and hand the rows on where it is time."""
        self.steps += 1
        for n, callback in self._callbacks:
            if self.steps % n == 0:
                callback([site.as_json() for site in self.sites])

    def json(self, path: str | os.PathLike[str]) -> None:
        """Save as JSON: an object with the attributes of `Log`, whose `sites` have those of `Site`.

        "schema" is 1; it grows when a name changes its meaning or goes away. Lists stand for tuples, null for None.
        """
        Path(path).write_text(json.dumps(self.as_json(), indent=1) + "\n", encoding="utf-8")

    def html(self, path: str | os.PathLike[str]) -> None:
        """Write one page that holds everything: tables, modules, where the time of casts goes, dtypes through a block.

        It is read without a network, in light and dark mode. Names and paths are shown as they are, and run nothing.
        """
        Path(path).write_text(as_page(self), encoding="utf-8")

    def diff(self, other: Recorded) -> LogDiff:
        """Compare with another record of the same program, made under other lists or another torch.

        Its attributes are the sites that are `new` there, those that are `gone`, and `changed`: those that both have,
        with another rule or other dtypes; each of the latter has `before` and `after`. It prints as tables, those sites
        first whose time changed most. A line that moved is found again by its module and op.

        Example:
            >>> def recorded(level):
            ...     with hmpx.convert(level), hmpx.record() as log:
            ...         y = inputs.exp()
            ...     return log
            >>> [(pair.before.rule, pair.after.rule) for pair in recorded("O1").diff(recorded("O2")).changed]
            [('promote', 'fp32')]
        """
        return difference(self, other)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Log:
        """Read what `json` has saved, here or elsewhere. Characters that a terminal would obey are left out.

        Raises:
            HmpxError: it cannot be read, is no JSON, or no record that this version knows; with the place of a value of
                another type than it has there.
        """
        try:
            if Path(path).exists() and not Path(path).is_file() and not Path(path).is_dir():  # a device or a pipe
                raise HmpxError(f"{path}: no file that could hold JSON")
            found = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise HmpxError(f"{path}: cannot be read: {error.strerror or error}") from None
        except (ValueError, RecursionError) as error:
            raise HmpxError(f"{path}: no JSON: {error}") from None
        if not isinstance(found, dict) or found.get("schema") != SCHEMA:
            raise HmpxError(f"{path}: no record of schema {SCHEMA}, as hmpx.record and `python -m hmpx record` save it")
        types = get_type_hints(Recorded) | {"updates": list[_Updates], "policy": _Lines}
        return cls(**_checked_by_name(types, found, str(path), ["updates"]))


_Lines = NewType("_Lines", str)  # a text of several lines


class _Lost(TypedDict):
    """One row of `_Updates`."""

    name: str
    lost: float


class _Updates(TypedDict):
    """The counts of `Attachment.updates()`, as far as a view reads them."""

    optimizer: str
    weights: str
    steps: int
    lost: float
    needed: bool
    rows: list[_Lost]


def _checked_by_name(types: Mapping[str, Any], value: Any, place: str, may_lack: Collection[str] = ()) -> dict:
    """Return the values of an object of JSON that have a type by their name, each checked."""
    if not isinstance(value, dict):
        _refuse(value, place, "an object")
    for name in types:
        if name not in value and name not in may_lack:
            raise HmpxError(f"{place}: a record that is not whole: KeyError: {name!r}")
    return {name: _checked(kind, value[name], f"{place}.{name}") for name, kind in types.items() if name in value}


def _checked(kind: Any, value: Any, place: str) -> Any:
    """Return a value of JSON as the type that it is to have, without characters that a terminal would obey.

    Raises:
        HmpxError: it has another type; with its place in the file.
    """
    origin, parts = get_origin(kind), get_args(kind)
    if origin is UnionType:  # with None
        return None if value is None else _checked(parts[0], value, place)
    if is_typeddict(kind):
        return {**_checked(dict[str, Any], value, place), **_checked_by_name(get_type_hints(kind), value, place)}
    if isinstance(kind, type) and is_dataclass(kind):
        free = [f.name for f in fields(kind) if f.default is not MISSING or f.default_factory is not MISSING]
        return kind(**_checked_by_name(get_type_hints(kind), value, place, free))
    if kind is Any:
        return value
    if origin is dict:
        if isinstance(value, dict):
            return {
                _checked(str, key, place): _checked(parts[1], each, f"{place}.{key}") for key, each in value.items()
            }
        _refuse(value, place, "an object")
    if origin in (list, tuple):
        length = len(parts) if origin is tuple and parts[-1] is not Ellipsis else None
        if isinstance(value, list) and len(value) == (length or len(value)):
            return origin(_checked(parts[0], item, f"{place}[{i}]") for i, item in enumerate(value))
        _refuse(value, place, f"a list of {length}" if length else "a list")
    if kind in (str, _Lines):
        if isinstance(value, str):
            return "".join(each for each in value if each.isprintable() or (kind is _Lines and each == "\n"))
        _refuse(value, place, "a string")
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind is bool:
        fits, wanted = isinstance(value, bool), "true or false"
    elif kind is int:
        fits, wanted = is_number and isinstance(value, int) and value >= 0, "a whole number from 0 on"
    else:
        fits, wanted = is_number and 0 <= value < math.inf, "a finite number from 0 on"
    if not fits:
        _refuse(value, place, wanted)
    return value


def _refuse(value: Any, place: str, wanted: str) -> NoReturn:
    kinds = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    said = kinds.get(type(value)) or ascii(value)[:30]
    raise HmpxError(f"{place}: {wanted} is wanted, and it is {said}: no record that hmpx has saved")
