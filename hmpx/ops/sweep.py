"""One pass over all live objects, for functions that are held under other names.

The garbage collector's own traversal (`gc.get_referents`) says in C which objects an object holds, so that most objects
are done with after one look; only those that lead to a function are handed to `Rewriting`. torch's own tables (operator
registries, the overrides of `__torch_function__`, Dynamo's rules) hold the originals for a reason and are left alone,
as is everything else inside torch that is neither a layer nor a distribution.
"""

from __future__ import annotations

import functools
import gc
import itertools
import sys
import threading
import types
from collections import defaultdict, deque
from collections.abc import Callable, Container, Iterator, Mapping
from typing import Any

import torch

from hmpx.base import raw
from hmpx.base.raw import none_collected, variables
from hmpx.ops.holders import DEEPEST, HOLDERS, CapturedName, Holders, PlaceWriter, Rewriting

_LONGEST = 10_000  # items: a longer list or dict is data, not a table of functions
_BUNCH = 64  # things at once
_LENGTHS: dict[type | None, Callable[[Any], int]] = {
    kind: kind.__len__ for kind in (dict, list, tuple, set, frozenset, deque)
}
_OPTIMIZED = 1  # the flag of code whose local variables are no dict
_COMPILED = "torch._dynamo.eval_frame"  # what `torch.compile` has made of a function holds it in its closure
_FORWARD_MODULES = ("torch.nn.modules", "torch.distributions", "torch.ao.nn", "torch.testing", _COMPILED)
_OFF_LIMITS = frozenset({"hmpx", "wrapt", "builtins", "gc"})


