"""Says whether casts are on here, and which lists hold.

Three things decide, the innermost first: a region that is open here (`disable_casts`, `enable_casts`, the inside of a
listed Python function, an optimizer step), the default that `convert(enabled=..., where=...)` set, and whether torch is
converted at all. This file keeps the first, by context (`contextvars`), that is by thread and asyncio task;
`process_state` keeps the others. Under ``where="model"`` there is no default: the forward of a module opens a region
that casts, and elsewhere `ops.wrapping.switch` decides whether an op is the model's. An *island* is the region that
code opens by ``torch.autocast(enabled=False)`` (`ops.autocast`): nothing is cast in it. An enabled
`torch.autocast` region inside casts again as the code around the island does. A *scope* is a number that names the
lists in force: 0 names the conversion's own, and each nesting of lists that modules and regions lay over them has
another number (`ops.overlays`).

torch.compile guards on the region around compiled code (`ops.compilers`). A region that opens inside of compiled code
sets the fields of `traced`. To Dynamo these are constants, and the wrappers that it traces read them. The end of the
region sets them back, so that a checkpointed body may hold a region too. The graph also gets nodes that open and close
the region: they serve those ops that meet a wrapper only when the graph runs.
"""

from __future__ import annotations

import functools
import threading
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import wrapt
from torch.compiler import allow_in_graph, is_dynamo_compiling

from hmpx.base import process_state as state
from hmpx.base.torch_private import graph_task, private


@dataclass(frozen=True)
class StochasticSteps:
    """Optimizer steps inside a region round BF16 parameters stochastically, with the random numbers of `seed`."""

    seed: int | None = None


class Region:
    """The settings of one region. `Region()` has those outside of all regions.

    casting: whether ops are cast; None leaves that to the default.
    rounding: how optimizer steps write BF16 parameters. maps: whether a `dtype_map` acts: in a listed Python function
    it does, in an optimizer step it does not. scope: the number of the lists in force.
    owner: the `Opener` or `torch.autocast` that opened the region, the optimizer whose step it is, Dynamo's trace, or
        `OUTSIDE`, where something runs that is no part of a model (data loading, say).
    island: whether it is an island. One with casting None is outside of a model: the forwards of modules in it cast.
    under: the casting around an island.
    around: the region around this one. closed: whether it has been left. A generator or a task may leave a region while
    a younger one is open, or from another context. where: the user's line that opened it, if an observer is there.
    """

    __slots__ = ("around", "casting", "closed", "island", "maps", "owner", "rounding", "scope", "under", "where")

    def __init__(self, casting=None, rounding=None, maps=True, scope=0, owner=None, island=False, under=None):
        self.casting, self.rounding, self.maps, self.scope, self.owner = casting, rounding, maps, scope, owner
        self.around, self.closed, self.island, self.under, self.where = None, False, island, under, ""


OUTSIDE = "outside of the model"
_innermost: ContextVar[Region] = ContextVar("hmpx regions")
enter_region = _innermost.set


class _Nowhere(Region):
    """The settings outside of all regions. `here` is the innermost region, or this object where no region is open.

    Dynamo cannot trace a Python function that reads a context variable. The getter is therefore a method in C,
    `ContextVar.get` with this object as the default: Dynamo calls it and guards on the result.
    """

    __slots__ = ()
    here = property(_innermost.get)


class _Traced:
    """The settings of the region that Dynamo traces. `inside`: whether it traces one.

    Dynamo undoes what a trace writes here, so that every thread finds the settings outside of all regions.
    It is no `threading.local`, to which Dynamo replays no writes. It has slots, since Dynamo forgets writes to the
    `__dict__` of an object that come after a higher-order op.
    """

    __slots__ = ("casting", "inside", "island", "maps", "rounding", "scope", "under")

    def __init__(self) -> None:
        self.rounding = None  # no optimizer step is traced
        self.take(Region(), False)

    def take(self, region: Region, inside: bool) -> None:
        self.inside, self.casting, self.maps, self.scope = inside, region.casting, region.maps, region.scope
        self.island, self.under = region.island, region.under


class _RunningGraphs(threading.local):
    """How many graphs that open regions run in this thread."""

    count = 0


nowhere = _Nowhere()
IN_FORWARD = Region(casting=True)  # the region of a forward that has none around it
IN_FORWARD.around = nowhere
traced = _Traced()
running_graphs = _RunningGraphs()
_DEFAULT = 0  # the key of ``convert(enabled=False)`` in `Off.by`, where the key of a region is its id


def innermost() -> Any:
    """The innermost region that is open here."""
    if traced.inside:
        return traced
    region = nowhere.here
    while region.closed:
        region = region.around
    return region


def open_regions() -> list[Region]:
    """The regions that are open here, the innermost first."""
    found, region = [], nowhere.here
    while region is not nowhere:
        if not region.closed:
            found.append(region)
        region = region.around
    return found


def acts() -> bool | None:
    """Return whether ops called from here, now, are cast; None: only those of a model are.

    A hook that runs in a backward pass is no part of the model: there the default is None in place of True.
    """
    region = innermost()
    if region.casting is not None:
        return region.casting
    if not state.enabled:
        return False
    return None if region.island or not state.everywhere or in_backward() else True


def widens() -> bool:
    """Return whether an op that is not cast here, and that torch would refuse, is computed in the widest dtype."""
    region = innermost()
    return region.island or (not traced.inside and region.owner is OUTSIDE)


