"""The table of what may be wrong with a single op: what shows it, what is said of it, and which recipe mends it."""

from __future__ import annotations

import linecache
import math
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from hmpx.base.dtype_names import dtype_name
from hmpx.insight.capture.dispatch import OpLook
from hmpx.insight.capture.places import BACKWARD, Notes, OpCall, Place, Spot
from hmpx.insight.finding import Names, Problem, some
from hmpx.insight.looks.products import MATMULS
from hmpx.insight.module_names import MIXING, unchosen
from hmpx.insight.report import number, short_places
from hmpx.insight.tensors import EXACT_UP_TO, LOW, is_finite
from hmpx.ops.policies.catalog import canonical, catalog
from hmpx.ops.wrapping.callers import rule_of

_MANY = 64  # if so many integers are all even, that is no accident
_HUGE = 1e4  # a larger constant was meant to be out of reach
_CASTS = ("_to_copy", "arange")  # ops by which the program itself chooses a dtype
# A dtype that is a tensor's or a variable's: dtype=x.dtype, .to(dtype); not torch.bfloat16, not self.table.dtype.
_FOLLOWS_A_TENSOR = re.compile(r"(?<![\w.])(?!torch\b)\w+\.dtype\b|\btype_as\(|[(=,]\s*dtype\s*[,)]")
_IN_FP32 = "compute it in float32 (x.float())"


class Check(NamedTuple):
    """One row of the table: `kind`, `wrong`, `said`, `do` and `weight` of a `Problem`, and what shows it.

    Attributes:
        ops: names at torch's dispatcher.
        evidence: what shows it in one op, in words; "" if the op alone does. None if nothing is wrong.
        mended: which keys of a recipe mend it. "list", "place": the ops run in FP32 in these modules; if a rule cannot
            say so, "list" puts them into the fp32 list. "module": everything in these modules runs in FP32. For a line
            in no module, or in the outermost one, all act as "list". "": none.
        also: more ops that then go to the fp32 list, and the op with them.
    """

    kind: str
    wrong: bool
    said: str
    do: str
    weight: float
    ops: Collection[str]
    evidence: Callable[[OpCall, Notes], str | None]
    mended: str = ""
    also: tuple[str, ...] = ()


def _low(op: OpCall, notes: Notes) -> str | None:
    return "" if op.given and op.given[0].dtype in LOW and op.out.dtype in LOW else None


def _loss(op: OpCall, notes: Notes) -> str | None:
    """A loss function in low precision; `Notes.loss` sees the backward passes that begin with one."""
    return _low(op, notes) if any(each.requires_grad for each in op.given) else None


def _cumulative(op: OpCall, notes: Notes) -> str | None:
    length = op.out.shape[op.args[1]] if op.out.dim() and len(op.args) > 1 else op.out.numel()
    return f"over {length} elements" if length > EXACT_UP_TO.get(op.out.dtype, math.inf) else None


def _statistic(op: OpCall, notes: Notes) -> str | None:
    """A statistic of each row; the norm of a whole tensor is no part of a model's norm."""
    return _low(op, notes) if op.out.dim() else None


def _difference(op: OpCall, notes: Notes) -> str | None:
    moments = [notes.facts(each).get("moment") for each in op.args[:2]]
    return "" if op.out.dtype in LOW and moments == ["mean of square", "square of mean"] else None


