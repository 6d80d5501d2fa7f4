"""What takes several ops to see: casts in vain, lost writes, sums of gradients, and where products ran."""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from hmpx.dtype_names import dtype_name
from hmpx.insight.doctor.diagnosis import Problem, percent, some
from hmpx.insight.doctor.op_watch import FEW, VIEWS, Known, OpCall, Spot, Spots, in_autocast
from hmpx.insight.doctor.steps import sample
from hmpx.insight.tensors import LOW, Tensor
from hmpx.insight.text_table import number, short_place

Parameter = torch.nn.Parameter
_WIDE = torch.float32


@dataclass
class _Asked:
    """A parameter in low precision that was cast to FP32 before the training began; lowered: and cast down since."""

    parameter: weakref.ref[Parameter]
    result: weakref.ref[Tensor]
    spot: Spot
    used: bool = False
    lowered: bool = False


class CastsByHand:
    """Follows the result of a cast to the ops that read it."""

    def __init__(self, spots: Spots, known: Known) -> None:
        self._spots, self._known = spots, known
        self._asked: list[_Asked] = []

    def look(self, op: OpCall) -> None:
        if op.stage == "set up":
            self._set_up(op)
            return
        if self._known.last_cast is not None:
            result, spot = self._known.last_cast
            spot.add(dropped=result() is None)
            self._known.last_cast = None
        for tensor in op.given if op.name not in VIEWS else ():
            if (cast := self._known.of(tensor).get("cast")) is not None:
                before, spot = cast
                if _is_cast(op) and op.out.dtype is before:
                    back = self._spots.note("cast back", op)
                    spot.add(back=1, same_line=back.where == spot.where)
                else:
                    spot.add(used=1)
        if op.stage != "forward" or not _is_cast(op) or op.out.numel() < 2 or isinstance(op.given[0], Parameter):
            return
        before = op.given[0].dtype
        spot = self._spots.note("cast up" if op.out.dtype is _WIDE else "cast down", op, dtype_name(before))
        spot.add(autocast=in_autocast())
        self._known.add(op.out, cast=(before, spot))
        self._known.last_cast = weakref.ref(op.out), spot

    def problems(self) -> Iterator[Problem]:
        told: set[str] = set()
        for spot in self._spots.of("cast up", "cast down"):
            numbers, up = spot.numbers, spot.kind == "cast up"
            dropped = numbers["dropped"] == spot.calls
            if not (numbers["back"] or dropped) or numbers["used"] or spot.where in told:
                continue
            told.add(spot.where)
            times = number(int(numbers["back"] or spot.calls), "time")
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

    def _set_up(self, op: OpCall) -> None:
        for asked in self._asked:
            asked.used |= any(asked.result() is tensor for tensor in op.given)
            asked.lowered |= bool(op.given and op.results) and asked.parameter() is op.given[0] and op.out.dtype in LOW
        if _is_cast(op) and isinstance(op.given[0], Parameter) and op.out.dtype is _WIDE:
            spot = self._spots.note("upcast", op, dtype_name(op.given[0].dtype))
            self._asked.append(_Asked(weakref.ref(op.given[0]), weakref.ref(op.out), spot))

    def dropped(self, trained: Iterable[Parameter]) -> list[tuple[Spot, Parameter]]:
        """Return the trained parameters that were to be FP32 and are not, and where.

        A model that was cast to FP32 and back as a whole was cast on purpose.
        """
        low = {p for p in trained if p.dtype in LOW}
        found = [(each, p) for each in self._asked if (p := each.parameter()) in low and p is not None]
        found = [(each, p) for each, p in found if not each.used and each.result() is None]
        whole = {p for each, p in found if each.lowered} == low
        return [(each.spot, p) for each, p in found if not (whole and each.lowered)]


def _is_cast(op: OpCall) -> bool:
    if op.name != "_to_copy" or not len(op.given) == len(op.results) == 1:
        return False
    before, after = op.given[0].dtype, op.out.dtype
    return (before in LOW and after is _WIDE) or (before is _WIDE and after in LOW)


