"""What is noted of ops: one call of an op, the lines at which something was found, and facts of tensors."""

from __future__ import annotations

import itertools
import os
import types as python_types
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from hmpx.insight.module_names import ModuleNames
from hmpx.insight.observed import OF_STEPS
from hmpx.insight.tensors import LOW, Tensor, is_finite
from hmpx.ops.policies.catalog import canonical
from hmpx.ops.wrapping.callers import frames, modules, users_frame

BACKWARD = "backward"
_BESIDE = (*OF_STEPS, *(os.path.dirname(str(torch.__file__)) + os.sep + each for each in ("nn/utils/", "amp/")))


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
        made_nan: whether an op has made a NaN of finite numbers. born: addresses of tensors in low precision that this
            iteration has made, or that are gradients. leaves: by dtype, the addresses of weights that ops have read.
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
