"""Names taken before a patch: `from torch.nn.functional import gelu`, `ACT2FN["gelu"]`, `self.act = F.gelu`.

`rebind` looks through everything that is alive (modules, classes, functions, objects with attributes or slots), three
containers deep, and puts the replacement where a function of torch is held. The same call with the mapping turned round
undoes it, for names taken in the meantime too. What cannot be changed (a tuple, a set, a `functools.partial`, a local
variable of a running function) is reported.

torch's own tables (operator registries, the overrides of `__torch_function__`, Dynamo's rules) hold the originals for a
reason and are left alone, as is everything else inside torch that is neither a layer nor a distribution. Of objects
that `gc.freeze()` has hidden, only the modules are looked through.
"""

from __future__ import annotations

import functools
import gc
import itertools
import sys
import threading
import types
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

_FORWARD_MODULES = ("torch.nn.modules", "torch.distributions", "torch.ao.nn", "torch.testing")
_OFF_LIMITS = frozenset({"torch", "hmpx", "wrapt", "builtins", "gc", "_thread"})
_CONTAINERS = frozenset({dict, list, tuple, set, frozenset, deque})
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
    sweep = _Sweep({id(old): new for old, new in replacements.items()})
    if replacements:
        sweep.everything()
    return sweep.captures


class _Sweep:
    """One pass over everything that is alive."""

    def __init__(self, by_id: dict[int, Any]) -> None:
        self.by_id = by_id
        self.captures: list[Capture] = []
        self._seen: set[int] = set()  # containers, by identity
        self._beside: set[type] = set()  # classes whose objects are no containers

    def everything(self) -> None:
        looks: dict[type, Callable[[Any], None] | None] = {}
        frozen = sys.modules.values() if gc.get_freeze_count() else ()  # gc.freeze() takes them out of its lists
        for thing in itertools.chain(gc.get_objects(), frozen):
            kind = type(thing)  # not __class__: a proxy answers that by importing or warning
            try:
                look = looks[kind]
            except KeyError:
                look = looks[kind] = self._look_of(kind)
            if look is not None:
                look(thing)
        self._running_functions()

    def _look_of(self, kind: type) -> Callable[[Any], None] | None:
        """How to look at objects of a class; None where they hold no functions under names of their own."""
        if kind is types.FunctionType:
            return self._function
        if issubclass(kind, types.ModuleType):
            return self._module
        if issubclass(kind, type):
            return self._class
        if kind is functools.partial:
            return self._partial
        if kind is functools._lru_cache_wrapper:
            return lambda cache: self._escaped("a functools.lru_cache", cache.__wrapped__, "a cache cannot be changed")
        ours = issubclass(kind, torch.nn.Module) or not _off_limits(kind.__module__)
        return self._object if ours and kind.__flags__ & _HEAP_TYPE else None

    def _module(self, module: types.ModuleType) -> None:
        name = vars(module).get("__name__", "?")
        if not _off_limits(name):
            self._namespace(vars(module), vars(module).__setitem__, name)

    def _class(self, cls: type) -> None:
        if not _off_limits(cls.__module__):
            self._namespace(vars(cls), functools.partial(setattr, cls), f"{cls.__module__}.{cls.__qualname__}")

    def _partial(self, partial: functools.partial) -> None:
        for value in (partial.func, *partial.args, *partial.keywords.values()):
            self._escaped("a functools.partial", value, "a partial cannot be changed")

    def _object(self, thing: Any) -> None:
        kind = type(thing)
        attributes = _attributes(thing, kind)
        write = functools.partial(object.__setattr__, thing) if _slots(kind) else attributes.__setitem__
        self._namespace(attributes, write, kind.__qualname__)

    def _rebound(self, where: str, value: Any) -> Any:
        self.captures.append(Capture(where, _name(value)))
        return self.by_id[id(value)]

    def _escaped(self, where: str, value: Any, reason: str) -> None:
        if id(value) in self.by_id:
            self.captures.append(Capture(where, _name(value), reason))

    def _namespace(self, namespace: Mapping[str, Any], write: Callable[[str, Any], None], where: str) -> None:
        """The attributes of a module, class or object, and the containers among them."""
        by_id, beside = self.by_id, self._beside
        interesting = [(name, v) for name, v in namespace.items() if id(v) in by_id or type(v) not in beside]
        for name, value in interesting:
            if id(value) in by_id:
                write(name, self._rebound(f"{where}.{name}", value))
            elif _is_container(type(value)):
                self._container(value, f"{where}.{name}")
            elif isinstance(value, staticmethod | classmethod) and id(value.__func__) in by_id:
                write(name, type(value)(self._rebound(f"{where}.{name}", value.__func__)))
            elif not isinstance(value, staticmethod | classmethod):
                beside.add(type(value))

    def _container(self, container: Any, where: str, depth: int = 1) -> None:
        if id(container) in self._seen or len(container) > _LONGEST:
            return
        self._seen.add(id(container))
        values = container.values() if isinstance(container, dict) else container
        holds_one = not self.by_id.keys().isdisjoint(map(id, values))
        if not holds_one and (depth == _DEEPEST or _CONTAINERS.isdisjoint(map(type, values))):
            return
        for key, value in list(container.items() if isinstance(container, dict) else enumerate(container)):
            if id(value) not in self.by_id:
                if depth < _DEEPEST and type(value) in _CONTAINERS:
                    self._container(value, f"{where}[{key!r}]", depth + 1)
            elif isinstance(container, dict | list | deque):
                container[key] = self._rebound(f"{where}[{key!r}]", value)
            else:
                self._escaped(where, value, f"a {type(container).__name__} cannot be changed")

    def _function(self, function: types.FunctionType) -> None:
        """Attributes, default arguments and closures."""
        # A decorated function bears its user's module, but its code is hmpx's.
        if _off_limits(function.__module__) or _off_limits(function.__globals__.get("__name__")):
            return
        by_id = self.by_id
        where = f"{function.__module__}.{function.__qualname__}"
        if function.__dict__:
            self._namespace(function.__dict__, function.__dict__.__setitem__, where)
        defaults = function.__defaults__
        if defaults and not by_id.keys().isdisjoint(map(id, defaults)):
            held = f"a default argument of {where}"
            function.__defaults__ = tuple(self._rebound(held, v) if id(v) in by_id else v for v in defaults)
        for name, value in (function.__kwdefaults__ or {}).items():
            if id(value) in by_id:
                function.__kwdefaults__[name] = self._rebound(f"the default of {name} in {where}", value)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
            try:
                value = cell.cell_contents
            except ValueError:  # not filled yet
                continue
            if id(value) in by_id:
                cell.cell_contents = self._rebound(f"{name} in the closure of {where}", value)
            elif _is_container(type(value)):
                self._container(value, f"{name} in the closure of {where}")

    def _running_functions(self) -> None:
        """Local variables of functions that are running now: visible, not changeable."""
        for thread, frame in sys._current_frames().items():
            while frame is not None:
                inside = frame.f_globals.get("__name__")
                if frame.f_code.co_name != "<module>" and not _off_limits(inside):
                    for name, value in frame.f_locals.items():
                        if name not in frame.f_code.co_freevars:
                            where = f"local variable {name} of {inside}.{frame.f_code.co_name}"
                            other = "" if thread == threading.get_ident() else " in another thread"
                            self._escaped(where + other, value, "a local variable cannot be changed")
                frame = frame.f_back


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
    return _is_off_limits(module) if type(module) is str else True


@functools.cache
def _is_off_limits(module: str) -> bool:
    return module.partition(".")[0] in _OFF_LIMITS and not module.startswith(_FORWARD_MODULES)


@functools.cache
def _is_container(kind: type) -> bool:
    return issubclass(kind, tuple(_CONTAINERS))


def _name(function: Any) -> str:
    return getattr(function, "__qualname__", None) or repr(function)
