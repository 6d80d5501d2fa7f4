"""Makes lists and rules for modules of a choice: as a policy, as a recipe, as files with a reason for each line."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hmpx.insight.tuning.choices import Choice
from hmpx.insight.tuning.worth import WIDE, Chosen, Low, NameInModule
from hmpx.ops.policies.op_lists import FP8_FORMAT, SIDES
from hmpx.ops.policies.policy import Policy
from hmpx.recipes.recipe import Recipe

Rules = dict[str, dict[str, list[str]]]  # by module: by list, the names


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
    return replace(base or Recipe(parameter_dtype="float32", low_precision="bfloat16"), modules=rules, **keys)


def save(
    folder: str | os.PathLike[str], policy: Policy, recipe: Recipe, choices: Sequence[Choice], head: str, low: Low
) -> None:
    """Write ``bf16.txt``, ``fp32.txt``, ``promote.txt`` and ``recipe.yaml``.

    The text files know no modules. So they have a name in the wide list where the recipe has it there in some module.
    """
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    reasons = {choice.name: choice.reason for choice in choices if not choice.module}
    divided: dict[str, list[str]] = {}
    for choice in choices:
        if choice.module:
            divided.setdefault(choice.name, []).append(choice.module)
    for name, modules in divided.items():
        words = low.upper(), WIDE[low].upper()
        usual, other = words if name in getattr(policy, low) else words[::-1]
        reasons[name] += f"; with recipe.yaml in {usual}, and in {other} in {', '.join(modules)}"
    wide = {*getattr(policy, WIDE[low]), *divided}
    lists = policy_of(policy, low, {*getattr(policy, low)} - {*divided}, wide)
    comments = [f"# {line}" for line in head.splitlines()]
    for side in SIDES:
        names = getattr(lists, side)
        if side == "fp8" and not names:
            continue
        width = max((len(name) for name in names if name in reasons), default=0)
        lines = [*comments, *(f"{name:{width}}  # {reasons[name]}" for name in names if name in reasons)]
        rest = [name for name in names if name not in reasons]
        if rest:
            lines.append("# Not called by the batches that it was tuned on: as in the lists that it began with.")
        (path / f"{side}.txt").write_text("\n".join([*lines, *rest]) + "\n", encoding="utf-8")
    comments += [f"# {choice}" for choice in choices]
    (path / "recipe.yaml").write_text("\n".join([*comments, str(recipe)]), encoding="utf-8")
