"""Says whether casts are on in this thread, and which lists hold.

Three things decide, the innermost first: a region that is open in this thread (`disable_casts`, `enable_casts`, the
inside of a listed Python function, an optimizer step), the default that `convert(enabled=..., where=...)` set, and
whether torch is converted at all. This file keeps the first, by thread and task; `process_state` keeps the others.
Under ``where="model"`` the default is no answer: the forward of a module opens a region that casts, and elsewhere each
op is asked whether it is the model's (`ops.wrapping.switch`). The lists that hold are named by a *scope*, a number: 0
for the conversion's own, another one for each nesting of lists that modules and regions lay over them (`ops.overlays`).

`process_state.off_somewhere` is empty while every thread casts, so the wrapper of an op pays one truth test for all of
this. The wrappers of a conversion hold the dict of their time: `retire` leaves it to them, with an entry that stays.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from asyncio import _get_running_loop
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import NamedTuple

from torch._C import _current_graph_task_id, _len_torch_dispatch_stack
from torch.compiler import is_dynamo_compiling

from hmpx.base import autocast_state
from hmpx.base import process_state as state


@dataclass(frozen=True)
class StochasticSteps:
    """Optimizer steps inside a region round BF16 parameters stochastically, with the random numbers of `seed`."""

    seed: int | None = None


class Region(NamedTuple):
    """The settings of one open region.

    casting: None leaves it to the default. maps: whether a `dtype_map` acts, as it does inside of a listed Python
    function and not in an optimizer step. task: of a region opened in an asyncio task, a token that only this task and
    those it starts carry; None means everybody in the thread. scope: which lists hold. overlay: the number of those
    that this region itself has laid over the others, 0 for none; `_OF_MODULE` where a module has its lists,
    `_OF_FORWARD` and `_OF_BACKWARD` in a forward and a backward pass.
    """

    casting: bool | None = None
    rounding: StochasticSteps | None = None
    maps: bool = True
    task: object | None = None
    scope: int = 0
    overlay: int = 0
    stepping: int = 0


class _Thread(threading.local):
    """The regions that one thread has open. `key` identifies the thread without a system call.

    Regions are kept in a list because torch.compile replays what a function does to a list, and not what it does to an
    attribute of a `threading.local`.
    """

    def __init__(self) -> None:
        self.key = next(_keys)
        self.open: list[Region] = []  # the innermost last


_tasks: ContextVar[tuple] = ContextVar("hmpx regions", default=())  # the tokens that this context carries
_keys = itertools.count(1)
DEFAULT = 0  # the key under which off_somewhere says "off unless a region turns casts on"
_RETIRED = -1  # the key in the off_somewhere of wrappers whose conversion is gone
_MODEL = -2  # the key under which it says "off outside of the model"
_OF_MODULE, _OF_FORWARD, _OF_BACKWARD = -1, -2, -3  # told apart from the regions that objects of a user's have entered
_NONE_OPEN = Region()
IN_FORWARD = Region(True, overlay=_OF_FORWARD)  # of a forward with no region around it; told by its identity
_GRAPH = Region()  # open while a graph runs that opens regions of its own: what these say is in the autocast state

thread = _Thread()


def _innermost() -> Region:
    """The innermost region that is open here: in this thread, and in this task if there is one."""
    opened = thread.open
    if not opened:
        return _NONE_OPEN
    if is_dynamo_compiling():
        return opened[-1]
    if opened[-1] is _GRAPH:
        around = opened[-2] if len(opened) > 1 else _NONE_OPEN
        casting = autocast_state.casting()
        if casting is None and around.overlay == _OF_FORWARD:  # which the autocast state does not say
            return around
        return around._replace(casting=casting, scope=autocast_state.scope() if casting else 0)
    if opened[-1].task is None:
        return opened[-1]
    carried = _tasks.get()
    return next((region for region in reversed(opened) if region.task is None or region.task in carried), _NONE_OPEN)


def acts() -> bool | None:
    """Whether ops called from here, now, are cast; None: those of a model are.

    In a backward pass, hooks run beside the model, whatever the default is.
    """
    casting = _innermost().casting
    if casting is not None:
        return casting
    off = state.off_somewhere
    if DEFAULT in off:
        return False
    return None if _MODEL in off or in_backward() else True


def in_backward() -> bool:
    """Whether autograd runs a backward pass in this thread."""
    return not is_dynamo_compiling() and _current_graph_task_id() != -1


def casts_off() -> bool:
    """Whether no op called from here, now, is cast."""
    return acts() is False


def casts_off_in_graph() -> bool:
    """The same for an op of a graph that is being compiled, which may stand in a region of the compiled code."""
    written = autocast_state.casting()
    return not written if written is not None else bool(state.off_somewhere) and casts_off()


def casts_on() -> bool:
    """Whether torch is converted and ops called from this thread, now, are cast."""
    return state.converted and not (state.off_somewhere and casts_off())


def scope() -> int:
    """The scope (number) of the lists that hold for ops called from here now."""
    if not is_dynamo_compiling() and _len_torch_dispatch_stack() and autocast_state.casting():
        return autocast_state.scope()  # perhaps of an op of a graph that is being compiled
    return _innermost().scope


def casting() -> bool | None:
    """Whether the innermost region casts; None outside of every region."""
    return _innermost().casting


def usual() -> bool | None:
    """How a region casts that takes back a `disable_casts` around it: where the conversion does."""
    return None if _MODEL in state.off_somewhere else True


def rounding() -> StochasticSteps | None:
    """How the innermost `disable_casts` region writes BF16 parameters; None outside of such a region."""
    return _innermost().rounding


def is_stepping(optimizer: object) -> bool:
    """Whether a step of this optimizer runs in this thread."""
    opened = thread.open
    return bool(opened) and any(region.stepping == id(optimizer) for region in opened)


def maps() -> bool:
    """Whether the dtypes that are asked for here are mapped, if a conversion maps any."""
    return _innermost().maps


def set_converted(converted: bool, *, enabled: bool = True, everywhere: bool = True) -> None:
    """Record that a conversion was installed or taken away, and whether and where it casts outside of any region."""
    state.converted = converted
    for key, said in ((DEFAULT, not enabled), (_MODEL, not everywhere)):
        if converted and said:
            state.off_somewhere[key] = True
        else:
            state.off_somewhere.pop(key, None)


def retire() -> None:
    """Turn casts off for good in the wrappers that hold `off_somewhere`, and give everybody else a new one."""
    old, state.off_somewhere = state.off_somewhere, {}
    state.off_somewhere.update(old)
    old[_RETIRED] = True


def enter(
    casting: bool | None,
    how: StochasticSteps | None = None,
    maps: bool | None = None,
    scope: int | None = None,
    overlay: int = 0,
) -> Region:
    """Turn casts on or off in this thread, or in the asyncio task that runs in it, until `leave` is given the result.

    maps: None maps dtypes exactly where casts are not turned off. scope: None is the one that holds already.
    """
    task = None
    if not is_dynamo_compiling() and _get_running_loop() is not None:
        task = object()
        _tasks.set((*_tasks.get(), task))
    if scope is None:
        scope = _innermost().scope
    region = Region(casting, how, casting is not False if maps is None else maps, task, scope, overlay)
    try:
        _open(region)
    except BaseException:
        leave(region)
        raise
    return region


def _open(region: Region) -> None:
    opened = thread.open
    before = _last(opened)
    opened.append(region)
    _announce(before, region)


def leave_last(casting: bool | None, how: StochasticSteps | None = None, overlay: int = 0) -> None:
    """Take back the innermost open `enter` of this kind, for callers that cannot keep its result.

    An object that a user enters as a region may be open several times, in several threads and tasks.
    """
    token = None
    try:
        token = _last_entered(casting, how, overlay)
        leave(token)
    except BaseException:
        leave(_last_entered(casting, how, overlay) if token is None else token)
        raise


def _last_entered(casting: bool | None, how: StochasticSteps | None, overlay: int) -> Region:
    opened = thread.open
    if not is_dynamo_compiling():
        carried = _tasks.get()
        for region in reversed(opened):
            same = region.casting is casting and region.rounding is how and region.overlay == overlay
            if same and (region.task is None or region.task in carried):
                return region
    return opened[-1]


def leave(token: Region) -> None:
    """Take back the `enter` that returned `token`. A second call makes sure, if an interrupt has ended the first.

    It need not be the last one: a generator or a task may end while a younger region is open.
    """
    opened = thread.open
    index = len(opened) - 1
    if not is_dynamo_compiling() and (index < 0 or opened[index] is not token):
        index = next((i for i in reversed(range(index)) if opened[i] is token), -1)
    if index >= 0:
        opened.pop(index)
    if token.task is not None:
        _tasks.set(tuple(other for other in _tasks.get() if other is not token.task))
    _announce(token, _last(opened))


def _last(opened: list[Region]) -> Region:
    """The region that was opened last and is announced; inside a compiled graph, the graph's own region."""
    if not opened:
        return _NONE_OPEN
    return opened[-1] if is_dynamo_compiling() or opened[-1] is not _GRAPH else _innermost()


