"""`doctor --files`: whether the training between two checkpoints has lost updates, and what one of them tells."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from hmpx.base.dtype_names import dtype_name
from hmpx.errors import HmpxError
from hmpx.insight.checkpoints.findings import LOST, kept_of, of_both, of_each, of_state, of_steps
from hmpx.insight.checkpoints.opened import Checkpoint, Stored, matched, opened
from hmpx.insight.checkpoints.tensors import Bar, FileTensor, seen
from hmpx.insight.doctor.diagnosis import Diagnosis
from hmpx.insight.finding import percent, some
from hmpx.insight.report import Bars, Field, Grid, Lines, plain
from hmpx.insight.text_table import number

_FIELDS = (
    Field("tensor", lambda each: each.name, "end", least=16),
    Field("shape", lambda each: " x ".join(map(str, each.shape)), rank=2),
    Field("kept", lambda each: f"{each.moved.kept:.2f}", "figure", lambda each: each.moved.kept, right=True),
    Field("moved", lambda each: percent(each.moved.moved), "figure", lambda each: each.moved.moved, right=True),
    Field("still rows", lambda each: percent(each.moved.aside) if each.moved.aside else "", right=True, rank=1),
)
_SHOWN = 8  # tensors in a terminal


@dataclass
class Checkup(Diagnosis):
    """What checkpoints tell of the precision of a training. It prints as a `Diagnosis`, with a table of tensors.

    Attributes:
        kept: how far the weights moved, over how far they would have if no update had been lost; NaN if nothing tells.
        tensors: what was seen of each.
    """

    kept: float = math.nan
    tensors: list[FileTensor] = field(default_factory=list)
    _beyond: ClassVar[str] = ""

    def _table(self) -> Grid:
        rows = sorted((each for each in self.tensors if each.tells), key=lambda each: each.moved.kept)  # type: ignore
        return Grid(_FIELDS, rows, shown=rows[:_SHOWN] if self.wrong else [], page="The tensors", order="kept")

    def _text(self, width: int) -> str:
        return "\n".join([super()._text(width), *self._table().as_text(width)])

    def _sections(self) -> Iterator[Grid | Lines | Bars]:
        yield from super()._sections()
        yield self._table()

    def as_json(self) -> dict[str, Any]:
        """All of it as dicts, lists and strings: that of a `Diagnosis`, `kept`, and `kept` by tensor."""
        by_tensor = {each.name: each.moved.kept for each in self.tensors if each.moved and each.tells}
        return {**super().as_json(), "kept": plain(self.kept), "tensors": by_tensor}


def checkup(before: str, after: str | None = None, rate: float = 0.0, steps: int = 0) -> Checkup:
    """Look at one checkpoint, or at what moved from one to another.

    Args:
        before, after: files or folders. rate: the learning rate of the training; 0 if it is not known. steps: of an
            optimizer, that were taken between the two; 0 likewise.

    Raises:
        HmpxError: one cannot be read, or they have no tensor in common.
    """
    first = opened(before)
    last = opened(after) if after else first
    found = Checkup(looked=[_said(path, each) for path, each in ((before, first), (after, last)) if path])
    names = matched(first.weights, last.weights) if after else {}
    if after and not names:
        each = (f"{some((*one.weights,), 2)} in {path}" for path, one in ((before, first), (after, last)))
        merge = "; merge adapters first" if any("lora_" in name for name in (*first.weights, *last.weights)) else ""
        raise HmpxError(f"no tensor has one name in both: {'; '.join(each)}{merge}")
    pairs = {name: (first.weights[names[name]] if name in names else None, now) for name, now in last.weights.items()}
    coded = [name for name, (old, now) in pairs.items() if _is_coded(now) or (old and _is_coded(old))]
    if coded:
        found.not_checked.append(f"weights in 8 bits or fewer ({some((*coded,))})")
    reshaped = [name for name, (old, now) in pairs.items() if old and old.shape != now.shape]
    if reshaped:
        found.not_checked.append(f"tensors whose shape has changed ({some((*reshaped,))})")
    if after and (alone := {before: len(first.weights) - len(names), after: len(last.weights) - len(names)}):
        told = [f"{number(count, 'tensor')} only in {path}" for path, count in alone.items() if count]
        found.not_checked += [", ".join(told)] if told else []
    read = {
        name: (old if name not in reshaped else None, now)
        for name, (old, now) in pairs.items()
        if now.dtype.is_floating_point and name not in coded
    }
    bar = Bar(sum(each.shape.numel() for pair in read.values() for each in pair if each))
    if not after:
        found.looked.append("one file does not tell whether updates were lost; doctor --files BEFORE AFTER does")
    found.tensors = [seen(name, old, now, rate, bar) for name, (old, now) in read.items()]
    found.findings += [*of_each(found.tensors, is_alone=not after), *of_state(last.state)]
    if after:
        found.kept = kept_of(found.tensors)
        problems, unclear = of_both(found.tensors, found.kept)
        found.findings += problems
        found.not_checked += unclear
        if not math.isnan(found.kept) and not any(each.kind == LOST for each in problems):
            judged = _many(sum(each.count for each in found.tensors if each.tells))
            said = f"{100 * min(found.kept, 1):.0f} % as far as float32 weights would have"
            found.looked.append(f"{judged} weights, in matrices, moved {said}")
    problems, told = of_steps(found.tensors, rate, steps, found.kept)
    found.looked += told
    found.findings += problems
    found.findings.sort(key=lambda each: (not each.wrong, -each.weight))
    return found


def _is_coded(stored: Stored) -> bool:
    """Return whether it holds weights in 8 bits or fewer. A vector of bytes is the state of a generator, or a mask."""
    return stored.dtype.itemsize == 1 and stored.dtype is not torch.bool and len(stored.shape) > 1


def _said(path: str, found: Checkpoint) -> str:
    """Say what a checkpoint holds, by dtype."""
    counts: Counter[str] = Counter()
    for each in found.weights.values():
        counts[dtype_name(each.dtype)] += each.shape.numel()
    told = ", ".join(f"{_many(count)} {name}" for name, count in counts.most_common())
    state = {name.rpartition(".")[2] for name, each in found.state.items() if each.shape.numel() > 1}
    masters = sorted(each for each in state if "master" in each or each.startswith("fp32"))
    told += f"; state of an optimizer ({', '.join(sorted(state))})" if state else ""
    told += ", with FP32 master weights" if masters else ""
    return f"{path}: {number(len(found.weights), 'tensor')}, {told}"


def _many(count: int) -> str:
    for unit, one in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= one:
            return f"{count / one:.3g} {unit}"
    return str(count)
