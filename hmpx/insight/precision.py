"""The table of what everything in a training is in, as it was seen: a row for each kind of parameter.

Two of these tables can be compared: what is in another dtype than in an earlier run?
"""

from __future__ import annotations

import json
import os
import re
import textwrap
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from hmpx.base.tensors import dtype_name
from hmpx.errors import HmpxError
from hmpx.insight.capture import Capture
from hmpx.insight.finding import Finding, first_names, numberless
from hmpx.insight.looks.cells import Cells
from hmpx.insight.looks.steps import Moves
from hmpx.insight.report import Field, Grid, amount, grouped, number, short_dtypes, table
from hmpx.insight.tensors import LOW
from hmpx.recipes.keys import HEAD, NORMS, ROUTERS
from hmpx.recipes.module_patterns import with_role
from hmpx.rounding.native import PLAIN
from hmpx.rounding.state_codes import SCALES, code_of
from hmpx.updates.holding.sharding import is_sharded
from hmpx.updates.ranks import replicas
from hmpx.updates.stepping.names import names_in, own_attachment, parameters, plain_names

Parameter = torch.nn.Parameter
Optimizer = torch.optim.Optimizer
UNSEEN, NONE = "?", "-"
_EMBEDDINGS, _REST = "embeddings", "rest"
_KINDS = _EMBEDDINGS, NORMS, ROUTERS, HEAD, _REST
_MOST = 10  # rows in a terminal
_SHORT = {"all-reduce": "ar", "reduce-scatter": "rs"}


@dataclass
class PrecisionRow:
    """What one parameter is in: dtypes by name, several joined by "and". "?" was not seen, "-" is not there.

    Attributes:
        name: in its model; with the model's class in front where there are several models.
        kind: "embeddings", "<norms>", "<routers>", "<head>" or "rest".
        count: its elements, those on other ranks too.
        stored: its dtype, or its class if that is one of a library.
        computed: in which ops took it, in the iterations that were looked at; "not used" if none did.
        gradient: its gradient's as a step begins; "frozen", "freed" by then, or "none".
        summed: by what adds gradients up ("add", "all-reduce", "reduce-scatter"), in what; "policy" is what FSDP2 was
            told.
        state: by tensor of the optimizer's state, in what it is held: a dtype, a code, or a class.
        master: in what, and by whom, a more exact copy of it is stepped; "none".
        kept: how far it moves, as a share of how far an FP32 copy does; None if no copy stepped beside it.
        lost: whether that is less than half. moved: whether it moves at all; None if that is not known.
    """

    name: str
    kind: str
    count: int
    stored: str
    computed: str = UNSEEN
    gradient: str = UNSEEN
    summed: dict[str, str] = field(default_factory=dict)
    state: dict[str, str] = field(default_factory=dict)
    master: str = "none"
    kept: float | None = None
    lost: bool = False
    moved: bool | None = None

    @property
    def _sums(self) -> str:
        by_dtype = grouped(sorted(self.summed.keys() - {"policy"}), lambda by: self.summed[by])
        said = [f"{'+'.join(_SHORT.get(by, by) for by in its)} {dtype}" for dtype, its in by_dtype.items()]
        told = self.summed.get("policy", "")
        is_other = told and told not in [dtype for by, dtype in self.summed.items() if by not in ("policy", "add")]
        return ", ".join([*said, *([f"(policy {told})"] if is_other else [])]) or NONE

    @property
    def _states(self) -> str:
        held = [*self.state.values()]
        if len({*held}) == 1:
            return held[0] if len(held) == 1 else f"{len(held)}x {held[0]}"
        return ", ".join(f"{key.removeprefix('exp_')} {each}" for key, each in self.state.items()) or NONE

    @property
    def _movement(self) -> str:
        return NONE if self.gradient == "frozen" else {None: UNSEEN, True: "yes", False: "no"}[self.moved]

    @property
    def cells(self) -> tuple[str, ...]:
        """What the parameters of one row of the table have in common."""
        moves = "lost" if self.lost else "" if self.kept is not None else self._movement
        return self.stored, self.computed, self.gradient, self._sums, self._states, self.master, moves


