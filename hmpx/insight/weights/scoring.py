"""Scores the effect of each way to hold a parameter on the losses, to second order, from the FP32 run alone.

With e the error of a way in one parameter, g the gradient of the loss of a batch at the FP32 weights and g' that at the
weights with the errors of all parameters, the loss changes by (g + g') . e / 2 because of this parameter: the trapezoid
rule, exact where the loss is quadratic. So one gradient for each way scores all parameters at once.

Stochastic rounding moves a weight rarely, and then by a whole unit u of its last place: a short run of few elements may
see none of that. So its error is not the one that it happens to make but the one that it makes in the mean: an update
of f u, whole units left out, adds f (1 - f) u^2 to the square. Its sign is random.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hmpx.insight.tensors import Tensor
from hmpx.insight.tuning.course import Course, by_name, since
from hmpx.insight.weights.replays import EXACT, Alternative, Replay, rounded
from hmpx.updates.lost_updates import Updates

Optimizer = torch.optim.Optimizer


class Walk:
    """The random walk of a parameter that is rounded stochastically, beside the FP32 run.

    error: of the size that it has in the mean, with a random sign.
    """

    def __init__(self, p: Tensor, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._sign = torch.randint(2, p.shape, generator=generator).to(p.device) * 2 - 1
        self._before, self._squares = p.detach().clone(), torch.zeros_like(p)

    @torch.no_grad()
    def add(self, p: Tensor) -> None:
        """A step has come to these weights."""
        unit = torch.ldexp(torch.ones_like(p), torch.frexp(p)[1] - 8)
        part = ((p - self._before).abs() / unit).frac()
        self._squares += part * (1 - part) * unit * unit
        self._before.copy_(p)

    @property
    def error(self) -> Tensor:
        return self._squares.sqrt() * self._sign


class Scoring:
    """The FP32 run, with the ways beside it.

    losses: of the run. changes: of the losses by an alternative in one parameter, [1 + moments, batches]. states: how
    many tensors of a parameter's size the optimizer keeps. updates: what was counted.
    """

    def __init__(self, course: Course, names: Sequence[str]) -> None:
        self._course, self._names = course, names
        self.changes: dict[str, dict[Alternative, list[list[float]]]] = {name: {} for name in names}
        self.states = 0
        self.updates: Updates | None = None
        self.losses = torch.empty(0)
        self._replays: dict[Alternative, Replay] = {}
        self._walks: dict[str, Walk] = {}

    def run(self, recipe: Any) -> None:
        """Train, and score at each moment."""
        for which in ("stochastic", "split8", "8bit", torch.bfloat16):
            self._replays[which] = Replay(*self._course.copies(), self._names, which)
        self.updates = self._replays["stochastic"].updates
        try:
            self.losses = self._course.run(recipe, before_step=self._step, at_moment=self._score)
        finally:
            for replay in self._replays.values():
                replay.handle.detach()
            self._replays = {}

    def _step(self, model: torch.nn.Module, optimizer: Optimizer) -> None:
        self._walk(model)
        self.states = max(self.states, *(_states(optimizer, by_name(model)[name]) for name in self._names))
        for replay in self._replays.values():
            replay.step(model)

    def _walk(self, model: torch.nn.Module) -> None:
        own = by_name(model)
        for name in self._names:
            if name not in self._walks:
                self._walks[name] = Walk(own[name], len(self._walks))
            self._walks[name].add(own[name])

    def _score(self, model: torch.nn.Module) -> None:
        self._walk(model)
        own = by_name(model)
        exact = {name: own[name].detach().clone() for name in self._names}
        errors = {which: replay.errors(exact) for which, replay in self._replays.items()}
        errors |= {"split": rounded(exact), "stochastic": {name: walk.error for name, walk in self._walks.items()}}
        params = [own[name] for name in self._names]
        base = [self._course.gradients(model, batch, params) for batch in self._course.looked_at(model)]
        for which, found in errors.items():
            with torch.no_grad():
                for name in self._names:
                    own[name].add_(found[name])
            shifted = [self._course.gradients(model, batch, params) for batch in self._course.looked_at(model)]
            with torch.no_grad():
                for name in self._names:
                    own[name].copy_(exact[name])
            for i, name in enumerate(self._names):
                both = zip(base, shifted, strict=True)
                change = [float(((g[i] + h[i]).double() * found[name]).sum() / 2) for g, h in both]
                self.changes[name].setdefault(which, []).append(change)

    def vector(self, names: Sequence[str], which: Alternative) -> Tensor:
        """How an alternative in some parameters changes the losses since the beginning, FP64 [moments x batches]."""
        if which in EXACT:
            return torch.zeros(self.losses[1:].numel(), dtype=torch.float64)
        changes = [self.changes[name][which] for name in names]
        return since(torch.tensor(changes, dtype=torch.float64).sum(0)).flatten()


def _states(optimizer: Optimizer, p: Tensor) -> int:
    """How many tensors of its own size an optimizer keeps for a parameter by now."""
    state = optimizer.state.get(p)
    values = state.values() if isinstance(state, Mapping) else ()
    like = [v for v in values if isinstance(v, Tensor) and v.shape == p.shape and v.is_floating_point()]
    return len(like) - (not p.dim() and "step" in (state or {}))
