"""The ops of whole iterations, forward, backward and step, seen at torch's dispatcher as `record` sees what escapes.

There each op has the dtypes that it computes in, after the casts of autocast. A dispatch mode changes no result and
patches nothing. `checks` says what is looked for in one op, `followed` what is looked for in several.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import types as python_types
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from hmpx.base import process_state
from hmpx.insight.doctor.twin import sample
from hmpx.insight.escaped import DispatchWatch
from hmpx.insight.module_names import ModuleNames
from hmpx.insight.observed import OF_STEPS
from hmpx.insight.tensors import LOW, Tensor, floating, is_finite
from hmpx.ops.policies.catalog import canonical
from hmpx.ops.wrapping.callers import frames, modules, users_frame
from hmpx.ops.wrapping.observing import unobserved

BACKWARD = "backward"
FEW = 256  # elements of one tensor that are looked at
VIEWS = frozenset(
    "view _unsafe_view reshape t transpose permute unsqueeze squeeze expand slice select split detach alias".split()
)
_ARITHMETIC = ("add", "sub", "mul", "div", "lerp", "addcmul", "addcdiv")
_WRITES = frozenset(f"{before}{name}_" for before in ("", "_foreach_") for name in _ARITHMETIC)
_WRITES |= {"index_add_", "scatter_add_"}
_BESIDE = (*OF_STEPS, *(os.path.dirname(str(torch.__file__)) + os.sep + each for each in ("nn/utils/", "amp/")))
_node = torch._C._current_autograd_node


@dataclass
class Spot:
    """One line of the program at which one kind of thing was found.

    said: what was found there the first time. is_inside: whether `module` is not the outermost one. mended_by: what
    puts the op into FP32, if one of `checks` has looked for that. numbers: sums over the calls. places: where the
    memory of the tensors begins that it writes to.
    """

    kind: str
    op: str
    where: str
    module: str
    is_inside: bool
    said: str
    mended_by: str = ""
    calls: int = 0
    numbers: Counter[str] = field(default_factory=Counter)
    places: set[int] = field(default_factory=set)

    @property
    def name(self) -> str:
        """What a user calls the op: "softmax" for "_softmax"."""
        return "to" if self.op == "_to_copy" else canonical(self.op.strip("_").removesuffix("_forward"))


@dataclass
class OpCall:
    """One call of an op.

    Attributes:
        func: the op with its overload. name: without overload, as in "add_" or "_softmax".
        given, results: the floating tensors among its arguments and its results.
        before: copies, or samples, of the low-precision tensors that it writes to in place, from before; None if there
            are none, or outside of a backward pass if they are of this iteration.
        frame: the innermost Python frame below torch's dispatcher.
        stage: "set up" before the first forward pass, "forward", "backward" or "step". node: of autograd, in a backward
            pass. graphed: whether autograd looks on.
    """

    func: Any
    name: str
    args: tuple
    kwargs: dict[str, Any]
    given: list[Tensor]
    results: list[Tensor]
    before: list[Tensor] | None
    frame: python_types.FrameType
    stage: str
    node: Any
    graphed: bool

    @property
    def out(self) -> Tensor:
        return self.results[0]

    def inner_frames(self) -> Iterator[python_types.FrameType]:
        """Return the frames of torch and hmpx between the op and the user's line."""
        user = users_frame(self.frame)
        return itertools.takewhile(lambda each: each is not user, frames(self.frame))

    @cached_property
    def is_beside(self) -> bool:
        """Whether torch's optimizers, clipping or scaling called it, which are no part of the model."""
        files = [frame.f_code.co_filename for frame in self.inner_frames()]
        return any(file.startswith(_BESIDE) and not file.endswith("swa_utils.py") for file in files)

    @cached_property
    def scalars(self) -> list[float]:
        return [float(v) for v in (*self.args, *self.kwargs.values()) if isinstance(v, int | float)]

    @cached_property
    def nonfinite(self) -> Tensor | None:
        """The values in a result that are inf or NaN; None if there are none, or some in the inputs as well."""
        bad = next((each for each in self.results if each.numel() and not is_finite(each)), None)
        if bad is None or not all(is_finite(each) for each in self.given if each.numel()):
            return None
        return bad[~torch.isfinite(bad)] if all(abs(each) < float("inf") for each in self.scalars) else None

    def is_called_from(self, *names: str) -> bool:
        """Whether one of the nearest callers is a function, or in a file, of such a name."""
        near = itertools.islice(frames(self.frame), 4)  # Dynamo, if it was imported, stands around a mode's function
        return any(each.f_code.co_name in names or each.f_code.co_filename.endswith(names) for each in near)

    @cached_property
    def is_in_forward(self) -> bool:
        """Whether a module's forward is running."""
        calls = (each for each in frames(self.frame) if each.f_code.co_name in ("_call_impl", "forward"))
        return any(next(modules(each), None) is not None for each in calls)