def _distances(op: OpCall, notes: Notes) -> str | None:
    """Squared distances as a^2 + b^2 - 2ab: the product's last digit beside those to the nearest neighbours."""
    known = _product(op, notes)
    if known is None or known[0] != 2 or op.out.dim() < 2 or op.out.shape[-1] < 3:
        return None
    rows = op.out.detach().reshape(-1, op.out.shape[-1])[:64].float().abs().sort(-1).values
    near = float(rows[:, 1 : 1 + max(rows.shape[1] // 10, 1)].median())
    off = 0.25 * torch.finfo(torch.bfloat16).eps * known[1]  # as much as rounding the product is off by, in the mean
    return f"they are off by {off:.1g}, the nearest are {near:.1g} apart" if off > 0.1 * near else None


def _product(op: OpCall, notes: Notes) -> tuple[int, float] | None:
    """Return how many squares were added to a product in low precision, and its size; None for anything else."""
    if op.name in ("mm", "bmm", "addmm", "baddbmm"):
        return (0, float(op.out.float().square().mean().sqrt())) if op.out.dtype in LOW else None
    known = [notes.facts(each).get("product") for each in op.given[:2]]
    which = next((each for each in known if each is not None), None)
    if which is None or op.name in ("mul", "neg", "_to_copy"):
        factor = abs(op.scalars[0]) if op.name == "mul" and op.scalars else 1.0
        return which and (which[0], which[1] * factor)
    squares = _squares(op, notes)
    return (which[0] + squares, which[1]) if squares and op.name in ("add", "sub", "rsub") else None


def _squares(op: OpCall, notes: Notes) -> int:
    """Return how many sums of squares an op adds up: a^2 + b^2 are two, in any order beside a product."""
    facts = [notes.facts(each) for each in op.given[:2]] if op.name in ("add", "sub", "rsub") else []
    return sum(each.get("squares", int(each.get("moment") == "mean of square")) for each in facts)


def _probabilities(op: OpCall, notes: Notes) -> str | None:
    before = notes.facts(op.given[0]).get("cast")
    return "of what was cast up to float32 before" if before is not None and before[0] in LOW else _low(op, notes)


def _rounded(op: OpCall, notes: Notes) -> tuple[str, Place] | None:
    """Return the op that has made probabilities in low precision, of which this makes others, and its place.

    There .999 is 1, and the logarithm of 1 - p is -inf.
    """
    if op.name in ("sigmoid", "_softmax"):
        return (op.name.strip("_"), notes.place(op.frame)) if op.out.dtype in LOW else None
    known = (notes.facts(each).get("rounded") for each in op.given[:2])
    return next(filter(None, known), None) if op.name in ("rsub", "sub", "add", "mul", "clamp", "_to_copy") else None


def _positions(op: OpCall, notes: Notes) -> str | None:
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


def _angles(op: OpCall, notes: Notes) -> str | None:
    """Angles so large that the next number of their dtype is more than half a radian away."""
    angles = op.given[0]
    largest = float(angles.abs().max()) if angles.dtype in LOW and angles.numel() > 1 else 0.0
    least = 256  # where BF16 numbers are 2 apart
    if not least < largest < math.inf:
        return None
    apart = largest * torch.finfo(angles.dtype).eps
    return f"up to {largest:.0f}, where its numbers are {apart:.1g} apart" if apart > 0.5 else None


def _indices(op: OpCall, notes: Notes) -> str | None:
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
    if op.name not in _CONSTANTS or op.out.dtype not in LOW or op.nonfinite is None or op.nonfinite.isnan().any():
        return None
    if not all(map(math.isfinite, op.scalars)) or not all(is_finite(each) for each in op.given if each.numel()):
        return None
    largest = max([0.0, *map(abs, op.scalars), *(float(t.abs().max()) for t in op.given if t.numel())])
    return f"{largest:.4g} in {dtype_name(op.out.dtype)}" if largest >= _HUGE else None


def _unchosen(op: OpCall, notes: Notes) -> str | None:
    """A dtype that nobody chose, in the words of `record`, if a parameter or a buffer is the cause."""
    if op.out.dtype is not torch.float32 or len(op.given) < 2:
        return None
    said = unchosen(notes.names, op.frame, op.given, op.results)
    return said if "parameter " in said or "buffer " in said else None  # others may be FP32 on purpose: angles, scores


_LOSSES = "_log_softmax nll_loss_forward nll_loss2d_forward mse_loss smooth_l1_loss huber_loss soft_margin_loss "
_LOSSES += "binary_cross_entropy_with_logits _ctc_loss kl_div multi_margin_loss"
_CONSTANTS = frozenset("masked_fill masked_fill_ where fill fill_ full full_like mul add sub _to_copy rsub".split())
_MOMENTS = ("mean", "mul", "pow", "square", "sub")
CHECKS = [
    Check(
        "loss", True, "the loss is computed in low precision, with 3 significant digits or less",
        _IN_FP32, 0.6, _LOSSES.split(), _loss, "list", ("cross_entropy",),
    ),
    Check(
        "log", True, "logarithms in low precision, with 3 significant digits or less",
        _IN_FP32, 0.35, ("log", "log2", "log10", "log1p", "logsumexp"), _low, "list",
    ),
    Check("softmax", False, "softmax of inputs in low precision", _IN_FP32, 0.1, ("_softmax",), _low, "list"),
    Check(
        "cumulative sum", True, "a cumulative sum in low precision: the last elements add nothing to it",
        _IN_FP32, 0.5, ("cumsum", "cumprod", "logcumsumexp"), _cumulative, "list",
    ),
    Check(
        "norm statistics", False, "a norm's statistics in low precision",
        _IN_FP32, 0.15, ("rsqrt", "var", "std", "var_mean", "std_mean"), _statistic, "module",
    ),
    Check(
        "variance by difference", True,
        "a variance is the difference of a mean of squares and a squared mean in low precision: its digits cancel",
        "x.float().var()", 0.55, ("sub",), _difference, "module", _MOMENTS,
    ),
    Check(
        "distances", True, "distances are differences of large numbers, and the product was in low precision",
        "torch.cdist, or the product in float32 outside of autocast", 0.5, ("add", "sub", "rsub"), _distances,
    ),
    Check(
        "BCE", True,
        "binary_cross_entropy takes probabilities that were rounded to low precision: .999 becomes 1, the gradient 0",
        "binary_cross_entropy_with_logits", 0.6, ("binary_cross_entropy",), _probabilities, "list", ("sigmoid",),
    ),
    Check(
        "integers", True, "positions or indices in low precision",
        "keep positions in an integer dtype or float32, outside of autocast, until they are embedded",
        0.65, (*_CASTS, "range", "linspace", "lift_fresh", "copy_"), _positions, "place",
    ),
    Check(
        "angles", True, "sine or cosine of angles in low precision",
        "multiply positions and frequencies in float32, and cast the result of sin and cos", 0.66, ("sin", "cos"),
        _angles,
    ),
    Check(
        "indices", True, "integers are made of numbers in low precision",
        "draw and multiply them in float32 or as integers: torch.randint, x.float()", 0.66, ("_to_copy",), _indices,
    ),
    Check(
        "mask", True, "a finite mask value becomes -inf in low precision, and a wholly masked row becomes NaN",
        "torch.finfo(x.dtype).min of the dtype that is masked, or a mask of bools", 0.4, _CONSTANTS, overflow, "place",
    ),
    Check(
        "dtype", False, "an op runs in a dtype that nobody chose",
        "cast the parameter or buffer where it is used, or keep it in the dtype that it meets",
        0.2, MIXING, _unchosen,
    ),
]  # fmt: skip


LISTED = frozenset(check.kind for check in CHECKS if check.mended == "list")
_OF_SETUP = ("integers", "angles")  # tables that the model is made with
_CHECKS_OF = {name: [check for check in CHECKS if name in check.ops] for each in CHECKS for name in each.ops}


def look_at_op(notes: Notes, op: OpCall) -> None:
    """Look at one op of the forward pass by the table; while the model is made, by the rows `_OF_SETUP` alone."""
    is_index = not op.results and op.name == "_to_copy" and op.kwargs.get("dtype") is not torch.bool
    if op.before is not None or not (op.results or is_index):
        return
    if op.results and (moment := _moment(op, notes.facts(op.given[0]).get("moment", "") if op.given else "")):
        notes.add(op.out, moment=moment)
    if op.results and (product := _product(op, notes)) is not None:
        notes.add(op.out, product=product)
    elif op.results and (squares := _squares(op, notes)):
        notes.add(op.out, squares=squares)
    if op.results and (rounded := _rounded(op, notes)) is not None:
        notes.add(op.out, rounded=rounded)
    if op.results and any(notes.facts(each).get("mended") for each in op.given):
        notes.add(op.out, mended=True)
        if op.name in MATMULS:
            notes.note("product of mended", op)
    for check in _CHECKS_OF.get(op.name, ()):
        if is_index != (check.evidence is _indices) or (op.stage != "forward" and check.kind not in _OF_SETUP):
            continue
        said = check.evidence(op, notes)
        if said is not None and not op.is_beside:
            spot = notes.note(check.kind, op, said)
            spot.made_by |= {made} if op.given and (made := notes.facts(op.given[0]).get("rounded")) else set()
            if check.mended and spot.calls == 1:
                spot.mended_by = _mended_by(check, notes, op, spot)
            if spot.mended_by and op.results:
                notes.add(op.out, mended=True)


def of_ops(notes: Notes, names: Names) -> Iterator[Problem]:
    for check in CHECKS:
        if spots := notes.spots(check.kind):
            yield _problem(check, spots)


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


def _mended_by(check: Check, notes: Notes, op: OpCall, spot: Spot) -> str:
    """Return what puts the op at this line into FP32: the name of an op in the fp32 list, "module", or "" for nothing.

    A cast that hmpx makes is for a listed op: the answer is this op. No recipe changes a cast that the program makes,
    unless this cast follows the dtype of a module's argument: a rule for the module casts the argument.
    """
    if check.mended == "module" and spot.place.is_inside:
        return "module"
    if check.evidence is _probabilities and notes.facts(op.given[0]).get("cast") is not None:
        return ""  # the program itself has rounded the probabilities
    if op.name not in _CASTS:
        return "" if op.name.endswith("_") else spot.name  # what an op in place writes to keeps its dtype
    for frame in op.inner_frames():
        if rule_of(frame) is not None:
            original: Any = frame.f_locals.get("_original", frame.f_locals.get("original"))
            return canonical(getattr(original, "__name__", ""))
    path, _, line = spot.place.where.rpartition(":")
    written = linecache.getlines(path)[int(line) - 1 :] if path else []
    text = ""
    while written and (not text or text.count("(") > text.count(")")):  # a call may take several lines
        text += written.pop(0)
    return "module" if spot.place.is_inside and _FOLLOWS_A_TENSOR.search(text) else ""


def _problem(check: Check, spots: Sequence[Spot]) -> Problem:
    """Return one problem for all lines of a kind."""
    named = [spot for spot in spots if spot.op != BACKWARD]
    spots = named or spots
    ops = tuple(dict.fromkeys(spot.name for spot in named))
    lines = tuple(dict.fromkeys(short_places(spot.where) for spot in spots))
    details = [f"{', '.join(ops)}, {number(sum(spot.calls for spot in spots), 'call')}" if ops else ""]
    details += [next((spot.said for spot in spots if spot.said), "")]
    makers = sorted({name for spot in spots for name, _ in spot.made_by})
    details += [f"of what {' and '.join(makers)} has rounded to low precision before" if makers else ""]
    details += [spots[0].place.within.removeprefix(", ")]
    details += [f"also at {some(lines[1:], 2)}" if len(lines) > 1 else ""]
    told = "; ".join(filter(None, details))
    said = f"{check.said} ({told})" if told else check.said
    modules = tuple(dict.fromkeys(spot.module for spot in spots if spot.module))
    recipe, edit = _keys(check, named)
    too = f", and the {' and '.join(makers)} that it is of" if makers else ""
    do = spots[0].advice(check.do + too)
    return Problem(check.kind, check.wrong, said, do, spots[0].where, modules, ops, check.weight, recipe, edit)


def _keys(check: Check, spots: Sequence[Spot]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the keys of a recipe that mend what was found, and the lines that they do not mend."""
    listed: set[str] = set()
    rules: dict[str, Any] = {}
    left: dict[str, None] = {}
    for spot in spots if check.mended else ():
        op = catalog().get(spot.mended_by)
        if spot.mended_by == "module":
            rules[spot.module] = "float32"
        elif op is None or not op.computes:
            left[spot.where] = None
        else:
            listed |= {*check.also}
            for name, place in {(op.name, spot.place), *spot.made_by}:
                if check.also or not place.is_inside:
                    listed.add(name)
                elif (rule := rules.setdefault(place.module, {"fp32": []})) != "float32":
                    rule["fp32"] = sorted({*rule["fp32"], name})
    found: dict[str, Any] = {"fp32": sorted(listed), "modules": rules}
    keys = {key: value for key, value in found.items() if value}
    return keys, tuple(left) if keys else ()


OPS = OpLook(look_at_op, of_ops, "set up", "forward")
