"""In what each parameter is: the dtypes in which ops take it and its gradient is summed, and what moves it.

An op takes a parameter itself, a cast of it, or the whole copy that FSDP2 makes of its shards. All are told by their
storage: a view has that of its base, and what a cast or a copy makes is noted. The gradient that a step finds is
followed in the same way, back to the collective that has reduced it.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from hmpx.base.tensors import dtype_name, tensors_in
from hmpx.insight.capture import Capture
from hmpx.insight.dispatch import Look
from hmpx.insight.finding import Finding, Names, first_names
from hmpx.insight.notes import Notes, OpCall
from hmpx.insight.tensors import LOW, has_numbers, is_finite, sample
from hmpx.ops.computing.kernels import asked_of
from hmpx.ops.wrapping.callers import modules
from hmpx.rounding.native import PLAIN
from hmpx.updates.holding.sharding import local, whole_copies
from hmpx.updates.stepping.names import parameters
from hmpx.updates.stepping.released import Released

Tensor = torch.Tensor
Parameter = torch.nn.Parameter
Optimizer = torch.optim.Optimizer
Dtypes = dict[str, None]  # names of dtypes, in the order in which they came

_COPIES = frozenset("_to_copy clone copy_ _foreach_copy_".split())
_ADDED = frozenset("lerp_ add_ _foreach_lerp_ _foreach_add_".split())
_FSDP = "torch.distributed.fsdp."  # whose modules add, behind a backward pass, to gradients of the root
_WATCHED = 4096  # elements of a parameter that are compared to see whether it moves


@dataclass
class SeenParameter:
    """What ops and steps have shown of one parameter.

    computed, idle: the dtypes in which ops took it, of those of a forward pass with gradients and of the others: of a
        pass without, which a custom autograd function is, and of what a backward pass computes again.
    gradient: of its gradient; "freed" where that was freed before the step. summed: by what adds up, the dtypes.
    master: the dtype of what a line of the program fills it from. first: numbers of it before its first step.
    dtype: as its last step began.
    """

    computed: Dtypes = field(default_factory=dict)
    idle: Dtypes = field(default_factory=dict)
    gradient: Dtypes = field(default_factory=dict)
    summed: dict[str, Dtypes] = field(default_factory=lambda: defaultdict(dict))
    master: str = ""
    first: Tensor | None = None
    dtype: torch.dtype | None = None


class Cells(Look):
    """Sees in which dtypes ops take parameters, and in which gradients are summed.

    Attributes:
        seen: by parameter. roots: outermost modules that ran and that no optimizer was known of. masters: of weights
            that a line of the program fills from another parameter, which an optimizer steps. losses, averages: the
            dtypes of losses, and of tensors that follow weights. policies: in what FSDP2 is told to reduce gradients.
            widened: the dtype that FP32 kernels stand for; "" for none.
    """

    stages = ("forward", "backward")

    def __init__(self, capture: Capture) -> None:
        self._capture, self._is_looking = capture, False
        self.seen: dict[Parameter, SeenParameter] = defaultdict(SeenParameter)
        self.roots: dict[torch.nn.Module, None] = {}
        self.masters: dict[Parameter, Parameter] = {}
        self.losses: Dtypes = {}
        self.averages: Dtypes = {}
        self.policies: dict[Parameter, str] = {}
        self.widened = ""
        self._whole: dict[int, tuple[Tensor, Parameter]] = {}  # by identity, whole copies of shards
        # Of one iteration, by storage: where which parameters lie; dtypes of sums by what has made them; of gradients
        # that something was added to; what is filled from FP32, with the parameter that it is of.
        self._at: dict[Any, list[tuple[int, int, Parameter]]] = {}
        self._sums: dict[Any, dict[str, str]] = {}
        self._added: dict[Any, str] = {}
        self._filled: dict[Any, tuple[str, Parameter | None]] = {}
        self._coded = False  # whether some parameters hold codes and no numbers

    @property
    def models(self) -> list[torch.nn.Module]:
        """The models of the optimizers, and others that ran."""
        return [*dict.fromkeys((*(model for its in self._capture.models.values() for model in its), *self.roots))]

    def whole(self) -> dict[int, Parameter]:
        """Return the sharded parameter of each whole copy, by the identity of the copy."""
        for model in self.models:
            self._note_copies(model)
        return {key: p for key, (_, p) in self._whole.items()}

    def _note_copies(self, model: torch.nn.Module) -> None:
        for copy, (p, reduced) in whole_copies(model).items():
            self._whole[id(copy)] = copy, p
            self.policies[p] = dtype_name(reduced) if reduced is not None else ""

    # Which parameter a tensor stands for

    def _begin(self) -> None:
        """Learn where the parameters are, as an iteration begins."""
        self._is_looking = True
        for each in (self._at, self._sums, self._added, self._filled):
            each.clear()
        self.whole()
        for p in dict.fromkeys((*self._capture.names, *self._capture.trained)):
            self._register(p, p)
        for model in self.roots:
            for p in model.parameters():
                self._register(p, self._whole[id(p)][1] if id(p) in self._whole else p)
        for whole, p in self._whole.values():
            self._register(whole, p)

    def over(self) -> None:
        self._is_looking = False

    def _register(self, tensor: Tensor, p: Parameter) -> None:
        part, at = local(tensor), _storage(tensor)
        self._coded = self._coded or not tensor.is_floating_point()
        if at is not None and not any(each is p for *_, each in self._at.setdefault(at, [])):
            start = _address(part)
            self._at[at].append((start, start + part.numel() * part.element_size(), p))

    def _owner(self, tensor: Tensor, op: OpCall | None = None) -> Parameter | None:
        """Return the parameter that a tensor stands for. op: that takes it, and may be the first to show a model."""
        if (at := _storage(tensor)) is None:
            return None
        there = self._at.get(at, ())
        if not there and op is not None:
            if at in self._filled and tensor.is_leaf and tensor.requires_grad:
                self._capture.notes.weight(tensor).is_filled = True
            if isinstance(tensor, Parameter):
                self._meet(tensor, op)
                there = self._at.get(at, ())
        if len(there) > 1:
            address = _address(local(tensor))
            there = [each for each in there if each[0] <= address < each[1]]
        return there[0][2] if there else None

    def _meet(self, p: Parameter, op: OpCall) -> None:
        """Learn of the model of a parameter that no optimizer has, and of the masters that fill its weights."""
        around = [each for each in modules(op.frame) if any(p is one for one in each.parameters())]
        for root in around[-1:]:
            self.roots[root] = None
            self._note_copies(root)
        for each in (*(one for root in around[-1:] for one in root.parameters()), p):
            shards = self._whole[id(each)][1] if id(each) in self._whole else each
            self._register(each, shards)
            if (filled := self._filled.get(_storage(each))) is not None and shards not in self.masters:
                self.seen[shards].master, master = filled
                self._capture.notes.weight(each).is_filled = True
                self.masters |= {shards: master} if master is not None else {}

    # What ops show

    def see(self, notes: Notes, op: OpCall) -> None:
        if not self._is_looking:
            self._begin()
        name, space = op.name, op.schema.space
        for t in op.given if self._sums and op.results and not op.schema.reduces else ():
            if t.numel() <= op.out.numel() and (t.dim() or not op.out.dim()):  # divided, joined to others, waited for
                self._hand_on(t, op.out)
        if "c10d" in space:
            self._reduced(op, is_functional="functional" in space)
        elif space == "aten" and name in _COPIES and (op.schema.written or (op.results and op.given)):
            self._copied(op)
        elif op.is_view:
            self._owner(op.given[0], op)
        elif op.results and not name.endswith("_like") and not name.startswith("new_"):
            if not op.trains and space == "aten" and name in _ADDED:
                self._added_up(op)
            if op.graphed or op.stage == "forward":  # checkpointing computes with gradients in a backward pass
                self._computed(op)

    def _computed(self, op: OpCall) -> None:
        if self._coded and "dequant" in op.name:  # of codes, as of a quantized base
            for t in tensors_in((*op.args, *op.kwargs.values())):
                if not t.is_floating_point() and (p := self._owner(t)) is not None:
                    self._at[_storage(op.out)] = [(0, 0, p)]
                    return
        for t in op.given:
            p = self._owner(t, op)
            if p is None or not (op.graphed or op.is_in_forward):
                continue
            taken = op.out.dtype if op.schema.is_pointwise else t.dtype  # a sum or a product takes the wider one
            asked = asked_of(op.frame) if taken is torch.float32 else None
            self.widened = dtype_name(asked) if asked is not None else self.widened
            dtypes = self.seen[p].computed if op.graphed and op.stage != "backward" else self.seen[p].idle
            dtypes[dtype_name(asked or taken)] = None

    def _copied(self, op: OpCall) -> None:
        to, source = (op.args[0], op.args[1]) if op.name.endswith("copy_") else (op.out, op.given[0])
        pairs = zip(to, source, strict=False) if op.name == "_foreach_copy_" else [(to, source)]
        for to, source in pairs:
            if not isinstance(source, Tensor) or to.numel() != source.numel():
                continue
            self._hand_on(source, to)
            owner, at = self._owner(source, op), _storage(to)
            target = self._owner(to) if any(stop for _, stop, _ in self._at.get(at, ())) else None  # a parameter itself
            if source.dtype is torch.float32 and to.dtype in LOW:
                self._filled[at] = dtype_name(source.dtype), owner
            if target is not None and target is not owner and op.stage == "forward":
                if source.dtype is torch.float32 and to.dtype in LOW:
                    self._capture.notes.weight(target).is_filled = True
                    self.seen[target].master = dtype_name(source.dtype)
                    if owner is not None:
                        self.masters[target] = owner
            elif target is None and owner is not None and (op.graphed or (op.is_in_forward and not op.schema.written)):
                self._at[at] = [(0, 0, owner)]

    def _hand_on(self, source: Tensor, to: Tensor) -> None:
        if self._sums and (made := self._sums.get(_storage(source))) is not None:
            self._sums[_storage(to)] = made

    def _reduced(self, op: OpCall, is_functional: bool) -> None:
        written = op.result if is_functional else op.args[0]
        for t in tensors_in((written,)) if op.schema.reduces else ():
            if t.is_floating_point():
                before = self._sums.get(_storage(t), {})
                self._sums[_storage(t)] = {**before, op.schema.reduces: dtype_name(t.dtype)}

    def _added_up(self, op: OpCall) -> None:
        """Note that something was added to a gradient, or a weight to an average."""
        first, *others = op.args
        given = others[0] if others and isinstance(others[0], list | tuple) else others[:1]
        for to, source in zip(first if isinstance(first, list | tuple) else [first], given, strict=False):
            if not isinstance(source, Tensor) or not isinstance(to, Tensor) or to.shape != source.shape:
                continue
            variable, dtype = getattr(op.node, "variable", None), dtype_name(to.dtype)
            p = self._owner(variable) if variable is not None else None
            for whole, sharded in self._whole.values() if p is None and op.name == "add_" else ():
                if whole.shape == source.shape and whole.grad is not None and _is_same(whole.grad, source):
                    p = sharded  # FSDP2 adds whole gradients up in the dtype that it reduces in
            if p is not None:
                self.seen[p].summed["add"][dtype] = None
            elif op.stage == "forward" and self._owner(to) is None and self._owner(source) is not None:
                self.averages[dtype] = None
            if op.stage == "backward" or _is_of_fsdp(op):
                self._added[_storage(to)] = dtype

    def loss(self, notes: Notes, losses: Sequence[Tensor]) -> None:
        self.losses |= dict.fromkeys(dtype_name(each.dtype) for each in losses)

    # What steps show

    def begin(self, optimizer: Optimizer, iteration: int) -> None:
        own = {*parameters(optimizer)}
        for p in (*own, *(p for p, master in self.masters.items() if master in own)):
            seen, grad = self.seen[p], p.grad
            seen.dtype = p.dtype
            if seen.first is None and p.is_floating_point() and p.layout is torch.strided:
                seen.first = sample(p, _WATCHED).clone()
            if grad is None or (seen.gradient and not self._is_looking):
                continue
            seen.gradient["freed" if isinstance(grad, Released) else dtype_name(grad.dtype)] = None
            if self._is_looking and not isinstance(grad, Released):
                at = _storage(grad)
                for by, dtype in self._sums.get(at, {}).items():
                    seen.summed[by][dtype] = None
                if at in self._added:
                    seen.summed["add"][self._added[at]] = None

    def findings(self, notes: Notes, names: Names) -> Iterator[Finding]:
        """Say where statistics of norms are inf or NaN and weights are not: a step that was skipped leaves them so."""
        for model in self.models:
            held = [(name, b) for name, b in model.named_buffers() if name.endswith(("running_mean", "running_var"))]
            broken = tuple(name for name, b in held if has_numbers(b) and not b.is_meta and not is_finite(b))
            if broken and all(has_numbers(local(p)) and is_finite(local(p)) for p in model.parameters()):
                said = f"{first_names(broken)} became inf or NaN, and with them what the model computes in eval mode; "
                said += "weights are finite: no step was taken on the batch that did it"
                do = "leave such a batch out before the model takes it; and norm.reset_running_stats()"
                yield Finding("running statistics", True, said, do, names=broken, weight=0.9)

    @contextlib.contextmanager
    def as_stepped(self) -> Iterator[None]:
        """Put weights into the dtype of their last step for a while, if something has cast them since, to save them."""
        cast = {p: seen.dtype for p, seen in self.seen.items() if seen.dtype and type(p) in PLAIN}
        later = {p: p.data for p, dtype in cast.items() if dtype is not p.dtype}
        try:
            for p, data in later.items():
                p.data = data.to(cast[p])
            yield
        finally:
            for p, data in later.items():
                p.data = data

    def has_moved(self, p: Parameter) -> bool | None:
        """Return whether a parameter has moved since its first step; None where that is not known."""
        first = self.seen[p].first
        with torch.no_grad():
            now = sample(p, _WATCHED)
        if first is None or first.shape != now.shape:
            return None
        is_same = torch.equal(first, now) or torch.allclose(first, now, rtol=0, atol=0, equal_nan=True)
        return True if not is_same else False if now.numel() == local(p).numel() else None


def _storage(tensor: Tensor) -> StorageWeakRef | None:
    """Return the storage of a tensor, of a sharded one that of this rank's part; None if it has none."""
    try:
        return StorageWeakRef(local(tensor).untyped_storage())
    except (RuntimeError, NotImplementedError):  # it is sparse, or a shell around other tensors
        return None


def _address(part: Tensor) -> int:
    try:
        return part.data_ptr()
    except RuntimeError:
        return 0


def _is_of_fsdp(op: OpCall) -> bool:
    return any(str(each.f_globals.get("__name__")).startswith(_FSDP) for each in op.inner_frames())


def _is_same(one: Tensor, other: Tensor) -> bool:
    at = _storage(one)
    return at is not None and at == _storage(other)