class Notes:
    """What the ops tell: lines at which something was found, and facts of tensors, as long as these live.

    The facts are "moment": "square", "mean", "mean of square" or "square of mean"; "cast": the dtype before its last
    cast, and the line of that; "scaled": another tensor, and the number by which this one is larger.

    Attributes:
        names: of modules and parameters. last_cast: the result and the line of the last op, if that was a cast.
        made_nan: whether an op has made a NaN of finite numbers. born: where the memory of tensors in low precision
            begins that are younger than the iteration, or gradients. leaves: the same of weights that ops have read,
            by their dtype.
        skipped: for each call of ``GradScaler.step``, whether it has skipped the step. scale: after the last one.
    """

    _MOST = 4096

    def __init__(self) -> None:
        self.names = ModuleNames()
        self.last_cast: tuple[weakref.ref[Tensor], Spot] | None = None
        self.made_nan = False
        self.born: set[int] = set()
        self.leaves: dict[torch.dtype, set[int]] = {}
        self.skipped: list[bool] = []
        self.scale = 0.0
        self._spots: dict[tuple, Spot] = {}
        self._facts: dict[int, tuple[weakref.ref[Tensor], dict[str, Any]]] = {}

    def note(self, kind: str, op: OpCall, said: str = "", **numbers: float) -> Spot:
        """Count one call at its line; a line is kept once for a kind, an op and a module."""
        return self.note_line(kind, op.name, op.frame, said, **numbers)

    def note_line(self, kind: str, op: str, frame: python_types.FrameType, said: str = "", **numbers: float) -> Spot:
        """Count one call of the line that runs in a frame."""
        user, module = users_frame(frame), next(modules(frame), None)
        key = kind, op, user and user.f_code, user and user.f_lineno, module
        spot = self._spots.get(key)
        if spot is None:
            where = f"{user.f_code.co_filename}:{user.f_lineno}" if user else ""
            name = self.names.of_module(module, frame)
            spot = Spot(kind, op, where, name, name not in ("", type(module).__name__), said)
            self._spots[key] = spot
        spot.calls += 1
        spot.numbers.update(numbers)
        return spot

    def loss(self, dtypes: Sequence[torch.dtype], frame: python_types.FrameType) -> None:
        """Note a backward pass that begins with scalars of these dtypes, each with a gradient of 1."""
        if any(dtype in LOW for dtype in dtypes):
            self.note_line("loss", BACKWARD, frame)

    def are_weights(self, places: set[int]) -> bool:
        """Whether the memory that begins at one of these places holds weights."""
        return any(places & known for known in self.leaves.values())

    def spots(self, *kinds: str) -> list[Spot]:
        """Return the lines of some kinds, in the order in which they were found."""
        return [spot for spot in self._spots.values() if spot.kind in kinds]

    def facts(self, tensor: Any) -> dict[str, Any]:
        """Return the facts of a tensor, to be read."""
        ref, facts = self._facts.get(id(tensor), (None, {}))
        return facts if ref is not None and ref() is tensor else {}

    def add(self, tensor: Tensor, **facts: Any) -> None:
        """Note more facts of a tensor."""
        if len(self._facts) > self._MOST:
            self._facts.clear()
        self._facts[id(tensor)] = weakref.ref(tensor), {**self.facts(tensor), **facts}

    def forget_facts(self) -> None:
        self._facts.clear()
        self.last_cast = None
        self.born.clear()


