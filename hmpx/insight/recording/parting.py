"""`parting`: where two runs part, that is, the first call whose inputs agree to the bit and whose results do not."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

from hmpx.errors import HmpxError
from hmpx.insight.finding import at_place, short_places
from hmpx.insight.recording.hashed_runs import OPS, CallPair, Iteration, Run, differing, read
from hmpx.insight.recording.hashes import HashedCall
from hmpx.insight.recording.recorded import LogDiff, Site, difference
from hmpx.insight.report import Field, Grid, Report, about_files, number, short_dtypes

_DIGITS = {True: 2, False: 32}  # in low precision, and otherwise: another order of sums may differ by so many eps
_SITES = 5  # a terminal shows so many rows


@dataclass
class Parting(Report):
    """Where two runs part; true if they do. Calls and gradients are of the first iteration in which some differ.

    Attributes:
        parts: first the weights and data that differ, then the calls whose inputs agree and whose results do not, in
            order. Weights and data that are read only later are left out.
        unsteady: what differs also when the first program runs twice, and is not blamed. is_twice: whether a second
            run of it was given. unsteady_losses: as `losses`, of these two runs.
        before: "later" if the iteration before was not hashed, "between" if it agrees.
        same: how many calls agree, earlier iterations included. follow, ways: how many differ because their inputs do,
            and how many have no like in the other run, and nothing that differs is known to depend on them.
        is_another: whether under half of the calls are common.
        losses: the first iteration whose losses differ, and both losses; None if all agree. compared: how many pairs.
        gradients: those that differ. steps: weights that a step has left other than in the other run, where gradients
            agree. settings: what differs in torch and the machine, in words.
        sites: lines, ops and dtypes that differ.
    """

    _title = "diff", "Where two runs part"
    _labels = ("first", "second", "how bad", "do", "losses", "then", "settings", "twice")
    iteration: int = 0
    before: str = "later"
    parts: list[CallPair] = field(default_factory=list)
    unsteady: list[CallPair] = field(default_factory=list)
    is_twice: bool = False
    unsteady_losses: tuple[int, float, float] | None = None
    same: int = 0
    follow: int = 0
    ways: int = 0
    is_another: bool = False
    losses: tuple[int, float, float] | None = None
    compared: int = 0
    gradients: list[CallPair] = field(default_factory=list)
    steps: list[CallPair] = field(default_factory=list)
    settings: list[str] = field(default_factory=list)
    sites: LogDiff = field(default_factory=LogDiff)

    def __bool__(self) -> bool:
        return bool(self.parts or self.gradients or self.steps or self.losses or self.is_another)

    def _about(self) -> dict[str, str]:
        return about_files()

    def _lines(self) -> Iterator[str]:
        if not self:
            ways = f"; {number(self.ways, 'call')} are another way to the same numbers" if self.ways else ""
            yield f"They agree to the bit: {number(self.same, 'call')}, {number(self.compared, 'loss', 'losses')}{ways}"
        else:
            yield from self._finding()
            losses = self.losses and "part in iteration {}: {:.9g} and {:.9g}".format(*self.losses)
            yield f"losses   {losses or f'agree to the bit: {self.compared}'}"
            if self.gradients:
                yield f"then     {number(len(self.gradients), 'gradient')} differ{_worst(self.gradients)}"
        if self.settings:
            yield f"settings {'; '.join(self.settings)}"
        if self.unsteady:
            rest = f" and {len(self.unsteady) - 1} more" if self.unsteady[1:] else ""
            yield f"twice    {_at(self.unsteady[0].call)}{rest} differ when the first program runs twice: not blamed"
        elif self.unsteady_losses:
            yield "twice    losses of the first program, run twice, part in iteration {}: {:.9g} and {:.9g}".format(
                *self.unsteady_losses
            )
        elif self.is_twice:
            yield "twice    the first program, run twice, agrees to the bit with itself"
        elif self:
            yield "twice    not looked at: --again FILE, of a second run of the first, frees what no run repeats"
        if self:
            ways = f", {self.ways} {'has' if self.ways == 1 else 'have'} no like in the other run" if self.ways else ""
            yield f"{number(self.same, 'call')} agree, {self.follow} differ as their inputs do{ways}"

    def _finding(self) -> Iterator[str]:
        first, when = self.parts[0] if self.parts else None, f"iteration {self.iteration}"
        if self.is_another:
            alike = number(self.same, "call of the first has", "calls of the first have")
            yield f"The two did not run the same program: in {when}, {alike} a like in the second"
            is_compiled = any(each.startswith("torch.compile") for each in self.settings)
            yield f"do       {_DO['compiled' if is_compiled else 'program']}"
        elif first is None and self.steps:
            step = self.steps[0]
            said = f"The step of {when} differs: it leaves other weights in {number(len(self.steps), 'parameter')}"
            yield f"{said}, {step.call.op} first, where all gradients agree to the bit"
            a, b = (each.settings.partition(": ")[::2] for each in step.both if each)
            for name, own, other in (("first", a, b), ("second", b, a)):
                others = other[1].split("; ") if own[0] == other[0] else ()
                yield f"{name:8} {', '.join([own[0], *(each for each in own[1].split('; ') if each not in others)])}"
            yield f"do       {_DO['state' if a == b else 'step']}"
        elif first is None:
            what = "which the first program, run twice, does not repeat" if self.unsteady else "and no call before them"
            yield f"Gradients or losses part in {when}, {what}"
            if self.sites:
                yield f"do       {_DO['gradients']}"
        elif first.call.stage == "input":
            kind = "weights" if first.call.op.startswith(("parameter ", "buffer ")) else "data"
            kind += f" {self.before}" if kind == "weights" and self.iteration > 1 else ""
            said = f"Their inputs differ already, at {_at(first.call)}, in {when}"
            if first.first and first.second and first.first.shapes != first.second.shapes:
                kind = "parts" if all(map(_is_rounding, self.gradients)) else "data"
                split = f"Each run, or rank, has another part of the batch, at {_at(first.call)}, in {when}"
                said = split + (": gradients agree but for the order of sums" if kind == "parts" else "")
            yield said
            yield from _both(first)
            yield f"do       {_DO[kind]}"
        else:
            is_random = any(each is not None and each.is_random for each in first.both)
            what = "random numbers differ" if is_random else "the inputs agree to the bit, the results do not"
            yield f"They part at {_at(first.call)}, in the {first.call.stage} pass of {when}: {what}"
            yield from _both(first)
            if not is_random:
                yield f"how bad  {_how_bad(first)}"
            yield f"do       {_DO['random' if is_random else _kind(first)]}"

    def _sections(self) -> Iterator[Grid]:
        ops = [each for each in self.parts if each.call.stage in OPS]
        once = [*{(*each.call.site, each.call.op): each for each in reversed(ops)}.values()][::-1]
        head = f"Where they part, each line once: {number(len(once), 'line')}"
        yield Grid(_FIELDS, once, head, once if once[1:] else [], page=head)
        for each in self.sites._sections():
            rest = f", the first {_SITES}" if each.rows[_SITES:] else ""
            rows = each.rows if self.parts else sorted(each.rows, key=lambda row: not row[0].op.endswith("_"))
            yield replace(each, head=f"{each.head}{rest}", shown=rows[:_SITES])  # first, what may write to gradients


_DO = {
    "program": "compare two runs of one script, with the same arguments",
    "compiled": 'kernels of torch.compile hide their ops: backend="aot_eager" shows them; compare it with both',
    "parts": "nothing, if losses stay near; to compare calls, feed each the same batch",
    "data": "feed both the same batches: one seed, one order",
    "weights": "start both from the same weights: one seed, or one checkpoint",
    "weights later": "the steps before differ: record both with --at 1; or start both from one checkpoint",
    "weights between": "the iteration before agrees: look for what writes to it then, by hand, in a load or an average",
    "gradients": "look at the lines below, which are not in both: one may write to gradients, as clipping does",
    "step": "give both the same optimizer, with the same settings",
    "state": "the settings are the same: start both with the same state of the optimizer, and the same kernels",
    "random": "seed both alike (torch.manual_seed at the start), or set dropout to 0",
    "dtypes": "give both one dtype here; `record` says which rule casts there",
    "arguments": "give both the same arguments here",
    "digits": "nothing, if losses stay near; the same bits want one kernel, and as many threads and ranks",
    "kernels": "have one kernel compute this line in both, and compare again",
    "results": "look at this line: of the same numbers it makes others",
}


def _kind(part: CallPair) -> str:
    a, b = part.both
    if a and b and _dtypes(a) != _dtypes(b):
        return "dtypes"
    if a and b and a.op == b.op and a.settings != b.settings:
        return "arguments"
    return "digits" if _is_rounding(part) else "results" if a and b and a.op == b.op else "kernels"


def _at(call: HashedCall) -> str:
    return at_place(short_places(call.where), call.op, call.module)


def _dtypes(call: HashedCall) -> str:
    return short_dtypes(" -> ".join(dict.fromkeys(filter(None, call.dtypes))))


def _ran(part: CallPair, i: int) -> str:
    """Say what run `i` called and in which dtypes: the call, or all calls of its line if the ops differ."""
    call, other = part.both[i], part.both[1 - i]
    ran: Sequence[HashedCall] = [call] if call and other and call.op == other.op else part.beside[i]
    ran = ran or [each for each in (call,) if each]
    ops, dtypes = (dict.fromkeys(map(text, ran)) for text in (lambda each: each.op, _dtypes))
    return f"{', '.join(ops)} ({'; '.join(dtypes)})" if ran else ""


def _both(part: CallPair) -> Iterator[str]:
    a, b = part.both
    differ = a is not None and b is not None and a.op == b.op and a.settings != b.settings
    for name, i in (("first", 0), ("second", 1)):
        call = part.both[i]
        more = f"; {call.shapes}{f'; arguments {call.settings}' if differ else ''}" if call else ""
        if ran := _ran(part, i):
            yield f"{name:8} {ran}{more}"


def _compared_calls(part: CallPair) -> tuple[HashedCall | None, HashedCall | None]:
    """Return the calls whose results can be compared: those of one op, or else the last ones of a line."""
    a, b = part.both
    if not (a and b and a.op == b.op) and all(part.beside):
        return part.beside[0][-1], part.beside[1][-1]
    return a, b


def _apart(part: CallPair) -> tuple[float, float]:
    """Return how far results are apart as a share of the largest number, and that number; NaN if unknown."""
    a, b = _compared_calls(part)
    if a is None or b is None:
        return math.nan, math.nan
    (_, largest, some, sums), (_, other, others, others_sums) = a.results[0], b.results[0]
    if len(some) != len(others) or not all(map(math.isfinite, (largest, other, *some, *others))):
        return math.nan, math.nan
    most = max(largest, other) or 1.0
    apart = max([abs(largest - other), *(abs(x - y) for x, y in zip(some, others, strict=True))]) / most
    if sums and len(sums) == len(others_sums):  # of blocks: so far apart are sums of numbers that differ in last digits
        size, off = sums[0], max(abs(x - y) for x, y in zip(sums, others_sums, strict=True)) / most
        eps = _eps(part)
        apart = apart if off <= eps * max(_DIGITS[eps > 1e-5] * size**0.5, size / 4) else max(apart, off / size**0.5)
    return apart, most


def _how_bad(part: CallPair) -> str:
    share, most = _apart(part)
    if math.isnan(share):
        why = "the results have other shapes, inf or NaN" if all(_compared_calls(part)) else "one run has no such call"
        return f"it cannot be said: {why}"
    if share == 0:
        return "few of its numbers differ: those that were kept agree"
    words = {"dtypes": "other dtypes", "digits": "last digits, as of sums in another order"}
    return f"{share:.1e} of the largest number ({most:.3g}): {words.get(_kind(part), 'more than rounding makes')}"


def _is_rounding(part: CallPair) -> bool:
    is_one = len({each.dtypes[1].partition(" and ")[0] for each in _compared_calls(part) if each}) == 1
    return is_one and _apart(part)[0] <= _eps(part) * _DIGITS[_eps(part) > 1e-5]


def _eps(part: CallPair) -> float:
    kinds = [getattr(torch, each.dtypes[1].partition(" and ")[0]) for each in _compared_calls(part) if each]
    return max((torch.finfo(each).eps for each in kinds if each.is_floating_point), default=0.0)


def _worst(gradients: Sequence[CallPair]) -> str:
    """Say by how much gradients differ at most; nothing if that is unknown."""
    worst = max((share for each in gradients if not math.isnan(share := _apart(each)[0])), default=math.nan)
    digits = ": last digits" if all(map(_is_rounding, gradients)) else ""
    return "" if math.isnan(worst) else f", by up to {worst:.1e} of the largest number{digits}"


def _share(part: CallPair) -> str:
    share = _apart(part)[0]
    return "-" if math.isnan(share) else f"{share:.1e}"


_FIELDS = (
    Field("op", lambda part: part.call.op, least=14),
    Field("line", lambda part: os.path.basename(part.call.where), "end", least=14),
    Field("module", lambda part: part.call.module, "end", least=12),
    Field("pass", lambda part: part.call.stage),
    Field("apart", _share, right=True),
    Field("first run", lambda part: _ran(part, 0) or "-", "dtypes", least=16, rank=1),
    Field("second run", lambda part: _ran(part, 1) or "-", "dtypes", least=16, rank=1),
)


def parting(before: str, after: str, again: str | None = None) -> Parting:
    """Compare two files of `record --hash`, or the files of two jobs of several ranks.

    Args:
        again: a file of a second run of the first program.

    Raises:
        HmpxError: one cannot be read, or the two have no iteration in common.
    """
    first, second = read(before), read(after)
    found = _compared(first, second, before, after)
    if again:
        twice = _compared(first, read(again), before, again)
        found.is_twice, found.unsteady, found.unsteady_losses = True, twice.parts, twice.losses
        unsteady = {place for part in found.unsteady for place in part.places}
        found.parts = [part for part in found.parts if unsteady.isdisjoint(part.places)]
    return found


def _compared(first: Run, second: Run, before: str, after: str) -> Parting:
    hashed = [sorted({each.iteration for each in run.calls}) for run in (first, second)]
    both = [each for each in hashed[0] if each in hashed[1]]
    if not both:
        one, other = (", ".join(map(str, each)) or "none" for each in hashed)
        said = f"{before} has hashes of iterations {one}, {after} of {other}"
        raise HmpxError(f"{said}: record both with the same --at N")
    known = {name: (value, second.about.get(name, "-")) for name, value in first.about.items()}
    found = Parting(settings=[f"{name} {a} and {b}" for name, (a, b) in known.items() if a != b])
    losses = [(i, loss, second.losses[i]) for i, loss in first.losses.items() if i in second.losses]
    found.losses, found.compared = next((x for x in losses if str(x[1]) != str(x[2])), None), len(losses)
    for iteration in both:
        found.iteration, found.before = iteration, "between" if iteration - 1 in both else "later"
        own, mate = first.of(iteration), second.of(iteration)
        own.compare(mate)
        mate.compare(own)
        found.same += own.number("agrees")
        found.follow, found.ways = own.number("follows"), own.number("another way") + mate.number("another way")
        found.gradients = differing(own.gradients, mate.gradients)
        found.is_another = min(own.shared(mate), mate.shared(own)) < 0.5
        parts = own.parts(mate)
        begun = next((i for i, each in enumerate(parts) if each.call.stage in OPS), len(parts))
        found.parts = [each for i, each in enumerate(parts) if i < begun or each.call.stage in OPS]
        if not (found.parts or found.gradients or found.is_another):
            found.steps = differing(own.weights, mate.weights)
        if found.parts or found.gradients or found.is_another or found.steps:
            found.sites = difference(_sites(own), _sites(mate))
            break
    return found


def _sites(run: Iteration) -> list[Site]:
    found: dict[tuple, Site] = {}
    for each in run.ops:
        if run.kinds[id(each)] != "agrees":
            op = f"{each.op}{' backward' if each.stage == 'backward' else ''}"
            made = Site(op, each.op, os.path.basename(each.where), each.module)
            made.given, made.result = (each.dtypes[0],), (each.dtypes[1],)
            key = (op, made.where, each.module, *each.dtypes)
            found[key] = made
    return [*found.values()]
