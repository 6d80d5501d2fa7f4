"""What is updated in place, or by a line of the program, outside of an optimizer's step: weights, averages, counts.

Each such write is done again in FP32. *kept* is, as for steps, <movement, movement in FP32> over <movement in FP32,
itself>.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from hmpx.base.dtype_names import dtype_name
from hmpx.insight.doctor.diagnosis import Names, Problem, percent
from hmpx.insight.doctor.findings import LIMIT
from hmpx.insight.doctor.notes import Notes, OpCall, Spot
from hmpx.insight.doctor.op_watch import few, memory
from hmpx.insight.tensors import LOW, Tensor

_LOST = 0.5  # of an average: below it, it does not follow
_HARMLESS = 2e-5  # a decay by less than this is seen by nobody


def look_at_writes(notes: Notes, op: OpCall) -> None:
    """Follow tensors in low precision that live on between iterations and that this op updates."""
    if op.stage != "forward" or op.is_beside or not op.args:
        return
    if op.before is not None:
        _in_place(notes, op, op.before)
        return
    is_named = not op.is_in_forward or (not op.graphed and notes.names.of_tensor(op.given[0], op.frame))
    if op.name in ("add", "sub", "mul", "div", "lerp") and op.results and is_named:
        _out_of_place(notes, op)


def _in_place(notes: Notes, op: OpCall, before: list[Tensor]) -> None:
    targets = op.args[0] if isinstance(op.args[0], list | tuple) else [op.args[0]]
    if any(t.grad_fn is not None for t in targets):
        return
    factor = op.args[1] if len(op.args) > 1 and "mul" in op.name else None
    if isinstance(factor, int | float) and abs(1 - factor) < _HARMLESS:
        return
    exact = [each.float() for each in before]  # copies
    op.func(exact if targets is op.args[0] else exact[0], *_in_fp32(op.args[1:]), **_in_fp32(op.kwargs))
    for target, old, x in zip(targets, before, exact, strict=True):
        _count(notes, op, target, old, few(target), x, memory(target))


def _out_of_place(notes: Notes, op: OpCall) -> None:
    """Look at numbers, averages and weights that a line replaces by new ones."""
    first, other = (*op.args, None, None)[:2]
    if op.name == "mul" and isinstance(first, int | float):
        first, other = other, first
    if not isinstance(first, Tensor) or (op.graphed and first.requires_grad):
        return
    if op.name == "mul" and isinstance(other, int | float):
        notes.add(op.out, scaled=(few(first).clone(), float(other), memory(first)))
    if op.out.dtype not in LOW or first.dtype not in LOW or op.out.shape != first.shape:
        return
    is_replaced = not op.out.dim() or op.name == "lerp" or first.requires_grad or op.is_in_forward
    is_replaced |= 0 < abs(notes.facts(other).get("scaled", (None, 1.0))[1]) < 0.5
    if is_replaced and memory(first) not in notes.born:
        exact = op.func(*_in_fp32(op.args), **_in_fp32(op.kwargs))
        _count(notes, op, first, few(first), few(op.out), exact, memory(first), memory(op.out))
    elif op.name == "add" and isinstance(other, Tensor):
        for product, rest in ((first, other), (other, first)):
            _average(notes, op, product, rest)


def _average(notes: Notes, op: OpCall, product: Tensor, rest: Tensor) -> None:
    """Look at a sum of d x average and (1 - d) x something else."""
    average, d, where = notes.facts(product).get("scaled", (None, 0.0, 0))
    added, factor, _ = notes.facts(rest).get("scaled", (few(rest), op.kwargs.get("alpha", 1.0), 0))
    if average is None or not 0.5 < d < 1 or abs(d + factor - 1) > 1e-6 or average.dtype not in LOW:
        return
    if average.shape == added.shape and where not in notes.born:
        exact = average.float() * d + added.float() * factor
        _count(notes, op, op.out, average, few(op.out), exact, where, memory(op.out))


def _count(notes: Notes, op: OpCall, target: Tensor, old: Tensor, new: Tensor, exact: Tensor, *places: int) -> None:
    ideal, real = exact.float() - old.float(), new.float() - old.float()
    if not bool(torch.isfinite(ideal).all()) or not bool(ideal.any()):
        return
    size = float(ideal.square().sum())
    numbers = {"dot": float((real * ideal).sum()) / size, "elements": target.numel(), "moves": int((ideal != 0).sum())}
    by_torch = op.is_called_from("swa_utils.py")
    spot = notes.note("write", op, dtype_name(target.dtype), **numbers, tensors=1, by_torch=by_torch)
    spot.places.update(places)


def are_steps(notes: Notes) -> bool:
    """Whether weights were seen that are FP32, or that the program itself updates."""
    is_written = any(notes.are_weights(spot.places) for spot in notes.spots("write"))
    return is_written or (bool(notes.leaves) and not notes.leaves.keys() & LOW)


def of_writes(notes: Notes, names: Names) -> Iterator[Problem]:
    lines: dict[str, list[Spot]] = {}
    for spot in notes.spots("write"):
        lines.setdefault(spot.where, []).append(spot)
    for where, spots in lines.items():
        worst = min(spots, key=_kept)
        numbers, op, kept = worst.numbers, worst.name, max(_kept(worst), 0)
        move = f"{percent(min(kept, 1))} of the way that it moves a float32 copy"
        if notes.are_weights(worst.places):
            if kept < LIMIT:
                said = f"{op} moves weights in {worst.said}, which no torch optimizer steps, {move}"
                do = "keep a float32 copy of each weight, update that, and copy it into the weight; or step a "
                do += "torch.optim.Optimizer, with hmpx.attach(optimizer)"
                yield Problem("lost updates", True, said, do, where, (), (op,), 0.5 + 0.45 * (1 - kept))
        elif kept < _LOST and numbers["elements"] == numbers["tensors"]:
            said = f"{op} moves a number in {worst.said} {move}: a rate, a scale or a running sum that stands still"
            do = "keep it in a Python float, or in float32"
            yield Problem("running value", True, said, do, where, (), (op,), 0.4)
        elif kept < _LOST and (numbers["moves"] >= 8 or not numbers["dot"]):
            of_torch = " of torch's AveragedModel" if numbers["by_torch"] else ""
            said = f"{op} moves a tensor in {worst.said}{of_torch} {move}: an average or a count that stands still"
            do = "make it in float32: average = p.detach().float().clone(), then average.lerp_(p.float(), 1 - decay)"
            do = "hmpx.attach(optimizer), which rounds it stochastically" if of_torch else do
            recipe = {"weights": "stochastic"} if of_torch else {}
            yield Problem("average of weights", True, said, do, where, (), (op,), 0.7, recipe)


def _kept(spot: Spot) -> float:
    return spot.numbers["dot"] / spot.numbers["tensors"]


def _in_fp32(values: Any) -> Any:
    """Return the arguments of an op with few of their elements, in FP32, in the place of tensors."""

    def of(tensor: Tensor) -> Tensor:
        part = few(tensor)
        return part.float() if part.dtype in LOW else part

    return tree_map_only(Tensor, of, values)
