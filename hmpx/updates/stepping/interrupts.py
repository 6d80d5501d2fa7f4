"""Steps that are interrupted while weights are being written: each is completed, or marked incomplete.

A signal (Ctrl-C) waits until the step is complete. An error in the middle of a step, such as lack of memory, cannot
wait, and to undo the weights written so far would take a copy of the model. The optimizer then refuses to step and to
be saved, and says which parameters have taken the step, until `load_state_dict` gives it a state.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` without its enums, which take 10 us a step
import signal
import threading
from types import FrameType
from typing import Any
from weakref import WeakSet

from torch.optim import Optimizer

from hmpx.errors import HmpxError

_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGALRM", "SIGUSR1", "SIGUSR2", "SIGBREAK")
_SIGNALS = [getattr(signal, name) for name in _NAMES if hasattr(signal, name)]
_incomplete: WeakSet[Optimizer] = WeakSet()


class DeferredSignals:
    """Signals that have a Python handler wait from `begin` to the end of the block."""

    def __init__(self) -> None:
        self._handlers: dict[int, Any] = {}
        self._pending: list[tuple[int, FrameType | None]] = []

    def __enter__(self) -> DeferredSignals:
        return self

    def begin(self) -> None:
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


def mark_incomplete(optimizer: Optimizer, step: int, stepped: list[str], error: BaseException) -> None:
    """Make an optimizer refuse to step and to be saved, because only some of its parameters have taken `step`.

    stepped: the names of those.
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
