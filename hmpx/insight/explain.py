"""Policies, lists and recipes in words: what `hmpx.explain` and the shell commands `ops`, `check`, `explain` print."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from hmpx.casts.fp32_kernels import GAINING, NATIVE, Kernels, choose
from hmpx.casts.op_lists import SIDES, Listed, read_file, shipped
from hmpx.casts.ops import Op, aten_only, canonical, catalog
from hmpx.casts.policy import LOW_RULES, Policy, Rule, may_be_user_function, unknown_op
from hmpx.errors import OpListError, UnknownOpError
from hmpx.recipes.keys import DTYPES, LISTS
from hmpx.recipes.recipe import Recipe, as_recipe


def entry_points(op: Op) -> list[str]:
    """The labels of an op's entry points, each once."""
    return list(dict.fromkeys(entry.label for entry in op.entries))


def ops_table(policy: Policy, containing: str = "") -> str:
    """One line an op: name, rule, entry points. Internal ops (`_softmax`) only if `containing` begins like them."""
    lines = [f"{'op':34} {'rule':12} entry points"]
    for op in catalog().values():
        if containing in op.name and (containing.startswith("_") or not op.name.startswith("_")):
            rule = policy.rule(op) or ("promote" if policy.listed(op.name) is Rule.PROMOTE and not op.view else "-")
            lines.append(f"{op.name:34} {rule!s:12} {', '.join(entry_points(op))}")
    lines += [f"{name:34} {rule!s:12} {name}" for name, rule in policy.user_functions().items() if containing in name]
    return "\n".join(lines) if len(lines) > 1 else f"no op has {containing!r} in its name"


def explain_op(name: str, policy: Policy, kernels: Kernels = NATIVE) -> str:
    """Which entry points an op has, which rule it gets under `policy`, and why."""
    op = catalog().get(canonical(name))
    if op is None:
        if name in policy.user_functions():
            where = f"listed at {policy.origins[name]}; a function outside torch"
            return f"{name}\n  rule          {policy.listed(name)}: {where}"
        if aten_only(name):
            return f"{name}: an aten op with no Python entry point; hmpx cannot reach it"
        raise UnknownOpError(unknown_op(name))
    title = op.name if op.name == name else f"{name} is {op.name}"
    lines = [title, f"  rule          {_reason(op, policy)}"]
    if kernels.computed(op.name, [case.rule for case in policy.cases(op)]):
        lines.append(f"  kernels       {kernels}")
    for in_place, heading in ((False, "entry points"), (True, "in place")):
        labels = list(dict.fromkeys(entry.label for entry in op.entries if entry.in_place is in_place))
        if labels:
            lines.append(f"  {heading:13} {', '.join(labels)}")
    if any(entry.in_place for entry in op.entries):
        how = "the others are cast to the first" if op.refuses_mixed else "left to torch, which converts the others"
        lines.append(f"  {'':13} keeps the first tensor's storage and dtype; {how}")
    return "\n".join(lines)


def _reason(op: Op, policy: Policy) -> str:
    if op.view:
        return f"none: only makes a view: never cast{_where(op.name, policy, ', though ')}"
    if policy.listed_as(op) is None and (composed := _reason_of_parts(op, policy)):
        return composed
    listed = policy.listed_as(op)
    where = _where(op.name, policy) or (f"as {op.follows}, {_where(op.follows, policy)}" if op.follows else "")
    if listed is Rule.PROMOTE and not op.refuses_mixed:
        return f"promote: {where}; torch already takes the widest dtype, so nothing is patched"
    if listed is not None:
        return f"{listed}: {where}"
    if op.refuses_mixed:
        return "first input: in no list, and torch refuses mixed dtypes, so the others follow the first"
    return "none: in no list; torch's own function, untouched"


def _where(name: str, policy: Policy, before: str = "") -> str:
    """Where a name is listed; nothing where it is not."""
    if not policy.listed(name):
        return ""
    origin = policy.origins.get(name)
    return before + (f"listed at {origin}" if origin else f"decided by opt_level {policy.opt_level}")


def _reason_of_parts(op: Op, policy: Policy) -> str:
    """Of an op that no list names: which parts it follows, or why it follows none."""
    if differing := policy.undecided(op):
        parts = ", ".join(f"{name} {rule}" for name, rule in differing.items())
        left = "the others follow the first" if op.refuses_mixed else "torch's own function, untouched"
        aside = "its parts are in different lists"
        if not any(case.follows for case in policy.cases(op)):
            return f"{'first input' if op.refuses_mixed else 'none'}: in no list, and {aside} ({parts}); {left}"
    cases = policy.cases(op)
    followed = [f"{name}, {_where(name, policy)}" for case in cases for name in case.follows]
    if not followed:
        return ""
    somewhere = "" if len(cases) == 1 else ", where its arguments make it run that"
    return f"{policy.rule(op)}: in no list; follows {' and '.join(dict.fromkeys(followed))}{somewhere}"


def check_files(paths: Sequence[str]) -> Iterator[str]:
    """Every problem in some op list files, as `file:line: problem`.

    A YAML or JSON file says which side a name is on; of a text file, its name does ("bf16", "fp32", "promote"). Text
    files are held against one another: all of them if no two are on the same side, else those of one folder.
    """
    text_files = [path for path in paths if Path(path).suffix.lower() not in (".yaml", ".yml", ".json")]
    sides = {path: next((side for side in SIDES if side in Path(path).name), path) for path in text_files}
    one_set = len(set(sides.values())) == len(text_files)
    folders: dict[str, dict[str, tuple[str, Listed]]] = {}
    for path in paths:
        try:
            lists = read_file(path, "bf16")
        except OpListError as error:
            yield str(error)
            continue
        yield from lists.problems
        folder = "" if one_set else str(Path(path).parent)
        seen = folders.setdefault(folder, {}) if path in sides else {}
        in_this_file: set[str] = set()
        for side in SIDES:
            for listed in lists.side(side) or ():
                yield from _check_name(listed, sides.get(path, side), seen, in_this_file)


