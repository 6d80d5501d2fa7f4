"""Calls of torch's functions with tensor classes that override them by ``__torch_function__``.

Such a class is handed the function that torch has made, as without hmpx: the class may look for this function in a
table that is older than the conversion. Some classes look it up by its name at each call, ``func is
torch.nn.functional.linear``, or in a table that is younger than the conversion. Name and table hold a wrapper of ours
then, so these classes are handed the wrapper. Among them are torch's nested tensors, and its causal biases, which lose
their mask if they do not recognise the function.

Arguments are cast before the class is asked, so that the function which the class calls gets what the lists say. A
class whose casts are tensors of another class is asked before the cast, as under torch.autocast: after it, nobody would
ask the class.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import pkgutil
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
import torch.overrides

from hmpx.base import region_state
from hmpx.base.compiling import ask_once, never_compile, never_compile_alone
from hmpx.base.torch_private import private
from hmpx.ops.policies import op_facts
from hmpx.ops.wrapping.callers import calling

Tensor = torch.Tensor
Function = TypeVar("Function", bound=Callable[..., Any])
PLAIN = frozenset({Tensor, torch.nn.Parameter})  # classes that override nothing
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
    """Call torch's own function `op`. A tensor subclass that overrides functions gets it as without hmpx.

    torch itself looks the function up by its name to hand it to ``__torch_function__``, and would find the wrapper. A
    stand-in calls the function that it stands for in this way itself.
    """
    if breaks_graph(op, args, kwargs):
        return out_of_graph(call, op, args, kwargs)
    if overrides(args, kwargs) and not hasattr(op, "hands_on"):
        found = subclasses(args, kwargs)
        function = handed(op, *map(type, found))
        return torch.overrides.handle_torch_function(function, found, *args, **kwargs)
    return op(*args, **kwargs)


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
        found = subclasses(args, kwargs)
        function = _looked_up(original, *map(type, found)) or functools.wraps(public(original))(casting(op))
        return torch.overrides.handle_torch_function(function, found, *args, **kwargs)

    return ask


def overrides(args: tuple, kwargs: dict) -> bool:
    """Return whether the class of an argument overrides functions."""
    return torch.overrides.has_torch_function(subclasses(args, kwargs))


def lose_class(before: tuple[tuple, dict], after: tuple[tuple, dict]) -> bool:
    """Return whether a cast lost the class of a tensor that overrides functions.

    A weight of a class that derives from `Parameter`, say: its casts are plain tensors.
    """
    pairs = zip(items_of(*before), items_of(*after), strict=True)
    lost = [then for then, now in pairs if _is_other(then) and type(now) is not type(then)]
    return torch.overrides.has_torch_function(lost)


def items_of(args: tuple, kwargs: Mapping[str, Any]) -> Iterator[Any]:
    """Yield arguments, and the items of lists and tuples among them."""
    for value in (*args, *kwargs.values()):
        yield from value if type(value) in (list, tuple) else (value,)


def subclasses(args: tuple, kwargs: dict) -> list[Tensor]:
    """Return the tensors of other classes than torch's plain ones, in lists and tuples too."""
    return list(filter(_is_other, items_of(args, kwargs)))


def _is_other(value: Any) -> bool:
    """Return whether this is a tensor of another class than torch's plain ones."""
    return isinstance(value, Tensor) and type(value) not in PLAIN


def breaks_graph(op: Callable, args: tuple, kwargs: dict) -> bool:
    """Return whether Dynamo cannot trace this call: a class compares `op` with a wrapper, which is no op to Dynamo."""
    if not torch.compiler.is_dynamo_compiling():
        return False
    classes = [type(item) for item in subclasses(args, kwargs)]
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


def _looked_up(op: Callable, *classes: type) -> Callable | None:
    """Return the function that a class's code looks for: torch's own or our wrapper; None if it looks for neither.

    A table that is older than the conversion holds torch's own, a younger one the wrapper; so does a name.
    """
    op, looks = public(op), False
    name = torch.overrides.resolve_name(op)
    now = pkgutil.resolve_name(name) if name else None
    for cls in classes:
        for _, names, found in _codes_of(cls):
            for each in (each for table in found if isinstance(table, _TABLES) for each in _members(table)):
                if each is op:
                    return op
                looks = looks or each is now
            looks = looks or op.__name__ in names
    return now if looks else None


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

_TABLES = (dict, types.MappingProxyType, set, frozenset, list, tuple)


def _members(table: Any) -> Iterator[Any]:
    """Yield the functions in a table, or in tables by class."""
    yield from table
    if isinstance(table, (dict, types.MappingProxyType)):
        for each in table.values():
            yield from each if isinstance(each, _TABLES) else ()


def _codes_of(cls: type) -> Iterator[tuple[types.FunctionType, set[str], list[Any]]]:
    """Yield ``__torch_function__``, and what it calls in its package, with the names in its code and what they mean."""
    for base in cls.__mro__:
        method = _function(vars(base).get("__torch_function__"))
        if method is None or base is Tensor:
            continue
        names, found = _meant(method, cls)
        yield method, names, found
        for called in filter(None, map(_function, found)):
            if str(called.__module__).partition(".")[0] == str(method.__module__).partition(".")[0]:
                yield called, *_meant(called, cls)


def _meant(function: types.FunctionType, cls: type) -> tuple[set[str], list[Any]]:
    names, package = function.__code__.co_names, function.__globals__.get("__package__")
    imported = [full for name in names for full in (name, f"{package}.{name}") if "." in full and full in sys.modules]
    spaces = [function.__globals__, *(vars(sys.modules[name]) for name in imported), *map(vars, cls.__mro__)]
    found = [space[name] for name in names for space in spaces if name in space]
    with contextlib.suppress(ValueError):  # a cell that is empty yet
        found += [cell.cell_contents for cell in function.__closure__ or ()]
    return set(names), found


def _function(found: Any) -> types.FunctionType | None:
    """Return a function, also one read from a class."""
    if isinstance(found, (classmethod, staticmethod)):
        found = found.__func__
    found = inspect.unwrap(found) if isinstance(found, types.FunctionType) else found
    return found if isinstance(found, types.FunctionType) else None
