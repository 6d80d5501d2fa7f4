"""Hooks in constructors: they see every optimizer when it has been made, and every model before it is distributed."""

from __future__ import annotations

import functools
import gc
import sys
import threading
from collections.abc import Callable, Collection
from types import ModuleType
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from hmpx.base.awaited import when_imported
from hmpx.base.changes import MISSING, Attribute, Changes
from hmpx.base.module_tree import modules_in, parameters_in
from hmpx.base.subclasses import with_subclasses
from hmpx.ops.captured_names.rebinding import Rebinding

Module = torch.nn.Module
Optimizer = torch.optim.Optimizer


def watch_optimizers(made: Callable[[Optimizer, list[Optimizer]], None], changes: Changes) -> None:
    """Call `made` with each new optimizer when its constructor has returned, until `changes` are undone.

    With it come the optimizers that were made inside of the constructor (of a `ZeroRedundancyOptimizer`, say).
    """
    ended: list[bool] = []
    running = threading.local()  # inside: those made inside of the watched constructor that is running in this thread

    def watch(cls: type[Optimizer]) -> None:
        init = vars(cls).get("__init__")
        if init is None or ended:
            return

        @functools.wraps(init)
        def __init__(new: Any, *args: Any, **kwargs: Any) -> None:
            outer = getattr(running, "inside", None)
            if ended or outer is not None:
                init(new, *args, **kwargs)
                if outer is not None:
                    outer.append(new)
                return
            inside: list[Any] = []
            running.inside = inside
            try:
                init(new, *args, **kwargs)
                made(new, [each for each in inside if each is not new])  # hmpx itself may make an optimizer
            finally:
                running.inside = None

        changes.put(Attribute(cls, "__init__", f"{cls.__name__}.__init__"), __init__)

    def defined(cls: type[Optimizer], **kwargs: Any) -> None:
        if before is MISSING:
            super(Optimizer, cls).__init_subclass__(**kwargs)
        else:
            before.__get__(None, cls)(**kwargs)
        watch(cls)

    changes.callback(ended.append, True)
    subclassing = Attribute(Optimizer, "__init_subclass__", "torch.optim.Optimizer.__init_subclass__")
    before = changes.put(subclassing, classmethod(defined))
    for each in with_subclasses(Optimizer):
        watch(each)


def watch_distribution(distributes: Callable[[Module], object], changes: Changes) -> None:
    """Call `distributes` with each module that DistributedDataParallel or `fully_shard` is about to wrap."""
    init = DistributedDataParallel.__init__
    ended: list[bool] = []

    @functools.wraps(init)
    def __init__(ddp: DistributedDataParallel, module: Module, *args: Any, **kwargs: Any) -> None:
        if not ended:
            distributes(module)
        init(ddp, module, *args, **kwargs)

    rebinding, imported_before = Rebinding(), "torch.distributed.fsdp" in sys.modules
    changes.callback(rebinding.undo)
    changes.put(Attribute(DistributedDataParallel, "__init__", "DistributedDataParallel.__init__"), __init__)

    def imported(fsdp: ModuleType) -> None:
        fully_shard = fsdp.fully_shard

        @functools.wraps(fully_shard)
        def shard(module: Any, *args: Any, **kwargs: Any) -> Any:
            for each in module if isinstance(module, list | tuple) else (module,):
                if not ended:
                    distributes(each)
            return fully_shard(module, *args, **kwargs)

        changes.put(Attribute(fsdp, "fully_shard", "torch.distributed.fsdp.fully_shard"), shard)
        if imported_before:
            rebinding.add([(fully_shard, shard)])
        else:  # nobody can have imported the name yet
            rebinding.add_imported([(fully_shard, shard)], [fsdp])

    changes.callback(ended.append, True)
    when_imported("torch.distributed.fsdp", imported, changes)


def models_of(params: Collection[torch.nn.Parameter]) -> list[Module]:
    """Return the modules that hold some of `params` and are part of no other module, the smallest first."""
    modules = [thing for thing in gc.get_objects() if issubclass(type(thing), Module) and "training" in vars(thing)]
    parts = {id(child) for module in modules for child in module._modules.values()}
    wanted = set(params)
    found = [m for m in modules if id(m) not in parts and not wanted.isdisjoint(parameters_in(m))]
    return sorted(found, key=lambda module: sum(1 for _ in modules_in(module)))