def _check_name(
    listed: Listed, side: str, seen: dict[str, tuple[str, Listed]], in_this_file: set[str]
) -> Iterator[str]:
    name = canonical(listed.name)
    if listed.problem:
        yield f"{listed.where}: {listed.problem}"
        return
    if name not in catalog():
        if aten_only(name):
            yield f"{listed.where}: {listed.name!r} has no Python entry point; it will not be reached"
        elif not may_be_user_function(name):
            yield f"{listed.where}: {unknown_op(listed.name)}"
            return
    first_side, first = seen.setdefault(name, (side, listed))
    if first_side != side and "promote" not in (first_side, side):
        yield f"{listed.where}: {listed.name!r} is on both sides; the other has it at {first.where}"
    elif first_side == side and f"{side} {name}" in in_this_file:
        yield f"{listed.where}: {listed.name!r} is a duplicate of {first.name!r} at {first.where}"
    in_this_file.add(f"{side} {name}")


def explain(recipe: str | os.PathLike | Mapping | Recipe) -> None:
    """Print in words what a recipe does to weights, ops, gradients, state and checkpoints, with bytes per parameter.

    Args:
        recipe: as for `hmpx.prepare`.
    """
    print(recipe_in_words(as_recipe(recipe)))


_UPDATES = {
    "stochastic": "computed in FP32 and written back by stochastic rounding",
    "nearest": "computed in FP32 and written back by rounding to nearest, which loses small ones",
    "master": "made to FP32 masters, of which the weights are the rounding to nearest",
    "split": "made to FP32 masters, whose lower halves are kept beside the weights",
}


def recipe_in_words(recipe: Recipe) -> str:
    """What `explain` prints."""
    narrow = recipe.parameter_dtype == "bfloat16"
    exceptions = "".join(f"; {pattern} in {dtype}" for pattern, dtype in recipe.module_dtypes.items())
    released = ", each released as soon as its parameter has stepped" if recipe.release_gradients else ""
    masters = recipe.weights in ("master", "split")
    policy = recipe.policy()
    scaled = policy is not None and policy.bf16 and policy.low_precision is torch.float16
    lines = {
        "weights": f"{recipe.parameter_dtype}{exceptions}",
        "ops": _ops_in_words(recipe, policy),
        "kernels": _kernels_in_words(recipe, policy),
        "loss": "to be scaled (torch.amp.GradScaler), for FP16 loses gradients below 6e-8" if scaled else "",
        "dtypes": ", ".join(f"{old} becomes {new}" for old, new in recipe.dtype_map.items()),
        "updates": f"of bfloat16 weights: {_UPDATES[recipe.weights]}{_seed(recipe)}",
        "gradients": f"{recipe.parameter_dtype}{released}",
        "state": f"{recipe.state_dtype}" + (", rounded stochastically" if recipe.state_dtype == "bfloat16" else ""),
        "checkpoints": "weights and state as they are held, step number and seed",
    }
    if recipe.use_fp32_grad_acc:
        lines["gradients"] = "bfloat16, added up over micro-batches and ranks in float32"
    if masters:
        kept = "with the masters" if recipe.use_master_weights_in_ckpt else "without the masters, so not to the bit"
        lines["checkpoints"] += f"; {kept}"
    if not narrow:
        plain = "plain steps in float32"
        lines |= {"updates": f"{plain}; {lines['updates']}" if exceptions else plain, "state": "float32"}
        lines["checkpoints"] = "as without hmpx"
    parts = recipe.bytes_per_parameter()
    held = " + ".join(f"{number:g} {part}" for part, number in parts.items() if number)
    lines["bytes"] = f"{held} = {sum(parts.values()):g} a parameter, with two state tensors as of Adam"
    return "\n".join(f"{name:12} {line}" for name, line in lines.items() if line)


def _ops_in_words(recipe: Recipe, policy: Policy | None) -> str:
    if policy is None:
        return "as torch runs them, in the dtypes that they are given"
    low = LOW_RULES[policy.low_precision].name
    counts = [(len(policy.bf16), f"in {low}"), (len(policy.fp32), "in FP32"), (len(policy.promote), "promoted")]
    rules = ", ".join(f"{count} {how}" for count, how in counts if count) or "no op in a list"
    where = [_short(getattr(recipe, key)) for key in LISTS if getattr(recipe, key)]
    if any(getattr(recipe, side) is not None for side in SIDES):
        where.append("the recipe's own lists")
    if recipe.opt_level == "O1" and not where:
        where.append("the default lists")
    return f"{recipe.opt_level}: {rules}" + (f" ({', '.join(where)})" if where else "")


def _kernels_in_words(recipe: Recipe, policy: Policy | None) -> str:
    """Where FP32 kernels compute a dtype that the recipe has."""
    chosen = choose(recipe.kernels)
    has = policy is not None and (policy.low_precision, DTYPES[recipe.parameter_dtype])
    return f"{chosen}: {GAINING}" if has and chosen.widened.intersection(has) else ""


def _short(path: str) -> str:
    """The path of a list; of one that hmpx ships, from `oplists` on."""
    own = str(shipped())
    return f"oplists{path.removeprefix(own)}" if path.startswith(own) else path


def _seed(recipe: Recipe) -> str:
    if recipe.weights != "stochastic" and recipe.state_dtype != "bfloat16":
        return ""
    return f"; seed {recipe.seed}" if recipe.seed is not None else "; seed of the checkpoint, else 0"
