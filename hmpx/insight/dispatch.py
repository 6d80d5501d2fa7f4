"""Says which iterations are looked at, and hands their ops to `Look`s: forward, backward and step.

At torch's dispatcher, an op has the dtypes that it computes in, since autocast has cast its inputs before. A dispatch
mode changes no result and patches nothing.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from time import perf_counter, process_time
from types import FrameType
from typing import Any

import torch

from hmpx.base import process_state
from hmpx.base.torch_private import (
    DISPATCH,
    TorchDispatchMode,
    autograd_node,
    graph_task,
    private,
    tree_leaves,
    tree_map_only,
)
from hmpx.insight.finding import Finding, Names
from hmpx.insight.notes import Notes, OpCall, Schema, own_frame, without_numbers
from hmpx.insight.tensors import LOW, Tensor, floating, held_here, memory, sample, view_of
from hmpx.ops.wrapping.callers import frames
from hmpx.ops.wrapping.observing import unobserved
from hmpx.ops.wrapping.overriding import PLAIN

_SHARE = 0.05  # the share of the time that looking at ops may take
_FREE = 1.0  # seconds that looking at ops may take in any case
_LOOKS = (3, 11, 22, 40, 41, 50)  # after the first; what runs in iterations 10n or 20n + 0, 1, 2 runs in one of these


class Iterations:
    """Counts iterations, and says before each whether its ops are to be looked at.

    It chooses the first iteration, then `_LOOKS` of a stage of the training and then every 13th. All but the first two
    are left out once looking has taken more than `_SHARE` of the time and more than `_FREE` seconds. That is the
    shorter of wall and CPU time: a wait, as for other programs of the machine, is not for looking.

    Attributes:
        count: how many iterations are over. watched: those whose ops were looked at. is_due: whether the ops of the
            next one are to be looked at. passed_over: how many iterations were left out, as looking had taken too long.
    """

    def __init__(self, at: Collection[int], only: bool = False) -> None:
        self._at, self._only = at, only  # look at these iterations in any case; whether at no others
        self.count = self._stage = self.passed_over = 0
        self.watched: list[int] = []
        self.is_due = not only or 1 in at
        self._last = perf_counter(), process_time()
        self._whole = self._took = 0.0  # seconds of all iterations, and those that looking at ops has cost
        self._plain = 0.0  # seconds of the shortest iteration in which nobody looked

    def over(self, was_looked_at: bool) -> None:
        self.count += 1
        now = perf_counter(), process_time()
        took, self._last = min(b - a for a, b in zip(self._last, now, strict=True)), now
        self._whole += took
        if was_looked_at:
            self.watched.append(self.count)
            self._took += took - self._plain if self.count > 1 else 0.0
        elif self.count > 1:
            self._plain = min(self._plain or took, took)
        next_one = self.count + 1 - self._stage
        is_turn = next_one in _LOOKS or (next_one > _LOOKS[-1] and next_one % 13 == 11)
        is_affordable = self._took <= max(_FREE, _SHARE * self._whole)
        is_next = not self._only and (next_one == _LOOKS[0] or (is_turn and is_affordable))
        self.is_due = self.count + 1 in self._at or is_next
        self.passed_over += is_turn and not self.is_due

    def restart(self) -> None:
        """Count from 1 when the first optimizer steps, since backward passes were counted before."""
        self.watched[:] = [1] if self.count and 1 in self.watched else []
        self.count = self.passed_over = 0

    def begin_stage(self) -> None:
        self._stage = self.count


_no_dispatch, _no_function = private("torch._C._DisableTorchDispatch"), private("torch._C.DisableTorchFunctionSubclass")
SAMPLE_SIZE = 256  # elements of one tensor that are looked at, at most
MOST = 2**22  # elements of a tensor that is copied whole, as what an op writes there hangs on all of it
ITERATION = 50_000  # ops of one iteration that are looked at, at most
_TROUBLES = 3  # errors of looks that are told
STAGES = ("set up", "forward", "backward", "step")
_ENGINE = os.path.join("torch", "autograd", "graph.py")
_INNERMOST = "torch.utils._python_dispatch._get_current_dispatch_mode"


class OpWatch(TorchDispatchMode):
    """Hands the ops of an iteration to looks, while it is open, in the thread that opens it.

    setting_up: whether the ops are those that make the model. stepping: whether an optimizer's step runs.
    """

    supports_higher_order_operators = True  # torch reads this, and lets `torch.cond` and its kin pass
    is_open = False

    def __init__(self, notes: Notes, looks: Sequence[Look], trouble: list[str]) -> None:
        DISPATCH.require()
        super().__init__()
        self._notes, self._trouble = notes, trouble
        self._called = [each.called for each in looks if type(each).called is not Look.called]
        self._over = [each.over for each in looks if type(each).over is not Look.over]
        self._see = {stage: [each.see for each in looks if stage in each.stages] for stage in STAGES}
        self._sees = any(self._see.values())
        self.stepping = self.setting_up = False
        self._schemas: dict[Any, Schema] = {}
        self._left = -1.0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Tell torch.compile to compile while this mode is open. Otherwise fullgraph=True raises."""
        return True

    def look_at(self, most: float, setting_up: bool = False) -> None:
        self._left, self.setting_up = most, setting_up
        self.resume()

    def suspend(self) -> None:
        """Close the mode until `resume`. It stays open in compiled code, and if another mode was opened since."""
        if self.is_open and private(_INNERMOST)() is self and not in_compiled_code():
            self.is_open = False
            self.__exit__(None, None, None)

    def resume(self) -> None:
        if self._left >= 0 and not self.is_open:
            self.__enter__()
            self.is_open = True

    @property
    def is_looking(self) -> bool:
        """Whether it was opened to look at ops and not closed since."""
        return self.is_open and self._left >= 0

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Look at no op, and close the mode, as each op is slower while it is open; but not in a backward pass."""
        left, was_open = self._left, self.is_open
        if graph_task() == -1:
            self.suspend()
        self._left = -math.inf
        try:
            yield
        finally:
            self._left = left
            if was_open:
                self.resume()

    def close(self) -> None:
        """Look at no more ops. The mode itself stays open in a backward pass, and where `suspend` leaves it open."""
        if self._left < 0 and not self.is_open:
            return
        self._left, self.setting_up = -1, False
        if graph_task() == -1:
            self.suspend()
        with unwatched(self._trouble):
            for over in self._over:
                over()
        self._notes.forget_facts()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if self._left <= 0:
            if self._left == 0:
                self._notes.unseen[f"ops of an iteration behind its {ITERATION:,}th"] += 1
            return func(*args, **kwargs)
        self._left -= 1
        for called in self._called:
            called(func, args, kwargs)
        if not self._sees:
            return func(*args, **kwargs)
        schema = self._schemas.get(func)
        if schema is None:
            schema = self._schemas[func] = Schema(func)
        before, graphed, frame = None, torch.is_grad_enabled(), sys._getframe(1)
        node = autograd_node()
        # What an optimizer's step writes, such as a denominator or a moment, is no average of weights.
        if schema.updates and not self.setting_up and not self.stepping:
            with unwatched(self._trouble):
                before = self._before(schema, args, kwargs, None if is_of_hook(frame) else node)
        result = func(*args, **kwargs)
        with unwatched(self._trouble):
            whole = floating((*args, *kwargs.values()) if kwargs else args, True)
            given, results, seen = whole, floating((result,), True), result
            if not PLAIN.issuperset(map(type, (*whole, *results))):  # this rank's parts stand for what is sharded
                args, kwargs, seen = tree_map_only(Tensor, held_here, (args, kwargs, result))
                given, results = [held_here(each) for each in whole], [held_here(each) for each in results]
            odd = next((each for each in (*given, *results) if not _is_plain(each)), None)
            if odd is not None:
                # `nn.TransformerEncoder` makes nested tensors of padded ones where it evaluates.
                if not self.stepping and node is None and not odd.is_meta and (graphed or not odd.is_nested):
                    kind = "nested" if odd.is_nested else odd.layout
                    what = type(odd).__name__ if kind is torch.strided else f"{kind} tensors"
                    self._notes.unseen[f"ops of {what}"] += 1
            elif given or results:
                stage = "backward" if node is not None else "step" if self.stepping else "forward"
                trains = graphed and any(each.requires_grad for each in whole)
                is_made = (
                    self.setting_up and node is None and not (trains and len(given) > 1)
                )  # by functions alone a model trains, too
                stage = "set up" if is_made else stage
                if stage == "forward" and trains:
                    self._notes.note_node(schema.name, frame)
                op = OpCall(
                    func, schema, args, kwargs, given, results, before, frame, stage, node, graphed, trains, seen
                )
                if stage != "step":
                    self._trace(op, whole)
                self._look(op)
            else:
                self._notes.hand_on(args, kwargs, result)
        return result

    def _before(self, schema: Schema, args: tuple, kwargs: dict, node: Any) -> list[Tensor] | None:
        """Copy low-precision tensors that an op is about to update: in backward, or if older than the iteration.

        node: of autograd, that runs the op; None for none, and for one that a hook of the program calls.

        Samples tell of an op that treats each element by itself; of another one, whole tensors do.
        """
        targets = [held_here(t) for t in schema.targets(args, kwargs)]
        if not targets or not all(t.dtype in LOW and t.numel() and _is_plain(t) for t in targets):
            return None
        if node is None and any(memory(t) in self._notes.born for t in targets):
            return None
        if schema.is_pointwise or schema.is_norm:
            return [sampled(t).clone() for t in targets]
        given = floating((*args, *kwargs.values()))
        if node is not None or not any(t.numel() > 1 and not any(t is each for each in targets) for t in given):
            return None  # nothing is added to what was there
        if (most := max(t.numel() for t in given)) > MOST:
            self._notes.unseen[f"{schema.name} into a tensor, with {most:,} numbers"] += 1
            return None
        return [t.detach().clone() for t in targets]

    def _trace(self, op: OpCall, whole: Sequence[Tensor]) -> None:
        """Note addresses: of memory that this iteration makes, and of weights (leaves that need a gradient).

        whole: what was given, sharded tensors too.
        """
        notes = self._notes
        is_of_gradient = op.stage == "backward" and not is_of_hook(op.frame)
        if not op.is_view and (not op.schema.written or is_of_gradient):
            notes.born.update(memory(t) for t in op.results if t.dtype in LOW)
        for t in whole if op.graphed and op.name != "detach" else ():
            if t.requires_grad and t.is_leaf:
                notes.leaves.setdefault(t.dtype, set()).add(memory(t))
                if t.dtype in LOW and op.stage != "set up":
                    notes.note_weight(t, op.stage == "forward")

    def _look(self, op: OpCall) -> None:
        self._notes.begin_op(op.schema.targets(op.args, op.kwargs) if op.schema.written else ())
        if op.is_view and (facts := self._notes.facts(op.given[0])):
            for at, result in enumerate(op.results):
                self._notes.add(result, **_seen_through(op, at, facts))
        for see in self._see[op.stage]:
            try:
                see(self._notes, op)
            except Exception as error:  # of one look, which hides nothing from the next
                note_trouble(self._trouble, error)


def _seen_through(op: OpCall, at: int, facts: dict[str, Any]) -> dict[str, Any]:
    """Return the facts of a tensor as those of a view of it, which may have fewer numbers, or in another order.

    Functions that return its numbers are seen through the same view; other facts that hold numbers are left out.
    """
    given, view = op.given[0], op.results[at]
    if view_of(view) == view_of(given):
        return facts
    handed_on = without_numbers(facts)
    functions = {name: fact for name, fact in facts.items() if callable(fact)}
    if functions and op.args[0] is given and view.dtype is given.dtype:
        handed_on |= {name: _viewed(numbers, op, at) for name, numbers in functions.items()}
    return handed_on


def _viewed(numbers: Callable[[], Tensor | None], op: OpCall, at: int) -> Callable[[], Tensor | None]:
    func, rest, kwargs, strides = op.func, op.args[1:], op.kwargs, op.given[0].stride()

    def seen() -> Tensor | None:
        whole = numbers()
        lies_alike = whole is not None and whole.stride() == strides  # else `as_strided` shows other numbers
        return tree_leaves(func(whole, *rest, **kwargs))[at] if lies_alike else None

    return seen


def is_of_hook(frame: FrameType) -> bool:
    """Return whether a frame below the dispatcher is Python of a program, and does not run autograd's engine."""
    return not own_frame(frame).f_code.co_filename.endswith(_ENGINE)


