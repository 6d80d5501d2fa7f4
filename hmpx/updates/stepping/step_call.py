"""One step on its way through hmpx: the call, what it is shown in `param_groups`, the write-back, an interruption.

The lists of parameters in `param_groups`, those of optimizers inside too, stay the same objects: a step is shown other
parameters in them.

A signal (Ctrl-C) that comes while weights are written waits until the step is complete. An error in the middle of a
step, such as lack of memory, cannot wait, and to undo the weights written so far would take a copy of the model. The
optimizer then refuses to step and to be saved, and says which parameters have taken the step, until `load_state_dict`
gives it a state.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` without its enums, which take 10 us a step
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import chain
from operator import attrgetter, is_
from types import FrameType, MappingProxyType
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from hmpx.base.torch_private import dispatch_modes
from hmpx.errors import HmpxError
from hmpx.updates.holding.held import RoundingKey
from hmpx.updates.holding.stores import Stores
from hmpx.updates.stepping.names import inner_optimizers

_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGALRM", "SIGUSR1", "SIGUSR2", "SIGBREAK")
_GRAD = attrgetter("grad")
_SIGNALS = [getattr(signal, name) for name in _NAMES if hasattr(signal, name)]


class StepCall(NamedTuple):
    """A call of an optimizer's own `step`, or of another method that rewrites weights.

    Attributes:
        method: the function of the optimizer's class.
        seed: the one that the `disable_casts` region was given, if any.
    """

    optimizer: Optimizer
    method: Callable
    args: tuple = ()
    kwargs: Mapping[str, Any] = MappingProxyType({})
    seed: int | None = None

    def run(self) -> Any:
        return self.method(self.optimizer, *self.args, **self.kwargs)

    @property
    def closure(self) -> Callable | None:
        """The closure, where the method is `step` with torch's signature."""
        return self.args[0] if self.args else self.kwargs.get("closure")

    def with_functions(self, wrap: Callable[[Callable], Callable]) -> StepCall:
        """Return the same call with its closure, and any other function of the user, as ``wrap(function)``.

        A module is callable, and is left alone: some optimizers look for parameters in it.
        """

        def wrapped(key: str | None, value: Any) -> Any:
            is_function = callable(value) and (key == "closure" or not isinstance(value, (torch.nn.Module, type)))
            return wrap(value) if is_function else value

        args = tuple(wrapped(None, value) for value in self.args)
        return self._replace(args=args, kwargs={key: wrapped(key, value) for key, value in self.kwargs.items()})


class StepContext(NamedTuple):
    """Facts that all parameters of a step share.

    Attributes:
        indices: of each stepped parameter, the index of its gradient in `gradients`.
        gradients: as this rank holds them.
        group: of each parameter, the index of its group.
        size: how many elements are copied to FP32 at once.
    """

    optimizer: Optimizer
    stores: Stores
    indices: dict[torch.nn.Parameter, int]
    gradients: list[torch.Tensor]
    group: dict[torch.nn.Parameter, int]
    size: Callable[[torch.device], int]


class ShownParameters:
    """A block in which the lists of `param_groups` hold other parameters. The lists stay the same objects."""

    def __init__(self, lists: list[list[Any]], shown: list[list[Any]]) -> None:
        self._lists, self._shown = lists, shown
        self._before: list[list[Any]] = []

    def show(self) -> None:
        self._before = [list(params) for params in self._lists]
        for params, shown in zip(self._lists, self._shown, strict=True):
            params[:] = shown

    def hide(self) -> None:
        for params, before in zip(self._lists, self._before, strict=False):
            params[:] = before

    def are_as_shown(self) -> bool:
        """Return whether the lists hold what they were shown with."""
        return all(map(are_same, self._lists, self._shown))

    def __enter__(self) -> None:
        self.show()

    def __exit__(self, *exception: object) -> None:
        self.hide()


def nested(optimizer: Optimizer) -> Iterator[Optimizer]:
    """Yield `optimizer`, every optimizer that it holds, and those that these hold."""
    found = [optimizer]
    for each in found:
        yield each
        found += [one for one in inner_optimizers(each) if not any(one is seen for seen in found)]


def all_lists(optimizers: list[Optimizer]) -> list[list[Any]]:
    """Return the lists of parameters of these optimizers, which may share some."""
    lists = chain.from_iterable([lists_of(each.param_groups) for each in optimizers])
    return list({id(params): params for params in lists}.values())


def lists_of(groups: list[dict]) -> list[list]:
    return [group["params"] for group in groups]


def groups_of(optimizers: Iterable[Optimizer]) -> list[tuple[Optimizer, list[dict], list[list]]]:
    """Return the groups of each optimizer, and the lists in them."""
    return [(each, groups := each.param_groups[:], lists_of(groups)) for each in optimizers]


def grads_of(params: Iterable[Any]) -> list[Any]:
    return list(map(_GRAD, params))


def are_same(now: Collection[Any], before: Collection[Any]) -> bool:
    return len(now) == len(before) and all(map(is_, now, before))


def values_of(states: Iterable[dict[str, Any]]) -> list[Any]:
    return list(chain.from_iterable(map(dict.values, states)))


