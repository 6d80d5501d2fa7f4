"""The files of recipes: which there are, which keys a file holds, and where each key is said.

An error that is found later, when a list is read or a model is cast, still names the file and line of its key.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from hmpx.base.yaml_files import composed, lines_inside, shown, value_of
from hmpx.errors import FEW, HmpxError, did_you_mean
from hmpx.ops.policies.catalog import legal_names
from hmpx.ops.policies.op_lists import SIDES, shipped
from hmpx.recipes.keys import EXTENDS, LISTS, WORDS, problems, spelled_out
from hmpx.recipes.vendors import NXD, NXD_BASE, NXD_MASTERS, gaudi_keys, nxd_keys, nxd_under_zero


class Origin(NamedTuple):
    """A line of a file. With line 0, `path` says the place in words (``--set seed=1``)."""

    path: str
    line: int = 0

    def __str__(self) -> str:
        return f"{self.path}:{self.line}" if self.line else self.path


@dataclass(frozen=True)
class Origins:
    """The place of each key: ``("weights",)``, ``("module_dtypes", "lm_head")``, ``("bf16", 0)`` for a first name.

    The places are in the order of their lines; the places of a file follow those of the file that it extends. `lists`
    has the path of each list file, by its key. A recipe that was not read from a file has no places. `under_zero`: the
    keys that have other values for optimizers under ZeRO-1, which NxD's configuration leaves to a default.
    """

    by_key: Mapping[tuple, Origin] = field(default_factory=dict)
    lists: Mapping[str, str] = field(default_factory=dict)
    under_zero: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of_file(cls, path: object, lines: Mapping[tuple, int], lists: Mapping[str, str] | None = None) -> Origins:
        """Make the origins of one file from the lines of its keys."""
        return cls({key: Origin(str(path), line) for key, line in lines.items()}, lists or {})

    def where(self, *key: str | int) -> str:
        """Return ``"mine.yaml:3"``; an empty string where no place is known."""
        return str(self.by_key[key]) if key in self.by_key else ""

    def without(self, keys: Collection[str]) -> Origins:
        """Return the origins without some keys, for a recipe that says something else about these."""
        places = {key: place for key, place in self.by_key.items() if key[0] not in keys}
        lists, zero = ({key: its[key] for key in its if key not in keys} for its in (self.lists, self.under_zero))
        return Origins(places, lists, zero)

    def under(self, nearer: Origins) -> Origins:
        """Return both origins as one; where both have a key, the place in `nearer` counts."""
        around = {key: place for key, place in self.by_key.items() if key not in nearer.by_key}
        zero = {**self.under_zero, **nearer.under_zero}
        return Origins({**around, **nearer.by_key}, {**self.lists, **nearer.lists}, zero)

    @contextlib.contextmanager
    def named(self) -> Iterator[None]:
        """Let each error that is raised inside begin with the line of the key that it is about."""
        try:
            yield
        except HmpxError as error:
            message = "\n".join(map(self.located, str(error).splitlines()))
            if message == str(error):
                raise
            raise type(error)(message) from None  # the cause may show what the message does not

    def located(self, problem: str) -> str:
        """Return a problem with the place of its key in front, if it is about a key and does not say a place itself."""
        if any(problem.startswith(f"{path}:") for path in {place.path for place in self.by_key.values()}):
            return problem
        for key, path in self.lists.items():
            if shown(path) in problem and (key,) in self.by_key:
                return f"{self.where(key)}: {key}: {without_text(problem)}"
        # The most exact one, and of several the last, in the nearest file: until that line, all was right.
        found = [key for key in self.by_key if is_about(problem, key)]
        if not found:
            return problem
        return f"{self.where(*max(reversed(found), key=len))}: {problem}"


_QUOTED = re.compile(r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*\"""")


def without_text(problem: str) -> str:
    """Return a problem without what it quotes, except ops, keys and words like them.

    For a problem in a file that another file names: that may be a stranger's, and name any file of the user's.
    """
    said, hint, meant = problem.partition("; did you mean ")

    def shown_or_not(quoted: re.Match) -> str:
        word = quoted[0][1:-1]
        known = word in _words() or (hint and word.isidentifier() and did_you_mean(word, _words(), cutoff=0.75))
        return quoted[0] if known else _NOT_SHOWN

    kept = _QUOTED.sub(shown_or_not, said)
    return kept if _NOT_SHOWN in kept else f"{kept}{hint}{meant}"


_NOT_SHOWN = "(text that is not shown)"


@functools.cache
def _words() -> frozenset[str]:
    return legal_names() | WORDS


def is_about(problem: str, key: tuple) -> bool:
    """Return whether a message is about a key. A key that is a word (`weights`) opens it, or stands before ``=``."""
    if len(key) > 1:
        return isinstance(key[1], str) and problem.startswith(f"{key[0]}: {key[1]!r}")
    name = re.escape(str(key[0]))
    anywhere = "_" in name
    return bool(re.search(rf"\b{name}\b" if anywhere else rf"^{name}\b|\b{name}=", problem))