class OpWatch(DispatchWatch):
    """Looks at ops while it is open, by functions of the notes and the op.

    setting_up: whether the ops are those that make the model. stepping: whether an optimizer's step runs.
    """

    def __init__(self, notes: Notes, looks: Sequence[Callable[[Notes, OpCall], None]], trouble: list[str]) -> None:
        super().__init__()
        self._notes, self._looks, self._trouble = notes, looks, trouble
        self.stepping = self.setting_up = False
        self._names: dict[Any, str] = {}
        self._left = 0.0

    def look_at(self, most: float, setting_up: bool = False) -> None:
        """Look at up to `most` ops from now on."""
        self._left, self.setting_up = most, setting_up
        self.open()

    @property
    def is_looking(self) -> bool:
        """Whether it was opened to look at ops and not closed since."""
        return self.is_open and self._left >= 0

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Look at nothing that runs inside."""
        left, self._left = self._left, 0
        try:
            yield
        finally:
            self._left = left

    def close(self) -> None:
        """Look at no more. Below a mode that was opened since, and in a backward pass, this one waits."""
        self._left, self.setting_up = -1, False
        if torch._C._current_graph_task_id() == -1:
            super().close()
        self._notes.forget_facts()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if self._left <= 0:
            return func(*args, **kwargs)
        self._left -= 1
        name = self._names.get(func)
        if name is None:
            name = self._names[func] = str(getattr(func, "overloadpacket", func)).partition(".")[2]
        before, graphed = None, torch.is_grad_enabled()
        if name in _WRITES and not self.setting_up and not self.stepping:
            with aside(self._trouble):
                before = self._before(args[0] if name.startswith("_foreach_") else [args[0]])
        result = func(*args, **kwargs)
        with aside(self._trouble):
            given, results = floating((*args, *kwargs.values()) if kwargs else args), floating((result,))
            if (given or results) and all(map(_is_plain, (*given, *results))):
                node = _node()
                stage = "backward" if node is not None else "step" if self.stepping else "forward"
                stage = "set up" if self.setting_up else stage
                self._trace(name, stage, given if graphed and name != "detach" else [], results)
                frame = sys._getframe(1)
                self._look(OpCall(func, name, args, kwargs, given, results, before, frame, stage, node, graphed))
        return result

    def _before(self, targets: Sequence[Any]) -> list[Tensor] | None:
        """Keep what an op is about to write to: gradients, and what lives on between iterations, in low precision."""
        if not all(isinstance(t, Tensor) and t.dtype in LOW and t.numel() and _is_plain(t) for t in targets):
            return None
        if not targets or (_node() is None and any(memory(t) in self._notes.born for t in targets)):
            return None
        return [few(t).clone() for t in targets]

    def _trace(self, name: str, stage: str, given: list[Tensor], results: list[Tensor]) -> None:
        """Note which memory is of this iteration, and which holds weights. given: what autograd looks at."""
        if name not in VIEWS and not (name.endswith("_") and stage != "backward"):  # which writes to gradients
            self._notes.born.update(memory(t) for t in results if t.dtype in LOW)
        for t in given:
            if t.requires_grad and t.is_leaf:
                self._notes.leaves.setdefault(t.dtype, set()).add(memory(t))

    def _look(self, op: OpCall) -> None:
        if op.name in VIEWS and op.given and (facts := self._notes.facts(op.given[0])):
            for result in op.results:
                self._notes.add(result, **facts)
        for look in self._looks:
            look(self._notes, op)


def _is_plain(tensor: Tensor) -> bool:
    """Whether its values can be read: no fake tensor, no part of a bunch, no subclass, nothing that is captured."""
    if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided or tensor.is_meta:
        return False
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def memory(tensor: Tensor) -> int:
    """Return where the memory of a tensor begins, which it shares with its views."""
    return tensor.untyped_storage().data_ptr()


def few(tensor: Tensor) -> Tensor:
    """Return a small tensor as it is, and else a sample."""
    return tensor.detach() if tensor.numel() <= FEW else sample(tensor, FEW)


@contextlib.contextmanager
def aside(trouble: list[str], is_whole: bool = False) -> Iterator[None]:
    """Compute for the doctor alone: no op in here is looked at or cast, and what fails harms nobody and is told.

    is_whole: whether classes of tensors have their own ops in here; an `OpWatch` is to be paused then.
    """
    uncast = unobserved() if process_state.converted else contextlib.nullcontext()
    hidden = contextlib.nullcontext() if is_whole else torch._C._DisableTorchDispatch()
    try:
        with torch.no_grad(), hidden, uncast:
            yield
    except Exception as error:  # of a kind of tensor that nobody has thought of
        if not trouble:
            trouble.append(f"{type(error).__name__}: {error}")


def in_autocast() -> bool:
    """Whether an op was called in a region of torch.autocast, which switches itself off before a mode sees the op."""
    depth = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    return depth > 1
