"""A picture of everything of the process that hmpx may touch, taken before a test and looked at again after it.

It does not ask hmpx where it has been. It holds each function, class and dtype in the namespace of every module of
torch and of every class there, and the variables in closures of functions that hooks stand in; of what has no
namespace, each setting and stack of hooks that torch can be asked for; and hmpx's own variables, which are empty where
nothing is in force.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import logging
import operator
import os
import signal
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

import hmpx
from hmpx.base import process_state, region_state
from hmpx.ops.policies.catalog import catalog
from hmpx.updates import gradients, step_hooks

KEPT = (types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType, types.GetSetDescriptorType)
KEPT = (*KEPT, types.WrapperDescriptorType, staticmethod, classmethod, property, type, torch.dtype)
KEPT = (*KEPT, type(functools.cache(len)))
TORCH = os.path.dirname(torch.__file__)
OTHERS = ("PYTEST_", "TORCH", "_TORCH", "KMP_")  # variables of the environment that pytest, torch and scikit-learn set
IN_CLOSURES = ("torch.optim.", "torch.nn.utils.", "torch.amp.", "torch.distributed.optim.")


def attributes_of_torch() -> dict[str, tuple[Any, bool]]:
    """What stands at each entry point of each op, and whether it stands in the owner's own namespace."""
    entries = [entry for op in catalog().values() for entry in op.entries]
    return {
        entry.label: (getattr(entry.owner, entry.attribute), entry.attribute in vars(entry.owner)) for entry in entries
    }


class Namespaces:
    """What stands in the namespaces of torch, by owner; modules that are imported later are taken up as they are."""

    __module__ = "builtins"  # out of sight of `convert()`, which would put wrappers into what is noted here, too

    def __init__(self) -> None:
        self._seen: set[str] = set()
        self._owners: dict[int, tuple[str, Any, Callable, tuple]] = {}
        self._versions: dict[int, ctypes.c_uint64] = {}  # of the owners' namespaces
        self._as_noted: dict[int, int] = {}  # the versions in which they held what is noted
        self._cells: dict[int, tuple[str, types.CellType, Any]] = {}
        self.look()

    def look(self) -> None:
        """Take up what has been imported since the last time."""
        for name in [name for name in sys.modules if name not in self._seen]:
            self._seen.add(name)
            module = sys.modules[name]
            is_torchs = name.split(".")[0] == "torch" and name != "torch.compiler._cache"  # which adds to itself
            if is_torchs and isinstance(module, types.ModuleType):
                self._keep(name, module)
                for word, value in list(vars(module).items()):
                    if issubclass(type(value), type) and value.__module__ == name:
                        self._keep(f"{name}.{word}", value)

    def _keep(self, label: str, owner: Any) -> None:
        kept = {k: v for k, v in vars(owner).items() if issubclass(type(v), KEPT)}
        if label.startswith("torch.optim.") and isinstance(owner, type):
            kept.pop("step", None)  # torch wraps it when the first optimizer of the class is made; see `in_force`
        if len(kept) > 1 and id(owner) not in self._owners:
            self._owners[id(owner)] = label, vars(owner), operator.itemgetter(*kept), tuple(kept.values())
            self._versions[id(owner)] = version_of(vars(owner))
        if label.startswith(IN_CLOSURES):
            for name, function in kept.items():
                for cell in getattr(function, "__closure__", None) or ():
                    self._cells[id(cell)] = f"a variable of {label}.{name}", cell, _content(cell)

    def changed(self, adopt: bool = False) -> Iterator[str]:
        """The names that hold something else; what torch has wrapped itself is taken up. adopt: so is all the rest."""
        noted = self._as_noted.get
        for key in [key for key, version in self._versions.items() if version.value != noted(key)]:
            label, namespace, pick, values = self._owners[key]
            version = self._versions[key].value
            try:
                if pick(namespace) == values:
                    self._as_noted[key] = version or -1
                    continue
            except KeyError:
                pass
            before = dict(zip(pick.__reduce__()[1], values, strict=True))
            different = [name for name, value in before.items() if namespace.get(name) is not value]
            taken = {name for name in different if adopt or _wrapped_by_torch(namespace.get(name), before[name])}
            before.update((name, namespace.get(name)) for name in taken)
            self._owners[key] = label, namespace, pick, tuple(before.values())
            yield from (f"{label}.{name}" for name in different if name not in taken)
        for key, (label, cell, value) in list(self._cells.items()):
            if _content(cell) is not value:
                if adopt:
                    self._cells[key] = label, cell, _content(cell)
                yield label


def version_of(namespace: Any) -> ctypes.c_uint64:
    """A number that CPython before 3.13 raises whenever somebody writes to this dict; 0 where nobody knows.

    It stands behind a dict's head and its size. To read it for every namespace of torch takes a hundredth of the time
    in which all names are compared.
    """
    if sys.implementation.name != "cpython" or sys.version_info >= (3, 13):
        return ctypes.c_uint64(0)
    if isinstance(namespace, types.MappingProxyType):
        (namespace,) = gc.get_referents(namespace)
    return ctypes.c_uint64.from_address(id(namespace) + object.__basicsize__ + ctypes.sizeof(ctypes.c_ssize_t))