class Read(NamedTuple):
    """The content of a file.

    keys: the keys without fault. base: the file that this one extends; None if it extends none.
    wrong: each problem with file and line. faulty: the keys of these problems.
    """

    keys: dict[str, Any]
    origins: Origins
    base: Path | None = None
    wrong: Sequence[str] = ()
    faulty: Collection[str] = ()


def recipe_names() -> list[str]:
    """Return the names of the recipes that hmpx ships."""
    return sorted(each.stem for each in (shipped() / "recipes").glob("*.yaml"))


def recipe_path(name: str | os.PathLike[str], beside: str | os.PathLike[str] = "") -> Path:
    """Return the file of a recipe that hmpx ships, by its name; or the path itself if it ends in .yaml or .json.

    beside: the folder that a path is relative to.

    Raises:
        HmpxError: no such recipe, with the nearest one.
    """
    path = Path(name)
    if path.suffix in (".yaml", ".yml", ".json"):
        return Path(os.path.normpath(beside / path)) if beside else path
    if path.suffix == ".txt":
        raise HmpxError(
            f"{shown(name)} is an op list, and not a recipe: hmpx.convert(bf16_file_path={shown(name)!r}) takes it, "
            f"or a recipe's key, bf16_file_path: {shown(name)}"
        )
    legal = recipe_names()
    if str(name) not in legal:
        others = f" (there are {', '.join(legal)}, and files that end in .yaml or .json)"
        hint = did_you_mean(str(name), legal) or others
        raise HmpxError(f"there is no recipe {shown(name)!r}{hint}")
    return shipped() / "recipes" / f"{name}.yaml"


def read_keys(path: Path, legal: Sequence[str]) -> Read:
    """Read the keys of a recipe's file and check each. Paths of lists, and of a recipe to extend, are relative to it.

    Args:
        legal: the names of every key that a recipe has.

    Raises:
        HmpxError: it cannot be read, or is no mapping, or what Gaudi's or NxD's configuration says is wrong.
    """
    if path.suffix == ".json":
        keys, stands = gaudi_keys(path)
        return Read(keys, Origins.of_file(path, stands))
    root = composed(path, legal)
    if [key.value for key, _ in root.value] == [NXD]:
        ((key, value),) = root.value
        return _nxds(path, key, value)
    values: dict[str, Any] = {}
    lines: dict[tuple, int] = {}
    wrong: dict[str, None] = {}
    faulty: set[str] = set()
    for key, value in root.value:
        line = key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarNode):
            wrong[f"{path}:{line}: a recipe's keys are {', '.join(legal)}"] = None
            continue
        if key.value in values:
            wrong[f"{path}:{line}: {key.value!r} stands here for the second time"] = None
        lines |= {(key.value,): line, **lines_inside(value, key.value)}
        try:
            values[key.value] = spelled_out(key.value, value_of(path, value))
        except HmpxError as error:
            wrong[str(error)] = None
            faulty.add(key.value)
            continue
        if len(wrong) >= FEW and key.value not in (*legal, EXTENDS):  # without the nearest key
            wrong[f"{path}:{line}: {key.value!r} is no key of a recipe"] = None
            del values[key.value]
            continue
        for inside, problem in problems(key.value, values[key.value], legal):
            wrong[f"{path}:{lines.get((key.value, inside), line)}: {problem}"] = None
            faulty.add(key.value)
        if key.value in LISTS and isinstance(values[key.value], str) and values[key.value]:
            values[key.value] = os.path.normpath(path.parent / values[key.value])
    for side, both in named_twice(values):
        wrong[f"{path}:{lines[side,]}: {both}"] = None
        faulty.add(side)
    keys = {key: value for key, value in values.items() if key not in faulty}
    lists = {key: keys[key] for key in LISTS if keys.get(key)}
    base = keys.pop(EXTENDS, None)
    if base is not None:
        try:
            base = recipe_path(base, path.parent)
        except HmpxError as error:
            wrong[f"{path}:{lines[EXTENDS,]}: {EXTENDS}: {error}"] = base = None
    return Read(keys, Origins.of_file(path, lines, lists), base, list(wrong), faulty)


def _nxds(path: Path, key: yaml.Node, value: yaml.Node) -> Read:
    """Read a file that holds NxD's configuration."""
    line = key.start_mark.line + 1
    lines = {inner: at for (_, inner), at in lines_inside(value, NXD).items()}
    config = value_of(path, value)
    keys = nxd_keys(config, False, lambda inner: f"{path}:{lines.get(inner, line)}: ")
    where = {(own,): lines.get(NXD_MASTERS if own == "weights" else own, line) for own in keys}
    origins = replace(Origins.of_file(path, where), under_zero=nxd_under_zero(config))
    return Read(keys, origins, recipe_path(NXD_BASE))


def named_twice(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the lists that are given both name by name and as a file, each with a sentence that says so."""
    both = [side for side in SIDES if values.get(side) is not None and values.get(f"{side}_file_path")]
    return [(side, f"{side} and {side}_file_path: which of the two?") for side in both]
