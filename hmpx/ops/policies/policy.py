"""Which op has which rule: a frozen `Policy`, which prints as an op list file and reads back to the same policy.

`build_policy` makes one from op lists or an opt level: it resolves the names in lists to ops, and explains wrong names.
"""

from __future__ import annotations

import enum
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from hmpx.base.tensors import dtype_named
from hmpx.errors import HmpxError, OpListError, OptLevelError, UnknownOpError, did_you_mean
from hmpx.ops.policies import op_facts
from hmpx.ops.policies.catalog import Op, canonical, catalog, is_op, may_be_user_function, retired, unknown_op
from hmpx.ops.policies.composition import ARITHMETIC, ONLY_FP32, SPARSE_GRADIENTS, Composition
from hmpx.ops.policies.fp8_format import FORMATS, Format
from hmpx.ops.policies.lists import SIDES, Listed, OpLists, default_lists, shipped

OptLevel = Literal["O1", "O2"]
Where = Literal["model", "everywhere"]
WHERE: tuple[Where, ...] = ("model", "everywhere")  # where ops are cast


class Rule(enum.Enum):
    """How the eligible arguments of an op are cast: dense and nested tensors of float32, bfloat16 and float16.

    A list says BF16, FP8, FP32 or PROMOTE. The bf16 list says FP16 under ``low_precision=torch.float16``.
    FP8 casts as BF16 does; FP8 products compute the op then, and its result is in BF16. BF16_TO_FP32 casts so too, and
    the result stays in FP32; no list says it, but "bf16-to-fp32" for a module or a region.
    FIRST_INPUT is for ops in no list that refuse mixed dtypes. INSIDE is for ops in no list that torch composes of
    listed products and of arithmetic in no list, which carries a state or multiplies three tensors: gru, bilinear.

    Example:
        >>> with hmpx.convert() as handle:
        ...     handle.policy.listed("linear"), str(handle.policy.listed("softmax"))
        (<Rule.BF16: 'bf16'>, 'fp32')
    """

    BF16 = "bf16"  # all to bfloat16
    FP16 = "fp16"  # all to float16
    FP8 = "fp8"  # all to bfloat16, and multiplied in FP8
    BF16_TO_FP32 = "bf16-to-fp32"  # all to bfloat16, and the result in float32
    FP32 = "fp32"  # all to float32
    PROMOTE = "promote"  # all to the widest dtype among them
    FIRST_INPUT = "first input"  # the others to the dtype of the first
    INSIDE = "inside"  # none; the products that the op consists of cast what they are given

    def __str__(self) -> str:
        return self.value


# The dtypes that the bf16 list may stand for, and the rule that its ops get then.
LOW_RULES: dict[torch.dtype, Rule] = {torch.bfloat16: Rule.BF16, torch.float16: Rule.FP16}


@dataclass(frozen=True)
class Case:
    """The rule of an op in calls whose arguments `when` accepts; None accepts every call.

    rule: None leaves the op as torch made it. follows: the listed ops that the rule comes from, if it is not its own.
    format: of FP8. low: the dtype of the products, where they are cast inside of the op.
    """

    rule: Rule | None
    when: Callable[..., bool] | None = None
    follows: tuple[str, ...] = ()
    format: Format | None = None
    low: torch.dtype | None = None


