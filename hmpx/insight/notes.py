"""What is noted of ops: one call of an op, its place, the lines at which something was found, and facts of tensors."""

from __future__ import annotations

import itertools
import math
import os
import types as python_types
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from hmpx import rounding, updates
from hmpx.base.tensors import tensors_in
from hmpx.base.torch_private import LINES, private
from hmpx.insight.finding import CallPlaces, Place
from hmpx.insight.tensors import LOW, Tensor, floating, is_finite, memory, view_of
from hmpx.ops.policies.catalog import canonical
from hmpx.ops.wrapping.callers import frames, modules, users_frame

BACKWARD = "backward"
# The folders of the code that computes an optimizer's step.
OF_STEPS = tuple(os.path.dirname(str(package.__file__)) + os.sep for package in (torch.optim, updates, rounding))
_OUTSIDE_MODEL = (*OF_STEPS, *(os.path.dirname(str(torch.__file__)) + os.sep + each for each in ("nn/utils/", "amp/")))
_SEEN = ("swa_utils.py", "lr_scheduler.py")  # averages and rates, which are written as a program writes them
_OF_LIBRARY = "the line is a library's, so change what you call it with"
_OpOverload = private("torch._ops.OpOverload")
NORMS = frozenset("native_batch_norm _native_batch_norm_legit cudnn_batch_norm miopen_batch_norm".split())
_COPIES = frozenset(("copy_", "_foreach_copy_", "fill_"))  # which read nothing of what was there
_WRITTEN = {"_ctc_loss": 1, "_cudnn_ctc_loss": 1}  # how many results are written in full; log_alpha is in part
_REDUCES = {"reduce_scatter": "reduce-scatter", "all": "all-reduce", "reduce": "reduce"}  # by a part of the op's name
_AROUND = ("_dynamo/eval_frame.py", "torch/_compile.py")  # Dynamo, once imported, adds frames around a dispatch mode's


def own_frame(frame: python_types.FrameType) -> python_types.FrameType:
    """Return the innermost frame that calls an op, from one below the dispatcher."""
    return next(each for each in frames(frame) if not each.f_code.co_filename.endswith(_AROUND))


class Schema:
    """What torch's dispatcher knows of an op.

    Attributes:
        name: without overload, as in "add_" or "_softmax". space: "aten", or a library's.
        written: positions and names of the arguments that it writes to. updates: whether it may compute them of what
            they were.
        is_pointwise: whether each element is computed of one of each argument. is_random: whether it draws numbers.
        reduces: "all-reduce", "reduce" or "reduce-scatter", if it adds up what several ranks have; or "".
        is_foreach: whether it takes lists. is_norm: whether it writes running statistics. is_copy: whether it copies.
    """

    def __init__(self, func: Any) -> None:
        self.name = str(getattr(func, "overloadpacket", func)).partition(".")[2]
        self.space = str(getattr(func, "namespace", ""))
        tags = getattr(func, "tags", ())
        arguments = func._schema.arguments if isinstance(func, _OpOverload) else ()
        self.written = [
            (i, each.name) for i, each in enumerate(arguments) if each.alias_info and each.alias_info.is_write
        ]
        is_sum = any(each.name == "reduce_op" for each in arguments)
        self.reduces = next((by for part, by in _REDUCES.items() if is_sum and part in self.name), "")
        self.is_norm = self.name in NORMS
        if self.is_norm:  # some forms do not say it
            self.written = [(3, "running_mean"), (4, "running_var")]
        self.is_foreach = self.name.startswith("_foreach_")
        self.is_pointwise = self.is_foreach or torch.Tag.pointwise in tags
        self.is_random = torch.Tag.nondeterministic_seeded in tags
        self.is_copy = self.name in _COPIES
        is_other = self.is_random or self.is_copy or torch.Tag.inplace_view in tags
        self.updates = bool(self.written) and not is_other

    def targets(self, args: tuple, kwargs: dict[str, Any]) -> list[Tensor]:
        """Return the tensors of numbers that a call writes to."""
        return floating([args[i] if i < len(args) else kwargs.get(name) for i, name in self.written], True)