class Sweep:
    """One pass.

    replacements: by function. put: writes to a place. back: whether a conversion ends, and
    originals take the place of its wrappers. Then torch's own tables, keys of tables and members of sets are changed
    too: whatever of these holds a wrapper was made during the conversion.
    """

    def __init__(self, replacements: Mapping[Any, Any], put: PlaceWriter, back: bool = False) -> None:
        self._functions = list(replacements)
        self._by_id = {id(old): new for old, new in replacements.items()}
        self._keys = self._by_id.keys()
        # Objects that the garbage collector does not track (strings, tuples of them) hold nothing that it tracks.
        self._may_lead = gc.is_tracked if all(map(gc.is_tracked, self._functions)) else lambda thing: True
        self._rewriting = Rewriting(self._by_id, put, self._leads, back)
        self._stays = is_book if back else is_off_limits
        self._lengths: dict[int, Callable[[Any], int]] = {}  # of kinds that may lead to one
        self._apart: set[int] = set()  # kinds of everything else
        self._empty: dict[int, int] = {}  # objects that lead to none, and how deep they were looked into
        self._off: dict[int, bool] = {}  # of modules' namespaces: whether they stay as they are
        self._reached: set[int] = set()  # what was looked through by name

    @property
    def captures(self) -> list[CapturedName]:
        return self._rewriting.captures

    def let_go(self) -> None:
        """Drop every reference to objects that were searched or found."""
        self._functions.clear()
        self._by_id.clear()
        self._rewriting.let_go()

    @none_collected()
    def everything(self) -> None:
        # gc.freeze() takes modules, too, out of the collector's lists.
        things = gc.get_objects() + [module for _, module in raw.items(sys.modules)]
        kept = grouped(things)
        self._bind(kept["methods"])
        to = self._rewriting
        once = {id(module): module for module in kept["modules"]}.values()
        of_modules = {id(raw.module_globals(module)): module for module in once}
        outside = self._outside_of(of_modules, kept["functions"])
        modules = [module for module in once if not self._is_off(raw.module_globals(module))]
        classes = [cls for cls in kept["classes"] if not self._stays(raw.module_of(cls))]
        functions = self._not_off(kept["functions"])
        for look, roots, held_by in (
            # Namespaces, as Python 3.12.1 never returns when it is asked for all that `_asyncio` refers to.
            (to.module, modules, lambda modules: list(map(raw.module_globals, modules))),
            (to.namespace, outside, lambda holders: list(map(raw.globals_of, holders))),
            (to.of_class, classes, _referents),
            (to.of_object, kept["objects"], _referents),
            (to.function, functions, _held_by),
        ):
            for root in self._leading(roots, held_by):
                count = len(self.captures)
                self._carefully(look, root)
                self._reached.update(map(id, (root, *_namespaces(root))))
                attributes = gc.get_referents(root) if len(self.captures) == count else []
                if not issubclass(type(root), HOLDERS):  # Python 3.10 keeps attributes in a dict
                    attributes += gc.get_referents(*[each for each in attributes if type(each) is dict])
                for held in attributes:
                    where = f"a {raw.class_name(type(root))}"
                    to.escaped(held, where, "its attributes cannot be reached without code of its own")
        self._partials_of_nobody(kept["partials"], [each for each in once if self._is_off(raw.module_globals(each))])
        self._running_functions()

    @none_collected()
    def others(self) -> None:
        """After `everything`: report who else holds one."""
        to, holders = self._rewriting, Holders(self._is_off, self._stays, self._variables)
        self.captures.extend(holders.unaccounted(self._functions, self._reached | to.done.keys()))

    def one(self, module: types.ModuleType) -> None:
        """Search one module, and the functions and classes that it defines."""
        self._carefully(self._rewriting.module, module)
        for _, thing in raw.items(raw.module_globals(module)):
            if type(thing) is types.FunctionType and thing.__globals__ is raw.module_globals(module):
                self._carefully(self._rewriting.function, thing)
            elif issubclass(type(thing), type) and raw.module_of(thing) == raw.module_name(module):
                self._carefully(self._rewriting.of_class, thing)

    def _carefully(self, look: Callable[[Any], Any], thing: Any) -> None:
        try:
            look(thing)
        except Exception as error:
            where = f"a {raw.class_name(type(thing))}"
            self.captures.append(CapturedName(where, "a function of torch", f"it could not be looked through: {error}"))

    def _bind(self, methods: list[types.BuiltinFunctionType]) -> None:
        """Add bound methods of tensors (``x.exp``): each is an object of its own, which does not hold `Tensor.exp`."""
        new = {f.__name__: self._by_id[id(f)] for f in self._functions if type(f) is types.MethodDescriptorType}
        for method in methods:
            if issubclass(type(method.__self__), torch.Tensor) and method.__name__ in new:
                self._by_id[id(method)] = types.MethodType(new[method.__name__], method.__self__)

    # Which objects lead to a function

    def _leading(self, roots: list[Any], held_by: Callable[[list[Any]], list[Any]]) -> list[Any]:
        """Return the objects that lead to a function. They are few, so most are ruled out in bunches."""
        found = []
        for start in range(0, len(roots), _BUNCH):
            bunch = roots[start : start + _BUNCH]
            if self._one_leads(held_by(bunch)):
                found += [root for root in bunch if self._any(held_by([root]), DEEPEST)]
        return found

    def _one_leads(self, held: list[Any]) -> bool:
        """Return whether one of these is a wanted function, or may lead to one."""
        seen: set[int] = set()
        empty, lengths = self._empty, self._lengths
        for _ in range(2 * DEEPEST):
            held = list(filter(self._may_lead, held))
            if not self._keys.isdisjoint(map(id, held)):
                return True
            held = [each for each in self._holders(held) if id(each) not in empty and id(each) not in seen]
            held = [each for each in held if 0 < lengths[id(type(each))](each) <= _LONGEST]
            if not held:
                empty.update(dict.fromkeys(seen, 2 * DEEPEST))
                return False
            seen.update(map(id, held))
            held = gc.get_referents(*held)
        return True

    def _holders(self, things: list[Any]) -> Iterator[Any]:
        """Yield the objects whose class may lead to a function; filtered in C, since there are millions."""
        kinds = list(map(id, map(type, things)))  # not __class__: a proxy answers that by importing or warning
        unknown = set(kinds).difference(self._lengths, self._apart)
        if unknown:
            for thing, kind in zip(things, kinds, strict=True):
                if kind in unknown:
                    unknown.discard(kind)
                    self._sort(type(thing))
        return itertools.compress(things, map(self._lengths.__contains__, kinds))

    def _sort(self, kind: type) -> None:
        """Note whether objects of a class may lead to a function, and how to see how many objects they hold."""
        base = raw.container_type(kind)
        if base is None and not issubclass(kind, HOLDERS):
            self._apart.add(id(kind))
        else:
            self._lengths[id(kind)] = _LENGTHS.get(base, _one)

    def _any(self, held: list[Any], depth: int) -> bool:
        """Return whether one of these is a wanted function, or leads to one."""
        if not self._keys.isdisjoint(map(id, held)):
            return True
        apart = self._apart
        return any([self._leads(each, depth) for each in filter(self._may_lead, held) if id(type(each)) not in apart])

    def _leads(self, thing: Any, depth: int) -> bool:
        """Return whether a container, or another builtin holder, leads to a function within that depth."""
        if self._empty.get(id(thing), 0) >= depth:
            return False
        kind = type(thing)
        if id(kind) not in self._lengths:
            self._sort(kind)
            if id(kind) in self._apart:
                return False
        length = self._lengths[id(kind)]
        self._empty[id(thing)] = depth  # until it is known better: it may hold itself
        if length(thing) > _LONGEST or self._off.get(id(thing)):
            return False
        if self._any(gc.get_referents(thing), depth - (length is not _one)):
            del self._empty[id(thing)]
            return True
        return False

    # Functions and frames

    def _outside_of(self, modules: Container[int], functions: list[types.FunctionType]) -> list[Any]:
        """Return each namespace that is no module's: a function whose globals it is, or else the namespace itself.

        A spawned process runs its script in one, cloudpickle makes them, and so does `exec`.
        """
        having: dict[int, Any] = {id(frame.f_globals): frame.f_globals for _, frame in _running()}
        having |= dict(zip(map(id, map(raw.function_globals, functions)), functions, strict=True))
        for key in [key for key in having if key not in modules]:
            if raw.GENERATED not in raw.globals_of(having[key]):
                self._off[key] = self._stays(raw.namespace_name(having[key]))
        return [each for key, each in having.items() if key not in modules and not self._off.get(key, True)]

    def _partials_of_nobody(self, partials: list[functools.partial], off: list[types.ModuleType]) -> None:
        """Change partials that only local variables or C code hold; those in tables of modules that stay are left."""
        found = {id(p): p for p in partials if id(p) not in self._rewriting.done and self._leads(p, DEEPEST)}
        held: list[Any] = [raw.module_globals(module) for module in off] if found else []
        seen: set[int] = set()
        for _ in range(DEEPEST):
            held = [each for each in self._holders(gc.get_referents(*held)) if id(each) not in seen]
            seen.update(map(id, held))
        for key in found.keys() - seen:
            self._carefully(lambda p: self._rewriting.replaced(p, "a functools.partial", 0), found[key])

    def _running_functions(self) -> None:
        for where, value in self._variables():
            self._rewriting.escaped(value, where, "a local variable cannot be changed")

    def _variables(self) -> Iterator[tuple[str, Any]]:
        """Yield local variables of functions that are running now: visible, not changeable."""
        for thread, frame in _running():
            if frame.f_code.co_flags & _OPTIMIZED and not self._is_off(frame.f_globals):
                inside = raw.text(dict.get(frame.f_globals, "__name__"))
                other = "" if thread == threading.get_ident() else " in another thread"
                if type(frame.f_locals) is dict:  # which Python keeps at the frame before 3.13
                    self._reached.add(id(frame.f_locals))
                held = dict(frame.f_locals) if other else variables(frame)
                for name, value in held.items():
                    if name not in frame.f_code.co_freevars:
                        yield f"local variable {name} of {inside}.{frame.f_code.co_name}{other}", value

    def _not_off(self, functions: list[types.FunctionType]) -> list[types.FunctionType]:
        """Return the functions whose module is searched; filtered in C."""
        namespaces = list(map(raw.function_globals, functions))
        keys = list(map(id, namespaces))
        looked = {key for key, each in dict(zip(keys, namespaces, strict=True)).items() if not self._is_off(each)}
        return list(itertools.compress(functions, map(looked.__contains__, keys)))

    def _is_off(self, namespace: dict) -> bool:
        """Return whether these globals belong to a module that stays as it is."""
        try:
            return self._off[id(namespace)]
        except KeyError:
            self._off[id(namespace)] = off = self._stays(dict.get(namespace, "__name__"))
            return off


