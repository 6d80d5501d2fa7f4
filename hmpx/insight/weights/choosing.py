"""Chooses the fewest bytes with which the predicted distance from FP32 is within a tolerance, and makes a recipe."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch

from hmpx.insight.module_names import numberless
from hmpx.insight.tensors import Tensor
from hmpx.insight.tuning.course import RunDistance
from hmpx.insight.weights.scoring import FP32, STATES, WEIGHTS, Scoring
from hmpx.insight.weights.tuned_weights import WeightChoice
from hmpx.recipes.recipe import Recipe, changed
from hmpx.updates.holding.settings import Settings
from hmpx.updates.holding.state_forms import STATE_FORMS, StateDtype, state_name
from hmpx.updates.holding.state_tensors import StateBlocks
from hmpx.updates.holding.stores import WAYS
from hmpx.updates.lost_updates import THRESHOLD

_CHECKED_ALONE = 4096  # elements up to which halves of masters have a check of 2 bytes each (`checksums.py`)
_DEAREST = 100.0  # the binary logarithm of the highest price of an error in bytes


class Rung(NamedTuple):
    """How a parameter is held: `weights` of `hmpx.attach`, or `FP32`, and a `state_dtype`."""

    weights: str
    state: StateDtype


def ways(states: int) -> list[Rung]:
    """Return every way, for an optimizer that keeps so many tensors of a parameter's size."""
    narrow = STATES if states else (torch.float32,)
    return [*(Rung(weights, state) for weights in WEIGHTS[:-1] for state in narrow), Rung(FP32, torch.float32)]


def bytes_of(shapes: Sequence[torch.Size], way: Rung, states: int) -> float:
    """Return what parameters of these shapes take, with gradients, masters and so many tensors of state."""
    return sum(_bytes(torch.empty(shape, device="meta"), way, states) for shape in shapes)


def _bytes(like: torch.Tensor, way: Rung, states: int) -> float:
    elements = like.numel()
    if way.weights == FP32:
        return elements * 4.0 * (2 + states)
    beside = WAYS[way.weights].bytes_beside
    if elements <= _CHECKED_ALONE and beside != math.floor(beside):
        beside = math.floor(beside) + 2
    each = STATE_FORMS[way.state].bytes_each * elements
    if not like.dim():  # what has no dimension stays FP32
        each = 4.0
    elif way.state == "8bit":
        each = elements + torch.bfloat16.itemsize * math.prod(StateBlocks.of(like).shape)
    return elements * (2 + 2 + beside) + states * each


@dataclass(frozen=True, eq=False)
class Group:
    """Parameters of equal blocks, which are held in one way.

    effects: what each way does to the losses, in units of the distance between two orders. bytes: what it takes.
    """

    pattern: str
    names: tuple[str, ...]
    elements: int
    effects: Mapping[Rung, Tensor]
    bytes: Mapping[Rung, float]

    def error(self, way: Rung) -> float:
        """Return the root mean square of the effect of a way in this group alone."""
        return float(self.effects[way].square().mean().sqrt())


Chosen = dict[Group, Rung]


def groups_of(scoring: Scoring, shapes: Mapping[str, torch.Size], unit: float) -> list[Group]:
    """Return the groups: names that differ in the numbers of layers only, of one shape."""
    members: dict[tuple[str, torch.Size], list[str]] = {}
    for name, shape in shapes.items():
        members.setdefault((numberless(name), shape), []).append(name)
    found = []
    for names in members.values():
        of = [shapes[name] for name in names]
        effects = {}
        for way in ways(scoring.states):
            effect = (scoring.effect(names, way.weights) + scoring.effect(names, way.state)) / unit
            if bool(effect.isfinite().all()):
                effects[way] = effect
        sizes = {way: bytes_of(of, way, scoring.states) for way in effects}
        pattern = numberless(names[0]) if len(names) > 1 else names[0]
        found.append(Group(pattern, tuple(names), sum(shape.numel() for shape in of), effects, sizes))
    return found


def bytes_of_choice(chosen: Chosen) -> float:
    """Return the bytes of a parameter, the mean over all."""
    return sum(group.bytes[way] for group, way in chosen.items()) / sum(group.elements for group in chosen)


def predicted(chosen: Chosen) -> RunDistance:
    """Predict the distance of a choice: errors of groups are independent or add up, whichever gives more."""
    effects = torch.stack([group.effects[way] for group, way in chosen.items()])
    alone, together = effects.square().mean(1).sum(), effects.sum(0)
    error = math.sqrt(max(float(alone), float(together.square().mean())))
    return RunDistance(error, float(together.mean()))


