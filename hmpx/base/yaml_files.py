"""Reads untrusted files within bounds, so that a recipe or an op list from the net can do no harm.

A file is a regular one of at most 1 MiB. Its YAML has at most 50,000 nodes, those that aliases repeat counted each
time, at most 32 inside of one another, and no tags.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from hmpx.errors import Fault, HmpxError, Origin, did_you_mean

_BYTES, _NODES, _DEPTH = 2**20, 50_000, 32
_NAME = 200  # letters of a name that a message repeats


def shown(name: object) -> str:
    """Return a user's name as a message repeats it: cut where it is long."""
    text = str(name)
    return text if len(text) <= _NAME else f"{text[:_NAME]}... ({len(text)} letters)"


def text_of(path: str | os.PathLike[str], error: type[HmpxError] = HmpxError) -> str:
    """Return the text of a file, read as UTF-8.

    Raises:
        HmpxError: no regular file, too large, no path at all, or a byte that is no UTF-8. OSError as `open` does.
    """
    try:
        kind = os.stat(path).st_mode
    except ValueError as wrong:
        raise _fault(shown(path), 0, f"is no path: {wrong}", error) from None
    if not stat.S_ISREG(kind) and not stat.S_ISDIR(kind):
        raise _fault(path, 0, "is no regular file (a pipe, a device or a socket): save it as one first", error)
    with open(path, "rb") as file:
        raw = file.read(_BYTES + 1)
    if len(raw) > _BYTES:
        raise _fault(path, 0, f"is larger than {_BYTES} bytes, which no op list and no recipe is", error)
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as wrong:
        line = raw.count(b"\n", 0, wrong.start) + 1
        raise _fault(path, line, f"not UTF-8 text (byte 0x{raw[wrong.start]:02x})", error) from None


def root_of(path: str | os.PathLike[str], text: str, error: type[HmpxError] = HmpxError) -> yaml.Node | None:
    """Return the node that a YAML text stands for; None for an empty one.

    Raises:
        HmpxError: it is no YAML, or is beyond the bounds, with file and line.
    """
    try:
        return _Loader(text).get_single_node()
    except _Refused as wrong:
        raise _fault(path, wrong.line, wrong.why, error) from None
    except yaml.MarkedYAMLError as wrong:
        line = wrong.problem_mark.line + 1 if wrong.problem_mark else 1
        raise _fault(path, line, f"not YAML: {wrong.problem}", error) from None
    except yaml.reader.ReaderError as wrong:
        line = text.count("\n", 0, wrong.position) + 1
        raise _fault(path, line, f"not YAML: {wrong.reason}", error) from None


def value_of(path: str | os.PathLike[str], node: yaml.Node) -> Any:
    """Return the value that a node stands for.

    Raises:
        HmpxError: it stands for none, as the date 2001-99-99 does, with file and line.
    """
    try:
        return yaml.SafeLoader("").construct_object(node, deep=True)
    except (yaml.YAMLError, ValueError, OverflowError) as wrong:
        why = getattr(wrong, "problem", None) or wrong
        raise _fault(path, node.start_mark.line + 1, f"not YAML: {why}") from None


def composed(path: Path, keys: Iterable[str]) -> yaml.MappingNode:
    """Return the mapping that a file holds; JSON is YAML once its tabs are blanks.

    Raises:
        HmpxError: it cannot be read, is not YAML, or holds something other than a mapping of `keys`.
    """
    try:
        text = text_of(path)
    except OSError as error:
        missing = isinstance(error, FileNotFoundError) and path.parent.is_dir()
        hint = did_you_mean(path.name, [each.name for each in path.parent.iterdir()], cutoff=0.8) if missing else ""
        raise _fault(shown(path), 0, f"cannot be read: {error.strerror}{hint}") from None
    root = root_of(path, text.replace("\t", " ") if path.suffix == ".json" else text)
    if not isinstance(root, yaml.MappingNode):
        raise _fault(path, 1, f"a recipe is a mapping of {', '.join(keys)}")
    return root


def _fault(path: object, line: int, text: str, kind: type[HmpxError] = HmpxError) -> HmpxError:
    return kind([Fault(text, Origin(str(path), line), kind=kind)])


def lines_inside(value: yaml.Node, *path: Any) -> dict[tuple, int]:
    """Return the line of every key and list item inside a value, at any depth; `path` leads to the value."""
    found: dict[tuple, int] = {}
    inside: list[tuple[Any, yaml.Node, yaml.Node]] = []
    if isinstance(value, yaml.MappingNode):
        inside = [(key.value, key, inner) for key, inner in value.value if isinstance(key, yaml.ScalarNode)]
    elif isinstance(value, yaml.SequenceNode):
        inside = [(i, inner, inner) for i, inner in enumerate(value.value)]
    for name, where, inner in inside:
        here = (*path, name)
        found |= {here: where.start_mark.line + 1, **lines_inside(inner, *here)}
    return found


class _Refused(Exception):
    def __init__(self, event: yaml.Event, why: str) -> None:
        mark = event.start_mark
        self.line, self.why = mark.line + 1 if mark else 1, why


class _Loader(yaml.SafeLoader):
    """Counts nodes while it makes them; an alias counts as many nodes as it repeats."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = self._made = 0
        self._sizes: dict[int, int] = {}  # of a node that is complete, with all that is in it

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()
        self._made, self._depth = self._made + 1, self._depth + 1
        if getattr(event, "tag", None):
            raise _Refused(event, f"the tag {event.tag!r}: tags are not read; a value is a name, a number or a list")
        if self._depth > _DEPTH:
            raise _Refused(event, f"more than {_DEPTH} lists and mappings in one another")
        node = super().compose_node(parent, index)
        self._depth -= 1
        if isinstance(event, yaml.AliasEvent):
            if id(node) not in self._sizes:
                raise _Refused(event, f"the alias {event.anchor!r} stands in what it repeats")
        else:
            self._sizes[id(node)] = 1 + sum(self._sizes[id(each)] for each in _inside(node))
        if max(self._made, self._sizes[id(node)]) > _NODES:
            raise _Refused(event, f"more than {_NODES} names and values, with those that aliases repeat")
        return node


def _inside(node: yaml.Node | None) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [each for pair in node.value for each in pair]
    return node.value if isinstance(node, yaml.SequenceNode) else []
