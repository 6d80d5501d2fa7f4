"""Writes to weights, averages and counts outside of optimizer steps: in place, or by a line that replaces them.

Each write is repeated in FP32. *kept* is <movement, FP32 movement> / <FP32 movement, FP32 movement>, as for steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from hmpx.base.tensors import dtype_name
from hmpx.insight.dispatch import OpLook, is_of_hook, sampled
from hmpx.insight.finding import Finding, Names, percent
from hmpx.insight.looks.lost_updates import LIMIT
from hmpx.insight.notes import NORMS, NotedSite, Notes, OpCall, Place
from hmpx.insight.report import grouped
from hmpx.insight.tensors import LOW, Tensor, called_in_fp32, floating, memory, widened

_LOST = 0.5  # an average that keeps less does not follow
_LATE = 0.8  # an average that keeps less follows later than it should, as if its decay were nearer to 1
_HARMLESS = 2e-5  # a factor that differs from 1 by less may be lost
_READS = ("index", "index_select", "gather", "take", "masked_select")  # by an index or a mask
_WRITES = ("index_put_", "index_copy_", "scatter_", "put_", "masked_scatter_")
_MOVING = ("_to_copy", "clone", "detach")  # ops that compute nothing
_MANY = 16  # a state is judged after so many steps
_SETTLES = 5  # running statistics whose share is more than so many eps come within a tenth of the right value


def look_at_writes(notes: Notes, op: OpCall) -> None:
    """Repeat in FP32 each write to a tensor that outlives an iteration, and compare the two results."""
    if op.stage == "backward" and (op.before is None or not is_of_hook(op.frame)):
        return
    _weights_replaced_before(notes, op)
    if op.is_outside_model or not op.args or not op.given:
        return
    if not op.is_of_model or (not op.graphed and notes.names.of_tensor(op.given[0], op.frame)):
        for row in rows(op):
            _copied_back(notes, row)
            _derive(notes, row)
    if op.name in ("add", "add_", "sub", "sub_"):
        _state(notes, op)
    if _by_index(notes, op):
        return
    if op.before is not None:
        _statistics(notes, op, op.before[-1]) if op.schema.is_norm else _updated(notes, op, op.before)


class _Row(NamedTuple):
    """One call: an op, or what it does to one tensor of the lists that it takes."""

    op: OpCall
    args: tuple
    kwargs: dict[str, Any]
    result: Any

    @property
    def out(self) -> Tensor:
        return self.result[0] if isinstance(self.result, list | tuple) else self.result

    @property
    def given(self) -> list[Tensor]:
        return floating((*self.args, *self.kwargs.values()))

    def again(self, of: Callable[[Tensor], Tensor]) -> Tensor:
        """Call it again, with ``of(tensor)`` for each tensor."""
        result = called_in_fp32(self.op.func, self.args, self.kwargs, of)
        return result[0] if isinstance(result, list | tuple) else result


def rows(op: OpCall) -> Iterator[_Row]:
    if not op.schema.is_foreach:
        yield _Row(op, op.args, op.kwargs, op.result)
        return

    def of_row(value: Any, i: int) -> Any:
        is_of_rows = isinstance(value, list | tuple) or (isinstance(value, Tensor) and value.dim() == 1)
        return value[i : i + 1] if is_of_rows and len(value) == len(op.args[0]) else value

    results = op.results if len(op.results) == len(op.args[0]) else op.args[0]
    for i, result in enumerate(results):
        kwargs = {name: of_row(value, i) for name, value in op.kwargs.items()}
        yield _Row(op, tuple(of_row(value, i) for value in op.args), kwargs, result)


def _weights_replaced_before(notes: Notes, op: OpCall) -> None:
    """Count it as a write if a line has replaced a weight that an op reads, as ``p.data = p - u`` does."""
    for weight in op.given if notes.rewritten else ():
        if weight.requires_grad and weight.is_leaf and (made := notes.rewritten.pop(memory(weight), None)) is not None:
            notes.weight(weight).is_replaced = True
            _note(notes, made, next(iter(made.older)), memory(weight))


def _copied_back(notes: Notes, row: _Row) -> None:
    """Count a copy whose source was derived from its target, as in ``p.copy_(p.lerp(q, d))``."""
    if row.op.schema.is_copy and len(given := row.given) > 1 and given[0].dtype in LOW:
        origins, exact = notes.facts(given[1]).get("derived", ({}, None))
        old, _ = origins.get(memory(given[0]), (None, None))
        if old is not None and exact is not None and old.shape == sampled(given[0]).shape:
            _count(notes, row.op, given[0], old, sampled(given[0]), exact)


def _derive(notes: Notes, row: _Row) -> None:
    """Note from which older tensors in low precision a result is derived, and what it would be in FP32."""
    op, schema = row.op, row.op.schema
    if schema.written or schema.is_random or not (schema.is_pointwise or op.name in _MOVING) or not op.results:
        return
    out, given = row.out, row.given
    same = [each for each in given if each.shape == out.shape]
    if not same or any(each.numel() > 1 for each in given if each.shape != out.shape):
        return
    origins: dict[int, tuple[Tensor, StorageWeakRef]] = {}
    for each in same:
        if (known := notes.facts(each).get("derived")) is not None:
            origins |= known[0]
        elif each.dtype in LOW and memory(each) not in notes.born:
            origins[memory(each)] = sampled(each).clone(), StorageWeakRef(each.untyped_storage())
    if not origins:
        return

    def exact_of(tensor: Tensor) -> Tensor:
        return notes.facts(tensor).get("derived", (None, widened(sampled(tensor))))[1].clone()

    exact = exact_of(same[0]) if op.name in _MOVING else row.again(exact_of)
    notes.add(out, derived=(origins, exact))
    if out.dtype in LOW and op.name not in ("clone", "detach"):
        older = {at: (_numbers(notes, op, out, old, sampled(out), exact), held) for at, (old, held) in origins.items()}
        held = StorageWeakRef(out.untyped_storage())
        notes.rewritten[memory(out)] = _Rewritten(older, held, op.name, out.dtype, notes.place(op.frame))


def _state(notes: Notes, op: OpCall) -> None:
    """Follow a tensor that one line moves by small amounts again and again, such as the state of an ODE."""
    first, other = (*op.args, None)[:2]
    if op.out.dtype not in LOW or not isinstance(other, Tensor) or not isinstance(first, Tensor):
        return
    if first.dtype not in LOW or other.shape != first.shape or other.numel() < 2 or op.before is not None:
        return
    sign = -1.0 if op.name.startswith("sub") else 1.0
    update = sign * float(op.kwargs.get("alpha", 1.0)) * sampled(other).float()
    begun, ideal, steps, place = notes.facts(first).get("sum", (None, None, 0, None))
    if place != notes.place(op.frame):
        begun = (sampled(first) if op.name in ("add", "sub") else sampled(op.out) - update).float()
        ideal, steps = 0 * update, 0
    ideal = ideal + update
    notes.add(op.out, sum=(begun, ideal, steps + 1, notes.place(op.frame)))
    size = float(ideal.square().sum())
    if steps + 1 >= _MANY and size:
        dot = float(((sampled(op.out).float() - begun) * ideal).sum()) / size
        notes.note("state", op, dtype_name(op.out.dtype), dot=dot, tensors=1)


def _by_index(notes: Notes, op: OpCall) -> bool:
    """Follow a read by an index, a change and a write back, as in ``count[i] += 1``; return whether the op is one."""
    first = op.args[0]
    if op.name in _READS and not first.requires_grad and first.dtype in LOW and memory(first) not in notes.born:
        notes.add(op.out, read=(op.out.clone(), op.out.float()))
    elif op.name in _WRITES and not (op.name == "index_put_" and len(op.args) > 3 and op.args[3]):
        new = op.given[-1]
        read, exact = notes.facts(new).get("read", (None, None))
        if read is not None and read.shape == new.shape:
            _count(notes, op, first, read, new, exact)
    elif op.schema.is_pointwise and not op.schema.is_random and op.results:
        read, exact = notes.facts(first).get("read", (None, None))
        if read is None:
            return False
        if exact.shape == first.shape == op.out.shape:

            def of(tensor: Tensor) -> Tensor:
                return exact if tensor is first else widened(tensor.detach())

            notes.add(op.out, read=(read, _Row(op, op.args, op.kwargs, op.result).again(of)))
    else:
        return False
    return True


def _statistics(notes: Notes, op: OpCall, before: Tensor) -> None:
    """Look at the running variance of a norm over batches, which moves part of the way to the batch's variance."""
    running, is_training, share, eps = op.args[4:8]
    if is_training and share < _SETTLES * torch.finfo(running.dtype).eps:
        count = op.given[0].numel() / running.numel()
        variance = (sampled(op.results[2]).float() ** -2 - eps) * count / max(count - 1, 1)
        _count(notes, op, running, before, sampled(running), before.float().lerp(variance, share))


