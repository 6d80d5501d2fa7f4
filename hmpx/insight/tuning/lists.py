"""The lists and rules that a choice comes to: as a policy, as a recipe, as files with a reason for each line."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from hmpx.insight.tuning.choice import Choice
from hmpx.insight.tuning.costs import Chosen, usually_low
from hmpx.insight.tuning.look import Place
from hmpx.ops.op_lists import SIDES
from hmpx.ops.policy import Policy
from hmpx.recipes.recipe import Recipe

Rules = dict[str, dict[str, list[str]]]  # by module: "bf16" and "fp32", and the names


def lists_and_rules(places: Iterable[Place], chosen: Chosen) -> tuple[set[str], set[str], Rules]:
    """The names for the bf16 list, those for the fp32 list, and rules for modules that differ."""
    places = [*places]
    usual = usually_low(places, chosen)
    said = {name: {"": low} for name, low in usual.items()}
    rules: Rules = {}
    for place in sorted(
        filter(lambda place: place.module, places), key=lambda p: (p.name, p.module.count("."), p.module)
    ):
        around = max((m for m in said[place.name] if not m or place.module.startswith(f"{m}.")), key=len)
        if (place in chosen) is not said[place.name][around]:
            said[place.name][place.module] = place in chosen
            rules.setdefault(place.module, {}).setdefault("bf16" if place in chosen else "fp32", []).append(place.name)
    return {name for name, low in usual.items() if low}, {name for name, low in usual.items() if not low}, rules


def policy_of(base: Policy, low: Collection[str], wide: Collection[str]) -> Policy:
    """Lists that say so of these names; of any other one what `base` says."""
    decided = {*low, *wide}
    kept = {side: [name for name in getattr(base, side) if name not in decided] for side in SIDES}
    return Policy(
        bf16=tuple(sorted([*kept["bf16"], *low])),
        fp32=tuple(sorted([*kept["fp32"], *wide])),
        promote=tuple(kept["promote"]),
    )


def recipe_of(base: Recipe | None, policy: Policy, rules: Rules) -> Recipe:
    """`base` with other lists and rules of modules; without one, FP32 weights."""
    lists = {side: getattr(policy, side) for side in SIDES}
    return replace(base or Recipe(parameter_dtype="float32", low_precision="bfloat16"), modules=rules, **lists)


def save(folder: str | os.PathLike[str], policy: Policy, recipe: Recipe, choices: Sequence[Choice], head: str) -> None:
    """Write ``bf16.txt``, ``fp32.txt``, ``promote.txt`` and ``recipe.yaml``.

    The lists know no modules: a name that the recipe has in FP32 in some of them is in FP32 there.
    """
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    reasons = {choice.name: choice.reason for choice in choices if not choice.module}
    divided: dict[str, list[str]] = {}
    for choice in choices:
        if choice.module:
            if choice.name not in divided:
                reasons[choice.name] = choice.reason
            divided.setdefault(choice.name, []).append(choice.module)
    for name, modules in divided.items():
        but, others = ("BF16", "FP32") if name in policy.bf16 else ("FP32", "BF16")
        reasons[name] += f"; with recipe.yaml in {but}, and in {others} in {', '.join(modules)}"
    lists = policy_of(policy, {*policy.bf16} - {*divided}, {*policy.fp32, *divided})
    comments = [f"# {line}" for line in head.splitlines()]
    for side in SIDES:
        names = getattr(lists, side)
        width = max((len(name) for name in names if name in reasons), default=0)
        lines = [*comments, *(f"{name:{width}}  # {reasons[name]}" for name in names if name in reasons)]
        rest = [name for name in names if name not in reasons]
        if rest:
            lines.append("# Not called by the batches that it was tuned on: as in the lists that it began with.")
        (path / f"{side}.txt").write_text("\n".join([*lines, *rest]) + "\n", encoding="utf-8")
    comments += [f"# {choice}" for choice in choices]
    (path / "recipe.yaml").write_text("\n".join([*comments, str(recipe)]), encoding="utf-8")