def in_compiled_code() -> bool:
    """Return whether a function that torch.compile has made runs, which sets the dispatch keys back as it returns."""
    file = getattr(sys.modules.get("torch._dynamo.eval_frame"), "__file__", None)
    return file is not None and any(each.f_code.co_filename == file for each in frames(sys._getframe(1)))


def _is_plain(tensor: Tensor) -> bool:
    """Return whether the values can be read: a strided tensor, not on meta, and no CUDA graph is being captured.

    A subclass without a `__torch_dispatch__` of its own holds its values as a plain tensor does.
    """
    if type(tensor) not in PLAIN and (
        type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__ or torch.nn.parameter.is_lazy(tensor)
    ):
        return False
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_nested:
        return False
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def sampled(tensor: Tensor) -> Tensor:
    """Return a small tensor as it is, and a sample of a larger one."""
    return tensor.detach() if tensor.numel() <= SAMPLE_SIZE else sample(tensor, SAMPLE_SIZE)


@contextlib.contextmanager
def unwatched(trouble: list[str], is_whole: bool = False) -> Iterator[None]:
    """Compute for doctor alone: no op in here is looked at or cast; an error is noted and does not reach the program.

    is_whole: whether tensor subclasses run their own ops in here. If so, pause the `OpWatch` first.
    """
    uncast = unobserved() if process_state.converted else contextlib.nullcontext()
    hidden = contextlib.nullcontext() if is_whole else _no_dispatch()
    try:
        with torch.no_grad(), hidden, _no_function(), uncast:
            yield
    except Exception as error:  # doctor meets kinds of tensors that it does not know
        note_trouble(trouble, error)