@dataclass(frozen=True)
class _Group:
    """Parameters that are alike. which: tells them from others of their kind."""

    kind: str
    which: str
    rows: Sequence[PrecisionRow]

    @property
    def movement(self) -> str:
        sizes = [(row.count, min(max(row.kept, 0), 1)) for row in self.rows if row.kept is not None]
        weights = sum(count for count, _ in sizes)
        return f"{sum(count * kept for count, kept in sizes) / weights:.2f}" if weights else self.rows[0]._movement


def _cell(i: int) -> Any:
    return lambda group: short_dtypes(group.rows[0].cells[i])


_FIELDS = (
    Field("", lambda group: group.kind),
    Field("which", lambda group: group.which, kind="end", least=16),
    Field("n", lambda group: str(len(group.rows)), kind="number", value=lambda group: len(group.rows), right=True),
    Field("weights", lambda group: amount(sum(row.count for row in group.rows)).replace(" ", ""), right=True, rank=1),
    Field("stored", _cell(0), kind="dtypes", least=8),
    Field("computed", _cell(1), kind="dtypes"),
    Field("gradient", _cell(2), kind="dtypes"),
    Field("summed", _cell(3), kind="dtypes", least=12),
    Field("state", _cell(4), kind="dtypes", least=10),
    Field("master", _cell(5), kind="dtypes"),
    Field("moves", lambda group: group.movement, right=True),
)


@dataclass
class Precision:
    """What everything is in.

    Attributes:
        rows: a `PrecisionRow` for each parameter. beside: what is no parameter, in words: "buffers", "loss",
            "autocast", "kernels", "GradScaler", "averages".
        ranks: how many there were. iterations: whose ops were looked at.
    """

    rows: list[PrecisionRow] = field(default_factory=list)
    beside: dict[str, str] = field(default_factory=dict)
    ranks: int = 1
    iterations: list[int] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def _groups(self) -> list[_Group]:
        """Return parameters that are alike, by kind, the largest group of a kind first."""
        found = []
        for kind in _KINDS:
            alike = grouped([each for each in self.rows if each.kind == kind], lambda each: each.cells).values()
            for rows in sorted(alike, key=lambda rows: -sum(each.count for each in rows)):
                others = [each.name for more in alike if more is not rows for each in more]
                which = _told_by([each.name for each in rows], others) if others else ""
                found.append(_Group(kind, which, rows))
        return found

    def lines(self, width: int, all_rows: bool = False) -> list[str]:
        """Return the table as lines of a terminal; all_rows: not the ten first alone."""
        groups = self._groups()
        shown, rest = (groups, []) if all_rows else (groups[:_MOST], groups[_MOST:])
        lines = table(_FIELDS, shown, width) if shown else []
        if rest:
            count = sum(len(each.rows) for each in rest)
            lines.append(f"… and {number(len(rest), 'more row')} of {number(count, 'parameter')}: --all-rows")
        return [*lines, *textwrap.wrap(self._said, width)]

    @property
    def _said(self) -> str:
        return "; ".join(f"{key} {short_dtypes(what)}" for key, what in self.beside.items())

    def grid(self) -> Grid:
        def notes(group: _Group) -> Iterable[str]:
            return (each.name for each in group.rows)

        return Grid(_FIELDS, self._groups(), page="What everything is in", notes=notes)


def _told_by(names: Sequence[str], others: Sequence[str]) -> str:
    """Return a part that all of these names have and none of the others; else the first, and how many more."""
    first, *more = dict.fromkeys(map(numberless, names))
    own = {*first.split(".")}.intersection(*(numberless(each).split(".") for each in names))
    own -= {"*", *(part for each in others for part in numberless(each).split("."))}
    if own:
        return next(part for part in first.split(".") if part in own)
    return first + (f" +{len(more)}" if more else "")


# From what was seen to rows


