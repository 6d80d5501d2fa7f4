"""The smallest recipe that answers what was found, and why."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from hmpx.insight.doctor.diagnosis import Problem
from hmpx.insight.tensors import name as dtype_name
from hmpx.insight.text_table import short_places
from hmpx.ops.policies.catalog import catalog
from hmpx.ops.policies.op_facts import O2_BF16
from hmpx.recipes.keys import DTYPES
from hmpx.recipes.recipe import Recipe
from hmpx.recipes.stated import as_recipe

Parameter = torch.nn.Parameter


def recipe_for(
    problems: Sequence[Problem], trained: Sequence[Parameter], names: Mapping[Parameter, str], products_in_low: bool
) -> tuple[Recipe | None, dict[str, str], str]:
    """Return the recipe, the reason for each of its keys, and its text with these as comments; None if none is of use.

    Args:
        problems: all findings; each says which keys answer it.
        trained: the parameters of the optimizers. names: every parameter of the models, trained or not.
        products_in_low: whether the program itself, without torch.autocast, computes products in low precision.
    """
    answered = [each for each in problems if each.recipe]
    if not answered:
        return None, {}, ""
    half = any(p.dtype is torch.float16 for p in trained)
    every = {*trained, *names}
    low = [p for p in every if p.dtype is torch.bfloat16]
    asked = {key for each in answered for key in each.recipe}
    keys: dict[str, Any] = {"opt_level": None}
    reasons = {key: "\n".join(each.said for each in answered if key in each.recipe) for key in asked}
    reasons["opt_level"] = "torch's ops stay as they are"
    if half or asked & {"fp32", "modules"}:
        del reasons["opt_level"]
        products = sorted(O2_BF16 & catalog().keys()) if half or low or products_in_low else []
        listed = sorted({op for each in answered for op in each.recipe.get("fp32", ())})
        keys = {"opt_level": "O1", "bf16": products, "fp32": listed, "promote": []}
        reasons["bf16"] = "products are in BF16" if products else "products stay as they are"
    if modules := _modules(answered):
        keys["modules"] = modules
    keys["parameter_dtype"] = "bfloat16" if 2 * len(low) > len(every) and not half else "float32"
    if not half:  # a recipe holds weights in BF16 or FP32, and FP32 weights need no more
        if asked & {"weights", "use_fp32_grad_acc"}:
            keys["weights"] = "stochastic" if "weights" in asked else "nearest"
        if "use_fp32_grad_acc" in asked:
            keys["use_fp32_grad_acc"] = True
        if exceptions := _exceptions(names, keys["parameter_dtype"]):
            keys["parameters"] = exceptions
            reasons["parameters"] = "as they are in the script"
    return as_recipe(keys), reasons, _text(keys, reasons, problems)


def _modules(answered: Iterable[Problem]) -> dict[str, Any]:
    """Return the rules for modules, sorted. A dtype for all of a module outranks a list."""
    found: dict[str, Any] = {}
    for each in answered:
        for name, rule in each.recipe.get("modules", {}).items():
            before = found.get(name, rule)
            if isinstance(rule, dict) and isinstance(before, dict):
                found[name] = {"fp32": sorted({*rule["fp32"], *before["fp32"]})}
            else:
                found[name] = "float32"
    return dict(sorted(found.items()))


def _exceptions(names: Mapping[Parameter, str], dtype: str) -> dict[str, str]:
    """Return the parameters in another dtype, by patterns that fit all layers if these are alike."""
    patterns: dict[str, dict[str, str]] = {}
    for p, name in names.items():
        patterns.setdefault(re.sub(r"\d+", "*", name), {})[name] = dtype_name(p.dtype)
    found: dict[str, str] = {}
    for pattern, dtypes in patterns.items():
        found |= dtypes if len({*dtypes.values()}) > 1 else {pattern: next(iter(dtypes.values()))}
    return {name: each for name, each in found.items() if each != dtype and each in DTYPES}


def _text(keys: Mapping[str, Any], reasons: Mapping[str, str], problems: Iterable[Problem]) -> str:
    lines = ["# Written by `hmpx.doctor`: the smallest recipe that answers what it found."]
    for key, value in keys.items():
        lines += _comment(reasons.get(key, ""))
        if isinstance(value, dict):
            lines += [f"{key}:", *(f'  "{name}": {_yaml(each)}' for name, each in value.items())]
        else:
            lines.append(f"{key}: {_yaml(value)}")
    left = [
        f"{each.kind}: {f'{short_places(where)}: ' if where else ''}{each.do}"
        for each in problems
        for where in (each.edit or ([] if each.recipe else [each.where]))
    ]
    if left:
        lines += [
            "",
            "# No recipe changes what the script itself does, which is to be edited in the script:",
            *_comment("\n".join(left)),
        ]
    return "\n".join([*lines, ""])


def _yaml(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_yaml(each)}' for key, each in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(value)}]"
    return "null" if value is None else "true" if value is True else str(value)


def _comment(text: str) -> list[str]:
    wrapped = [textwrap.wrap(line, 110, initial_indent="# ", subsequent_indent="#   ") for line in text.splitlines()]
    return [line for lines in wrapped for line in lines]
