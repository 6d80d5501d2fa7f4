"""Casts in vain: there and back, with a result that nobody reads, or of parameters that are cast down again."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from hmpx.base.tensors import dtype_name
from hmpx.insight.dispatch import Look, OpLook, in_autocast
from hmpx.insight.finding import Finding, Names, some
from hmpx.insight.notes import Notes, OpCall, Spot
from hmpx.insight.report import number
from hmpx.insight.tensors import LOW, Tensor
from hmpx.updates.stepping.names import parameters

Parameter = torch.nn.Parameter
_WIDE = torch.float32


def _is_cast(op: OpCall) -> bool:
    if op.name != "_to_copy" or not len(op.given) == len(op.results) == 1:
        return False
    before, after = op.given[0].dtype, op.out.dtype
    return (before in LOW and after is _WIDE) or (before is _WIDE and after in LOW)


def look_at_casts(notes: Notes, op: OpCall) -> None:
    """Follow the result of a cast to the ops that read it."""
    if notes.last_cast is not None:
        result, spot = notes.last_cast
        spot.numbers["dropped"] += result() is None
        notes.last_cast = None
    for tensor in op.given if not op.is_view else ():
        if (cast := notes.facts(tensor).get("cast")) is not None:
            before, spot = cast
            if _is_cast(op) and op.out.dtype is before:
                back = notes.note("cast back", op)
                spot.numbers.update({"back": 1, "same_line": back.place.where == spot.place.where})
            else:
                spot.numbers["used"] += 1
    if op.stage == "forward" and _is_cast(op) and op.out.numel() > 1 and not isinstance(op.given[0], Parameter):
        before, kind = op.given[0].dtype, "cast up" if op.out.dtype is _WIDE else "cast down"
        spot = notes.note(kind, op, dtype_name(before), autocast=in_autocast(op.out))
        notes.add(op.out, cast=(before, spot))
        notes.last_cast = weakref.ref(op.out), spot


def of_casts(notes: Notes, names: Names) -> Iterator[Finding]:
    told: set[str] = set()
    for spot in notes.spots("cast up", "cast down"):
        numbers, up = spot.numbers, spot.kind == "cast up"
        dropped = numbers["dropped"] == spot.calls
        if not (numbers["back"] or dropped) or numbers["used"] or spot.place.where in told:
            continue
        told.add(spot.place.where)
        times = f"{number(numbers['back'] or spot.calls, 'time')}{spot.place.within}"
        if dropped and up:
            said = f"{spot.said} is cast to float32 here, and nobody uses the result ({times})"
            do = "x = x.float(), if it is to be in float32: that does not work in place"
            yield Finding("upcast", False, said, do, spot.where, weight=0.15)
        elif up and numbers["autocast"]:
            said = f"{spot.said} is cast to float32 here, and autocast casts all of it back ({times})"
            device = next((p.device.type for p in names), "cuda")
            do = f'leave autocast there: with torch.autocast("{device}", enabled=False)'
            yield Finding("upcast", False, said, do, spot.where, weight=0.15)
        elif numbers["same_line"]:
            does = "changes nothing and costs two casts" if up else "rounds it to low precision and gains nothing"
            said = f"one line casts a tensor {'up and down' if up else 'down and up'} again, which {does} ({times})"
            yield Finding("casts there and back", False, said, "take both casts away", spot.where, weight=0.05)


@dataclass
class _Upcast:
    """The cast of a parameter to FP32. used: whether an op read the result. lowered: whether it was cast down since."""

    parameter: weakref.ref[Parameter]
    result: weakref.ref[Tensor]
    spot: Spot
    used: bool = False
    lowered: bool = False


CASTS = OpLook(look_at_casts, of_casts, "forward", "backward", "step")


class EarlyUpcasts(Look):
    """Follows parameters that are cast to FP32 before the training begins, and are not in FP32 then."""

    def __init__(self) -> None:
        self._casts: list[_Upcast] = []
        self._dropped: list[tuple[Spot, Parameter]] = []

    stages = ("set up",)

    def see(self, notes: Notes, op: OpCall) -> None:
        for cast in self._casts:
            cast.used |= any(cast.result() is tensor for tensor in op.given)
            cast.lowered |= bool(op.given and op.results) and cast.parameter() is op.given[0] and op.out.dtype in LOW
        if _is_cast(op) and isinstance(op.given[0], Parameter) and op.out.dtype is _WIDE:
            spot = notes.note("upcast", op, dtype_name(op.given[0].dtype))
            self._casts.append(_Upcast(weakref.ref(op.given[0]), weakref.ref(op.out), spot))

    def met(self, optimizer: torch.optim.Optimizer, where: str) -> None:
        """Note which parameters, now at the first step, were to be FP32 and are not.

        A model that was cast to FP32 and back as a whole was cast on purpose.
        """
        low = {p for p in parameters(optimizer) if p.dtype in LOW}
        found = [(each, p) for each in self._casts if (p := each.parameter()) in low and p is not None]
        found = [(each, p) for each, p in found if not each.used and each.result() is None]
        whole = {p for each, p in found if each.lowered} == low
        self._dropped += [(each.spot, p) for each, p in found if not (whole and each.lowered)]

    def findings(self, notes: Notes, names: Names) -> Iterator[Finding]:
        if self._dropped:
            spot, which = self._dropped[0][0], tuple(dict.fromkeys(names[p] for _, p in self._dropped))
            was, still = ("was", "is") if len(which) == 1 else ("were", "are")
            said = f"{some(which)} {was} to be float32 here, and {still} still in {spot.said} at the first step"
            do = "module.float() after all other casts and before the optimizer is made; tensor.float() does not work "
            yield Finding("upcast", False, said, f"{do}in place", spot.where, which, weight=0.2)
