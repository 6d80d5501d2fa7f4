"""What one op shows of a fault: in words, and how far its result is off; None where it shows nothing.

A word is said of numbers. Where a fault is more than the rounding of a result, the op is repeated in FP32 with the
inputs that it had, and its error decides.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any

import torch

from hmpx.base.tensors import dtype_name
from hmpx.insight.notes import Notes, OpCall, Place
from hmpx.insight.places import unchosen as unchosen_dtype
from hmpx.insight.tensors import EXACT_UP_TO, LOW, Tensor, called_in_fp32, sample, ulp

_MANY = 64  # so many integers are not all even by accident
CONSTANTS = frozenset("masked_fill masked_fill_ where fill fill_ full full_like mul add sub _to_copy rsub".split())
_MOST = 1 << 20  # elements of an input that are looked at, at most
_ROWS = 4096  # of angles that are looked at, at most
OFF = 0.29  # the standard deviation of what rounding is off by, in units of a last digit

Shown = tuple[str, float] | None

_SUMS, _FACTORS = ("add", "sub", "rsub"), ("mul", "div", "neg", "_to_copy")


def low(op: OpCall, notes: Notes) -> Shown:
    return ("", measured(op, notes)) if op.given and op.given[0].dtype in LOW and op.out.dtype in LOW else None


def loss(op: OpCall, notes: Notes) -> Shown:
    """A loss function in low precision; `Notes.loss` sees the backward passes that begin with one."""
    return low(op, notes) if op.trains else None


def cumulative(op: OpCall, notes: Notes) -> Shown:
    length = op.out.shape[op.args[1]] if op.out.dim() and len(op.args) > 1 else op.out.numel()
    is_long = length > EXACT_UP_TO.get(op.out.dtype, math.inf)
    return (f"over {length} elements", measured(op, notes)) if is_long else None


def statistic(op: OpCall, notes: Notes) -> Shown:
    """A statistic of each row; the norm of a whole tensor is no part of a model's norm."""
    return low(op, notes) if op.out.dim() else None


def difference(op: OpCall, notes: Notes) -> Shown:
    facts = [notes.facts(each) for each in op.args[:2]]
    if op.out.dtype not in LOW or [each.get("moment") for each in facts] != ["mean of square", "square of mean"]:
        return None
    return "", measured(op, notes) if all(
        "exact" in each and each["exact"]() is not None for each in facts
    ) else math.nan


