"""Calls of torch's functions with tensor classes that override them by ``__torch_function__``.

The class is handed the function that torch has made, as without hmpx: it may look for it in a table that is older than
the conversion. Where it compares the function with what a name leads to now, ``func is torch.nn.functional.linear``, or
with what a younger table has, that is a wrapper of ours, and then it is handed this one. torch's own biases of causal
attention and nested tensors do so; handed anything else, the first lose their mask.

Arguments are cast before the class is asked, so that what it hands on is computed as the lists say. A class whose casts
are tensors of another one is asked before, as under torch.autocast: else nobody would ask it.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import importlib.util
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.overrides

from hmpx.base import region_state
from hmpx.base.compiling import ask_once, never_compile
from hmpx.ops.policies import op_facts
from hmpx.ops.wrapping.callers import calling

Tensor = torch.Tensor
PLAIN = frozenset({Tensor, torch.nn.Parameter})  # classes that override nothing
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
    stand-in, which has the function that it stands for as the attribute `hands_on`, calls it in this way itself.
    """
    if breaks_graph(op, args, kwargs):
        return out_of_graph(call, op, args, kwargs)
    if overrides(args, kwargs) and not hasattr(op, "hands_on"):
        found = subclasses(args, kwargs)
        function = handed(op, *map(type, found))
        return torch.overrides.handle_torch_function(function, found, *args, **kwargs)
    return op(*args, **kwargs)


def asking(op: Any, casting: Callable[[Callable], Callable]) -> Callable:
    """Return `op` asking the classes of the uncast arguments first, since a cast may lose the class.

    A class that neither compares `op` nor has it in a table is handed `casting(op)`, which casts the arguments: the
    class is going to call it.
    """
    if hasattr(op, "standing_for"):  # an observer's: it reports the result of asking
        return op.standing_for(asking(op.hands_on, casting))
    original = op
    while hasattr(original, "hands_on"):
        original = original.hands_on

    def ask(*args: Any, **kwargs: Any) -> Any:
        found = subclasses(args, kwargs)
        function = _looked_up(original, *map(type, found)) or functools.wraps(public(original))(casting(op))
        return torch.overrides.handle_torch_function(function, found, *args, **kwargs)

    vars(ask)["hands_on"] = original
    return ask


def overrides(args: tuple, kwargs: dict) -> bool:
    """Return whether the class of an argument overrides functions."""
    return torch.overrides.has_torch_function(subclasses(args, kwargs))


def lose_class(before: tuple[tuple, dict], after: tuple[tuple, dict]) -> bool:
    """Return whether a cast lost the class of a tensor that overrides functions.

    A weight of a class that derives from `Parameter`, say: its casts are plain tensors.
    """
    pairs = zip(_items(*before), _items(*after), strict=True)
    lost = [then for then, now in pairs if _is_other(then) and type(now) is not type(then)]
    return torch.overrides.has_torch_function(lost)


def _items(args: tuple, kwargs: dict) -> Iterator[Any]:
    """Yield arguments, and the items of lists and tuples among them."""
    for value in (*args, *kwargs.values()):
        yield from value if type(value) in (list, tuple) else (value,)


