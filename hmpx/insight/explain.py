"""Ops and recipes in words: what `hmpx.explain` and the command `explain` print."""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import os
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from types import FunctionType
from typing import Any

import torch

from hmpx.errors import UnknownOpError, did_you_mean
from hmpx.insight.check import of_user_function
from hmpx.insight.finding import first_names, reason
from hmpx.insight.report import Field, table
from hmpx.ops.computing.kernels import GAINING, NATIVE, Kernels, choose
from hmpx.ops.overlays import Overlay
from hmpx.ops.policies.catalog import aten_only, canonical, catalog, legal_names, unknown_op
from hmpx.ops.policies.lists import SIDES, shipped
from hmpx.ops.policies.policy import LOW_RULES, Policy, Rule
from hmpx.ops.wrapping.observing import positions_in_words
from hmpx.recipes.keys import DTYPES, LISTS, MODULES, PARAMETERS, STATE_DTYPES
from hmpx.recipes.reading import Stated, as_recipe, read_recipe, recipe_names, recipe_path
from hmpx.recipes.recipe import Recipe
from hmpx.updates.holding.state_forms import STATE_FORMS
from hmpx.updates.holding.stores import WAYS
from hmpx.updates.stepping.optimizer_classes import FUSED, OWN

_KERNELS = f"in the arithmetic of hmpx's kernels for {FUSED}"
_COPIES = (
    "in FP32 copies of the largest parameter or more; of all parameters at once where hmpx does not know the class, "
    "which may look across parameters"
)
_STEPS = {  # who takes them, and who chose
    None: f"{_KERNELS}, but for groups with {', '.join(OWN)}; others by their own code, {_COPIES} (fused is not set)",
    True: f"{_KERNELS}, but for groups with {', '.join(OWN)} (fused: true)",
    False: f"by the optimizer's own code, with its bits, {_COPIES} (fused: false)",
}


def is_known(name: str, policy: Policy) -> bool:
    """Return whether this is the name of an op, or of its in-place form, so that `explain_op` knows more of it."""
    names = {canonical(name), canonical(name.removesuffix("_"))}
    return bool(names & {*catalog()}) or name in policy.user_functions() or aten_only(name)


def ops_table(policy: Policy, containing: str = "") -> str:
    """Return one line an op with this in its name: name, rule, entry points; "" if there is none.

    Internal ops (`_softmax`) need a `containing` that begins like theirs.
    """
    lines = [f"{'op':34} {'rule':12} entry points"]
    for op in catalog().values():
        if containing in op.name and (containing.startswith("_") or not op.name.startswith("_")):
            rule = policy.rule(op) or ("promote" if policy.listed(op.name) is Rule.PROMOTE and not op.view else "-")
            lines.append(f"{op.name:34} {rule!s:12} {', '.join(dict.fromkeys(entry.label for entry in op.entries))}")
    lines += [f"{name:34} {rule!s:12} {name}" for name, rule in policy.user_functions().items() if containing in name]
    return "\n".join(lines) if len(lines) > 1 else ""


def explain_op(
    name: str,
    policy: Policy,
    kernels: Kernels = NATIVE,
    recipes: Iterable[str] = (),
    modules: Mapping[str, Overlay] | None = None,
) -> str:
    """Say which entry points an op has, which rule it gets under `policy` and in some modules, and why.

    Raises:
        UnknownOpError: `name` is no op; with the nearest op, or the nearest of `recipes` if that is nearer.
    """
    op = catalog().get(canonical(name))
    if op is None:
        if name in policy.user_functions():
            where = f"listed at {policy.origins[name]}; a function outside torch"
            fault = of_user_function(name)
            note = f"\n  note          {fault}" if fault else ""
            return f"{name}\n  rule          {policy.listed(name)}: {where}{note}"
        if aten_only(name):
            return f"{name}: an aten op with no Python entry point; hmpx cannot reach it"
        recipe = did_you_mean(name, recipes, cutoff=0.75)
        if recipe and did_you_mean(name, [*recipes, *legal_names()]) == recipe:
            raise UnknownOpError(f"{name!r} is neither an op nor a recipe{recipe}")
        raise UnknownOpError(unknown_op(name))
    title = op.name if op.name == name else f"{name} is {op.name}"
    lines = [title, f"  rule          {reason(op, policy)}"]
    for pattern, overlay in (modules or {}).items():
        inside = overlay.over(policy)
        if inside.cases(op) != policy.cases(op):
            lines.append(f"  in {pattern:10} {reason(op, inside)}")
    for kernel in kernels.of(op.name, policy.cases(op)):
        lines.append(f"  kernels       {kernel}; backward {kernel.backward}")
    for in_place, heading in ((False, "entry points"), (True, "in place")):
        labels = list(dict.fromkeys(entry.label for entry in op.entries if entry.in_place is in_place))
        if labels:
            lines.append(f"  {heading:13} {', '.join(labels)}")
    if any(entry.in_place for entry in op.entries):
        how = "the others are cast to the first" if op.refuses_mixed else "left to torch, which converts the others"
        lines.append(f"  {'':13} keeps the first tensor's storage and dtype; {how}")
    return "\n".join(lines)


