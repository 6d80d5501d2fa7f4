"""Where the keys of a recipe stand in its file, so that an error that is found later still names the line."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from hmpx.errors import HmpxError


@dataclass(frozen=True)
class Origins:
    """The lines of a file by key: ``("weights",)``, ``("module_dtypes", "lm_head")``, ``("bf16", 0)`` for a first name.

    `lists`: the path of each list file, by its key. A recipe that was no file has none of this.
    """

    path: str = ""
    lines: Mapping[tuple, int] = field(default_factory=dict)
    lists: Mapping[str, str] = field(default_factory=dict)

    def where(self, *key: str | int) -> str:
        """``"mine.yaml:3"``; an empty string where the file does not have the key."""
        return f"{self.path}:{self.lines[key]}" if key in self.lines else ""

    def without(self, keys: Collection[str]) -> Origins:
        """Those of a recipe that says something else of these keys."""
        lines = {key: line for key, line in self.lines.items() if key[0] not in keys}
        return Origins(self.path, lines, {key: path for key, path in self.lists.items() if key not in keys})

    @contextlib.contextmanager
    def named(self) -> Iterator[None]:
        """Whatever error comes from inside begins with the line of the key that it is about."""
        try:
            yield
        except HmpxError as error:
            message = "\n".join(map(self._located, str(error).splitlines()))
            if message == str(error):
                raise
            raise type(error)(message) from error

    def _located(self, problem: str) -> str:
        if self.path and problem.startswith(f"{self.path}:"):
            return problem
        for key, path in self.lists.items():
            if path in problem and (key,) in self.lines:
                return f"{self.where(key)}: {key}: {problem}"
        # The most exact one, and of several the last: until that line, the file was right.
        found = [key for key in self.lines if _is_about(problem, key)]
        if not found:
            return problem
        return f"{self.where(*max(found, key=lambda key: (len(key), self.lines[key])))}: {problem}"


def _is_about(problem: str, key: tuple) -> bool:
    """Whether a message is about a key. Some keys (`weights`) are words too: they open it, or stand before ``=``."""
    name = re.escape(str(key[0]))
    if len(key) > 1:
        return isinstance(key[1], str) and problem.startswith(f"{key[0]}: {key[1]!r}")
    anywhere = "_" in name
    return bool(re.search(rf"\b{name}\b" if anywhere else rf"^{name}\b|\b{name}=", problem))
