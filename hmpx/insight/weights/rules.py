"""Makes a recipe of a choice: the way of most elements as the usual one, and rules for the others."""

from __future__ import annotations

from collections import Counter
from fnmatch import fnmatchcase
from typing import Any

from hmpx.insight.weights.choosing import Chosen
from hmpx.insight.weights.ladder import FP32, Rung
from hmpx.recipes.recipe import Recipe, changed
from hmpx.updates.holding.settings import Settings
from hmpx.updates.holding.state_forms import state_name
from hmpx.updates.holding.stores import WAYS


def recipe_of(base: Recipe, chosen: Chosen) -> Recipe:
    """`base` with other weights and state. Patterns stand before names, for the last that fits decides."""
    counts: Counter[Rung] = Counter()
    for group, rung in chosen.items():
        counts[rung] += group.elements
    usual = counts.most_common(1)[0][0]
    by_name = {name: rung for group, rung in chosen.items() for name in group.names}
    patterns: dict[str, Any] = {}
    alone: dict[str, Any] = {}
    for group, rung in chosen.items():
        if rung != usual:
            rule = _rule(rung, usual)
            fits = [name for name in by_name if fnmatchcase(name, group.pattern)]
            if len(group.names) > 1 and all(by_name[name] == rung for name in fits):
                patterns[group.pattern] = rule
            else:
                alone |= dict.fromkeys(group.names, rule)
    masters = any(rung.weights != FP32 and WAYS[rung.weights].has_masters for rung in counts)
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


def _rule(rung: Rung, usual: Rung) -> Any:
    """The keys of a rule that differ from the usual way."""
    if rung.weights == FP32:
        return FP32
    rule = {"dtype": "bfloat16"} if usual.weights == FP32 else {}
    if rung.weights != (Settings.weights if usual.weights == FP32 else usual.weights):
        rule["weights"] = rung.weights
    if rung.state != usual.state:
        rule["state_dtype"] = state_name(rung.state)
    return rule
