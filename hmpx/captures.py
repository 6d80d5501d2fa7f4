"""Names taken before a patch: `from torch.nn.functional import gelu`, `ACT2FN["gelu"]`, `self.act = F.gelu`.

`rebind` looks through everything that is alive (modules, classes, functions, objects with attributes or slots), three
containers deep, and puts the replacement where a function of torch is held. The same call with the mapping turned round undoes
it, for names taken in the meantime too. What cannot be changed (a tuple, a set, a `functools.partial`, a local variable
of a running function) is reported.

torch's own tables (operator registries, the overrides of `__torch_function__`, Dynamo's rules) hold the originals for a
reason and are left alone, as is everything else inside torch that is neither a layer nor a distribution.
"""

from __future__ import annotations

import functools
import gc
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

_FORWARD_MODULES = ("torch.nn.modules", "torch.distributions", "torch.ao.nn", "torch.testing")
_OFF_LIMITS = frozenset({"torch", "hmpx", "wrapt", "builtins", "gc", "_thread"})
_CONTAINERS = frozenset({dict, list, tuple, set, frozenset})
_HEAP_TYPE = 1 << 9  # of a type made by a class statement
_DEEPEST = 3  # containers within containers
_LONGEST = 10_000  # items: a longer list or dict is data, not a table of functions


@dataclass(frozen=True)
class Capture:
    """A place that holds a function of torch under a name of its own. `reason`: why it still does."""

    where: str
    function: str
    reason: str = ""

    @property
    def rebound(self) -> bool:
        return not self.reason

    def __str__(self) -> str:
        return f"{self.where} holds {self.function}" + (f": {self.reason}" if self.reason else "")


def rebind(replacements: Mapping[Any, Any]) -> list[Capture]:
    """Put ``replacements[f]`` wherever `f` is held outside torch's own tables; return one `Capture` a place."""
    by_id = {id(old): new for old, new in replacements.items()}
    return list(_rebind_all(by_id)) if by_id else []


def _rebind_all(by_id: dict[int, Any]) -> Iterator[Capture]:
    open_types: dict[type, bool] = {}
    for thing in gc.get_objects():
        kind = type(thing)  # not __class__: a proxy answers that by importing or warning
        if kind is types.FunctionType:
            if not _off_limits(thing.__module__):
                yield from _rebind_in_function(thing, by_id)
        elif issubclass(kind, types.ModuleType):
            name = vars(thing).get("__name__", "?")
            if not _off_limits(name):
                yield from _rebind_in_namespace(vars(thing), vars(thing).__setitem__, name, by_id)
        elif issubclass(kind, type):
            if not _off_limits(thing.__module__):
                where = f"{thing.__module__}.{thing.__qualname__}"
                yield from _rebind_in_namespace(vars(thing), functools.partial(setattr, thing), where, by_id)
        elif kind is functools.partial:
            if id(thing.func) in by_id:
                yield Capture("a functools.partial", _name(thing.func), "a partial cannot be changed")
        else:
            is_open = open_types.get(kind)
            if is_open is None:
                is_open = issubclass(kind, torch.nn.Module) or not _off_limits(kind.__module__)
                open_types[kind] = is_open = is_open and bool(kind.__flags__ & _HEAP_TYPE)
            if is_open:
                attributes = _attributes(thing, kind)
                write = functools.partial(object.__setattr__, thing) if _slots(kind) else attributes.__setitem__
                yield from _rebind_in_namespace(attributes, write, kind.__qualname__, by_id)
    yield from _find_in_running_functions(by_id)


def _attributes(thing: Any, kind: type) -> dict[str, Any]:
    """What an object holds by name, in its `__dict__` and in its slots."""
    own = getattr(thing, "__dict__", None) if kind.__dictoffset__ else None
    attributes = own if type(own) is dict else {}
    slots = {slot.__name__: slot.__get__(thing) for slot in _slots(kind) if _is_filled(slot, thing)}
    return {**attributes, **slots} if slots else attributes


