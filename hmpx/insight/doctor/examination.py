"""What `doctor` does while it is open.

Hooks around the optimizer's steps let FP32 copies step along in some steps, and open an `OpWatch` for one iteration now
and then. Nothing is converted, nothing of torch is patched but `backward` and `GradScaler.step`, and no random number
is drawn, so the training has the bits that it has without.
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from types import FrameType
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hmpx.base.changes import Attribute, Changes
from hmpx.base.dtype_names import dtype_name
from hmpx.insight.doctor import checks, followed, writes
from hmpx.insight.doctor.diagnosis import Diagnosis, merged
from hmpx.insight.doctor.ending import end
from hmpx.insight.doctor.findings import of_steps, unchecked_of
from hmpx.insight.doctor.fix import Base, Script, recipe_for
from hmpx.insight.doctor.notes import Notes
from hmpx.insight.doctor.op_watch import Iterations, OpWatch, aside
from hmpx.insight.doctor.replicas import Replicas
from hmpx.insight.doctor.steps import SteppedOptimizer
from hmpx.insight.text_table import number
from hmpx.ops.wrapping.callers import frames, users_line
from hmpx.recipes.module_patterns import module_names
from hmpx.updates.stepping.names import inside_zero, names_in, parameters
from hmpx.updates.stepping.step_call import StepCall

Optimizer = torch.optim.Optimizer
Parameter = torch.nn.Parameter

_ITERATION = 50_000  # ops of one iteration that are looked at
# What is looked for in ops: the function that looks at each, and the one that tells what was found.
_FOLLOWED = (
    (checks.look_at_op, checks.of_ops),
    (checks.look_for_nonfinite, checks.of_nonfinite),
    (followed.look_at_casts, followed.of_casts),
    (writes.look_at_writes, writes.of_writes),
    (followed.look_at_products, followed.of_products),
    (followed.look_at_scale, followed.of_scale),
)


class Examination:
    """The hooks of a `doctor` that is open, and what they have seen."""

    def __init__(self, steps: int | None, at: Collection[int], base: Base | None) -> None:
        self._steps, self._base = steps, base
        self._iterations = Iterations(at)
        self._optimizers: dict[int, SteppedOptimizer] = {}
        self._trouble: list[str] = []
        self._notes, self._upcasts, self._sums = Notes(), followed.EarlyUpcasts(), followed.Sums()
        own = [(each.look, each.problems) for each in (self._upcasts, self._sums)]
        looks, self._findings = zip(*_FOLLOWED, *own, strict=True)
        self._watch = OpWatch(self._notes, looks, self._trouble)
        self._replicas = Replicas()
        self._names: dict[Parameter, str] = {}  # of every parameter of the models, trained or not
        self._modules: set[str] = set()  # names of theirs
        self._running: FrameType | None = None  # of the step that runs
        self._forward_hook: Any = None
        self._last_hook: Any = None  # behind the hooks that the program has put around the step
        self._elsewhere = False  # whether another thread has stepped
        self._thread = threading.get_ident()
        self._compiled = _frames_compiled()  # before
        self._changes = Changes()

    @contextlib.contextmanager
    def hooks(self) -> Iterator[None]:
        """Look at what runs inside."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._changes.close)
            changes = self._changes
            changes.callback(self._watch.close)
            changes.callback(register_optimizer_step_pre_hook(self._before).remove)
            changes.callback(register_optimizer_step_post_hook(self._after).remove)
            changes.callback(lambda: self._forward_hook and self._forward_hook.remove())
            self._await_forward(True)
            changes.callback(lambda: self._last_hook and self._last_hook.remove())
            backward = Attribute(torch.autograd, "backward", "torch.autograd.backward")
            changes.put(backward, self._backward(torch.autograd.backward))
            place = Attribute(torch.amp.GradScaler, "step", "torch.amp.GradScaler.step")
            changes.put(place, self._scaled(torch.amp.GradScaler.step))
            self._watch.look_at(math.inf, setting_up=not self._iterations.first_is_due)
            yield

    @property
    def _trained(self) -> list[Parameter]:
        return [p for each in self._optimizers.values() for p in parameters(each.optimizer)]

    @property
    def _steps_done(self) -> int:
        return sum(each.steps for each in self._optimizers.values())

    @property
    def _is_here(self) -> bool:
        return threading.get_ident() == self._thread

    def _await_forward(self, waits: bool) -> None:
        """Have the next forward pass tell, or no more: such a hook makes each call of a module slower."""
        if waits is (self._forward_hook is not None) or self._compiles:  # Dynamo would compile again
            return
        if waits:
            self._forward_hook = register_module_forward_pre_hook(self._model_is_made)
        else:
            self._forward_hook = self._forward_hook.remove()

    def _model_is_made(self, *_: Any) -> None:
        """A forward pass or a step begins."""
        if torch.compiler.is_compiling() or not self._is_here:  # Dynamo traces the hooks of modules
            return
        if self._watch.setting_up:
            self._watch.close()
        self._look_if_due()

    def _look_if_due(self) -> None:
        if torch._C._current_graph_task_id() != -1:  # at the end of a backward pass, modes are what they were before
            self._await_forward(True)
            return
        if not self._watch.is_looking:
            self._watch.close()
        self._await_forward(self._watch.is_open and not self._watch.is_looking)  # below another mode it waits
        if self._iterations.is_due and not self._compiles:  # compiled code hides its ops
            self._iterations.is_due = False
            self._watch.look_at(_ITERATION)

    def _backward(self, backward: Callable) -> Callable:
        @functools.wraps(backward)
        def begins(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
            if self._is_here:
                seeded = grad_tensors if grad_tensors is not None else kwargs.get("grad_variables")
                losses = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
                with aside(self._trouble):
                    if seeded is None:
                        self._notes.loss([each.dtype for each in losses], sys._getframe(1))
                # Updates by hand come after a backward pass, and before the next one.
                if not self._optimizers and torch._C._current_graph_task_id() == -1:
                    self._iterated()
                    if (
                        self._steps is not None
                        and self._iterations.count > self._steps
                        and writes.are_steps(self._notes)
                    ):
                        end()
            backward(tensors, grad_tensors, *args, **kwargs)

        return begins

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
                end()
            return result

        return scaled

    def _before(self, optimizer: Optimizer, args: tuple, kwargs: dict) -> Any:
        """A step begins. Return its arguments, if one is a closure, which makes the gradients."""
        self._elsewhere |= not self._is_here
        caller = sys._getframe(1)
        is_inside = self._running is not None and any(each is self._running for each in frames(caller))
        if not self._is_here or is_inside or inside_zero(optimizer) is not None:
            return None
        self._running = caller
        self._model_is_made()
        self._watch.stepping = True
        with aside(self._trouble):
            if id(optimizer) not in self._optimizers:
                if not self._optimizers:
                    self._iterations.count = 0  # which were backward passes
                self._first_step(optimizer, caller)
        seen = self._optimizers[id(optimizer)]
        call = StepCall(optimizer, type(optimizer).step, args[1:], kwargs).with_functions(
            functools.partial(self._evaluated, seen)
        )
        if call.closure is not None:
            seen.evaluations = 0
            return (optimizer, *call.args), dict(call.kwargs)
        if self._last_hook is not None:
            self._last_hook.remove()
        self._last_hook = optimizer.register_step_pre_hook(lambda *_: self._begin(seen))
        return None

    def _begin(self, seen: SteppedOptimizer) -> None:
        """The gradients of a step are there."""
        with self._watch.paused(), aside(self._trouble, is_whole=True):
            seen.begin()

    def _evaluated(self, seen: SteppedOptimizer, closure: Callable) -> Callable:
        def evaluated(*args: Any, **kwargs: Any) -> Any:
            self._watch.stepping = False
            result = closure(*args, **kwargs)
            self._watch.stepping = True
            seen.evaluations += 1
            if seen.evaluations == 1:
                self._begin(seen)
            return result

        return evaluated

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
        if not self._is_here or seen is None or self._running is not sys._getframe(1):
            return
        self._watch.stepping, self._running = False, None
        with self._watch.paused(), aside(self._trouble, is_whole=True):
            seen.end()
            self._sums.stepped()
        if seen is next(iter(self._optimizers.values())):
            self._iterated()
        if self._steps is not None and seen.steps >= self._steps:
            end()

    def _iterated(self) -> None:
        """The first optimizer has stepped: an iteration is over, and the next one begins."""
        self._iterations.over(self._watch.is_looking)
        if self._watch.is_looking:
            self._watch.close()
        self._look_if_due()

    @property
    def _compiles(self) -> bool:
        """Whether torch.compile has compiled anything meanwhile."""
        return _frames_compiled() > self._compiled

    def finish(self, found: Diagnosis) -> None:
        """Write what was found into `found`."""
        with aside(self._trouble, is_whole=True):
            self._replicas.note("last", self._trained)
            for each in self._optimizers.values():
                each.close()
        every = dict.fromkeys(self._trained)
        names = {p: self._names.get(p) or f"parameter {i} of shape {tuple(p.shape)}" for i, p in enumerate(every)}
        problems = [problem for findings in self._findings for problem in findings(self._notes, names)]
        problems += [*of_steps([*self._optimizers.values()], names), *self._replicas.problems(names)]
        found.findings[:] = sorted(merged(problems), key=lambda each: (not each.wrong, -each.weight))
        script = Script(self._trained, self._names, self._modules, followed.are_products_low_by_hand(self._notes))
        with aside(self._trouble):
            found.recipe, found.reasons, found.recipe_text = recipe_for(found.findings, script, self._base)
        found.looked[:], found.not_checked[:] = self._looked(), self._not_checked()

    def _looked(self) -> list[str]:
        seen = self._optimizers.values()
        classes = ", ".join(dict.fromkeys(type(each.optimizer).__name__ for each in seen))
        dtypes: Counter[str] = Counter()
        for p in dict.fromkeys(self._trained):
            dtypes[dtype_name(p.dtype)] += p.numel()
        held = " and ".join(f"{count:,} in {name}" for name, count in dtypes.items())
        steps = max((each.steps for each in seen), default=0)
        looked = max((each.looked for each in seen), default=0)
        lines = [f"{number(steps, 'step')} of {classes}; parameters: {held}"] if steps else []
        lines += [f"beside {number(looked, 'step')} of them, float32 copies took the same step"] if looked else []
        if watched := self._iterations.watched:
            lines += [f"looked at ops in iterations {', '.join(map(str, watched[:9]))}"]
            lines[-1] += " and so on" if len(watched) > 9 else ""
        return lines or ["nothing was looked at"]

    def _not_checked(self) -> list[str]:
        reasons = []
        if self._elsewhere:
            reasons.append("steps that another thread took, such as that of a backward pass on a GPU")
        if self._optimizers:
            reasons += unchecked_of([*self._optimizers.values()])
        elif not writes.are_steps(self._notes) and not self._elsewhere:
            reasons.append("updates: no torch.optim.Optimizer has stepped")
        if self._compiles:
            reasons.append("ops of compiled code: set TORCH_COMPILE_DISABLE=1 to have them looked at")
        elif not self._iterations.watched:
            done = number(self._iterations.count, "iteration")
            reasons.append(f"ops: the script ended after {done}, the third is looked at")
        return reasons + [f"what raised when it was looked at: {each}" for each in self._trouble[:1]]


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
    counters = sys.modules["torch._dynamo"].utils.counters
    return counters["frames"]["total"] + counters["stats"]["unique_graphs"]  # one of them counts
