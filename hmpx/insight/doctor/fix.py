"""The smallest recipe that answers what was found, and why."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch

from hmpx.base.dtype_names import dtype_name
from hmpx.insight.doctor.diagnosis import Problem
from hmpx.insight.module_names import numberless
from hmpx.insight.text_table import short_places
from hmpx.ops.policies.catalog import catalog
from hmpx.ops.policies.lists import SIDES
from hmpx.ops.policies.op_facts import O2_BF16
from hmpx.recipes.keys import DTYPES, EXTENDS
from hmpx.recipes.reading import as_recipe
from hmpx.recipes.recipe import Recipe

Parameter = torch.nn.Parameter


class Script(NamedTuple):
    """What a recipe depends on.

    trained: the parameters of the optimizers. names: of every parameter of the models, trained or not. modules: names
    of those of the models. products_in_low: whether the program itself, without torch.autocast, computes products in
    low precision.
    """

    trained: Sequence[Parameter]
    names: Mapping[Parameter, str]
    modules: Collection[str]
    products_in_low: bool


class Base(NamedTuple):
    """The recipe that a script runs under.

    name: by which the recipe that is written extends it. keys: what options change in it. recipe: the result.
    """

    name: str
    keys: Mapping[str, Any]
    recipe: Recipe


def recipe_for(
    problems: Sequence[Problem], script: Script, base: Base | None
) -> tuple[Recipe | None, dict[str, str], str]:
    """Return the recipe, the reason for each of its keys, and its text with these as comments; None if none is of use.

    base: what it extends. Of all findings, `recipe` says which keys answer it.
    """
    answered = [each for each in problems if each.recipe]
    if not answered:
        return None, {}, ""
    asked = {key for each in answered for key in each.recipe}
    reasons = {key: "\n".join(each.said for each in answered if key in each.recipe) for key in asked}
    half = any(p.dtype is torch.float16 for p in script.trained)
    every = {*script.trained, *script.names}
    low = [p for p in every if p.dtype is torch.bfloat16]
    listed = {op for each in answered for op in each.recipe.get("fp32", ())}
    policy = base and base.recipe.policy()
    keys: dict[str, Any] = {EXTENDS: base.name, **base.keys} if base else {"opt_level": None}
    if policy:
        lists = {side: {*getattr(policy, side)} - listed for side in SIDES}
        lists["fp32"] |= listed
        keys |= {side: sorted(names) for side, names in lists.items() if names != {*getattr(policy, side)}}
    elif half or asked & {"fp32", "modules"}:
        products = sorted(O2_BF16 & catalog().keys()) if half or low or script.products_in_low else []
        keys |= {"opt_level": "O1", "bf16": products, "fp32": sorted(listed), "promote": []}
        reasons["bf16"] = "products are in BF16" if products else "products stay as they are"
    elif base is None:
        reasons["opt_level"] = "torch's ops stay as they are"
    if modules := _modules(answered, base.recipe.modules if base else {}):
        keys["modules"] = by_patterns(modules, script.modules)
    dtype = "bfloat16" if 2 * len(low) > len(every) and not half else "float32"
    if base is None or "parameter_dtype" in asked:
        keys["parameter_dtype"] = dtype
    if not half:  # a recipe holds weights in BF16 or FP32, and FP32 weights need no more
        if "weights" in asked or ("use_fp32_grad_acc" in asked and base is None):
            keys["weights"] = "stochastic" if "weights" in asked else "nearest"
        if "use_fp32_grad_acc" in asked:
            keys["use_fp32_grad_acc"] = True
        if "state_dtype" in asked:
            keys["state_dtype"] = "bfloat16"
        dtypes = by_patterns({name: dtype_name(p.dtype) for p, name in script.names.items()}, script.names.values())
        exceptions = {name: each for name, each in dtypes.items() if each != dtype and each in DTYPES}
        if exceptions and base is None:
            keys["parameters"], reasons["parameters"] = exceptions, "as they are in the script"
    recipe = as_recipe({**keys, EXTENDS: base.recipe} if base else keys)
    return recipe, reasons, _text(keys, reasons, problems)


def _modules(answered: Iterable[Problem], around: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rules for modules, sorted. A dtype for all of a module outranks a list.

    around: the rules that are there already. Of patterns that fit a module the last decides, so a new rule holds what
    the one before it says.
    """
    found: dict[str, Any] = {}
    for each in answered:
        for name, rule in each.recipe.get("modules", {}).items():
            fitting = [before for pattern, before in around.items() if fnmatchcase(name, pattern)]
            before = found.get(name, fitting[-1] if fitting else {})
            if isinstance(rule, dict) and isinstance(before, dict):
                others = {side: [op for op in ops if op not in rule["fp32"]] for side, ops in before.items()}
                found[name] = {**others, "fp32": sorted({*rule["fp32"], *before.get("fp32", ())})}
            else:
                found[name] = "float32"
    return dict(sorted(found.items()))


def by_patterns(rules: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Return rules by name with a pattern in place of several names, where all names that fit it have the same rule.

    Example:
        >>> by_patterns({"layers.0.norm": "float32", "layers.1.norm": "float32"}, ["layers.0.norm", "layers.1.norm"])
        {'layers.*.norm': 'float32'}
    """
    found: dict[str, Any] = {}
    fitting: dict[str, list[str]] = {}
    for name, rule in rules.items():
        pattern = numberless(name)
        if pattern not in fitting:
            fitting[pattern] = [each for each in names if fnmatchcase(each, pattern)]
        is_one = len(fitting[pattern]) > 1 and all(rules.get(each) == rule for each in fitting[pattern])
        found[pattern if is_one else name] = rule
    return found


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
        said = "# No recipe changes what the script itself does, which is to be edited in the script:"
        lines += ["", said, *_comment("\n".join(left))]
    return "\n".join([*lines, ""])


def _yaml(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_yaml(each)}' for key, each in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_yaml, value))}]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _comment(text: str) -> list[str]:
    wrapped = [textwrap.wrap(line, 110, initial_indent="# ", subsequent_indent="#   ") for line in text.splitlines()]
    return [line for lines in wrapped for line in lines]
