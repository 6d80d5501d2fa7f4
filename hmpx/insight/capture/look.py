"""`Look`: what is looked for in a run that a `Capture` sees, and what was found."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch

from hmpx.insight.capture.places import Notes, OpCall
from hmpx.insight.finding import Names, Problem

Optimizer = torch.optim.Optimizer


class Look:
    """What is looked for. A look overrides what it needs: `Capture` calls each, and no op that these run is looked at.

    An error in a look reaches no program: it is told among what was not checked.

    Attributes:
        kind: of the findings, in a word or two.
        stages: the stages of an iteration whose ops `see` gets: "set up" before the first forward pass, "forward",
            "backward", "step".
    """

    stages: Collection[str] = ()

    def see(self, notes: Notes, op: OpCall) -> None:
        """One op has run, in an iteration whose ops are looked at, and in one of `stages`."""

    def met(self, optimizer: Optimizer, where: str) -> None:
        """An optimizer steps for the first time, at this line."""

    def loss(self, notes: Notes, losses: Sequence[torch.Tensor]) -> None:
        """A backward pass begins with these losses."""

    def begin(self, optimizer: Optimizer, iteration: int) -> None:
        """The gradients of a step are there. iteration: from 1, the one that this step ends."""

    def end(self, optimizer: Optimizer, evaluations: int) -> None:
        """The step is done. evaluations: how often it has called a closure."""

    def close(self, optimizers: Iterable[Optimizer]) -> None:
        """The run is over."""

    def findings(self, notes: Notes, names: Names) -> Iterable[Problem]:
        """Say what was found. names: of the parameters that were stepped."""
        return ()

    def unchecked(self, notes: Notes, names: Names) -> Iterable[str]:
        """Say what could not be looked at, and why."""
        return ()


class OpLook(Look):
    """A look at ops alone, made of two functions."""

    def __init__(
        self,
        see: Callable[[Notes, OpCall], None],
        findings: Callable[[Notes, Names], Iterable[Problem]],
        *stages: str,
    ) -> None:
        self._see, self._findings, self.stages = see, findings, stages

    def see(self, notes: Notes, op: OpCall) -> None:
        self._see(notes, op)

    def findings(self, notes: Notes, names: Names) -> Iterable[Problem]:
        return self._findings(notes, names)


def of_stage(looks: Iterable[Look]) -> dict[str, list[Callable[[Notes, OpCall], Any]]]:
    """Return what looks at the ops of each stage."""
    return {stage: [each.see for each in looks if stage in each.stages] for stage in STAGES}


STAGES = ("set up", "forward", "backward", "step")
