"""Reads op list files into `OpLists`, in which every name knows its file and line.

Three formats, by suffix. `.yaml`/`.yml`: keys `bf16`, `fp32`, `promote`, `fp8`, each a list of names, `low_precision`,
the dtype that the bf16 list stands for, and `fp8_format`, how ops in the fp8 list are multiplied. `.json`: a Gaudi
configuration with `hmp_bf16_ops`, `hmp_fp32_ops`, or, under `use_torch_autocast`, `autocast_bf16_ops` and
`autocast_fp32_ops`. Anything else is text: one name a line, `#` starts a comment.

A file is read once, eagerly: callers may delete it after the call. An empty list is a real list; a key that is absent
or null says nothing, and the default list stands.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import torch
import yaml

from hmpx.base.yaml_files import root_of, text_of, value_of
from hmpx.errors import Fault, HmpxError, OpListError, Origin, did_you_mean
from hmpx.ops.policies.fp8_format import Format

SIDES = ("bf16", "fp32", "promote", "fp8")
FP8_FORMAT = "fp8_format"  # a key of YAML files: the format of the fp8 list
LOW_PRECISION = "low_precision"  # a key of YAML files: the dtype of the bf16 list, one of these
LOW_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "bf16": torch.bfloat16, "fp16": torch.float16}
_KEYS = {
    ".yaml": {key: key for key in (*SIDES, LOW_PRECISION, FP8_FORMAT)},
    ".json": {f"{system}_{side}_ops": side for system in ("hmp", "autocast") for side in ("bf16", "fp32")},
}
_KEYS[".yml"] = _KEYS[".yaml"]
_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*\Z")


@dataclass(frozen=True)
class Listed:
    """One name in an op list, and where it stands: a file and a line, or, with line 0, a `path` in words.

    problem: why it cannot be the name of an op.
    """

    name: str
    path: str
    line: int
    problem: str = ""

    @property
    def origin(self) -> Origin:
        return Origin(self.path, self.line)

    @property
    def where(self) -> str:
        return str(self.origin)


@dataclass(frozen=True)
class OpLists:
    """The names on each side, and the low precision of the bf16 list; None if not given.

    faults: of the file, beside those of its names, kept so that one error can say all of them.
    """

    bf16: tuple[Listed, ...] | None = None
    fp32: tuple[Listed, ...] | None = None
    promote: tuple[Listed, ...] | None = None
    fp8: tuple[Listed, ...] | None = None
    low_precision: torch.dtype | None = None
    fp8_format: Format | None = None
    faults: tuple[Fault, ...] = ()

    def side(self, name: str) -> tuple[Listed, ...] | None:
        return getattr(self, name)


def shipped() -> Path:
    """Return the folder of the op lists that come with hmpx."""
    return Path(str(resources.files("hmpx"))) / "oplists"


def is_shipped(origin: str) -> bool:
    """Return whether a name's origin, `file:line`, is a list that hmpx ships."""
    return os.path.realpath(origin).startswith(f"{os.path.realpath(shipped())}{os.sep}")


@functools.cache
def default_lists() -> OpLists:
    """Return the default lists: HMP's published defaults."""
    return read_lists(*(shipped() / "default" / f"{side}.txt" for side in SIDES))


def read_lists(
    bf16_file_path: str | os.PathLike[str] | None = None,
    fp32_file_path: str | os.PathLike[str] | None = None,
    promote_file_path: str | os.PathLike[str] | None = None,
    fp8_file_path: str | os.PathLike[str] | None = None,
    *,
    already: Mapping[str, OpLists] | None = None,
) -> OpLists:
    """Read up to four files. ``""`` and None mean: not given.

    A file with several sides in it (YAML, JSON) fills its own argument's side, and every side whose argument is not
    given.

    already: files that have been read, by the name of their argument.

    Raises:
        OpListError: a file that cannot be read or has another shape; a side that two files fill; two low precisions.
    """
    given = dict(zip(SIDES, (bf16_file_path, fp32_file_path, promote_file_path, fp8_file_path), strict=True))
    for side, path in given.items():
        if not isinstance(path, str | os.PathLike | None):
            raise OpListError(
                f"{side}_file_path takes the path of a file, not a {type(path).__name__}; write the names into a text "
                "file, one a line"
            )
    paths = {side: os.fspath(path) for side, path in given.items() if path is not None and os.fspath(path) != ""}
    known = already or {}
    read = {side: known.get(f"{side}_file_path") or read_file(path, side) for side, path in paths.items()}
    low = {lists.low_precision: paths[side] for side, lists in read.items() if lists.low_precision is not None}
    if len(low) > 1:
        raise OpListError(f"{' and '.join(low.values())} disagree: low_precision is {' and '.join(map(str, low))}")
    filled: dict[str, Any] = {}
    for side in SIDES:
        if side in read:
            filled[side] = read[side].side(side)
            continue
        offers = {paths[other]: lists.side(side) for other, lists in read.items() if lists.side(side) is not None}
        if len(offers) > 1:
            raise OpListError(f"{' and '.join(offers)} both hold a {side} list; say which with {side}_file_path=")
        filled[side] = next(iter(offers.values()), None)
    faults = tuple(fault for lists in read.values() for fault in lists.faults)
    forms = [lists.fp8_format for lists in read.values() if lists.fp8_format is not None]
    return OpLists(**filled, low_precision=next(iter(low), None), fp8_format=next(iter(forms), None), faults=faults)


