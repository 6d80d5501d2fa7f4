"""Overlays: the lists of a module rule or a `casts` region, laid over the policy around them.

An overlay is one of two things: lists of ops, which move these ops and leave the others as they are around it; or a
dtype, for every op that computes ("bf16-to-fp32" is float32 but for the inputs of matrix products). Equal overlays are
one object with one number.

Each nesting of overlays is a *scope*, a number; 0 is outside of all overlays. The state of a thread holds the number of
a scope, and compiled code is guarded by it. Numbers hold for the process; which policy a scope has depends on the
conversion in force, which is around all of them.

The lists of a prepared model are an overlay too, which lies below all others: it takes the place of the conversion's
own lists, and what regions and rules lay over those lies over it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from types import FrameType
from typing import Any, ClassVar, TypeVar

import torch

from hmpx.base import process_state as state
from hmpx.base.compiling import ask_once
from hmpx.base.tensors import SHORT, dtype_name, dtype_named
from hmpx.errors import HmpxError, Places, did_you_mean, errors_at
from hmpx.ops.policies import op_facts
from hmpx.ops.policies.catalog import catalog
from hmpx.ops.policies.fp8_format import Format
from hmpx.ops.policies.lists import LIST_KEYS, SIDES, OpLists
from hmpx.ops.policies.policy import LOW_RULES, Policy, Rule, resolve_sides
from hmpx.ops.wrapping.callers import users_line


class Policies(dict[int, Policy]):
    """The policies of one conversion by the scope in which they hold, as far as they are known."""

    def at(self, scope: int) -> Policy:
        """Return the policy of any scope, known or not."""
        if scope in self:
            return self[scope]
        around, overlay = state.scopes[scope]
        return state.overlays[overlay].over(self.at(around))

    def __str__(self) -> str:
        return "".join(f"{scope}: {policy}" for scope, policy in self.items())


def scope_inside(scope: int, overlay: int) -> int:
    """Return the scope of an overlay (by its number) inside another scope; the conversion in force has its wrappers."""
    found = number_inside(scope, overlay)
    if found not in state.known_scopes and state.learn is not None:
        state.learn((found,))
    return found


# torch.compile calls it, and takes the number for a constant: it depends on nothing but the arguments.
ask_once(scope_inside)


def number_inside(scope: int, overlay: int) -> int:
    """Return the same number as `scope_inside`, and build no wrappers."""
    found = state.scope_numbers.get((scope, overlay))
    return _new(scope, overlay) if found is None else found


def _new(scope: int, overlay: int) -> int:
    with state.lock:
        key = scope, overlay
        if key not in state.scope_numbers:
            if scope and state.overlays[overlay].of_model:
                state.scope_numbers[key] = _above(scope, overlay)
            elif state.scopes[scope][1] == overlay:
                state.scope_numbers[key] = scope  # once more the same
            else:
                state.scope_numbers[key] = len(state.scopes)
                state.scopes.append(key)
        return state.scope_numbers[key]


def _above(scope: int, lists: int) -> int:
    """Return the scope of a model's lists: with the overlays of `scope` over them, or alone inside of another model."""
    before = lists_of(scope)
    if before == lists:
        return scope
    found = number_inside(0, lists)
    for overlay in () if before else [*_overlays_of(scope)][::-1]:
        found = number_inside(found, overlay)
    return found


def _overlays_of(scope: int) -> Iterator[int]:
    """Yield the numbers of the overlays of a scope, the innermost first."""
    while scope:
        scope, overlay = state.scopes[scope]
        yield overlay


def lists_of(scope: int) -> int:
    """Return the overlay (its number) of the model whose lists hold in a scope; 0 if they are those of no model."""
    return next((overlay for overlay in _overlays_of(scope) if state.overlays[overlay].of_model), 0)


ask_once(lists_of)


def made_of(overlays: Collection[int]) -> set[int]:
    """Return the known scopes that consist of these overlays alone."""
    found = {0}
    for scope, (around, overlay) in enumerate(state.scopes):  # the scope around has a smaller number
        if around in found and overlay in overlays:
            found.add(scope)
    return found


DTYPES = (torch.float32, *LOW_RULES)  # that everything in a module may run in
BF16_TO_FP32 = "bf16-to-fp32"  # float32, except matrix products: these take bfloat16 and hand on float32


