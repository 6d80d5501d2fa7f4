"""`doctor`: a region in which a training is looked at as it is.

Hooks around the optimizer's steps look at updates and gradients in some steps, and open an `OpWatch` for one iteration
now and then. Nothing is converted, nothing of torch is patched but `GradScaler.step`, and no random number is drawn, so
the training has the bits that it has without.
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from time import perf_counter
from types import FrameType
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hmpx.base import process_state
from hmpx.base.changes import Attribute, Changes
from hmpx.base.dtype_names import dtype_name
from hmpx.errors import HmpxError
from hmpx.insight.doctor import checks, followed, gradients
from hmpx.insight.doctor.diagnosis import Diagnosis
from hmpx.insight.doctor.fix import Base, Script, recipe_for
from hmpx.insight.doctor.op_watch import Notes, OpWatch, aside
from hmpx.insight.doctor.replicas import Replicas
from hmpx.insight.doctor.steps import SteppedOptimizer
from hmpx.ops.wrapping.callers import frames, users_line
from hmpx.recipes.module_patterns import module_names
from hmpx.updates.stepping.names import names_in, parameters

Optimizer = torch.optim.Optimizer
Parameter = torch.nn.Parameter

_SHARE = 0.1  # of the time: what looking at ops may take, after the first iteration that is looked at
_ITERATION = 50_000  # ops of one iteration that are looked at
# What is looked for in ops: the function that looks at each, and the one that tells what was found.
_FOLLOWED = (
    (checks.look_at_op, checks.of_ops),
    (checks.look_for_nonfinite, checks.of_nonfinite),
    (followed.look_at_casts, followed.of_casts),
    (followed.look_at_writes, followed.of_writes),
    (followed.look_at_products, followed.of_products),
    (gradients.look_at_scale, gradients.of_scale),
)


class Enough(BaseException):
    """Ends the script: as many steps as were asked for are done."""


class Examination:
    """What `doctor` does while it is open."""

    def __init__(self, steps: int | None, at: Collection[int], base: Base | None) -> None:
        self._steps, self._at, self._base = steps, frozenset(at), base
        self._optimizers: dict[int, SteppedOptimizer] = {}
        self._trouble: list[str] = []
        self._notes, self._upcasts, self._sums = Notes(), followed.EarlyUpcasts(), gradients.Sums()
        own = [(each.look, each.problems) for each in (self._upcasts, self._sums)]
        looks, self._findings = zip(*_FOLLOWED, *own, strict=True)
        self._watch = OpWatch(self._notes, looks, self._trouble)
        self._replicas = Replicas()
        self._names: dict[Parameter, str] = {}  # of every parameter of the models, trained or not
        self._modules: set[str] = set()  # names of theirs
        self._iterations = 0
        self._watched: list[int] = []  # iterations whose ops were looked at
        self._thread = threading.get_ident()
        self._began = self._last = perf_counter()
        self._took = 0.0  # looking at ops
        self._plain = 0.0  # the shortest iteration in which nobody looked
        self._compiled = _frames_compiled()  # before

    @contextlib.contextmanager
    def hooks(self) -> Iterator[None]:
        """Look at what runs inside."""
        changes = Changes()
        try:
            changes.callback(self._watch.close)
            changes.callback(register_optimizer_step_pre_hook(self._before).remove)
            changes.callback(register_optimizer_step_post_hook(self._after).remove)
            changes.callback(register_module_forward_pre_hook(self._model_is_made).remove)
            place = Attribute(torch.amp.GradScaler, "step", "torch.amp.GradScaler.step")
            changes.put(place, self._scaled(torch.amp.GradScaler.step))
            self._watch.look_at(math.inf, setting_up=1 not in self._at)
            yield
        finally:
            changes.close()

    @property
    def _trained(self) -> list[Parameter]:
        return [p for each in self._optimizers.values() for p in parameters(each.optimizer)]

    @property
    def _steps_done(self) -> int:
        return sum(each.steps for each in self._optimizers.values())

    def _model_is_made(self, *_: Any) -> None:
        """A forward pass or a step begins."""
        if self._watch.setting_up and threading.get_ident() == self._thread:
            self._watch.close()

    def _scaled(self, step: Callable) -> Callable:
        @functools.wraps(step)
        def scaled(scaler: torch.amp.GradScaler, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            before = self._steps_done
            result = step(scaler, optimizer, *args, **kwargs)
            is_skipped = self._steps_done == before
            if scaler.is_enabled():
                self._notes.skipped.append(is_skipped or bool(getattr(optimizer, "found_inf", None)))
                self._notes.scale = scaler.get_scale()
            if is_skipped and self._steps is not None and len(self._notes.skipped) >= self._steps:
                raise Enough
            return result

        return scaled

    def _before(self, optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
        if threading.get_ident() != self._thread:
            return
        self._model_is_made()
        with aside(self._trouble):
            if id(optimizer) not in self._optimizers:
                self._first_step(optimizer, sys._getframe(1))
            self._optimizers[id(optimizer)].begin()
        self._watch.stepping = not args and not kwargs  # without a closure, in which a forward pass would run

    def _first_step(self, optimizer: Optimizer, caller: FrameType) -> None:
        params = parameters(optimizer)
        self._optimizers[id(optimizer)] = SteppedOptimizer(optimizer, users_line(caller))
        for model in _models_around(caller, {*params}):
            self._names = {**names_in(model), **self._names}
            self._modules |= {*module_names(model)}
            self._notes.names.add(model)
        self._replicas.note("first", params)
        self._upcasts.trained(params)

    def _after(self, optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
        seen = self._optimizers.get(id(optimizer))
        if threading.get_ident() != self._thread or seen is None:
            return
        self._watch.stepping = False
        with aside(self._trouble):
            seen.end()
            self._sums.stepped(parameters(optimizer))
        if seen is next(iter(self._optimizers.values())):
            self._iterated()
        if self._steps is not None and seen.steps >= self._steps:
            raise Enough

    def _iterated(self) -> None:
        """The first optimizer has stepped: an iteration is over, and the next one begins."""
        self._iterations += 1
        now = perf_counter()
        took, self._last = now - self._last, now
        if self._watch.is_open:
            self._watched.append(self._iterations)
            self._took += took - self._plain if self._iterations > 1 else 0.0
            self._watch.close()
        elif self._iterations > 1:
            self._plain = min(self._plain or took, took)
        number = self._iterations + 1
        is_affordable = self._took <= _SHARE * (now - self._began)
        is_due = number in self._at or number == 3 or (number % 10 == 0 and is_affordable)
        if is_due and not self._compiles:  # compiled code would run under a mode
            self._watch.look_at(_ITERATION)

    @property
    def _compiles(self) -> bool:
        """Whether torch.compile has compiled anything meanwhile."""
        return _frames_compiled() > self._compiled

    def finish(self, found: Diagnosis) -> None:
        """Write what was found into `found`."""
        with aside(self._trouble):
            self._replicas.note("last", self._trained)
        numbered = enumerate(self._trained)
        names = {p: self._names.get(p) or f"parameter {i} of shape {tuple(p.shape)}" for i, p in numbered}
        problems = [problem for findings in self._findings for problem in findings(self._notes, names)]
        problems += [problem for each in self._optimizers.values() for problem in each.problems(names)]
        problems += self._replicas.problems(names)
        found.findings[:] = sorted(problems, key=lambda each: (not each.wrong, -each.weight))
        script = Script(self._trained, self._names, self._modules, followed.are_products_low_by_hand(self._notes))
        with aside(self._trouble):
            found.recipe, found.reasons, found.recipe_text = recipe_for(problems, script, self._base)
        found.looked[:] = self._looked()

    def _looked(self) -> list[str]:
        seen = self._optimizers.values()
        classes = ", ".join(dict.fromkeys(type(each.optimizer).__name__ for each in seen))
        dtypes: Counter[str] = Counter()
        for p in dict.fromkeys(self._trained):
            dtypes[dtype_name(p.dtype)] += p.numel()
        held = " and ".join(f"{count:,} in {name}" for name, count in dtypes.items())
        steps = max((each.steps for each in seen), default=0)
        samples = max((each.samples for each in seen), default=0)
        ops = f"at ops in iterations {', '.join(map(str, self._watched))}" if self._watched else "at no ops"
        lines = [f"{steps} steps of {classes}; parameters: {held}" if steps else "no optimizer has stepped"]
        lines += [f"looked at updates in {samples} of them (1, 2, 4, 7, 11 and so on), {ops}"] if steps else []
        if self._compiles:
            lines.append("compiled code hides its ops: set TORCH_COMPILE_DISABLE=1 to have them looked at")
        return lines + [f"could not look at everything: {each}" for each in self._trouble[:1]]


def _models_around(caller: FrameType, wanted: set[Parameter]) -> Iterator[torch.nn.Module]:
    """Find the models that hold these parameters.

    They stand in the variables of whoever steps the optimizer, or in the object whose method does.
    """
    for frame in frames(caller):
        values = [*frame.f_locals.values(), *getattr(frame.f_locals.get("self"), "__dict__", {}).values()]
        models = [value for value in values if isinstance(value, torch.nn.Module)]
        for model in sorted(models, key=lambda model: -len(wanted.intersection(model.parameters()))):
            if not wanted.isdisjoint(model.parameters()):
                wanted = wanted.difference(model.parameters())
                yield model
        if not wanted:
            return


def _frames_compiled() -> int:
    """Return how much torch.compile has had to compile in this process."""
    if "torch._dynamo" not in sys.modules:
        return 0
    return sys.modules["torch._dynamo"].utils.counters["frames"]["total"]


def doctor(steps: int | None = None, at: Collection[int] = ()) -> contextlib.AbstractContextManager[Diagnosis]:
    """Look at a training as it is, and say what is wrong with its precision.

    Updates of weights in BF16 and FP16 are looked at in steps 1, 2, 4, 7, 11 and so on, with up to 1024 elements of
    each parameter. Ops are looked at in the third iteration, and in every tenth as long as that takes no more than a
    tenth of the time. Nothing is converted, and the training has the bits that it has without. Compiled code hides its
    ops. The thread that opens it is looked at, on each rank its own part.

    Args:
        steps: after so many steps of an optimizer, leave the region; None: look on until it ends.
        at: iterations, from 1, whose ops are looked at in any case.

    Returns:
        A `Diagnosis`, which is complete when the region ends, by an exception as well.

    Raises:
        HmpxError: a doctor is at work already, or `steps` is no positive integer.

    Example:
        >>> with hmpx.doctor() as found:
        ...     for _ in range(4):
        ...         model(inputs).sum().backward()
        ...         optimizer.step()
        >>> found.wrong, [each.kind for each in found.findings]
        (False, [])
    """
    return examined(steps, at)


@contextlib.contextmanager
def examined(steps: int | None, at: Collection[int], base: Base | None = None) -> Iterator[Diagnosis]:
    """Do what `doctor` does. base: the recipe that the program runs under, which the recipe that is found extends."""
    if steps is not None and (not isinstance(steps, int) or isinstance(steps, bool) or steps < 1):
        raise HmpxError(f"doctor takes a number of steps from 1 on, not {steps!r}")
    if process_state.examined:
        raise HmpxError("hmpx.doctor is open already: read what it found, or close it first")
    found, examination = Diagnosis(), Examination(steps, at, base)
    process_state.examined.append(examination)
    try:
        with examination.hooks():
            yield found
    except Enough:
        pass
    finally:
        process_state.examined.remove(examination)
        examination.finish(found)