class WriteBack(NamedTuple):
    """How one step writes weights and state.

    Attributes:
        signals: wait while the step cannot be interrupted.
        written: lists of the names of parameters of which something has changed.
        is_grad_on: whether grad mode was on when the step was called.
    """

    stores: Stores
    rounding_key: RoundingKey
    signals: DeferredSignals
    written: list[list[str]]
    is_grad_on: bool = False


def hides_writes(optimizer: Optimizer) -> bool:
    """Return whether a step may write to state or gradients without raising the version of some of them.

    Versions tell a step what the optimizer has written to: gradients that the user shall see, and state that cannot be
    taken back if the step raises. Below a `TorchDispatchMode` (`FlopCounterMode`, or one that looks for NaN) foreach
    kernels raise none, and fused ones raise that of the count of steps, which SGD does not keep.
    """
    if dispatch_modes():
        return True
    return type(optimizer) is torch.optim.SGD and any(group.get("fused") for group in optimizer.param_groups)


def refuse_graphs(optimizer: Optimizer) -> None:
    """Refuse a step that is to be differentiated: the FP32 copies that it sees have no graph.

    Raises:
        HmpxError: a group says ``differentiable=True``, and a BF16 parameter, its gradient or the rate has a graph.
    """
    for group in optimizer.param_groups:
        if not group.get("differentiable"):
            continue
        params = [p for p in group["params"] if p.dtype is torch.bfloat16]
        options = [each for each in group.values() if isinstance(each, torch.Tensor)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of gradients of tensors that are no leaves
            grads = [p.grad for p in params if p.grad is not None]
        if params and any([*(not p.is_leaf for p in params), *(each.requires_grad for each in (*grads, *options))]):
            raise HmpxError(
                f"{type(optimizer).__name__}(differentiable=True) has BF16 parameters or a rate with a graph, and "
                "the FP32 copies that hmpx steps have none: let it step FP32 tensors there (`weight.float()`)"
            )


class DeferredSignals:
    """Signals that have a Python handler wait from `begin` to `end`."""

    def __init__(self) -> None:
        self._handlers: dict[int, Any] = {}
        # Without their frames: those of the step hold the copies that it was shown, which nobody may keep.
        self._waiting: list[tuple[Any, int]] = []

    def begin(self) -> None:
        """From here on, signals wait."""
        if threading.get_ident() != threading.main_thread().ident:
            return  # Python runs handlers in the main thread alone
        _deferring.append(self)
        for number in _SIGNALS:
            handler = _signal.getsignal(number)
            if callable(handler) and handler != self._remember:
                self._handlers[number] = handler
                _signal.signal(number, self._remember)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self._waiting.append((self._handlers[number], number))

    def end(self) -> None:
        """Put the handlers back, then call those whose signals came, all of them even if one raises.

        Raises:
            BaseException: what the last one that raised has raised.
        """
        raised: BaseException | None = None
        _deferring[:] = [each for each in _deferring if each is not self]
        while self._handlers or self._waiting:
            try:
                self._put_back()
                self._call()
            except BaseException as error:  # a handler has raised, perhaps of a signal that came just now
                error.__context__, raised = error.__context__ or raised, error
        if raised is not None:
            try:
                raise raised
            finally:
                del raised  # or its traceback, and all that the frames in it hold, would wait for the garbage collector

    def forget(self) -> None:
        """Put the handlers back in a forked child; signals that wait are its parent's."""
        self._waiting.clear()
        self._put_back()

    def _put_back(self) -> None:
        for number, handler in list(self._handlers.items()):
            if _signal.getsignal(number) == self._remember:
                _signal.signal(number, handler)
            self._handlers.pop(number, None)

    def _call(self) -> None:
        while self._waiting:
            handler, number = self._waiting[0]
            try:
                handler(number, sys._getframe())
            finally:
                del self._waiting[0]

    def let_through(self, function: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Call `function`, while signals do not wait."""
        try:
            self.end()
            return function(*args, **kwargs)
        finally:
            self.begin()


_deferring: list[DeferredSignals] = []  # between `begin` and `end`


def _forget_in_child() -> None:
    while _deferring:
        _deferring.pop().forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)


def mark_incomplete(optimizer: Optimizer, write_back: WriteBack, error: BaseException) -> None:
    """Make an optimizer refuse to step and to be saved, if this error leaves its step half written."""
    written = dict.fromkeys(chain(*write_back.written))
    if not written:
        return
    write_back.stores.are_torn = True
    names = ", ".join(map(repr, written))
    message = (
        f"step {write_back.rounding_key.step} of {type(optimizer).__name__} was interrupted by "
        f"{type(error).__name__} in the middle: {names} have taken it, wholly or in part, the other parameters have "
        "not; load the model and the optimizer from a checkpoint"
    )

    def refuse(*_: object) -> None:
        raise HmpxError(message)

    def allow(loaded: Optimizer) -> None:
        for handle in handles:
            handle.remove()

    handles = [
        optimizer.register_step_pre_hook(refuse),
        optimizer.register_state_dict_pre_hook(refuse),
        optimizer.register_load_state_dict_post_hook(allow),
    ]
