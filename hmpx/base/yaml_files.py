"""Reads op lists and recipes: small regular files, as YAML nodes that know their lines, and values without objects."""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from hmpx.errors import Fault, HmpxError, Origin, did_you_mean

_BYTES, _NODES = 2**20, 50_000


def text_of(path: str | os.PathLike[str], error: type[HmpxError] = HmpxError) -> str:
    """Return the text of a file, read as UTF-8.

    Raises:
        HmpxError: no regular file, too large, no path at all, or a byte that is no UTF-8. OSError as `open` does.
    """
    try:
        kind = os.stat(path).st_mode
    except ValueError as wrong:
        raise _fault(path, 0, f"is no path: {wrong}", error) from None
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
        HmpxError: it is no YAML, with file and line.
    """
    loader = None
    try:
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        _check_size(path, root, {}, error)
        return root
    except RecursionError:
        line = loader.get_mark().line + 1 if loader else 1
        raise _fault(path, line, "too many lists and mappings in one another", error) from None
    except yaml.MarkedYAMLError as wrong:
        line = wrong.problem_mark.line + 1 if wrong.problem_mark else 1
        raise _fault(path, line, f"not YAML: {wrong.problem}", error) from None
    except yaml.reader.ReaderError as wrong:
        line = text.count("\n", 0, wrong.position) + 1
        raise _fault(path, line, f"not YAML: {wrong.reason}", error) from None


def _check_size(path: object, node: yaml.Node | None, sizes: dict[int, float], kind: type[HmpxError]) -> float:
    """Return how many nodes a node stands for, with what aliases repeat: a few lines of them may stand for billions."""
    if id(node) not in sizes:
        sizes[id(node)] = math.inf  # of an alias that stands in what it repeats
        inner = [] if node is None or isinstance(node, yaml.ScalarNode) else node.value
        values = (value for each in inner for value in (each if isinstance(each, tuple) else [each]))
        sizes[id(node)] = 1 + sum(_check_size(path, each, sizes, kind) for each in values)
        if node is not None and sizes[id(node)] > _NODES:
            what = f"more than {_NODES} names and values, with those that aliases repeat"
            raise _fault(path, node.start_mark.line + 1, what, kind)
    return sizes[id(node)]


def value_of(path: str | os.PathLike[str], node: yaml.Node) -> Any:
    """Return the value that a node stands for.

    Raises:
        HmpxError: it stands for none, as the date 2001-99-99 does, with file and line.
    """
    try:
        return yaml.SafeLoader("").construct_object(node, deep=True)
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as wrong:
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
        raise _fault(path, 0, f"cannot be read: {error.strerror}{hint}") from None
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