@dataclass(frozen=True)
class Policy:
    """Which op runs under which rule. It prints as an op list file; two are equal where lists and `low_precision` are.

    Attributes:
        bf16, fp32, promote: sorted op names; a dotted name is a user's own function.
        low_precision: torch.bfloat16 or torch.float16, what the ops in `bf16` run in.
        fp8: the names that are multiplied in FP8. fp8_format: how.
        bf16_to_fp32: products that take BF16 and hand on FP32, in a module or region that is "bf16-to-fp32".
        opt_level: "O1" or "O2", what it was made for.
        origins: where each name was listed, as file:line; in words, where a list has it for a newer torch.

    `listed(name)` is the rule of the list that has this name itself, `user_functions()` are the dotted names with their
    rules. Of an op of hmpx's catalogue, `rule(op)` is the rule that it gets, `cases(op)` the rules by the arguments of
    a call, `listed_as(op)` the rule of its own name or of the op that it is another name of, `undecided(op)` its parts
    that are in different lists.

    Raises:
        HmpxError: another dtype for `low_precision`; FP8 beside float16; a name that stands for nothing, has no FP8
            product, or is on both sides.

    Example:
        >>> policy = hmpx.Policy(bf16=("linear",), fp32=("softmax",))
        >>> print(policy)
        # opt_level O1
        bf16:
          - linear
        fp32:
          - softmax
        promote: []
        <BLANKLINE>
    """

    bf16: tuple[str, ...] = ()
    fp32: tuple[str, ...] = ()
    promote: tuple[str, ...] = ()
    opt_level: OptLevel = field(default="O1", compare=False)
    origins: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    low_precision: torch.dtype = torch.bfloat16
    fp8: tuple[str, ...] = ()
    fp8_format: Format = FORMATS["tensorwise"]
    bf16_to_fp32: tuple[str, ...] = ()
    _rules: dict[str, Rule] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.low_precision not in tuple(LOW_RULES):
            legal = " nor ".join(map(str, LOW_RULES))
            raise HmpxError(f"low_precision={self.low_precision!r} is neither {legal}")
        if self.fp8 and self.low_precision is not torch.bfloat16:
            raise HmpxError(f"fp8: {', '.join(self.fp8)}: FP8 products take bfloat16, and low_precision is float16")
        for side in SIDES:
            for name in getattr(self, side):
                if not is_op(canonical(name)) and not may_be_user_function(name):
                    raise UnknownOpError(unknown_op(name), f"hmpx.Policy, {side}")
        for name in self.fp8:
            if name not in op_facts.MATRIX_PRODUCTS:
                raise OpListError(_no_product(name), "hmpx.Policy, fp8")
        for side in ("bf16", "fp8"):
            for name in {*getattr(self, side)}.intersection(self.fp32):
                raise OpListError(f"{name!r} is on both sides", f"hmpx.Policy, {side} and fp32")
        low = LOW_RULES[self.low_precision]
        sides = {"promote": Rule.PROMOTE, "fp32": Rule.FP32, "bf16": low, "fp8": Rule.FP8}
        sides["bf16_to_fp32"] = Rule.BF16_TO_FP32
        rules = {name: rule for side, rule in sides.items() for name in getattr(self, side)}
        object.__setattr__(self, "_rules", rules)

    def listed(self, name: str) -> Rule | None:
        """Return the rule of the list that names `name` itself."""
        return self._rules.get(name)

    def listed_as(self, op: Op) -> Rule | None:
        """Return the rule of the list that names an op, by its own name or another name of the same computation."""
        listed = self.listed(op.name)
        return self.listed(op.follows) if listed is None and op.follows else listed

    def rule(self, op: Op) -> Rule | None:
        """Return the rule of an op in the catalogue; None leaves it as torch made it.

        Where it depends on the arguments of a call (`cases`), the first that casts to a dtype of its own.
        """
        rules = [case.rule for case in self.cases(op)]
        return next((rule for rule in rules if rule not in (None, Rule.PROMOTE, Rule.FIRST_INPUT)), rules[0])

    def cases(self, op: Op) -> tuple[Case, ...]:
        """Return the cases of an op; the first case that accepts a call's arguments decides.

        Its own listing goes first, then that of the op that it follows as another name, then those of its parts. Where
        its gradient is sparse, it is as if in no list.
        """
        if op.view:
            return (Case(None),)
        listed = self.listed_as(op)
        if listed is not None:
            follows = (op.follows,) if op.follows and not self.listed(op.name) else ()
            case = self._doing(op, listed, None, follows)
            sparse = SPARSE_GRADIENTS.get(op.name)
            return (case,) if sparse is None else (self._doing(op, None, sparse, follows), case)
        rows = op.rows or (catalog()[op.follows].rows if op.follows else ())
        cases = [self._case(op, row) for row in rows]
        if all(case.when is not None for case in cases):
            cases.append(self._doing(op, None))
        agreed = len({case.rule for case in cases}) == 1
        followed = tuple(dict.fromkeys(name for case in cases for name in case.follows))
        return (replace(cases[0], when=None, follows=followed),) if agreed else tuple(cases)

    def _case(self, op: Op, row: Composition) -> Case:
        found = self._of_parts(row)
        rules: set[Rule] = {rule for rule in found.values() if rule is not Rule.PROMOTE}
        rules = rules or set(found.values())
        names = tuple(name for name in found if self.listed(name))
        if not names or len(rules) > 1:
            return self._doing(op, None, row.when)
        rule = rules.pop()
        joined = {name for way in row.ways for name in way if name in ARITHMETIC}
        if row.joins and rule in LOW_RULES.values() and joined and not any(map(self.listed, joined)):
            return Case(Rule.INSIDE, row.when, names, low=self.low_precision)
        return self._doing(op, rule, row.when, names)

    def _doing(
        self, op: Op, listed: Rule | None, when: Callable[..., bool] | None = None, follows: tuple[str, ...] = ()
    ) -> Case:
        """Return the case of a listed rule.

        Only a matrix product itself is computed in FP8, or with an FP32 result. An op of another kind that follows a
        product's list is cast to the dtype that the product hands on.
        """
        rule = listed
        if listed is None or (listed is Rule.PROMOTE and not op.refuses_mixed):
            # torch's own promotion already goes to the widest dtype, so a promoted op is left alone unless it refuses.
            rule = None if not op.refuses_mixed else Rule.PROMOTE if op.promotes else Rule.FIRST_INPUT
        if rule in (Rule.FP8, Rule.BF16_TO_FP32) and not op.is_matrix_product:
            rule = Rule.BF16 if rule is Rule.FP8 else Rule.FP32
        return Case(rule, when, follows, self.fp8_format if rule is Rule.FP8 else None)

    def _of_parts(self, row: Composition) -> dict[str, Rule]:
        """Return the rules of a composed op's parts, by listed name."""
        found: dict[str, Rule] = {}
        for name in row.parts:
            part = catalog().get(name := canonical(name))
            listed = self.listed_as(part) if part else self.listed(name)
            if listed is not None:
                found[name if self.listed(name) or not part else part.follows or name] = listed
            elif name in ONLY_FP32:
                found[name] = Rule.FP32
            else:
                for inner in part.rows if part else ():
                    found |= self._of_parts(inner)
        return found

    def undecided(self, op: Op) -> dict[str, Rule]:
        """Return the parts of an unlisted op whose rules differ, so that it stays as it is; with those rules."""
        for row in () if op.view or self.listed_as(op) else op.rows:
            found = self._of_parts(row)
            if any(map(self.listed, found)) and len({rule for rule in found.values() if rule is not Rule.PROMOTE}) > 1:
                return found
        return {}

    def user_functions(self) -> dict[str, Rule]:
        """Return the dotted names of functions outside torch, each with its rule."""
        return {name: rule for name, rule in self._rules.items() if "." in name}

    def __str__(self) -> str:
        blocks = [f"# opt_level {self.opt_level}"]
        if self.low_precision is not torch.bfloat16:
            blocks.append(f"low_precision: {str(self.low_precision).removeprefix('torch.')}")
        for side in SIDES:
            names = getattr(self, side)
            if side == "fp8" and not names:
                continue
            blocks.append("\n".join([f"{side}:", *(f"  - {name}" for name in names)]) if names else f"{side}: []")
        if self.fp8 and (keys := self.fp8_format.keys()):
            blocks.append(f"fp8_format: {json.dumps(keys)}")
        return "\n".join(blocks) + "\n"


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
    fp32 = chosen.get("fp32", {})
    for side in ("bf16", "fp8"):
        for name in filter(fp32.__contains__, low := chosen.get(side, {})):
            sides = ("fp32", fp32[name]), (side, low[name])
            (own, mine), (other, theirs) = sides[::-1] if fp32[name].where.startswith(str(shipped())) else sides
            place = "" if mine.place == theirs.place else f"; in the {other} list at {theirs.where}"
            way = f" (in a recipe, {own}: [..., {name}] does)" if theirs.where.startswith(str(shipped())) else ""
            raise OpListError(f"{name!r} is on both sides{place}; take it out of one{way}", mine.place)
    for name, each in chosen.get("fp8", {}).items():
        if name not in op_facts.MATRIX_PRODUCTS:
            raise OpListError(_no_product(name), each.place)
    return chosen


def _no_product(name: str) -> str:
    legal = op_facts.MATRIX_PRODUCTS
    return f"{name!r} has no FP8 product{did_you_mean(name, legal)} (legal: {', '.join(legal)})"


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
