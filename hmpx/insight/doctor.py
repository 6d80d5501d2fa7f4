"""`doctor`: a region that looks at a training as it is, by a `Capture` with all looks, and finds a recipe."""

from __future__ import annotations

import contextlib
import os
import sys
import textwrap
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NoReturn

from hmpx.base import process_state
from hmpx.base.files import write
from hmpx.errors import HmpxError
from hmpx.insight.capture import Capture
from hmpx.insight.dispatch import unwatched
from hmpx.insight.finding import Finding, in_words, merged
from hmpx.insight.fix import Base, Script, legal, recipe_for
from hmpx.insight.looks import checks, dtypes, writes
from hmpx.insight.looks.cells import Cells
from hmpx.insight.looks.gradients import Scale, Sums
from hmpx.insight.looks.lost_updates import PassedLow, Updates
from hmpx.insight.looks.nonfinite import Nonfinite
from hmpx.insight.looks.replicas import Replicas
from hmpx.insight.looks.steps import window_of
from hmpx.insight.precision import Precision, differences, precision_of
from hmpx.insight.report import Bars, Grid, Lines, Report, number
from hmpx.insight.tensors import has_numbers
from hmpx.recipes.recipe import Recipe
from hmpx.updates.stepping.names import parameters


@dataclass
class Diagnosis(Report):
    """What is wrong with the precision of a training. It prints as one screen, the worst first.

    Attributes:
        findings: a `Finding` for each thing that was found: `kind`, `wrong`, `said`, `do`, `where`, `names`, `ops`.
        wrong: whether one of them harms the training; the others are notes.
        precision: what everything is in, the table that is printed first: a `Precision`.
        looked: what was looked at, in words: how many steps, which of them for what, which optimizers.
        not_checked: what could not be looked at, and why.
        recipe: the smallest `hmpx.Recipe` that answers the findings; None if none does. reasons: by key of the
            recipe, why. recipe_text: the recipe as a file, with the reasons as comments.
        all_rows: whether the table is printed whole, and not its first ten rows alone.

    `html(path)` writes a page, `json(path)` saves `as_json()`, `fix(path)` writes `recipe_text`.
    """

    _schema = 1
    findings: list[Finding] = field(default_factory=list)
    precision: Precision = field(default_factory=Precision)
    looked: list[str] = field(default_factory=list)
    not_checked: list[str] = field(default_factory=list)
    recipe: Recipe | None = None
    reasons: dict[str, str] = field(default_factory=dict)
    recipe_text: str = ""
    all_rows: bool = False
    _beyond: ClassVar[str] = "; what low precision does to the gradients, python -m hmpx compare measures"

    @property
    def wrong(self) -> bool:
        """Whether something harms the training."""
        return any(each.wrong for each in self.findings)

    @property
    def status(self) -> int:
        """The exit status of the command. 1: something is wrong. 2: nothing wrong was found, but something could not be
        looked at. 0: all was looked at, and nothing is wrong."""
        return 1 if self.wrong else 2 if self.not_checked else 0

    def _text(self, width: int) -> str:
        width = min(width, 120)
        lines = [*self.precision.lines(width, self.all_rows), *self.looked, ""]
        for before, each in zip([None, *self.findings], self.findings, strict=False):
            lines += each.lines(width, repeats=before is not None and before.answer == each.answer)
        for reason in self.not_checked:
            lines += textwrap.wrap(f"not checked: {reason}", width, subsequent_indent=" " * 7)
        wrong = sum(each.wrong for each in self.findings)
        notes = len(self.findings) - wrong
        verdict = f"{number(wrong, 'thing')} wrong" if wrong else f"nothing wrong was found{self._beyond}"
        if self.not_checked and not wrong:
            verdict = "not everything was checked; the rest has nothing wrong"
        return "\n".join([*lines, verdict + (f", {number(notes, 'note')}" if notes else "")])

    def as_json(self) -> dict[str, Any]:
        """Return all of it as objects of JSON. "schema" is 1; it grows when a name changes its meaning or goes."""
        return {
            "schema": self._schema,
            "wrong": self.wrong,
            "precision": self.precision.as_json(),
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

    @property
    def _title(self) -> tuple[str, str]:
        titles = ("Nothing wrong was found", "Something is wrong with the precision", "Not everything was checked")
        return "doctor", titles[self.status]

    def _lines(self) -> list[str]:
        return self.looked

    def _sections(self) -> Iterator[Grid | Lines | Bars]:
        yield self.precision.grid()
        yield from (each.section() for each in self.findings)
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


class Enough(BaseException):
    """Ends the script, since it has done as many steps as were asked for."""


def end() -> NoReturn:
    """End the script. Its `finally` blocks run, and may save something."""
    said = "hmpx: doctor is ending the script; what its `finally` blocks save is of an early step"
    with contextlib.suppress(OSError, ValueError, AttributeError):  # the script may have closed `stderr`
        print(said, file=sys.stderr)
    raise Enough


class Examination(Capture):
    """A `doctor` that is open: a capture with all looks.

    Attributes:
        found: the `Diagnosis` that `finish` fills. is_ending: whether it has begun to end the program.
    """

    def __init__(
        self,
        found: Diagnosis,
        steps: int | None,
        at: Collection[int],
        base: Base | None,
        heard: Callable[[Examination], None],
        expected: dict[str, Any] | None,
    ) -> None:
        self._expected = expected
        self.found, self.is_ending, self._heard = found, False, heard
        self._enough, self._at, self._base = steps and max(steps, *at, 0), at, base
        self._cells, self._replicas = Cells(self), Replicas()
        self._updates = Updates()
        looks = [checks.OPS, Nonfinite(), dtypes.CASTS, dtypes.EarlyUpcasts(), writes.WRITES, dtypes.PositionTables()]
        around = {each for step in at for each in (step - 1, step)}  # of a loss that is NaN, the gradient before
        super().__init__(
            [*looks, dtypes.PRODUCTS, Scale(), PassedLow(), Sums(), self._cells, self._updates, self._replicas],
            around,
        )

    def end_if_enough(self, steps: int) -> None:
        if self._enough is not None and steps >= self._enough:
            if self.is_ending:  # the script has caught `Enough`, and goes on
                raise Enough
            self.is_ending = True
            self._heard(self)
            end()
        if window_of(steps) and not window_of(steps + 1):
            self._heard(self)

    def so_far(self) -> Diagnosis:
        """Return what was found by now on this rank. It changes nothing of what is found later."""
        found, self.found = self.found, Diagnosis()
        with self.paused():
            self.finish(alone=True)
        now, self.found = self.found, found
        return now

    def finish(self, alone: bool = False) -> None:
        """Fill `found` with what was found. alone: leave the other ranks out."""
        with self._cells.as_stepped():
            self._finish(alone)

    def _finish(self, alone: bool) -> None:
        if not alone:
            self.close()
        found, trained = self.found, dict.fromkeys([*self.trained, *self._updates.stepped])
        names = {p: self.names.get(p) or f"parameter {i} of shape {tuple(p.shape)}" for i, p in enumerate(trained)}
        findings, unchecked = list[Finding](), [*self._not_checked()]
        with unwatched(self.trouble, is_whole=True):
            self.notes.copies = {*self._cells.whole()}
        for look in self.looks:
            with unwatched(self.trouble, is_whole=True):
                findings += [*look.findings(self.notes, names)]
            with unwatched(self.trouble, is_whole=True):
                unchecked += [*look.unchecked(self.notes, names)]
        with unwatched(self.trouble, is_whole=True):
            found.precision = precision_of(self, self._cells, self._updates.moves, self._replicas.world)
            if self._expected is not None and not self._replicas.rank:  # the first rank says it for all
                findings += differences(self._expected, found.precision.as_json())
        if not alone:
            with unwatched(self.trouble, is_whole=True):
                findings, unchecked = self._replicas.gathered(findings, unchecked, names, self.optimizers)
        found.findings[:] = sorted(merged(findings), key=lambda each: (not each.wrong, -each.weight))
        with unwatched(self.trouble, is_whole=True):
            found.findings[:] = [replace(each, do=in_words(each.do, self.words)) for each in found.findings]
            script = Script(self)
            found.findings[:] = [legal(each, script) for each in found.findings]
            found.recipe, found.reasons, found.recipe_text = recipe_for(found.findings, script, self._base)
        found.looked[:] = self._looked()
        found.not_checked[:] = dict.fromkeys(unchecked)
        found.not_checked += [f"what raised when it was looked at: {each}" for each in self.trouble]

    def _looked(self) -> list[str]:
        optimizers, steps = self.optimizers, max(self.steps.values(), default=0)
        steps = max(steps, self.iterations.count) if steps else 0
        classes = ", ".join(dict.fromkeys(type(each).__name__ for each in optimizers))
        looked = self._updates.looked
        beside = f"; beside {looked} of them, float32 copies took the same step" if looked else ""
        lines = [f"{number(steps, 'step')} of {classes}{beside}"] if steps else []
        if watched := self.iterations.watched:
            word = "iteration" if len(watched) == 1 else "iterations"
            lines += [f"looked at ops in {word} {', '.join(map(str, watched[:9]))}"]
            lines[-1] += " and so on" if len(watched) > 9 else ""
            if left := self.iterations.passed_over:
                lines[-1] += f"; {number(left, 'other')} would have taken over a twentieth of the time"
        if lines and self.is_ending:
            do = (
                "--steps 0 lets it run on, and --at N looks at step N"
                if process_state.script
                else "at=[N] looks at step N"
            )
            lines += [f"it was ended after {number(self._enough or 0, 'step')}: {do}"]
        return lines or ["nothing was looked at"]

    def _not_checked(self) -> Iterator[str]:
        done = self.iterations.count
        yield from (f"what another thread did: {each}" for each in self.elsewhere)
        if not self.optimizers and not self.notes.are_steps and not self.elsewhere:
            yield "updates: no torch.optim.Optimizer has stepped"
        for each in self.optimizers:
            freed = sum(not has_numbers(p) for p in parameters(each))
            if freed:
                said = f"{number(freed, 'parameter')} of {type(each).__name__} have no memory, as FSDP2 has freed whole"
                yield f"{said} parameters that it was made with: make the optimizer before the first forward pass"
        if self.compiles or self.hides:
            yield "ops of compiled code: set TORCH_COMPILE_DISABLE=1 to have them looked at"
        elif not self.iterations.watched:
            yield f"ops: the script ended after {number(done, 'iteration')}, the first and the third are looked at"
        for step in sorted({*self._at} - {*self.iterations.watched}) if not self.compiles else ():
            yield f"step {step}: " + (
                f"the script ended after {number(done, 'iteration')}"
                if step > done
                else "its ops, as code was compiled or another dispatch mode was open"
            )
        yield from (f"{each} ({number(n, 'time')})" for each, n in self.notes.unseen.items() if n)


def doctor(steps: int | None = None, at: Collection[int] = ()) -> contextlib.AbstractContextManager[Diagnosis]:
    """Look at a training as it is, and say what is wrong with its precision.

    Beside steps 2 to 9, 20 to 27, 40 to 47, 80 to 87 and so on, FP32 copies of weights in BF16 and FP16 take the same
    steps. Ops are looked at in iterations 1, 3, 11, 22, 40, 41, 50 and every 13th from there, as long as that takes
    a second or a twentieth of the time. Nothing is converted, and the training has the bits that it has without. What
    could not be looked at is told: compiled code hides its ops. The thread that opens it is looked at, on each rank its
    own part.

    Args:
        steps: after so many steps of an optimizer, leave the region; None: look on until it ends.
        at: iterations, from 1, whose ops are looked at in any case.

    Returns:
        A `Diagnosis`, which is complete when the region ends, by an exception as well.

    Raises:
        HmpxError: a doctor is at work already, or `steps` or one of `at` is no positive integer.

    Example:
        >>> with hmpx.doctor() as found:
        ...     for _ in range(4):
        ...         model(inputs).sum().backward()
        ...         optimizer.step()
        >>> found.wrong, [each.kind for each in found.findings]
        (False, [])
    """
    return examined(steps, at)


@contextlib.contextmanager
def examined(
    steps: int | None,
    at: Collection[int],
    base: Base | None = None,
    heard: Callable[[Examination], None] = lambda examination: None,
    expected: dict[str, Any] | None = None,
) -> Iterator[Diagnosis]:
    """Do what `doctor` does.

    base: the recipe that the program runs under; the recipe that is found extends it. heard: is called with the
    examination at the start, when a window of steps is over, and before the program is ended. expected: the table of an
    earlier run, to which this one is to be equal.
    """
    for step in at if steps is None else (steps, *at):
        if not isinstance(step, int) or isinstance(step, bool) or step < 1:
            raise HmpxError(f"doctor takes numbers of steps from 1 on, not {step!r}")
    if process_state.examined:
        raise HmpxError("hmpx.doctor is open already: leave its `with` block before you open another")
    found = Diagnosis(not_checked=["all of it: the region is still open"])
    examination = Examination(found, steps, at, base, heard, expected)
    try:
        process_state.examined.append(examination)
        heard(examination)
        with examination.hooks():
            yield found
    except Enough:
        pass
    finally:
        process_state.examined.clear()  # it holds this one, or none after an interrupt at the start
        examination.finish()
