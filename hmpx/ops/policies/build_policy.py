"""Builds a policy from op lists or an opt level: resolves the names in lists to ops, and explains wrong names."""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Literal

import torch

from hmpx.base.dtype_names import dtype_named
from hmpx.errors import (
    FEW,
    Fault,
    HmpxError,
    OpListError,
    OptLevelError,
    UnknownOpError,
    did_you_mean,
    raise_faults,
)
from hmpx.ops.policies import op_facts
from hmpx.ops.policies.catalog import aten_only, canonical, catalog, legal_names, retired
from hmpx.ops.policies.op_lists import SIDES, Listed, OpLists, default_lists, shipped
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
        UnknownOpError: names that stand for no op, each with its file and line.
        OpListError: other problems of the lists, a name on both sides say. Every problem is a line of the message.
    """
    if opt_level not in OPT_LEVELS:
        raise OptLevelError(_no_opt_level(opt_level))
    if unknown not in ("error", "warn"):
        raise HmpxError(f"unknown={unknown!r} does not exist (legal: 'error', 'warn')")
    lists = lists or OpLists()
    given = {side: names for side in SIDES if (names := lists.side(side)) is not None}
    if opt_level == "O1":
        policy = _o1(resolve_sides(given, unknown, lists.faults))
    else:
        for side, names in given.items():
            where = names[0].where if names else f"{side}_file_path"
            raise OptLevelError(f"{where}: O2 decides by itself and takes no op lists; lists go with opt_level='O1'")
        raise_faults(lists.faults)
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
            resolved = _resolve(defaults.side(side) or (), "error", [])
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


def resolve_sides(
    given: Mapping[str, tuple[Listed, ...]], unknown: Unknown = "error", faults: Iterable[Fault] = ()
) -> dict[str, dict[str, Listed]]:
    """Return the listed names of each side by the op that they mean.

    Raises:
        OpListError, UnknownOpError: every fault; `faults` are more of them.
    """
    wrong = list(faults)
    chosen = {side: _resolve(names, unknown, wrong) for side, names in given.items()}
    fp32 = chosen.get("fp32", {})
    for side in ("bf16", "fp8"):
        for name in filter(fp32.__contains__, low := chosen.get(side, {})):
            place = "" if low[name].where == fp32[name].where else f"; in the {side} list at {low[name].where}"
            wrong.append(Fault(f"{name!r} is on both sides{place}", fp32[name].origin, kind=OpListError))
    legal = op_facts.MATRIX_PRODUCTS
    for name, each in chosen.get("fp8", {}).items():
        if name not in legal:
            hint = f"{did_you_mean(name, legal)} (legal: {', '.join(legal)})"
            wrong.append(Fault(f"{name!r} has no FP8 product{hint}", each.origin, kind=OpListError))
    raise_faults(wrong)
    return chosen


def _resolve(names: tuple[Listed, ...], unknown: Unknown, wrong: list[Fault]) -> dict[str, Listed]:
    """Return listed names by the op that they mean; the first mention counts. Adds faults to `wrong`."""
    ops = catalog()
    resolved: dict[str, Listed] = {}
    found = 0
    for listed in names:
        op = canonical(listed.name)
        if listed.problem:
            wrong.append(Fault(listed.problem, listed.origin, kind=OpListError))
            continue
        if retired(op):
            continue
        if op not in ops and not aten_only(op):
            if not may_be_user_function(listed.name):
                found += 1  # the nearest name is sought in two thousand
                said = unknown_op(listed.name) if found <= FEW else f"unknown op {listed.name!r}"
                if unknown == "error":
                    wrong.append(Fault(said, listed.origin, kind=UnknownOpError))
                elif found <= FEW:
                    logger.warning("%s: %s (skipped)", listed.where, said)
                continue
            op = listed.name
        resolved.setdefault(op, listed)
    if unknown == "warn" and found > FEW:
        logger.warning("%s: and %d more unknown ops (skipped)", names[0].path, found - FEW)
    return resolved


def may_be_user_function(name: str) -> bool:
    """Return whether a dotted name may be a function outside torch; `linear.x` only if a module `linear` exists."""
    top, _, rest = name.partition(".")
    if not rest or top == "torch" or _within_torch(name):
        return False
    return top not in legal_names() or top in sys.modules or importlib.util.find_spec(top) is not None


# Unknown names

# As papers and other libraries have them, without underscores. A name that is spelt alike is found without this.
_ELSEWHERE = {
    **dict.fromkeys(("attention", "sdpa", "selfattention", "flashattention"), "scaled_dot_product_attention"),
    **dict.fromkeys(("multiheadattention", "mha"), "multi_head_attention_forward"),
    **dict.fromkeys(("dense", "fc", "fullyconnected"), "linear"),
    **dict.fromkeys(("ce", "celoss", "xent", "softmaxcrossentropy", "crossentropyloss"), "cross_entropy"),
    **dict.fromkeys(("bce", "bceloss"), "binary_cross_entropy"),
    **dict.fromkeys(("batchmatmul", "batchedmatmul"), "bmm"),
    **dict.fromkeys(("mse", "l2loss"), "mse_loss"),
    **dict.fromkeys(("bcewithlogits", "bcewithlogitsloss"), "binary_cross_entropy_with_logits"),
    **{"gemm": "mm", "swish": "silu", "nll": "nll_loss", "klloss": "kl_div", "kldivloss": "kl_div"},
}


def unknown_op(name: str) -> str:
    """Return the message for an unknown name."""
    if retired(canonical(name)):
        return f"torch {torch.__version__} has removed {name!r}: a list may name it, and no rule is needed"
    in_place = name.removesuffix("_")
    if in_place != name and in_place in legal_names():
        return f"{name!r} writes to its input and keeps its dtype; list {in_place!r} for the op"
    spelling = name.rpartition(".")[2] or name
    meant = _ELSEWHERE.get(spelling.lower().replace("_", ""))
    if isinstance(vars(torch.nn).get(spelling), type):
        hint = did_you_mean(spelling, legal_names(), cutoff=0.8, meant=meant)
        return f"{name!r} is a class, and a list names functions{hint or ': list the functions that its forward calls'}"
    return f"unknown op {name!r}{did_you_mean(spelling, legal_names(), meant=meant)}"


def _within_torch(name: str) -> bool:
    """Return whether a dotted name begins with a usual name of torch's modules: ``nn.``, ``F.``."""
    return name.startswith(("nn.", "F.", "functional."))
