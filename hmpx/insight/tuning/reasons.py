"""Why a name is in the list that it is in."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping

from hmpx.insight.recording.words import short_places
from hmpx.insight.tuning.charges import Scored
from hmpx.insight.tuning.choice import Choice, percent
from hmpx.insight.tuning.choosing import SLACK
from hmpx.insight.tuning.problem import Chosen, Effect, Part, Problem


def choices_of(
    problem: Problem, chosen: Chosen, low: Collection[str], tolerance: float, unit: str, tried: Mapping[Chosen, Effect]
) -> list[Choice]:
    """A `Choice` for each name, and for each module in which it is another one: what is in FP32 first, the worst first.

    low: the names that are in BF16 but for some modules. tried: choices that were verified, and what they did.
    """

    def choices() -> Iterator[Choice]:
        by_name: dict[str, list[Part]] = {}
        for part in problem.parts:
            by_name.setdefault(part.name, []).append(part)
        for name, parts in by_name.items():
            usual = [part for part in parts if (part in chosen) is (name in low)]
            yield _choice(problem, name, "", usual, chosen, tolerance, unit, tried)
            for part in parts:
                if part not in usual:
                    yield _choice(problem, name, part.module, [part], chosen, tolerance, unit, tried)

    return sorted(choices(), key=lambda choice: (choice.dtype != "float32", -choice.budget, choice.name, choice.module))


def _choice(
    problem: Problem,
    name: str,
    module: str,
    parts: list[Part],
    chosen: Chosen,
    tolerance: float,
    unit: str,
    tried: Mapping[Chosen, Effect],
) -> Choice:
    effect, gain = problem.alone(parts, chosen)
    budget = (effect.size / tolerance) ** 2 if tolerance else math.inf if effect.size else 0.0
    sites = [site for part in parts for site in problem.sites[part]]
    worst = max(sites, key=lambda site: problem.scale.effect(site.charge).size)
    return Choice(
        name=name,
        module=module,
        dtype="bfloat16" if parts[0] in chosen else "float32",
        gradient_error=effect.gradient_error,
        loss_change=effect.loss_change,
        loss_error=effect.loss_error,
        budget=budget,
        gain=gain,
        unit=unit,
        calls=sum(site.calls for site in sites),
        worst=_place(worst) if len(sites) > 1 or budget > 0.01 else "",
        why=_why(problem, parts, chosen, budget, gain) or _together(problem, parts, chosen, tolerance, gain, tried),
    )


def _why(problem: Problem, parts: list[Part], chosen: Chosen, budget: float, gain: float) -> str:
    pinned = next((problem.pinned[part] for part in parts if part in problem.pinned), "")
    if pinned:
        return pinned
    unseen = "; autograd does not see it, so it was verified alone" if problem.unseen & {*parts} else ""
    if parts[0] in chosen:
        return f"fits{unseen}"
    if budget > 1:
        return f"breaks the tolerance by itself{unseen}"
    return f"BF16 brings nothing here{unseen}" if gain <= 0 else ""


def _together(
    problem: Problem, parts: list[Part], chosen: Chosen, tolerance: float, gain: float, tried: Mapping[Chosen, Effect]
) -> str:
    """Why something is in FP32 that would fit by itself, and that BF16 would bring something for."""
    added = {*parts}
    failed = [effect for each, effect in tried.items() if each & added and each - added <= chosen]
    failed = [effect for effect in failed if not effect.meets(tolerance)]
    raised = next((effect.raised for effect in failed if effect.raised), "")
    if raised:
        return f"with it in BF16 the program raises {raised}"
    if failed:
        return f"with it in BF16 the error on held-out batches is {min(effect.size for effect in failed):.1e}"
    if gain <= SLACK * (problem.cost(()) - problem.cost(problem.cheapest(0.0))):
        return f"saves under {percent(SLACK)} of what BF16 brings in all, which is no reason for an error"
    if not problem.predicted(chosen | added).meets(tolerance):
        return "fits by itself, but not with the others"
    return "not verified with the others in BF16"


def _place(site: Scored) -> str:
    return short_places(", ".join(filter(None, (site.site.module, site.site.where))))
