"""Where the keys of a recipe are said, so that an error that is found later still names the file and line."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from hmpx.errors import HmpxError
from hmpx.yaml_files import shown


class Origin(NamedTuple):
    """A line of a file; with line 0, what `path` says in words (``--set seed=1``)."""

    path: str
    line: int = 0

    def __str__(self) -> str:
        return f"{self.path}:{self.line}" if self.line else self.path


@dataclass(frozen=True)
class Origins:
    """The place of each key: ``("weights",)``, ``("module_dtypes", "lm_head")``, ``("bf16", 0)`` for a first name.

    They are in the order of their lines, those of a file behind those of a file that it extends. `lists`: the path of
    each list file, by its key. A recipe that was no file has none of this.
    """

    by_key: Mapping[tuple, Origin] = field(default_factory=dict)
    lists: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of_file(cls, path: object, lines: Mapping[tuple, int], lists: Mapping[str, str] | None = None) -> Origins:
        """Of the lines of one file."""
        return cls({key: Origin(str(path), line) for key, line in lines.items()}, lists or {})

    def where(self, *key: str | int) -> str:
        """``"mine.yaml:3"``; an empty string where no place is known."""
        return str(self.by_key[key]) if key in self.by_key else ""

    def without(self, keys: Collection[str]) -> Origins:
        """Those of a recipe that says something else of these keys."""
        places = {key: place for key, place in self.by_key.items() if key[0] not in keys}
        return Origins(places, {key: path for key, path in self.lists.items() if key not in keys})

    def under(self, nearer: Origins) -> Origins:
        """Both; where both have a key, the place in the nearer one."""
        around = {key: place for key, place in self.by_key.items() if key not in nearer.by_key}
        return Origins({**around, **nearer.by_key}, {**self.lists, **nearer.lists})

    @contextlib.contextmanager
    def named(self) -> Iterator[None]:
        """Whatever error comes from inside begins with the line of the key that it is about."""
        try:
            yield
        except HmpxError as error:
            message = "\n".join(map(self.located, str(error).splitlines()))
            if message == str(error):
                raise
            raise type(error)(message) from error

    def located(self, problem: str) -> str:
        """One problem with the place of the key that it is about, if it is about one and says no place itself."""
        if any(problem.startswith(f"{path}:") for path in {place.path for place in self.by_key.values()}):
            return problem
        for key, path in self.lists.items():
            if shown(path) in problem and (key,) in self.by_key:
                return f"{self.where(key)}: {key}: {problem}"
        # The most exact one, and of several the last, in the nearest file: until that line, all was right.
        found = [key for key in self.by_key if is_about(problem, key)]
        if not found:
            return problem
        return f"{self.where(*max(reversed(found), key=len))}: {problem}"


def is_about(problem: str, key: tuple) -> bool:
    """Whether a message is about a key. Some keys (`weights`) are words too: they open it, or stand before ``=``."""
    name = re.escape(str(key[0]))
    if len(key) > 1:
        return isinstance(key[1], str) and problem.startswith(f"{key[0]}: {key[1]!r}")
    anywhere = "_" in name
    return bool(re.search(rf"\b{name}\b" if anywhere else rf"^{name}\b|\b{name}=", problem))
