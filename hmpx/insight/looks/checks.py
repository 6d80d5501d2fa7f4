"""What may be wrong with a single op: what shows it, the table, what is said of it, and which recipe fixes it.

A word is said of numbers. Where a fault is more than the rounding of a result, the op is repeated in FP32 with the
inputs that it had, and its error decides.
"""

from __future__ import annotations

import linecache
import math
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from hmpx.base.tensors import dtype_name
from hmpx.base.torch_private import private
from hmpx.insight.dispatch import OpLook
from hmpx.insight.finding import MIXING, Finding, Names, first_names, percent, short_places
from hmpx.insight.finding import unchosen as unchosen_dtype
from hmpx.insight.looks.dtypes import MATMULS, OFF, SAMPLED, hand_on
from hmpx.insight.notes import BACKWARD, NotedSite, Notes, OpCall
from hmpx.insight.report import number
from hmpx.insight.tensors import EXACT_UP_TO, LOW, Tensor, called_in_fp32, sample, ulp
from hmpx.ops.policies.catalog import canonical, catalog
from hmpx.ops.wrapping.callers import rule_of, users_frame

# What one op shows of a fault: in words, and how far its result is off; None where it shows nothing

Shown = tuple[str, float] | None
_MANY = 64  # so many integers are not all even by accident
_ROWS = 4096  # of angles that are looked at, at most
_CONSTANTS = frozenset("masked_fill masked_fill_ where fill fill_ full full_like mul add sub _to_copy rsub".split())