def precision_of(capture: Capture, cells: Cells, moves: Mapping[Parameter, Moves], ranks: int) -> Precision:
    """Make the table of what a capture has seen. moves: how far parameters have moved beside FP32 copies."""
    found = Precision(ranks=max(ranks, 1), iterations=[*capture.iterations.watched])
    stepped = {p: each for each in capture.optimizers for p in parameters(each)}
    if not stepped:
        return found
    whole, row = cells.whole(), _Rows(capture, cells, stepped, moves, replicas() if ranks > 1 else {}).of
    done: set[Parameter] = {*cells.masters.values()}
    models = [model for model in cells.models if any(whole.get(id(p), p) not in done for p in model.parameters())]
    classes: Counter[str] = Counter()
    shown = []
    for model in models:
        kinds = _kinds_in(model)
        own = {whole.get(id(p), p): name for p, name in names_in(model).items()}
        own = {p: name for p, name in own.items() if p not in done}
        done |= own.keys()
        if own:
            shown.append(model)
            classes[name := type(model).__name__] += 1
            of = f"{name}{classes[name] if classes[name] > 1 else ''}."
            found.rows += [row(of + name, kinds.get(name, _REST), p) for p, name in own.items()]
    for each in found.rows if len(shown) == 1 else ():
        each.name = each.name.partition(".")[2]
    left = [p for p in stepped if p not in done]
    found.rows += [row(f"parameter {i} of shape {tuple(p.shape)}", _REST, p) for i, p in enumerate(left)]
    found.beside = dict(_beside(capture, cells, shown))
    return found


def _kinds_in(model: torch.nn.Module) -> dict[str, str]:
    """Return the kind of each parameter of a model, by its plain name."""
    having = {kind: with_role(model, kind) for kind in (NORMS, ROUTERS, HEAD)}
    having[_EMBEDDINGS] = {each for each in model.modules() if isinstance(each, torch.nn.Embedding)}
    kind_of = {id(p): kind for kind, its in reversed(having.items()) for each in its for p in each.parameters()}
    named = dict(model.named_parameters())
    names = plain_names([*named])
    return {name: kind_of.get(id(p), _REST) for name, p in zip(names, named.values(), strict=True)}


@dataclass(frozen=True)
class _Rows:
    """What was seen, to be said parameter by parameter.

    stepped: the optimizer of each parameter that one steps. moves: as for `precision_of`. reduced: parameters whose
    gradients are averaged over ranks.
    """

    capture: Capture
    cells: Cells
    stepped: Mapping[Parameter, Optimizer]
    moves: Mapping[Parameter, Moves]
    reduced: Collection[Parameter]

    def of(self, name: str, kind: str, p: Parameter) -> PrecisionRow:
        seen, held = self.cells.seen[p], self.cells.masters.get(p, p)
        optimizer, gradient = self.stepped.get(held), self._gradient(p)
        row = PrecisionRow(name, kind, p.numel(), _held_in(p), self._computed(p, gradient), gradient)
        if gradient == "frozen":
            return row
        row.summed = self._summed(p, gradient)
        if optimizer is not None:
            row.state, row.master = _state_of(optimizer, held), _master_of(optimizer, p, held)
        if row.master == "none" and seen.master:
            row.master = f"{seen.master} by hand"
        its = self.moves.get(p)
        if its is not None and p.dtype in LOW and its.size:
            row.kept, row.lost = its.kept, its.is_known and its.is_below(0.5)
        row.moved = self.cells.has_moved(held)
        return row

    def _gradient(self, p: Parameter) -> str:
        if not p.requires_grad and not self.cells.seen[p].gradient:
            return "frozen"
        optimizer = self.stepped.get(p) if p not in self.cells.masters else None
        has_stepped = optimizer is not None and self.capture.steps[id(optimizer)]
        return " and ".join(self.cells.seen[p].gradient) or ("none" if has_stepped else UNSEEN)

    def _computed(self, p: Parameter, gradient: str) -> str:
        seen, capture = self.cells.seen[p], self.capture
        saw_all = capture.iterations.watched and not capture.notes.unseen and not capture.compiles
        is_idle = gradient == "none" and saw_all
        return " and ".join(seen.computed or seen.idle) or ("not used" if is_idle else UNSEEN)

    def _summed(self, p: Parameter, gradient: str) -> dict[str, str]:
        summed = {by: " and ".join(dtypes) for by, dtypes in self.cells.seen[p].summed.items()}
        if (p in self.reduced or _is_cut(p)) and not summed.keys() - {"add"} and gradient not in ("none", UNSEEN):
            summed["all-reduce" if p in self.reduced else "reduce-scatter"] = UNSEEN
        policy = self.cells.policies.get(p)
        return summed | ({"policy": policy} if policy else {})


