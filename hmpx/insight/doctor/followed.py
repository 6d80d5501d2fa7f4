"""What takes several ops to see: casts in vain, where products ran, sums of gradients."""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch

from hmpx.base.dtype_names import dtype_name
from hmpx.insight.doctor.diagnosis import Names, Problem, percent, some
from hmpx.insight.doctor.notes import Notes, OpCall, Spot
from hmpx.insight.doctor.op_watch import FEW, VIEWS, few, in_autocast
from hmpx.insight.doctor.twin import sample
from hmpx.insight.tensors import LOW, Tensor
from hmpx.insight.text_table import PACKAGES, number, short_place

Parameter = torch.nn.Parameter
_WIDE = torch.float32
_SETTLED = 5  # calls of a GradScaler after which it should have found its scale


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


class Sums:
    """Adds up in FP32 what backward passes add to gradients in low precision."""

    def __init__(self) -> None:
        self._sums: dict[int, Tensor] = {}  # by the place of a gradient
        self._off: dict[int, tuple[float, float]] = {}  # squares: of what is off there, and of the sum
        self._added: Counter[int] = Counter()
        self._error = self._size = 0.0  # the same of all steps
        self._most = 0  # backward passes before a step
        self._dtype: torch.dtype | None = None

    def look(self, notes: Notes, op: OpCall) -> None:
        if op.name == "add_" and op.before and op.node and "AccumulateGrad" in op.node.name() and len(op.given) > 1:
            grad, key = op.given[0], op.given[0].data_ptr()
            now, more = few(grad).float(), few(op.given[1]).float()
            total = self._sums[key] = self._sums.get(key, op.before[0].float()) + more
            self._off[key] = float((now - total).square().sum()), float(total.square().sum())
            self._dtype = grad.dtype
            self._added[key] += 1

    def stepped(self) -> None:
        """Count what the gradients of a step were off by, before they were clipped."""
        self._most = max([self._most, *(1 + count for count in self._added.values())])
        self._error += sum(error for error, _ in self._off.values())
        self._size += sum(size for _, size in self._off.values())
        self._sums.clear()
        self._off.clear()
        self._added.clear()

    def problems(self, notes: Notes, names: Names) -> Iterator[Problem]:
        if self._size and self._dtype is not None:
            error = (self._error / self._size) ** 0.5
            said = f"gradients of {self._most} backward passes are accumulated in {dtype_name(self._dtype)}, and are "
            said += f"off by {percent(error)}"
            do, recipe = "accumulate in float32: use_fp32_grad_acc in hmpx.attach", {"use_fp32_grad_acc": True}
            wrong, weight = error > 0.01, min(0.2 + error, 0.8)
            yield Problem("gradient accumulation", wrong, said, do, weight=weight, recipe=recipe)


def look_at_scale(notes: Notes, op: OpCall) -> None:
    """Count the gradients that FP16 cannot hold."""
    for result in op.results if op.stage == "backward" else ():
        if result.dtype is torch.float16 and result.numel() > 1:
            size = sample(result, FEW).float().abs()
            tiny = (size > 0) & (size < torch.finfo(torch.float16).smallest_normal)
            notes.note("gradient in FP16", op, nonzero=int((size > 0).sum()), tiny=int(tiny.sum()))


def of_scale(notes: Notes, names: Names) -> Iterator[Problem]:
    recipe = {"parameter_dtype": "float32"} if any(p.dtype is torch.float16 for p in names) else {}
    spots, late = notes.spots("gradient in FP16"), notes.skipped[len(notes.skipped) // 2 :]
    nonzero = sum(spot.numbers["nonzero"] for spot in spots)
    if nonzero and not notes.skipped:
        share = sum(spot.numbers["tiny"] for spot in spots) / nonzero
        said = f"FP16 without a GradScaler: {percent(share)} of the nonzero gradients are below its normal numbers"
        do, weight = 'torch.amp.GradScaler("cuda"), or BF16, which needs none', 0.3 + 0.5 * share
        yield Problem("loss scaling", share > 0.01, said, do, weight=weight, recipe=recipe)
    if len(late) >= _SETTLED and 2 * sum(late) >= len(late):
        said = f"GradScaler has skipped {sum(late)} of the last {len(late)} steps, down to a scale of {notes.scale:g}: "
        said += "gradients are inf or NaN at any scale"
        do = "look for the first op that makes them (doctor --at 3), or use BF16, which needs no scale"
        yield Problem("GradScaler", True, said, do, weight=0.9, recipe=recipe)
