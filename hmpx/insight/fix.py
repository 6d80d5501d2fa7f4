"""The smallest recipe that answers what was found, and why."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
import yaml

from hmpx.errors import HmpxError
from hmpx.insight.capture import Capture
from hmpx.insight.finding import Finding, numberless, short_places
from hmpx.insight.looks import dtypes
from hmpx.insight.looks.checks import LISTED
from hmpx.ops.policies.catalog import catalog
from hmpx.ops.policies.composition import callers
from hmpx.ops.policies.lists import MORE
from hmpx.ops.policies.op_facts import O2_BF16
from hmpx.recipes.keys import EXTENDS
from hmpx.recipes.module_patterns import check_names, module_names
from hmpx.recipes.reading import as_recipe
from hmpx.recipes.recipe import Recipe
from hmpx.updates.attach import attached, check_optimizer
from hmpx.updates.stepping.names import has_bf16

Parameter = torch.nn.Parameter
_AUTOCAST = {"cpu": "autocast-cpu", "xla": "autocast-xla", "hpu": "gaudi-autocast"}  # recipes, by type of device


class Script:
    """What a recipe depends on.

    Attributes:
        trained: the parameters of the optimizers. names: of every parameter of the models, trained or not.
        modules: the names of the modules of each model. in_low: whether the program itself, without torch.autocast,
            computes products in low precision. autocast: the dtype of its torch.autocast, None if it has none.
    """

    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        self.trained, self.names = capture.trained, capture.names
        models = dict.fromkeys(model for several in capture.models.values() for model in several)
        self.modules = {model: {*module_names(model)} for model in models}
        self.in_low = dtypes.are_low_by_hand(capture.notes)
        self.autocast = dtypes.autocast_dtype(capture.notes)

    def is_plain(self, name: str) -> bool:
        """Return whether a rule of this name is for one module alone, and legal where each optimizer is made."""
        having = {model for model, names in self.modules.items() if name in names}
        return len(having) == 1 and all(having & {*models} for models in self._capture.models.values())

    def check(self, recipe: Recipe) -> None:
        """Read a recipe as `hmpx.activate` does where these optimizers are made.

        Raises:
            HmpxError: it would stop the script.
        """
        for optimizer in self._capture.optimizers:
            check_names(self._capture.models[id(optimizer)], recipe)
            if has_bf16(optimizer) and attached(optimizer) is None:
                check_optimizer(optimizer, recipe.settings(), {})

    def products(self) -> tuple[list[str], dict[str, Any]]:
        """Return the products for the bf16 list, and rules for modules, with which those in FP32 on purpose stay so.

        A module whose products are all in FP32 keeps them by a rule. For other lines with products in FP32, these are
        in no list, and the modules that compute them in low precision have the rules.
        """
        every = sorted(O2_BF16 & catalog().keys())
        low, wide = (self._capture.notes.sites(kind) for kind in ("product in low", "product"))
        of_low = {site.module for site in low if site.place.is_inside and self.is_plain(site.module)}
        apart = {site.module for site in wide if site.place.is_inside and self.is_plain(site.module)}
        apart -= {site.module for site in low}
        mixed = [site for site in wide if site.module not in apart]
        lowered, held = (_called(site.op for site in sites) for sites in (low, mixed))
        left = [name for name in every if name in held or held.intersection(callers(name))]  # which would follow it
        names, rules = [name for name in every if name not in left], dict[str, Any]()
        if lowered & held:
            inside = {"bf16": left}
            rules = {name: inside for name in of_low - {site.module for site in mixed}}
        return names, dict(sorted((rules | {name: {"fp32": names} for name in apart}).items()))

    @property
    def needs_products(self) -> bool:
        """Whether products read what a recipe puts into FP32."""
        return bool(self._capture.notes.sites("product of fixed"))


def _called(ops: Iterable[str]) -> set[str]:
    """Return the names that a list may have for products that run as these."""
    return {each for op in ops for each in (op, *callers(op))}


class Base(NamedTuple):
    """The recipe that a script runs under.

    name: by which the recipe that is written extends it. keys: what options change in it. recipe: the result.
    """

    name: str
    keys: Mapping[str, Any]
    recipe: Recipe


def _of_autocast(script: Script) -> Base:
    """Return the recipe that does what the script's own torch.autocast does, which gives way to op lists."""
    device = next((p.device.type for p in script.trained), "cuda")
    name = _AUTOCAST.get(device, "autocast-cuda")
    keys = {"parameter_dtype": None} | ({"low_precision": "float16"} if script.autocast is torch.float16 else {})
    return Base(name, keys, as_recipe({EXTENDS: name, **keys}))


