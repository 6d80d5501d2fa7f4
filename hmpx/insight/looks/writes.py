"""Writes to weights, averages and counts outside of optimizer steps: in place, or by a line that replaces them.

Each write is repeated in FP32. *kept* is, as for steps, <movement, FP32 movement> / <FP32 movement, FP32 movement>.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from hmpx.base.dtype_names import dtype_name
from hmpx.base.torch_private import tree_map_only
from hmpx.insight.capture.dispatch import INDEXED, NORMS, OpLook, few, memory
from hmpx.insight.capture.notes import Notes, OpCall, Place, Spot
from hmpx.insight.finding import Names, Problem, percent
from hmpx.insight.looks.updates import LIMIT
from hmpx.insight.tensors import LOW, Tensor

_ARITHMETIC = ("add", "sub", "mul", "div", "lerp")
_LOST = 0.5  # the *kept* below which an average does not follow
_LATE = 0.8  # and below which it follows later than it should, as if its decay were nearer to 1
_HARMLESS = 2e-5  # a factor that is nearer to 1 changes nothing that matters
_MOVING = ("_to_copy", "clone", "detach")  # the numbers stay
_MANY = 16  # steps of a state, after which it is judged
_SETTLES = 5  # in last digits: with a larger share, running statistics stop within a tenth of where they belong


def look_at_writes(notes: Notes, op: OpCall) -> None:
    """Follow tensors in low precision that live on between iterations and that this op updates."""
    for weight in op.given if notes.rewritten else ():
        if weight.requires_grad and weight.is_leaf and (made := notes.rewritten.pop(memory(weight), None)) is not None:
            _count(notes, op, weight, *made)
    if op.is_beside or not op.args or not op.given:
        return
    if not op.graphed or not any(each.requires_grad for each in op.given):
        _follow(notes, op)
    if op.name in ("add", "add_", "sub", "sub_"):
        _state(notes, op)
    is_of_these = op.before is not None or op.name.rstrip("_") in (*_ARITHMETIC, "index", "index_put")
    if not is_of_these or _is_by_index(notes, op):
        return
    if op.before is not None:
        (_statistics if op.name in NORMS else _in_place)(notes, op, op.before)
        return
    if op.name not in _ARITHMETIC or not op.results:
        return
    if not op.is_in_forward or (not op.graphed and notes.names.of_tensor(op.given[0], op.frame)):
        _out_of_place(notes, op)


def _follow(notes: Notes, op: OpCall) -> None:
    """Repeat in FP32 what is computed from older numbers, until the result replaces them.

    The spelling may differ: ``p.copy_(p.lerp(q, d))``, ``p.data = (p.float() - u).to(p.dtype)``, ``p.set_(...)``.
    """
    if op.name == "copy_" and op.given[0].dtype in LOW and len(op.given) > 1:
        roots, exact = notes.facts(op.given[1]).get("made", ({}, None))
        old = roots.get(memory(op.given[0]))
        if old is not None and exact is not None and old.shape == few(op.given[0]).shape:
            _count(notes, op, op.given[0], old, few(op.given[0]), exact, memory(op.given[0]))
    if op.name not in (*_ARITHMETIC, *_MOVING, "addcmul", "addcdiv") or not op.results:
        return
    same = [each for each in op.given if each.shape == op.out.shape]
    if not same or any(each.numel() > 1 for each in op.given if each.shape != op.out.shape):
        return
    roots = {}
    for each in same:
        known = notes.facts(each).get("made")
        if known is not None:
            roots |= known[0]
        elif each.dtype in LOW and memory(each) not in notes.born:
            roots[memory(each)] = few(each).clone()
    if roots:
        exact = (
            _exact(notes, same[0])
            if op.name in _MOVING
            else op.func(
                *tree_map_only(Tensor, lambda each: _exact(notes, each), op.args),
                **tree_map_only(Tensor, lambda each: _exact(notes, each), op.kwargs),
            )
        )
        notes.add(op.out, made=(roots, exact))
        if op.out.dtype in LOW and op.name not in ("clone", "detach"):
            (where, old), *_ = roots.items()
            notes.rewritten[memory(op.out)] = old, few(op.out).clone(), exact, where, notes.place(op.frame)


def _exact(notes: Notes, tensor: Tensor) -> Tensor:
    return notes.facts(tensor).get("made", (None, few(tensor).float()))[1].clone()


def _state(notes: Notes, op: OpCall) -> None:
    """Follow what one line moves again and again by small parts, as the state of an ODE."""
    first, other = (*op.args, None)[:2]
    if op.out.dtype not in LOW or not isinstance(other, Tensor) or not isinstance(first, Tensor):
        return
    if first.dtype not in LOW or other.shape != first.shape or other.numel() < 2 or op.before is not None:
        return
    sign = -1.0 if op.name.startswith("sub") else 1.0
    update = sign * float(op.kwargs.get("alpha", 1.0)) * few(other).float()
    begun, ideal, steps, place = notes.facts(first).get("sum", (None, None, 0, None))
    if place != notes.place(op.frame):
        begun, ideal, steps = (few(first) if op.name in ("add", "sub") else few(op.out) - update).float(), 0 * update, 0
    ideal = ideal + update
    notes.add(op.out, sum=(begun, ideal, steps + 1, notes.place(op.frame)))
    size = float(ideal.square().sum())
    if steps + 1 >= _MANY and size:
        dot = float(((few(op.out).float() - begun) * ideal).sum()) / size
        notes.note("state", op, dtype_name(op.out.dtype), dot=dot, tensors=1)


def _in_place(notes: Notes, op: OpCall, before: list[Tensor]) -> None:
    targets = op.args[0] if isinstance(op.args[0], list | tuple) else [op.args[0]]
    if any(t.grad_fn is not None for t in targets):
        return
    factor = op.args[1] if len(op.args) > 1 and "mul" in op.name else None
    if isinstance(factor, int | float) and abs(1 - factor) < _HARMLESS:
        return
    exact, part = [each.float() for each in before], Tensor.detach if op.name in INDEXED else few
    op.func(exact if targets is op.args[0] else exact[0], *_in_fp32(op.args[1:], part), **_in_fp32(op.kwargs, part))
    for target, old, x in zip(targets, before, exact, strict=True):
        _count(notes, op, target, old, part(target), x, memory(target))


def _is_by_index(notes: Notes, op: OpCall) -> bool:
    """Follow what is read by an index, changed and written back, as by `count[i] += 1`; return whether it is that."""
    first = op.args[0]
    if op.name == "index" and not first.requires_grad and first.dtype in LOW and memory(first) not in notes.born:
        notes.add(op.out, read=(op.out.clone(), op.out.float()))
    elif op.name == "index_put_" and not (len(op.args) > 3 and op.args[3]):
        old, exact = notes.facts(op.args[2]).get("read", (None, None))
        if old is not None and op.before is not None:
            _count(notes, op, first, old, op.args[2], exact, memory(first))
    elif op.name.rstrip("_") in _ARITHMETIC and (read := notes.facts(first).get("read")) is not None:
        if read[1].shape == first.shape == op.out.shape:
            notes.add(op.out, read=(read[0], op.func(read[1], *_in_fp32(op.args[1:], Tensor.detach))))
    else:
        return False
    return True


def _statistics(notes: Notes, op: OpCall, before: list[Tensor]) -> None:
    """Look at the running variance of a norm over batches, which moves part of the way to the batch's variance."""
    running, is_training, share, eps = op.args[4:8]
    if is_training and share < _SETTLES * torch.finfo(running.dtype).eps:
        count = op.given[0].numel() / running.numel()
        variance = (few(op.results[2]).float() ** -2 - eps) * count / max(count - 1, 1)
        _count(notes, op, running, before[0], few(running), before[0].float().lerp(variance, share), memory(running))


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


