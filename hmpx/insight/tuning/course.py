"""A short training run, taken again and again from the same beginning: in FP32, and under recipes.

**What is compared.** Two FP32 runs that see the batches in another order come to other weights, and to other losses of
each batch; both are as good. How far the losses of a run under a recipe are from those of the FP32 run with the same
order, in units of how far the two FP32 runs are apart, says how much of another training it is. Losses are looked at
for a few batches at a few moments of the run, each less what it was at the beginning of that run: the first rounding of
the weights to BF16 shifts them all, and is no matter of training.

**The beginning.** Later in a training, an FP32 master lies anywhere between two BF16 numbers. One that began as a BF16
number would have to go half the way to the next one before the weight moves, which may take longer than a short run.
So weights that BF16 holds exactly are moved by up to half the distance to the next number, in all runs alike.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch

from hmpx import conversion
from hmpx.errors import HmpxError
from hmpx.insight.comparing.subject import arguments_of
from hmpx.insight.run_state import eager, kept
from hmpx.insight.tensors import LOW, Tensor
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
_MOMENTS, _LOOKED_AT = 4, 4  # at how many moments of a run losses are looked at, and of how many batches


class RunDistance(NamedTuple):
    """How far a run is from the FP32 run with the same order, in units of how far another order is from that.

    error: root mean square of the differences of losses. bias: their mean; above zero, losses are larger.
    """

    error: float
    bias: float

    @property
    def size(self) -> float:
        """The error, or the bias where that is more than half of it, doubled: noise goes both ways."""
        return max(self.error, 2 * self.bias)


class Course:
    """The run: a model, an optimizer, batches in a random order, a number of steps.

    asked: the function that a user has called, for errors. done: is told of each forward and backward pass.
    moments: the steps after which losses are looked at, counted from 1. passes: forward and backward, so far.
    """

    def __init__(
        self,
        model: Any,
        optimizer: Any,
        batches: Any,
        loss: Any,
        steps: int,
        seed: int,
        asked: str,
        done: Callable[[str], None] = lambda words: None,
    ) -> None:
        if not isinstance(model, torch.nn.Module):
            raise HmpxError(f"{asked}: model is a {type(model).__name__}, not a torch.nn.Module")
        if not callable(loss):
            raise HmpxError(f"{asked}: loss is a {type(loss).__name__}; it is called as loss(model, *batch)")
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 2:
            raise HmpxError(f"{asked}: steps={steps!r} is no number of steps; a run takes two at least, better fifty")
        if not isinstance(optimizer, Optimizer) and not callable(optimizer):
            raise HmpxError(
                f"{asked}: optimizer is a {type(optimizer).__name__}, neither a torch.optim.Optimizer nor a function "
                "that makes one of named parameters, such as functools.partial(torch.optim.AdamW, lr=1e-3)"
            )
        if several_ranks():
            raise HmpxError(f"{asked}: it trains copies of the model in one process; call it in a process of its own")
        low = [name for name, p in model.named_parameters() if p.dtype in LOW or p.dtype is torch.float64]
        if low:
            dtype = str(dict(model.named_parameters())[low[0]].dtype).removeprefix("torch.")
            raise HmpxError(f"{asked}: parameter {low[0]!r} is {dtype}; it begins with a model in FP32: model.float()")
        self.batches = arguments_of(batches, "batches", asked)
        if len(self.batches) < 2:
            raise HmpxError(
                f"{asked}: one batch has no order: how far two orders of batches come apart is the scale of every "
                "error; give two or more that differ"
            )
        self._model, self._optimizer, self._loss, self.steps, self._seed = model, optimizer, loss, steps, seed
        self._asked, self._done, self.passes = asked, done, 0
        self.moments = sorted({math.ceil(steps * (i + 1) / _MOMENTS) for i in range(_MOMENTS)})
        self._start = {name: _between(p, seed) for name, p in by_name(model).items() if p.is_floating_point()}
        some = len(self.batches) / min(_LOOKED_AT, len(self.batches))
        self._looked_at = [self.batches[int(i * some)] for i in range(min(_LOOKED_AT, len(self.batches)))]

    def copies(self) -> tuple[torch.nn.Module, Optimizer]:
        """Of the model and of the optimizer, which holds the parameters of that copy."""
        if isinstance(self._optimizer, Optimizer):
            if set(parameters(self._optimizer)).isdisjoint(self._model.parameters()):
                raise HmpxError(f"{self._asked}: the optimizer holds no parameter of the model")
            if attached(self._optimizer) is not None:
                raise HmpxError(f"{self._asked}: the optimizer is attached; hmpx.detach(optimizer) first")
        try:
            given = self._optimizer if isinstance(self._optimizer, Optimizer) else None
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
        if _wants_closure(optimizer):
            raise HmpxError(f"{self._asked}: {type(optimizer).__name__} wants a closure, which it cannot give")
        if attached(optimizer) is not None:
            raise HmpxError(
                f"{self._asked}: a recipe is in force (hmpx.activate) and has attached it; hmpx.restore() first"
            )
        return model, optimizer

    def trained(self) -> list[str]:
        """The names of the parameters that the optimizer is to step."""
        model, optimizer = self.copies()
        held = set(parameters(optimizer))
        return [name for name, p in by_name(model).items() if p in held and p.requires_grad and p.is_floating_point()]

    def run(
        self,
        recipe: Recipe | None,
        order: int = 0,
        before_step: Callable[[torch.nn.Module, Optimizer], None] | None = None,
        at_moment: Callable[[torch.nn.Module], None] | None = None,
    ) -> Tensor:
        """The losses of a run under a recipe, FP64 [1 + moments, batches looked at]; the first are those before it.

        Args:
            recipe: None: in FP32, ops as they are.
            order: of the batches, and what random ops draw.
            before_step: is called when gradients are there. at_moment: each time that the losses were looked at.
        """
        model, optimizer = self.copies()
        generator = torch.Generator().manual_seed(self._seed + order)
        numbers = torch.randint(len(self.batches), (self.steps,), generator=generator).tolist()
        losses: list[list[float]] = []
        with self._under(recipe, model, optimizer), kept(None):
            torch.manual_seed(self._seed + order)
            self._look(model, losses, at_moment)
            for step, number in enumerate(numbers, 1):
                optimizer.zero_grad()
                self.loss_of(model, self.batches[number]).backward()
                self._passed(f"training, run {order}")
                if before_step is not None:
                    before_step(model, optimizer)
                optimizer.step()
                if step in self.moments:
                    self._look(model, losses, at_moment)
        return torch.tensor(losses, dtype=torch.float64)

    def _look(self, model: torch.nn.Module, losses: list[list[float]], at_moment: Callable | None) -> None:
        with torch.no_grad():
            losses.append([float(self.loss_of(model, batch)) for batch in self.looked_at(model)])
        if at_moment is not None:
            at_moment(model)

    def looked_at(self, model: torch.nn.Module) -> Iterator[tuple]:
        """The batches whose losses are looked at; for each, random ops draw the same numbers in every run."""
        for batch in self._looked_at:
            with kept(model):
                torch.manual_seed(self._seed)
                yield batch

    def loss_of(self, model: torch.nn.Module, batch: tuple) -> Tensor:
        """The loss, with its graph."""
        loss = self._loss(model, *batch)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            raise HmpxError(f"{self._asked}: loss(model, *batch) must return a scalar tensor, not {what}")
        if torch.is_grad_enabled() and not loss.requires_grad:
            raise HmpxError(
                f"{self._asked}: the loss has no gradient: computed under torch.no_grad, or detached, or of another "
                "model than the one that loss is given"
            )
        return loss

    def gradients(self, model: torch.nn.Module, batch: tuple, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Of the loss of a batch by some parameters."""
        found = torch.autograd.grad(self.loss_of(model, batch), parameters, allow_unused=True)
        self._passed("scoring")
        return [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]

    def _passed(self, words: str) -> None:
        self.passes += 1
        self._done(words)

    @contextlib.contextmanager
    def _under(self, recipe: Recipe | None, model: torch.nn.Module, optimizer: Optimizer) -> Iterator[None]:
        """The copies made as a recipe says, and its op lists in force until the end."""
        with contextlib.ExitStack() as undo, eager(), torch.enable_grad():
            policy, rules = Policy(bf16=(), fp32=(), promote=()), []
            kernels: KernelsAsked = "native"
            if recipe is not None:
                check_names([model], recipe)
                rules, kernels = rules_for([model], recipe), recipe.kernels
                with contextlib.ExitStack() as cast_back:
                    cast_model(model, recipe, cast_back)
                    cast_back.pop_all()
                held = set(parameters(optimizer))
                own = {p: self._start[name] for name, p in by_name(model).items() if p.dtype is torch.bfloat16}
                own = {p: start for p, start in own.items() if p in held}
                if own:
                    handle = attach(optimizer, model=model, **vars(recipe.settings()))
                    undo.callback(handle.detach)
                    handle.set_masters(own)
                policy = recipe.policy() or policy
            if (recipe is not None and recipe.policy() is not None) or conversion.installed() is not None:
                undo.enter_context(conversion.install(policy, kernels=kernels, rules=rules))
            yield