def recipe_for(
    findings: Sequence[Finding], script: Script, base: Base | None
) -> tuple[Recipe | None, dict[str, str], str]:
    """Return the recipe, the reason for each of its keys, and its text with these as comments; None if none is of use.

    base: what it extends. Of all findings, `recipe` says which keys answer it.

    Raises:
        HmpxError: it would stop the script.
    """
    answered = [each for each in findings if each.recipe]
    if not answered:
        return None, {}, ""
    asked = {key for each in answered for key in each.recipe}
    reasons = {key: "\n".join(each.said for each in answered if key in each.recipe) for key in asked}
    half = any(p.dtype is torch.float16 for p in script.trained)
    low = any(p.dtype is torch.bfloat16 for p in (*script.trained, *script.names))
    listed = {op for each in answered for op in each.recipe.get("fp32", ())}
    apart: dict[str, Any] = {}
    if base is None and script.autocast and asked & {"fp32", "modules"}:
        base, (products, apart) = _of_autocast(script), script.products()
        reasons[EXTENDS] = "what the script's torch.autocast does, which gives way to op lists"
        listed |= (O2_BF16 & catalog().keys()) - {*products}
    keys: dict[str, Any] = {EXTENDS: base.name, **base.keys} if base else {"opt_level": None}
    if base and base.recipe.opt_level:
        keys |= {"fp32": [MORE, *sorted(listed)]} if listed else {}
    elif half or asked & {"fp32", "modules"}:
        is_low = half or ((low or script.in_low) and script.needs_products)
        products, apart = script.products() if is_low else ([], {})
        keys |= {"opt_level": "O1", "bf16": products, "fp32": sorted(listed), "promote": []}
        reasons["bf16"] = "products are in BF16" if products else "products stay as they are"
    elif base is None:
        reasons["opt_level"] = "torch's ops stay as they are"
    if modules := {**apart, **_modules(answered, base.recipe.modules if base else {})}:
        keys["modules"] = by_patterns(modules, {name for names in script.modules.values() for name in names})
    if base is None or "parameter_dtype" in asked:
        keys["parameter_dtype"] = "float32" if half else None
        reasons.setdefault("parameter_dtype", "parameters keep their dtypes")
    if not half:  # a recipe holds weights in BF16 or FP32, and FP32 weights need no more
        if "weights" in asked or ("use_fp32_grad_acc" in asked and base is None):
            keys["weights"] = "stochastic" if "weights" in asked else "nearest"
        if "use_fp32_grad_acc" in asked:
            keys["use_fp32_grad_acc"] = True
        if "state_dtype" in asked:
            keys["state_dtype"] = "bfloat16"
    recipe = as_recipe({**keys, EXTENDS: base.recipe} if base else keys)
    script.check(recipe)
    return recipe, reasons, _text(keys, reasons, findings)


def legal(finding: Finding, script: Script) -> Finding:
    """Return a finding without what a recipe cannot say of this script: a module's name that two models have, say."""
    recipe, do = dict(finding.recipe), finding.do
    of_steps: dict[str, Any] = {
        key: recipe[key] for key in ("weights", "state_dtype", "use_fp32_grad_acc") if key in recipe
    }
    try:
        script.check(as_recipe({"opt_level": None, "parameter_dtype": None, **of_steps}))
    except HmpxError as error:
        recipe = {key: value for key, value in recipe.items() if key not in of_steps}
        do = f"keep these weights in float32: hmpx does not take the optimizer ({error})" if of_steps else do
    rules = recipe.pop("modules", {})
    plain = {name: rule for name, rule in rules.items() if script.is_plain(name)}
    recipe |= {"modules": plain} if plain else {}
    if finding.kind in LISTED:
        others = {op for name, rule in rules.items() if name not in plain for op in rule["fp32"]}
        recipe |= {"fp32": sorted({*recipe.get("fp32", ()), *others})} if others else {}
        rules = plain
    edit = finding.edit or (finding.where,) if len(plain) < len(rules) else finding.edit
    return replace(finding, recipe=recipe, do=do, edit=edit if recipe else ())


def _modules(answered: Iterable[Finding], around: Mapping[str, Any]) -> dict[str, Any]:
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


def _text(keys: Mapping[str, Any], reasons: Mapping[str, str], findings: Iterable[Finding]) -> str:
    lines = ["# Written by `hmpx.doctor`: the smallest recipe that answers what it found."]
    for key, value in keys.items():
        lines += _comment(reasons.get(key, ""))
        if isinstance(value, dict):
            lines += [f"{key}:", *(f"  {json.dumps(name)}: {_yaml(each)}" for name, each in value.items())]
        else:
            lines.append(f"{key}: {_yaml(value)}")
    left = [
        f"{each.kind}: {f'{short_places(where)}: ' if where else ''}{each.do}"
        for each in findings
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
    if isinstance(value, str):
        return _plain_or_quoted(value)
    return "null" if value is None else str(value).lower()


def _plain_or_quoted(text: str) -> str:
    """Return a text as YAML, quoted where it means something else without quotes, as a path with a "#" does."""
    try:
        means_itself = yaml.safe_load(f"[{text}]") == [text]
    except yaml.YAMLError:
        means_itself = False
    return text if means_itself else json.dumps(text, ensure_ascii=False)


def _comment(text: str) -> list[str]:
    wrapped = [textwrap.wrap(line, 110, initial_indent="# ", subsequent_indent="#   ") for line in text.splitlines()]
    return [line for lines in wrapped for line in lines]
