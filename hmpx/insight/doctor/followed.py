"""What takes several ops to see: casts in vain, and where products ran."""

from __future__ import annotations

import math
import weakref
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch

from hmpx.base.dtype_names import dtype_name
from hmpx.insight.doctor.diagnosis import Names, Problem, percent, some
from hmpx.insight.doctor.notes import Notes, OpCall, Spot
from hmpx.insight.doctor.op_watch import VIEWS, in_autocast
from hmpx.insight.tensors import LOW, Tensor
from hmpx.insight.text_table import PACKAGES, number, short_place

Parameter = torch.nn.Parameter
_WIDE = torch.float32


def _is_cast(op: OpCall) -> bool:
    if op.name != "_to_copy" or not len(op.given) == len(op.results) == 1:
        return False
    before, after = op.given[0].dtype, op.out.dtype
    return (before in LOW and after is _WIDE) or (before is _WIDE and after in LOW)


def look_at_casts(notes: Notes, op: OpCall) -> None:
    """Follow the result of a cast to the ops that read it."""
    if op.stage == "set up":
        return
    if notes.last_cast is not None:
        result, spot = notes.last_cast
        spot.numbers["dropped"] += result() is None
        notes.last_cast = None
    for tensor in op.given if op.name not in VIEWS else ():
        if (cast := notes.facts(tensor).get("cast")) is not None:
            before, spot = cast
            if _is_cast(op) and op.out.dtype is before:
                back = notes.note("cast back", op)
                spot.numbers.update({"back": 1, "same_line": back.where == spot.where})
            else:
                spot.numbers["used"] += 1
    if op.stage == "forward" and _is_cast(op) and op.out.numel() > 1 and not isinstance(op.given[0], Parameter):
        before, kind = op.given[0].dtype, "cast up" if op.out.dtype is _WIDE else "cast down"
        spot = notes.note(kind, op, dtype_name(before), autocast=in_autocast())
        notes.add(op.out, cast=(before, spot))
        notes.last_cast = weakref.ref(op.out), spot


def of_casts(notes: Notes, names: Names) -> Iterator[Problem]:
    told: set[str] = set()
    for spot in notes.spots("cast up", "cast down"):
        numbers, up = spot.numbers, spot.kind == "cast up"
        dropped = numbers["dropped"] == spot.calls
        if not (numbers["back"] or dropped) or numbers["used"] or spot.where in told:
            continue
        told.add(spot.where)
        times = number(numbers["back"] or spot.calls, "time")
        if dropped and up:
            said = f"{spot.said} is cast to float32 here, and nobody uses the result ({times})"
            yield Problem("upcast", True, said, "x = x.float(); it does not work in place", spot.where, weight=0.3)
        elif up and numbers["autocast"]:
            said = f"{spot.said} is cast to float32 here, and autocast casts all of it back ({times})"
            wrong = not spot.where.startswith(PACKAGES)  # a library casts to the dtype of its weights
            do = "leave autocast there: with torch.autocast(device, enabled=False)"
            yield Problem("upcast", wrong, said, do, spot.where, weight=0.3)
        elif numbers["same_line"]:
            does = "changes nothing and costs two casts" if up else "rounds it to low precision and gains nothing"
            said = f"one line casts a tensor {'up and down' if up else 'down and up'} again, which {does} ({times})"
            yield Problem("casts there and back", False, said, "take both casts away", spot.where, weight=0.05)


@dataclass
class _Upcast:
    """The cast of a parameter to FP32. used: whether an op read the result. lowered: whether it was cast down since."""

    parameter: weakref.ref[Parameter]
    result: weakref.ref[Tensor]
    spot: Spot
    used: bool = False
    lowered: bool = False


