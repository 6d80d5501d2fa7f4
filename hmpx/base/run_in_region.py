"""Runs functions, blocks and graphs in a region: a forward, a backward pass, a step, what a listed op calls.

A signal handler that raises, as that of Ctrl-C does, may do so between any two instructions: also in a `finally`, and
in the `__exit__` of a context manager. Each call therefore gives back what it has taken in a function that may run
twice, and runs it again if anything has raised.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch.compiler import is_dynamo_compiling

from hmpx.base import process_state as state
from hmpx.base.region_state import (
    IN_FORWARD,
    OUTSIDE,
    Region,
    StochasticSteps,
    acts,
    enter,
    enter_region,
    innermost,
    leave,
    nowhere,
    open_region,
    owned_by,
    running_graphs,
)


def giving_back(give_back: Callable[[], object], function: Callable, /, *args: Any, **kwargs: Any) -> Any:
    """Return ``function(*args, **kwargs)``, and call `give_back` after it; twice if anything raises."""
    try:
        try:
            return function(*args, **kwargs)
        finally:
            give_back()
    except BaseException:
        give_back()
        raise


class Opener:
    """Enters and leaves regions, several at a time and in several contexts. A user's regions derive from it."""

    _traced: tuple[Region, ...] = ()

    def _enter_region(self, casting: bool, how: StochasticSteps | None = None, scope: int | None = None) -> None:
        region = enter(casting, how, None, scope, self)
        if is_dynamo_compiling():
            self._traced = (region, *self._traced)

    def __exit__(self, *exception: object) -> None:
        self._leave_region()

    def _leave_region(self) -> None:
        """Leave the innermost region that this object has entered here."""
        if is_dynamo_compiling():
            last, *others = self._traced
            self._traced = tuple(others)
            leave(last)
            return
        region: Region | None = None
        try:
            region = self._entered()
            leave(region)
        except BaseException:
            leave(self._entered() if region is None else region)
            raise

    def _entered(self) -> Region:
        return owned_by(self) or Region()  # of another context, or never entered


@contextlib.contextmanager
def region(casting: bool | None, how: StochasticSteps | None = None, maps: bool | None = None) -> Iterator[None]:
    """`enter` and `leave` around a block."""
    token = enter(casting, how, maps)
    try:
        try:
            yield
        finally:
            leave(token)
    except BaseException:
        leave(token)
        raise


def run_in(region, function, args, kwargs):
    """Call `function` in a new region. After an interrupt at any instruction of this file, the region is not open."""
    try:
        try:
            open_region(region)
            return function(*args, **kwargs)
        finally:
            leave(region)
    except BaseException:
        if not is_dynamo_compiling():  # what is compiled is not interrupted
            leave(region)  # in case the interrupt came before the other, or while that ran
        raise


def run_forward(function, args, kwargs):
    """Call `function` as the forward of a model."""
    if is_dynamo_compiling() or acts() is not None:  # another region has decided already
        return function(*args, **kwargs)
    around = innermost()
    return run_in(Region(True, around.rounding, around.maps, around.scope), function, args, kwargs)


def leave_forward() -> None:
    """Leave `IN_FORWARD`. A region that was opened in the forward by hand, and not closed, stays open."""
    region = nowhere.here
    if region is IN_FORWARD:
        enter_region(nowhere)
        return
    while region is not nowhere:
        if region.around is IN_FORWARD:
            region.around = nowhere
        region = region.around


def run_backward(function, args, kwargs):
    """Call `function`, which runs a backward pass: hooks inside are outside of the model."""
    here = innermost()
    return run_in(Region(None, here.rounding, here.maps, here.scope), function, args, kwargs)


def run_uncast(function, args, kwargs):
    """Call `function` with casts off inside: the op that was listed has decided for everything it calls."""
    here = innermost()
    return run_in(Region(False, here.rounding, here.maps, here.scope), function, args, kwargs)


def run_outside(function, args, kwargs):
    """Call `function`, which is no part of a model, with casts off inside."""
    here = innermost()
    return run_in(Region(False, here.rounding, here.maps, here.scope, OUTSIDE), function, args, kwargs)


def run_step(optimizer, how, function, args):
    """Call `function`, a step of this optimizer, with casts off; regions in it round as `how` says."""
    return run_in(Region(False, how, False, innermost().scope, optimizer), function, args, {})


def run_plain_step(optimizer, function):
    """Call `function`, a step of this optimizer with which hmpx has nothing to do, with casts off."""
    here = innermost()
    if not state.converted or (here.casting is False and not here.maps):
        return function(optimizer)
    return run_in(Region(False, here.rounding, False, here.scope), function, (optimizer,), {})


def run_at(scope, function, args, kwargs):
    """Call `function` in a scope, such as a module's forward under the module's lists."""
    here = innermost()
    if here.scope == scope and here.casting:  # a module in another with the same rule
        return function(*args, **kwargs)
    return run_in(Region(True, here.rounding, here.maps, scope), function, args, kwargs)


def carrying(function: Callable, casting: bool | None) -> Callable:
    """`function`, made to run in the region that is open now, whatever is open when it is called.

    casting: whether ops are cast in it; None if only those of a model are.
    """
    now = innermost()
    rounding, maps, scope, island, under = now.rounding, now.maps, now.scope, now.island, now.under

    def carried(*args, **kwargs):
        return run_in(Region(casting, rounding, maps, scope, None, island, under), function, args, kwargs)

    return carried


def graph(run: Callable, opens: bool, everywhere: bool) -> Callable:
    """Wrap a graph, or the function that compiles it, to run as the forward of a model, whoever calls it.

    opens: whether the graph opens regions; those that are open when it fails end. everywhere: whether every op is cast,
    and not the model's alone.
    """
    if not opens:
        return run if everywhere else lambda *args: run_forward(run, args, {})

    def running(*args):
        before = innermost()
        running_graphs.count += 1
        try:
            return run_forward(run, args, {})
        finally:
            running_graphs.count -= 1
            while (still_open := innermost()) is not before and still_open is not nowhere:
                leave(still_open)

    return running