def read_file(path: str | os.PathLike[str], side: str) -> OpLists:
    """Read one op list file; a text file's names go to `side`.

    Raises:
        OpListError: no list can be made of it. Wrong names and keys are kept beside the right ones (`faults`).
    """
    path = os.fspath(path)
    text = _text(path)
    suffix = Path(path).suffix.lower()
    if suffix in _KEYS:
        return _read_tree(path, text, suffix)
    lines = [(number, line.partition("#")[0].strip()) for number, line in enumerate(text.splitlines(), 1)]
    names: dict[str, Any] = {side: tuple(_listed(name, path, number) for number, name in lines if name)}
    return OpLists(**names)


def _text(path: str) -> str:
    try:
        return text_of(path, OpListError)
    except FileNotFoundError:
        folder = Path(path).parent
        siblings = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
        own = shipped().joinpath(*Path(path).parts[-2:])
        hint = f"; hmpx ships one: {own}" if own.is_file() else did_you_mean(Path(path).name, siblings, cutoff=0.8)
        raise _unread(path, 0, f"no such op list file{hint}") from None
    except IsADirectoryError:
        raise _unread(path, 0, "is a directory; an op list is a .txt, .yaml or .json file") from None
    except OSError as error:
        raise _unread(path, 0, f"cannot be read: {error.strerror}") from error


def _unread(path: str, line: int, text: str) -> OpListError:
    return OpListError([Fault(text, Origin(path, line), kind=OpListError)])


def _listed(name: str, path: str, line: int) -> Listed:
    if not _NAME.match(name):
        words = [word for word in re.findall(r"[\w.]+", name) if _NAME.match(word)]
        if name.endswith(":") or ": " in name:
            hint = "; a list with keys needs a name that ends in .yaml"
        elif len(name.split()) > 1 and len(words) > 1:
            hint = "; write one name a line"
        else:
            hint = f"; did you mean {words[-1]!r}?" if words else ""
        return Listed(name, path, line, f"{name!r} is no op name{hint}")
    return Listed(name, path, line)


def _read_tree(path: str, text: str, suffix: str) -> OpLists:
    """Read YAML or JSON as YAML nodes, which know their lines; JSON is YAML once its tabs are blanks."""
    keys = _KEYS[suffix]
    legal = ", ".join(key for key in keys if key not in (LOW_PRECISION, FP8_FORMAT))
    if suffix == ".json":
        try:
            json.loads(text)
        except json.JSONDecodeError as error:
            raise _unread(path, error.lineno, f"not JSON: {error.msg}") from None
        except (RecursionError, ValueError):  # which line it is, is said below
            pass
        text = text.replace("\t", " ")
    root = root_of(path, text, OpListError)
    if not isinstance(root, yaml.MappingNode):
        kind = "nothing" if root is None else f"a {_kind(root)}"
        line = 1 if root is None else root.start_mark.line + 1
        raise _unread(path, line, f"expected the keys {legal}, found {kind}")
    if suffix == ".json":
        said = {key.value: value.value for key, value in root.value}
        aside = "autocast" if said.get("use_torch_autocast") != "true" and said.keys() & {*list(keys)[:2]} else "hmp"
        keys = {key: side for key, side in keys.items() if not key.startswith(aside)}
    found: dict[str, Any] = {}
    faults: list[Fault] = []

    def wrong(at: yaml.Node, text: str) -> None:
        faults.append(Fault(text, Origin(path, at.start_mark.line + 1), kind=OpListError))

    for key, value in root.value:
        hint = did_you_mean(str(key.value), keys)
        if not isinstance(key, yaml.ScalarNode):
            wrong(key, f"a {_kind(key)} is no key (legal: {legal})")
        elif key.value not in keys:
            if suffix != ".json" and (isinstance(value, yaml.SequenceNode) or hint):
                wrong(key, f"{key.value!r} is no list that hmpx knows{hint} (legal: {legal})")
        elif keys[key.value] in found:
            wrong(key, f"the key {key.value!r} stands here for the second time")
        else:
            found[keys[key.value]] = _value(path, key.value, value, wrong)
    if not found and not faults:
        close = next((hint for key, _ in root.value if (hint := did_you_mean(str(key.value), keys))), "")
        raise _unread(path, 1, f"holds none of the keys {legal}{close}")
    return OpLists(**found, faults=tuple(faults))


def _value(path: str, key: str, node: yaml.Node, wrong: Callable[[yaml.Node, str], None]) -> Any:
    """Return the value of a key; call `wrong` for each fault in it."""
    if node.tag == "tag:yaml.org,2002:null":
        return None
    names = []
    if key == LOW_PRECISION:
        given = repr(node.value) if isinstance(node, yaml.ScalarNode) else f"a {_kind(node)}"
        if isinstance(node, yaml.ScalarNode) and node.value in LOW_DTYPES:
            return LOW_DTYPES[node.value]
        wrong(node, f"{key} is {given}, none of {', '.join(LOW_DTYPES)}")
    elif key == FP8_FORMAT:
        try:
            return Format.of(value_of(path, node))
        except HmpxError as error:
            for fault in error.faults:
                wrong(node, f"{key}: {fault.text}")
    elif not isinstance(node, yaml.SequenceNode):
        wrong(node, f"{key!r} must be a list of names, found a {_kind(node)}")
    else:
        for item in node.value:
            if isinstance(item, yaml.ScalarNode):
                names.append(_listed(item.value, path, item.start_mark.line + 1))
            else:
                wrong(item, f"{key!r} must hold names, found a {_kind(item)}")
        return tuple(names)
    return None


def _kind(node: yaml.Node) -> str:
    if isinstance(node, yaml.CollectionNode):
        return "list" if isinstance(node, yaml.SequenceNode) else "mapping"
    return "single value"