def _announce(before: Region, now: Region) -> None:
    """Update the announced state after the innermost region changed from `before` to `now`."""
    if before.casting is not now.casting or _OF_BACKWARD in (before.overlay, now.overlay):
        asks = now.casting is False or now.overlay == _OF_BACKWARD
        if asks or (not is_dynamo_compiling() and _off_for_some_task()):
            state.off_somewhere[thread.key] = True
        else:
            state.off_somewhere.pop(thread.key, None)
    autocast_state.write(_written(before), before.scope, _written(now), now.scope)


def _written(region: Region) -> bool | None:
    """What the autocast state says in a region: nothing of forwards, which are too many to write it in each."""
    return None if region.overlay == _OF_FORWARD else region.casting


def _off_for_some_task() -> bool:
    opened = thread.open
    if not opened or any(region is _GRAPH for region in opened):
        return bool(opened)
    return any(region.task is not None for region in opened) and any(region.casting is False for region in opened)


@contextlib.contextmanager
def region(
    casting: bool | None, how: StochasticSteps | None = None, maps: bool | None = None, scope: int | None = None
) -> Iterator[None]:
    """`enter` and `leave` around a block."""
    token = enter(casting, how, maps, scope)
    try:
        try:
            yield
        finally:
            leave(token)
    except BaseException:
        leave(token)
        raise