@dataclass(eq=False)
class NotedSite:
    """One op at one place of the program, at which one kind of thing was found.

    said: what was found there the first time. fixed_by: the op to list in FP32, or "module", which puts it into FP32;
    "" for nothing, or if no check has asked. numbers: sums over the calls. memories: addresses of the memory that the
    op writes to. made_by: ops that have rounded its input. forward: the op whose backward pass it is part of. owner:
    the name of the buffer or parameter that it writes to, where a module owns it. off: how far results are from those
    of FP32, as a share of these; at most, and NaN if nothing was measured. is_read: whether a gradient depends on one.
    """

    kind: str
    op: str
    place: Place
    said: str
    fixed_by: str = ""
    calls: int = 0
    numbers: Counter[str] = field(default_factory=Counter)
    memories: set[int] = field(default_factory=set)
    made_by: set[tuple[str, Place]] = field(default_factory=set)
    forward: str = ""
    owner: str = ""
    off: float = math.nan
    is_read: bool = False

    @property
    def where(self) -> str:
        """The line that can be edited."""
        return self.place.script

    @property
    def module(self) -> str:
        return self.place.module

    def advice(self, do: str) -> str:
        """Return `do`. If the line is a library's, which nobody is to edit, say so first."""
        return f"{_OF_LIBRARY}: {do}" if self.place.within else do

    @property
    def name(self) -> str:
        """What a user calls the op: "softmax" for "_softmax"."""
        return "to" if self.op == "_to_copy" else canonical(self.op.strip("_").removesuffix("_forward"))


@dataclass(eq=False)
class SeenWeight:
    """A weight in low precision, and the iterations in which an op has read it.

    has_gradient: whether a backward pass has reached it. keeps_gradient: whether the program keeps that, which it does
    not of coordinates that it only differentiates by. is_replaced: whether a line has replaced it. is_filled: whether
    it gets the numbers of a master.
    """

    ref: weakref.ref[Tensor]
    iterations: set[int] = field(default_factory=set)
    has_gradient: bool = False
    keeps_gradient: bool = False
    is_replaced: bool = False
    is_filled: bool = False


@dataclass
class OpCall:
    """One call of an op.

    Attributes:
        func: the op with its overload. schema: what is known of it.
        result: what it returned. given, results: the tensors of numbers among its arguments and its results; of those
            that are sharded, this rank's parts.
        before: copies or samples of the low-precision tensors that it updates, as they were before. None if there are
            none, or if the iteration has made them and no backward pass runs.
        frame: the innermost Python frame below torch's dispatcher.
        stage: "set up" before the first forward pass, "forward", "backward" or "step". node: the node of autograd
            that runs, in a backward pass. graphed: whether gradients were enabled. trains: whether one was also
            needed. is_view: whether it returns nothing but memory that it was given, and writes to none.
    """

    func: Any
    schema: Schema
    args: tuple
    kwargs: dict[str, Any]
    given: list[Tensor]
    results: list[Tensor]
    before: list[Tensor] | None
    frame: python_types.FrameType
    stage: str
    node: Any
    graphed: bool
    trains: bool
    result: Any

    def __post_init__(self) -> None:
        can_be = self.given and self.results and not self.schema.written
        self.is_view = bool(can_be) and {*map(memory, self.results)} <= {*map(memory, self.given)}

    @property
    def name(self) -> str:
        """The op without its overload, as in "add_" or "_softmax"."""
        return self.schema.name

    @property
    def out(self) -> Tensor:
        return self.results[0]

    def inner_frames(self) -> Iterator[python_types.FrameType]:
        """Return the frames of torch and hmpx between the op and the user's line."""
        user = users_frame(self.frame)
        return itertools.takewhile(lambda each: each is not user, frames(self.frame))

    @cached_property
    def is_outside_model(self) -> bool:
        """Whether torch's optimizers, clipping or scaling called it, which are no part of the model."""
        files = [frame.f_code.co_filename for frame in self.inner_frames()]
        return any(file.startswith(_OUTSIDE_MODEL) and not file.endswith(_SEEN) for file in files)

    @property
    def is_of_model(self) -> bool:
        """Whether it is part of what autograd differentiates, or of a backward pass."""
        return self.stage == "backward" or self.trains

    @cached_property
    def scalars(self) -> list[float]:
        return [float(v) for v in (*self.args, *self.kwargs.values()) if isinstance(v, int | float)]

    @property
    def nonfinite(self) -> Tensor | None:
        written = self.results[: _WRITTEN.get(self.name)]
        return next((each for each in written if each.numel() and not is_finite(each)), None)

    def is_called_from(self, *names: str) -> bool:
        """Return whether one of the nearest frames has such a function's name, or is in a file whose path ends so."""
        near = itertools.islice(frames(self.frame), 4)  # Dynamo, once imported, adds frames around the mode's
        return any(each.f_code.co_name in names or each.f_code.co_filename.endswith(names) for each in near)

    @cached_property
    def is_in_forward(self) -> bool:
        calls = (each for each in frames(self.frame) if each.f_code.co_name in ("_call_impl", "forward"))
        return any(next(modules(each), None) is not None for each in calls)


