"""`doctor --files`: whether the training between two checkpoints has lost updates, and what one of them tells."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from hmpx.base.tensors import dtype_name
from hmpx.errors import HmpxError
from hmpx.insight.checkpoints.tensors import FEWEST, Bar, Checkpoint, FileTensor, Stored, matched, opened, seen
from hmpx.insight.doctor import Diagnosis
from hmpx.insight.finding import Finding, first_names, percent
from hmpx.insight.report import Bars, Field, Grid, Lines, amount, number, plain
from hmpx.insight.tensors import LOW

LOST = "lost updates"
_LEAST = 0.9  # that is kept where no update was lost
_HALF, _MANY = 0.5, 0.25  # that so large a share of the weights keeps less than half is wrong, too
_SOME = 0.1  # the share of the weights that moved, or of the rows, which must be judged
_MERGED = (
    "the updates of adapters: no norm or bias moved, as where adapters are merged, and their own updates left no trace"
)
_BESIDE_ONE = "their updates were lost (beside 1.0 the numbers of bfloat16 are 0.0039 and 0.0078 apart)"
_ATTACH = "train with hmpx.attach(optimizer), or with python -m hmpx run --recipe bf16-sr train.py"


def kept_of(tensors: Sequence[FileTensor]) -> float:
    """Return how far the weights moved over how far they would have moved, NaN if nothing tells. None counts twice."""
    told = [each.moved for each in tensors if each.moved and each.tells]
    expected = sum(each.expected for each in told)
    return sum(min(each.went, each.expected) for each in told) / expected if expected else math.nan


def distance_of(told: Sequence[FileTensor]) -> float:
    """Return how far the smallest weights moved, in the median of the tensors; 0 if nothing tells."""
    distances = sorted(each.moved.fine for each in told if each.moved)
    return distances[len(distances) // 2] if distances else 0.0


def low_of(tensors: Sequence[FileTensor]) -> list[FileTensor]:
    """Return the tensors that were in low precision: by dtype or numbers, and FP32 beside matrices that all were."""
    wide = [each for each in tensors if each.dtypes[-1] is torch.float32 and len(each.shape) > 1]
    are_all = bool(wide) and all(each.numbers.dtype in LOW for each in wide)
    return [each for each in tensors if each.dtypes[-1] in LOW or each.numbers.dtype in LOW or are_all]


def of_each(tensors: Sequence[FileTensor], is_alone: bool) -> Iterator[Finding]:
    """Return what the numbers of a checkpoint say. is_alone: whether there is no other one."""
    whole = sum(each.count for each in tensors) or 1

    def finding(kind: str, wrong: bool, found: Sequence[FileTensor], said: str, do: str) -> Finding:
        weight = 1.0 if wrong else sum(each.count for each in found) / whole
        return Finding(kind, wrong, said, do, names=tuple(each.name for each in found), weight=weight)

    if broken := [each for each in tensors if not each.numbers.is_finite]:
        names = first_names(tuple(each.name for each in broken))
        said = f"inf or NaN in {number(len(broken), 'tensor')} of {len(tensors)} ({names})"
        yield finding("not finite", True, broken, said, "go back to a checkpoint before it")
    wide = [each for each in tensors if each.dtypes[-1] is torch.float32 and each.count >= FEWEST]
    if padded := [each for each in wide if each.numbers.dtype in LOW]:
        names = " and ".join(sorted({dtype_name(each.numbers.dtype) for each in padded}))
        said = f"{len(padded)} of {len(wide)} float32 tensors hold only numbers of {names}: they come from such weights"
        yield finding("float32 in name", False, padded, said, "save them in that dtype, in half the bytes")
    if is_alone and (ones := [each for each in low_of(tensors) if each.is_vector and each.numbers.one == 1]):
        stand = "norm stands" if len(ones) == 1 else "norms stand"
        said = f"{len(ones)} {stand} at 1.0 in every element ({first_names(tuple(each.name for each in ones))})"
        yield finding("norms", False, ones, f"{said}: not trained, or {_BESIDE_ONE}", _ATTACH)


def of_steps(tensors: Sequence[FileTensor], rate: float, steps: int, kept: float) -> tuple[list[Finding], list[str]]:
    """Return what a learning rate says of weights in low precision, and the facts behind it, in words."""
    low = [each for each in tensors if each.numbers.dtype in LOW and len(each.shape) > 1]
    if not (rate and low):
        return [], []
    lost = sum(each.lost * each.count for each in low) / sum(each.count for each in low)
    names = tuple(each.name for each in sorted(low, key=lambda each: -each.lost) if each.lost > _HALF)
    said = f"a step of {rate:g} is less than half an ulp of {percent(lost)} of the weights"
    told = []
    if steps and (distance := distance_of([each for each in low if each.moved and each.tells])):
        told.append(
            f"the smallest weights moved {distance:.2g}; "
            f"{steps} steps of {rate:g} in one direction are {steps * rate:.2g}"
        )
    if lost < _HALF or kept >= _LEAST:
        return [], [said, *told]
    return [Finding("small steps", False, f"{said}: rounded to nearest, it leaves them", _ATTACH, names=names)], told


def of_state(state: Mapping[str, Stored]) -> Iterator[Finding]:
    """Return what the state of an optimizer says, if a checkpoint has it."""
    kinds: dict[str, Counter[str]] = {}
    for name, each in state.items():
        if each.dtype.is_floating_point and each.shape.numel() > 1:
            kinds.setdefault(name.rpartition(".")[2], Counter())[dtype_name(each.dtype)] += 1
    low = {kind: each for kind, each in kinds.items() if {"bfloat16", "float16"} & each.keys()}
    if low:
        said = ", ".join(f"{kind} in {' and '.join(each)}" for kind, each in low.items())
        said += ": an average that is rounded to nearest stands still where it changes by less than half an ulp"
        do = "keep it in float32, or round it stochastically: hmpx.attach(optimizer, state_dtype=torch.bfloat16)"
        yield Finding("optimizer state", False, said, do)


def of_both(tensors: Sequence[FileTensor], kept: float) -> tuple[list[Finding], list[str]]:
    """Return what the movement from one checkpoint to another says, and what it does not tell. kept: of all."""
    both = [each for each in tensors if each.were]
    weights = [each for each in both if len(each.shape) > 1]
    found = [*_of_dtypes(both)]
    if both and all(each.is_same for each in both):
        return found, ["updates: no number moved; it is one checkpoint twice, or every update was lost"]
    told = [each for each in weights if each.moved and each.tells]
    dead = [each for each in told if each.moved.kept < _HALF]  # type: ignore[union-attr]
    judged = sum(each.count for each in told)
    half = sum(each.count for each in dead) / judged if judged else 0.0
    if kept < _LEAST or half >= _MANY:
        found.append(_lost(told, kept, half))
    still = tuple(each.name for each in weights if each.is_same)
    if still:
        said = f"{len(still)} of {len(weights)} matrices did not move at all ({first_names(still)})"
        do = "if they are weights to be trained, give them to the optimizer"
        found.append(Finding("not trained", False, said, do, names=still))
    unclear = [*_unclear(weights, kept)]
    vectors = [each for each in low_of(both) if each.is_vector and each.numbers.one != 0]
    shown = [each for each in vectors if each.ulp < 2 * distance_of(told)]  # if they moved, the file would show it
    if kept >= _LEAST and len(vectors) > 1 and all(each.is_same for each in vectors) and (still or shown):
        unclear.append(_MERGED)
    elif low := [each for each in (shown if kept >= _LEAST else vectors) if each.is_same]:
        ones = [each for each in low if each.numbers.one == 1]
        at_one = f", {len(ones)} of them at 1.0 in every element" if ones else ""
        names = tuple(each.name for each in low)
        said = f"{len(low)} of {len(vectors)} vectors did not move at all{at_one} ({first_names(names)}): not trained"
        found.append(Finding("norms", False, f"{said}, or {_BESIDE_ONE}", _ATTACH, names=names))
    return found, unclear


def _lost(told: Sequence[FileTensor], kept: float, half: float) -> Finding:
    worst = sorted(told, key=lambda each: each.moved.kept)  # type: ignore[union-attr]
    names = tuple(each.name for each in worst if each.moved.kept < _LEAST)  # type: ignore[union-attr]
    first, held = worst[0].moved, max(Counter(each.numbers.dtype for each in told).items(), key=lambda each: each[1])[0]
    assert first
    said = f"{dtype_name(held)} weights moved {100 * min(kept, 1):.0f} % as far as float32 weights would have "
    said += f"({len(names)} of {len(told)} matrices less than {100 * _LEAST:.0f} %; {percent(half)} of the weights in "
    said += f"matrices below {100 * _HALF:.0f} %; worst {worst[0].name}: {100 * first.kept:.0f} %)"
    return Finding(LOST, True, said, _ATTACH, names=names, weight=0.5 + 0.45 * (1 - min(kept, 1)))


def _of_dtypes(both: Sequence[FileTensor]) -> Iterator[Finding]:
    pairs = Counter(each.dtypes for each in both if each.dtypes[0] is not each.dtypes[1])
    for (old, new), count in pairs.items():
        narrows = old.itemsize > new.itemsize
        said = f"{count} of {len(both)} tensors were {dtype_name(old)} and are {dtype_name(new)}"
        said += f"; what moved is what moved from their numbers in {dtype_name(new)}" if narrows else ""
        names = tuple(each.name for each in both if each.dtypes == (old, new))
        yield Finding("dtypes", False, said, "train and save in the dtype that you mean", names=names, weight=0.1)


def _unclear(weights: Sequence[FileTensor], kept: float) -> Iterator[str]:
    moved = [(each, each.moved) for each in weights if each.moved and each.numbers.dtype in LOW]
    whole = sum(each.count for each, _ in moved) or 1
    reasons: dict[str, list[FileTensor]] = {}
    for each, movement in moved:
        why = each.why_not
        if not why and movement.still_rows > _HALF:
            why = f"rows that did not move ({percent(movement.still_rows)} of {each.name})"
        if why:
            reasons.setdefault(why, []).append(each)
    for why, found in reasons.items():
        if sum(each.count for each in found) >= _SOME * whole or math.isnan(kept):
            yield f"the movement of {first_names(tuple(each.name for each in found))}: {why}"


_FIELDS = (
    Field("tensor", lambda each: each.name, "end", least=16),
    Field("shape", lambda each: " x ".join(map(str, each.shape)), rank=2),
    Field("kept", lambda each: f"{each.moved.kept:.2f}", "figure", lambda each: each.moved.kept, right=True),
    Field("moved", lambda each: percent(each.moved.moved), "figure", lambda each: each.moved.moved, right=True),
    Field(
        "still rows", lambda each: percent(each.moved.still_rows) if each.moved.still_rows else "", right=True, rank=1
    ),
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
        head = f"the {_SHOWN} that keep least, of {len(rows)}" if len(rows) > _SHOWN else ""
        return Grid(_FIELDS, rows, head, rows[:_SHOWN] if self.wrong else [], page="The tensors", order="kept")

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
        each = (f"{first_names((*one.weights,), 2)} in {path}" for path, one in ((before, first), (after, last)))
        merge = "; merge adapters first" if any("lora_" in name for name in (*first.weights, *last.weights)) else ""
        raise HmpxError(f"no tensor has one name in both: {'; '.join(each)}{merge}")
    pairs = {name: (first.weights[names[name]] if name in names else None, now) for name, now in last.weights.items()}
    coded = [name for name, (old, now) in pairs.items() if _is_coded(now) or (old and _is_coded(old))]
    if coded:
        found.not_checked.append(f"weights in 8 bits or fewer ({first_names((*coded,))})")
    reshaped = [name for name, (old, now) in pairs.items() if old and old.shape != now.shape]
    if reshaped:
        found.not_checked.append(f"tensors whose shape has changed ({first_names((*reshaped,))})")
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
    found.findings += [*of_each(found.tensors, is_alone=not after), *(() if last.of_hmpx else of_state(last.state))]
    if after:
        found.kept = kept_of(found.tensors)
        findings, unclear = of_both(found.tensors, found.kept)
        found.findings += findings
        found.not_checked += unclear
        if not math.isnan(found.kept) and not any(each.kind == LOST for each in findings):
            judged = amount(sum(each.count for each in found.tensors if each.tells))
            said = f"{100 * min(found.kept, 1):.0f} % as far as float32 weights would have"
            found.looked.append(f"{judged} weights, in matrices, moved {said}")
    findings, told = of_steps(found.tensors, rate, steps, found.kept)
    found.looked += told
    found.findings += findings
    found.findings.sort(key=lambda each: (not each.wrong, -each.weight))
    return found


def _is_coded(stored: Stored) -> bool:
    """Return whether it holds codes of 8 bits or fewer. A vector of bytes is the state of a generator, or a mask."""
    dtype = stored.dtype
    return dtype.itemsize == 1 and (dtype.is_floating_point or (dtype is not torch.bool and len(stored.shape) > 1))


def _said(path: str, found: Checkpoint) -> str:
    counts: Counter[str] = Counter()
    for each in found.weights.values():
        counts[dtype_name(each.dtype)] += each.shape.numel()
    told = ", ".join(f"{amount(count)} {name}" for name, count in counts.most_common())
    state = {name.rpartition(".")[2] for name, each in found.state.items() if each.shape.numel() > 1}
    masters = sorted(each for each in state if "master" in each or each.startswith("fp32"))
    told += f"; state of an optimizer ({', '.join(sorted(state))})" if state else ""
    told += ", with FP32 master weights" if masters else ""
    return f"{path}: {number(len(found.weights), 'tensor')}, {told}"
