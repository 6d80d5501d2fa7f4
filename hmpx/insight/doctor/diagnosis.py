"""`Diagnosis`: what the doctor has found, to be printed, saved, or answered by a recipe."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

from hmpx.base.files import write
from hmpx.errors import HmpxError
from hmpx.insight.finding import Problem
from hmpx.insight.report import Bars, Grid, Lines, Report, number
from hmpx.recipes.recipe import Recipe


@dataclass
class Diagnosis(Report):
    """What is wrong with the precision of a training. It prints as one screen, the worst first.

    Attributes:
        findings: a `Problem` for each thing that was found: `kind`, `wrong`, `said`, `do`, `where`, `names`, `ops`.
        wrong: whether one of them harms the training; the others are notes.
        looked: what was looked at, in words: how many steps, which of them for what, which optimizers.
        not_checked: what could not be looked at, and why.
        recipe: the smallest `hmpx.Recipe` that answers the findings; None if none does. reasons: by key of the
            recipe, why. recipe_text: the recipe as a file, with the reasons as comments.

    `html(path)` writes a page, `json(path)` saves `as_json()`, `fix(path)` writes `recipe_text`.
    """

    _schema = 1
    findings: list[Problem] = field(default_factory=list)
    looked: list[str] = field(default_factory=list)
    not_checked: list[str] = field(default_factory=list)
    recipe: Recipe | None = None
    reasons: dict[str, str] = field(default_factory=dict)
    recipe_text: str = ""
    _beyond: ClassVar[str] = "; what low precision does to the gradients, python -m hmpx compare measures"

    @property
    def wrong(self) -> bool:
        """Return whether something harms the training."""
        return any(each.wrong for each in self.findings)

    @property
    def status(self) -> int:
        """The exit status of the command: 1 if something is wrong; 2 if nothing is in what could be looked at, but
        something could not; 0 if nothing is."""
        return 1 if self.wrong else 2 if self.not_checked else 0

    def _text(self, width: int) -> str:
        width = min(width, 120)
        lines = [*self.looked, ""]
        for i, each in enumerate(self.findings):
            lines += textwrap.wrap(str(each), width, subsequent_indent=" " * 7)
            for figure in each.evidence:
                lines += textwrap.wrap(figure, width, initial_indent=" " * 7, subsequent_indent=" " * 7)
            after = self.findings[i + 1 : i + 2]
            if [(each.to_do, each.wrong)] != [(one.to_do, one.wrong) for one in after]:  # said once, below the last
                lines += textwrap.wrap(f"do: {each.to_do}", width, initial_indent=" " * 7, subsequent_indent=" " * 11)
        for reason in self.not_checked:
            lines += textwrap.wrap(f"not checked: {reason}", width, subsequent_indent=" " * 7)
        wrong = sum(each.wrong for each in self.findings)
        notes = len(self.findings) - wrong
        verdict = f"{number(wrong, 'thing')} wrong" if wrong else f"nothing wrong was found{self._beyond}"
        if self.not_checked and not wrong:
            verdict = "not everything was checked; the rest has nothing wrong"
        return "\n".join([*lines, verdict + (f", {number(notes, 'note')}" if notes else "")])

    def as_json(self) -> dict[str, Any]:
        """All of it as dicts, lists and strings. "schema" is 1; it grows when a name changes its meaning or goes."""
        return {
            "schema": self._schema,
            "wrong": self.wrong,
            "looked": self.looked,
            "not_checked": self.not_checked,
            "findings": [each.as_json() for each in self.findings],
            "recipe": self.recipe_text,
        }

    @property
    def unfixed(self) -> str:
        """Why there is no recipe."""
        return (
            "no recipe answers these findings: follow each finding's do"
            if self.findings
            else "nothing to fix was found"
        )

    def _title(self) -> tuple[str, str]:
        titles = ("Nothing wrong was found", "Something is wrong with the precision", "Not everything was checked")
        return "doctor", titles[self.status]

    def _lines(self) -> list[str]:
        return self.looked

    def _sections(self) -> Iterator[Grid | Lines | Bars]:
        for each in self.findings:
            yield Lines(
                each.kind, [each.where, each.said, *each.evidence, f"Do: {each.do}"], each.wrong, names=each.names
            )
        yield Lines("Not checked", self.not_checked)
        yield Lines("The smallest recipe that answers them", self.recipe_text.splitlines(), closed=True)

    def fix(self, path: str | os.PathLike[str]) -> None:
        """Write the smallest recipe that answers the findings, with the reasons as comments.

        Raises:
            HmpxError: no recipe answers them, or the file cannot be written and is as it was.
        """
        if self.recipe is None:
            raise HmpxError(self.unfixed)
        write(path, self.recipe_text)