@dataclass(frozen=True)
class Overlay:
    """The rules of one module or region.

    where: the place that says so, as in ``train.py:12, hmpx.policy_for``. names: each listed op with its side and where
    it is listed. low_precision: the dtype of the bf16 list from here on; None leaves it. dtype: of every op that
    computes. fp8_format: the format of the fp8 list from here on.
    bf16_products: under a `dtype` of float32, whether matrix products take bfloat16.
    no_fp8: whether the fp8 list is empty from here on; its ops are in low precision then.
    """

    where: str
    names: tuple[tuple[str, str, str], ...] = ()
    low_precision: torch.dtype | None = None
    dtype: torch.dtype | None = None
    fp8_format: Format | None = None
    bf16_products: bool = False
    no_fp8: bool = False
    number: int = field(default=0, compare=False)
    of_model: ClassVar[bool] = False  # whether it is all the lists of a prepared model (`ops.forwards`)

    def over(self, policy: Policy) -> Policy:
        """Return the policy that holds inside, where `policy` holds around."""
        if self.dtype is not None:
            side = "fp32" if self.dtype is torch.float32 else "bf16"
            names = [*(name for name, op in catalog().items() if op.computes), *policy.user_functions()]
            low = policy.low_precision if side == "fp32" else self.dtype
            origins = dict.fromkeys(names, self.where)
            products = {name for name, op in catalog().items() if op.is_matrix_product and self.bf16_products}
            ops = tuple(sorted({*names} - products))
            bf16, fp32 = ((), ops) if side == "fp32" else (ops, ())
            return Policy(bf16, fp32, (), policy.opt_level, origins, low, bf16_to_fp32=tuple(sorted(products)))
        emptied = {name: ("bf16", self.where) for name in policy.fp8 if self.no_fp8}
        placed = emptied | {name: (side, where) for name, side, where in self.names}
        own = {name: side for name, (side, _) in placed.items()}
        sides: dict[str, Any] = {}
        for side in SIDES:
            kept = [n for n in getattr(policy, side) if n not in own and op_facts.FOLLOWS.get(n) not in own]
            sides[side] = tuple(sorted([*kept, *(name for name, its in own.items() if its == side)]))
        return replace(
            policy,
            **sides,
            fp8_format=self.fp8_format or policy.fp8_format,
            origins={**policy.origins, **{name: where for name, (_, where) in placed.items()}},
            low_precision=self.low_precision or policy.low_precision,
        )

    @property
    def rule_of_ops(self) -> Rule | None:
        """The rule of every op that computes; None where there is no such one."""
        return Rule.FP32 if self.dtype is torch.float32 else LOW_RULES.get(self.dtype)  # type: ignore[arg-type]

    @property
    def lowers(self) -> bool:
        """Whether this overlay names ops for low precision."""
        return (
            self.dtype in LOW_RULES or self.bf16_products or any(side in ("bf16", "fp8") for _, side, _ in self.names)
        )

    @property
    def casts_arguments(self) -> bool:
        """Whether the arguments of a module are cast once; under "bf16-to-fp32" its ops want different dtypes."""
        return self.dtype is not None and not self.bf16_products

    def hides(self, around: Overlay) -> bool:
        """Return whether `around` has no effect inside this overlay."""
        if self.dtype is not None or around.dtype is not None:
            return self.dtype is not None
        own = {name for name, _, _ in self.names}
        if (around.low_precision and not self.low_precision) or (around.fp8_format and not self.fp8_format):
            return False
        if around.no_fp8 and not self.no_fp8:
            return False
        return all(name in own or op_facts.FOLLOWS.get(name) in own for name, _, _ in around.names)

    def in_words(self) -> str:
        """Describe the overlay: ``everything in float32``, ``linear and matmul in FP32``."""
        if self.dtype is not None:
            return f"everything in {dtype_name(self.dtype)}{', products from bfloat16' if self.bf16_products else ''}"
        low = LOW_RULES[self.low_precision].name if self.low_precision else "low precision"
        how = {
            "bf16": f"in {low}",
            "fp8": f"in {self.fp8_format.bits if self.fp8_format else 'FP8'}",
            "fp32": "in FP32",
            "promote": "promoted",
        }
        parts = []
        for side, word in how.items():
            names = [name for name, its, _ in self.names if its == side]
            if names:
                parts.append(f"{', '.join(names)} {word}")
        if self.low_precision and not any(side == "bf16" for _, side, _ in self.names):
            parts.append(f"the bf16 list in {low}")
        if self.fp8_format:
            parts.append(f"{self.fp8_format.bits} {self.fp8_format}")
        if self.no_fp8:
            parts.append("nothing in FP8")
        return " and ".join(parts) or "as around it"

    def __reduce__(self) -> tuple:
        return _unpickled, tuple(getattr(self, each.name) for each in fields(self) if each.compare)


