"""Whether the code behind an optimizer's step is the one that its class came with.

What hmpx knows of a class by heart, its formula and what its update reads, holds for that code alone. A script, or a
library in it, may have replaced `AdamW.step`, or `torch.optim.adam.adam`, which it calls. Such a step is taken by its
own code, as that of any class that hmpx does not know.

Who made a function is asked of its globals, and not of its name, which `functools.wraps` copies.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch.optim import Optimizer

from hmpx.base.torch_private import private

HOOK = "torch.optim.Optimizer.profile_hook_step"


def _own(optimizer: Optimizer) -> None: ...


_hooked = private(HOOK)(_own)
_HOOKED = _hooked.__code__  # every wrapper of torch has this code; `_PLACE`: the own function's index in its closure
_PLACE = [cell.cell_contents for cell in _hooked.__closure__].index(_own)
_PUBLISHERS = {"hmpx", "torch", *sys.stdlib_module_names} - {"functools"}

# By class: its step, the function that this comes to, and where all functions are that it calls; None: another's step.
_known: dict[type, tuple[Any, Callable, list[tuple[Mapping[str, Any], str, Any]]] | None] = {}


def cell_of(step: Any) -> types.CellType | None:
    """Return the cell that holds a class's own `step`. In some classes, such as LBFGS, Dynamo wraps torch's wrapper."""
    while step is not None and getattr(step, "__code__", None) is not _HOOKED:
        step = getattr(step, "__wrapped__", None) if _publisher(step) == "torch" else None
    return None if step is None else step.__closure__[_PLACE]


def own_step(cls: type[Optimizer]) -> Callable:
    """Return the step function of an optimizer class, without the wrappers of torch and hmpx."""
    cell = cell_of(cls.step)
    own: Any = cls.step if cell is None else cell.cell_contents
    return own.__hmpx_original__ if is_watched(own) else own


def is_watched(step: Any) -> bool:
    """Whether hmpx stands around this function."""
    return hasattr(step, "__hmpx_original__") and _publisher(step) == "hmpx"


def is_own(cls: type[Optimizer], method: Callable | None = None) -> bool:
    """Whether the step of a class, or `method`, is the one that came with it, with all that it calls in its module."""
    known = _known.get(cls)
    if known is None or cls.step is not known[0] or not all([held.get(name) is v for held, name, v in known[2]]):
        step = own_step(cls)
        found = list(_called(cls, step))
        _known[cls] = known = None if None in found else (cls.step, step, [each for each in found if each is not None])
    return known is not None and (method is None or method is known[1])


def _called(cls: type, step: Callable) -> Iterator[tuple[Mapping[str, Any], str, Any] | None]:
    """Yield where the functions are that a step calls in its module, itself included; None for one of another's."""
    bases = [base for base in cls.__mro__ if base not in (Optimizer, object)]
    function = _innermost(step, bases[0].__module__)
    home = next((base for base in bases if f"{base.__qualname__}.step" == getattr(function, "__qualname__", "")), None)
    if home is None or function.__globals__.get(home.__name__) is not home:
        yield None
        return
    seen, codes = set[str](), [function.__code__]
    module = function.__globals__
    for code in codes:
        codes += [each for each in code.co_consts if isinstance(each, types.CodeType)]
        for name in set(code.co_names) - seen:
            seen.add(name)
            for held in (module, *map(vars, bases)):
                value = held.get(name)
                if value is None or isinstance(value, type) or not callable(value):
                    continue
                inner = _innermost(value, module["__name__"])
                yield None if inner is None else (held, name, value)
                if isinstance(inner, types.FunctionType) and inner.__globals__ is module:
                    codes.append(inner.__code__)


def _innermost(value: Any, module: str) -> Any:
    """Return the function that others wrap; None if one of them is neither of this module's package nor of Python."""
    while _publisher(value) in {*_PUBLISHERS, module.partition(".")[0]}:
        if not hasattr(value, "__wrapped__"):
            return value
        value = value.__wrapped__
    return None


def _publisher(value: Any) -> str:
    """Return the first part of the name of the module whose code this is."""
    module = getattr(value, "__globals__", {}).get("__name__") or type(value).__module__
    return str(module).partition(".")[0]


def replaced_step(optimizer: Optimizer) -> Callable | None:
    """Return the `step` that somebody has put on the optimizer itself; None for torch's LR schedulers, which count."""
    step = each = vars(optimizer).get("step")
    while each is not None:
        each = getattr(each, "__func__", each)
        if each is type(optimizer).step or is_watched(each):
            return None
        each = getattr(each, "__wrapped__", None) if _publisher(each) == "torch" else None
    return step
