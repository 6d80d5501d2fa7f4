"""`Tuned`: what `tune` found, to be used, printed and saved."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hmpx.insight.comparing.comparison import plain
from hmpx.insight.tuning import lists
from hmpx.insight.tuning.choice import Choice, amount, percent
from hmpx.insight.tuning.confirmed import Confirmed
from hmpx.insight.tuning.mark import Mark
from hmpx.insight.tuning.page import as_page
from hmpx.insight.tuning.plot import as_svg
from hmpx.ops.policy import Policy
from hmpx.recipes.recipe import Recipe

SCHEMA = 1
FP32 = "all in FP32"  # the name of that mark


@dataclass(frozen=True)
class Tuned:
    """Op lists that were found for a model, and what was measured on the way.

    Attributes:
        policy: the lists. recipe: the same as a recipe, with the rules of modules, for `prepare` and `activate`.
        met: whether the tolerance holds on the held-out batches.
        gradient_error, gradient_bias, loss_change: measured on the held-out batches, beside FP32. The error and the
            bias, the part of it that is the same in every batch, are in units of the noise between batches; the change
            is in the loss's own unit. Error and change are root mean squares over batches. loss_error: the change in
            units of the noise between losses.
        predicted: the gradient error of the same choice on the batches that it was found with.
        floor: the gradient error of FP32 when the inputs are rounded to BF16: a smaller tolerance makes little sense.
            NaN where the batches hold integers only.
        share: of the FLOPs of matrix products, convolutions and attention, what runs in BF16, from 0 to 1.
        objective, tolerance: as asked for. cost: what the lists cost, in `unit`: seconds of a step, as the sum of what
            was measured of each op ("s"), FLOPs in FP32 ("FLOP"), bytes saved for the backward pass ("B").
        choices: a `Choice` for each name, the dearest first.
        marks: the chosen lists beside the default ones, autocast's, and all in FP32; curve: the beginnings of the
            ranking, with the errors of single names added up.
        steps: forward and backward passes that it took. verifications: how many choices and lists were measured.
        confirmed: the training under these lists, a `Confirmed`; None where `confirm` was not asked for.
        unmet: where the tolerance is not met, what stands in the way, in words.
        step_seconds: for "speed", what forward and backward pass of a batch take under the lists, and in FP32 without
            hmpx, measured as a whole; None for other objectives, and where nothing was to be gained.

    `save(folder)` writes the lists, the recipe and all below. `json(path)` saves the measurements, `as_json()` is the
    same as objects, `plot(path)` draws error against cost as SVG, `html(path)` is a page with that and the reasons. It
    prints with the reasons; the first line says what is gained.

    Example:
        >>> batches = [(torch.randn(8, 4), torch.randn(8, 4)) for _ in range(8)]
        >>> def loss(model, x, y):
        ...     return torch.nn.functional.mse_loss(model(x), y)
        >>> tuned = hmpx.tune(model, batches, loss, objective="coverage", progress=False)
        >>> tuned.met, tuned.share, tuned.gradient_error < 0.1
        (True, 1.0, True)
        >>> with hmpx.activate(tuned.recipe):
        ...     model(inputs).dtype
        torch.bfloat16
    """

    policy: Policy
    recipe: Recipe
    met: bool
    gradient_error: float
    gradient_bias: float
    loss_change: float
    loss_error: float
    predicted: float
    floor: float
    share: float
    objective: str
    tolerance: float
    cost: float
    unit: str
    choices: tuple[Choice, ...]
    marks: tuple[Mark, ...]
    curve: tuple[Mark, ...]
    steps: int
    verifications: int
    unmet: str = ""
    confirmed: Confirmed | None = None
    step_seconds: tuple[float, float] | None = None

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write ``bf16.txt``, ``fp32.txt``, ``promote.txt``, ``recipe.yaml``; ``tuned`` as .json, .html and .svg."""
        lists.save(folder, self.policy, self.recipe, self.choices, "\n".join(self._verdict()))
        self.json(Path(folder) / "tuned.json")
        self.html(Path(folder) / "tuned.html")
        self.plot(Path(folder) / "tuned.svg")

    def html(self, path: str | os.PathLike[str]) -> None:
        """Save as one HTML page that needs no network and no other file: the plot, and each name with its reason."""
        page = as_page(str(self), self._verdict(), self.choices, self._svg(), self.as_json())
        Path(path).write_text(page, encoding="utf-8")

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Save error against cost as SVG: the curve of choices, these lists, and those that are known."""
        Path(path).write_text(self._svg(), encoding="utf-8")

    def _svg(self) -> str:
        return as_svg(self.marks, self.curve, self.tolerance, self.unit)

    def as_json(self) -> dict[str, Any]:
        """The attributes; the policy and the recipe as the files they print as."""
        found = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        found |= {"policy": str(self.policy), "recipe": str(self.recipe)}
        found["confirmed"] = self.confirmed and {**dataclasses.asdict(self.confirmed), "holds": self.confirmed.holds}
        for key in ("choices", "marks", "curve"):
            found[key] = [dataclasses.asdict(each) for each in found[key]]
        return plain({"schema": SCHEMA, **found})

    def json(self, path: str | os.PathLike[str]) -> None:
        """Save everything as JSON, by the names of the attributes."""
        Path(path).write_text(json.dumps(self.as_json(), indent=1) + "\n", encoding="utf-8")

    def _verdict(self) -> list[str]:
        holds = "within" if self.met else "NOT within"
        loss = f" ({self.loss_error:.1e} of the noise between losses)" if self.loss_error > self.gradient_error else ""
        floor = "" if math.isnan(self.floor) else f"; FP32 with inputs rounded to BF16 {self.floor:.1e}"
        lines = [
            self._gain(),
            f"gradient error {self.gradient_error:.1e}, bias {self.gradient_bias:.1e}, in units of the noise between "
            f"batches; loss changed by {self.loss_change:.1e}{loss}; on held-out batches: {holds} {self.tolerance:g}",
            f"{percent(self.share)} of the FLOPs of matrix products in BF16; error on the other batches "
            f"{self.predicted:.1e}{floor}; {self.steps} steps",
        ]
        lines += [self.unmet] if self.unmet else []
        return [*lines, str(self.confirmed)] if self.confirmed is not None else lines

    def _gain(self) -> str:
        """What the lists save, beside FP32."""
        wide = next(mark.cost for mark in self.marks if mark.name == FP32)
        if not any(choice.dtype == "bfloat16" for choice in self.choices):
            return "nothing saved: every op stays in FP32"
        if self.step_seconds is not None:
            low, wide = self.step_seconds
            what = f"a step takes {amount(low, 's')} under these lists and {amount(wide, 's')} in FP32"
            return f"{percent(1 - low / wide)} of the time saved: {what}"
        what = {"FLOP": "matrix products in FP32", "B": "saved for the backward pass", "s": "a step"}[self.unit]
        saved = percent(1 - self.cost / wide) if wide else "nothing"
        return f"{saved} saved: {amount(self.cost, self.unit)} of {what}, where FP32 has {amount(wide, self.unit)}"

    def __str__(self) -> str:
        lines = self._verdict()
        lines += [
            "",
            *map(self._line, self.marks),
            "",
        ]
        return "\n".join([*lines, *map(str, self.choices)])

    def _line(self, mark: Mark) -> str:
        if mark.raised:
            return f"{mark.name:24} does not run: {mark.raised}"
        figures = f"error {mark.gradient_error:.1e}  {amount(mark.cost, self.unit):>10}  {percent(mark.share)} in BF16"
        return f"{mark.name:24} {figures}"
