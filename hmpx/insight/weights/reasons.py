"""Why parameters are to be held as they are."""

from __future__ import annotations

import math

from hmpx.insight.tuning.choice import percent
from hmpx.insight.weights.choosing import Group
from hmpx.insight.weights.ladder import FP32, STATES, WEIGHTS, Rung
from hmpx.insight.weights.scoring import Scoring
from hmpx.insight.weights.tuned_weights import WeightChoice
from hmpx.updates.state_forms import state_name
from hmpx.updates.update_table import THRESHOLD


def choice_of(group: Group, rung: Rung, scoring: Scoring, apart: float, tolerance: float) -> WeightChoice:
    """A choice, with what was measured of it. apart: the norm of what another order does to the weights."""
    assert scoring.updates is not None, "the run is over"
    rows = [scoring.updates[name] for name in group.names]
    updates = sum(row.updates for row in rows)

    def mean(name: str) -> float:
        return sum(getattr(row, name) * row.updates for row in rows) / max(updates, 1)

    squares = sum(scoring.noise[row.name] ** 2 * row.elements for row in rows)
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
        noise=math.sqrt(squares) / apart if apart else math.inf,
        error=group.error(rung),
        errors=errors,
        why=_why(rung, errors, lost, tolerance),
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


def _why(rung: Rung, errors: dict[str, float], lost: float, tolerance: float) -> str:
    """What the next cheaper way would do, for the weights and for the state."""
    state = state_name(rung.state)
    cheaper = "master" if rung.weights == FP32 else "stochastic"
    said = [
        f"{words}, {_budget(errors[which], tolerance)}"
        for which, chosen, words in (
            (cheaper, rung.weights, "with masters" if cheaper == "master" else "rounded stochastically"),
            ("8bit", state if rung.weights != FP32 else "8bit", "with state in 8 bits"),
        )
        if which != chosen and errors.get(which)
    ]
    return "; ".join(said) or ("fits" if lost > THRESHOLD else "fits; round-to-nearest would, too")


def _budget(error: float, tolerance: float) -> str:
    return f"error {error:.1e}" + (f", {percent(error / tolerance)} of the tolerance" if tolerance else "")
