"""`TunedWeights`: what `tune_weights` found, to be used, printed and saved."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hmpx.insight.pages import plain
from hmpx.insight.tuning.choices import percent
from hmpx.recipes.recipe import Recipe

SCHEMA = 2


@dataclass(frozen=True)
class WeightChoice:
    """How the parameters that a pattern names are to be held, and why.

    Errors are root mean squares of what a way does to the losses, in units of the distance between two FP32 runs with
    other orders of the batches.

    Attributes:
        pattern: a name of a parameter, or a pattern of those of equal blocks. parameters, elements: how many.
        weights: as of `hmpx.attach`, or "float32". state_dtype: of the optimizer's state, by name.
        bytes: of a parameter, with gradient, masters and state.
        lost: share of the updates that round-to-nearest would lose. size: mean of |update|, in units of BF16's last
            place.
        error: predicted of the way that was chosen. errors: of each way to hold the weights, and the state, by name.
        why: in words.

    Example:
        >>> batches = [(torch.randn(8, 4), torch.randn(8, 4)) for _ in range(8)]
        >>> def loss(model, x, y):
        ...     return torch.nn.functional.mse_loss(model(x), y)
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        >>> tuned = hmpx.tune_weights(model, optimizer, batches, loss, steps=20, progress=False)
        >>> tuned.choices[0].pattern, tuned.choices[0].elements, 0 <= tuned.choices[0].lost <= 1
        ('weight', 16, True)
    """

    pattern: str
    parameters: int
    elements: int
    weights: str
    state_dtype: str
    bytes: float
    lost: float
    size: float
    error: float
    errors: Mapping[str, float]
    why: str

    def __str__(self) -> str:
        held = self.weights if self.weights == "float32" else f"{self.weights}, {self.state_dtype} state"
        return (
            f"{self.pattern}: {held}  # {self.bytes:.4g} bytes; {self.why}; round-to-nearest would lose "
            f"{percent(self.lost)} of the updates, of {self.size:.2g} ulp in the mean"
        )


@dataclass(frozen=True)
class TunedWeights:
    """How weights and optimizer state are to be held, and what was measured on the way.

    Distances are of the losses of a run from those of the FP32 run that sees the same batches, in units of how far an
    FP32 run that sees them in another order is from that.

    Attributes:
        recipe: what was found, for `prepare` and `activate`; patterns of parameters are in its key `parameters`.
        met: whether the distance, and twice the bias, are within `tolerance`, as measured in a run under the recipe.
        error: that distance. bias: its mean; above zero, losses are larger. predicted: the error as predicted.
        tolerance: as asked for.
        bytes_per_parameter: mean over all parameters, with gradients, masters and state. fp32_bytes: of FP32.
        loss: mean of the losses at the end, of that run. fp32_losses: of the two FP32 runs.
        choices: a `WeightChoice` for each pattern, the largest first.
        steps: forward and backward passes that it took. runs: under recipes that were tried.
        unmet: where the tolerance is not met, what stands in the way, in words.
        attempts: every choice that was trained, in order, as a line with its bytes and its distance. bytes_given: what
            the recipe that was given takes for each parameter; infinite where it keeps parameters in FP32.

    It prints with the reasons. `save(path)` writes the recipe with the reasons as comments, `json(path)` all of it,
    which `as_json()` is as objects.

    Example:
        >>> batches = [(torch.randn(8, 4), torch.randn(8, 4)) for _ in range(8)]
        >>> def loss(model, x, y):
        ...     return torch.nn.functional.mse_loss(model(x), y)
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        >>> tuned = hmpx.tune_weights(model, optimizer, batches, loss, steps=20, progress=False)
        >>> tuned.met, tuned.bytes_per_parameter < tuned.fp32_bytes
        (True, True)
    """

    recipe: Recipe
    met: bool
    error: float
    bias: float
    predicted: float
    tolerance: float
    bytes_per_parameter: float
    fp32_bytes: float
    loss: float
    fp32_losses: tuple[float, float]
    choices: tuple[WeightChoice, ...]
    steps: int
    runs: int
    unmet: str = ""
    attempts: tuple[str, ...] = ()
    bytes_given: float = math.inf

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the recipe as a file, with the reasons as comments."""
        comments = ["# Written by `hmpx.tune_weights`.", *(f"# {line}".rstrip() for line in str(self).splitlines())]
        Path(path).write_text("\n".join([*comments, str(self.recipe)]), encoding="utf-8")

    def as_json(self) -> dict[str, Any]:
        """Return the attributes; the recipe as the file it prints as."""
        return plain({"schema": SCHEMA, **dataclasses.asdict(self), "recipe": str(self.recipe)})

    def json(self, path: str | os.PathLike[str]) -> None:
        """Save everything as JSON, by the names of the attributes."""
        Path(path).write_text(json.dumps(self.as_json(), indent=1) + "\n", encoding="utf-8")

    def __str__(self) -> str:
        holds = "within" if self.met else "NOT within"
        error = f"{self.error:.2g}" if math.isfinite(self.error) else "not finite"
        over = self.bytes_per_parameter > self.bytes_given
        more = f"; this is MORE than the {self.bytes_given:.4g} of the recipe that was given" if over else ""
        lines = [
            f"{self.bytes_per_parameter:.4g} bytes a parameter, FP32 takes {self.fp32_bytes:.4g}{more}",
            f"{holds} the tolerance of {self.tolerance:g}: the losses are {error} from FP32's (predicted "
            f"{self.predicted:.2g}), in the mean {self.bias:+.2g}; two orders of the batches are 1 apart",
            f"loss at the end {self.loss:.4g}, FP32 {self.fp32_losses[0]:.4g}, in another order "
            f"{self.fp32_losses[1]:.4g}; {self.steps} steps",
        ]
        lines += [self.unmet] if self.unmet else []
        lines += ["", *(f"attempt {number}: {each}" for number, each in enumerate(self.attempts, 1))]
        return "\n".join([*lines, "", *map(str, self.choices)])