class Writes:
    """Follows tensors in low precision that are updated outside of the optimizer: averages, steps by hand, numbers.

    A sample of such a tensor is updated in FP32, too. An update is lost if it moves the sample and not the tensor.
    """

    def __init__(self, spots: Spots, known: Known) -> None:
        self._spots, self._known = spots, known

    def look(self, op: OpCall) -> None:
        if op.stage != "forward":
            return
        if op.before is not None:
            if not op.is_beside:
                self._in_place(op, op.before)
            return
        first, other = (*op.args, None, None)[:2]
        if op.name not in ("add", "sub", "mul", "div") or not isinstance(first, Tensor) or not op.results:
            return
        if first.requires_grad or op.is_beside:
            return
        if op.name == "mul" and isinstance(other, int | float):
            self._known.add(op.out, scaled=(weakref.ref(first), float(other)))
        elif op.name == "add" and len(op.args) == 2 and op.out.dtype in LOW:
            for product, rest in ((first, other), (other, first)):
                self._average(op, product, rest)
        if not op.out.dim() and op.out.dtype in LOW and first.dtype in LOW and not op.is_in_forward:
            exact = op.func(*(each.float() if isinstance(each, Tensor) else each for each in op.args))
            self._count(op, exact != first.float(), op.out == first, op.out)

    def _in_place(self, op: OpCall, before: list[Tensor]) -> None:
        several = op.name.startswith("_foreach_")
        targets = op.args[0] if several else [op.args[0]]
        if any((t.requires_grad and not t.is_leaf) or t.grad_fn is not None for t in targets) or op.is_in_forward:
            return
        shapes = [t.shape for t in targets]
        others = [_sampled(each, shapes, several) for each in op.args[1:]]
        if any(each is NotImplemented for each in others):
            return
        exact = [each.float() for each in before]  # copies
        more = {key: _sampled(value, shapes, several) for key, value in op.kwargs.items()}
        op.func(exact if several else exact[0], *others, **more)
        for target, old, x in zip(targets, before, exact, strict=True):
            self._count(op, (x != old.float()) & torch.isfinite(x), sample(target, FEW) == old, target)

    def _average(self, op: OpCall, product: Any, rest: Any) -> None:
        """Look at a sum of d x average and (1 - d) x something else."""
        one, two = self._known.of(product).get("scaled"), self._known.of(rest).get("scaled")
        average = one[0]() if one else None
        if one is None or two is None or average is None or not 0.5 < one[1] < 1 or abs(one[1] + two[1] - 1) > 1e-6:
            return
        if average.shape != op.out.shape or average.dtype != op.out.dtype or op.is_in_forward:
            return
        old, added = sample(average, FEW), sample(rest, FEW).float()
        updated = (added - old.float() * two[1]).abs() > added.abs() / 64  # or else they are equal
        self._count(op, updated, sample(op.out, FEW) == old, op.out)

    def _count(self, op: OpCall, updated: Tensor, stayed: Tensor, target: Tensor) -> None:
        spot = self._spots.note("write", op, dtype_name(target.dtype))
        lost = int((updated & stayed).sum())
        by_torch = op.is_called_from("swa_utils.py")
        spot.add(updates=int(updated.sum()), lost=lost, elements=target.numel(), tensors=1, by_torch=by_torch)

    def problems(self) -> Iterator[Problem]:
        lines: dict[str, list[Spot]] = {}
        for spot in self._spots.of("write"):
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


def _sampled(value: Any, shapes: list[torch.Size], several: bool) -> Any:
    """Return an argument for the samples in FP32; NotImplemented if it has another shape."""
    if isinstance(value, Tensor):
        if value.dim() == 0:
            return value.float() if value.dtype in LOW else value
        return sample(value, FEW).float() if value.shape == shapes[0] else NotImplemented
    if several and isinstance(value, list | tuple) and any(isinstance(each, Tensor) for each in value):
        parts = [_sampled(each, [shape], False) for each, shape in zip(value, shapes, strict=True)]
        return NotImplemented if any(part is NotImplemented for part in parts) else parts
    return value


