"""`Capture`: sees a training as it runs, and hands what it sees to looks.

It owns the hooks around optimizer steps, `backward`, and `step` and `unscale_` of GradScalers, and the dispatch mode,
which is open in some iterations only. It converts nothing, patches nothing else of torch, and draws no random number,
so the training computes the same bits.
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from types import FrameType
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hmpx.base.changes import Attribute, Changes
from hmpx.base.compiling import never_compile
from hmpx.base.raw import variables
from hmpx.base.torch_private import graph_task, private
from hmpx.insight.dispatch import ITERATION, Iterations, Look, OpWatch, in_compiled_code, note_trouble, unwatched
from hmpx.insight.finding import words_of_trainer
from hmpx.insight.notes import Notes
from hmpx.ops.wrapping.callers import frames
from hmpx.updates.stepping.names import inside_zero, names_in, parameters
from hmpx.updates.stepping.step_call import StepCall

Optimizer = torch.optim.Optimizer
Parameter = torch.nn.Parameter

_NODES = 20_000  # of autograd, that are asked whether they are compiled


class Capture:
    """The hooks around a training, and what they have seen.

    ``with capture.hooks(): ...`` looks at what runs inside, in the thread that opens it. Call `close()` after that.

    Args:
        looks: each sees the optimizers, the steps and the ops that its attributes name.
        at: iterations, from 1, whose ops the looks see in any case.
        only_at: looks see the ops of the iterations `at` alone, in compiled code too, but not those of optimizer steps.
            Only an optimizer step ends an iteration then.
        most: how many ops of one iteration looks see, at most.

    An open dispatch mode makes each op slower, so it is closed in backward passes whose ops no look asks for.

    Attributes:
        notes: what the ops have told. iterations: which iterations were looked at.
        optimizers: the optimizers that have stepped here. steps: the number of steps, by the identity of an optimizer.
        models: the models of an optimizer, by its identity. names: the names of all their parameters, trained or not.
        elsewhere: passes and steps of other threads, which no look sees. words: of the trainer that owns the loop.
        trouble: the first errors of looks.
    """

    def __init__(
        self,
        looks: Sequence[Look],
        at: Collection[int] = (),
        only_at: bool = False,
        most: float = ITERATION,
    ) -> None:
        self.looks, self._only_at, self._most = looks, only_at, most
        self._hides_backward = not any("backward" in each.stages for each in looks)
        self._follows_steps = any(each.follows_steps for each in looks)
        self.notes, self.iterations, self.trouble = Notes(), Iterations(at, only_at), list[str]()
        self.optimizers: list[Optimizer] = []
        self.steps: Counter[int] = Counter()
        self.names: dict[Parameter, str] = {}
        self.models: dict[int, list[torch.nn.Module]] = {}
        self.elsewhere: dict[str, None] = {}
        self.words: dict[str, str] = {}
        self._watch = OpWatch(self.notes, looks, self.trouble)
        self._listeners: dict[str, list[Callable[..., None]]] = {}  # by name of a method, of the looks that have it
        self._leader: Optimizer | None = None  # whose steps end the iterations
        self._since: Counter[int] = Counter()  # steps in this iteration, by the identity of an optimizer
        self._passes = 0  # backward passes
        self._evaluations = 0  # calls of the closure in this step
        self._running: FrameType | None = None  # the frame that calls this step
        self._forward_hook: Any = None
        self._last_hook: Any = None  # runs before a step, after the program's own such hooks
        self._thread = threading.get_ident()
        self._compiled = _frames_compiled()  # the number when the capture begins
        self.hides = False  # whether a loss is of code that was compiled before that
        self._changes = Changes()

    @contextlib.contextmanager
    def hooks(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.callback(self._changes.close)
            changes = self._changes
            changes.callback(self._watch.close)
            changes.callback(register_optimizer_step_pre_hook(self._before).remove)
            changes.callback(register_optimizer_step_post_hook(self._after).remove)
            changes.callback(lambda: self._forward_hook and self._forward_hook.remove())
            if not self._only_at:
                self._await_forward(True)
            changes.callback(lambda: self._last_hook and self._last_hook.remove())
            backward = Attribute(torch.autograd, "backward", "torch.autograd.backward")
            changes.put(backward, self._backward(torch.autograd.backward))
            if not self._only_at:
                for name, wrapped in (("step", self._scaled), ("unscale_", self._divided)):
                    method = Attribute(torch.amp.GradScaler, name, f"torch.amp.GradScaler.{name}")
                    changes.put(method, wrapped(getattr(torch.amp.GradScaler, name)))
            if self._only_at and self.iterations.is_due:
                self.iterations.is_due = False
                self._watch.look_at(self._most)
            elif not self._only_at:
                self._watch.look_at(math.inf, setting_up=True)
            yield

    def close(self) -> None:
        self._tell("close", self.optimizers)

    def end_if_enough(self, steps: int) -> None:
        """Hear a count of steps: an optimizer's, a scaler's, or by hand. An override may raise, to end the program."""

    def paused(self) -> contextlib.AbstractContextManager[None]:
        return self._watch.paused()

    @property
    def compiles(self) -> bool:
        """Whether torch.compile has compiled anything meanwhile."""
        return _frames_compiled() > self._compiled

    @property
    def trained(self) -> list[Parameter]:
        return [*dict.fromkeys(p for each in self.optimizers for p in parameters(each))]

    def _is_here(self, what: str) -> bool:
        if threading.get_ident() == self._thread:
            return True
        self.elsewhere[what] = None
        return False

    def _await_forward(self, waits: bool) -> None:
        """Install or remove the hook that sees a forward pass begin, and that makes each call of a module slower."""
        if waits is (self._forward_hook is not None) or self.compiles:  # a new hook makes Dynamo compile again
            return
        if waits:
            self._forward_hook = register_module_forward_pre_hook(self._forward_begins)
        else:
            self._forward_hook = self._forward_hook.remove()

    def _forward_begins(self, module: torch.nn.Module, _: Any) -> None:
        if torch.compiler.is_compiling():  # Dynamo traces the hooks of modules
            return
        is_checkpoint = graph_task() != -1  # in a backward pass it repeats a forward pass that was seen
        if not is_checkpoint and next(module.parameters(), None) is not None:
            self._is_here("forward passes")
        if threading.get_ident() == self._thread:
            self._model_is_made()

    def _model_is_made(self) -> None:
        """End the stage "set up", as a forward pass or a step begins."""
        if self._watch.setting_up:
            self._watch.close()
        self._open_or_close()

    def _open_or_close(self) -> None:
        """Close the dispatch mode if its iteration is over, and open it if the next iteration's ops are to be seen.

        In a backward pass and in compiled code it stays as it is, since their end puts back what was open before. A
        mode below a younger one stays open, too. In all cases the next forward pass tries again.
        """
        if graph_task() != -1 or in_compiled_code():
            self._await_forward(True)
            return
        if not self._watch.is_looking:
            self._watch.close()
        is_below_another = self._watch.is_open and not self._watch.is_looking
        self._await_forward(is_below_another)
        if self.iterations.is_due and (self._only_at or not self.compiles):  # compiled code hides its ops
            self.iterations.is_due = False
            self.notes.span = self.notes.iteration - max(self.iterations.watched, default=0)
            self._watch.look_at(self._most)

    def _backward(self, backward: Callable) -> Callable:
        @functools.wraps(backward)
        def begins(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
            is_here = self._is_here("backward passes")
            hides = is_here and self._hides_backward and graph_task() == -1
            if is_here:
                if graph_task() == -1 and not self._watch.is_looking:  # compiled code may have left it open
                    self._watch.suspend()
                seeded = grad_tensors if grad_tensors is not None else kwargs.get("grad_variables")
                losses = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
                with unwatched(self.trouble):
                    if seeded is None:
                        self.notes.loss(losses, sys._getframe(1))
                    if self._compiled and self._watch.is_looking and not self.hides:
                        self.hides = _are_of_compiled(losses)
                if seeded is None:
                    self._tell("loss", self.notes, losses)
                # If no optimizer steps, each backward pass but the first begins an iteration, as updates by hand come
                # before it.
                self._passes += 1
                is_first = self._only_at or self._passes < 2
                if not self.optimizers and graph_task() == -1 and not is_first:
                    self._iterated()
                    if self.notes.are_steps:
                        self.end_if_enough(self.iterations.count - 1)
            if hides:
                self._watch.suspend()
            try:
                backward(tensors, grad_tensors, *args, **kwargs)
                if is_here:
                    self._tell("passed", self.notes)
            finally:
                if hides:
                    self._watch.resume()

        return never_compile(begins)

    def _scaled(self, step: Callable) -> Callable:
        @functools.wraps(step)
        def scaled(scaler: torch.amp.GradScaler, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            before = self.steps.total()
            if getattr(optimizer, "_step_supports_amp_scaling", False):  # its step divides them, and not `unscale_`
                self._tell("unscaled", optimizer, scaler.get_scale())
            result = step(scaler, optimizer, *args, **kwargs)
            is_skipped = self.steps.total() == before
            if scaler.is_enabled():
                self.notes.skipped.append(is_skipped or bool(getattr(optimizer, "found_inf", None)))
                self.notes.scale = scaler.get_scale()
            if is_skipped:
                self.end_if_enough(len(self.notes.skipped))
            return result

        return scaled

    def _divided(self, unscale: Callable) -> Callable:
        @functools.wraps(unscale)
        def divided(scaler: torch.amp.GradScaler, optimizer: Optimizer) -> None:
            self._tell("unscaled", optimizer, scaler.get_scale())
            unscale(scaler, optimizer)

        return divided

    @never_compile  # as torch.compile(optimizer.step) calls it, too
    def _before(self, optimizer: Optimizer, args: tuple, kwargs: dict) -> Any:
        """Note that a step begins. If it has a closure, return arguments with a closure that reports here."""
        is_here, caller = self._is_here("steps, such as those of a backward pass on a GPU"), sys._getframe(1)
        is_inside = self._running is not None and any(each is self._running for each in frames(caller))
        if not is_here or is_inside or inside_zero(optimizer) is not None:
            return None
        self._running = caller
        self._model_is_made()
        self._watch.stepping = True
        with unwatched(self.trouble):
            if self._follows_steps and not any(each is optimizer for each in self.optimizers):
                self._meet(optimizer, caller)
        self._evaluations = 0
        call = StepCall(optimizer, type(optimizer).step, args[1:], kwargs).with_functions(
            functools.partial(self._evaluated, optimizer)
        )
        if callable(call.closure):
            return ((optimizer, *call.args), dict(call.kwargs)) if self._follows_steps else None
        if self._last_hook is not None:
            self._last_hook.remove()
        self._last_hook = optimizer.register_step_pre_hook(lambda each, *_: self._begin(each, self._only_at))
        return None

    def _meet(self, optimizer: Optimizer, caller: FrameType) -> None:
        if not self.optimizers:
            self.iterations.restart()
            self.notes.iteration, self._leader = 1, optimizer
        self.optimizers.append(optimizer)
        self.words = self.words or words_of_trainer(caller)
        self.models[id(optimizer)] = [*_models_around(caller, {*parameters(optimizer)})]
        for model in self.models[id(optimizer)]:
            self.names = {**names_in(model), **self.names}
            self.notes.learn(model)
        self._tell("met", optimizer, self.notes.place(caller).script or "?")

    @never_compile
    def _begin(self, optimizer: Optimizer, hides_step: bool = False) -> None:
        """Tell looks that a step begins and has its gradients. hides_step: close the dispatch mode while it runs."""
        if hides_step:
            self._watch.suspend()
        self._tell("begin", optimizer, self.notes.iteration)

    def _tell(self, what: str, *args: Any) -> None:
        """Call a method of all looks that have it. An error in one of them hides nothing from the next."""
        if what not in self._listeners:
            having = [each for each in self.looks if getattr(type(each), what) is not getattr(Look, what)]
            self._listeners[what] = [getattr(each, what) for each in having]
        with self._watch.paused(), unwatched(self.trouble, is_whole=True):
            for each in self._listeners[what]:
                try:
                    each(*args)
                except Exception as error:
                    note_trouble(self.trouble, error)

    def _evaluated(self, optimizer: Optimizer, closure: Callable) -> Callable:
        def evaluated(*args: Any, **kwargs: Any) -> Any:
            self._watch.stepping = False
            result = closure(*args, **kwargs)
            self._watch.stepping = True
            self._evaluations += 1
            if self._evaluations == 1:
                self._begin(optimizer)
            return result

        return evaluated

    @never_compile  # as torch.compile(optimizer.step) calls it, too
    def _after(self, optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
        if self._running is not sys._getframe(1):
            return
        self._watch.stepping, self._running = False, None
        if graph_task() == -1 or not self._hides_backward:  # otherwise the wrapper of `backward` resumes it
            self._watch.resume()
        if not any(each is optimizer for each in self.optimizers):
            return
        self._tell("end", optimizer, self._evaluations)
        self.steps[id(optimizer)] += 1
        self._since[id(optimizer)] += 1
        if self._since[id(optimizer)] > 1 and optimizer is not self._leader:  # the leader no longer steps
            self._leader = optimizer
            self.iterations.begin_stage()
        if optimizer is self._leader:
            self._iterated()
        self.end_if_enough(
            max(self.iterations.count, self.steps[id(optimizer)])
        )  # each task may have an optimizer of its own

    def _iterated(self) -> None:
        self.iterations.over(self._watch.is_looking)
        self.notes.iteration = self.iterations.count + 1
        self._since.clear()
        if self._watch.is_looking:
            self._watch.close()
        self._open_or_close()


def _models_around(caller: FrameType, wanted: set[Parameter]) -> Iterator[torch.nn.Module]:
    """Find the models that hold these parameters, in the variables and the `self` of the functions that call `step`."""
    for frame in frames(caller):
        own = variables(frame)
        values = [*own.values(), *getattr(own.get("self"), "__dict__", {}).values()]
        models = [value for value in values if isinstance(value, torch.nn.Module)]
        for model in sorted(models, key=lambda model: -len(wanted.intersection(model.parameters()))):
            if not wanted.isdisjoint(model.parameters()):
                wanted = wanted.difference(model.parameters())
                yield model
        if not wanted:
            return


def _are_of_compiled(losses: Sequence[torch.Tensor]) -> bool:
    """Return whether autograd will run a function that torch.compile has made."""
    waiting, seen = [each.grad_fn for each in losses], set[Any]()
    while waiting and len(seen) < _NODES:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        if node.name().startswith("CompiledFunction"):
            return True
        seen.add(node)
        waiting += [each for each, _ in node.next_functions]
    return False


def _frames_compiled() -> int:
    """Return a number that grows when torch.compile compiles in this process."""
    if "torch._dynamo" not in sys.modules:
        return 0
    counters = private("torch._dynamo.utils.counters")
    return counters["frames"]["total"] + counters["stats"]["unique_graphs"]  # torch's version decides which counts