def choose(groups: Sequence[Group], tolerance: float) -> Chosen:
    """Return the fewest bytes that are predicted to hold.

    An error has a price in bytes, and each group takes the way that is cheapest at that price. The least price at which
    the whole holds is found by bisection. Then each group takes fewer bytes where the whole still holds. FP32
    parameters come last: a small one takes no more bytes than masters, but makes FP32 of what it meets.
    """
    squares = {group: {way: group.error(way) ** 2 for way in group.bytes} for group in groups}

    def at(price: float, wide: bool) -> Chosen:
        """Return the choice at a price, of which this is the binary logarithm. wide: with FP32 parameters."""
        chosen = {}
        for group, errors in squares.items():
            some = [way for way in errors if wide or way.weights != FP32] or [*errors]
            chosen[group] = min(some, key=lambda way: (group.bytes[way] + 2.0**price * errors[way], group.bytes[way]))
        return chosen

    wide = predicted(at(_DEAREST, False)).size > tolerance
    low, high = -_DEAREST, _DEAREST
    while high - low > 1e-3 and predicted(at(high, wide)).size <= tolerance:
        middle = (low + high) / 2
        low, high = (low, middle) if predicted(at(middle, wide)).size <= tolerance else (middle, high)
    chosen = at(high, wide)
    for group in sorted(groups, key=lambda group: -group.bytes[chosen[group]]):
        for way in sorted(group.bytes, key=lambda way: group.bytes[way]):
            if way == chosen[group] or predicted({**chosen, group: way}).size <= tolerance:
                chosen[group] = way
                break
    return chosen


def choice_of(group: Group, way: Rung, scoring: Scoring) -> WeightChoice:
    """Return a choice, with what was measured of it."""
    rows = [scoring.updates[name] for name in group.names]
    updates = max(sum(row.updates for row in rows), 1)
    lost, size = (sum(getattr(row, name) * row.updates for row in rows) / updates for name in ("lost", "size"))
    masters = Rung("split", torch.float32)
    errors = {each.weights: group.error(each) for each in group.effects if each.state is torch.float32}
    for state in STATES[:-1]:
        if (held := Rung("split", state)) in group.effects:
            error = group.effects[held] - group.effects[masters]
            errors[state_name(state)] = float(error.square().mean().sqrt())
    return WeightChoice(
        pattern=group.pattern,
        parameters=len(group.names),
        elements=group.elements,
        weights=way.weights,
        state_dtype=state_name(way.state),
        bytes=group.bytes[way] / group.elements,
        lost=lost,
        size=size,
        error=group.error(way),
        errors=errors,
        why=_why(way, errors, lost),
    )


def _why(way: Rung, errors: Mapping[str, float], lost: float) -> str:
    """Say what the next cheaper way would do, for the weights and for the state."""
    cheaper, words = ("split", "with masters") if way.weights == FP32 else ("stochastic", "rounded stochastically")
    said = []
    if way.weights != cheaper and errors.get(cheaper):
        said.append(f"{words} the losses would be {errors[cheaper]:.2g} from FP32's")
    if way.weights != FP32 and way.state != "8bit" and errors.get("8bit"):
        said.append(f"with state in 8 bits the losses would be {errors['8bit']:.2g} from FP32's")
    return "; ".join(said) or ("fits" if lost > THRESHOLD else "fits; round-to-nearest would, too")


def recipe_of(base: Recipe, chosen: Chosen) -> Recipe:
    """Return `base` with the way of most elements as the usual one, and rules for the other parameters.

    Patterns stand before names, for the last rule that fits a name decides.
    """
    counts: Counter[Rung] = Counter()
    for group, way in chosen.items():
        counts[way] += group.elements
    usual = counts.most_common(1)[0][0]
    by_name = {name: way for group, way in chosen.items() for name in group.names}
    patterns: dict[str, Any] = {}
    alone: dict[str, Any] = {}
    for group, way in chosen.items():
        if way != usual:
            rule = _rule(way, usual)
            fits = [name for name in by_name if fnmatchcase(name, group.pattern)]
            if len(group.names) > 1 and all(by_name[name] == way for name in fits):
                patterns[group.pattern] = rule
            else:
                alone |= dict.fromkeys(group.names, rule)
    masters = any(way.weights != FP32 and WAYS[way.weights].has_masters for way in counts)
    is_wide = usual.weights == FP32
    return changed(
        base,
        parameter_dtype=FP32 if is_wide else "bfloat16",
        weights=Settings.weights if is_wide else usual.weights,
        state_dtype=state_name(usual.state),
        parameters={**patterns, **alone},
        use_master_weights_in_ckpt=base.use_master_weights_in_ckpt and masters,
        fused=base.fused and usual.weights == "stochastic",
    )


def _rule(way: Rung, usual: Rung) -> Any:
    """Return the keys of a rule that differ from the usual way."""
    if way.weights == FP32:
        return FP32
    rule = {"dtype": "bfloat16"} if usual.weights == FP32 else {}
    if way.weights != (Settings.weights if usual.weights == FP32 else usual.weights):
        rule["weights"] = way.weights
    if way.state != usual.state:
        rule["state_dtype"] = state_name(way.state)
    return rule
