"""`Diagnosis`: what the doctor has found, to be printed, saved, or drawn the consequence of."""

from __future__ import annotations

import json
import os
import textwrap
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hmpx.errors import HmpxError
from hmpx.insight.doctor.problem import Problem
from hmpx.insight.pages import filled
from hmpx.insight.text_table import terminal_width
from hmpx.recipes.recipe import Recipe

SCHEMA = 1  # of the JSON


@dataclass
class Diagnosis:
    """What is wrong with the precision of a training. It prints as one screen, the worst first.

    Attributes:
        findings: a `Problem` for each thing that was found: `kind`, `wrong`, `said`, `do`, `where`, `names`, `ops`.
        wrong: whether one of them harms the training; the others are notes.
        looked: what was looked at, in words: how many steps, which of them for what, which optimizers.
        recipe: the least `hmpx.Recipe` that answers the findings; None where none does. reasons: by key of the
            recipe, why. recipe_text: the recipe as a file, with these as comments.

    `html(path)` writes a page, `json(path)` saves `as_json()`, `fix(path)` writes `recipe_text`.

    Example:
        >>> with hmpx.doctor() as found:
        ...     for _ in range(4):
        ...         model(inputs).sum().backward()
        ...         optimizer.step()
        >>> found.wrong, [each.kind for each in found.findings]
        (False, [])
    """

    findings: list[Problem] = field(default_factory=list)
    looked: list[str] = field(default_factory=list)
    recipe: Recipe | None = None
    reasons: dict[str, str] = field(default_factory=dict)
    recipe_text: str = ""

    @property
    def wrong(self) -> bool:
        """Whether something harms the training."""
        return any(each.wrong for each in self.findings)

    def __str__(self) -> str:
        width = min(terminal_width(), 120)
        lines = [*self.looked, ""]
        for i, each in enumerate(self.findings):
            lines += textwrap.wrap(str(each), width, subsequent_indent=" " * 7)
            if each.do not in [later.do for later in self.findings[i + 1 : i + 2]]:  # said once, beneath the last
                lines += textwrap.wrap(f"do: {each.do}", width, initial_indent=" " * 7, subsequent_indent=" " * 11)
        number = sum(each.wrong for each in self.findings)
        verdict = f"{number} thing{'s' * (number != 1)} wrong" if number else "nothing wrong was found"
        notes = len(self.findings) - number
        return "\n".join([*lines, verdict + (f", {notes} note{'s' * (notes != 1)}" if notes else "")])

    def as_json(self) -> dict[str, Any]:
        """All of it as dicts, lists and strings. "schema" is 1; it grows when a name changes its meaning or goes."""
        return {
            "schema": SCHEMA,
            "wrong": self.wrong,
            "looked": self.looked,
            "findings": [each.as_json() for each in self.findings],
            "recipe": self.recipe_text,
        }

    def json(self, path: str | os.PathLike[str]) -> None:
        """Save `as_json()`."""
        Path(path).write_text(json.dumps(self.as_json(), indent=1) + "\n", encoding="utf-8")

    def html(self, path: str | os.PathLike[str]) -> None:
        """Write one page that holds everything and needs no network."""
        Path(path).write_text(filled(str(__package__), "doctor", str(self), self.as_json()), encoding="utf-8")

    def fix(self, path: str | os.PathLike[str]) -> None:
        """Write the least recipe that answers the findings, with the reasons in comments.

        Raises:
            HmpxError: no recipe answers them.
        """
        if self.recipe is None:
            told = "; what to do instead stands with each" if self.findings else ", and nothing was found"
            raise HmpxError(f"no recipe answers these findings{told}")
        Path(path).write_text(self.recipe_text, encoding="utf-8")
