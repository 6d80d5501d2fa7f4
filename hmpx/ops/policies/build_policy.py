"""Builds a policy from op lists or an opt level."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch

from hmpx.dtype_names import dtype_named
from hmpx.errors import HmpxError, OpListError, OptLevelError, did_you_mean
from hmpx.ops.policies import op_facts
from hmpx.ops.policies.catalog import catalog
from hmpx.ops.policies.listed_names import Unknown, resolve
from hmpx.ops.policies.op_lists import SIDES, Listed, OpLists, default_lists, shipped
from hmpx.ops.policies.policy import OptLevel, Policy

OPT_LEVELS: tuple[OptLevel, ...] = ("O1", "O2")


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
        UnknownOpError: names that stand for no op, each with its file and line.
        OpListError: other problems of the lists, a name on both sides say. Every problem is a line of the message.
    """
    if opt_level not in OPT_LEVELS:
        raise OptLevelError(_no_opt_level(opt_level))
    if unknown not in ("error", "warn"):
        raise HmpxError(f"unknown={unknown!r} does not exist (legal: 'error', 'warn')")
    given = {side: lists.side(side) for side in SIDES} if lists else dict.fromkeys(SIDES)
    if opt_level == "O2":
        for side, names in given.items():
            if names is not None:
                where = names[0].where if names else f"{side}_file_path"
                raise OptLevelError(
                    f"{where}: O2 decides by itself and takes no op lists; lists go with opt_level='O1'"
                )
        if lists and lists.problems:
            raise OpListError("\n".join(lists.problems))
        policy = _o2()
    else:
        policy = _o1(given, unknown, lists.problems if lists else ())
    low = lists.low_precision if low_precision is None and lists else dtype_named(low_precision)
    form = lists.fp8_format if lists else None
    low = policy.low_precision if low is None else low
    return replace(policy, low_precision=low, fp8_format=form or policy.fp8_format)


def _no_opt_level(given: object) -> str:
    """The message for an opt_level that does not exist, which may be the name of something else."""
    name, legal = str(given), f"(legal: {', '.join(OPT_LEVELS)})"
    if (shipped() / "recipes" / f"{name}.yaml").is_file():
        return (
            f"opt_level {given!r} does not exist {legal}; {given!r} is a recipe: hmpx.prepare(model, optimizer, "
            f"{given!r}), or hmpx.activate({given!r}) before the model is made"
        )
    if name.endswith((".txt", ".yaml", ".yml", ".json")):
        return f"opt_level {given!r} does not exist {legal}; a list file goes to bf16_file_path= or fp32_file_path="
    return f"opt_level {given!r} does not exist{did_you_mean(name, OPT_LEVELS)} {legal}"


def _o1(given: dict[str, tuple[Listed, ...] | None], unknown: Unknown, problems: tuple[str, ...]) -> Policy:
    defaults = default_lists()
    wrong = dict.fromkeys(problems, OpListError)  # what is wrong with the lists -> what is raised for it
    chosen = {side: resolve(names, unknown, wrong) for side, names in given.items() if names is not None}
    fp32 = chosen.get("fp32", {})
    for side in ("bf16", "fp8"):
        for name in filter(fp32.__contains__, low := chosen.get(side, {})):
            place = f"in the {side} list at {low[name].where}"
            wrong[f"{fp32[name].where}: {name!r} is on both sides; {place}"] = OpListError
    wrong |= dict.fromkeys(without_fp8(chosen.get("fp8", {})), OpListError)
    if wrong:
        kinds = set(wrong.values())
        raise (kinds.pop() if len(kinds) == 1 else OpListError)("\n".join(wrong))
    own_names = {name for side in ("bf16", "fp32", "fp8") for name in chosen.get(side, {})}
    for side in SIDES:
        if side not in chosen:
            # What the user lists himself outranks a default that says otherwise.
            resolved = resolve(defaults.side(side) or (), "error", {})
            chosen[side] = {
                name: listed
                for name, listed in resolved.items()
                if name not in own_names and op_facts.FOLLOWS.get(name) not in own_names
            }
    fp32, fp8 = chosen["fp32"], chosen["fp8"]
    bf16 = {name: listed for name, listed in chosen["bf16"].items() if name not in fp8}  # FP8 computes a BF16 op
    ruled = {*bf16, *fp32, *fp8}
    promote = {name: listed for name, listed in chosen["promote"].items() if name not in ruled}
    origins = {name: listed.where for side in (promote, fp32, bf16, fp8) for name, listed in side.items()}
    return Policy(
        tuple(sorted(bf16)), tuple(sorted(fp32)), tuple(sorted(promote)), "O1", origins, fp8=tuple(sorted(fp8))
    )


def without_fp8(listed: Mapping[str, Listed]) -> Iterator[str]:
    """What is wrong with each name of an fp8 list that has no FP8 product."""
    legal = op_facts.MATRIX_PRODUCTS
    for name, each in listed.items():
        if name not in legal:
            yield f"{each.where}: {name!r} has no FP8 product{did_you_mean(name, legal)} (legal: {', '.join(legal)})"


def _o2() -> Policy:
    ops = catalog()
    fp32 = sorted(name for name, op in ops.items() if op.computes and name not in op_facts.O2_BF16)
    return Policy(tuple(sorted(op_facts.O2_BF16)), tuple(fp32), (), "O2")
