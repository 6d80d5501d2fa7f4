"""The least recipe that answers what was found, and why."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Mapping

import torch

from hmpx.insight.doctor.problem import Problem
from hmpx.insight.doctor.update_view import Stepped
from hmpx.insight.recording.words import size
from hmpx.ops.catalog import catalog
from hmpx.ops.op_facts import O2_BF16
from hmpx.recipes.recipe import Recipe, as_recipe
from hmpx.updates.names import parameters

Parameter = torch.nn.Parameter
_OF_WEIGHTS = {"lost updates", "weight decay", "optimizer state"}
_OF_OPS = {"loss", "log", "softmax", "cumulative sum"}
_OF_MODULES = {"norm statistics", "variance by difference"}


def recipe_for(
    problems: Iterable[Problem], optimizers: Iterable[Stepped], names: Mapping[Parameter, str]
) -> tuple[Recipe | None, dict[str, str], str]:
    """The recipe, the reason for each of its keys, and its text with these as comments; None if none is of use."""
    problems, seen = list(problems), list(optimizers)
    kinds = {each.kind for each in problems if each.wrong or each.kind not in _OF_WEIGHTS}
    ops = sorted({op for each in problems if each.kind in _OF_OPS for op in each.ops if op in catalog()})
    modules = sorted({name for each in problems if each.kind in _OF_MODULES for name in each.names})
    if any(p.dtype is torch.float16 for each in seen for p in parameters(each.optimizer)):
        return None, {}, ""  # recipes hold weights in BF16 or FP32
    keys: dict[str, object] = {}
    reasons: dict[str, str] = {}
    if ops or modules:
        keys |= {"opt_level": "O1", "bf16": sorted(O2_BF16 & catalog().keys()), "fp32": ops, "promote": []}
        reasons["bf16"] = "products stay in BF16"
        reasons["fp32"] = _said(problems, _OF_OPS)
        if modules:
            keys["modules"] = dict.fromkeys(modules, "float32")
            reasons["modules"] = _said(problems, _OF_MODULES)
    else:
        keys["opt_level"] = None
        reasons["opt_level"] = "torch's ops stay as they are"
    low = [p for p in names if p.dtype is torch.bfloat16]
    keys["parameter_dtype"] = "bfloat16" if 2 * len(low) > len(names) else "float32"
    of_weights = kinds & _OF_WEIGHTS
    accumulated = any(each.kind == "gradient accumulation" for each in problems)
    if of_weights or accumulated:
        keys["weights"] = "stochastic" if of_weights else "nearest"
        reasons["weights"] = _said(problems, _OF_WEIGHTS)
    if accumulated:
        keys["use_fp32_grad_acc"] = True
        reasons["use_fp32_grad_acc"] = _said(problems, {"gradient accumulation"})
    elif not (of_weights or ops or modules):
        return None, {}, ""
    exceptions = _exceptions(names, str(keys["parameter_dtype"]))
    if exceptions:
        keys["parameters"] = exceptions
        reasons["parameters"] = "as they are in the script"
    recipe = as_recipe(keys)
    if of_weights:
        reasons["weights"] += f"\n{_bytes(recipe, seen)}"
    return recipe, reasons, _text(keys, reasons)


def _said(problems: Iterable[Problem], kinds: set[str]) -> str:
    return "\n".join(each.said for each in problems if each.kind in kinds)


def _exceptions(names: Mapping[Parameter, str], dtype: str) -> dict[str, str]:
    """The parameters in another dtype, by patterns that fit no other one where there are such."""
    by_pattern: dict[str, set[str]] = {}
    for p, name in names.items():
        by_pattern.setdefault(re.sub(r"\d+", "*", name), set()).add(str(p.dtype).removeprefix("torch."))
    found = {pattern: dtypes.pop() for pattern, dtypes in by_pattern.items() if len(dtypes) == 1}
    mixed = by_pattern.keys() - found.keys()
    found |= {
        name: str(p.dtype).removeprefix("torch.") for p, name in names.items() if re.sub(r"\d+", "*", name) in mixed
    }
    return {name: each for name, each in found.items() if each != dtype}


def _bytes(recipe: Recipe, seen: Iterable[Stepped]) -> str:
    """What the recipe takes beside what the script takes today, of the weights in BF16."""
    today = elements = states = 0.0
    for each in seen:
        low = [p for p in parameters(each.optimizer) if p.dtype is torch.bfloat16 and p.requires_grad]
        elements, today = elements + sum(p.numel() for p in low), today + each.bytes
        held = [each.optimizer.state.get(p) or {} for p in low[:1]]
        states = max([states, *(sum(getattr(v, "dim", int)() > 0 for v in state.values()) for state in held)])
    then = sum(Recipe(weights=recipe.weights).bytes_per_parameter(int(states)).values()) * elements
    return f"{size(then)} of weights, gradients and state, for {size(today)} today"


def _text(keys: Mapping[str, object], reasons: Mapping[str, str]) -> str:
    lines = ["# Written by `hmpx.doctor`: the least that answers what it found."]
    for key, value in keys.items():
        for line in reasons.get(key, "").splitlines():
            lines += textwrap.wrap(line, 110, initial_indent="# ", subsequent_indent="#   ")
        if isinstance(value, dict):
            lines += [f"{key}:", *(f'  "{name}": {each}' for name, each in value.items())]
        elif isinstance(value, list):
            lines.append(f"{key}: [{', '.join(value)}]")
        else:
            lines.append(f"{key}: {'null' if value is None else str(value).lower() if value is True else value}")
    return "\n".join([*lines, ""])
