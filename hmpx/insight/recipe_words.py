"""Recipes in words, and the table of those that come with hmpx."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import torch

from hmpx.ops.computing.kernels import GAINING, choose
from hmpx.ops.policies.op_lists import SIDES, shipped
from hmpx.ops.policies.policy import LOW_RULES, Policy
from hmpx.recipes.files import recipe_names, recipe_path
from hmpx.recipes.keys import DTYPES, LISTS, MODULES, PARAMETERS, spelled_out
from hmpx.recipes.recipe import Recipe
from hmpx.recipes.stated import read_recipe

_UPDATES = {
    "stochastic": "computed in FP32 and written back by stochastic rounding",
    "nearest": "computed in FP32 and written back by rounding to nearest, which loses small ones",
    "master": "made to FP32 masters, of which the weights are the rounding to nearest",
    "split": "made to FP32 masters, whose lower halves are kept beside the weights",
    "split8": "made to masters of 24 bits, whose lower 8 are rounded stochastically and kept beside the weights",
}
_STATE = {
    "float32": "float32",
    "bfloat16": "bfloat16, rounded stochastically",
    "8bit": "8 bits with a scale for 128 elements, rounded stochastically",
}


def recipe_in_words(recipe: Recipe) -> str:
    """What `explain` prints."""
    return "\n".join(recipe_lines(recipe))


def recipe_lines(recipe: Recipe) -> list[str]:
    """The same as pairs of a heading and its words."""
    narrow = recipe.parameter_dtype == "bfloat16"
    exceptions = "".join(f"; {pattern} in {dtype}" for pattern, dtype in recipe.module_dtypes.items())
    released = ", each released as soon as its parameter has stepped" if recipe.release_gradients else ""
    masters = recipe.settings().has_masters
    policy = recipe.policy()
    scaled = policy is not None and policy.bf16 and policy.low_precision is torch.float16
    lines = {
        "weights": f"{recipe.parameter_dtype}{exceptions}",
        "ops": _ops_in_words(recipe, policy),
        MODULES: _modules_in_words(recipe),
        "kernels": _kernels_in_words(recipe, policy),
        "loss": "to be scaled (torch.amp.GradScaler), for FP16 loses gradients below 6e-8" if scaled else "",
        "dtypes": ", ".join(f"{old} becomes {new}" for old, new in recipe.dtype_map.items()),
        "updates": f"of bfloat16 weights: {_UPDATES[recipe.weights]}{_seed(recipe)}",
        "gradients": f"{recipe.parameter_dtype}{released}",
        "state": _STATE[recipe.state_dtype],
        PARAMETERS: _parameters_in_words(recipe),
        "checkpoints": "weights and state as they are held, step number and seed",
    }
    if recipe.use_fp32_grad_acc:
        lines["gradients"] = "bfloat16, added up over micro-batches and ranks in float32"
    if masters:
        kept = (
            "with the masters"
            if recipe.use_master_weights_in_ckpt
            else "without the masters, so a resumed run has other bits"
        )
        lines["checkpoints"] += f"; {kept}"
    if not narrow:
        rules = spelled_out(PARAMETERS, recipe.parameters).values()
        plain, wide = "plain steps in float32", lines["state"] == "float32"
        if "bfloat16" in [*recipe.module_dtypes.values(), *(rule.get("dtype") for rule in rules)]:
            lines["updates"] = f"{plain}; {lines['updates']}"
            lines["state"] = "float32" if wide else f"float32; of bfloat16 weights: {lines['state']}"
        else:
            lines |= {"updates": plain, "state": "float32", "checkpoints": "as without hmpx"}
    parts = recipe.bytes_per_parameter()
    held = " + ".join(f"{number:g} {part}" for part, number in parts.items() if number)
    lines["bytes"] = f"{held} = {sum(parts.values()):g} a parameter, with two state tensors as of Adam"
    return [f"{name:12} {line}" for name, line in lines.items() if line]


def _ops_in_words(recipe: Recipe, policy: Policy | None) -> str:
    if policy is None:
        return "as torch runs them, in the dtypes that they are given"
    low = LOW_RULES[policy.low_precision].name
    low8 = f"in FP8 ({policy.fp8_format})"
    counts = [(len(policy.fp8), low8), (len(policy.bf16), f"in {low}")]
    counts += [(len(policy.fp32), "in FP32"), (len(policy.promote), "promoted")]
    rules = ", ".join(f"{count} {how}" for count, how in counts if count) or "no op in a list"
    where = [_short(getattr(recipe, key)) for key in LISTS if getattr(recipe, key)]
    if any(getattr(recipe, side) is not None for side in SIDES):
        where.append("the recipe's own lists")
    if recipe.opt_level == "O1" and not where:
        where.append("the default lists")
    return f"{recipe.opt_level}: {rules}" + (f" ({', '.join(where)})" if where else "")


def _modules_in_words(recipe: Recipe) -> str:
    """The rules for parts of the model, in words."""
    return "; ".join(f"{pattern}: {overlay.in_words()}" for pattern, overlay in recipe.overlays().items())


def _parameters_in_words(recipe: Recipe) -> str:
    """The exceptions for some parameters, with the bytes that each takes."""
    said = []
    for pattern, rule in spelled_out(PARAMETERS, recipe.parameters).items():
        words = ", ".join(value if key == "dtype" else f"{key} {value}" for key, value in rule.items()) or "as usual"
        alone = replace(recipe, parameters={"it": rule}, use_master_weights_in_ckpt=False)  # of which it may have none
        said.append(f"{pattern}: {words} ({sum(alone.bytes_per_parameter(name='it').values()):g} bytes)")
    return "; ".join(said)


def _kernels_in_words(recipe: Recipe, policy: Policy | None) -> str:
    """Whether FP32 kernels compute ops of the recipe's low precision."""
    chosen = choose(recipe.kernels)
    has = policy is not None and (policy.low_precision, DTYPES[recipe.parameter_dtype])
    return f"{chosen}: {GAINING}" if has and chosen.widened.intersection(has) else ""