def _updated(notes: Notes, op: OpCall, before: Sequence[Tensor]) -> None:
    targets = op.schema.targets(op.args, op.kwargs)
    factor = op.args[1] if len(op.args) > 1 and "mul" in op.name else None
    is_harmless = isinstance(factor, int | float) and abs(1 - factor) < _HARMLESS
    if is_harmless or any(t.grad_fn is not None for t in targets):
        return
    part = sampled if op.schema.is_pointwise else Tensor.detach
    for row, target, old in zip(rows(op), targets, before, strict=False):
        exact = old.float()

        def of(tensor: Tensor, target: Tensor = target, exact: Tensor = exact) -> Tensor:
            if tensor.data_ptr() == target.data_ptr() and tensor.shape == target.shape:
                return exact  # it is another view of the target, or the target
            is_one = tensor.numel() == 1 or not op.schema.is_pointwise
            return widened(part(tensor if is_one else tensor.expand(target.shape)))

        row.again(of)
        _count(notes, op, target, old, part(target), exact)


def _numbers(notes: Notes, op: OpCall, target: Tensor, old: Tensor, new: Tensor, exact: Tensor) -> dict[str, float]:
    """Return what is counted of a write; nothing if the write in FP32 would change no number.

    It counts for the iterations that nobody has looked at before it: a sum, or an average whose decay grows, loses what
    comes late.

    Args:
        old, new, exact: samples of the target before the write, after it, and after the write in FP32.
    """
    ideal, real = exact.float() - old.float(), new.float() - old.float()
    if not bool(torch.isfinite(ideal).all()) or not bool(ideal.any()):
        return {}
    dot = float((real * ideal).sum()) / float(ideal.square().sum())
    numbers = {"dot": dot * notes.span, "elements": target.numel() * notes.span, "tensors": notes.span}
    numbers["moving"] = int((ideal != 0).sum())
    return numbers | {"by_torch": op.is_called_from("swa_utils.py")}


