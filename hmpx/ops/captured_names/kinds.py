"""Which objects are searched for captured names, and which stay as they are: tables of torch, hmpx and wrapt."""

from __future__ import annotations

import functools
import types
from collections import defaultdict
from typing import Any

import torch

from hmpx.ops.captured_names import raw

_FORWARD_MODULES = ("torch.nn.modules", "torch.distributions", "torch.ao.nn", "torch.testing")
_OFF_LIMITS = frozenset({"hmpx", "wrapt", "builtins", "gc", "_thread"})
_GROUPS = ("modules", "classes", "objects", "functions", "partials", "methods")


def grouped(things: list[Any]) -> dict[str, list[Any]]:
    """`things` grouped by how they are searched."""
    of_kind: defaultdict[int, list[Any]] = defaultdict(list)
    for kind, thing in zip(map(id, map(type, things)), things, strict=True):  # not __class__, which a proxy makes up
        of_kind[kind].append(thing)
    groups: dict[str, list[Any]] = {group: [] for group in _GROUPS}
    for same in of_kind.values():
        groups.get(_group(type(same[0])), []).extend(same)
    return groups


def _group(kind: type) -> str:
    """How objects of a class are searched; empty if they hold no functions under names of their own."""
    if kind is types.FunctionType:
        return "functions"
    if kind is types.BuiltinFunctionType:
        return "methods"
    for base, group in ((types.ModuleType, "modules"), (type, "classes"), (functools.partial, "partials")):
        if issubclass(kind, base):
            return group
    of_python = bool(raw.flags(kind) & raw.HEAP_TYPE) or kind is types.SimpleNamespace
    ours = issubclass(kind, torch.nn.Module) or kind is types.SimpleNamespace or not is_off_limits(raw.module_of(kind))
    return "objects" if of_python and ours else ""


def is_off_limits(module: Any) -> bool:
    """Whether everything defined in `module` stays as it is: tables of torch, hmpx and wrapt."""
    return _is_named_off_limits(module) if type(module) is str else True


@functools.cache
def _is_named_off_limits(module: str) -> bool:
    if module.partition(".")[0] == "torch":
        return not module.startswith(_FORWARD_MODULES)
    return is_book(module)


def is_book(module: Any) -> bool:
    """Whether a module is hmpx's or wrapt's, whose tables hold our functions on purpose."""
    return type(module) is not str or module.partition(".")[0] in _OFF_LIMITS
