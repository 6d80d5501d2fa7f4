"""Trains copies of a model for a few steps, again and again from the same beginning: in FP32, and under recipes.

**What is compared.** Two FP32 runs that see the batches in different orders come to different losses, and both are as
good. A run under a recipe is compared with the FP32 run of the same order: its distance is the difference of their
losses, in units of the distance between the two FP32 runs. Losses are looked at for a few batches at a few moments of
the run. Each is taken less its value at the beginning of the run, for the first rounding of the weights to BF16 shifts
all of them and has nothing to do with training.

**The beginning.** Later in a training, an FP32 master lies anywhere between two BF16 numbers. A master that began as a
BF16 number would have to go half the way to the next one before the weight moves, which may take longer than a short
run. So weights that BF16 holds exactly are moved by up to half the distance to the next number, in all runs alike.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch

from hmpx import conversion
from hmpx.errors import HmpxError
from hmpx.insight.comparing.subject import Subject, check_loss
from hmpx.insight.run_state import eager, kept
from hmpx.insight.tensors import LOW, Tensor
from hmpx.insight.tensors import name as dtype_name
from hmpx.insight.tuning.runs import Progress
from hmpx.ops.computing.kernels import KernelsAsked
from hmpx.ops.policies.policy import Policy
from hmpx.recipes.module_patterns import check_names, rules_for
from hmpx.recipes.prepare import cast_model
from hmpx.recipes.recipe import Recipe
from hmpx.updates.attach import attach, attached
from hmpx.updates.ranks.checks import several_ranks
from hmpx.updates.stepping.names import names_in, parameters

Optimizer = torch.optim.Optimizer
Making = Optimizer | Callable[[list[tuple[str, torch.nn.Parameter]]], Optimizer]
MAKE = functools.partial(torch.optim.AdamW, lr=1e-3)  # where no optimizer is given
_MOMENTS, _LOOKED_AT = 4, 4  # at how many moments of a run losses are looked at, and of how many batches


class RunDistance(NamedTuple):
    """How far a run is from the FP32 run of the same order, in units of the distance of another order.

    error: root mean square of the differences of losses. bias: their mean; above zero, losses are larger.
    """

    error: float
    bias: float

    @property
    def size(self) -> float:
        """The error, or twice the bias where that is more: noise goes both ways."""
        return max(self.error, 2 * self.bias)


class Course:
    """A training run of some steps: a model, an optimizer, batches in a random order.

    asked: the function that a user has called, for errors. moments: the steps after which losses are looked at, counted
    from 1.
    """

    def __init__(
        self, model: Any, optimizer: Any, batches: Any, loss: Any, steps: int, seed: int, asked: str, progress: Progress
    ) -> None:
        if loss is None:
            raise HmpxError(f"{asked}: it needs a loss, called as loss(model, *batch)")
        self.batches = Subject(model, batches, loss, None, asked).batches
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 2:
            raise HmpxError(f"{asked}: steps={steps!r} is no number of steps; a run takes two at least, better fifty")
        if not isinstance(optimizer, Optimizer) and not callable(optimizer):
            raise HmpxError(
                f"{asked}: optimizer is a {type(optimizer).__name__}, neither a torch.optim.Optimizer nor a function "
                "that makes one of named parameters, such as functools.partial(torch.optim.AdamW, lr=1e-3)"
            )
        if several_ranks():
            raise HmpxError(f"{asked}: it trains copies of the model in one process; call it in a process of its own")
        check_in_fp32(model, asked)
        if len(self.batches) < 2:
            raise HmpxError(
                f"{asked}: one batch has no order: how far two orders of batches come apart is the scale of every "
                "error; give two or more that differ"
            )
        self._model, self._optimizer, self._loss, self.steps, self._seed = model, optimizer, loss, steps, seed
        self._asked, self._progress = asked, progress
        self.moments = {math.ceil(steps * (i + 1) / _MOMENTS) for i in range(_MOMENTS)}
        self._start = {name: between(p, seed) for name, p in by_name(model).items() if p.is_floating_point()}
        count = min(_LOOKED_AT, len(self.batches))
        self._looked_at = [self.batches[i * len(self.batches) // count] for i in range(count)]

    def copies(self) -> tuple[torch.nn.Module, Optimizer]:
        """Return copies of the model and of the optimizer, which holds the parameters of that copy."""
        given = self._optimizer if isinstance(self._optimizer, Optimizer) else None
        if given is not None:
            if set(parameters(given)).isdisjoint(self._model.parameters()):
                raise HmpxError(f"{self._asked}: the optimizer holds no parameter of the model")
            if attached(given) is not None:
                raise HmpxError(f"{self._asked}: the optimizer is attached; hmpx.detach(optimizer) first")
        try:
            memo: dict[int, Any] = {}
            model, optimizer = copy.deepcopy((self._model, given), memo)
            if given is not None:  # torch copies groups and state alone
                lacking = {key: value for key, value in vars(given).items() if key not in vars(optimizer)}
                lacking.pop("step", None)  # a scheduler's, around the class's own
                vars(optimizer).update(copy.deepcopy(lacking, memo))
        except Exception as error:
            raise HmpxError(f"{self._asked}: it trains copies, and the model cannot be copied: {error}") from error
        with torch.no_grad():
            for name, p in by_name(model).items():
                if name in self._start:
                    p.copy_(self._start[name])
        if optimizer is None:
            optimizer = cast(Callable, self._optimizer)(list(model.named_parameters()))
        if not isinstance(optimizer, Optimizer):
            raise HmpxError(f"{self._asked}: optimizer(named_parameters) gave a {type(optimizer).__name__}")
        closure = inspect.signature(type(optimizer).step).parameters.get("closure")
        if closure is not None and closure.default is closure.empty:
            raise HmpxError(f"{self._asked}: {type(optimizer).__name__} wants a closure, which it cannot give")
        if attached(optimizer) is not None:
            raise HmpxError(
                f"{self._asked}: a recipe is in force (hmpx.activate) and has attached it; hmpx.restore() first"
            )
        return model, optimizer

    def run(
        self,
        recipe: Recipe | None,
        order: int = 0,
        before_step: Callable[[torch.nn.Module, Optimizer], None] | None = None,
        at_moment: Callable[[torch.nn.Module], None] | None = None,
    ) -> Tensor:
        """Train under a recipe. Return the losses, FP64 [1 + moments, batches looked at]; the first are from before.

        Args:
            recipe: None: in FP32, ops as they are.
            order: of the batches, and what random ops draw.
            before_step: is called when gradients are there. at_moment: each time that the losses were looked at.
        """
        model, optimizer = self.copies()
        generator = torch.Generator().manual_seed(self._seed + order)
        numbers = torch.randint(len(self.batches), (self.steps,), generator=generator).tolist()
        losses: list[list[float]] = []

        def look() -> None:
            with torch.no_grad():
                losses.append([float(self.loss_of(model, batch)) for batch in self.looked_at(model)])
            if at_moment is not None:
                at_moment(model)

        with self._under(recipe, model, optimizer), kept(None):
            torch.manual_seed(self._seed + order)
            look()
            for step, number in enumerate(numbers, 1):
                optimizer.zero_grad()
                self.loss_of(model, self.batches[number]).backward()
                self._progress.step(f"training, run {order}")
                if before_step is not None:
                    before_step(model, optimizer)
                optimizer.step()
                if step in self.moments:
                    look()
        return torch.tensor(losses, dtype=torch.float64)

    def looked_at(self, model: torch.nn.Module) -> Iterator[tuple]:
        """Return the batches whose losses are looked at. For each, random ops draw the same numbers in every run."""
        for batch in self._looked_at:
            with kept(model):
                torch.manual_seed(self._seed)
                yield batch

    def loss_of(self, model: torch.nn.Module, batch: tuple) -> Tensor:
        """Return the loss of a batch, with its graph."""
        loss = self._loss(model, *batch)
        check_loss(loss, self._asked, torch.is_grad_enabled())
        return loss

    def gradients(self, model: torch.nn.Module, batch: tuple, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Return the gradients of the loss of a batch by some parameters."""
        found = torch.autograd.grad(self.loss_of(model, batch), parameters, allow_unused=True)
        self._progress.step("scoring")
        return [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]

    @contextlib.contextmanager
    def _under(self, recipe: Recipe | None, model: torch.nn.Module, optimizer: Optimizer) -> Iterator[None]:
        """Make the copies as a recipe says, and put its op lists in force until the end."""
        with contextlib.ExitStack() as undo, eager(), torch.enable_grad():
            policy, rules = None, []
            kernels: KernelsAsked = "native"
            if recipe is not None:
                check_names([model], recipe)
                policy, rules, kernels = recipe.policy(), rules_for([model], recipe), recipe.kernels
                with contextlib.ExitStack() as cast_back:
                    cast_model(model, recipe, cast_back)
                    cast_back.pop_all()
                held, own = set(parameters(optimizer)), by_name(model)
                masters = {p: self._start[name] for name, p in own.items() if p.dtype is torch.bfloat16 and p in held}
                if masters:
                    handle = attach(optimizer, model=model, **vars(recipe.settings()))
                    undo.callback(handle.detach)
                    handle.set_masters(masters)
            if policy is not None or conversion.installed() is not None:
                policy = policy or Policy(bf16=(), fp32=(), promote=())
                undo.enter_context(conversion.install(policy, kernels=kernels, rules=rules))
            yield