def _count(notes: Notes, op: OpCall, target: Tensor, old: Tensor, new: Tensor, exact: Tensor, *more: int) -> None:
    """Count a write at the line of the op. more: addresses of other memory than the target's that it writes to."""
    if numbers := _numbers(notes, op, target, old, new, exact):
        site = notes.note_line("write", op.name, op.frame, dtype_name(target.dtype), None, **numbers)
        site.owner = site.owner or notes.names.of_tensor(target, op.frame)
        site.memories.update((*more, memory(target)))


class _Rewritten(NamedTuple):
    """A result that is derived from older tensors, and may replace one of them.

    older: by the address of each older tensor, what a write in its place counts, and its storage. held: the result's.
    """

    older: dict[int, tuple[dict[str, float], StorageWeakRef]]
    held: StorageWeakRef
    op: str
    dtype: torch.dtype
    place: Place


def _note(notes: Notes, made: _Rewritten, origin: int, *more: int) -> None:
    """Count a result as a write to the older tensor at the address `origin`."""
    numbers, _ = made.older[origin]
    if numbers:
        site = notes.note_line("write", made.op, None, dtype_name(made.dtype), made.place, **numbers)
        site.memories.update((*more, origin))


def of_writes(notes: Notes, names: Names) -> Iterator[Finding]:
    for made, origin in notes.outlived:
        _note(notes, made, origin)
    notes.outlived.clear()
    stepped = {memory(p) for p in names}
    for sites in grouped(notes.sites("write"), lambda site: site.where).values():
        worst = min(sites, key=_kept)
        if notes.are_weights(worst.memories):
            yield from _of_weights(worst, is_stepped=not worst.memories.isdisjoint(stepped))
        else:
            yield from _of_average(worst)
    for site in notes.sites("state"):
        if _kept(site) < _LOST:
            said = f"{site.name} moves a state in {site.said}, step by step, {_way(site)}{site.place.within}"
            yield Finding("running value", True, said, "keep the state in float32", site.where, (), (site.name,), 0.5)