def measured(op: OpCall, notes: Notes) -> float:
    """Return how far the result of an op is from that of FP32, as a share of this, for a sample of the inputs it had.

    NaN where it cannot be told: an op in place, or one of so large inputs that it is not to be repeated.
    """
    if op.name.endswith("_") or not op.given:
        return math.nan
    rows = None
    if max(each.numel() for each in op.given) > _MOST:  # then the first rows stand for all
        last = [each for each in op.args if isinstance(each, int) and not isinstance(each, bool)][:1]
        if op.out.dim() < 2 or op.out.shape != op.args[0].shape or last not in ([], [-1], [op.out.dim() - 1]):
            return math.nan
        rows = max(_MOST * len(op.out) // op.out.numel(), 1)

    def wide(tensor: Tensor) -> Tensor:
        made = notes.exact(tensor) if tensor.dtype in LOW else tensor.detach()
        return made[:rows] if rows and made.shape == op.out.shape else made

    made = called_in_fp32(op.func, op.args, op.kwargs, wide)
    exact = (made[0] if isinstance(made, tuple | list) else made).double()
    off = (op.out.detach()[:rows] if rows else op.out.detach()).double() - exact
    return float(off.norm() / exact.norm()) if bool(exact.isfinite().all() and off.isfinite().all()) else math.nan


def distances(op: OpCall, notes: Notes) -> Shown:
    """Squared distances as a^2 + b^2 - 2ab: the product's last digit beside those to the nearest neighbours."""
    known = notes.facts(op.out).get("product")
    if known is None or known[0] != 2 or op.out.dim() < 2 or op.out.shape[-1] < 3:
        return None
    rows = op.out.detach().reshape(-1, op.out.shape[-1])[:64].float().abs().sort(-1).values
    near = float(rows[:, 1 : 1 + max(rows.shape[1] // 10, 1)].median())
    off = 0.25 * known[1]  # as much as rounding the product is off by, in the mean
    said = f"they are off by {off:.1g}, the nearest are {near:.1g} apart"
    return (said, off / max(near, 1e-30)) if off > 0.1 * near else None


def probabilities(op: OpCall, notes: Notes) -> Shown:
    """Rounded probabilities: what the gradient of their logits, p - target, loses; all of it at 0 and 1."""
    before = notes.facts(op.given[0]).get("cast")
    was_cast = before is not None and before[0] in LOW
    dtype = before[0] if before is not None and was_cast else op.given[0].dtype
    if dtype not in LOW:
        return None
    p, target = sample(op.given[0]).float(), sample(op.given[1]).float()
    off = torch.where((p == 1) | (p == 0), (p - target).abs(), OFF * ulp(p, dtype)).norm() / (p - target).norm()
    return "of what was cast up to float32 before" if was_cast else "", min(float(off), 1.0)


def positions(op: OpCall, notes: Notes) -> Shown:
    """Numbers that count up by one, as far as low precision can: behind that, neighbours are the same."""
    out = op.out
    if out.dtype not in LOW or out.numel() <= EXACT_UP_TO[out.dtype]:
        return None
    row = (out.reshape(-1, out.shape[-1])[0] if out.shape[-1] > 1 else out.reshape(-1)).double()
    steps, least = row.diff(), EXACT_UP_TO[out.dtype]
    exact = row[1:] < least
    if not exact.any() or bool((steps[exact] != 1).any()) or bool((steps < 0).any()) or not bool((steps == 0).any()):
        return None
    return f"{int((steps == 0).sum())} of {row.numel()} up to {float(row[-1]):.0f} are the same as the one before", 1.0


def angles(op: OpCall, notes: Notes) -> Shown:
    """Angles so large that the next number of their dtype is more than a radian away.

    Whole numbers that the dtype can hold are not rounded: a column of these may be positions themselves.
    """
    angles = op.given[0]
    if angles.dtype not in LOW or angles.numel() < 2:
        return None
    rows = angles.detach().reshape(-1, angles.shape[-1] if angles.dim() > 1 else 1).float()
    rows = rows[:: max(len(rows) // _ROWS, 1)]
    rounded = ((rows != rows.round()) | (rows.abs() > EXACT_UP_TO[angles.dtype])).any(0)
    if not bool(rounded.any()) or not bool(rows.isfinite().all()):
        return None
    rows = rows[:, rounded]
    column = rows[:, rows.abs().amax(0).argmax()]
    largest, off = float(column.abs().max()), OFF * ulp(column, angles.dtype).square().mean().sqrt() / 0.5**0.5
    apart = largest * torch.finfo(angles.dtype).eps
    said = f"up to {largest:.0f}, where its numbers are {apart:.1g} apart"
    return (said, min(float(off), 1.0)) if apart > (0.5 if largest > 256 else 1) else None


def indices(op: OpCall, notes: Notes) -> Shown:
    """Integers made of numbers in low precision: above 256, every other one never occurs in BF16."""
    given = op.given[0]
    if given.numel() < 2:
        return None
    above = given[given.abs() > EXACT_UP_TO.get(given.dtype, EXACT_UP_TO[torch.bfloat16])]
    if given.dtype not in LOW and (above.numel() < _MANY or bool((above != 2 * (above / 2).round()).any())):
        return None
    said = "up to {:.0f}, of which every other one or more never occurs"
    return (said.format(float(above.abs().max())), 1.0) if above.numel() else None


def overflow(op: OpCall, notes: Notes) -> Shown:
    """A constant that hides what it is written to: it is finite as it is written, and -inf in low precision.

    A product or a sum that becomes too large is none: its numbers differ, or are finite by themselves.
    """
    if op.name not in CONSTANTS or op.out.dtype not in LOW or op.nonfinite is None:
        return None
    numbers = [*op.scalars, *(float(least) for each in op.given if each.numel() for least in each.aminmax())]
    if not all(map(math.isfinite, numbers)) or not bool((op.out[~op.out.isfinite()] == -math.inf).all()):
        return None
    least, bound = min(numbers), -torch.finfo(op.out.dtype).max
    alone = [each for each in op.given if each.numel() == 1 or op.name in ("_to_copy", "where")]
    of_one = any(bool((each[each <= bound] == least).all()) for each in alone if float(each.min()) == least)
    is_constant = (min([0.0, *op.scalars]) == least or of_one) and least <= bound
    return (f"{least:.4g} in {dtype_name(op.out.dtype)}", 1.0) if is_constant else None


def unchosen(op: OpCall, notes: Notes) -> Shown:
    """A dtype that nobody chose, in the words of `record`, if a parameter or a buffer is the cause."""
    if op.out.dtype is not torch.float32 or len(op.given) < 2:
        return None
    said = unchosen_dtype(notes.names, op.frame, op.given, op.results)
    is_held = "parameter " in said or "buffer " in said  # others may be FP32 on purpose: angles, scores
    return (said, 0.0) if is_held else None


def hand_on(op: OpCall, notes: Notes) -> None:
    """Note what the evidence in a later op rests on."""
    if not op.results:
        return
    if moment := _moment(op, notes.facts(op.given[0]).get("moment", "") if op.given else ""):
        notes.add(op.out, moment=moment, exact=_later(op, notes))
    if (product := _product(op, notes)) is not None:
        notes.add(op.out, product=product)
    elif squares := _squares(op, notes):
        notes.add(op.out, squares=squares)
    if (rounded := _rounded(op, notes)) is not None:
        few = op.out.numel() <= _MOST and (exact := _later(op, notes)()) is not None
        notes.add(op.out, rounded=rounded, **({"exact": lambda: exact} if few else {}))
    elif op.name == "_to_copy" and op.out.dtype in LOW and op.given and op.given[0].dtype is torch.float32:
        notes.add(op.out, exact=weakref.ref(op.given[0]))


def _later(op: OpCall, notes: Notes) -> Callable[[], Tensor | None]:
    """Return a function that repeats an op in FP32, and returns None if a tensor that it reads is gone."""

    def source(value: Any) -> Any:
        if isinstance(value, Tensor):
            return notes.facts(value).get("exact", weakref.ref(value))
        return torch.float32 if isinstance(value, torch.dtype) and value in LOW else value

    func, args, kwargs = op.func, [*map(source, op.args)], {key: source(value) for key, value in op.kwargs.items()}

    def again() -> Tensor | None:
        given = [each() if callable(each) else each for each in args]
        if any(each is None and callable(made) for each, made in zip(given, args, strict=True)):
            return None
        return func(*(each.detach().float() if isinstance(each, Tensor) else each for each in given), **kwargs)

    return again


def _moment(op: OpCall, before: str) -> str:
    """Return what an op makes of a moment: "square", "mean", "mean of square", "square of mean", or "" for none."""
    if op.name in ("mean", "sum") and before == "square":
        return "mean of square"
    if op.name == "mean" or (op.name == "sum" and not before):
        return "mean"
    if op.name == "div":
        return "" if before == "square of mean" else before
    squares = op.name == "square" or (op.name == "mul" and op.args[0] is op.args[1])
    if squares or (op.name == "pow" and isinstance(op.args[1], int | float) and op.args[1] == 2):
        return "square of mean" if before == "mean" else "square"
    return ""


def _product(op: OpCall, notes: Notes) -> tuple[int, float] | None:
    """Return how many squares were added to a product in low precision, and its last digit; None for anything else."""
    if op.name in ("mm", "bmm", "addmm", "baddbmm"):
        digit = torch.finfo(op.out.dtype).eps * float(op.out.float().square().mean().sqrt())
        return (_squares(op, notes), digit) if op.out.dtype in LOW else None
    known = [notes.facts(each).get("product") for each in op.given[:2]]
    which = next((each for each in known if each is not None), None)
    if which is None or op.name.rstrip("_") in _FACTORS:
        factor = abs(op.scalars[0]) if op.name.startswith(("mul", "div")) and op.scalars else 1.0
        factor = 1 / factor if op.name.startswith("div") and factor else factor
        return which and (which[0], which[1] * factor)
    squares = _squares(op, notes)
    return (which[0] + squares, which[1]) if squares and op.name.rstrip("_") in _SUMS else None


def _squares(op: OpCall, notes: Notes) -> int:
    """Return how many sums of squares an op adds up: a^2 + b^2 are two, in any order beside a product."""
    name = op.name.rstrip("_")
    terms = (
        2 if name in _SUMS else 1 if name in ("addmm", "baddbmm") or (name in _FACTORS and len(op.given) == 1) else 0
    )
    facts = [notes.facts(each) for each in op.given[:terms]]
    return sum(each.get("squares", int(each.get("moment") == "mean of square")) for each in facts)


def _rounded(op: OpCall, notes: Notes) -> tuple[str, Place] | None:
    """Return the op that has made probabilities in low precision, of which this makes others, and its place.

    There .999 is 1, and the logarithm of 1 - p is -inf.
    """
    if op.name in ("sigmoid", "_softmax"):
        return (op.name.strip("_"), notes.place(op.frame)) if op.out.dtype in LOW else None
    known = (notes.facts(each).get("rounded") for each in op.given[:2])
    return next(filter(None, known), None) if op.name in ("rsub", "sub", "add", "mul", "clamp", "_to_copy") else None