_WHERE = {
    "model": "in a model: in the forwards of modules, and in what needs a gradient",
    "everywhere": "in every call, whoever makes it",
}


def explain(recipe: Stated, model: torch.nn.Module | None = None) -> None:
    """Print in words what a recipe does to weights, ops, gradients, state and checkpoints, with bytes per parameter.

    Args:
        recipe: as for `hmpx.prepare`.
        model: also name the lines of its classes that say ``torch.autocast(device, enabled=False)``, where no op is
            cast, with the modules.

    Example:
        >>> hmpx.explain({"parameter_dtype": "float32", "opt_level": None})
        weights      float32
        ops          as torch runs them, in the dtypes that they are given
        updates      plain steps in float32
        gradients    float32
        state        float32
        checkpoints  as without hmpx
        bytes        4 weights + 4 gradients + 8 state = 16 a parameter, with two state tensors as of Adam
    """
    print("\n".join([*recipe_lines(as_recipe(recipe)), *(island_lines(model) if model is not None else ())]))


def island_lines(model: torch.nn.Module) -> list[str]:
    """Return one line for each line of a model's classes inside of which no op is cast."""
    return [
        f"{'' if i else 'left alone':12} torch.autocast(enabled=False) at {line}: {first_names(tuple(names))}"
        for i, (line, names) in enumerate(islands(model).items())
    ]