def by_name(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The parameters of a model by their plain names, which rules go by."""
    return {name: p for p, name in names_in(model).items()}


def _wants_closure(optimizer: Optimizer) -> bool:
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is closure.empty


def since(losses: Tensor) -> Tensor:
    """How losses have changed since the beginning of a run."""
    return losses[1:] - losses[:1]


def apart(other: Tensor, exact: Tensor) -> float:
    """How far two FP32 runs are apart: root mean square of the differences of their losses."""
    return float((since(other) - since(exact)).square().mean().sqrt())


def _between(p: Tensor, seed: int) -> Tensor:
    """FP32 weights, of which those that BF16 holds exactly are moved to somewhere between two BF16 numbers."""
    start = p.detach().clone()
    generator = torch.Generator().manual_seed(seed)
    mantissa, exponent = torch.frexp(start)
    shift = (torch.rand(p.shape, generator=generator).to(p.device) - 0.5) * 0.98
    # From a power of two towards zero, numbers lie twice as close.
    shift = torch.ldexp(torch.where(mantissa.abs() == 0.5, shift.abs() * mantissa.sign(), shift), exponent - 8)
    return torch.where((start.bfloat16().float() == start) & (start != 0), start + shift, start)


def distance(losses: Tensor, exact: Tensor, other: Tensor) -> RunDistance:
    """Of the losses of a run from those of the FP32 run, in units of the distance of `other` from these."""
    difference = (since(losses) - since(exact)) / apart(other, exact)
    if not bool(difference.isfinite().all()):
        return RunDistance(math.inf, math.inf)
    return RunDistance(float(difference.square().mean().sqrt()), float(difference.mean()))


def check_scale(exact: Tensor, other: Tensor, asked: str) -> None:
    """Check that FP32 runs give a scale.

    Raises:
        HmpxError: a loss is not finite, or both runs come to the same.
    """
    if not bool(exact.isfinite().all() and other.isfinite().all()):
        raise HmpxError(f"{asked}: the loss is not finite in FP32 already, with these learning rates")
    if not apart(other, exact):
        raise HmpxError(
            f"{asked}: two orders of the batches come to the same losses, so there is no scale: batches "
            "that are alike, a learning rate of 0, or a loss that is not of the model that it is given"
        )
