"""`tune_weights`: checks its arguments, and makes the runs in their order."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from hmpx import conversion
from hmpx.errors import HmpxError
from hmpx.insight.comparing.subject import Loss
from hmpx.insight.tuning.course import Course, Making, RunDistance, apart, by_name, distance
from hmpx.insight.tuning.runs import Progress
from hmpx.insight.weights.choosing import (
    Chosen,
    Rung,
    bytes_of_choice,
    choice_of,
    choose,
    groups_of,
    predicted,
    recipe_of,
)
from hmpx.insight.weights.scoring import FP32, Scoring
from hmpx.insight.weights.tuned_weights import TunedWeights
from hmpx.recipes.keys import dtype_of
from hmpx.recipes.module_patterns import check_names
from hmpx.recipes.reading import Stated, as_recipe
from hmpx.recipes.recipe import Recipe, changed

_AIMS = tuple(0.7**i for i in range(1, 12))  # of the tolerance: what further choices are to keep, one after another


def tune_weights(
    model: torch.nn.Module,
    optimizer: Making,
    batches: Sequence[tuple],
    loss: Loss,
    *,
    recipe: Stated = None,
    steps: int = 100,
    tolerance: float = 0.25,
    seed: int = 0,
    progress: bool = True,
) -> TunedWeights:
    """Find how the weights and the optimizer's state are to be held: the fewest bytes with which it trains as in FP32.

    Two FP32 runs with other orders of the batches give the scale. Beside the first of them, each way to hold a
    parameter takes the same gradients; what its errors do to the losses is computed to second order, for all parameters
    at once. The cheapest choice within the tolerance is then trained, and repaired.

    It trains copies: the model, the optimizer and the random number generators stay as they are. Beside them, it takes
    the memory of two BF16 copies with their masters and state.

    Args:
        model: in FP32.
        optimizer: the one that the model is trained with, as it stands, with learning rates like those of the training
            that it is about: where they fall, so do the updates, and more of them are lost. Or a function that makes it
            of a list of named parameters (``functools.partial(torch.optim.AdamW, lr=1e-3)``).
        batches: a list of tuples or lists of positional arguments; a batch of one argument, which is a list of tensors,
            is written ``([...],)``. The runs draw from them.
        loss: called as ``loss(model, *batch)``, returns a scalar tensor.
        recipe: what else the training is to do, as for `prepare`: its op lists hold in all runs, those in FP32 too.
            What it says of weights and state is found anew. None: the default lists.
        steps: of a run.
        tolerance: how far the losses may be from FP32's, in units of how far two orders of the batches are apart. They
            may be larger by half of it in the mean. 0.25 makes the distance of two orders 3 % larger.
        seed: of the orders.
        progress: show on standard error how far it is, each attempt with its distance, and, before it runs, that one
            takes more bytes than `recipe`.

    Raises:
        HmpxError: something above does not fit; the loss is not finite in FP32; the model does not run with BF16
            weights.

    Example:
        >>> batches = [(torch.randn(8, 4), torch.randn(8, 4)) for _ in range(8)]
        >>> def loss(model, x, y):
        ...     return torch.nn.functional.mse_loss(model(x), y)
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        >>> tuned = hmpx.tune_weights(model, optimizer, batches, loss, steps=20, progress=False)
        >>> tuned.recipe.parameter_dtype, tuned.recipe.state_dtype
        ('bfloat16', '8bit')
    """
    if isinstance(tolerance, bool) or not isinstance(tolerance, int | float) or not 0 <= tolerance < math.inf:
        raise HmpxError(f"tune_weights: tolerance={tolerance!r} is no distance in units of that between two orders")
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise HmpxError(f"tune_weights: seed={seed!r} is no whole number in [0, 2^63)")
    if conversion.installed() is not None:
        raise HmpxError("tune_weights: a conversion is in force; say recipe=, and hmpx.restore() first")
    base = as_recipe(recipe)
    if base.parameters:
        raise HmpxError(
            "tune_weights: the recipe has `parameters` already, which tune_weights is to find: leave them out"
        )
    if base.dtype_map:
        raise HmpxError("tune_weights: this recipe maps dtypes, so that there is no FP32 beside it")
    counted = Progress("tune_weights", progress)
    course = Course(model, optimizer, batches, loss, steps, seed, "tune_weights", counted)
    with base.naming_lines():
        check_names([model], base)
    try:
        return _Tuning(course, base, _shapes(model, course, base), float(tolerance), counted).run()
    finally:
        counted.end()


def _shapes(model: torch.nn.Module, course: Course, base: Recipe) -> dict[str, torch.Size]:
    """Return the shapes of the parameters that can be held in more than one way."""
    copied, optimizer = course.copies()
    held = {p for group in optimizer.param_groups for p in group["params"] if p.requires_grad and p.is_floating_point()}
    own = {name: p.shape for name, p in by_name(copied).items() if p in held}
    found = {name: own[name] for name in own if dtype_of(name, {}, base.module_dtypes) is not torch.float32}
    if not found:
        raise HmpxError(
            "tune_weights: nothing to choose from: the optimizer holds no parameter that requires a gradient, but for "
            "those that module_dtypes makes FP32"
        )
    return found


class _Trained(NamedTuple):
    """A choice, and the losses of a run under its recipe."""

    chosen: Chosen
    losses: torch.Tensor
    distance: RunDistance


class _Tuning:
    """One tuning while it is made."""

    def __init__(
        self, course: Course, base: Recipe, shapes: Mapping[str, torch.Size], tolerance: float, counted: Progress
    ) -> None:
        self._course, self._base, self._tolerance, self._counted = course, base, tolerance, counted
        self._attempts: list[str] = []
        wide = changed(base, parameter_dtype=FP32, module_dtypes={})
        self._scoring = Scoring(course, list(shapes), wide)
        self._other = course.run(wide, order=1)
        self._unit = apart(self._other, self._scoring.losses, "tune_weights")
        self._groups = groups_of(self._scoring, shapes, self._unit)
        self._bytes_given = self._limit()

    def run(self) -> TunedWeights:
        """Train the choice that is predicted to hold; where it does not, others, up to exact masters everywhere."""
        first = self._trained(choose(self._groups, self._tolerance))
        if first.distance.size <= self._tolerance:
            return self._result(first, "")
        exact = self._trained({group: Rung("split", torch.float32) for group in self._groups})
        least, reach, unmet = exact.distance.size, self._tolerance, ""
        if least > reach:
            reach = math.hypot(reach, least)
            unmet = (
                f"with exact masters and FP32 state everywhere it is {least:.2g} already: BF16 weights and gradients "
                "do that in the forward and backward pass. parameter_dtype: float32 does without them; with more "
                "steps, two orders come further apart"
            )
        if first.distance.size <= reach:
            return self._result(first, unmet)
        tried = [first.chosen, exact.chosen]
        for aim in _AIMS:
            chosen = choose(self._groups, aim * self._tolerance)
            if chosen in tried or bytes_of_choice(chosen) >= bytes_of_choice(exact.chosen):
                continue
            tried.append(chosen)
            found = self._trained(chosen)
            if found.distance.size <= reach:
                return self._result(found, unmet)
        return self._result(exact, unmet)

    def _limit(self) -> float:
        """Return the bytes a parameter of the recipe that was given; infinite where it keeps parameters in FP32."""
        settings = self._base.settings()
        way = Rung(settings.weights, settings.state_dtype if self._scoring.states else torch.float32)
        if self._base.parameter_dtype != "bfloat16" or any(way not in group.bytes for group in self._groups):
            return math.inf
        return bytes_of_choice(dict.fromkeys(self._groups, way))

    def _trained(self, chosen: Chosen) -> _Trained:
        size = bytes_of_choice(chosen)
        if size > self._bytes_given:
            self._counted.say(
                f"tune_weights: the next attempt takes {size:.4g} bytes a parameter, more than the "
                f"{self._bytes_given:.4g} of the recipe"
            )
        try:
            losses = self._course.run(recipe_of(self._base, chosen))
        except HmpxError:
            raise
        except RuntimeError as error:
            hint = "; with opt_level null nothing casts its inputs" if self._base.opt_level is None else ""
            raise HmpxError(
                f"tune_weights: with BF16 weights the model does not run under this recipe: {error}{hint}"
            ) from error
        found = _Trained(chosen, losses, distance(losses, self._scoring.losses, self._unit))
        holds = f"not within {self._tolerance:g}"
        if found.distance.size <= self._tolerance:
            holds = f"within {self._tolerance:g}"
        elif found.distance.error <= self._tolerance:
            holds = f"the mean is not within {self._tolerance / 2:g}"
        self._attempts.append(
            f"{size:.4g} bytes a parameter: distance {found.distance.error:.2g}, in the mean "
            f"{found.distance.bias:+.2g}, predicted {predicted(chosen).error:.2g}: {holds}"
        )
        self._counted.say(f"tune_weights: {self._attempts[-1]}")
        return found

    def _result(self, trained: _Trained, unmet: str) -> TunedWeights:
        chosen, losses, measured = trained
        scoring = self._scoring
        choices = [choice_of(group, way, scoring) for group, way in chosen.items()]
        return TunedWeights(
            recipe=recipe_of(self._base, chosen),
            met=measured.size <= self._tolerance,
            error=measured.error,
            bias=measured.bias,
            predicted=predicted(chosen).error,
            tolerance=self._tolerance,
            bytes_per_parameter=bytes_of_choice(chosen),
            fp32_bytes=4.0 * (2 + scoring.states),
            loss=float(losses[-1].mean()),
            fp32_losses=(float(scoring.losses[-1].mean()), float(self._other[-1].mean())),
            choices=tuple(sorted(choices, key=lambda choice: -choice.elements)),
            steps=self._counted.done,
            runs=len(self._attempts),
            unmet=unmet,
            attempts=tuple(self._attempts),
            bytes_given=self._bytes_given,
        )
