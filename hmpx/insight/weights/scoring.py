"""Predicts what each way to hold a parameter does to the losses, from the FP32 run alone.

**The errors.** Beside the FP32 run, copies of the parameters take the same gradients at every step: with masters and
state in 8 bits, and with masters and state in BF16. The distance of their masters from the FP32 run is what the state
does by itself. What holding the weights does is computed: masters are rounded to BF16; stochastic rounding is a random
walk, see `Walk`.

**The losses.** With e the error of a way in one parameter, g the gradient of the loss of a batch at the FP32 weights
and g' the gradient at the weights with the errors of all parameters, the loss changes by (g + g') . e / 2 because of
this parameter: the trapezoid rule, exact where the loss is quadratic. So one gradient for each way scores all
parameters at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from hmpx.insight.tensors import Tensor
from hmpx.insight.tuning.course import Course, by_name, since
from hmpx.recipes.recipe import Recipe
from hmpx.updates.attach import attach
from hmpx.updates.holding.state_forms import StateDtype

Optimizer = torch.optim.Optimizer
FP32 = "float32"  # for `weights`: the parameter itself is FP32
WEIGHTS = ("stochastic", "split8", "split", FP32)
STATES: tuple[StateDtype, ...] = ("8bit", torch.bfloat16, torch.float32)
Part = str | torch.dtype  # of a way to hold a parameter: one of `WEIGHTS` or of `STATES`
_PLACES = {"stochastic": 8, "split8": 16}  # binary places that are kept of a weight's size


class Replay:
    """A copy of the model with masters and narrow state, beside the FP32 run.

    names: of the parameters that are held so.
    """

    def __init__(self, model: torch.nn.Module, optimizer: Optimizer, names: Sequence[str], state: StateDtype) -> None:
        self._model, self._optimizer = model, optimizer
        self._own = {name: by_name(model)[name] for name in names}
        start = {p: p.detach().clone() for p in self._own.values()}
        for p in self._own.values():
            p.grad = None
            p.data = p.data.bfloat16()
        wide = hasattr(torch.Tensor, "grad_dtype")
        self._grad_dtype = torch.float32 if wide else torch.bfloat16
        self.handle = attach(optimizer, "master", model=model, state_dtype=state, use_fp32_grad_acc=wide)
        self.handle.set_masters(start)

    def step(self, exact: torch.nn.Module) -> None:
        """Take the gradients of the FP32 run and step."""
        for (name, p), q in zip(by_name(self._model).items(), exact.parameters(), strict=True):
            dtype = self._grad_dtype if name in self._own else q.dtype
            p.grad = None if q.grad is None else q.grad.detach().to(dtype, copy=True)
        self._optimizer.step()

    @torch.no_grad()
    def errors(self, exact: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return how far the masters are from the weights of the FP32 run."""
        found = {}
        for name, p in self._own.items():
            masters = self.handle.masters_of(p)
            found[name] = (p.float() if masters is None else masters) - exact[name]
        return found


class Walk:
    """The random walk of a parameter that is rounded stochastically to some binary places, beside the FP32 run.

    Stochastic rounding moves a weight rarely, and then by a whole unit u of its last place: a short run of few elements
    may see none of that. So this is the error in the mean, with a random sign: an update of f u, whole units left out,
    adds f (1 - f) u^2 to its square.
    """

    def __init__(self, p: Tensor, seed: int, places: int = 8) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._sign = torch.randint(2, p.shape, generator=generator).to(p.device) * 2 - 1
        self._before, self._squares, self._places = p.detach().clone(), torch.zeros_like(p), places

    @torch.no_grad()
    def add(self, p: Tensor) -> None:
        """Note that a step has come to these weights."""
        unit = torch.ldexp(torch.ones_like(p), torch.frexp(p)[1] - self._places)
        part = ((p - self._before).abs() / unit).frac()
        self._squares += part * (1 - part) * unit * unit
        self._before.copy_(p)

    @property
    def error(self) -> Tensor:
        return self._squares.sqrt() * self._sign


class Scoring:
    """The FP32 run, with the ways to hold a parameter beside it.

    losses: of the run. states: how many tensors of a parameter's size the optimizer keeps. updates: what was counted of
    the updates.
    """

    def __init__(self, course: Course, names: Sequence[str], recipe: Recipe) -> None:
        """Train under a recipe with FP32 weights, and score at each moment."""
        self._course, self._names, self.states = course, names, 0
        self._changes: dict[tuple[str, Part], list[list[float]]] = {}
        self._walks: dict[tuple[str, str], Walk] = {}
        self._replays = {state: Replay(*course.copies(), names, state) for state in STATES[:-1]}
        self.updates = self._replays[torch.bfloat16].handle.updates()
        try:
            self.losses = course.run(recipe, before_step=self._step, at_moment=self._score)
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
        for seed, name in enumerate(self._names):
            for way, places in _PLACES.items():
                self._walks.setdefault((way, name), Walk(own[name], seed, places)).add(own[name])

    def _score(self, model: torch.nn.Module) -> None:
        self._walk(model)
        own = by_name(model)
        exact = {name: own[name].detach().clone() for name in self._names}
        errors: dict[Part, dict[str, Tensor]] = {state: each.errors(exact) for state, each in self._replays.items()}
        errors["stochastic"] = {name: self._walks["stochastic", name].error for name in exact}
        walked = {name: exact[name] + self._walks["split8", name].error for name in exact}
        errors["split8"] = {name: w.bfloat16().float() - exact[name] for name, w in walked.items()}
        errors["split"] = {name: w.bfloat16().float() - w for name, w in exact.items()}
        params = [own[name] for name in self._names]
        before = [self._course.gradients(model, batch, params) for batch in self._course.looked_at(model)]
        for part, error in errors.items():
            with torch.no_grad():
                for name in self._names:
                    own[name].add_(error[name])
            after = [self._course.gradients(model, batch, params) for batch in self._course.looked_at(model)]
            with torch.no_grad():
                for name in self._names:
                    own[name].copy_(exact[name])
            for i, name in enumerate(self._names):
                both = zip(before, after, strict=True)
                change = [float(((g[i] + h[i]).double() * error[name]).sum() / 2) for g, h in both]
                self._changes.setdefault((name, part), []).append(change)

    def effect(self, names: Sequence[str], part: Part) -> Tensor:
        """Return how a way changes the losses since the beginning, if some parameters are held so, FP64 [looks]."""
        if part in (FP32, torch.float32):  # these have no error
            return torch.zeros(self.losses[1:].numel(), dtype=torch.float64)
        changes = [self._changes[name, part] for name in names]
        return since(torch.tensor(changes, dtype=torch.float64).sum(0)).flatten()


def _states(optimizer: Optimizer, p: Tensor) -> int:
    """Return how many tensors of its own size an optimizer keeps for a parameter by now."""
    state = optimizer.state.get(p)
    values = state.values() if isinstance(state, Mapping) else ()
    like = [v for v in values if isinstance(v, Tensor) and v.shape == p.shape and v.is_floating_point()]
    return len(like) - (not p.dim() and "step" in (state or {}))
