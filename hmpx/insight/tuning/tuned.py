"""`Tuned`: what `tune` found, to be used, printed and saved."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hmpx.base.files import write
from hmpx.insight.report import Field, Grid, Lines, Report, amount, short_dtypes
from hmpx.insight.tuning.choices import DTYPES, Choice, percent, policy_of
from hmpx.insight.tuning.worth import WIDE, Low, words_of
from hmpx.ops.policies.lists import SIDES
from hmpx.ops.policies.policy import Policy
from hmpx.recipes.recipe import Recipe


@dataclass(frozen=True)
class Tuned(Report):
    """Op lists that were found for a model, and what was measured on the way.

    Attributes:
        low: what the search lowers: "bf16" FP32 to BF16, "fp8" BF16 to FP8.
        policy: the lists. recipe: the same as a recipe, with the rules of modules, for `prepare` and `activate`.
        met: whether the tolerance holds on the held-out batches.
        gradient_error, gradient_bias, loss_change: measured on the held-out batches, beside FP32. The error and the
            bias, the part of it that is the same in every batch, are in units of the noise between batches; the change
            is in the loss's own unit. Error and change are root mean squares over batches. loss_error: the change in
            units of the noise between losses.
        predicted: the gradient error of the same choice on the batches that it was found with.
        share: of the FLOPs of matrix products, convolutions and attention, what runs in BF16, from 0 to 1.
        tolerance: as asked for.
        choices: a `Choice` for each name, the worst first.
        steps: forward and backward passes that it took; those that were timed are not counted.
        unmet: where the tolerance is not met, what stands in the way, in words.
        step_seconds: what forward and backward pass of a batch take: "tuned", under the lists; "FP32" and
            "torch.autocast", without hmpx, NaN where the program raises there. Empty where nothing is in BF16.

    `save(folder)` writes the lists, the recipe and all below. `json(path)` saves the measurements, `as_json()` is the
    same as objects, `html(path)` is a page with the reasons. It prints with the reasons; the first line says what is
    gained.
    """

    _schema = 3
    policy: Policy
    recipe: Recipe
    met: bool
    gradient_error: float
    gradient_bias: float
    loss_change: float
    loss_error: float
    predicted: float
    share: float
    tolerance: float
    choices: tuple[Choice, ...]
    steps: int
    unmet: str = ""
    step_seconds: Mapping[str, float] = field(default_factory=dict)
    low: Low = "bf16"

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write ``bf16.txt``, ``fp32.txt``, ``promote.txt``, ``recipe.yaml``, ``tuned.json`` and ``tuned.html``.

        A folder whose name ends in .yaml is the file of the recipe alone.
        """
        path = Path(folder)
        if path.suffix in (".yaml", ".yml"):
            write(path, self._recipe_text())
            return
        path.mkdir(parents=True, exist_ok=True)
        self._save_lists(path)
        self.json(path / "tuned.json")
        self.html(path / "tuned.html")

    def _title(self) -> tuple[str, str]:
        return "tune", "The op lists of a model"

    def _sections(self) -> Iterator[Grid | Lines]:
        yield Grid(_FIELDS, self.choices, page="Every name, and why")
        yield Lines("The recipe, as a file that hmpx reads", str(self.recipe).splitlines(), closed=True)

    def _lines(self) -> list[str]:
        return self._verdict()

    def _text(self, width: int) -> str:
        return "\n".join([*self._verdict(), "", *map(str, self.choices)])

    def as_json(self) -> dict[str, Any]:
        """Return the attributes; the policy and the recipe as the files they print as."""
        return {**super().as_json(), "policy": str(self.policy), "recipe": str(self.recipe)}

    def _verdict(self) -> list[str]:
        loss = f" ({self.loss_error:.2g} of the noise between losses)" if self.loss_error > self.gradient_error else ""
        lines = [
            self._gain(),
            f"{'within' if self.met else 'NOT within'} the tolerance of {self.tolerance:g} on held-out batches: "
            f"gradient error {self.gradient_error:.2g}, bias {self.gradient_bias:.2g}, "
            f"loss change {self.loss_change:.2g}{loss}",
            f"on the batches of the search the gradient error is {self.predicted:.2g}; it took {self.steps} steps",
        ]
        return [*lines, self.unmet] if self.unmet else lines

    def _gain(self) -> str:
        """Say what the lists save, and beside it what FP32 and torch.autocast take."""
        if not any(choice.dtype == DTYPES[words_of(self.low, self.policy)] for choice in self.choices):
            return f"nothing saved: every op stays in {WIDE[self.low].upper()}"
        said = f"{percent(self.share)} of the product FLOPs run in {words_of(self.low, self.policy)}"
        if not self.step_seconds:
            return said
        low, wide, autocast = (self.step_seconds[key] for key in ("tuned", "FP32", "torch.autocast"))
        change = f"{percent(abs(1 - low / wide))} {'less' if low <= wide else 'MORE'} than in FP32"
        beside = "torch.autocast raises" if math.isnan(autocast) else f"{amount(autocast, 's')} under torch.autocast"
        return f"{said}; a step takes {amount(low, 's')}, {change} ({amount(wide, 's')}; {beside})"

    def _save_lists(self, folder: Path) -> None:
        """Write the lists and the recipe, with the reasons.

        The text files know no modules. So a name that the recipe has in the wide list in some module is there in them.
        """
        wide_list = WIDE[self.low]
        reasons = {choice.name: choice.reason for choice in self.choices if not choice.module}
        divided: dict[str, list[str]] = {}
        for choice in self.choices:
            if choice.module:
                divided.setdefault(choice.name, []).append(choice.module)
        for name, modules in divided.items():
            words = words_of(self.low, self.policy), wide_list.upper()
            usual, other = words if name in getattr(self.policy, self.low) else words[::-1]
            reasons[name] += f"; with recipe.yaml in {usual}, and in {other} in {', '.join(modules)}"
        low, wide = {*getattr(self.policy, self.low)} - {*divided}, {*getattr(self.policy, wide_list), *divided}
        lists = policy_of(self.policy, self.low, low, wide)
        comments = self._comments()
        for side in SIDES:
            names = getattr(lists, side)
            if side == "fp8" and not names:
                continue
            width = max((len(name) for name in names if name in reasons), default=0)
            lines = [*comments, *(f"{name:{width}}  # {reasons[name]}" for name in names if name in reasons)]
            rest = [name for name in names if name not in reasons]
            if rest:
                lines.append("# Not called by the batches that it was tuned on: as in the lists that it began with.")
            write(folder / f"{side}.txt", "\n".join([*lines, *rest]) + "\n")
        write(folder / "recipe.yaml", self._recipe_text())

    def _comments(self) -> list[str]:
        return ["# Written by `hmpx.tune`.", *(f"# {line}" for line in self._verdict())]

    def _recipe_text(self) -> str:
        return "\n".join([*self._comments(), *(f"# {choice}" for choice in self.choices), str(self.recipe)])


_FIELDS = (
    Field("name", lambda choice: choice.name),
    Field("module", lambda choice: choice.module, "end"),
    Field("dtype", lambda choice: short_dtypes(choice.dtype), "dtypes"),
    Field("gradient error alone", kind="figure", value=lambda choice: choice.gradient_error),
    Field("loss change alone", kind="figure", value=lambda choice: choice.loss_change),
    Field("product FLOPs", lambda choice: amount(choice.gain, "FLOP") if choice.gain else ""),
    Field("calls", kind="number", value=lambda choice: choice.calls),
    Field("why", lambda choice: choice.why),
    Field("line", lambda choice: choice.where, "end"),
)
