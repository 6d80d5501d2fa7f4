"""Calls of torch's functions with tensors of a class that overrides them, by ``__torch_function__``.

The class is handed the function that torch has made, as without hmpx: it may look for it in a table that is older than
the conversion. Where it compares the function with what a name leads to now, ``func is torch.nn.functional.linear``, or
with what a younger table has, that is a wrapper of ours, and then it is handed this one. torch's own biases of causal
attention and nested tensors do so; handed anything else, the first lose their mask.
"""

from __future__ import annotations

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

from hmpx import region_state
from hmpx.casts import op_facts
from hmpx.casts.callers import calling
from hmpx.casts.dynamo import ask_once, never_compile

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
    """Call torch's own function `op`. A tensor subclass that overrides functions is handed it as without hmpx.

    torch itself looks the function up by its name to hand it to ``__torch_function__``, and would find the wrapper. A
    stand-in for a function, which has the attribute `hands_on`, calls it in this way itself.
    """
    if is_not_compiled(op, args, kwargs):
        return _not_compiled(op, args, kwargs)
    subclasses = _subclasses(args, kwargs)
    if subclasses and torch.overrides.has_torch_function(subclasses) and not hasattr(op, "hands_on"):
        function = handed(op, *map(type, subclasses))
        return torch.overrides.handle_torch_function(function, subclasses, *args, **kwargs)
    return op(*args, **kwargs)


def _subclasses(args: tuple, kwargs: dict) -> list[Tensor]:
    found = []
    for value in (*args, *kwargs.values()):
        for item in value if type(value) in (list, tuple) else (value,):
            if isinstance(item, Tensor) and type(item) not in PLAIN:
                found.append(item)
    return found


def is_not_compiled(op: Callable, args: tuple, kwargs: dict) -> bool:
    """Whether Dynamo traces this call, and shall break the graph: a class compares `op` with a wrapper."""
    if not torch.compiler.is_dynamo_compiling():
        return False
    classes = [type(item) for item in _subclasses(args, kwargs)]
    return bool(classes) and _is_compared(op, *classes)


def _is_compared(op: Callable, *classes: type) -> bool:
    return handed(op, *classes) is not public(op)


def _not_compiled(op: Callable, args: tuple, kwargs: dict) -> Any:
    return call(op, args, kwargs)


never_compile(_not_compiled)
ask_once(_is_compared)


class _Probe(Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return func


@functools.cache
def public(op: Callable) -> Callable:
    """What torch hands to ``__torch_function__`` for `op`: for the operator ``x @ y`` it is ``Tensor.matmul``."""
    if not (op.__name__.startswith("__") and isinstance(op, types.MethodDescriptorType)):
        return op
    probe = torch.empty(0).as_subclass(_Probe)
    try:
        found = op(probe) if op.__name__ in op_facts.OPERANDS else op(probe, probe)
    except TypeError:
        return op
    return getattr(found, "__hmpx_original__", found)


def handed(op: Callable, *classes: type) -> Callable:
    """What torch hands to these classes for `op`, or the wrapper of that which one of them compares it with.

    A table that is older than the conversion has the first, one that is younger the second.
    """
    op, wrapper = public(op), None
    for cls in classes:
        for is_compared, found in _looked_up(cls):
            for each in _functions(found) if isinstance(found, _TABLES) else (found,) if is_compared else ():
                if each is op:
                    return op
                if isinstance(each, types.FunctionType) and getattr(each, "__hmpx_original__", None) is op:
                    wrapper = each
    return wrapper or op


def called_by_torch(args: tuple, kwargs: dict, above: int) -> bool:
    """Whether a tensor that is no plain one comes from torch's own decompositions, while it compiles.

    Args:
        above: how many frames above the one that asks the caller is. It is looked at last: Dynamo, which has plain
            tensors, cannot trace a look at frames.
    """
    if not any(isinstance(a, torch.Tensor) and type(a) not in PLAIN for a in (*args, *kwargs.values())):
        return False
    if torch.compiler.is_dynamo_compiling():  # code of the user's
        return False
    if region_state.casts_off_in_graph():
        return True
    return (calling(sys._getframe(above + 1)).f_globals.get("__name__", "") + ".").startswith(COMPILER)


_TABLES = (dict, types.MappingProxyType, set, frozenset, list, tuple)


def _functions(table: Any) -> Iterator[Any]:
    """What is in a table of functions, or of one such table for each class."""
    yield from table
    if isinstance(table, (dict, types.MappingProxyType)):
        for each in table.values():
            yield from each if isinstance(each, _TABLES) else ()


def _looked_up(cls: type) -> Iterator[tuple[bool, Any]]:
    """What ``__torch_function__`` of a class, and functions of its package that it calls, look up in their code.

    Beside each whether it is compared.
    """
    for base in cls.__mro__:
        method = _function(vars(base).get("__torch_function__"))
        if method is None or base is Tensor:
            continue
        package = str(method.__module__).partition(".")[0]
        for look_up in _look_ups(method.__code__):
            found = look_up.found(method, cls)
            yield look_up.is_compared, found
            called = None if look_up.is_compared else _function(found)
            if called is not None and str(called.__module__).partition(".")[0] == package:
                yield from ((each.is_compared, each.found(called, cls)) for each in _look_ups(called.__code__))


def _function(found: Any) -> types.FunctionType | None:
    """A function, also out of a class."""
    found = getattr(found, "__func__", found) if isinstance(found, (classmethod, staticmethod)) else found
    found = inspect.unwrap(found) if isinstance(found, types.FunctionType) else found
    return found if isinstance(found, types.FunctionType) else None


class _LookUp(NamedTuple):
    """What the code of a function looks up: a variable, and attributes from there on.

    where: "global", "closure", "first" for the first parameter of a class method, or "import" for a module.
    level: of a relative import.
    """

    where: str
    variable: str
    attributes: tuple[str, ...] = ()
    level: int = 0
    is_compared: bool = False

    def found(self, function: Any, cls: type) -> Any:
        """What is there now, without code of anybody's: no import, no property. None for nothing."""
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
def _look_ups(code: types.CodeType) -> list[_LookUp]:
    """What code looks up to compare it by ``is``, ``==`` or ``in``, or for something else."""
    found: list[_LookUp] = []
    stack: list[_LookUp | None] = []  # what an expression has looked up so far; None: a local variable
    imported, level = "", 0
    for each in dis.get_instructions(code):
        name, value = each.opname, each.argval
        if name in ("LOAD_ATTR", "LOAD_METHOD"):
            last = stack.pop() if stack else None
            is_of_table = value in ("get", "keys", "items", "__contains__", "__getitem__")
            stack.append(last if last is None or is_of_table else last._replace(attributes=(*last.attributes, value)))
        elif name == "LOAD_GLOBAL":
            stack.append(_LookUp("global", value))
        elif name == "LOAD_DEREF":
            stack.append(_LookUp("closure", value))
        elif name.startswith("LOAD_FAST"):
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