def forward_region() -> Region | None:
    """The region that a forward opens here; None where another one has decided already."""
    if acts() is not None:
        return None
    around = _innermost()
    region = around._replace(casting=True, task=None, overlay=_OF_FORWARD)
    return IN_FORWARD if region == IN_FORWARD else region


def run_forward(function, args, kwargs):
    """Call `function` as the forward of a model."""
    region = None if is_dynamo_compiling() else forward_region()
    if region is None:
        return function(*args, **kwargs)
    opened = thread.open
    depth = len(opened)
    try:
        opened.append(region)
        return function(*args, **kwargs)
    finally:
        del opened[depth : depth + 1]


def forward(run: Callable) -> Callable:
    """A compiled graph, wrapped to run as the forward of a model, whoever calls it."""
    return lambda *args: run_forward(run, args, {})


def run_backward(function, args, kwargs):
    """Call `function`, which runs a backward pass: hooks inside are beside the model."""
    here = _innermost()
    return run_in(Region(None, here.rounding, here.maps, None, here.scope, _OF_BACKWARD), function, args, kwargs)


def run_in(region, function, args, kwargs):
    """Call `function` in a new region. After an interrupt at any instruction of this file, the region is not open."""
    try:
        try:
            _open(region)
            return function(*args, **kwargs)
        finally:
            leave(region)
    except BaseException:
        if not is_dynamo_compiling():  # what is compiled is not interrupted
            leave(region)  # in case the interrupt came before the other, or while that ran
        raise


def run_uncast(function, args, kwargs):
    """Call `function` with casts off inside: the op that was listed has decided for everything it calls."""
    here = _innermost()
    return run_in(Region(False, here.rounding, here.maps, None, here.scope), function, args, kwargs)


def run_step(optimizer, how, function, args):
    """Call `function`, a step of this optimizer, with casts off; regions in it round as `how` says."""
    return run_in(Region(False, how, False, None, _innermost().scope, 0, id(optimizer)), function, args, {})


def run_plain_step(optimizer, function):
    """Call `function`, a step of this optimizer with which hmpx has nothing to do, with casts off."""
    here = _innermost()
    if not state.converted or (here.casting is False and not here.maps):
        return function(optimizer)
    return run_in(Region(False, here.rounding, False, None, here.scope), function, (optimizer,), {})


def run_at(scope, function, args, kwargs):
    """Call `function` in a scope, such as a module's forward under the module's lists."""
    here = _innermost()
    if here.scope == scope and here.casting:  # a module in another with the same rule
        return function(*args, **kwargs)
    return run_in(Region(True, here.rounding, here.maps, None, scope, _OF_MODULE), function, args, kwargs)


def graph(run: Callable) -> Callable:
    """A compiled graph that contains regions, wrapped so that the regions take effect when it runs.

    A backend that runs the ops of a graph one by one looks them up in torch, and so finds the wrappers.
    """

    def running(*args):
        key, opened, off = thread.key, thread.open, state.off_somewhere
        around = forward_region()
        put_back, was_off, depth = autocast_state.saved(), thread.key in off, len(opened)
        if around is not None:
            opened.append(around)
        opened.append(_GRAPH)
        off[key] = True
        try:
            return run(*args)
        except BaseException:
            put_back()
            raise
        finally:
            del opened[depth:]
            if not was_off:
                off.pop(key, None)

    return running


def carrying(function: Callable) -> Callable:
    """`function`, made to run in the region that is open now, whatever is open when it is called."""
    now, casting = _innermost(), acts()

    def carried(*args, **kwargs):
        region = Region(casting, now.rounding, now.maps, None, now.scope)
        return run_in(region, function, args, kwargs)

    return carried