def overflow(op: OpCall, notes: Notes) -> Shown:
    """A constant that hides what it is written to: it is finite as it is written, and -inf in low precision.

    A product or a sum that becomes too large is none: its numbers differ, or are finite by themselves.
    """
    if op.name not in _CONSTANTS or op.out.dtype not in LOW or op.nonfinite is None:
        return None
    numbers = [*op.scalars, *(float(least) for each in op.given if each.numel() for least in each.aminmax())]
    if not all(map(math.isfinite, numbers)) or not bool((op.out[~op.out.isfinite()] == -math.inf).all()):
        return None
    least, bound = min(numbers), -torch.finfo(op.out.dtype).max
    alone = [each for each in op.given if each.numel() == 1 or op.name in ("_to_copy", "where")]
    of_one = any(bool((each[each <= bound] == least).all()) for each in alone if float(each.min()) == least)
    is_constant = (min([0.0, *op.scalars]) == least or of_one) and least <= bound
    return (f"{least:.4g} in {dtype_name(op.out.dtype)}", 1.0) if is_constant else None


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
    if max(each.numel() for each in op.given) > SAMPLED:  # then the first rows stand for all
        last = [each for each in op.args if isinstance(each, int) and not isinstance(each, bool)][:1]
        if op.out.dim() < 2 or op.out.shape != op.args[0].shape or last not in ([], [-1], [op.out.dim() - 1]):
            return math.nan
        rows = max(SAMPLED * len(op.out) // op.out.numel(), 1)

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


def unchosen(op: OpCall, notes: Notes) -> Shown:
    """A dtype that nobody chose, in the words of `record`, if a parameter or a buffer is the cause."""
    if op.out.dtype is not torch.float32 or len(op.given) < 2:
        return None
    said = unchosen_dtype(notes.names, op.frame, op.given, op.results)
    is_held = "parameter " in said or "buffer " in said  # others may be FP32 on purpose: angles, scores
    return (said, 0.0) if is_held else None


# The table

_CASTS = ("_to_copy", "arange")  # ops by which the program itself chooses a dtype
# A dtype that is a tensor's or a variable's: dtype=x.dtype, .to(dtype); not torch.bfloat16, not self.table.dtype.
_FOLLOWS_A_TENSOR = re.compile(r"(?<![\w.])(?!torch\b)\w+\.dtype\b|\btype_as\(|[(=,]\s*dtype\s*[,)]")
_OpOverload = private("torch._ops.OpOverload")
LIMIT = 0.02  # of a result: what is off by less harms no training (README of insight)
_IN_FP32 = "compute it in float32 (x.float())"


class Check(NamedTuple):
    """One row of the table: `kind`, `said`, `do` and `weight` of a `Finding`, and what shows it.

    Attributes:
        wrong: whether it harms a training, where a gradient depends on a result that is off by `LIMIT` or more.
        ops: names at torch's dispatcher.
        evidence: what shows it in one op, in words, and how far the result is off. None if nothing is wrong.
        fix: which keys of a recipe fix it. "list", "place": the ops run in FP32 in these modules; if a rule cannot
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
    evidence: Callable[[OpCall, Notes], Shown]
    fix: str = ""
    also: tuple[str, ...] = ()


_LOSSES = "_log_softmax nll_loss_forward nll_loss2d_forward mse_loss smooth_l1_loss huber_loss soft_margin_loss "
_LOSSES += "binary_cross_entropy_with_logits _ctc_loss kl_div multi_margin_loss"
_MOMENTS = ("mean", "mul", "pow", "square", "sub")
CHECKS = [
    Check(
        "loss", True, "the loss is computed in low precision, with 3 significant digits or less",
        _IN_FP32, 0.6, _LOSSES.split(), loss, "list", ("cross_entropy",),
    ),
    Check(
        "log", True, "logarithms in low precision, with 3 significant digits or less",
        _IN_FP32, 0.35, ("log", "log2", "log10", "log1p", "logsumexp"), low, "list",
    ),
    Check("softmax", False, "softmax of inputs in low precision", _IN_FP32, 0.1, ("_softmax",), low, "list"),
    Check(
        "cumulative sum", True, "a cumulative sum in low precision",
        _IN_FP32, 0.5, ("cumsum", "cumprod", "logcumsumexp"), cumulative, "list",
    ),
    Check(
        "norm statistics", False, "a norm's statistics in low precision",
        _IN_FP32, 0.15, ("rsqrt", "var", "std", "var_mean", "std_mean"), statistic, "module",
    ),
    Check(
        "variance by difference", True,
        "a variance is the difference of a mean of squares and a squared mean in low precision",
        "x.float().var(correction=0)", 0.55, ("sub",), difference, "module", _MOMENTS,
    ),
    Check(
        "distances", True, "distances are differences of large numbers, and the product was in low precision",
        "take the squares and the product in float32 (x.float()), outside of autocast", 0.5,
        ("add", "sub", "rsub", "add_", "sub_", "addmm", "addmm_", "baddbmm", "baddbmm_"), distances,
    ),
    Check(
        "BCE", True,
        "binary_cross_entropy takes probabilities that were rounded to low precision",
        "binary_cross_entropy_with_logits", 0.6, ("binary_cross_entropy",), probabilities,
        "list", ("sigmoid",),
    ),
    Check(
        "integers", True, "positions or indices in low precision",
        "keep positions in an integer dtype or float32, outside of autocast, until they are embedded",
        0.65, (*_CASTS, "range", "linspace", "lift_fresh", "copy_"), positions, "place",
    ),
    Check(
        "angles", True, "sine or cosine of angles in low precision",
        "multiply positions and frequencies in float32, and cast the result of sin and cos", 0.66, ("sin", "cos"),
        angles,
    ),
    Check(
        "indices", True, "integers are made of numbers in low precision",
        "draw and multiply them in float32 or as integers: torch.randint, x.float()", 0.66, ("_to_copy",),
        indices,
    ),
    Check(
        "mask", True, "a finite mask value becomes -inf in low precision, and a wholly masked row becomes NaN",
        "torch.finfo(x.dtype).min of the dtype that is masked, or a mask of bools", 0.4, _CONSTANTS,
        overflow, "place",
    ),
    Check(
        "dtype", False, "an op runs in a dtype that nobody chose",
        "cast the parameter or buffer where it is used, or keep it in the dtype that it meets",
        0.2, MIXING, unchosen,
    ),
]  # fmt: skip


LISTED = frozenset(check.kind for check in CHECKS if check.fix == "list")
_OF_SETUP = ("integers", "angles")  # tables that the model is made with
_CHECKS_OF = {name: [check for check in CHECKS if name in check.ops] for each in CHECKS for name in each.ops}


def look_at_op(notes: Notes, op: OpCall) -> None:
    """Look at one op of the forward pass by the table; while the model is made, by the rows `_OF_SETUP` alone."""
    if op.stage == "backward":
        notes.passed(op.node)
        return
    found = set[NotedSite]()
    is_index = not op.results and op.name == "_to_copy" and op.kwargs.get("dtype") is not torch.bool
    if op.before is not None or not (op.results or is_index):
        notes.follow(op, found)
        return
    hand_on(op, notes)
    if op.results and any(notes.facts(each).get("fixed") for each in op.given):
        notes.add(op.out, fixed=True)
        if op.name in MATMULS:
            notes.note("product of fixed", op)
    for check in _CHECKS_OF.get(op.name, ()):
        is_table = check.kind in _OF_SETUP  # what reads one that the first iteration makes, `PositionTables` sees
        is_due = is_table if op.stage == "set up" else not (is_table and notes.iteration == 1)
        if is_index != (check.evidence is indices) or not is_due:
            continue
        shown = check.evidence(op, notes)
        if shown is not None and not op.is_outside_model:
            site = notes.note(check.kind, op, shown[0])
            site.off = max((each for each in (shown[1], site.off) if each >= 0), default=math.nan)
            found |= {site} if check.wrong and shown[1] >= LIMIT else set()
            site.made_by |= {made} if op.given and (made := notes.facts(op.given[0]).get("rounded")) else set()
            if check.fix and site.calls == 1:
                site.fixed_by = _fixed_by(check, notes, op, site)
            if site.fixed_by and op.results:
                notes.add(op.out, fixed=True)
    notes.follow(op, found)


def of_ops(notes: Notes, names: Names) -> Iterator[Finding]:
    for check in CHECKS:
        if sites := notes.sites(check.kind):
            yield _finding(check, sites)


def _fixed_by(check: Check, notes: Notes, op: OpCall, site: NotedSite) -> str:
    """Return what puts the op at this line into FP32: the name of an op in the fp32 list, "module", or "" for nothing.

    A cast that hmpx makes is for a listed op: the answer is this op. No recipe changes a cast that the program makes,
    unless this cast follows the dtype of a module's argument: a rule for the module casts the argument.
    """
    if check.fix == "module" and site.place.is_inside:
        return "module"
    if check.evidence is probabilities and notes.facts(op.given[0]).get("cast") is not None:
        return ""  # the program itself has rounded the probabilities
    if any(frame.f_globals.get("__name__") == _OpOverload.__module__ for frame in op.inner_frames()):
        return ""  # torch.ops, which no list reaches
    if _is_scripted(op, site.name):
        return ""
    if op.name not in _CASTS:
        return "" if op.name.endswith("_") else site.name  # what an op in place writes to keeps its dtype
    for frame in op.inner_frames():
        if rule_of(frame.f_code) is not None:
            original: Any = frame.f_locals.get("_original", frame.f_locals.get("original"))
            return canonical(getattr(original, "__name__", ""))
    path, _, line = site.place.where.rpartition(":")
    written = linecache.getlines(path)[int(line) - 1 :] if path else []
    text = ""
    while written and (not text or text.count("(") > text.count(")")):  # a call may take several lines
        text += written.pop(0)
    return "module" if site.place.is_inside and _FOLLOWS_A_TENSOR.search(text) else ""


def _is_scripted(op: OpCall, name: str) -> bool:
    """Return whether scripted code, which no list reaches, has called an op: a module, or a function of the line."""
    frames = [*op.inner_frames(), *filter(None, [users_frame(op.frame)])]
    if any(isinstance(each.f_locals.get("self"), torch.jit.ScriptModule) for each in frames):
        return True
    codes = [(each.f_code, {**each.f_globals, **each.f_locals}) for each in frames]
    known = [((*code.co_names, *code.co_varnames, *code.co_freevars), of) for code, of in codes]
    is_named = any(name in names for names, _ in known)
    return not is_named and any(isinstance(of.get(n), torch.jit.ScriptFunction) for names, of in known for n in names)


def _finding(check: Check, sites: Sequence[NotedSite]) -> Finding:
    harmful = [site for site in sites if site.is_read and site.off >= LIMIT]
    sites = sorted(sites, key=lambda site: site not in harmful) if check.wrong else sites
    named = [site for site in sites if site.op != BACKWARD]
    sites = named or [site for site in sites if site.numbers["is_of_forward"]] or sites
    ops = tuple(dict.fromkeys(site.name for site in named))
    lines = tuple(dict.fromkeys(short_places(site.where) for site in sites))
    details = [f"{', '.join(ops)}, {number(sum(site.calls for site in sites), 'call')}" if ops else ""]
    off = max((site.off for site in harmful or sites if 0 < site.off < math.inf), default=0.0)
    details += [next((site.said for site in sites if site.said), "")]
    is_said = off in (0, 1) or "off by" in details[-1]
    details += ["" if is_said else f"off by {percent(off)}" if off < 1 else f"off by {100 * off:.0f} %"]
    details += ["no gradient depends on it" if check.wrong and not harmful and off >= LIMIT else ""]
    makers = sorted({name for site in sites for name, _ in site.made_by})
    details += [f"of what {' and '.join(makers)} has rounded to low precision before" if makers else ""]
    details += [sites[0].place.within.removeprefix(", ")]
    details += [f"also at {first_names(lines[1:], 2)}" if len(lines) > 1 else ""]
    told = "; ".join(filter(None, details))
    said = f"{check.said} ({told})" if told else check.said
    modules = tuple(dict.fromkeys(site.module for site in sites if site.module))
    recipe, edit = _keys(check, named)
    too = f", and the {' and '.join(makers)} that it is of" if makers and check.do is _IN_FP32 else ""
    do = sites[0].advice(check.do + too)
    wrong, weight = check.wrong and bool(harmful), check.weight if harmful or not check.wrong else check.weight / 4
    return Finding(check.kind, wrong, said, do, sites[0].where, modules, ops, weight, recipe, edit)


def _keys(check: Check, sites: Sequence[NotedSite]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the keys of a recipe that fix what was found, and the lines that they do not fix."""
    listed: set[str] = set()
    rules: dict[str, Any] = {}
    left: dict[str, None] = {}
    for site in sites if check.fix else ():
        op = catalog().get(site.fixed_by)
        if site.fixed_by == "module":
            rules[site.module] = "float32"
        elif op is None or not op.computes:
            left[site.where] = None
        else:
            listed |= {*check.also}
            for name, place in {(op.name, site.place), *site.made_by}:
                if check.also or not place.is_inside:
                    listed.add(name)
                elif (rule := rules.setdefault(place.module, {"fp32": []})) != "float32":
                    rule["fp32"] = sorted({*rule["fp32"], name})
    found: dict[str, Any] = {"fp32": sorted(listed), "modules": rules}
    keys = {key: value for key, value in found.items() if value}
    return keys, tuple(left) if keys else ()


OPS = OpLook(look_at_op, of_ops, "set up", "forward", "backward")
