"""Why a name is in the list that it is in."""

from __future__ import annotations

from hmpx.insight.recording.words import short_places
from hmpx.insight.tuning.charges import Scored
from hmpx.insight.tuning.choice import Choice
from hmpx.insight.tuning.problem import Chosen, Part, Problem


def choices_of(problem: Problem, chosen: Chosen, tolerance: float, unit: str) -> tuple[Choice, ...]:
    """A `Choice` for each part, what is in FP32 first, then what does most."""
    found = [_choice(problem, part, chosen, tolerance, unit) for part in problem.parts]
    return tuple(sorted(found, key=lambda choice: (choice.dtype != "float32", -choice.budget, choice.name)))


def _choice(problem: Problem, part: Part, chosen: Chosen, tolerance: float, unit: str) -> Choice:
    effect, gain = problem.alone(part, chosen)
    budget = (effect.size / tolerance) ** 2 if tolerance else 0.0
    sites = problem.sites[part]
    worst = max(sites, key=lambda site: problem.scale.effect(site.charge).size)
    return Choice(
        name=part.name,
        module=part.module,
        dtype="bfloat16" if part in chosen else "float32",
        gradient_error=effect.gradient_error,
        loss_change=effect.loss_change,
        budget=budget,
        gain=gain,
        unit=unit,
        calls=sum(site.calls for site in sites),
        worst=_place(worst) if len(sites) > 1 or budget > 0.01 else "",
        why=_why(problem, part, chosen, budget, gain),
    )


def _why(problem: Problem, part: Part, chosen: Chosen, budget: float, gain: float) -> str:
    if part in problem.pinned:
        return problem.pinned[part]
    unseen = "; not seen by autograd, so verified alone" if part in problem.unseen else ""
    if part in chosen:
        return f"fits{unseen}"
    if budget > 1:
        return f"breaks the tolerance by itself{unseen}"
    if gain <= 0:
        return f"BF16 brings nothing here{unseen}"
    return f"costs more than it brings{unseen}"


def _place(site: Scored) -> str:
    return short_places(", ".join(filter(None, (site.site.module, site.site.where))))
