"""One step on its way through hmpx: the call, how results are written back, and what an interruption does.

A signal (Ctrl-C) that comes while weights are written waits until the step is complete. An error in the middle of a
step, such as lack of memory, cannot wait, and to undo the weights written so far would take a copy of the model. The
optimizer then refuses to step and to be saved, and says which parameters have taken the step, until `load_state_dict`
gives it a state.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` without its enums, which take 10 us a step
import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any
from weakref import WeakSet

import torch
from torch.optim import Optimizer

from hmpx.errors import HmpxError
from hmpx.updates.holding.held import RoundingKey
from hmpx.updates.holding.stores import Stores
from hmpx.updates.stepping.update_counts import UpdateCounts

_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGALRM", "SIGUSR1", "SIGUSR2", "SIGBREAK")
_SIGNALS = [getattr(signal, name) for name in _NAMES if hasattr(signal, name)]
_incomplete: WeakSet[Optimizer] = WeakSet()


@dataclass(frozen=True, eq=False)
class StepCall:
    """A call of an optimizer's own `step`, or of another method that rewrites weights.

    Attributes:
        method: the function of the optimizer's class.
        seed: the one that the `disable_casts` region was given, if any.
    """

    optimizer: Optimizer
    method: Callable
    args: tuple = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None

    def run(self) -> Any:
        """Call the method."""
        return self.method(self.optimizer, *self.args, **self.kwargs)

    @property
    def closure(self) -> Callable | None:
        """The closure, where the method is `step` with torch's signature."""
        return self.args[0] if self.args else self.kwargs.get("closure")

    def without_arguments(self) -> StepCall:
        """Return the same step for one part of the parameters, after the closure was called."""
        return replace(self, args=(), kwargs={}) if self.args or self.kwargs else self

    def with_functions(self, wrap: Callable[[Callable], Callable]) -> StepCall:
        """Return the same call with its closure, and any other function of the user, as ``wrap(function)``.

        A module is callable, and is left alone: some optimizers look for parameters in it.
        """

        def wrapped(key: str | None, value: Any) -> Any:
            is_function = callable(value) and (key == "closure" or not isinstance(value, (torch.nn.Module, type)))
            return wrap(value) if is_function else value

        if not self.args and not self.kwargs:
            return self
        args = tuple(wrapped(None, value) for value in self.args)
        return replace(self, args=args, kwargs={key: wrapped(key, value) for key, value in self.kwargs.items()})


@dataclass(frozen=True, eq=False)
class WriteBack:
    """How one step writes weights and state.

    Attributes:
        signals: wait from the first write on.
        counts: counts the updates while somebody watches them.
    """

    stores: Stores
    rounding_key: RoundingKey
    signals: DeferredSignals
    counts: UpdateCounts | None = None

    def deferred(self) -> WriteBack:
        """Return the same, with roundings put off until `rounding_key.flush()`."""
        return replace(self, rounding_key=replace(self.rounding_key, pending=[]))


def hides_writes(optimizer: Optimizer) -> bool:
    """Whether a step may write to state or gradients without raising the version of some of them.

    Versions tell a step what the optimizer has written to: gradients that the user shall see, and state that cannot be
    taken back if the step raises. Below a `TorchDispatchMode` (`FlopCounterMode`, or one that looks for NaN) foreach
    kernels raise none, and fused ones raise that of the count of steps, which SGD does not keep.
    """
    if torch._C._len_torch_dispatch_stack():
        return True
    return type(optimizer) is torch.optim.SGD and any(group.get("fused") for group in optimizer.param_groups)


class DeferredSignals:
    """Signals that have a Python handler wait from `begin` to the end of the block."""

    def __init__(self) -> None:
        self._handlers: dict[int, Any] = {}
        self._pending: list[tuple[int, FrameType | None]] = []

    def __enter__(self) -> DeferredSignals:
        return self

    def begin(self) -> None:
        """From here on, signals wait."""
        if self._handlers or threading.current_thread() is not threading.main_thread():
            return  # Python runs handlers in the main thread alone
        for number in _SIGNALS:
            handler = _signal.getsignal(number)
            if callable(handler):
                self._handlers[number] = handler
                _signal.signal(number, self._remember)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self._pending.append((number, frame))

    def __exit__(self, *exception: object) -> None:
        handlers, self._handlers = self._handlers, {}
        for number, handler in handlers.items():
            if _signal.getsignal(number) == self._remember:
                _signal.signal(number, handler)
        pending, self._pending = self._pending, []
        for number, frame in pending:
            handlers[number](number, frame)


@contextlib.contextmanager
def marks_incomplete(optimizer: Optimizer, step: int, written: list[str]) -> Iterator[None]:
    """If the block raises after something was written, mark the optimizer incomplete. It adds names to `written`."""
    try:
        yield
    except BaseException as error:
        if written:
            _mark_incomplete(optimizer, step, written, error)
        raise


def _mark_incomplete(optimizer: Optimizer, step: int, stepped: list[str], error: BaseException) -> None:
    """Make an optimizer refuse to step and to be saved, because only some of its parameters have taken `step`.

    stepped: the names of those parameters.
    """
    names = ", ".join(repr(name) for name in dict.fromkeys(stepped))
    message = (
        f"step {step} of {type(optimizer).__name__} was interrupted by {type(error).__name__} in the middle: "
        f"{names} have taken it, wholly or in part, the other parameters have not; "
        "load the model and the optimizer from a checkpoint"
    )

    def refuse(*_: object) -> None:
        raise HmpxError(message)

    def mend(loaded: Optimizer) -> None:
        _incomplete.discard(loaded)
        for handle in handles:
            handle.remove()

    _incomplete.add(optimizer)
    handles = [
        optimizer.register_step_pre_hook(refuse),
        optimizer.register_state_dict_pre_hook(refuse),
        optimizer.register_load_state_dict_post_hook(mend),
    ]


def is_incomplete(optimizer: Optimizer) -> bool:
    """Whether an optimizer is marked incomplete."""
    return optimizer in _incomplete