@functools.cache
def _slots(kind: type) -> tuple[Any, ...]:
    """The slots that classes of Python code declare; those of C types are not ours to write."""
    return tuple(
        slot
        for cls in kind.__mro__
        if cls.__flags__ & _HEAP_TYPE and "__slots__" in vars(cls)
        for slot in vars(cls).values()
        if type(slot) is types.MemberDescriptorType
    )


def _is_filled(slot: Any, thing: Any) -> bool:
    try:
        slot.__get__(thing)
    except AttributeError:
        return False
    return True


def _off_limits(module: Any) -> bool:
    """Whether what is defined in `module` stays as it is: torch's tables, hmpx's and wrapt's books."""
    if not isinstance(module, str):
        return True
    return module.partition(".")[0] in _OFF_LIMITS and not module.startswith(_FORWARD_MODULES)


def _rebind_in_namespace(
    namespace: Mapping[str, Any], write: Callable[[str, Any], None], where: str, by_id: dict[int, Any]
) -> Iterator[Capture]:
    """The attributes of a module, class or object, and the containers among them."""
    for name, value in list(namespace.items()):
        if id(value) in by_id:
            write(name, by_id[id(value)])
            yield Capture(f"{where}.{name}", _name(value))
        elif type(value) in _CONTAINERS:
            yield from _rebind_in_container(value, f"{where}.{name}", by_id)
        elif isinstance(value, staticmethod | classmethod) and id(value.__func__) in by_id:
            write(name, type(value)(by_id[id(value.__func__)]))
            yield Capture(f"{where}.{name}", _name(value.__func__))


def _rebind_in_container(container: Any, where: str, by_id: dict[int, Any], depth: int = 1) -> Iterator[Capture]:
    if len(container) > _LONGEST:
        return
    items = container.items() if isinstance(container, dict) else enumerate(container)
    for key, value in list(items):
        if id(value) not in by_id:
            if type(value) in _CONTAINERS and depth < _DEEPEST:
                yield from _rebind_in_container(value, f"{where}[{key!r}]", by_id, depth + 1)
        elif isinstance(container, dict | list):
            container[key] = by_id[id(value)]
            yield Capture(f"{where}[{key!r}]", _name(value))
        else:
            yield Capture(where, _name(value), f"a {type(container).__name__} cannot be changed")


def _rebind_in_function(function: types.FunctionType, by_id: dict[int, Any]) -> Iterator[Capture]:
    """Default arguments and closures."""
    where = f"{function.__module__}.{function.__qualname__}"
    defaults = function.__defaults__
    if defaults and any(id(value) in by_id for value in defaults):
        function.__defaults__ = tuple(by_id.get(id(value), value) for value in defaults)
        for value in defaults:
            if id(value) in by_id:
                yield Capture(f"a default argument of {where}", _name(value))
    for name, value in (function.__kwdefaults__ or {}).items():
        if id(value) in by_id:
            function.__kwdefaults__[name] = by_id[id(value)]
            yield Capture(f"the default of {name} in {where}", _name(value))
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        try:
            value = cell.cell_contents
        except ValueError:  # not filled yet
            continue
        if id(value) in by_id:
            cell.cell_contents = by_id[id(value)]
            yield Capture(f"{name} in the closure of {where}", _name(value))
        elif type(value) in _CONTAINERS:
            yield from _rebind_in_container(value, f"{name} in the closure of {where}", by_id)


def _find_in_running_functions(by_id: dict[int, Any]) -> Iterator[Capture]:
    """Local variables of functions that are running now: visible, not changeable."""
    for thread, frame in sys._current_frames().items():
        while frame is not None:
            inside = frame.f_globals.get("__name__")
            if frame.f_code.co_name != "<module>" and not _off_limits(inside):
                for name, value in frame.f_locals.items():
                    if id(value) in by_id and name not in frame.f_code.co_freevars:
                        where = f"local variable {name} of {inside}.{frame.f_code.co_name}"
                        other = "" if thread == threading.get_ident() else " in another thread"
                        yield Capture(where + other, _name(value), "a local variable cannot be changed")
            frame = frame.f_back


def _name(function: Any) -> str:
    return getattr(function, "__qualname__", None) or repr(function)
