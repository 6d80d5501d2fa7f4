"""A frozen `Policy`: op -> rule. It prints as an op list file and reads back to the same policy."""

from __future__ import annotations

import enum
import importlib.util
import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from hmpx import tables
from hmpx.catalog import Op, aten_only, canonical, catalog, legal_names
from hmpx.errors import HmpxError, OpListError, OptLevelError, UnknownOpError, nearest
from hmpx.oplist import SIDES, Listed, OpLists, default_lists

logger = logging.getLogger("hmpx")

OPT_LEVELS = ("O1", "O2")


class Rule(enum.Enum):
    """What happens to the eligible arguments of an op."""

    BF16 = "bf16"  # all to bfloat16
    FP32 = "fp32"  # all to float32
    PROMOTE = "promote"  # all to the widest dtype among them
    FIRST_INPUT = "first input"  # the others to the dtype of the first
    UNCAST = "uncast"  # no casts inside: not the model's forward
    DTYPE_MAP = "dtype map"  # a dtype that is asked for becomes another

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Policy:
    """Which op runs under which rule.

    bf16, fp32, promote: sorted op names; a dotted name is a user's own function. Two policies are equal when these
    are. `origins` says where each name was listed.
    """

    bf16: tuple[str, ...] = ()
    fp32: tuple[str, ...] = ()
    promote: tuple[str, ...] = ()
    opt_level: str = field(default="O1", compare=False)
    origins: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        rules = {name: rule for rule in (Rule.PROMOTE, Rule.FP32, Rule.BF16) for name in getattr(self, rule.value)}
        object.__setattr__(self, "_rules", rules)

    def listed(self, name: str) -> Rule | None:
        """The rule of the list that names `name` itself."""
        return self._rules.get(name)

    def rule(self, op: Op) -> Rule | None:
        """The rule of an op of the catalogue; None leaves it as torch made it."""
        listed = self.listed(op.name)
        if listed is None and op.follows:
            listed = self.listed(op.follows)
        if listed is None or (listed is Rule.PROMOTE and not op.refuses_mixed):
            # torch's own promotion already goes to the widest dtype, so a promoted op is left alone unless it refuses.
            return Rule.FIRST_INPUT if op.refuses_mixed else None
        return listed

    def user_functions(self) -> dict[str, Rule]:
        """Dotted names of functions outside torch, each with its rule."""
        return {name: rule for name, rule in self._rules.items() if "." in name}

    def __str__(self) -> str:
        blocks = [f"# opt_level {self.opt_level}"]
        for side in SIDES:
            names = getattr(self, side)
            blocks.append("\n".join([f"{side}:", *(f"  - {name}" for name in names)]) if names else f"{side}: []")
        return "\n".join(blocks) + "\n"


def build_policy(opt_level: str = "O1", lists: OpLists | None = None, unknown: str = "error") -> Policy:
    """Make a policy of op lists, the default ones where a side is None.

    Args:
        opt_level: "O1" (the lists decide) or "O2" (convolutions, linear and matrix products in BF16, every other op
            that computes in FP32; no list may be given).
        unknown: "error", or "warn" to skip names that stand for nothing.

    Raises:
        OptLevelError: another level, or O2 with lists.
        UnknownOpError: a name that stands for no op, with its file and line.
        OpListError: a name on both sides.
    """
    if opt_level not in OPT_LEVELS:
        raise OptLevelError(
            f"opt_level {opt_level!r} does not exist{nearest(str(opt_level), OPT_LEVELS)}"
            f" (legal: {', '.join(OPT_LEVELS)}; a list file goes to bf16_file_path= or fp32_file_path=)"
        )
    if unknown not in ("error", "warn"):
        raise HmpxError(f"unknown={unknown!r} does not exist (legal: 'error', 'warn')")
    given = {side: lists.side(side) for side in SIDES} if lists else dict.fromkeys(SIDES)
    if opt_level == "O2":
        for side, names in given.items():
            if names is not None:
                path = names[0].path if names else f"{side}_file_path"
                raise OptLevelError(f"{path}: O2 decides by itself and takes no op lists; lists go with opt_level='O1'")
        return _o2()
    return _o1(given, unknown)


def _o1(given: dict[str, tuple[Listed, ...] | None], unknown: str) -> Policy:
    defaults = default_lists()
    chosen = {side: _resolve(names, unknown) for side, names in given.items() if names is not None}
    _refuse_both_sides(chosen.get("bf16", {}), chosen.get("fp32", {}))
    own_names = {name for side in ("bf16", "fp32") for name in chosen.get(side, {})}
    for side in SIDES:
        if side not in chosen:
            # What the user lists himself outranks a default that says otherwise.
            resolved = _resolve(defaults.side(side), "error")
            chosen[side] = {
                name: listed
                for name, listed in resolved.items()
                if name not in own_names and tables.FOLLOWS.get(name) not in own_names
            }
    bf16, fp32 = chosen["bf16"], chosen["fp32"]
    promote = {name: listed for name, listed in chosen["promote"].items() if name not in bf16 and name not in fp32}
    origins = {name: listed.where for side in (promote, fp32, bf16) for name, listed in side.items()}
    return Policy(tuple(sorted(bf16)), tuple(sorted(fp32)), tuple(sorted(promote)), "O1", origins)


def _o2() -> Policy:
    ops = catalog()
    fp32 = sorted(name for name, op in ops.items() if op.computes and name not in tables.O2_BF16)
    return Policy(tuple(sorted(tables.O2_BF16)), tuple(fp32), (), "O2")


def _resolve(names: tuple[Listed, ...], unknown: str) -> dict[str, Listed]:
    """Listed names by the op they stand for; the first mention is the one remembered."""
    ops = catalog()
    resolved: dict[str, Listed] = {}
    for listed in names:
        op = canonical(listed.name)
        if op not in ops and not aten_only(op):
            if not may_be_user_function(listed.name):
                message = f"{listed.where}: {unknown_op(listed.name)}"
                if unknown == "error":
                    raise UnknownOpError(message)
                logger.warning("%s (skipped)", message)
                continue
            op = listed.name
        resolved.setdefault(op, listed)
    return resolved


def may_be_user_function(name: str) -> bool:
    """Whether a dotted name may stand for a function outside torch; `linear.x` only if a module `linear` exists."""
    top, _, rest = name.partition(".")
    if not rest or top == "torch":
        return False
    return top not in legal_names() or top in sys.modules or importlib.util.find_spec(top) is not None


def unknown_op(name: str) -> str:
    """The message for a name that stands for nothing."""
    in_place = name.removesuffix("_")
    if in_place != name and in_place in legal_names():
        return f"{name!r} writes to its input and keeps its dtype; list {in_place!r} for the op"
    return f"unknown op {name!r}{nearest(name.rpartition('.')[2] or name, legal_names())}"


def _refuse_both_sides(bf16: dict[str, Listed], fp32: dict[str, Listed]) -> None:
    for name in bf16:
        if name in fp32:
            raise OpListError(f"{fp32[name].where}: {name!r} is on both sides; in the bf16 list at {bf16[name].where}")
