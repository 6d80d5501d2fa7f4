"""`doctor`: a region in which a training is looked at as it is.

Hooks around the optimizer's steps look at updates and gradients in some steps, and open a `Watch` of the ops for one
iteration now and then. Nothing is converted, nothing of torch is patched but `GradScaler.step`, and no random number is
drawn, so that the training has the bits that it has without.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Collection, Iterator
from time import perf_counter
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hmpx import process_state
from hmpx.changes import Attribute, Changes
from hmpx.errors import HmpxError
from hmpx.insight.doctor.diagnosis import Diagnosis
from hmpx.insight.doctor.fix import recipe_for
from hmpx.insight.doctor.of_ops import of_ops
from hmpx.insight.doctor.of_updates import of_dropped, of_updates
from hmpx.insight.doctor.op_watch import OpWatch
from hmpx.insight.doctor.owners import Owners
from hmpx.insight.doctor.replicas import Replicas
from hmpx.insight.doctor.scaling import Scaling
from hmpx.insight.doctor.spots import Spot
from hmpx.insight.doctor.update_view import Stepped
from hmpx.ops.wrapping.callers import users_line
from hmpx.ops.wrapping.observing import unobserved
from hmpx.updates.stepping.names import parameters

Optimizer = torch.optim.Optimizer

_SHARE = 0.1  # of the time: what looking at ops may take, beside the first iteration that is looked at
_ITERATION = 50_000  # ops of one iteration that are looked at


class Enough(BaseException):
    """As many steps as were asked for are done: this ends the script."""


class Examination:
    """What `doctor` does while it is open."""

    def __init__(self, steps: int | None, at: Collection[int]) -> None:
        self.steps, self._at = steps, frozenset(at)
        self.optimizers: dict[int, Stepped] = {}
        self.watch, self.owners, self.replicas, self.scaling = OpWatch(), Owners(), Replicas(), Scaling()
        self.iterations = 0
        self.watched: list[int] = []  # iterations whose ops were looked at
        self.dropped: list[tuple[Spot, torch.nn.Parameter]] = []  # upcasts before the first step
        self.trouble = ""
        self._thread = threading.get_ident()
        self._changes = Changes()
        self._hooks: list[Any] = []
        self._busy = False
        self._began = self._last = perf_counter()
        self._took = 0.0  # looking at ops
        self._plain = 0.0  # the shortest iteration in which nobody looked
        self._compiled = frames_compiled()  # before

    def __enter__(self) -> Examination:
        try:
            self._changes.callback(self._take_away)
            self._hooks.append(register_optimizer_step_pre_hook(self._before))
            self._hooks.append(register_optimizer_step_post_hook(self._after))
            place = Attribute(torch.amp.GradScaler, "step", "torch.amp.GradScaler.step")
            self._changes.put(place, self._scaled(torch.amp.GradScaler.step))
            self._hooks.append(register_module_forward_pre_hook(self._set_up))
            self.watch.open(None, setting_up=1 not in self._at)
        except BaseException:
            self._changes.close()
            raise
        return self

    def _take_away(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self.watch.close()

    def __exit__(self, *exception: object) -> None:
        self._changes.close()

    def _set_up(self, *_: Any) -> None:
        """A forward pass or a step begins: what came before has made the model."""
        if self.watch.setting_up and threading.get_ident() == self._thread:
            self.watch.close()

    def _scaled(self, step: Any) -> Any:
        @functools.wraps(step)
        def scaled(scaler: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            before = sum(each.steps for each in self.optimizers.values())
            result = step(scaler, optimizer, *args, **kwargs)
            skipped = sum(each.steps for each in self.optimizers.values()) == before
            self.scaling.stepped(scaler, skipped or bool(getattr(optimizer, "found_inf", None)))
            if skipped and self.steps is not None and self.scaling.attempts >= self.steps:
                raise Enough
            return result

        return scaled

    def _before(self, optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
        if self._busy or threading.get_ident() != self._thread:
            return
        self._set_up()
        with self._own():
            seen = self.optimizers.get(id(optimizer))
            if seen is None:
                seen = self.optimizers[id(optimizer)] = Stepped(optimizer)
                caller = sys._getframe(1)
                seen.where = users_line(caller)
                self.owners.look(caller, parameters(optimizer))
                self.replicas.note("first", parameters(optimizer))
                self.dropped += self.watch.casts.dropped(parameters(optimizer))
            seen.begin(is_sampled(seen.steps + 1))
        self.watch.stepping = not args and not kwargs  # without a closure, in which a forward pass would run

    def _after(self, optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
        if self._busy or threading.get_ident() != self._thread or id(optimizer) not in self.optimizers:
            return
        self.watch.stepping = False
        seen = self.optimizers[id(optimizer)]
        with self._own():
            seen.end(is_sampled(seen.steps + 1))
            self.watch.accumulation.compare(parameters(optimizer))
        if seen is next(iter(self.optimizers.values())):
            self._iterated()
        if self.steps is not None and seen.steps >= self.steps:
            raise Enough

    def _iterated(self) -> None:
        """The first optimizer has stepped: an iteration is over, and the next one begins."""
        self.iterations += 1
        now = perf_counter()
        took, self._last = now - self._last, now
        if self.watch.is_open:
            self.watched.append(self.iterations)
            self._took += took - self._plain if self.iterations > 1 else 0.0
            self.watch.close()
        elif self.iterations > 1:
            self._plain = min(self._plain or took, took)
        number = self.iterations + 1
        affordable = self._took <= _SHARE * (now - self._began)
        if number in self._at or number == 3 or (number % 10 == 0 and affordable):
            self._open(_ITERATION)

    def _open(self, most: int | None) -> None:
        if not self.compiles:
            self.watch.open(most)

    @contextlib.contextmanager
    def _own(self) -> Iterator[None]:
        """What is computed in here is the doctor's: nobody looks at it, and what it cannot do does no harm."""
        self._busy = True
        try:
            uncast = unobserved() if process_state.converted else contextlib.nullcontext()
            with torch.no_grad(), torch._C._DisableTorchDispatch(), uncast:
                yield
        except Exception as error:  # of a kind of tensor that nobody has thought of
            self.trouble = self.trouble or f"{type(error).__name__}: {error}"
        finally:
            self._busy = False

    def finish(self, found: Diagnosis) -> None:
        """Say what was found."""
        with self._own():
            self.replicas.note("last", [p for each in self.optimizers.values() for p in parameters(each.optimizer)])
            names = self.owners.names([p for each in self.optimizers.values() for p in parameters(each.optimizer)])
        problems = [*of_ops(self.watch, self.scaling)]
        for each in self.optimizers.values():
            problems += of_updates(each, names)
        problems += self.replicas.problems(names)
        if self.dropped:
            problems.append(of_dropped(self.dropped, names))
        found.findings[:] = sorted(problems, key=lambda each: (not each.wrong, -each.weight))
        every = {**names, **self.owners.every()}
        found.recipe, found.reasons, found.recipe_text = recipe_for(problems, self.optimizers.values(), every)
        found.looked[:] = self._looked()

    @property
    def compiles(self) -> bool:
        """Whether torch.compile has compiled anything meanwhile; the compiled code would run otherwise under a mode."""
        return frames_compiled() > self._compiled

    def _looked(self) -> list[str]:
        of = ", ".join(dict.fromkeys(type(each.optimizer).__name__ for each in self.optimizers.values()))
        dtypes: dict[str, int] = {}
        for p in {p for each in self.optimizers.values() for p in parameters(each.optimizer)}:
            name = str(p.dtype).removeprefix("torch.")
            dtypes[name] = dtypes.get(name, 0) + p.numel()
        held = " and ".join(f"{count:,} in {name}" for name, count in dtypes.items())
        steps = max((each.steps for each in self.optimizers.values()), default=0)
        samples = max((each.samples for each in self.optimizers.values()), default=0)
        lines = [f"{steps} steps of {of}; parameters: {held}" if steps else "no optimizer has stepped"]
        ops = f"at ops in iterations {', '.join(map(str, self.watched))}" if self.watched else "at no ops"
        if steps:
            lines.append(f"looked at updates in {samples} of them (1, 2, 4, 7, 11 and so on), {ops}")
        if self.compiles:
            lines.append("compiled code hides its ops: set TORCH_COMPILE_DISABLE=1 to have them looked at")
        if self.trouble or self.watch.trouble:
            lines.append(f"could not look at everything: {self.trouble or self.watch.trouble}")
        return lines


def is_sampled(step: int) -> bool:
    """Whether updates are looked at in a step, from 1: in 1, 2, 4, 7, 11, 16, 22, ..."""
    root = int((2 * (step - 1)) ** 0.5)
    return any(each * (each + 1) // 2 == step - 1 for each in (root - 1, root, root + 1))


def frames_compiled() -> int:
    """How much torch.compile has had to compile in this process."""
    if "torch._dynamo" not in sys.modules:
        return 0
    return sys.modules["torch._dynamo"].utils.counters["frames"]["total"]


@contextlib.contextmanager
def doctor(steps: int | None = None, at: Collection[int] = ()) -> Iterator[Diagnosis]:
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
    if steps is not None and (not isinstance(steps, int) or isinstance(steps, bool) or steps < 1):
        raise HmpxError(f"doctor takes a number of steps from 1 on, not {steps!r}")
    if process_state.examined:
        raise HmpxError("hmpx.doctor is open already: read what it found, or close it first")
    found, examination = Diagnosis(), Examination(steps, at)
    process_state.examined.append(examination)
    try:
        with examination:
            yield found
    except Enough:
        pass
    finally:
        process_state.examined.remove(examination)
        examination.finish(found)
