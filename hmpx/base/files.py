"""Files that are written as a whole or not at all (a full disk or a kill leaves the one that was there), and paths.

Op lists and recipes are read as small regular files, as YAML nodes that know their lines, and values without objects.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import shutil
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from hmpx.errors import HmpxError, Origin, Places, did_you_mean


def path_from(folder: str | os.PathLike[str], path: str | os.PathLike[str]) -> str:
    """Return a path that is given from `folder`, without ``..`` where that is the same file: links make it another."""
    whole = os.path.join(folder, path)
    short = os.path.normpath(whole)
    return short if os.path.realpath(short) == os.path.realpath(whole) else whole


class WriteError(HmpxError, OSError):
    """A file could not be written; it is as it was."""


def write(path: str | os.PathLike[str], text: str) -> None:
    """Write text beside a file, in UTF-8, and put it in the place of the file. A device is written to.

    Raises:
        WriteError: with the name of the file and the reason.
    """
    target = Path(os.path.realpath(path))
    try:
        if target.exists() and not target.is_file():
            target.write_text(text, encoding="utf-8")
            return
        part = target.with_name(f".{target.name}.{os.getpid()}.part")
        try:
            part.write_text(text, encoding="utf-8")
            if target.exists():
                shutil.copymode(target, part)
            os.replace(part, target)
        except BaseException:
            with contextlib.suppress(OSError):
                part.unlink()
            raise
    except OSError as error:
        raise WriteError(f"{path}: could not be written, and is as it was: {error.strerror or error}") from error


# Op lists and recipes

_BYTES, _NODES = 2**20, 50_000
_ODD = re.compile(r"[-+]?(0[0-9_]|.*:)")  # numbers to the base of 8 and 60, which YAML 1.1 knows alone


def text_of(path: str | os.PathLike[str], error: type[HmpxError] = HmpxError) -> str:
    """Return the text of a file, read as UTF-8.

    Raises:
        HmpxError: no regular file, too large, no path at all, or a byte that is no UTF-8. OSError as `open` does.
    """
    try:
        kind = os.stat(path).st_mode
    except ValueError as wrong:
        raise error(f"is no path: {wrong}", Origin(str(path))) from None
    if not stat.S_ISREG(kind) and not stat.S_ISDIR(kind):
        raise error("is no regular file (a pipe, a device or a socket): save it as one first", Origin(str(path)))
    with open(path, "rb") as file:
        raw = file.read(_BYTES + 1)
    if len(raw) > _BYTES:
        raise error(f"is larger than {_BYTES} bytes, which no op list and no recipe is", Origin(str(path)))
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as wrong:
        line = raw.count(b"\n", 0, wrong.start) + 1
        raise error(f"not UTF-8 text (byte 0x{raw[wrong.start]:02x})", Origin(str(path), line)) from None


def root_of(path: str | os.PathLike[str], text: str, error: type[HmpxError] = HmpxError) -> yaml.Node | None:
    """Return the node that a YAML text stands for; None for an empty one.

    Raises:
        HmpxError: it is no YAML, or a mapping in it has a key twice; with file and line.
    """
    loader = None
    try:
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        _check(path, root, {}, error)
        return root
    except RecursionError:
        line = loader.get_mark().line + 1 if loader else 1
        raise error("too many lists and mappings in one another", Origin(str(path), line)) from None
    except yaml.MarkedYAMLError as wrong:
        line = wrong.problem_mark.line + 1 if wrong.problem_mark else 1
        raise error(f"not YAML: {wrong.problem}", Origin(str(path), line)) from None
    except yaml.reader.ReaderError as wrong:
        line = text.count("\n", 0, wrong.position) + 1
        raise error(f"not YAML: {wrong.reason}", Origin(str(path), line)) from None


def _check(path: Any, node: yaml.Node | None, sizes: dict[int, float], kind: type[HmpxError]) -> float:
    """Return how many nodes a node stands for, with what aliases repeat: a few lines of them may stand for billions.

    YAML, and JSON, would take the last of two equal keys, and say nothing.
    """
    if id(node) not in sizes:
        sizes[id(node)] = math.inf  # of an alias that stands in what it repeats
        lines = dict[tuple[str, str], int]()
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            name, line = (key.tag, str(key.value)), key.start_mark.line + 1
            if name in lines:
                said = f"{key.value!r} stands here for the second time (first in line {lines[name]})"
                raise kind(said, Origin(str(path), line))
            lines[name] = line
        inner = [] if node is None or isinstance(node, yaml.ScalarNode) else node.value
        values = (value for each in inner for value in (each if isinstance(each, tuple) else [each]))
        sizes[id(node)] = 1 + sum(_check(path, each, sizes, kind) for each in values)
        if node is not None and node.tag.endswith((":int", ":float")) and _ODD.match(node.value):
            what = f"{node.value} is {value_of(path, node)} to YAML 1.1"
            said = f"{what}, and something else to others: write it as a decimal, or in quotes"
            raise kind(said, Origin(str(path), node.start_mark.line + 1))
        if node is not None and sizes[id(node)] > _NODES:
            what = f"more than {_NODES} names and values, with those that aliases repeat"
            raise kind(what, Origin(str(path), node.start_mark.line + 1))
    return sizes[id(node)]


def value_of(path: str | os.PathLike[str], node: yaml.Node, error: type[HmpxError] = HmpxError) -> Any:
    """Return the value that a node stands for.

    Raises:
        HmpxError: it stands for none, as the date 2001-99-99 does, with file and line.
    """
    try:
        return yaml.SafeLoader("").construct_object(node, deep=True)
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as wrong:
        why = getattr(wrong, "problem", None) or wrong
        raise error(f"not YAML: {why}", Origin(str(path), node.start_mark.line + 1)) from None


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
        raise HmpxError(f"cannot be read: {error.strerror}{hint}", Origin(str(path))) from None
    root = root_of(path, text.replace("\t", " ") if path.suffix == ".json" else text)
    if not isinstance(root, yaml.MappingNode):
        raise HmpxError(f"a recipe is a mapping of {', '.join(keys)}", Origin(str(path), 1))
    return root


def places_inside(path: object, node: yaml.Node, *key: Any) -> Places:
    """Return the line of every key and list item inside a value, at any depth; `key` leads to the value."""
    found: dict[tuple, Origin] = {}
    inside: list[tuple[Any, yaml.Node, yaml.Node]] = []
    if isinstance(node, yaml.MappingNode):
        inside = [(name.value, name, inner) for name, inner in node.value if isinstance(name, yaml.ScalarNode)]
    elif isinstance(node, yaml.SequenceNode):
        inside = [(i, inner, inner) for i, inner in enumerate(node.value)]
    for name, at, inner in inside:
        here = (*key, name)
        found |= {here: Origin(str(path), at.start_mark.line + 1), **places_inside(path, inner, *here)}
    return found