def recipe_lines(recipe: Recipe) -> list[str]:
    """Return the lines that `explain` prints of a recipe, each a heading and its words."""
    narrow, dtype = recipe.parameter_dtype == "bfloat16", recipe.parameter_dtype or "as they are"
    released = ", each released as soon as its parameter has stepped" if recipe.release_gradients else ""
    masters = recipe.settings().has_masters
    policy = recipe.policy()
    scaled = policy is not None and policy.bf16 and policy.low_precision is torch.float16
    lines = {
        "weights": dtype,
        "ops": _ops_in_words(recipe, policy),
        "where": "" if policy is None else _WHERE[recipe.where],
        MODULES: "; ".join(f"{pattern}: {overlay.in_words()}" for pattern, overlay in recipe.overlays().items()),
        "positions": "" if policy is None else positions_in_words(policy),
        "kernels": _kernels_in_words(recipe, policy),
        "loss": "to be scaled (torch.amp.GradScaler), for FP16 loses gradients below 6e-8" if scaled else "",
        "dtypes": ", ".join(f"{old} becomes {new}" for old, new in recipe.dtype_map.items()),
        "updates": f"of bfloat16 weights: {WAYS[recipe.weights].words}{_seed(recipe)}",
        "steps": _STEPS[recipe.fused],
        "gradients": f"{dtype}{released}",
        "state": STATE_FORMS[STATE_DTYPES[recipe.state_dtype]].words,
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
        plain, wide = "plain steps in float32", lines["state"] == "float32"
        of_parameters = [rule.get("dtype") for rule in recipe.parameter_rules.values()]
        if recipe.parameter_dtype is None or "bfloat16" in of_parameters:
            lines["updates"] = f"{plain}; {lines['updates']}"
            lines["state"] = "float32" if wide else f"float32; of bfloat16 weights: {lines['state']}"
        else:
            lines |= {"updates": plain, "steps": "", "state": "float32", "checkpoints": "as without hmpx"}
    parts = recipe.bytes_per_parameter()
    held = " + ".join(f"{number:g} {part}" for part, number in parts.items() if number)
    of_fp32 = "" if recipe.parameter_dtype else " of FP32 weights"
    lines["bytes"] = f"{held} = {sum(parts.values()):g} a parameter{of_fp32}, with two state tensors as of Adam"
    return [f"{name:12} {line}" for name, line in lines.items() if line]


def list_lines(policy: Policy | None) -> list[str]:
    """Return the names in each list of a policy, and how to ask for more."""
    named = {} if policy is None else {side: getattr(policy, side) for side in SIDES}
    lines = [
        textwrap.fill(f"{f'{side} list':12} {len(names)}: {', '.join(names)}", 118, subsequent_indent=" " * 13)
        for side, names in named.items()
        if names
    ]
    return [*lines, "explain OP says why an op has its rule, and explain --all lists every op; both take these options"]


def _ops_in_words(recipe: Recipe, policy: Policy | None) -> str:
    if policy is None:
        return "as torch runs them, in the dtypes that they are given"
    low = LOW_RULES[policy.low_precision].name
    low8 = f"in {policy.fp8_format.bits} ({policy.fp8_format})"
    counts = [(len(policy.fp8), low8), (len(policy.bf16), f"in {low}")]
    counts += [(len(policy.fp32), "in FP32"), (len(policy.promote), "promoted")]
    rules = ", ".join(f"{count} {how}" for count, how in counts if count) or "no op in a list"
    if newer := [name for name in policy.origins if policy.listed(name) is None]:
        rules += f"; {', '.join(newer)} with a newer torch"
    where = [_short(getattr(recipe, key)) for key in LISTS if getattr(recipe, key)]
    if any(getattr(recipe, side) is not None for side in SIDES):
        where.append("the recipe's own lists")
    if recipe.opt_level == "O1" and not where:
        where.append("the default lists")
    return f"{recipe.opt_level}: {rules}" + (f" ({', '.join(where)})" if where else "")


def _parameters_in_words(recipe: Recipe) -> str:
    """Describe the exceptions for some parameters, with the bytes that each takes."""
    said = []
    for pattern, rule in recipe.parameter_rules.items():
        words = ", ".join(value if key == "dtype" else f"{key} {value}" for key, value in rule.items()) or "as usual"
        alone = replace(recipe, parameters={"it": rule}, use_master_weights_in_ckpt=False)  # of which it may have none
        said.append(f"{pattern}: {words} ({sum(alone.bytes_per_parameter(name='it').values()):g} bytes)")
    return "; ".join(said)


def _kernels_in_words(recipe: Recipe, policy: Policy | None) -> str:
    """Say whether FP32 kernels compute ops of the recipe's low precision; "" if they do not."""
    chosen = choose(recipe.kernels)
    has = policy is not None and (policy.low_precision, DTYPES.get(recipe.parameter_dtype or ""))
    return f"{chosen}: {GAINING}" if has and chosen.widened.intersection(has) else ""


def _short(path: str) -> str:
    """Shorten the path of a list that comes with hmpx: it begins with `oplists`."""
    own = str(shipped())
    return f"oplists{path.removeprefix(own)}" if path.startswith(own) else path


def _seed(recipe: Recipe) -> str:
    ways = recipe.settings().ways
    if not any(way.weights in ("stochastic", "split8") or way.state_dtype is not torch.float32 for way in ways):
        return ""
    return f"; seed {recipe.seed}" if recipe.seed is not None else "; seed of the checkpoint, else 0"


def recipes_table() -> str:
    """Return a table of the recipes that come with hmpx, by kind: their bytes per parameter, and for whom each is."""
    kinds: dict[str, list[tuple[str, str, str]]] = {
        "BF16 weights": [],
        "FP32 weights": [],
        "FP32 weights, FP8 or FP4": [],
    }
    for name in recipe_names():
        recipe = read_recipe(name)
        kind = "BF16 weights" if recipe.parameter_dtype == "bfloat16" else "FP32 weights"
        size = sum(recipe.bytes_per_parameter().values())
        kinds[f"{kind}, FP8 or FP4" if recipe.fp8 else kind].append((f"  {name}", f"{size:.3g}", _for_whom(name)))
    rows = [row for kind, recipes in kinds.items() for row in ((kind, "", ""), *recipes)]
    fields = [Field(title, itemgetter(i)) for i, title in enumerate(("recipe", "bytes", "for whom"))]
    return "\n".join([*table(fields, rows, sys.maxsize), "", _FOOTNOTE])


_FOOTNOTE = """\
bytes: of a parameter, with weights, gradients, masters and two state tensors as of Adam.
explain NAME says what one does, explain NAME --yaml prints it as a file, run --recipe NAME runs a script under it.
explain FILE says what a list or a recipe does, or what is wrong in it; explain OP which rule an op has, and why;
explain --all lists every op."""


def _for_whom(name: str) -> str:
    """Return the line that a recipe's file begins with."""
    first = Path(recipe_path(name)).read_text(encoding="utf-8").partition("\n")[0]
    return first.removeprefix("# For: ").removesuffix(".")


# Lines of a model's classes that say "FP32 here"

_REGIONS = frozenset({"autocast", "maybe_autocast"})  # torch's, under each of its names, and transformers'


def islands(model: torch.nn.Module) -> dict[str, list[str]]:
    """Return the lines with such a region, as "file:line of Class", each with the modules whose methods they are in.

    Functions of the class's module that its methods call are looked through too. A region is not found in other
    functions, nor where its `enabled` is computed.
    """
    found: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        for cls in type(module).__mro__:
            if not cls.__module__.startswith(("torch.", "builtins")):
                for line in _lines(cls):
                    found.setdefault(f"{line} of {cls.__name__}", []).append(name or type(module).__name__)
    return found


@functools.cache
def _lines(cls: type) -> tuple[str, ...]:
    found: dict[str, None] = {}
    waiting: list[Any] = [*vars(cls).values()]
    seen: set[int] = set()
    for each in waiting:  # which gets longer
        function = inspect.unwrap(each) if callable(each) else each
        if id(function) in seen:
            continue
        seen.add(id(function))
        if inspect.isfunction(function) and function.__module__ == cls.__module__:
            found |= dict.fromkeys(_in_function(function))
            called = [function.__globals__.get(name) for name in function.__code__.co_names]
            waiting += [each for each in called if isinstance(each, FunctionType | type)]
        elif isinstance(function, type) and issubclass(function, torch.autograd.Function):
            waiting += vars(function).values()
    return tuple(found)


def _in_function(function: FunctionType) -> Iterator[str]:
    try:
        lines, first = inspect.getsourcelines(function)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, TypeError, SyntaxError):  # its source is not to be had
        return
    file = os.path.basename(inspect.getfile(function))
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _is_off(node, function.__globals__):
            yield f"{file}:{first + node.lineno - 1}"


def _is_off(call: ast.Call, names: dict[str, Any]) -> bool:
    """Return whether a call makes a region that is not enabled, or the forward of a function that casts its inputs."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    given = {each.arg: each.value for each in call.keywords if each.arg}
    if name == "custom_fwd":
        return "cast_inputs" in given and not _is(given["cast_inputs"], None)
    function = names.get(name, torch.autocast)
    if name not in _REGIONS and function is not torch.autocast:
        return False
    if isinstance(call.func, ast.Attribute) and ast.unparse(call.func) in _OF_DEVICES:
        function = _OF_DEVICES[ast.unparse(call.func)]
    with contextlib.suppress(TypeError, ValueError):  # it is called otherwise, or has no signature
        given = inspect.signature(function).bind_partial(*call.args, **given).arguments
    dtype = given.get("dtype")
    is_wide = isinstance(dtype, ast.Attribute) and dtype.attr in ("float32", "float64")
    return is_wide or ("enabled" in given and _is(given["enabled"], False))


_OF_DEVICES = {"torch.cuda.amp.autocast": torch.cuda.amp.autocast, "torch.cpu.amp.autocast": torch.cpu.amp.autocast}


def _is(node: Any, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is value