def _count(notes: Notes, op: OpCall, target: Tensor, old: Tensor, new: Tensor, exact: Tensor, *places: Any) -> None:
    """Count a write. places: where the memory begins that it writes to; a `Place`, if it is not the one of this op."""
    ideal, real = exact.float() - old.float(), new.float() - old.float()
    if not bool(torch.isfinite(ideal).all()) or not bool(ideal.any()):
        return
    size = float(ideal.square().sum())
    numbers = {"dot": float((real * ideal).sum()) / size, "elements": target.numel(), "moves": int((ideal != 0).sum())}
    by_torch, place = (
        op.is_called_from("swa_utils.py"),
        next((each for each in places if isinstance(each, Place)), None),
    )
    said = dtype_name(target.dtype)
    spot = notes.note_line("write", op.name, op.frame, said, place, **numbers, tensors=1, by_torch=by_torch)
    spot.places.update(each for each in places if isinstance(each, int))
    spot.places.add(memory(target))


def of_writes(notes: Notes, names: Names) -> Iterator[Problem]:
    stepped = {memory(p.detach()) for p in names if p.layout is torch.strided}
    lines: dict[str, list[Spot]] = {}
    for spot in notes.spots("write"):
        lines.setdefault(spot.where, []).append(spot)
    for where, spots in lines.items():
        worst = min(spots, key=_kept)
        numbers, op, kept = worst.numbers, worst.name, max(_kept(worst), 0)
        move = f"{percent(min(kept, 1))} of the way that it moves a float32 copy"
        if notes.are_weights(worst.places):
            is_stepped = not worst.places.isdisjoint(stepped)
            if kept < (_LOST if is_stepped else LIMIT):  # a step that is undone later may lose much
                whose = "an optimizer steps too" if is_stepped else "no torch optimizer steps"
                said = f"{op} moves weights in {worst.said}, which {whose}, {move}"
                do = "keep a float32 copy of each weight, update that, and copy it into the weight; or step a "
                do += "torch.optim.Optimizer, with hmpx.attach(optimizer)"
                yield Problem("lost updates", True, said, do, where, (), (op,), 0.5 + 0.45 * (1 - kept))
        elif kept < _LOST and worst.op in NORMS:
            said = f"the running variance of a norm in {worst.said} moves {move}"
            do = f"keep the norm in float32, which takes inputs in {worst.said} as well: norm.float()"
            yield Problem("running statistics", True, said, do, where, (worst.module,), (op,), 0.6)
        elif kept < _LOST and numbers["elements"] == numbers["tensors"]:
            said = f"{op} moves a number in {worst.said} {move}: a rate, a scale or a running sum that stands still"
            do = "keep it in a Python float, or in float32"
            yield Problem("running value", True, said, do, where, (), (op,), 0.4)
        elif kept < _LATE and (numbers["moves"] >= 8 or not numbers["dot"]):
            of_torch = " of torch's AveragedModel" if numbers["by_torch"] else ""
            said = f"{op} moves a tensor in {worst.said}{of_torch} {move}: an average or a count that "
            said += "stands still" if kept < _LOST else "follows late"
            do = "make it in float32: average = p.detach().float().clone(), then average.lerp_(p.float(), 1 - decay)"
            do = "hmpx.attach(optimizer), which rounds it stochastically" if of_torch else do
            recipe = {"weights": "stochastic"} if of_torch else {}
            yield Problem("average of weights", kept < _LOST, said, do, where, (), (op,), 0.7, recipe)

    for spot in notes.spots("state"):
        if (kept := max(_kept(spot), 0)) < _LOST:
            move = f"{percent(min(kept, 1))} of the way that it moves a float32 copy"
            said = f"{spot.name} moves a state in {spot.said}, step by step, {move}{spot.place.within}"
            yield Problem("running value", True, said, "keep the state in float32", spot.where, (), (spot.name,), 0.5)


def _kept(spot: Spot) -> float:
    return spot.numbers["dot"] / spot.numbers["tensors"]


def _in_fp32(values: Any, part: Callable[[Tensor], Tensor] = few) -> Any:
    """Return the arguments of an op with parts of tensors, in FP32, in the place of these."""

    def of(tensor: Tensor) -> Tensor:
        taken = part(tensor)
        return taken.float() if taken.dtype in LOW else taken

    return tree_map_only(Tensor, of, values)


WRITES = OpLook(look_at_writes, of_writes, "forward")
