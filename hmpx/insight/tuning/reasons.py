"""Why a name is in the list that it is in."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from hmpx.insight.recording.words import short_places
from hmpx.insight.tuning.charges import Scored
from hmpx.insight.tuning.choice import Choice
from hmpx.insight.tuning.problem import Chosen, Part, Problem


def choices_of(problem: Problem, chosen: Chosen, low: Collection[str], tolerance: float, unit: str) -> list[Choice]:
    """A `Choice` for each name, and for each module in which it is another one: what is in FP32 first, the worst first.

    low: the names that are in BF16 but for some modules.
    """

    def choices() -> Iterator[Choice]:
        by_name: dict[str, list[Part]] = {}
        for part in problem.parts:
            by_name.setdefault(part.name, []).append(part)
        for name, parts in by_name.items():
            usual = [part for part in parts if (part in chosen) is (name in low)]
            yield _choice(problem, name, "", usual, chosen, tolerance, unit)
            for part in parts:
                if part not in usual:
                    yield _choice(problem, name, part.module, [part], chosen, tolerance, unit)

    return sorted(choices(), key=lambda choice: (choice.dtype != "float32", -choice.budget, choice.name, choice.module))


def _choice(
    problem: Problem, name: str, module: str, parts: list[Part], chosen: Chosen, tolerance: float, unit: str
) -> Choice:
    effect, gain = problem.alone(parts, chosen)
    budget = (effect.size / tolerance) ** 2 if tolerance else 0.0
    sites = [site for part in parts for site in problem.sites[part]]
    worst = max(sites, key=lambda site: problem.scale.effect(site.charge).size)
    return Choice(
        name=name,
        module=module,
        dtype="bfloat16" if parts[0] in chosen else "float32",
        gradient_error=effect.gradient_error,
        loss_change=effect.loss_change,
        budget=budget,
        gain=gain,
        unit=unit,
        calls=sum(site.calls for site in sites),
        worst=_place(worst) if len(sites) > 1 or budget > 0.01 else "",
        why=_why(problem, parts, chosen, budget, gain),
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
    return f"{'BF16 brings nothing here' if gain <= 0 else 'costs more than it brings'}{unseen}"


def _place(site: Scored) -> str:
    return short_places(", ".join(filter(None, (site.site.module, site.site.where))))
