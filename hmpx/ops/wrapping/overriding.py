"""Calls of torch's functions with objects that override them by ``__torch_function__``, tensors or not, and in modes.

Such a class is handed the function that torch has made, as without hmpx: the class may look for this function in a
table that is older than the conversion. Some classes look it up by its name at each call, ``func is
torch.nn.functional.linear``, or in a table that is younger than the conversion. Name and table hold a wrapper of ours
then, so these classes are handed the wrapper. Among them are torch's nested tensors, and its causal biases, which lose
their mask if they do not recognise the function. A `TorchFunctionMode` is called by torch itself, which looks the
function up by its name; so the method of its class is wrapped, and hands on what the mode looks for.

Arguments are cast before the class is asked, so that the function which the class calls gets what the lists say. A
class whose casts are tensors of another class is asked before the cast, as under torch.autocast: after it, nobody would
ask the class.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import pkgutil
import sys
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
import torch.overrides
from torch.overrides import TorchFunctionMode

from hmpx.base import raw, region_state
from hmpx.base.changes import Attribute, Changes
from hmpx.base.compiling import ask_once, never_compile, never_compile_alone
from hmpx.base.tensors import ATOMS, leaves
from hmpx.base.torch_private import private
from hmpx.ops.policies import op_facts
from hmpx.ops.wrapping.callers import calling

Tensor = torch.Tensor
Function = TypeVar("Function", bound=Callable[..., Any])
PLAIN = frozenset({Tensor, torch.nn.Parameter})  # classes that override nothing
# Operators of two operands: torch answers a TypeError in one with NotImplemented.
_BINARY = frozenset(name for names in op_facts.OPERATORS.values() for name in names) - op_facts.OPERANDS.keys()
_has_torch_function = torch.overrides.has_torch_function
_computing: set[types.CodeType] = set()  # of stand-ins; all that one definition makes share one
# Where torch's compiler spells ops out in other ops, which are no calls of the user's.
COMPILER = tuple(
    f"torch.{name}."
    for name in (
        *("_decomp", "_functorch", "_higher_order_ops", "_inductor", "_library", "_meta_registrations", "_prims"),
        *("_prims_common", "_refs", "_subclasses", "fx.experimental"),
    )
)


def call(op: Callable, args: tuple, kwargs: dict) -> Any:
    """Call torch's own function `op`. Whoever overrides functions gets it as without hmpx.

    torch itself looks the function up by its name to hand it to ``__torch_function__``, and would find the wrapper. A
    stand-in calls the function that it stands for in this way itself.
    """
    if breaks_graph(op, args, kwargs):
        return out_of_graph(call, op, args, kwargs)
    if overrides(args, kwargs) and not hasattr(op, "hands_on"):
        found = overriding(args, kwargs)
        return _hand_over(handed(op, *map(type, found)), op, found, args, kwargs)
    return op(*args, **kwargs)


def _hand_over(function: Callable, op: Callable, found: list[Any], args: tuple, kwargs: dict) -> Any:
    try:
        return torch.overrides.handle_torch_function(function, found, *args, **kwargs)
    except (TypeError, AttributeError) as error:
        # torch's message for "nobody has an implementation" asks a C function for its module, which it has not.
        unsaid = isinstance(error, AttributeError) and error.obj is function and error.name == "__module__"
        if not unsaid and isinstance(error, AttributeError):
            raise
        if op.__name__ in _BINARY:  # as torch answers for an operator, so that Python asks the other operand
            return NotImplemented
        if not unsaid:
            raise
        kinds = ", ".join(sorted({type(each).__name__ for each in found}))
        raise TypeError(f"no implementation of {torch.overrides.resolve_name(function)} on {kinds}") from None


def stand_in(original: Callable, computes: bool = True) -> Callable[[Function], Function]:
    """Decorate a function that calls torch's `original` itself: it stands for that wherever classes are asked.

    computes: whether it computes the op, from inputs that a rule has cast, by other kernels or in another precision.
    """

    def standing(function: Any) -> Any:
        vars(function)["hands_on"] = original
        if computes and function.__code__ not in _computing:
            _computing.add(function.__code__)
            never_compile_alone(function)
        return function

    return standing


def is_computing(frame: types.FrameType) -> bool:
    """Return whether a stand-in computes an op in `frame`."""
    return frame.f_code in _computing


@dataclass(frozen=True)
class Kernel:
    """What computes an op in the place of torch's own function, by stand-ins; it prints in words.

    backward: how the backward pass computes, in words. wrap: takes an op's name and torch's own function for it, and
    returns the function that computes the op, with this kernel where it fits.
    """

    words: str
    backward: str
    wrap: Callable[[str, Callable], Callable] = field(compare=False)

    def __str__(self) -> str:
        return self.words


def asking(op: Any, casting: Callable[[Callable], Callable]) -> Callable:
    """Return `op` asking the classes of the uncast arguments first, since a cast may lose the class.

    A class that neither compares `op` nor has it in a table is handed `casting(op)`, which casts the arguments: the
    class is going to call it.
    """
    if hasattr(op, "reporting"):  # an observer's, who is told the result of asking
        return op.reporting(asking(op.hands_on, casting))
    original = op
    while hasattr(original, "hands_on"):
        original = original.hands_on

    @stand_in(original, computes=False)
    def ask(*args: Any, **kwargs: Any) -> Any:
        found = overriding(args, kwargs)
        function = _looked_up(original, *map(type, found)) or functools.wraps(public(original))(casting(op))
        return _hand_over(function, original, found, args, kwargs)

    return ask


def overrides(args: tuple, kwargs: dict) -> bool:
    """Return whether the class of an argument overrides functions. torch is asked, in C, of all and of each list."""
    values = (*args, *kwargs.values())
    for value in values:
        if isinstance(value, (list, tuple)) and _has_torch_function(value):
            break
    else:
        if not _has_torch_function(values):
            return False
    return _has_torch_function(overriding(args, kwargs))  # while a mode is on, it says so of anything but of nothing


def lose_class(before: tuple[tuple, dict], after: tuple[tuple, dict]) -> bool:
    """Return whether a cast lost the class of a tensor that overrides functions.

    A weight of a class that derives from `Parameter`, say: its casts are plain tensors.
    """
    (args, kwargs), (cast, cast_kwargs) = before, after
    pairs = zip(leaves((*args, *kwargs.values())), leaves((*cast, *cast_kwargs.values())), strict=True)
    lost = [then for then, now in pairs if may_override(then) and type(now) is not type(then)]
    return torch.overrides.has_torch_function(lost)


def overriding(args: tuple, kwargs: dict) -> list[Any]:
    """Return the arguments whose class may override functions, as torch asks for them; those in containers too."""
    return [value for value in leaves((*args, *kwargs.values())) if may_override(value)]


def may_override(value: Any) -> bool:
    """Return whether the class of a value, be it a tensor or not, may override functions."""
    kind = type(value)
    return kind not in PLAIN and kind not in ATOMS and hasattr(kind, "__torch_function__")


def breaks_graph(op: Callable, args: tuple, kwargs: dict) -> bool:
    """Return whether Dynamo cannot trace this call: a class compares `op` with a wrapper, which is no op to Dynamo."""
    if not torch.compiler.is_dynamo_compiling():
        return False
    classes = [type(item) for item in overriding(args, kwargs)]
    return bool(classes) and _is_compared(op, *classes)


def _is_compared(op: Callable, *classes: type) -> bool:
    return handed(op, *classes) is not public(op)


def out_of_graph(function: Callable, *args: Any) -> Any:
    """Make the call outside of a compiled graph."""
    return function(*args)


ask_once(_is_compared)
never_compile(out_of_graph)


class _Probe(Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return func


@functools.cache
def public(op: Callable) -> Callable:
    """Return the function that torch passes to ``__torch_function__`` for `op`: ``Tensor.matmul`` for ``x @ y``."""
    if not (op.__name__.startswith("__") and isinstance(op, types.MethodDescriptorType)):
        return op
    with private("torch._C._DisableTorchDispatch")():  # a tensor without data can be of no other class
        probe = torch.empty(0).as_subclass(_Probe)
    try:
        found = op(probe) if op.__name__ in op_facts.OPERANDS else op(probe, probe)
    except TypeError:
        return op
    return getattr(found, "__hmpx_original__", found)


def handed(op: Callable, *classes: type) -> Callable:
    """Return the function to pass to these classes for `op`: torch's own, or our wrapper if one compares with that."""
    return _looked_up(op, *classes) or public(op)