def note_trouble(trouble: list[str], error: Exception) -> None:
    said = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
    if said not in trouble and len(trouble) < _TROUBLES:
        trouble.append(said)


def in_autocast(tensor: Tensor) -> bool:
    """Return whether an op was called where torch.autocast casts on a tensor's device, before a mode has seen it.

    Below the dispatcher autocast is off, and the depth of regions counts those that are off.
    """
    with private("torch._C._RestorePythonTLSSnapshot")():
        return torch.is_autocast_enabled(tensor.device.type)


Optimizer = torch.optim.Optimizer


class Look:
    """Looks for one thing. A look overrides the methods that it needs. `Capture` calls them, and sees no op of theirs.

    An error in a look does not reach the program. The report names it among what was not checked.

    Attributes:
        stages: the stages of an iteration whose ops `see` gets: "set up" before the first forward pass, "forward",
            "backward", "step".
        follows_steps: whether it is told of optimizers. The capture then keeps them and their models alive.
    """

    stages: Collection[str] = ()
    follows_steps = True

    def called(self, func: Any, args: tuple, kwargs: dict) -> None:
        """An op is about to run, given as torch's dispatcher has it. This call costs a tenth of what `see` costs."""

    def see(self, notes: Notes, op: OpCall) -> None:
        """One op has run, in an iteration whose ops are looked at, and in one of `stages`."""

    def over(self) -> None:
        """No more ops of this iteration are seen. What was kept of it may be needed for the last time."""

    def met(self, optimizer: Optimizer, where: str) -> None:
        """An optimizer is about to step for the first time, at this line."""

    def loss(self, notes: Notes, losses: Sequence[torch.Tensor]) -> None:
        """A backward pass begins with these losses."""

    def passed(self, notes: Notes) -> None:
        """A backward pass is over."""

    def unscaled(self, optimizer: Optimizer, scale: float) -> None:
        """A GradScaler is about to divide the gradients of an optimizer by this scale."""

    def begin(self, optimizer: Optimizer, iteration: int) -> None:
        """A step begins, and its gradients are there. iteration: the number of the current iteration, from 1."""

    def end(self, optimizer: Optimizer, evaluations: int) -> None:
        """The step is done. evaluations: how often it has called a closure."""

    def close(self, optimizers: Iterable[Optimizer]) -> None:
        """The run is over."""

    def findings(self, notes: Notes, names: Names) -> Iterable[Finding]:
        """Say what was found. names: the names of the parameters that were stepped."""
        return ()

    def unchecked(self, notes: Notes, names: Names) -> Iterable[str]:
        """Say what could not be looked at, and why."""
        return ()


class OpLook(Look):
    """A look at ops alone, made of two functions."""

    def __init__(
        self,
        see: Callable[[Notes, OpCall], None],
        findings: Callable[[Notes, Names], Iterable[Finding]],
        *stages: str,
    ) -> None:
        self._see, self._findings, self.stages = see, findings, stages

    def see(self, notes: Notes, op: OpCall) -> None:
        self._see(notes, op)

    def findings(self, notes: Notes, names: Names) -> Iterable[Finding]:
        return self._findings(notes, names)
