"""What one op shows of a fault: in words, "" where the op alone does; None where it shows nothing."""

from __future__ import annotations

import math

import torch

from hmpx.base.dtype_names import dtype_name
from hmpx.insight.capture.notes import Notes, OpCall, Place
from hmpx.insight.places import unchosen as unchosen_dtype
from hmpx.insight.tensors import EXACT_UP_TO, LOW, is_finite

_MANY = 64  # so many integers are not all even by accident
_HUGE = 1e4  # a larger constant stands for infinity
CONSTANTS = frozenset("masked_fill masked_fill_ where fill fill_ full full_like mul add sub _to_copy rsub".split())

_SUMS, _FACTORS = ("add", "sub", "rsub"), ("mul", "div", "neg", "_to_copy")


def low(op: OpCall, notes: Notes) -> str | None:
    return "" if op.given and op.given[0].dtype in LOW and op.out.dtype in LOW else None


def loss(op: OpCall, notes: Notes) -> str | None:
    """A loss function in low precision; `Notes.loss` sees the backward passes that begin with one."""
    return low(op, notes) if op.trains else None


def cumulative(op: OpCall, notes: Notes) -> str | None:
    length = op.out.shape[op.args[1]] if op.out.dim() and len(op.args) > 1 else op.out.numel()
    return f"over {length} elements" if length > EXACT_UP_TO.get(op.out.dtype, math.inf) else None


def statistic(op: OpCall, notes: Notes) -> str | None:
    """A statistic of each row; the norm of a whole tensor is no part of a model's norm."""
    return low(op, notes) if op.out.dim() else None


def difference(op: OpCall, notes: Notes) -> str | None:
    moments = [notes.facts(each).get("moment") for each in op.args[:2]]
    return "" if op.out.dtype in LOW and moments == ["mean of square", "square of mean"] else None


def distances(op: OpCall, notes: Notes) -> str | None:
    """Squared distances as a^2 + b^2 - 2ab: the product's last digit beside those to the nearest neighbours."""
    known = notes.facts(op.out).get("product")
    if known is None or known[0] != 2 or op.out.dim() < 2 or op.out.shape[-1] < 3:
        return None
    rows = op.out.detach().reshape(-1, op.out.shape[-1])[:64].float().abs().sort(-1).values
    near = float(rows[:, 1 : 1 + max(rows.shape[1] // 10, 1)].median())
    off = 0.25 * torch.finfo(torch.bfloat16).eps * known[1]  # as much as rounding the product is off by, in the mean
    return f"they are off by {off:.1g}, the nearest are {near:.1g} apart" if off > 0.1 * near else None


def probabilities(op: OpCall, notes: Notes) -> str | None:
    before = notes.facts(op.given[0]).get("cast")
    return "of what was cast up to float32 before" if before is not None and before[0] in LOW else low(op, notes)


def positions(op: OpCall, notes: Notes) -> str | None:
    """Numbers that count up by one, as far as low precision can: behind that, neighbours are the same."""
    out = op.out
    if out.dtype not in LOW or out.numel() <= EXACT_UP_TO[out.dtype]:
        return None
    row = (out.reshape(-1, out.shape[-1])[0] if out.shape[-1] > 1 else out.reshape(-1)).double()
    steps, least = row.diff(), EXACT_UP_TO[out.dtype]
    exact = row[1:] < least
    if not exact.any() or bool((steps[exact] != 1).any()) or bool((steps < 0).any()) or not bool((steps == 0).any()):
        return None
    return f"{int((steps == 0).sum())} of {row.numel()} up to {float(row[-1]):.0f} are the same as the one before"


def angles(op: OpCall, notes: Notes) -> str | None:
    """Angles so large that the next number of their dtype is more than half a radian away."""
    angles = op.given[0]
    largest = float(angles.abs().max()) if angles.dtype in LOW and angles.numel() > 1 else 0.0
    least = 256  # where BF16 numbers are 2 apart
    if not least < largest < math.inf:
        return None
    apart = largest * torch.finfo(angles.dtype).eps
    return f"up to {largest:.0f}, where its numbers are {apart:.1g} apart" if apart > 0.5 else None


def indices(op: OpCall, notes: Notes) -> str | None:
    """Integers made of numbers in low precision: above 256, every other one never occurs in BF16."""
    given = op.given[0]
    if given.numel() < 2:
        return None
    above = given[given.abs() > EXACT_UP_TO.get(given.dtype, EXACT_UP_TO[torch.bfloat16])]
    if given.dtype not in LOW and (above.numel() < _MANY or bool((above != 2 * (above / 2).round()).any())):
        return None
    return (
        f"up to {float(above.abs().max()):.0f}, of which every other one or more never occurs"
        if above.numel()
        else None
    )


def overflow(op: OpCall, notes: Notes) -> str | None:
    """A constant that is finite as it is written, and inf in low precision."""
    if op.name not in CONSTANTS or op.out.dtype not in LOW or op.nonfinite is None or op.nonfinite.isnan().any():
        return None
    if not all(map(math.isfinite, op.scalars)) or not all(is_finite(each) for each in op.given if each.numel()):
        return None
    largest = max([0.0, *map(abs, op.scalars), *(float(t.abs().max()) for t in op.given if t.numel())])
    return f"{largest:.4g} in {dtype_name(op.out.dtype)}" if largest >= _HUGE else None


def unchosen(op: OpCall, notes: Notes) -> str | None:
    """A dtype that nobody chose, in the words of `record`, if a parameter or a buffer is the cause."""
    if op.out.dtype is not torch.float32 or len(op.given) < 2:
        return None
    said = unchosen_dtype(notes.names, op.frame, op.given, op.results)
    return said if "parameter " in said or "buffer " in said else None  # others may be FP32 on purpose: angles, scores


def hand_on(op: OpCall, notes: Notes) -> None:
    """Note what the evidence in a later op rests on."""
    if not op.results:
        return
    if moment := _moment(op, notes.facts(op.given[0]).get("moment", "") if op.given else ""):
        notes.add(op.out, moment=moment)
    if (product := _product(op, notes)) is not None:
        notes.add(op.out, product=product)
    elif squares := _squares(op, notes):
        notes.add(op.out, squares=squares)
    if (rounded := _rounded(op, notes)) is not None:
        notes.add(op.out, rounded=rounded)


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
    """Return how many squares were added to a product in low precision, and its size; None for anything else."""
    if op.name in ("mm", "bmm", "addmm", "baddbmm"):
        squares = _squares(op, notes)
        return (squares, float(op.out.float().square().mean().sqrt())) if op.out.dtype in LOW else None
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