class Modes:
    """Wraps ``__torch_function__`` of the program's `TorchFunctionMode`s, so that each gets what it looks for."""

    def __init__(self, changes: Changes) -> None:
        self._changes = changes
        _kept.clear()
        changes.callback(_kept.clear)
        for cls in raw.with_subclasses(TorchFunctionMode):
            self._wrap(cls)

        def each_new(cls: type[TorchFunctionMode], **kwargs: Any) -> None:
            super(TorchFunctionMode, cls).__init_subclass__(**kwargs)
            self._wrap(cls)

        name = f"{TorchFunctionMode.__name__}.__init_subclass__"
        changes.put(Attribute(TorchFunctionMode, "__init_subclass__", name), classmethod(each_new))

    def _wrap(self, cls: type) -> None:
        own = vars(cls).get("__torch_function__")
        if not isinstance(own, types.FunctionType) or f"{cls.__module__}.".startswith("torch."):
            return

        @functools.wraps(own)
        def translated(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if not torch.compiler.is_dynamo_compiling():
                original = getattr(func, "__hmpx_original__", func)
                if _now(original) is not original:
                    func = _looked_up(original, self) or original
            return own(self, func, types, args, kwargs)

        label = f"{cls.__module__}.{cls.__qualname__}.__torch_function__"
        self._changes.put(Attribute(cls, "__torch_function__", label), translated)


def _looked_up(op: Callable, *classes: Any) -> Callable | None:
    """Return the function that a class's code looks for: torch's own or our wrapper; None if it looks for neither.

    A table that is older than the conversion holds torch's own, a younger one the wrapper; so does a name.
    A mode stands for its class, and may hold the table itself.
    """
    op, looks = public(op), False
    now, far = _now(op), _DEEPEST + 1
    for cls in classes:
        sought = _sought_by(cls)
        own, ours = (sought.reached.get(id(each), far) for each in (op, now))
        if own <= ours and own < far:  # the nearer table, as a class may also name what leads to others' tables
            return op
        looks = looks or ours < far or op.__name__ in sought.names
    return now if looks else None


def _now(op: Callable) -> Any:
    """Return what stands under the name of torch's function `op` now: itself, or a wrapper; None if it has no name."""
    owner, attribute = _place(op)
    return getattr(owner, attribute, None)


@functools.cache
def _place(op: Callable) -> tuple[Any, str]:
    owner, _, attribute = (torch.overrides.resolve_name(op) or "").rpartition(".")
    return (pkgutil.resolve_name(owner) if owner else None), attribute


def called_by_torch(args: tuple, kwargs: dict, above: int) -> bool:
    """Return whether a tensor that is no plain one comes from torch's own decompositions, while it compiles.

    Args:
        above: how many frames above the one that asks the caller is.
    """
    if not any(isinstance(a, torch.Tensor) and type(a) not in PLAIN for a in (*args, *kwargs.values())):
        return False
    if torch.compiler.is_dynamo_compiling():  # it traces code of the user's, and cannot trace a look at frames
        return False
    if region_state.acts() is False:
        return True
    return (calling(sys._getframe(above + 1)).f_globals.get("__name__", "") + ".").startswith(COMPILER)


def keep_attributes(cast: Tensor, value: Tensor) -> None:
    """Copy the attributes of a tensor to its cast: a causal attention bias consists of attributes alone."""
    if type(cast) is type(value) and not torch.compiler.is_dynamo_compiling():
        with contextlib.suppress(TypeError):  # no tensor of this class has anything
            vars(cast).update({key: kept for key, kept in vars(value).items() if key not in vars(cast)})


# Which functions a class compares the one that it gets with: the names in its code tell, and nothing of it runs

_DEEPEST, _LONGEST = 4, 10_000  # of what the names mean: containers and objects within one another, and their items
_APART = (types.ModuleType, type, Tensor, torch.nn.Module, *raw.FUNCTIONS)
_kept: dict[int, _Sought] = {}  # by the identity of a class, or of a mode; forgotten with each conversion


class _Sought(NamedTuple):
    """What the code of a class names, and the identities of what this leads to, with how deep it lies.

    places: the names that were read, with their namespace and value; tables: the dicts and sets, with their lengths.
    """

    owner: weakref.ref
    names: set[str]
    reached: dict[int, int]
    places: list[tuple[Any, str, Any]]
    tables: list[tuple[Any, int]]

    def holds(self, cls: Any) -> bool:
        """Return whether all that was read is as it was."""
        if self.owner() is not cls:
            return False
        same = all([space.get(name) is value for space, name, value in self.places])
        return same and all([len(table) == length for table, length in self.tables])


def _sought_by(cls: Any) -> _Sought:
    """Read the code of a class or of a mode: ``__torch_function__``, and what it calls in its package."""
    key = id(cls)
    kept = _kept.get(key)
    if kept is not None and kept.holds(cls):
        return kept
    kind = cls if isinstance(cls, type) else type(cls)
    spaces = [*([] if cls is kind else [raw.attribute_dict(cls) or {}]), *map(vars, kind.__mro__)]
    places = [(vars(base), "__torch_function__", vars(base).get("__torch_function__")) for base in kind.__mro__]
    names, found, codes = set(), [], []
    for base, (_, _, held) in zip(kind.__mro__, places, strict=True):
        method = None if base is Tensor else _function(held)
        codes += [] if method is None else [method]
        if method is not None and "__torch_function__" not in method.__code__.co_names:
            break  # it calls no method of its base classes
    own = len(codes)
    for number, code in enumerate(codes):  # grows by what the methods call
        read, cells = _meant(code, spaces)
        names |= set(code.__code__.co_names)
        places += read
        values = [*(value for _, _, value in read), *cells]
        found += values
        if number < own:
            package = str(code.__module__).partition(".")[0]
            called = [each for each in map(_function, values) if each is not None]
            codes += [each for each in called if str(each.__module__).partition(".")[0] == package]
    reached, tables = _reached(found)

    def forget(_: weakref.ref, kept: dict = _kept) -> None:  # the module's own names may be gone at exit
        kept.pop(key, None)

    _kept[key] = sought = _Sought(weakref.ref(cls, forget), names, reached, places, tables)
    return sought


def _reached(found: list[Any]) -> tuple[dict[int, int], list[tuple[Any, int]]]:
    """Return the identities of values and of what objects among them hold, with how deep they lie; and the tables."""
    seen, tables = dict.fromkeys(map(id, found), 0), []
    for depth in range(1, _DEEPEST + 1):
        found = [each for each in filter(gc.is_tracked, found) if not isinstance(each, _APART)]
        tables += [(each, len(each)) for each in found if type(each) in (dict, set)]
        held = gc.get_referents(*[each for each in found if _length(each) <= _LONGEST])
        found = [each for each in held if id(each) not in seen]
        seen.update(dict.fromkeys(map(id, found), depth))
    return seen, tables


def _length(thing: Any) -> int:
    base: Any = raw.container_type(type(thing))
    return base.__len__(thing) if base is not None else 1


def _meant(function: types.FunctionType, spaces: list[Any]) -> tuple[list[tuple[Any, str, Any]], list[Any]]:
    """Return the names in the code of a function, each with its namespace and value, and the variables around it."""
    names, package = function.__code__.co_names, function.__globals__.get("__package__")
    imported = [full for name in names for full in (name, f"{package}.{name}") if "." in full and full in sys.modules]
    spaces = [function.__globals__, *(vars(sys.modules[name]) for name in imported), *spaces]
    cells: list[Any] = []
    with contextlib.suppress(ValueError):  # a cell that is empty yet
        cells += [cell.cell_contents for cell in function.__closure__ or ()]
    return [(space, name, space[name]) for name in names for space in spaces if name in space], cells


def _function(found: Any) -> types.FunctionType | None:
    """Return a function, also one read from a class."""
    if isinstance(found, (classmethod, staticmethod)):
        found = found.__func__
    found = inspect.unwrap(found) if isinstance(found, types.FunctionType) else found
    return found if isinstance(found, types.FunctionType) else None