def check_in_fp32(model: torch.nn.Module, asked: str) -> None:
    """Check that a model has no parameters in low precision or FP64."""
    for name, p in model.named_parameters():
        if p.dtype in LOW or p.dtype is torch.float64:
            raise HmpxError(
                f"{asked}: parameter {name!r} is {dtype_name(p.dtype)}; it begins with a model in FP32: model.float(), "
                "or the model as it is made"
            )


def by_name(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return the parameters of a model by their plain names, which rules go by."""
    return {name: p for p, name in names_in(model).items()}


def between(p: Tensor, seed: int) -> Tensor:
    """Return FP32 weights; each that BF16 holds exactly is moved to somewhere between two BF16 numbers."""
    start = p.detach().clone()
    generator = torch.Generator().manual_seed(seed)
    mantissa, exponent = torch.frexp(start)
    shift = (torch.rand(p.shape, generator=generator).to(p.device) - 0.5) * 0.98
    # From a power of two towards zero, numbers lie twice as close.
    shift = torch.ldexp(torch.where(mantissa.abs() == 0.5, shift.abs() * mantissa.sign(), shift), exponent - 8)
    return torch.where((start.bfloat16().float() == start) & (start != 0), start + shift, start)


def since(losses: Tensor) -> Tensor:
    """Return how losses have changed since the beginning of a run."""
    return losses[1:] - losses[:1]


def apart(other: Tensor, exact: Tensor, asked: str) -> float:
    """Return how far two FP32 runs are apart: root mean square of the differences of their losses.

    Raises:
        HmpxError: a loss is not finite, or both runs come to the same.
    """
    if not bool(exact.isfinite().all() and other.isfinite().all()):
        raise HmpxError(f"{asked}: the loss is not finite in FP32 already, with these learning rates")
    found = float((since(other) - since(exact)).square().mean().sqrt())
    if not found:
        raise HmpxError(
            f"{asked}: two orders of the batches come to the same losses, so there is no scale: batches "
            "that are alike, a learning rate of 0, or a loss that is not of the model that it is given"
        )
    return found


def distance(losses: Tensor, exact: Tensor, unit: float) -> RunDistance:
    """Return the distance of the losses of a run from those of the FP32 run. unit: see `apart`."""
    difference = (since(losses) - since(exact)) / unit
    if not bool(difference.isfinite().all()):
        return RunDistance(math.inf, math.inf)
    return RunDistance(float(difference.square().mean().sqrt()), float(difference.mean()))


@dataclass(frozen=True)
class Confirmed:
    """A short training under the lists that were found, beside two in FP32 that see the batches in other orders.

    Attributes:
        steps: of each of the three.
        error: how far the losses come from those of the FP32 run with the same order: root mean square, in units of how
            far the other order comes from them. bias: the mean of the differences; above zero, losses are larger.
        loss: mean over some batches at the end. fp32_losses: of the two runs in FP32.
        holds: whether it is no farther from FP32 than another order of the batches is, and the bias is at most half of
            that.

    Example:
        >>> hmpx.Confirmed(steps=100, error=0.08, bias=-0.01, loss=2.31, fp32_losses=(2.31, 2.35)).holds
        True
    """

    steps: int
    error: float
    bias: float
    loss: float
    fp32_losses: tuple[float, float]

    @property
    def holds(self) -> bool:
        """See above."""
        return self.error <= 1 and self.bias <= 0.5

    def __str__(self) -> str:
        exact, other = self.fp32_losses
        said = "no farther" if self.holds else "FARTHER"
        return (
            f"trained {self.steps} steps: the losses are {said} from FP32 than another order is. Their distance from "
            f"FP32 is {self.error:.2g}, in the mean {self.bias:+.2g}, where another order of the batches has 1. At the "
            f"end the loss is {self.loss:.4g}, in FP32 {exact:.4g}, in another order {other:.4g}"
        )


def confirmed(course: Course, recipe: Recipe) -> Confirmed:
    """Train under a recipe, and in FP32 in two orders."""
    exact, other = course.run(None), course.run(None, order=1)
    unit = apart(other, exact, "tune: confirm")
    losses = course.run(recipe)
    loss, fp32, again = (float(each[-1].mean()) for each in (losses, exact, other))
    return Confirmed(course.steps, *distance(losses, exact, unit), loss, (fp32, again))
