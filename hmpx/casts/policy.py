"""A frozen `Policy`: op -> rule. It prints as an op list file and reads back to the same policy."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from hmpx.casts import op_facts
from hmpx.casts.composition import ONLY_FP32, Row
from hmpx.casts.listed_names import Unknown, resolve
from hmpx.casts.op_lists import SIDES, Listed, OpLists, default_lists, shipped
from hmpx.casts.ops import Op, canonical, catalog
from hmpx.dtype_names import dtype_named
from hmpx.errors import HmpxError, OpListError, OptLevelError, did_you_mean

OptLevel = Literal["O1", "O2"]
OPT_LEVELS: tuple[OptLevel, ...] = ("O1", "O2")


class Rule(enum.Enum):
    """What happens to the eligible arguments of an op: the dense tensors of float32, bfloat16 and float16.

    A list says BF16, FP32 or PROMOTE. FP16 is what the bf16 list says under ``low_precision=torch.float16``.
    FIRST_INPUT is for ops in no list that refuse mixed dtypes; UNCAST and DTYPE_MAP are for functions that are no ops.

    Example:
        >>> with hmpx.convert() as handle:
        ...     handle.policy.listed("linear"), str(handle.policy.listed("softmax"))
        (<Rule.BF16: 'bf16'>, 'fp32')
    """

    BF16 = "bf16"  # all to bfloat16
    FP16 = "fp16"  # all to float16
    FP32 = "fp32"  # all to float32
    PROMOTE = "promote"  # all to the widest dtype among them
    FIRST_INPUT = "first input"  # the others to the dtype of the first

    def __str__(self) -> str:
        return self.value


# What the ops in the bf16 list may run in, and the rule that they get then.
LOW_RULES: dict[torch.dtype, Rule] = {torch.bfloat16: Rule.BF16, torch.float16: Rule.FP16}


@dataclass(frozen=True)
class Case:
    """What an op does in a call whose arguments `when` accepts; None accepts every call.

    rule: None leaves the op as torch made it. follows: the listed ops that the rule comes from, if it is not its own.
    """

    rule: Rule | None
    when: Callable[..., bool] | None = None
    follows: tuple[str, ...] = ()


@dataclass(frozen=True)
class Policy:
    """Which op runs under which rule. It prints as an op list file; two are equal where lists and `low_precision` are.

    Attributes:
        bf16, fp32, promote: sorted op names; a dotted name is a user's own function.
        low_precision: torch.bfloat16 or torch.float16, what the ops in `bf16` run in.
        opt_level: "O1" or "O2", what it was made for.
        origins: where each name was listed, as file:line.

    `listed(name)` is the rule of the list that has this name itself, `user_functions()` are the dotted names with their
    rules. Of an op of hmpx's catalogue, `rule(op)` is the rule that it gets, `cases(op)` the rules by the arguments of
    a call, `listed_as(op)` the rule of its own name or of the op that it is another name of, `undecided(op)` its parts
    that are in different lists.

    Raises:
        HmpxError: another dtype for `low_precision`.

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
    _rules: dict[str, Rule] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.low_precision not in tuple(LOW_RULES):
            legal = " nor ".join(map(str, LOW_RULES))
            raise HmpxError(f"low_precision={self.low_precision!r} is neither {legal}")
        sides = {"promote": Rule.PROMOTE, "fp32": Rule.FP32, "bf16": LOW_RULES[self.low_precision]}
        rules = {name: rule for side, rule in sides.items() for name in getattr(self, side)}
        object.__setattr__(self, "_rules", rules)

    def listed(self, name: str) -> Rule | None:
        """The rule of the list that names `name` itself."""
        return self._rules.get(name)

    def listed_as(self, op: Op) -> Rule | None:
        """The rule of the list that names an op, by its own or by another name of the same computation."""
        listed = self.listed(op.name)
        return self.listed(op.follows) if listed is None and op.follows else listed

    def rule(self, op: Op) -> Rule | None:
        """The rule of an op of the catalogue; None leaves it as torch made it.

        Where it depends on the arguments of a call (`cases`), the first that casts.
        """
        rules = [case.rule for case in self.cases(op)]
        return next((rule for rule in rules if rule in (*LOW_RULES.values(), Rule.FP32)), rules[0])

    def cases(self, op: Op) -> tuple[Case, ...]:
        """What an op does, by the arguments of a call; the first case that accepts them decides.

        Its own listing goes first, then that of the op that it follows as another name, then those of its parts.
        """
        if op.view:
            return (Case(None),)
        listed = self.listed_as(op)
        if listed is not None:
            follows = (op.follows,) if op.follows and not self.listed(op.name) else ()
            return (Case(self._effective(op, listed), follows=follows),)
        rows = op.rows or (catalog()[op.follows].rows if op.follows else ())
        cases = [self._case(op, row) for row in rows]
        if all(case.when is not None for case in cases):
            cases.append(Case(self._effective(op, None)))
        agreed = len({case.rule for case in cases}) == 1
        followed = tuple(dict.fromkeys(name for case in cases for name in case.follows))
        return (Case(cases[0].rule, follows=followed),) if agreed else tuple(cases)

    def _case(self, op: Op, row: Row) -> Case:
        found = self._of_parts(row)
        rules: set[Rule] = {rule for rule in found.values() if rule is not Rule.PROMOTE}
        rules = rules or set(found.values())
        names = tuple(name for name in found if self.listed(name))
        if not names or len(rules) > 1:
            return Case(self._effective(op, None), row.when)
        return Case(self._effective(op, rules.pop()), row.when, names)

    def _of_parts(self, row: Row) -> dict[str, Rule]:
        """The rules of the parts of a row that have one, by the name that is listed."""
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
        """The parts of an op that no list names, with their rules, where these differ and it stays as it is."""
        for row in () if op.view or self.listed_as(op) else op.rows:
            found = self._of_parts(row)
            if any(map(self.listed, found)) and len({rule for rule in found.values() if rule is not Rule.PROMOTE}) > 1:
                return found
        return {}

    @staticmethod
    def _effective(op: Op, listed: Rule | None) -> Rule | None:
        if listed is None or (listed is Rule.PROMOTE and not op.refuses_mixed):
            # torch's own promotion already goes to the widest dtype, so a promoted op is left alone unless it refuses.
            return Rule.FIRST_INPUT if op.refuses_mixed else None
        return listed

    def user_functions(self) -> dict[str, Rule]:
        """Dotted names of functions outside torch, each with its rule."""
        return {name: rule for name, rule in self._rules.items() if "." in name}

    def __str__(self) -> str:
        blocks = [f"# opt_level {self.opt_level}"]
        if self.low_precision is not torch.bfloat16:
            blocks.append(f"low_precision: {str(self.low_precision).removeprefix('torch.')}")
        for side in SIDES:
            names = getattr(self, side)
            blocks.append("\n".join([f"{side}:", *(f"  - {name}" for name in names)]) if names else f"{side}: []")
        return "\n".join(blocks) + "\n"