def subclasses(args: tuple, kwargs: dict) -> list[Tensor]:
    """Return the tensors of other classes than torch's plain ones, in lists and tuples too."""
    return list(filter(_is_other, _items(args, kwargs)))


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
    with torch._C._DisableTorchDispatch():  # a tensor without data can be of no other class
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

    A table that is older than the conversion holds torch's own, a younger one the wrapper.
    """
    op, wrapper = public(op), None
    for cls in classes:
        for each in _functions_of(cls):
            if each is op:
                return op
            if isinstance(each, types.FunctionType) and getattr(each, "__hmpx_original__", None) is op:
                wrapper = each
    return wrapper


def called_by_torch(args: tuple, kwargs: dict, above: int) -> bool:
    """Return whether a tensor that is no plain one comes from torch's own decompositions, while it compiles.

    Args:
        above: how many frames above the one that asks the caller is.
    """
    if not any(isinstance(a, torch.Tensor) and type(a) not in PLAIN for a in (*args, *kwargs.values())):
        return False
    if torch.compiler.is_dynamo_compiling():  # it traces code of the user's, and cannot trace a look at frames
        return False
    if region_state.casts_off():
        return True
    return (calling(sys._getframe(above + 1)).f_globals.get("__name__", "") + ".").startswith(COMPILER)


def keep_attributes(cast: Tensor, value: Tensor) -> None:
    """Copy the attributes of a tensor to its cast: a causal attention bias consists of attributes alone."""
    if type(cast) is type(value) and not torch.compiler.is_dynamo_compiling():
        with contextlib.suppress(TypeError):  # no tensor of this class has anything
            vars(cast).update({key: kept for key, kept in vars(value).items() if key not in vars(cast)})


# Which functions a class compares the one that it gets with: its bytecode tells, and nothing of it runs

_TABLES = (dict, types.MappingProxyType, set, frozenset, list, tuple)


def _functions_of(cls: type) -> Iterator[Any]:
    """Yield functions that ``__torch_function__``, and the code it calls in its package, compares or keeps in tables.

    There may be anything else among it.
    """
    for look_up, found in _look_ups_of(cls):
        if isinstance(found, _TABLES):
            yield from _members(found)
        elif look_up.is_compared:
            yield found


def _members(table: Any) -> Iterator[Any]:
    """Yield the functions in a table, or in tables by class."""
    yield from table
    if isinstance(table, (dict, types.MappingProxyType)):
        for each in table.values():
            yield from each if isinstance(each, _TABLES) else ()


def _look_ups_of(cls: type) -> Iterator[tuple[_LookUp, Any]]:
    for base in cls.__mro__:
        method = _function(vars(base).get("__torch_function__"))
        if method is None or base is torch.Tensor:
            continue
        package = str(method.__module__).partition(".")[0]
        for look_up in _look_ups_in(method.__code__):
            found = look_up.found(method, cls)
            yield look_up, found
            called = None if look_up.is_compared else _function(found)
            if called is not None and str(called.__module__).partition(".")[0] == package:
                yield from ((each, each.found(called, cls)) for each in _look_ups_in(called.__code__))


def _function(found: Any) -> types.FunctionType | None:
    """Return a function, also one read from a class."""
    if isinstance(found, (classmethod, staticmethod)):
        found = found.__func__
    found = inspect.unwrap(found) if isinstance(found, types.FunctionType) else found
    return found if isinstance(found, types.FunctionType) else None


class _LookUp(NamedTuple):
    """One look-up in the code of a function: a variable, and attributes from there on.

    where: "global", "closure", "first" for the first parameter of a class method, or "import" for a module.
    level: of a relative import.
    """

    where: str
    variable: str
    attributes: tuple[str, ...] = ()
    level: int = 0
    is_compared: bool = False

    def found(self, function: Any, cls: type) -> Any:
        """Return the object that the look-up finds now; None if there is none."""
        try:
            return functools.reduce(inspect.getattr_static, self.attributes, self._start(function, cls))
        except (ImportError, LookupError, ValueError, AttributeError, TypeError):
            return None

    def _start(self, function: Any, cls: type) -> Any:
        if self.where == "global":
            return function.__globals__[self.variable]
        if self.where == "closure":
            return function.__closure__[function.__code__.co_freevars.index(self.variable)].cell_contents
        if self.where == "first":
            return cls
        name = "." * self.level + self.variable
        return sys.modules[importlib.util.resolve_name(name, function.__globals__.get("__package__"))]


@functools.cache
def _look_ups_in(code: types.CodeType) -> list[_LookUp]:
    """Return the look-ups in code, and which of them are compared by ``is``, ``==`` or ``in``."""
    found: list[_LookUp] = []
    stack: list[_LookUp | None] = []  # the look-ups of an expression so far; None: a local variable
    imported, level = "", 0
    for each in dis.get_instructions(code):
        name, value = each.opname, each.argval
        if name in ("LOAD_ATTR", "LOAD_METHOD"):
            last = stack.pop() if stack else None
            is_of_table = value in ("get", "keys", "items", "__contains__", "__getitem__")
            stack.append(last if last is None or is_of_table else last._replace(attributes=(*last.attributes, value)))
        elif name == "LOAD_GLOBAL":
            stack.append(_LookUp("global", value))
        elif name == "LOAD_DEREF" and value in code.co_freevars:
            stack.append(_LookUp("closure", value))
        elif name == "LOAD_DEREF" or name.startswith("LOAD_FAST"):  # the first, where an inner function has it too
            loaded = value if isinstance(value, tuple) else (value,)
            stack += [_LookUp("first", v) if v == code.co_varnames[0] else None for v in loaded]
        elif name == "IMPORT_NAME":
            imported = value
        elif name == "IMPORT_FROM":
            found.append(_LookUp("import", imported, (value,), level))
        elif name in ("LOAD_CONST", "LOAD_SMALL_INT"):
            level = value if type(value) is int else level  # of an import, whose names are another constant
        elif not name.startswith(("BUILD_", "CACHE", "PUSH_NULL")):
            is_compared = name in ("IS_OP", "COMPARE_OP", "CONTAINS_OP")
            found += [each._replace(is_compared=is_compared) for each in stack if each is not None]
            stack.clear()
    return found