def _held_in(tensor: torch.Tensor) -> str:
    """Return a dtype, or the class of a tensor whose numbers only this class knows."""
    return dtype_name(tensor.dtype) if type(tensor) in PLAIN or is_sharded(tensor) else type(tensor).__name__


def _is_cut(p: Parameter) -> bool:
    return is_sharded(p) and any(each.is_shard() and p.device_mesh.size(i) > 1 for i, each in enumerate(p.placements))


def _state_of(optimizer: Optimizer, p: Parameter) -> dict[str, str]:
    """Return in what each tensor of a parameter's state is held, by its key."""
    state, found = optimizer.state.get(p), dict[str, str]()
    for key, value in state.items() if isinstance(state, Mapping) else ():
        if not isinstance(value, torch.Tensor) or str(key) == "step" or str(key).startswith(SCALES):
            continue
        if (code := code_of(key)) is not None:
            found[key.removeprefix(code.prefix)] = code.name
        elif value.numel() > 1 or value.dim():
            found[str(key)] = _held_in(value)
    return found


def _master_of(optimizer: Optimizer, p: Parameter, held: Parameter) -> str:
    """Return in what a parameter is stepped where that is more than its dtype, and by whom; "none"."""
    if held is not p:
        return f"{dtype_name(held.dtype)} by hand"
    attachment = own_attachment(optimizer)
    masters = attachment.masters_of(p) if attachment is not None else None
    if masters is not None:
        return f"{dtype_name(masters.dtype)} hmpx"
    state = optimizer.state.get(p)
    for key, value in state.items() if isinstance(state, Mapping) else ():
        if "master" in str(key) and isinstance(value, torch.Tensor):
            return f"{dtype_name(value.dtype)} state"
    return "none"


def _beside(capture: Capture, cells: Cells, models: Iterable[torch.nn.Module]) -> Iterator[tuple[str, str]]:
    """Say in what is what is no parameter."""
    buffers = [(n, b) for model in models for n, b in model.named_buffers() if b.is_floating_point()]
    plain = plain_names([name for name, _ in buffers])
    by_dtype = grouped(zip(plain, buffers, strict=True), lambda each: dtype_name(each[1][1].dtype))
    if by_dtype:
        said: list[str] = []
        for dtype, its in sorted(by_dtype.items(), key=lambda item: -len(item[1])):
            names = [*dict.fromkeys(numberless(name) for name, _ in its)]
            said.append(f"{len(its)} {dtype}" + (f" ({', '.join(names[:2])}{' …' * bool(names[2:])})" if said else ""))
        yield "buffers", ", ".join(said)
    yield "loss", " and ".join(cells.losses) or UNSEEN
    sites = capture.notes.sites("product", "product in low")
    inside = [site for site in sites if site.numbers["autocast"]]
    if inside:
        device = next((p.device.type for p in capture.trained), "")
        dtypes = dict.fromkeys("float16" if site.numbers["half"] else "bfloat16" for site in inside)
        calls, every = (sum(site.calls for site in its) for its in (inside, sites))
        yield "autocast", f"{device} {' and '.join(dtypes)} ({calls} of {number(every, 'product')})"
    else:
        yield "autocast", "none" if sites else UNSEEN
    if cells.widened:
        yield "kernels", f"float32 for {cells.widened}"
    if capture.notes.skipped:
        yield "GradScaler", f"{capture.notes.scale:g}, {sum(capture.notes.skipped)} skipped"
    if cells.averages:
        yield "averages", " and ".join(cells.averages)


# What differs from the table of an earlier run

_UNKNOWN = {UNSEEN, "none", "not used"}  # of a cell that shows what a few steps did
_DTYPE = re.compile(r"\bb?float\w+")
_KEPT = 0.8  # what moves less beside FP32 is near a half now and then
_DO = "see what has changed: a config, a checkpoint, a wrapper, a library; if it is meant, save a new --json"