def build_policy(
    opt_level: OptLevel = "O1",
    lists: OpLists | None = None,
    unknown: Unknown = "error",
    low_precision: torch.dtype | str | None = None,
) -> Policy:
    """Make a policy of op lists, the default ones where a side is None.

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
    return policy if low is None else replace(policy, low_precision=low)


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
    bf16, fp32 = chosen.get("bf16", {}), chosen.get("fp32", {})
    for name in filter(fp32.__contains__, bf16):
        place = f"in the bf16 list at {bf16[name].where}"
        wrong[f"{fp32[name].where}: {name!r} is on both sides; {place}"] = OpListError
    if wrong:
        kinds = set(wrong.values())
        raise (kinds.pop() if len(kinds) == 1 else OpListError)("\n".join(wrong))
    own_names = {name for side in ("bf16", "fp32") for name in chosen.get(side, {})}
    for side in SIDES:
        if side not in chosen:
            # What the user lists himself outranks a default that says otherwise.
            resolved = resolve(defaults.side(side) or (), "error", {})
            chosen[side] = {
                name: listed
                for name, listed in resolved.items()
                if name not in own_names and op_facts.FOLLOWS.get(name) not in own_names
            }
    bf16, fp32 = chosen["bf16"], chosen["fp32"]
    promote = {name: listed for name, listed in chosen["promote"].items() if name not in bf16 and name not in fp32}
    origins = {name: listed.where for side in (promote, fp32, bf16) for name, listed in side.items()}
    return Policy(tuple(sorted(bf16)), tuple(sorted(fp32)), tuple(sorted(promote)), "O1", origins)


def _o2() -> Policy:
    ops = catalog()
    fp32 = sorted(name for name, op in ops.items() if op.computes and name not in op_facts.O2_BF16)
    return Policy(tuple(sorted(op_facts.O2_BF16)), tuple(fp32), (), "O2")