def _of_weights(site: NotedSite, is_stepped: bool) -> Iterator[Finding]:
    """Judge a line that writes to weights. is_stepped: whether an optimizer moves them, too.

    The limit is lower then: a step that is taken back later, such as SAM's, may lose much.
    """
    if (kept := _kept(site)) < (_LOST if is_stepped else LIMIT):
        whose = "an optimizer steps too" if is_stepped else "no torch optimizer steps"
        said = f"{site.name} moves weights in {site.said}, which {whose}, {_way(site)}{site.place.within}"
        do = "keep a float32 copy of each weight, update that, and copy it into the weight; or step a "
        do += "torch.optim.Optimizer, with hmpx.attach(optimizer)"
        yield Finding(
            "lost updates", True, said, site.advice(do), site.where, (), (site.name,), 0.5 + 0.45 * (1 - max(kept, 0))
        )


def _of_average(site: NotedSite) -> Iterator[Finding]:
    """Judge a line that writes to what is no weight: statistics of a norm, one number, an average or a count."""
    numbers, kept, ops = site.numbers, _kept(site), (site.name,)
    what = f" ({site.owner})" if site.owner else ""
    if kept < _LOST and site.op in NORMS:
        said = f"the running variance of a norm in {site.said} moves {_way(site)}"
        do = f"keep the norm in float32, which takes inputs in {site.said} as well: norm.float()"
        yield Finding("running statistics", True, said, do, site.where, (site.module,), ops, 0.6)
    elif kept < LIMIT and numbers["elements"] == numbers["tensors"]:
        said = f"{site.name} moves a number{what} in {site.said} {_way(site)}: a rate, a scale or a running sum that "
        do = site.advice("keep it in a Python float, or in float32")
        said += f"{'stands still' if kept < _LOST else 'falls behind'}{site.place.within}"
        yield Finding("running value", True, said, do, site.where, (), ops, 0.4)
    elif kept < _LATE and (numbers["moving"] >= 8 or not numbers["dot"]):
        of_torch = " of torch's AveragedModel" if numbers["by_torch"] else ""
        said = f"{site.name} moves a tensor{what} in {site.said}{of_torch} {_way(site)}: an average or a count that "
        said += f"{'stands still' if kept < _LOST else 'follows late'}{site.place.within}"
        do = "make it in float32: average = p.detach().float().clone(), then average.lerp_(p.float(), 1 - decay)"
        do = "hmpx.attach(optimizer), which rounds it stochastically" if of_torch else site.advice(do)
        recipe = {"weights": "stochastic"} if of_torch else {}
        yield Finding("average of weights", kept < _LOST, said, do, site.where, (), ops, 0.7, recipe)


def _kept(site: NotedSite) -> float:
    return site.numbers["dot"] / site.numbers["tensors"]


def _way(site: NotedSite) -> str:
    return f"{percent(min(max(_kept(site), 0), 1))} of the way that it moves a float32 copy"


WRITES = OpLook(look_at_writes, of_writes, "forward", "backward")
