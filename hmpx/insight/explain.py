"""Ops and recipes in words: what `hmpx.explain` and the shell commands `ops` and `explain` print."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from hmpx.errors import UnknownOpError, did_you_mean
from hmpx.insight.reasons import reason
from hmpx.insight.recipe_words import recipe_in_words
from hmpx.ops.computing.kernels import NATIVE, Kernels
from hmpx.ops.overlays import Overlay
from hmpx.ops.policies.build_policy import unknown_op
from hmpx.ops.policies.catalog import Op, aten_only, canonical, catalog, legal_names
from hmpx.ops.policies.policy import Policy, Rule
from hmpx.recipes.stated import Stated, as_recipe


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


def explain_op(
    name: str,
    policy: Policy,
    kernels: Kernels = NATIVE,
    recipes: Iterable[str] = (),
    modules: Mapping[str, Overlay] | None = None,
) -> str:
    """Which entry points an op has, which rule it gets under `policy`, and in some modules, and why.

    Raises:
        UnknownOpError: `name` is no op; with the nearest op, or the nearest of `recipes` if that is nearer.
    """
    op = catalog().get(canonical(name))
    if op is None:
        if name in policy.user_functions():
            where = f"listed at {policy.origins[name]}; a function outside torch"
            return f"{name}\n  rule          {policy.listed(name)}: {where}"
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


def explain(recipe: Stated) -> None:
    """Print in words what a recipe does to weights, ops, gradients, state and checkpoints, with bytes per parameter.

    Args:
        recipe: as for `hmpx.prepare`.

    Raises:
        HmpxError: there is no such recipe, or something in it does not fit.

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
    print(recipe_in_words(as_recipe(recipe)))
