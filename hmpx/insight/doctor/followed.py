"""What takes several ops to see: casts in vain, lost writes, and where products ran."""

from __future__ import annotations

import math
import weakref
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from hmpx.base.dtype_names import dtype_name
from hmpx.insight.doctor.diagnosis import Names, Problem, percent, some
from hmpx.insight.doctor.op_watch import FEW, VIEWS, Notes, OpCall, Spot, in_autocast
from hmpx.insight.doctor.steps import sample
from hmpx.insight.tensors import LOW, Tensor
from hmpx.insight.text_table import number, short_place

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
            wrong = "site-packages" not in spot.where  # a library casts to the dtype of its weights
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


def look_at_writes(notes: Notes, op: OpCall) -> None:
    """Follow tensors in low precision that are updated outside of the optimizer: averages, steps by hand, numbers.

    A sample of such a tensor is updated in FP32, too. An update is lost if it moves the sample and not the tensor.
    """
    if op.stage != "forward":
        return
    if op.before is not None:
        _in_place(notes, op, op.before)
    elif op.name in ("add", "sub", "mul", "div"):
        _out_of_place(notes, op)


def _out_of_place(notes: Notes, op: OpCall) -> None:
    first, other = (*op.args, None, None)[:2]
    if not op.results or not isinstance(first, Tensor) or first.requires_grad or op.is_beside or op.is_in_forward:
        return
    if op.name == "mul" and isinstance(other, int | float):
        notes.add(op.out, scaled=(weakref.ref(first), float(other)))
    elif op.name == "add" and len(op.args) == 2 and op.out.dtype in LOW:
        for product, rest in ((first, other), (other, first)):
            _average(notes, op, product, rest)
    if not op.out.dim() and op.out.dtype in LOW and first.dtype in LOW:
        exact = op.func(*_few_in_fp32(op.args))
        _count(notes, op, exact != first.float(), op.out == first, op.out)


def _in_place(notes: Notes, op: OpCall, before: list[Tensor]) -> None:
    targets = op.args[0] if isinstance(op.args[0], list | tuple) else [op.args[0]]
    shapes = {t.shape for t in targets}
    others = [t for t in tree_leaves((op.args, op.kwargs)) if isinstance(t, Tensor) and t.dim()]
    made = any((t.requires_grad and not t.is_leaf) or t.grad_fn is not None for t in targets)
    if made or not all(t.shape in shapes for t in others) or op.is_beside or op.is_in_forward:
        return
    exact = [each.float() for each in before]  # copies
    op.func(exact if targets is op.args[0] else exact[0], *_few_in_fp32(op.args[1:]), **_few_in_fp32(op.kwargs))
    for target, old, x in zip(targets, before, exact, strict=True):
        _count(notes, op, (x != old.float()) & torch.isfinite(x), sample(target, FEW) == old, target)


def _average(notes: Notes, op: OpCall, product: Any, rest: Any) -> None:
    """Look at a sum of d x average and (1 - d) x something else."""
    one, two = notes.facts(product).get("scaled"), notes.facts(rest).get("scaled")
    average = one[0]() if one else None
    if one is None or two is None or average is None or not 0.5 < one[1] < 1 or abs(one[1] + two[1] - 1) > 1e-6:
        return
    if average.shape != op.out.shape or average.dtype != op.out.dtype:
        return
    old, added = sample(average, FEW), sample(rest, FEW).float()
    updated = (added - old.float() * two[1]).abs() > added.abs() / 64  # or else they are equal
    _count(notes, op, updated, sample(op.out, FEW) == old, op.out)


def _count(notes: Notes, op: OpCall, updated: Tensor, stayed: Tensor, target: Tensor) -> None:
    numbers = {"updates": int(updated.sum()), "lost": int((updated & stayed).sum()), "elements": target.numel()}
    by_torch = op.is_called_from("swa_utils.py")
    notes.note("write", op, dtype_name(target.dtype), **numbers, tensors=1, by_torch=by_torch)


def of_writes(notes: Notes, names: Names) -> Iterator[Problem]:
    lines: dict[str, list[Spot]] = {}
    for spot in notes.spots("write"):
        lines.setdefault(spot.where, []).append(spot)
    for where, spots in lines.items():
        worst = max(spots, key=lambda spot: spot.numbers["lost"] / max(spot.numbers["updates"], 1))
        numbers, op = worst.numbers, worst.name
        updates, lost = numbers["updates"], numbers["lost"]
        if lost <= 0.5 * updates:
            continue
        if numbers["elements"] == numbers["tensors"]:
            said = f"{op} leaves a single number in {worst.said} as it is ({lost:.0f} of {updates:.0f} times): "
            said += "a learning rate, a loss scale or a running sum that stands still"
            do = "keep it in a Python float, or in float32"
            yield Problem("running value", True, said, do, where, (), (op,), 0.4)
        elif updates >= 8:
            of_torch = " of torch's AveragedModel" if numbers["by_torch"] else ""
            said = f"{op} loses {percent(lost / updates)} of what it should add to a tensor in {worst.said}"
            said += f"{of_torch}: an average (EMA) that does not move, or a step by hand that does nothing"
            do = "keep the average in float32, or take torch.optim.swa_utils.AveragedModel under hmpx"
            do = "hmpx.attach(optimizer), which rounds it stochastically" if of_torch else do
            recipe = {"weights": "stochastic"} if of_torch else {}
            yield Problem("average of weights", True, said, do, where, (), (op,), 0.7, recipe)


def _few_in_fp32(values: Any) -> Any:
    """Return the arguments of an op with samples in FP32 in the place of tensors."""

    def of(tensor: Tensor) -> Tensor:
        few = sample(tensor, FEW) if tensor.dim() else tensor
        return few.float() if few.dtype in LOW else few

    return tree_map_only(Tensor, of, values)


_PRODUCTS = frozenset(
    "mm addmm bmm baddbmm addmv mv dot convolution mkldnn_rnn_layer _scaled_dot_product_flash_attention_for_cpu "
    "_scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention "
    "_scaled_dot_product_cudnn_attention _scaled_dot_product_fused_attention_overrideable".split()
)


def look_at_products(notes: Notes, op: OpCall) -> None:
    """Count the FLOPs of matrix products of the forward pass, by precision."""
    if op.stage != "forward" or op.name not in _PRODUCTS or not op.results:
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
