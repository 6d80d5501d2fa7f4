"""Resolves the names in lists to ops, and explains what is wrong with unknown names."""

from __future__ import annotations

import importlib.util
import logging
import sys
from typing import Literal

import torch

from hmpx.errors import OpListError, UnknownOpError, did_you_mean
from hmpx.ops.policies.catalog import aten_only, canonical, catalog, legal_names, retired
from hmpx.ops.policies.op_lists import Listed
from hmpx.ops.policies.other_names import module_class, op_meant, within_torch

logger = logging.getLogger("hmpx")
Unknown = Literal["error", "warn"]  # what becomes of names that stand for nothing


def resolve(names: tuple[Listed, ...], unknown: Unknown, wrong: dict[str, type[OpListError]]) -> dict[str, Listed]:
    """Listed names by the op that they mean; the first mention counts. Adds problems to `wrong`."""
    ops = catalog()
    resolved: dict[str, Listed] = {}
    for listed in names:
        op = canonical(listed.name)
        if listed.problem:
            wrong[f"{listed.where}: {listed.problem}"] = OpListError
            continue
        if retired(op):
            continue
        if op not in ops and not aten_only(op):
            if not may_be_user_function(listed.name):
                message = f"{listed.where}: {unknown_op(listed.name)}"
                if unknown == "error":
                    wrong[message] = UnknownOpError
                else:
                    logger.warning("%s (skipped)", message)
                continue
            op = listed.name
        resolved.setdefault(op, listed)
    return resolved


def may_be_user_function(name: str) -> bool:
    """Whether a dotted name may stand for a function outside torch; `linear.x` only if a module `linear` exists."""
    top, _, rest = name.partition(".")
    if not rest or top == "torch" or within_torch(name):
        return False
    return top not in legal_names() or top in sys.modules or importlib.util.find_spec(top) is not None


def unknown_op(name: str) -> str:
    """The message for an unknown name."""
    if retired(canonical(name)):
        return f"torch {torch.__version__} has removed {name!r}: a list may name it, and no rule is needed"
    in_place = name.removesuffix("_")
    if in_place != name and in_place in legal_names():
        return f"{name!r} writes to its input and keeps its dtype; list {in_place!r} for the op"
    spelling, meant = name.rpartition(".")[2] or name, op_meant(name)
    if module_class(name):
        listed = did_you_mean(spelling, (), meant=meant) or ": list the functions that its forward calls"
        return f"{name!r} is a class, and a list names functions{listed}"
    meant = meant or (spelling if within_torch(name) and spelling in legal_names() else None)
    return f"unknown op {name!r}{did_you_mean(spelling, legal_names(), meant=meant)}"
