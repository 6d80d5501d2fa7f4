"""Builds a policy from op lists or an opt level: resolves the names in lists to ops, and explains wrong names."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any, Literal

import torch

from hmpx.base.dtype_names import dtype_named
from hmpx.errors import HmpxError, OpListError, OptLevelError, UnknownOpError, did_you_mean
from hmpx.ops.policies import op_facts
from hmpx.ops.policies.catalog import canonical, catalog, is_op, may_be_user_function, retired, unknown_op
from hmpx.ops.policies.lists import SIDES, Listed, OpLists, default_lists, shipped
from hmpx.ops.policies.policy import OptLevel, Policy

logger = logging.getLogger("hmpx")
OPT_LEVELS: tuple[OptLevel, ...] = ("O1", "O2")
Unknown = Literal["error", "warn"]  # how names that stand for nothing are treated


def build_policy(
    opt_level: OptLevel = "O1",
    lists: OpLists | None = None,
    unknown: Unknown = "error",
    low_precision: torch.dtype | str | None = None,
) -> Policy:
    """Build a policy from op lists; a side that is None gets the default list.

    Args:
        opt_level: "O1" (the lists decide) or "O2" (convolutions, linear and matrix products in BF16, every other op
            that computes in FP32; no list may be given).
        unknown: "error", or "warn" to skip names that stand for nothing.
        low_precision: torch.bfloat16 or torch.float16, or its name ("fp16"), what the names in the bf16 list run in.
            None: what the lists' file says, else torch.bfloat16.

    Raises:
        HmpxError: another dtype for `low_precision`.
        OptLevelError: another level, or O2 with lists.
        UnknownOpError: a name that stands for no op, with its file and line.
        OpListError: another problem of the lists, a name on both sides say.
    """
    if opt_level not in OPT_LEVELS:
        raise OptLevelError(_no_opt_level(opt_level))
    if unknown not in ("error", "warn"):
        raise HmpxError(f"unknown={unknown!r} does not exist (legal: 'error', 'warn')")
    lists = lists or OpLists()
    if opt_level == "O1":
        policy = _o1(resolve_sides(lists, unknown))
        origins = {canonical(each.name): each.where for each in lists.newer or ()}
        policy = replace(policy, origins={**origins, **policy.origins})
    else:
        for side, names in lists.sides.items():
            said = "O2 decides by itself and takes no op lists; lists go with opt_level='O1'"
            raise OptLevelError(said, names[0].place if names else f"{side}_file_path", key=(side,))
        policy = _o2()
    low = lists.low_precision if low_precision is None else dtype_named(low_precision)
    form = lists.fp8_format or policy.fp8_format
    return replace(policy, low_precision=policy.low_precision if low is None else low, fp8_format=form)


def _no_opt_level(given: object) -> str:
    """Return the message for an opt_level that does not exist, which may be the name of something else."""
    name, legal = str(given), f"(legal: {', '.join(OPT_LEVELS)})"
    if (shipped() / "recipes" / f"{name}.yaml").is_file():
        return (
            f"opt_level {given!r} does not exist {legal}; {given!r} is a recipe: hmpx.prepare(model, optimizer, "
            f"{given!r}), or hmpx.activate({given!r}) before the model is made"
        )
    if name.endswith((".txt", ".yaml", ".yml", ".json")):
        return f"opt_level {given!r} does not exist {legal}; a list file goes to bf16_file_path= or fp32_file_path="
    return f"opt_level {given!r} does not exist{did_you_mean(name, OPT_LEVELS)} {legal}"


def _o1(chosen: dict[str, dict[str, Listed]]) -> Policy:
    own_names = {name for side in ("bf16", "fp32", "fp8") for name in chosen.get(side, {})}
    defaults = default_lists()
    for side in SIDES:
        if side not in chosen:
            # A name that the user lists himself outranks a default that says otherwise.
            resolved = _resolve(defaults.sides[side], "error")
            chosen[side] = {
                name: listed
                for name, listed in resolved.items()
                if name not in own_names and op_facts.FOLLOWS.get(name) not in own_names
            }
    fp32, fp8 = chosen["fp32"], chosen["fp8"]
    chosen["bf16"] = {name: listed for name, listed in chosen["bf16"].items() if name not in fp8}
    ruled = {*chosen["bf16"], *fp32, *fp8}
    chosen["promote"] = {name: listed for name, listed in chosen["promote"].items() if name not in ruled}
    origins = {name: listed.where for side in chosen.values() for name, listed in side.items()}
    sides: dict[str, Any] = {side: tuple(sorted(names)) for side, names in chosen.items()}
    return Policy(**sides, origins=origins)


def _o2() -> Policy:
    ops = catalog()
    fp32 = sorted(name for name, op in ops.items() if op.computes and name not in op_facts.O2_BF16)
    return Policy(tuple(sorted(op_facts.O2_BF16)), tuple(fp32), (), "O2")


def resolve_sides(lists: OpLists, unknown: Unknown = "error") -> dict[str, dict[str, Listed]]:
    """Return the listed names of each side by the op that they mean.

    Raises:
        OpListError, UnknownOpError: the first that is wrong, with its place.
    """
    chosen = {side: _resolve(names, unknown) for side, names in lists.sides.items()}
    fp32, legal = chosen.get("fp32", {}), op_facts.MATRIX_PRODUCTS
    for side in ("bf16", "fp8"):
        for name in filter(fp32.__contains__, low := chosen.get(side, {})):
            other = "" if low[name].place == fp32[name].place else f"; in the {side} list at {low[name].where}"
            way = f"; take it out of one (in a recipe, fp32: [..., {name}] does)"
            raise OpListError(f"{name!r} is on both sides{other}{way}", fp32[name].place)
    for name, each in chosen.get("fp8", {}).items():
        if name not in legal:
            hint = f"{did_you_mean(name, legal)} (legal: {', '.join(legal)})"
            raise OpListError(f"{name!r} has no FP8 product{hint}", each.place)
    return chosen


def _resolve(names: tuple[Listed, ...], unknown: Unknown) -> dict[str, Listed]:
    """Return listed names by the op that they mean; the first mention counts."""
    resolved: dict[str, Listed] = {}
    for listed in names:
        op = canonical(listed.name)
        if retired(op):
            continue
        if is_op(op) or may_be_user_function(listed.name):
            resolved.setdefault(op if is_op(op) else listed.name, listed)
        elif unknown == "error":
            raise UnknownOpError(unknown_op(listed.name), listed.place)
        else:
            logger.warning("%s: %s (skipped)", listed.where, unknown_op(listed.name))
    return resolved
