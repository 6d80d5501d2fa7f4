"""`Tuned`: what `tune` found, and its `Choice`s: what was decided about a list name, and why."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hmpx.base.files import write
from hmpx.insight.finding import short_places
from hmpx.insight.report import Field, Grid, Lines, Report, amount, short_dtypes
from hmpx.insight.trials.runs import Effect
from hmpx.insight.trials.search import SLACK, WIDE, Chosen, Low, NameInModule, Search, Unit, Worths, words_of
from hmpx.ops.policies.lists import FP8_FORMAT, SIDES
from hmpx.ops.policies.policy import Policy
from hmpx.recipes.recipe import LISTS, Recipe, changed

DTYPES = {"FP4": "float4", "FP8": "float8", "BF16": "bfloat16", "FP32": "float32"}  # what `Choice.dtype` says
STEADY = 0.1  # relative interquartile range of timings, from which on torch.utils.benchmark warns of noise, too
Rules = dict[str, dict[str, list[str]]]  # by module: by list, the names


@dataclass(frozen=True)
class Choice:
    """What `tune` decided about a list name, everywhere or in one module, and why.

    Attributes:
        name: the list name. dtype: "bfloat16" or "float32"; of a choice of FP8 or FP4 "float8", "float4" or
            "bfloat16". module: where that holds; "" where no other choice of this name does.
        gradient_error: what this alone in BF16 changes in the gradients, measured on one batch, in units of the noise
            between batches. loss_change: the same of the loss. loss_error: that in units of the noise between losses.
            All three are NaN where it was not run alone, as everything that saves something holds together. Where only
            parts of it were run alone, the figures are those of the worst part.
        gain: the FLOPs of its matrix products in one batch, forward; 0 for other ops.
        calls: in one batch. where: the first line that calls it, as "module, file:line", and how many more there are.
        why: what decided, in words. low: what is chosen beside that, "BF16", "FP8" or "FP4".
        reason: all of that as a comment of a list.
    """

    name: str
    dtype: str
    module: str = ""
    gradient_error: float = math.nan
    loss_change: float = math.nan
    loss_error: float = math.nan
    gain: float = 0.0
    calls: int = 0
    where: str = ""
    why: str = ""
    low: str = "BF16"

    @property
    def reason(self) -> str:
        """Return all of it as a comment of a list."""
        said = [self.why]
        if not math.isnan(self.gradient_error):
            loss = f" ({self.loss_error:.2g} of the noise)" if self.loss_error > self.gradient_error else ""
            said.append(f"alone: gradient error {self.gradient_error:.2g}, loss change {self.loss_change:.2g}{loss}")
        if self.gain:
            said.append(f"{amount(self.gain, 'FLOP')} of products")
        return "; ".join(filter(None, [*said, self.where and f"at {self.where}"]))

    def __str__(self) -> str:
        place = f" in {self.module}" if self.module else ""
        return f"{self.name}{place}: {self.dtype}  # {self.reason}"


def choices_of(
    worths: Worths,
    search: Search,
    tolerance: float,
    failed: Mapping[Chosen, Effect],
    chosen: Chosen,
    low: Collection[str],
) -> list[Choice]:
    """Return a choice for each name, and for each module in which it is otherwise: the worst of the wide list first.

    failed: the choices that did not hold on the held-out batches. low: the names that the low list has.
    """

    def choice(name: str, module: str, places: list[NameInModule]) -> Choice:
        unit, found = frozenset(places), [worths.of_place[place] for place in places]
        alone, gain = _alone(unit, search.alone), worths.gain(unit)
        lines = [(place.module, line) for place, worth in zip(places, found, strict=True) for line in worth.lines]
        where = short_places(", ".join(filter(None, lines[0])))
        pinned, free = next((worth.pinned for worth in found if worth.pinned), ""), unit & worths.free
        why = why_of(free, alone, gain) if free else pinned
        return Choice(
            name=name,
            module=module,
            dtype=DTYPES[worths.words if unit & chosen else worths.wide.upper()],
            gradient_error=alone.gradient_error,
            loss_change=alone.loss_change,
            loss_error=alone.loss_error,
            gain=gain,
            calls=sum(worth.calls for worth in found),
            where=where if len(lines) == 1 else f"{where} and {len(lines) - 1} more",
            why=f"{why}; elsewhere {pinned}" if free and pinned else why,
            low=worths.words,
        )

    def why_of(free: Unit, alone: Effect, gain: float) -> str:
        """Say what decided."""
        if free & chosen:
            return "fits"
        words = worths.words
        fell = [effect for tried, effect in failed.items() if tried & free]
        is_left = free <= Chosen().union(*search.left)
        if raised := alone.raised or next((effect.raised for effect in fell if effect.raised), ""):
            return f"with it in {words} the program raises {raised}"
        if alone.size > tolerance and not math.isnan(alone.gradient_error):
            by = ", by its change of the loss" if alone.loss_error > tolerance >= alone.felt else ""
            by = f", by the gradient of {alone.part}" if alone.felt > tolerance >= alone.gradient_error else by
            return f"breaks the tolerance by itself{by}"
        if not gain:
            return f"has no products, by whose FLOPs what {words} saves is counted"
        if is_left and fell:
            return f"with it in {words} the error on held-out batches is {min(each.size for each in fell):.2g}"
        if is_left:
            return "fits by itself, but not with the others"
        return f"has under {percent(SLACK)} of the product FLOPs, and would add to the error"

    def order(each: Choice) -> tuple:
        """Return a key: by the error, and for names that were not run alone by what they save."""
        error = max(each.gradient_error, each.loss_error)
        wide = each.dtype == DTYPES[worths.wide.upper()]
        return not wide, math.inf if math.isnan(error) else -error, -each.gain, each.name, each.module

    choices = []
    for name in {place.name: None for place in worths.of_place}:
        places = [place for place in worths.of_place if place.name == name]
        usual = [place for place in places if (place in chosen) is (name in low)]
        choices.append(choice(name, "", usual))
        choices += [choice(name, place.module, [place]) for place in places if place not in usual]
    return sorted(choices, key=order)


def _alone(unit: Unit, alone: Mapping[Unit, Effect]) -> Effect:
    """Return what a unit does alone; where it was not run as one, what the worst of its parts does."""
    parts = [other for other in alone if other & unit]
    least = [alone[part] for part in parts if not any(other < part for other in parts)]
    return alone.get(unit) or max(least, key=lambda effect: effect.size, default=Effect(*(math.nan,) * 4))


def lists_and_rules(places: Collection[NameInModule], chosen: Chosen, low: Low) -> tuple[list[str], list[str], Rules]:
    """Return the names for the low list, those for the wide one, and rules for the modules that differ.

    A list has a name as it is outside of modules, else as in most of them. A rule holds in the modules inside, too.
    """
    names: dict[bool, list[str]] = {True: [], False: []}
    rules: Rules = {}
    for name in sorted({place.name for place in places}):
        modules = {place.module: place in chosen for place in places if place.name == name}
        said = {"": modules.get("", 2 * sum(modules.values()) > len(modules))}
        names[said[""]].append(name)
        for module in sorted(modules, key=lambda module: (module.count("."), module)):
            around = max((outer for outer in said if not outer or f"{module}.".startswith(f"{outer}.")), key=len)
            if modules[module] is not said[around]:
                said[module] = modules[module]
                rules.setdefault(module, {}).setdefault(low if modules[module] else WIDE[low], []).append(name)
    return names[True], names[False], rules


def policy_of(base: Policy, low: Low, names: Collection[str], wide: Collection[str]) -> Policy:
    """Return `base` with these names in the low list, and those in the wide one."""
    decided = {*names, *wide}
    lists = {side: [name for name in getattr(base, side) if name not in decided] for side in SIDES}
    lists[low] += names
    lists[WIDE[low]] += wide
    bf16, fp32, promote, fp8 = (tuple(sorted(lists[side])) for side in SIDES)
    return Policy(bf16, fp32, promote, fp8=fp8, fp8_format=base.fp8_format)


def recipe_of(base: Recipe | None, policy: Policy, rules: Rules) -> Recipe:
    """Return `base` with other lists and rules for modules; without a base, FP32 weights."""
    keys: dict[str, Any] = {side: getattr(policy, side) for side in SIDES} | {"fp8": policy.fp8 or None}
    in_fp8 = policy.fp8 or any("fp8" in rule for rule in rules.values())
    keys[FP8_FORMAT] = policy.fp8_format.keys() if in_fp8 else None
    base = base or Recipe(parameter_dtype="float32", low_precision="bfloat16")
    return changed(base, modules=rules, **dict.fromkeys(LISTS, ""), **keys)  # its own files decide no more


def percent(share: float) -> str:
    """Return a share with two digits."""
    return f"{100 * share:.0f} %" if share >= 0.01 else f"{100 * share:.1g} %" if share else "0 %"


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
        part: the parameter whose gradient is off most. part_error: by how much, beside its own size; it may be 2.5
            times the tolerance.
        predicted: the gradient error of the same choice on the batches that it was found with.
        share: of the FLOPs of matrix products, convolutions and attention, what runs in BF16 or FP8, from 0 to 1.
        tolerance: as asked for.
        choices: a `Choice` for each name, the worst first.
        steps: forward and backward passes that it took; those that were timed are not counted.
        unmet: where the tolerance is not met, what stands in the way, in words.
        step_seconds: what forward and backward pass of a batch take: "tuned", under the lists; "FP32" and
            "torch.autocast", without hmpx, NaN where the program raises there. Empty where nothing is in BF16.
        step_spread: by how much the timings of one of these varied: the interquartile range of the rounds over their
            median, the largest of the three. From 0.1 on the first line says so.

    `save(folder)` writes the lists, the recipe and all below. `json(path)` saves the measurements, `as_json()` is the
    same as objects, `html(path)` is a page with the reasons. It prints with the reasons; the first line says what is
    gained.
    """

    _schema = 3
    _title = "tune", "The op lists of a model"
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
    step_spread: float = 0.0
    low: Low = "bf16"
    part_error: float = math.nan
    part: str = ""

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
        part = f"; the gradient of {self.part} is off by {self.part_error:.2g} of its size" if self.part else ""
        lines = [
            self._gain(),
            f"{'within' if self.met else 'NOT within'} the tolerance of {self.tolerance:g} on held-out batches: "
            f"gradient error {self.gradient_error:.2g}, bias {self.gradient_bias:.2g}, "
            f"loss change {self.loss_change:.2g}{loss}{part}",
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
        said += f"; a step takes {amount(low, 's')}, {change} ({amount(wide, 's')}; {beside})"
        varied = f"; timings varied by {percent(self.step_spread)}: time it again on a machine that is idle"
        return said + varied * (self.step_spread >= STEADY)

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
    Field("why", lambda choice: choice.why, "words"),
    Field("line", lambda choice: choice.where, "end"),
)