Made = TypeVar("Made", bound=Overlay)


def _unpickled(*content: Any) -> Overlay:
    return registered(Overlay(*content))


def registered(overlay: Made) -> Made:
    """Return the one object for equal overlays, with its number."""
    with state.lock:
        for known in state.overlays[1:]:
            if known == overlay:
                return known
        object.__setattr__(overlay, "number", len(state.overlays))
        state.overlays.append(overlay)
        return overlay


def read_overlay(rule: Any, where: str, what: str, unset: str = "", places: Places | None = None) -> Overlay:
    """Return the overlay that a rule means.

    Args:
        rule: a dtype or its name, "bf16-to-fp32", or a mapping of sides to names of ops.
        where: the place that says so. what: the beginning of an error.
        unset: the error for an empty mapping.
        places: where each name stands, by side and position; `where` for those that are not in it.

    Raises:
        HmpxError: the rule means no overlay.
    """
    if isinstance(rule, Policy):
        raise HmpxError(f"{what}: a Policy is of the whole program; a rule says lists, which lie over those around it")
    if isinstance(rule, Mapping):
        return registered(_of_mapping(rule, where, what, unset, places))
    if rule == BF16_TO_FP32:
        return registered(Overlay(where, dtype=torch.float32, bf16_products=True))
    dtype = dtype_named(rule)
    if dtype not in DTYPES:
        legal = [*(dtype_name(each) for each in DTYPES), BF16_TO_FP32]
        short = [name for name, full in SHORT.items() if full in legal]
        misspelt = isinstance(rule, str) and not isinstance(dtype, torch.dtype)
        hint = did_you_mean(rule, [*short, *legal]) if misspelt else ""
        raise HmpxError(f"{what}: {rule!r} is no dtype of ops{hint} (legal: {', '.join(legal)}, lists of ops)")
    return registered(Overlay(where, dtype=dtype))


def overlay_by_hand(name: str, rule: Any, said: tuple, frame: FrameType) -> Overlay:
    """Return the overlay that the arguments of ``hmpx.NAME(rule, bf16=..., ...)`` mean, called in `frame`.

    said: the four lists, the low precision and the format of FP8; None for each that is not given.

    Raises:
        HmpxError: as `read_overlay`; and both a rule and lists.
    """
    line, what = users_line(frame), f"hmpx.{name}"
    given = {key: value for key, value in zip(LIST_KEYS, said, strict=True) if value is not None}
    if rule is not None and given:
        raise HmpxError(f"{what}: a rule and {', '.join(given)}=: which of the two?")
    unset = f"says nothing: hmpx.{name}(torch.float32), or lists of ops, as in fp32=['softmax']"
    return read_overlay(given if rule is None else rule, f"{line}, {what}", what, unset=unset)


def with_names(lists: OpLists, names: Mapping[str, Iterable[str] | None], frame: FrameType) -> OpLists:
    """Return the lists with those that ``hmpx.convert(bf16=...)``, called in `frame`, has named in their place.

    Raises:
        OpListError: something else than names.
    """
    with errors_at({}, before="hmpx.convert: "):
        return OpLists.of(names, f"{users_line(frame)}, hmpx.convert").over(lists)


def _of_mapping(rule: Mapping, where: str, what: str, unset: str, places: Places | None) -> Overlay:
    with errors_at({}, before=f"{what}: "):
        lists = OpLists.of(rule, where, places)
    if lists == OpLists():
        raise HmpxError(f"{what}: {unset or 'says nothing: it wants a dtype or lists of ops'}")
    sides: dict[str, tuple[str, str]] = {}
    chosen = resolve_sides(lists)
    for side in ("promote", "fp32", "bf16", "fp8"):  # a name on several sides is on the last of them
        for name, listed in chosen.get(side, {}).items():
            own = f"{listed.where}, {where.partition(', ')[2] or where}"
            sides[name] = side, where if listed.place == where else own
    names = tuple(sorted((name, *its) for name, its in sides.items()))
    return Overlay(where, names, lists.low_precision, fp8_format=lists.fp8_format, no_fp8=lists.fp8 == ())