def _running() -> Iterator[tuple[int, types.FrameType]]:
    """Yield the frames of all threads that run now."""
    frame: types.FrameType | None
    running = sys._current_frames()
    while running:  # emptied: a frame that one of its own variables holds would keep all that was found alive
        thread, frame = running.popitem()
        while frame is not None:
            yield thread, frame
            frame = frame.f_back


def _referents(things: list[Any]) -> list[Any]:
    return gc.get_referents(*things)


def _held_by(functions: list[types.FunctionType]) -> list[Any]:
    return [
        held
        for function in functions
        for held in (function.__defaults__, function.__kwdefaults__, function.__closure__, function.__dict__)
        if held
    ]


def _namespaces(root: Any) -> Iterator[Any]:
    """Yield what holds the attributes of an object, and of a function the rest that is looked through by name."""
    if issubclass(type(root), types.ModuleType):
        yield raw.module_globals(root)
    elif type(root) is types.FunctionType:
        yield from (root.__globals__, root.__dict__, root.__defaults__, root.__kwdefaults__, *(root.__closure__ or ()))
    else:
        yield from [held for held in gc.get_referents(root) if type(held) is dict]


def _one(holder: Any) -> int:
    return 1


# Which objects are searched


def grouped(things: list[Any]) -> dict[str, list[Any]]:
    """Return `things` grouped by how they are searched."""
    of_kind: defaultdict[int, list[Any]] = defaultdict(list)
    for kind, thing in zip(map(id, map(type, things)), things, strict=True):  # not __class__, which a proxy makes up
        of_kind[kind].append(thing)
    groups: defaultdict[str, list[Any]] = defaultdict(list)
    for same in of_kind.values():
        if group := _group(type(same[0])):
            groups[group] += same
    return groups


def _group(kind: type) -> str:
    """Return how objects of a class are searched; empty if they hold no functions under names of their own."""
    for base, group in (
        *((types.FunctionType, "functions"), (types.BuiltinFunctionType, "methods")),
        *((types.ModuleType, "modules"), (type, "classes"), (functools.partial, "partials")),
    ):
        if issubclass(kind, base):
            return group
    if kind is types.SimpleNamespace:
        return "objects"
    ours = issubclass(kind, torch.nn.Module) or not is_off_limits(raw.module_of(kind))
    return "objects" if raw.flags(kind) & raw.HEAP_TYPE and ours else ""


def is_off_limits(module: Any) -> bool:
    """Return whether everything defined in `module` stays as it is: tables of torch, hmpx and wrapt."""
    return _is_named_off_limits(module) if type(module) is str else True


@functools.cache
def _is_named_off_limits(module: str) -> bool:
    if module.partition(".")[0] == "torch":
        return not module.startswith(_FORWARD_MODULES)
    return is_book(module)


def is_book(module: Any) -> bool:
    """Return whether a module is hmpx's or wrapt's, whose tables hold our functions on purpose."""
    return type(module) is not str or module.partition(".")[0] in _OFF_LIMITS
