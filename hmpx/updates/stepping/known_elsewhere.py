"""Optimizers that know their parameters in other places than `param_groups`, and state that another object keeps.

A step is shown FP32 copies in `param_groups`, with the state of the parameters. An optimizer that looks a parameter up
in a set or a dict of its own does not find the copy there, and steps on as if the parameter were another one.
"""

from __future__ import annotations

import functools
import gc
import inspect
import logging
import sys
import types
import weakref
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from hmpx.base.tensors import shows_values
from hmpx.base.torch_private import KEPT_SHADOWS, private
from hmpx.errors import HmpxError
from hmpx.updates.holding.held import Segment
from hmpx.updates.holding.sharding import local

Optimizer = torch.optim.Optimizer
Parameter = torch.nn.Parameter
Tensor = torch.Tensor
_use_count = private("torch._C._storage_Use_Count")
_LEAVES = torch.nn.Module | Optimizer | type | types.ModuleType | logging.Logger
_PLAIN = frozenset({str, bytes, float, bool, type(None), complex})
_DEPTH, _MANY = 6, 1 << 10  # how deep a search goes, and how many objects it looks at in other objects


@functools.cache
def _of_all() -> frozenset[str]:
    """Return the attributes that every optimizer has: groups, state, hooks. To make one imports Dynamo."""
    return frozenset(vars(torch.optim.SGD([torch.zeros(1)], lr=0.0)))


def refuse_lookups(optimizer: Optimizer, shown: Iterable[Parameter] = ()) -> None:
    """Refuse an optimizer of which an attribute, or an option of a group, holds its parameters, their ids or addresses.

    Args:
        shown: the FP32 copies of a step that is over: by then a class has made what it makes in its first step.

    Raises:
        HmpxError: with the name of the attribute.
    """
    lists = [group["params"] for group in optimizer.param_groups]
    params = {id(p): p for params in (*lists, shown) for p in params}
    own_lists = {id(each) for each in lists}
    own = {name: value for name, value in vars(optimizer).items() if name not in _of_all()}
    groups = enumerate(optimizer.param_groups)
    options = {f"param_groups[{i}][{key!r}]": value for i, group in groups for key, value in group.items()}
    for name, value in {**own, **options}.items():
        found = list(_inside(value, own_lists))
        numbers = {x for x in found if type(x) is int and x >> 16}
        is_known = any(params.get(id(x)) is x for x in found if isinstance(x, Tensor))
        if is_known or numbers & params.keys() or (numbers and numbers & _addresses(params.values())):
            raise HmpxError(
                f"{type(optimizer).__name__} knows parameters by {name}, a {type(value).__name__}, and would not find "
                "the FP32 copies there that hmpx steps in their place: keep its weights in FP32, without hmpx.attach, "
                "or let it read such facts from options of param_groups"
            )


def _addresses(params: Iterable[Parameter]) -> set[int]:
    return {local(p).data_ptr() for p in params if shows_values(p)}


def _inside(value: Any, own_lists: Iterable[int]) -> Iterator[Any]:
    """Yield integers, and tensors by which something may be looked up, that can be reached from an attribute.

    own_lists: ids of the lists of `param_groups`, which are left aside.
    """
    level, seen, left = [(value, True)], set(own_lists), _MANY
    for _ in range(_DEPTH):
        found, level = level, []
        for each, is_sought in found:
            if isinstance(each, Tensor) or type(each) is int:
                if is_sought or type(each) is int:
                    yield each
            elif id(each) not in seen and (is_sought or left):
                seen.add(id(each))
                left -= not is_sought
                level += [pair for pair in _held_by(each, is_sought) if type(pair[0]) not in _PLAIN]


def _held_by(value: Any, is_sought: bool) -> list[tuple[Any, bool]]:
    """Return what a container, an object or a function refers to, each with whether a tensor there is looked up by.

    A model, or a list in an object or a function, may be there to be read. A write to a parameter in it is seen.
    """
    found: Iterable[Any]
    if isinstance(value, dict):
        return [(each, True) for each in (*value, *value.values())]
    if isinstance(value, set | frozenset | torch.nn.ParameterList | torch.nn.ParameterDict):
        return [(each, True) for each in (value.parameters() if isinstance(value, torch.nn.Module) else value)]
    if isinstance(value, list | tuple | deque):
        return [(each, is_sought) for each in value]
    if isinstance(value, weakref.ref):
        return [(value(), is_sought)] if isinstance(value(), Tensor) else []
    if isinstance(value, functools.partial):
        return [(value.args, is_sought), (value.keywords, True), (value.func, False)]
    if isinstance(value, _LEAVES) or "hmpx" in (_publisher(value), _publisher(type(value))):
        return []
    if isinstance(value, types.FunctionType):
        held = gc.get_referents(*(value.__closure__ or ())), value.__defaults__, (value.__kwdefaults__ or {}).values()
        return [(each, isinstance(each, Tensor)) for some in held for each in some or ()]  # `lambda p: p is first`
    else:
        own = getattr(value, "__dict__", None)
        found = [each for each in gc.get_referents(value) if each is not own]
        found += own.values() if isinstance(own, dict) else ()
    return [(each, False) for each in found]


def _publisher(value: Any) -> str:
    return str(getattr(value, "__module__", "")).partition(".")[0]


def references(tensors: Iterable[Tensor], known: Iterable[Any]) -> list[tuple[int, int, int]]:
    """Return how many references there are to each tensor, beside those among `known` objects; its memory, and uses."""
    here = Counter(map(id, known))
    return [(sys.getrefcount(each) - here[id(each)], *_memory(local(each))) for each in tensors]


def _memory(tensor: Tensor) -> tuple[int, int]:
    if not KEPT_SHADOWS.is_on() or not shows_values(tensor):
        return 0, 0
    address = tensor.untyped_storage()._cdata
    return address, _use_count(address)


def refuse_foreign_state(optimizer: Optimizer, segments: list[Segment]) -> None:
    """Refuse state of torch's own classes under a key that the class does not make: another object keeps it there.

    Raises:
        HmpxError: with the key.
    """
    if type(optimizer).__module__.partition(".")[0] != "torch":
        return
    cls: type = type(optimizer)
    words = _words(cls)
    for segment in segments:
        state = optimizer.state.get(segment.param)
        for key, value in state.items() if isinstance(state, dict) else ():
            if not isinstance(value, torch.Tensor) or value.dtype is not torch.bfloat16 or key.startswith("hmpx_"):
                continue
            if value.shape == segment.param.shape and key not in words:
                raise HmpxError(
                    f"{type(optimizer).__name__} has state {key!r} of parameter {segment.name!r}, which this class "
                    "does not make. If another object moves weights by it outside of step(), as schedulefree."
                    "ScheduleFreeWrapper does and its AdamWScheduleFree does not, they are not rounded stochastically: "
                    "keep these weights in FP32 (parameter_dtype: float32). If nothing does, hold it as an FP32 tensor"
                )


@functools.lru_cache(maxsize=64)
def _words(cls: type) -> frozenset[str]:
    """Return the strings in the methods of a class and of those that it derives from."""
    found: set[str] = set()
    methods = [inspect.unwrap(each) for base in cls.__mro__ for each in vars(base).values() if callable(each)]
    codes = [each.__code__ for each in methods if isinstance(each, types.FunctionType)]
    for code in codes:
        codes += [each for each in code.co_consts if isinstance(each, types.CodeType)]
        found.update(each for each in code.co_consts if isinstance(each, str))
    return frozenset(found)