def _short(path: str) -> str:
    """The path of a list; of one that hmpx ships, from `oplists` on."""
    own = str(shipped())
    return f"oplists{path.removeprefix(own)}" if path.startswith(own) else path


def _seed(recipe: Recipe) -> str:
    ways = recipe.settings().ways
    if not any(way.weights in ("stochastic", "split8") or way.state_dtype is not torch.float32 for way in ways):
        return ""
    return f"; seed {recipe.seed}" if recipe.seed is not None else "; seed of the checkpoint, else 0"


def recipes_table() -> str:
    """The recipes that come with hmpx: bytes per parameter, what holds the weights, and what each one is."""
    rows = [("recipe", "bytes", "weights", "updates", "what it is")]
    for name in recipe_names():
        recipe = read_recipe(name)
        narrow = recipe.parameter_dtype == "bfloat16"
        size = f"{sum(recipe.bytes_per_parameter().values()):g}"
        rows.append((name, size, recipe.parameter_dtype, recipe.weights if narrow else "plain", _what_it_is(name)))
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    lines = ["  ".join(f"{cell:{width}}" for cell, width in zip(row, [*widths, 0], strict=True)) for row in rows]
    return "\n".join([*lines, "", _FOOTNOTE])


_FOOTNOTE = """\
bytes: of a parameter, with weights, gradients, masters and two state tensors as of Adam.
recipes NAME prints one as a file, explain NAME says what it does, run --recipe NAME SCRIPT runs a script under it."""


def _what_it_is(name: str) -> str:
    """The first clause of the comment that a recipe's file begins with."""
    lines = Path(recipe_path(name)).read_text(encoding="utf-8").splitlines()
    comment = " ".join(line.removeprefix("#").strip() for line in lines if line.startswith("#"))
    return re.split(r"[.:;](?= )|\.$", comment)[0]