def in_backward() -> bool:
    """Return whether autograd runs a backward pass in this thread."""
    return not is_dynamo_compiling() and graph_task() != -1


def casts_on() -> bool:
    """Return whether torch is converted and ops called from this thread, now, are cast."""
    return state.converted and acts() is not False


def scope() -> int:
    """The scope (number) of the lists in force for ops called from here now."""
    return innermost().scope


def owned_by(owner: object) -> Region | None:
    """The innermost region that this object has entered here and not left."""
    region = nowhere.here
    while region is not nowhere:
        if region.owner is owner and not region.closed:
            return region
        region = region.around
    return None


def set_converted(converted: bool, *, enabled: bool = True, everywhere: bool = True) -> None:
    """Record that a conversion was installed or taken away, and whether and where it casts outside of any region."""
    state.converted, state.enabled, state.everywhere = converted, enabled, everywhere
    if enabled:
        state.off.by.pop(_DEFAULT, None)
    else:
        state.off.by[_DEFAULT] = True
    _announce()


def retire() -> None:
    """Turn casts off for good in the wrappers that hold the present `process_state.off`; make another for new ones."""
    old, state.off = state.off, state.Off()
    state.off.by.update(old.by)
    old.any = True
    _announce()


def _announce() -> None:
    """Set the flag that wrappers read.

    Under the GIL no other thread runs within the last three lines: CPython lets others run at calls and backward jumps.
    """
    off = state.off
    by = off.by
    off.any = True
    if not by:
        off.any = False
        if by:
            off.any = True


def enter(
    casting: bool | None,
    how: StochasticSteps | None = None,
    maps: bool | None = None,
    scope: int | None = None,
    owner: Any = None,
) -> Region:
    """Turn casts on or off here until `leave` is given the result.

    maps: None maps dtypes unless casts are turned off. scope: None leaves the lists as they are.
    """
    if scope is None:
        scope = innermost().scope
    return _opened(Region(casting, how, casting is not False if maps is None else maps, scope, owner))


def enter_autocast(enabled: bool, in_model: bool, owner: Any = None) -> Region:
    """Open the region of a `torch.autocast` until `leave` is given the result.

    enabled: False opens an island. True ends the island around the region, and changes nothing where there is none.
    in_model: whether the island is in a model. In any other, the forwards of modules cast.
    """
    here = innermost()
    under = here.under if here.island else here.casting
    if enabled:
        # Of no region: every op's or a model's, as anywhere. What compiled code calls is a model's.
        casting = (True if state.everywhere or is_dynamo_compiling() else None) if under is None else under
        return _opened(Region(casting, here.rounding, here.maps, here.scope, owner))
    casting = False if in_model else None
    return _opened(Region(casting, here.rounding, here.maps, here.scope, owner, True, under))


def _opened(region: Region) -> Region:
    try:
        open_region(region)
    except BaseException:
        leave(region)
        raise
    return region


def open_region(region: Region) -> None:
    """Open a region: its settings are in force here until `leave` closes it."""
    if is_dynamo_compiling():
        _trace_opening(region)
        return
    region.around = innermost()
    if region.casting is not True:
        state.off.by[id(region)] = True
        state.off.any = True
    enter_region(region)


def leave(region: Region) -> None:
    """Close a region. If an interrupt ends this call, a second call completes it.

    Regions inside may still be open, since a generator or a task may end before them.
    """
    if is_dynamo_compiling():
        _trace_leaving(region)
        return
    region.closed = True
    if region.casting is not True:
        state.off.by.pop(id(region), None)
        _announce()
    region.casting = None  # a task may still carry this region: None has wrappers look around it
    if region.around is not None:  # else it was never opened
        enter_region(innermost())


# Regions that Dynamo traces, and graphs that open regions


def _trace_opening(region: Region) -> None:
    if traced.inside:
        region.around = Region(traced.casting, None, traced.maps, traced.scope, None, traced.island, traced.under)
    traced.take(region, True)
    _enter_in_graph(region.scope, region.casting, region.maps, region.island, region.under)


def _trace_leaving(region: Region) -> None:
    traced.take(Region() if region.around is None else region.around, region.around is not None)
    _leave_in_graph()


def _enter_in_graph(
    scope: int, casting: bool | None, maps: bool, island: bool = False, under: bool | None = None
) -> None:
    """Open a region, as a node of a graph. If Dynamo calls this while it traces, the region ends with the trace."""
    around, trace = innermost(), traced_into()
    if trace is None:
        return open_region(Region(casting, around.rounding, maps, scope, None, island, under))
    region = Region(casting, around.rounding, maps, scope, trace, island, under)
    region.around = around
    trace.add_cleanup_hook(functools.partial(leave, region))
    enter_region(region)


def _leave_in_graph() -> None:
    region, trace = innermost(), traced_into()
    if trace is None or region.owner is trace:
        leave(region)


def traced_into() -> Any:
    """The output graph into which Dynamo traces here; None while graphs run or are compiled."""
    traces = None if running_graphs.count else private("torch._dynamo.symbolic_convert.tls")
    tracer = getattr(traces, "current_tx", None)
    return tracer and tracer.output


NODES = (_enter_in_graph, _leave_in_graph)


wrapt.register_post_import_hook(lambda _: list(map(allow_in_graph, NODES)), "torch._dynamo")