def without_numbers(facts: dict[str, Any]) -> dict[str, Any]:
    """Return the facts of a tensor that hold where it has other numbers, or shows them in another order."""
    return {name: fact for name, fact in facts.items() if name not in ("derived", "read", "sum") and not callable(fact)}


class Notes:
    """What the ops tell: lines at which something was found, and facts of tensors, as long as the tensors live.

    Facts, by name, beside those that `hand_on` of looks/dtypes.py gives. A function returns numbers, as many as the
    tensor has. Functions, derived, read and sum hold until an op writes:
        cast: the dtype before the last cast, and the line of this cast.
        derived: samples of the older tensors that it was computed of, by address; and what it would be in FP32.
        read: what an index has read of a tensor; and what later ops have made of it, computed in FP32.
        sum: the first value of a state, its movement in FP32, the number of its steps, and their place.
        fixed: whether a recipe puts what it was made of into FP32.
        off: of a gradient, the square of the share that FP16 has cost it below its normal numbers.
        of_nan: whether it was made of a NaN that the program has written.
        sites: the lines whose results it was made of, and of which no gradient is known to depend.

    Attributes:
        names: those of modules and parameters. last_cast: the result and the line of the last op, if that was a cast.
        iteration: the number of the current one, from 1. span: how many it stands for, since the last that was seen.
        born: addresses of tensors in low precision that it has made, or that are gradients. leaves: by dtype, the
            addresses of weights that ops have read. copies: the identities of whole copies of sharded weights.
        rewritten: by address, results that were computed of older tensors, and may replace them. outlived: such results
            that were alive at the end of their iteration, each with the address of an older tensor that was not.
        skipped: for each call of ``GradScaler.step``, whether it has skipped the step. scale: after the last call.
        unseen: what was not looked at, and how often. node: the number of the last op's node in autograd, or None.
    """

    _MOST = 4096

    def __init__(self) -> None:
        self._places = CallPlaces()
        self.names = self._places.names
        self.last_cast: tuple[weakref.ref[Tensor], NotedSite] | None = None
        self.iteration = self.span = 1
        self.born: set[int] = set()
        self.leaves: dict[torch.dtype, set[int]] = {}
        self._weights: dict[int, SeenWeight] = {}
        self._weights_of: dict[int | None, set[SeenWeight]] = {}  # by node, the weights that its op reads
        self.copies: set[int] = set()
        self.rewritten: dict[int, Any] = {}
        self.outlived: list[tuple[Any, int]] = []
        self.skipped: list[bool] = []
        self.scale = 0.0
        self.unseen: Counter[str] = Counter()
        self._sites: dict[tuple, NotedSite] = {}
        self._nodes: dict[int, tuple[Place, str]] = {}  # by the number that autograd gives to the node of an op
        self.node: int | None = None  # the last of them
        self._readers: dict[int | None, set[NotedSite]] = {}  # by node, the lines whose results the op reads
        # By memory, as a subclass comes as an alias; each with the number of the op that made it.
        self._facts: dict[tuple, tuple[StorageWeakRef, int, dict[str, Any]]] = {}
        self._written: dict[int, int] = {}  # by memory: the number of the last op that has written to it
        self._ops, self._writes = 0, set[int]()  # the number of this op, and the memory that it writes to

    def place(self, frame: python_types.FrameType) -> Place:
        return self._places.of(frame)

    def learn(self, model: torch.nn.Module) -> None:
        """Name places in a model by the names of its modules, those of what was found before it was known, too."""
        renamed = self._places.learn(model)
        for site in [*self._sites.values()]:
            site.made_by = {(name, renamed.get(place, place)) for name, place in site.made_by}
            now = site.kind, site.op, renamed.get(site.place, site.place)
            if now not in self._sites:
                del self._sites[site.kind, site.op, site.place]
                site.place, self._sites[now] = now[2], site

    def note_node(self, name: str, frame: python_types.FrameType) -> None:
        """Note which line has called the op whose node autograd has just made."""
        number = private("torch.autograd._get_sequence_nr")() - 1 if LINES.is_on() else None
        self.node = number
        if number is not None and number not in self._nodes:
            self._nodes[number] = self.place(frame), name

    def note_weight(self, weight: Tensor, is_forward: bool) -> None:
        """Note that the last op has read a weight in low precision."""
        seen = self.weight(weight)
        seen.iterations.add(self.iteration)
        if self.node is None or not is_forward:  # it repeats a forward pass, or nobody knows which node is the op's
            seen.has_gradient = True
        else:
            self._weights_of.setdefault(self.node, set()).add(seen)

    def weight(self, tensor: Tensor) -> SeenWeight:
        """Return what is noted of a weight. A tensor that is gone may have had the same identity."""
        seen = self._weights.get(id(tensor))
        if seen is None or seen.ref() is not tensor:
            seen = self._weights[id(tensor)] = SeenWeight(weakref.ref(tensor))
        return seen

    @property
    def weights(self) -> list[tuple[Tensor, SeenWeight]]:
        """The weights in low precision that ops have read or lines have filled, as far as they live."""
        return [(tensor, each) for each in self._weights.values() if (tensor := each.ref()) is not None]

    def follow(self, op: OpCall, found: set[NotedSite]) -> None:
        """Note that results of an op are made of what these lines have made.

        A gradient depends on it if a backward pass runs the node of the op, or if the op writes to weights.
        """
        sites = {site for site in (*found, *self._carried(op.args, op.kwargs)) if not site.is_read}
        if not sites:
            return
        node = self.node if op.is_of_model else -1
        is_written = op.name.endswith("_") and op.given and self.are_weights({op.given[0].untyped_storage().data_ptr()})
        if node is None or is_written or op.stage == "set up":  # who reads tables of a model is not known yet
            for site in sites:
                site.is_read = True
        else:
            self._readers.setdefault(node, set()).update(sites)
            for each in tensors_in((op.result,)):
                self.add(each, sites=sites)

    def hand_on(self, args: tuple, kwargs: dict[str, Any], result: Any) -> None:
        """Note that an op of indices and masks alone is made of what these were made of."""
        if sites := self._carried(args, kwargs):
            for each in tensors_in((result,)):
                self.add(each, sites=sites)

    def _carried(self, args: tuple, kwargs: dict[str, Any]) -> set[NotedSite]:
        given = (*tensors_in(args), *tensors_in(kwargs.values())) if self._readers else ()
        return {site for each in given for site in self.facts(each).get("sites", ())}

    def passed(self, node: Any) -> None:
        """Note that a backward pass runs a node."""
        number = None if LINES.missing else node._sequence_nr()
        for site in self._readers.pop(number, ()):
            site.is_read = True
        for seen in self._weights_of.pop(number, ()):
            seen.has_gradient = True

    def exact(self, tensor: Tensor) -> Tensor:
        """Return a tensor in FP32: as FP32 would have made it, if that is known."""
        known = self.facts(tensor).get("exact", lambda: None)()
        return (tensor.detach() if known is None else known).float()

    def forward_of(self, node: Any) -> tuple[Place | None, str]:
        """Return place and name of the op that a node of autograd belongs to; None and "" if nobody saw the op."""
        unknown = None, ""
        return unknown if node is None or LINES.missing else self._nodes.get(node._sequence_nr(), unknown)

    def note(self, kind: str, op: OpCall, said: str = "", **numbers: float) -> NotedSite:
        """Count one call at its place. A place has one `NotedSite` for each kind and op."""
        return self.note_line(kind, op.name, op.frame, said, None, **numbers)

    def note_line(
        self,
        kind: str,
        op: str,
        frame: python_types.FrameType | None,
        said: str = "",
        place: Place | None = None,
        **numbers: float,
    ) -> NotedSite:
        """Count one call at `place`, or, if that is None, at the line that runs in `frame`."""
        if place is None:
            assert frame is not None, "one of them is given"
            place = self.place(frame)
        key = kind, op, place
        site = self._sites.setdefault(key, NotedSite(kind, op, place, said))
        site.calls += 1
        site.numbers.update(numbers)
        return site

    def loss(self, losses: Sequence[Tensor], frame: python_types.FrameType) -> None:
        """Note a backward pass that begins with these losses, if one is in low precision. Each has a gradient of 1.

        Nothing is measured of it, so by itself it is no WRONG: a loss in BF16 costs nothing that training shows.
        """
        low = [each for each in losses if each.dtype in LOW]
        if low:
            made, _ = self.forward_of(low[0].grad_fn)
            self.note_line("loss", BACKWARD, frame, place=made, is_of_forward=made is not None)

    def are_weights(self, addresses: set[int]) -> bool:
        """Return whether the memory that begins at one of these addresses holds weights."""
        return any(addresses & known for known in self.leaves.values())

    @property
    def are_steps(self) -> bool:
        """Whether the program itself writes to weights, or weights were seen and none is in low precision."""
        is_written = any(self.are_weights(site.memories) for site in self.sites("write"))
        return is_written or (bool(self.leaves) and not self.leaves.keys() & LOW)

    def sites(self, *kinds: str) -> list[NotedSite]:
        return [site for site in self._sites.values() if site.kind in kinds]

    def facts(self, tensor: Any) -> dict[str, Any]:
        """Return the facts of a tensor. Only `add` may change them."""
        if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided:
            return {}
        storage, made, facts = self._facts.get(view_of(tensor), (None, 0, {}))
        if storage is None or storage.expired():
            return {}
        return without_numbers(facts) if made < self._written.get(memory(tensor), 0) else facts

    def add(self, tensor: Tensor, **facts: Any) -> None:
        if len(self._facts) > self._MOST:
            self._facts.clear()
        known = self.facts(tensor)
        known = without_numbers(known) if memory(tensor) in self._writes else known
        held = StorageWeakRef(tensor.untyped_storage())
        self._facts[view_of(tensor)] = held, self._ops, {**known, **facts}

    def begin_op(self, written: Sequence[Tensor]) -> None:
        """Count an op, which writes to these tensors. What is known of their numbers holds until the next op."""
        self._written.update(dict.fromkeys(self._writes, self._ops))
        self._ops, self._writes = self._ops + 1, {*map(memory, written)}

    def forget_facts(self) -> None:
        self._facts.clear()
        self._written.clear()
        self._nodes.clear()
        self._readers.clear()
        self._weights_of.clear()
        there = [made for made in self.rewritten.values() if not made.held.expired()]
        if len(self.outlived) < self._MOST:
            self.outlived += [(each, at) for each in there for at, (_, old) in each.older.items() if old.expired()]
        self.rewritten.clear()
        self.last_cast = None
        self.born.clear()