def _wrapped_by_torch(now: Any, before: Any) -> bool:
    """Whether Dynamo has put something around a function, as it does when it is used for the first time."""
    now, before = (getattr(each, "__func__", each) for each in (now, before))
    while now is not before:
        code = getattr(now, "__code__", None)
        if code is None or not code.co_filename.startswith(TORCH):
            return False
        if now.__module__ == "torch._dynamo.mutation_guard":  # around the constructors of modules
            return True
        now = getattr(now, "_torchdynamo_orig_callable", None) or getattr(now, "__wrapped__", None)
    return True


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return None


def settings() -> dict[str, Any]:
    """What has no namespace: by what a message calls it."""
    devices = ("cpu", "cuda", "maia", "ipu", "xla")
    module, optimizer = torch.nn.modules.module, sys.modules["torch.optim.optimizer"]
    hooks = [name for name in vars(module) if name.startswith("_global_") and name.endswith("hooks")]
    return {
        "the default dtype": torch.get_default_dtype(),
        "the default device": torch.get_default_device(),
        "the fast path of attention": torch.backends.mha.get_fastpath_enabled(),
        "autocast": [(torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in devices],
        "gradients are on": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "hooks of all modules": {name: len(getattr(module, name)) for name in hooks},
        "hooks before all optimizer steps": len(optimizer._global_optimizer_pre_hooks),
        "hooks after all optimizer steps": len(optimizer._global_optimizer_post_hooks),
        "garbage is collected": gc.isenabled(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "function modes": torch._C._len_torch_function_stack(),
        "hooks on saved tensors": torch._C._autograd._top_saved_tensors_default_hooks(True),
        "the tag of compiled code": torch.compiler.config.cache_key_tag,
        "TorchScript's table of builtins": builtins(),
        "the logger": (logging.getLogger("hmpx").level, list(logging.getLogger("hmpx").handlers)),
        "signal handlers": [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)],
        "sys.path begins with": sys.path[:1],
        "sys.argv": [*sys.argv],
        "the main module": sys.modules.get("__main__"),
        "the working folder": os.getcwd(),
        "the environment": frozenset(each for each in os.environ.items() if not each[0].startswith(OTHERS)),
        "threads": {each for each in threading.enumerate() if not each.daemon and "PoolExecutor" not in each.name},
    }


def builtins() -> int:
    """How many functions TorchScript takes for some ops that are cast; `torch.ops.aten` is known once it is used."""
    names = [*torch.jit._builtins._get_builtin_table().values()]
    return sum(names.count(f"aten::{op}") - (op in torch.ops.aten._dir) for op in ("linear", "matmul", "softmax"))


def in_force() -> Iterator[str]:
    """hmpx's own variables that are not empty."""
    yield from (f"process_state.{name}" for name in process_state.in_use())
    variables = {
        "regions of this thread": region_state.open_regions(),
        "process_state.watching_writes": process_state.watching_writes._undo,
        "attached optimizers": [*step_hooks._attached],
        "changes of optimizers": step_hooks._changes._undo,
        "claims on gradients": gradients._claimed,
        "claims that ended": gradients._ended,
    }
    yield from (name for name, value in variables.items() if value)
    for cls, cell in step_hooks._cells():
        if getattr(cell.cell_contents, "__hmpx_original__", None) is not None:
            yield f"the step of {cls.__name__}"


def _told(name: str, before: Any, now: Any) -> str:
    if isinstance(now, frozenset):  # of variables, of which most are nobody's business
        before, now = ([key for key, _ in one - other] for one, other in ((before, now), (now, before)))
    return f"{name}: {before!r}, now {now!r}"


class Picture:
    """The process as it is now; `changed` says what is otherwise later."""

    _namespaces: Namespaces | None = None  # one for all: they are what torch was imported as

    def __init__(self) -> None:
        if Picture._namespaces is None:
            Picture._namespaces = Namespaces()
        self._namespaces.look()
        self._settings = settings()

    def changed(self) -> list[str]:
        """What is not as it was, in words; what a dead optimizer held counts only if a collection does not free it."""
        if self._in_force() or (found := [*self._namespaces.changed()]):
            gc.collect()
            step_hooks.uninstall()  # as `hmpx.restore()` does, if nobody needs them
            found = [*self._in_force(), *self._namespaces.changed()]
        return found

    def _in_force(self) -> list[str]:
        now = settings()
        different = [name for name, value in self._settings.items() if now[name] != value]
        return [*in_force(), *(_told(name, self._settings[name], now[name]) for name in different)]

    def clean_up(self) -> None:
        """Undo what can be undone, and take whatever is still otherwise for how things are from here on.

        A test that fails keeps its optimizers: pytest holds its frames.
        """
        hmpx.restore()
        for each in gc.get_objects():
            if issubclass(type(each), torch.optim.Optimizer) and "param_groups" in vars(each):
                hmpx.detach(each)
        step_hooks._attached.clear()
        step_hooks.uninstall()
        list(self._namespaces.changed(adopt=True))
