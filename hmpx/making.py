"""Watching for what a program makes: every optimizer as soon as it is made, every model before it is distributed."""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
from collections.abc import Callable, Collection
from types import ModuleType
from typing import Any

import torch
import wrapt
from torch.nn.parallel import DistributedDataParallel

from hmpx.captures import rebind

Module = torch.nn.Module
Optimizer = torch.optim.Optimizer
_making = threading.local()  # whether a constructor of an optimizer is running


def watch_optimizers(made: Callable[[Optimizer], None], undo: contextlib.ExitStack) -> None:
    """Call `made` with each optimizer whose outermost constructor is done; `undo` ends that.

    One that another makes inside its own constructor (`ZeroRedundancyOptimizer`) is that other's affair.
    """

    def watched(init: Callable) -> Callable:
        @functools.wraps(init)
        def __init__(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            if getattr(_making, "any", False):
                init(optimizer, *args, **kwargs)
                return
            _making.any = True
            try:
                init(optimizer, *args, **kwargs)
            finally:
                _making.any = False
            made(optimizer)

        return __init__

    def watch(cls: type) -> None:
        init = vars(cls).get("__init__")
        if init is not None:
            cls.__init__ = watched(init)
            undo.callback(setattr, cls, "__init__", init)

    def defined(cls: type, **kwargs: Any) -> None:
        super(Optimizer, cls).__init_subclass__(**kwargs)
        watch(cls)

    Optimizer.__init_subclass__ = classmethod(defined)
    undo.callback(delattr, Optimizer, "__init_subclass__")
    classes = [Optimizer]
    for cls in classes:
        classes += [sub for sub in cls.__subclasses__() if sub not in classes]
        watch(cls)


def watch_distribution(distributes: Callable[[Module], None], undo: contextlib.ExitStack) -> None:
    """Call `distributes` with each module that DistributedDataParallel or `fully_shard` is about to take."""
    init = DistributedDataParallel.__init__

    @functools.wraps(init)
    def __init__(ddp: DistributedDataParallel, module: Module, *args: Any, **kwargs: Any) -> None:
        distributes(module)
        init(ddp, module, *args, **kwargs)

    DistributedDataParallel.__init__ = __init__
    undo.callback(setattr, DistributedDataParallel, "__init__", init)
    watching = [True]

    def imported(fsdp: ModuleType) -> None:
        if watching:
            fully_shard, shard = fsdp.fully_shard, _watched_shard(fsdp.fully_shard, distributes)
            fsdp.fully_shard = shard
            rebind({fully_shard: shard})
            undo.callback(rebind, {shard: fully_shard})
            undo.callback(setattr, fsdp, "fully_shard", fully_shard)

    undo.callback(watching.clear)
    wrapt.register_post_import_hook(imported, "torch.distributed.fsdp")


def _watched_shard(fully_shard: Callable, distributes: Callable[[Module], None]) -> Callable:
    @functools.wraps(fully_shard)
    def shard(module: Any, *args: Any, **kwargs: Any) -> Any:
        for each in module if isinstance(module, list | tuple) else (module,):
            distributes(each)
        return fully_shard(module, *args, **kwargs)

    return shard


def models_of(params: Collection[torch.nn.Parameter]) -> list[Module]:
    """The modules that hold some of `params` and are part of no other module, the smallest first."""
    modules = [thing for thing in gc.get_objects() if issubclass(type(thing), Module) and "_modules" in vars(thing)]
    parts = {id(child) for module in modules for child in module.children()}
    wanted = set(params)
    found = [m for m in modules if id(m) not in parts and not wanted.isdisjoint(m.parameters())]
    return sorted(found, key=lambda module: sum(1 for _ in module.modules()))
