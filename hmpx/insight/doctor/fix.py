"""The least recipe that answers what was found, and why."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Collection, Iterable, Mapping

import torch

from hmpx.insight.doctor.problem import Problem
from hmpx.insight.doctor.update_view import Stepped
from hmpx.insight.doctor.writes import AVERAGED
from hmpx.insight.text_table import short_places, size
from hmpx.ops.policies.catalog import catalog
from hmpx.ops.policies.op_facts import O2_BF16
from hmpx.recipes.recipe import Recipe
from hmpx.recipes.stated import as_recipe
from hmpx.updates.stepping.names import parameters

Parameter = torch.nn.Parameter
_OF_WEIGHTS = {"lost updates", "weight decay", "optimizer state"}
_OF_OPS = {"loss", "log", "softmax", "cumulative sum"}
_OF_MODULES = {"norm statistics", "variance by difference"}


def recipe_for(
    problems: Iterable[Problem], optimizers: Iterable[Stepped], names: Mapping[Parameter, str]
) -> tuple[Recipe | None, dict[str, str], str]:
    """The recipe, the reason for each of its keys, and its text with these as comments; None if none is of use."""
    problems, seen = list(problems), list(optimizers)
    ops = sorted({op for each in problems if each.kind in _OF_OPS for op in each.ops if op in catalog()})
    modules = sorted({name for each in problems if each.kind in _OF_MODULES for name in each.names})
    half = any(p.dtype is torch.float16 for each in seen for p in parameters(each.optimizer))
    low = [p for p in names if p.dtype is torch.bfloat16]
    accumulated = [each for each in problems if each.kind == "gradient accumulation"]
    of_weights = [each for each in problems if each.kind in _OF_WEIGHTS and (each.wrong or each.kind != "lost updates")]
    of_weights += [each for each in problems if each.kind == "average of weights" and AVERAGED in each.said]
    of_ops = [each for each in problems if each.kind in _OF_OPS and ops]
    of_modules = [each for each in problems if each.kind in _OF_MODULES and modules]
    of_fp16 = [each for each in problems if half and each.kind in ("lost updates", "loss scaling", "GradScaler")]
    answered = [*of_ops, *of_modules, *of_weights, *accumulated, *of_fp16]
    if not answered:
        return None, {}, ""
    keys: dict[str, object] = {"opt_level": None}
    reasons = {"opt_level": "torch's ops stay as they are"}
    if of_ops or of_modules or half:
        keys = {"opt_level": "O1", "bf16": sorted(O2_BF16 & catalog().keys()), "fp32": ops, "promote": []}
        reasons = {"bf16": "products are in BF16", "fp32": _said(of_ops)}
    if of_modules:
        keys["modules"] = dict.fromkeys(modules, "float32")
        reasons["modules"] = _said(of_modules)
    keys["parameter_dtype"] = "bfloat16" if 2 * len(low) > len(names) else "float32"
    reasons["parameter_dtype"] = _said(of_fp16)
    if half:  # recipes hold weights in BF16 or FP32
        return as_recipe(keys), reasons, _text(keys, reasons, problems, answered)
    if of_weights or accumulated:
        keys["weights"] = "stochastic" if of_weights else "nearest"
        reasons["weights"] = _said(of_weights)
    if accumulated:
        keys["use_fp32_grad_acc"] = True
        reasons["use_fp32_grad_acc"] = _said(accumulated)
    if exceptions := _exceptions(names, str(keys["parameter_dtype"])):
        keys["parameters"] = exceptions
        reasons["parameters"] = "as they are in the script"
    recipe = as_recipe(keys)
    if of_weights:
        reasons["weights"] += f"\n{_bytes(recipe, seen)}"
    return recipe, reasons, _text(keys, reasons, problems, answered)


def _said(problems: Iterable[Problem]) -> str:
    return "\n".join(each.said for each in problems)


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


def _text(
    keys: Mapping[str, object], reasons: Mapping[str, str], problems: Iterable[Problem], answered: Collection[Problem]
) -> str:
    lines = ["# Written by `hmpx.doctor`: the least that answers what it found."]
    for key, value in keys.items():
        lines += _comment(reasons.get(key, ""))
        if isinstance(value, dict):
            lines += [f"{key}:", *(f'  "{name}": {each}' for name, each in value.items())]
        elif isinstance(value, list):
            lines.append(f"{key}: [{', '.join(value)}]")
        else:
            lines.append(f"{key}: {'null' if value is None else str(value).lower() if value is True else value}")
    if left := [f"{each.kind}: {short_places(each.where)}: {each.do}" for each in problems if each not in answered]:
        lines += ["", "# What no recipe answers is to be edited in the script:", *_comment("\n".join(left))]
    return "\n".join([*lines, ""])


def _comment(text: str) -> list[str]:
    wrapped = [textwrap.wrap(line, 110, initial_indent="# ", subsequent_indent="#   ") for line in text.splitlines()]
    return [line for lines in wrapped for line in lines]
