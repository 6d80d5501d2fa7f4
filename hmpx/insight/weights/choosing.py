"""Chooses the fewest bytes with which the predicted distance from FP32 is within a tolerance, with reasons."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from hmpx.insight.module_names import numberless
from hmpx.insight.tensors import Tensor
from hmpx.insight.tuning.course import RunDistance
from hmpx.insight.weights.ladder import FP32, STATES, WEIGHTS, Rung, bytes_of, rungs
from hmpx.insight.weights.scoring import Scoring
from hmpx.insight.weights.tuned_weights import WeightChoice
from hmpx.updates.holding.state_forms import state_name
from hmpx.updates.lost_updates import THRESHOLD


@dataclass(frozen=True, eq=False)
class Group:
    """Parameters of equal blocks, which are held in one way.

    effects: what each rung does to the losses, in units of the distance between two orders. bytes: what it takes.
    """

    pattern: str
    names: tuple[str, ...]
    elements: int
    effects: Mapping[Rung, Tensor]
    bytes: Mapping[Rung, float]

    def error(self, rung: Rung) -> float:
        """Root mean square of the effect of a rung in this group alone."""
        return float(self.effects[rung].square().mean().sqrt())


Chosen = dict[Group, Rung]


def bytes_of_choice(chosen: Mapping[Group, Rung]) -> float:
    """Mean over all parameters."""
    return sum(group.bytes[rung] for group, rung in chosen.items()) / sum(group.elements for group in chosen)


def groups_of(scoring: Scoring, shapes: Mapping[str, torch.Size], unit: float) -> list[Group]:
    """The groups: names that differ in the numbers of layers only, of one shape."""
    members: dict[tuple[str, torch.Size], list[str]] = {}
    for name, shape in shapes.items():
        members.setdefault((numberless(name), shape), []).append(name)
    found = []
    for names in members.values():
        of = [shapes[name] for name in names]
        ways = rungs(scoring.states)
        effects = {way: (scoring.vector(names, way.weights) + scoring.vector(names, way.state)) / unit for way in ways}
        effects = {way: e for way, e in effects.items() if bool(e.isfinite().all())}
        sizes = {way: bytes_of(of, way, scoring.states) for way in effects}
        pattern = numberless(names[0]) if len(names) > 1 else names[0]
        found.append(Group(pattern, tuple(names), sum(shape.numel() for shape in of), effects, sizes))
    return found


def predicted(chosen: Mapping[Group, Rung]) -> RunDistance:
    """The predicted distance of a choice: errors of groups are independent or add up, whichever gives more."""
    effects = torch.stack([group.effects[rung] for group, rung in chosen.items()])
    alone, together = effects.square().mean(1).sum(), effects.sum(0)
    error = math.sqrt(max(float(alone), float(together.square().mean())))
    return RunDistance(error, float(together.mean()))


def choose(groups: Sequence[Group], tolerance: float) -> Chosen:
    """Begin with the fewest bytes, take what saves most error for a byte, and give back what is not needed.

    FP32 parameters come last: a small one takes no more bytes than masters, but makes FP32 of what it meets.
    """
    chosen = {group: min(group.bytes, key=lambda rung: (group.bytes[rung], group.error(rung))) for group in groups}
    for wide in (False, True):
        while predicted(chosen).size > tolerance:
            better = max(_better(chosen, wide), default=None, key=lambda step: step[0])
            if better is None:
                break
            chosen[better[1]] = better[2]
    for group in sorted(groups, key=lambda group: -group.bytes[chosen[group]]):
        for rung in sorted(group.bytes, key=lambda rung: group.bytes[rung]):
            if group.bytes[rung] >= group.bytes[chosen[group]]:
                break
            if predicted({**chosen, group: rung}).size <= tolerance:
                chosen[group] = rung
                break
    return chosen


def _better(chosen: Chosen, wide: bool) -> list[tuple[float, Group, Rung]]:
    """Changes of one group, each with the error square that it saves for each byte."""
    now, found = predicted(chosen).size ** 2, []
    for group, rung in chosen.items():
        for other, size in group.bytes.items():
            if other.weights == FP32 and not wide:
                continue
            more = size - group.bytes[rung]
            if other.weights == FP32:
                more = max(more, group.elements / 128)  # a small parameter in FP32 takes as much as with masters
            less = now - predicted({**chosen, group: other}).size ** 2
            if more > 0 and less > 0:
                found.append((less / more, group, other))
    return found


def choice_of(group: Group, rung: Rung, scoring: Scoring) -> WeightChoice:
    """A choice, with what was measured of it."""
    assert scoring.updates is not None, "the run is over"
    rows = [scoring.updates[name] for name in group.names]
    updates = sum(row.updates for row in rows)

    def mean(name: str) -> float:
        return sum(getattr(row, name) * row.updates for row in rows) / max(updates, 1)

    errors = _errors(group)
    lost = mean("lost")
    return WeightChoice(
        pattern=group.pattern,
        parameters=len(group.names),
        elements=group.elements,
        weights=rung.weights,
        state_dtype=state_name(rung.state),
        bytes=group.bytes[rung] / group.elements,
        lost=lost,
        size=mean("size"),
        error=group.error(rung),
        errors=errors,
        why=_why(rung, errors, lost),
    )


def _errors(group: Group) -> dict[str, float]:
    """Of each way to hold the weights, with FP32 state, and of each state, with weights in FP32's place."""
    exact = STATES[-1]
    found = {way: group.error(Rung(way, exact)) for way in WEIGHTS if Rung(way, exact) in group.effects}
    for state in STATES[:-1]:
        if Rung("split", state) in group.effects:
            masters = group.effects[Rung("split", exact)]
            found[state_name(state)] = float((group.effects[Rung("split", state)] - masters).square().mean().sqrt())
    return found


def _why(rung: Rung, errors: dict[str, float], lost: float) -> str:
    """What the next cheaper way would do, for the weights and for the state."""
    state = state_name(rung.state)
    cheaper, words = ("split", "with masters") if rung.weights == FP32 else ("stochastic", "rounded stochastically")
    said = [f"{words} the losses would be {errors[cheaper]:.2g} from FP32's"] * bool(
        rung.weights != cheaper and errors.get(cheaper)
    )
    if rung.weights != FP32 and state != "8bit" and errors.get("8bit"):
        said.append(f"with state in 8 bits the losses would be {errors['8bit']:.2g} from FP32's")
    return "; ".join(said) or ("fits" if lost > THRESHOLD else "fits; round-to-nearest would, too")