def read_table(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the table in the JSON of an earlier run.

    Raises:
        HmpxError: the file cannot be read, or has none or an empty one.
    """
    try:
        with open(path, encoding="utf-8") as file:
            held: dict[str, Any] = json.load(file)["precision"]
        if not [[each[cell] for cell in ("name", "stored", "state", "summed")] for each in held["rows"]]:
            raise ValueError("its table has no rows, since no optimizer stepped")
        return held
    except (OSError, ValueError, KeyError, TypeError) as error:
        said = f"{path}: {type(error).__name__}: {error}"
        raise HmpxError(f"--expect takes what doctor --json of an earlier run has written: {said}") from None


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Finding]:
    """Say what is in another dtype, gone or new. What was not seen in one of the runs is not compared.

    Parameters whose first cell differs alike are one finding, which names the cells that follow from it.
    """
    old, new = ({each["name"]: each for each in run["rows"]} for run in (before, now))
    if not old or not new:
        return
    for said, some_of, others in (("gone", old, new), ("new", new, old)):
        if left := [each for each in some_of if each not in others]:
            yield _finding(f"{said}: ", left)
    found: dict[tuple[str, str, str], list[str]] = {}
    more: dict[tuple[str, str, str], dict[str, None]] = {}
    for name in (each for each in new if each in old):
        if cells := [*_cells(old[name], new[name], before, now)]:
            found.setdefault(cells[0], []).append(name)
            more.setdefault(cells[0], {}).update(dict.fromkeys(f"{cell} {is_now}" for cell, _, is_now in cells[1:]))
    for first, names in found.items():
        cell, was, is_now = map(short_dtypes, first)
        then = f"; so is {first_names(tuple(map(short_dtypes, more[first])), 6)}" if more[first] else ""
        yield _finding(f"{cell} {is_now} now, {was} before{then}: ", names)
    for key in before["beside"].keys() & now["beside"].keys() - {"GradScaler"}:
        dtypes = [{*_DTYPE.findall(each["beside"][key])} for each in (now, before)]
        if dtypes[0] != dtypes[1] and "?" not in (before["beside"][key], now["beside"][key]):
            told = [short_dtypes(" and ".join(sorted(each)) or "none") for each in dtypes]
            yield _finding(f"{key} {told[0]} now, {told[1]} before", [])


def _cells(
    old: Mapping[str, Any], new: Mapping[str, Any], before: Mapping[str, Any], now: Mapping[str, Any]
) -> Iterator[tuple[str, str, str]]:
    """Yield the cells of one parameter that differ, the earliest first: its name, before, now."""
    pairs: list[tuple[str, str, str]] = [(cell, old[cell], new[cell]) for cell in ("stored", "computed", "gradient")]
    for by in dict.fromkeys((*old["summed"], *new["summed"])):
        is_seen = by in old["summed"] and by in new["summed"]
        if by != "policy" and (is_seen or (by != "add" and min(before["ranks"], now["ranks"]) > 1)):
            told = [each["summed"].get(by, "in nothing") for each in (old, new)]
            pairs.append((f"{by} of gradients", told[0], told[1]))
    for key in dict.fromkeys((*old["state"], *new["state"])) if old["state"] and new["state"] else ():
        pairs.append((f"state {key}", old["state"].get(key, "not there"), new["state"].get(key, "not there")))
    if bool(old["state"]) != bool(new["state"]) and "none" not in (old["gradient"], new["gradient"]):
        told = [" and ".join(each["state"].values()) or "not there" for each in (old, new)]
        pairs.append(("state", told[0], told[1]))
    are_alike = before["iterations"] == now["iterations"]
    for cell, was, is_now in pairs:
        sets = [{*each.split(" and ")} for each in (was, is_now)]
        differ = sets[0] != sets[1] if are_alike else sets[0].isdisjoint(sets[1])
        if differ and not _UNKNOWN & (sets[0] | sets[1]):
            yield cell, was, is_now
    if old["master"] != new["master"]:
        yield "master", old["master"], new["master"]
    moved = old["kept"] >= _KEPT if old["kept"] is not None else old["moved"]
    if moved and (new["lost"] or (new["kept"] is None and new["moved"] is False)):
        yield "moves", "as far as float32 weights", "less than half as far"


def _finding(said: str, names: list[str]) -> Finding:
    alike = tuple(dict.fromkeys(map(numberless, names)))
    which = f"{number(len(names), 'parameter')} ({first_names(alike)})" if names else ""
    return Finding("expected", True, said + which, _DO, names=tuple(names), weight=0.9)