class EarlyUpcasts:
    """Follows parameters that are cast to FP32 before the training begins, and are not in FP32 then."""

    def __init__(self) -> None:
        self._casts: list[_Upcast] = []
        self._dropped: list[tuple[Spot, Parameter]] = []

    def look(self, notes: Notes, op: OpCall) -> None:
        if op.stage != "set up":
            return
        for cast in self._casts:
            cast.used |= any(cast.result() is tensor for tensor in op.given)
            cast.lowered |= bool(op.given and op.results) and cast.parameter() is op.given[0] and op.out.dtype in LOW
        if _is_cast(op) and isinstance(op.given[0], Parameter) and op.out.dtype is _WIDE:
            spot = notes.note("upcast", op, dtype_name(op.given[0].dtype))
            self._casts.append(_Upcast(weakref.ref(op.given[0]), weakref.ref(op.out), spot))

    def trained(self, params: Collection[Parameter]) -> None:
        """Note which of these parameters, now at the first step, were to be FP32 and are not.

        A model that was cast to FP32 and back as a whole was cast on purpose.
        """
        low = {p for p in params if p.dtype in LOW}
        found = [(each, p) for each in self._casts if (p := each.parameter()) in low and p is not None]
        found = [(each, p) for each, p in found if not each.used and each.result() is None]
        whole = {p for each, p in found if each.lowered} == low
        self._dropped += [(each.spot, p) for each, p in found if not (whole and each.lowered)]

    def problems(self, notes: Notes, names: Names) -> Iterator[Problem]:
        if self._dropped:
            spot, which = self._dropped[0][0], tuple(dict.fromkeys(names[p] for _, p in self._dropped))
            was, still = ("was", "is") if len(which) == 1 else ("were", "are")
            said = f"{some(which)} {was} to be float32 here, and {still} still in {spot.said} at the first step"
            do = "module.float() after all other casts and before the optimizer is made; tensor.float() does not work "
            yield Problem("upcast", True, said, f"{do}in place", spot.where, which, weight=0.55)


_PRODUCTS = frozenset(
    "mm addmm bmm baddbmm addmv mv dot convolution mkldnn_rnn_layer _scaled_dot_product_flash_attention_for_cpu "
    "_scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention "
    "_scaled_dot_product_cudnn_attention _scaled_dot_product_fused_attention_overrideable".split()
)


def look_at_products(notes: Notes, op: OpCall) -> None:
    """Count the FLOPs of matrix products of the forward pass, by precision."""
    is_trained = op.graphed and any(t.requires_grad for t in op.given)
    if op.stage != "forward" or op.name not in _PRODUCTS or not op.results or not is_trained:
        return
    if op.name == "convolution":
        flops = 2 * op.out.numel() * math.prod(op.given[1].shape[1:])  # groups are left out
    else:
        inner = op.given[1] if op.name in ("addmm", "baddbmm", "addmv") else op.given[0]
        flops = 2 * op.out.numel() * (inner.shape[-1] if inner.dim() else 1)
    if op.out.dtype in LOW:
        notes.note("product in low", op, flops=flops, autocast=in_autocast())
    elif op.out.dtype is _WIDE:
        notes.note("product", op, torch.get_float32_matmul_precision(), flops=flops, gpu=op.out.is_cuda)


def are_products_low_by_hand(notes: Notes) -> bool:
    """Whether the program itself, without torch.autocast, computes products in low precision."""
    spots = notes.spots("product in low")
    return bool(spots) and not any(spot.numbers["autocast"] for spot in spots)


def of_products(notes: Notes, names: Names) -> Iterator[Problem]:
    low, wide = notes.spots("product in low"), notes.spots("product")
    flops = [sum(spot.numbers["flops"] for spot in spots) for spots in (low, wide)]
    share = flops[1] / (sum(flops) or 1)
    if any(spot.numbers["autocast"] for spot in low) and share > 0.1:
        spots = sorted(wide, key=lambda spot: -spot.numbers["flops"])
        modules = tuple(dict.fromkeys(spot.module or short_place(spot.where) for spot in spots))
        said = f"{percent(share)} of the products of the forward pass ran in float32, outside of autocast: "
        do = "call them inside of torch.autocast, unless they are in float32 for a reason"
        yield Problem("autocast", False, said + some(modules), do, spots[0].where, modules, weight=0.15)
    precision = wide[0].said if wide else ""
    if precision == "medium" or (precision == "high" and any(spot.numbers["gpu"] for spot in wide)):
        digits = "8 bits (BF16)" if precision == "medium" else "11 bits (TF32)"
        said = f'float32_matmul_precision is "{precision}": products in float32, {percent(share)} of all, may keep '
        do = 'torch.set_float32_matmul_precision("highest") where they are in float32 for a reason'
        yield Problem("matmul precision", False, f"{said}{digits} of each number", do, weight=0.1)