@dataclass
class Gradients:
    """Adds up in FP32 what backward passes add to gradients in low precision, and counts what FP16 cannot hold.

    error, size: sums of squares, of what is off and of the gradients. most: backward passes before a step. values,
    tiny: results of backward passes in FP16 that are not zero, and those of them beneath its normal numbers.
    """

    error: float = 0.0
    size: float = 0.0
    most: int = 0
    dtype: torch.dtype | None = None
    values: int = 0
    tiny: int = 0
    _sums: dict[int, Tensor] = field(default_factory=dict)
    _added: Counter[int] = field(default_factory=Counter)

    def look(self, op: OpCall) -> None:
        if op.stage != "backward":
            return
        if op.name == "add_" and op.before and len(op.given) > 1 and "AccumulateGrad" in op.node.name():
            key = op.given[0].data_ptr()
            self._sums[key] = self._sums.get(key, op.before[0].float()) + sample(op.given[1], FEW).float()
            self._added[key] += 1
        for result in op.results:
            if result.dtype is torch.float16 and result.numel() > 1:
                few = sample(result, FEW).float().abs()
                self.values += int((few > 0).sum())
                self.tiny += int(((few > 0) & (few < torch.finfo(torch.float16).smallest_normal)).sum())

    def compare(self, params: list[Parameter]) -> None:
        """Compare the gradients that a step has taken with the sums."""
        for p in params:
            if p.grad is None or p.grad.dtype not in LOW or p.grad.layout is not torch.strided:
                continue
            total = self._sums.get(p.grad.data_ptr())
            if total is None:
                continue
            self.dtype = p.grad.dtype
            self.most = max(self.most, self._added[p.grad.data_ptr()] + 1)
            self.error += float((sample(p.grad, FEW).float() - total).square().sum())
            self.size += float(total.square().sum())
        self._sums.clear()
        self._added.clear()

    def problems(self) -> Iterator[Problem]:
        if self.most > 1 and self.size and self.dtype is not None:
            error = (self.error / self.size) ** 0.5
            said = f"gradients of {self.most} backward passes are accumulated in {dtype_name(self.dtype)}, and are off "
            said += f"by {percent(error)}"
            do, recipe = "accumulate in float32: use_fp32_grad_acc in hmpx.attach", {"use_fp32_grad_acc": True}
            wrong, weight = error > 0.01, min(0.2 + error, 0.8)
            yield Problem("gradient accumulation", wrong, said, do, weight=weight, recipe=recipe)


class Products:
    """Counts the FLOPs of matrix products of the forward pass, by precision."""

    _NAMES = frozenset(
        "mm addmm bmm baddbmm addmv mv dot convolution mkldnn_rnn_layer _scaled_dot_product_flash_attention_for_cpu "
        "_scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention "
        "_scaled_dot_product_cudnn_attention _scaled_dot_product_fused_attention_overrideable".split()
    )

    def __init__(self, spots: Spots) -> None:
        self._spots = spots
        self.low = self._wide = 0.0
        self.autocast = False  # whether one ran in low precision in a region of torch.autocast
        self._precision = ""  # of those in FP32
        self._devices: set[str] = set()

    def look(self, op: OpCall) -> None:
        if op.stage != "forward" or op.name not in self._NAMES or not op.results:
            return
        if op.name == "convolution":
            flops = 2.0 * op.out.numel() * math.prod(op.given[1].shape[1:])  # groups are left out
        else:
            inner = op.given[1] if op.name in ("addmm", "baddbmm", "addmv") else op.given[0]
            flops = 2.0 * op.out.numel() * (inner.shape[-1] if inner.dim() else 1)
        self._devices.add(op.out.device.type)
        if op.out.dtype in LOW:
            self.low += flops
            self.autocast |= in_autocast()
        elif op.out.dtype is _WIDE:
            self._wide += flops
            self._precision = self._precision or torch.get_float32_matmul_precision()
            self._spots.note("wide product", op, flops=flops)

    def problems(self) -> Iterator[Problem]:
        share = self._wide / ((self.low + self._wide) or 1.0)
        if self.autocast and share > 0.1:
            spots = sorted(self._spots.of("wide product"), key=lambda spot: -spot.numbers["flops"])
            modules = tuple(dict.fromkeys(spot.module or short_place(spot.where) for spot in spots))
            said = f"{percent(share)} of the products of the forward pass ran in float32, outside of autocast: "
            do = "call them inside of torch.autocast, unless they are in float32 for a reason"
            yield Problem("autocast", False, said + some(modules), do, spots[0].where, modules, weight=0.15)
        precision = self._precision
        if precision == "medium" or (precision == "high" and "cuda" in self._devices):
            digits = "8 bits (BF16)" if precision == "medium" else "11 bits (TF32)"
            said = f'float32_matmul_precision is "{precision}": products in float32, {percent(share)} of all, may keep '
            do = 'torch.set_float32_matmul_precision("highest") where they are in float32 for a reason'
            yield Problem("matmul precision", False, f"{said}{digits} of each number", do, weight=0.1)
