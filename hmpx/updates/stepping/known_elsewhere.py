"""Optimizers that know their parameters in other places than `param_groups`, and state that another object keeps.

A step is shown FP32 copies in `param_groups`, with the state of the parameters. An optimizer that looks a parameter up
in a set or a dict of its own does not find the copy there, and steps on as if the parameter were another one.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from hmpx.base.torch_private import KEPT_SHADOWS, private
from hmpx.errors import HmpxError
from hmpx.rounding.devices import shows_values
from hmpx.updates.holding.held import Segment
from hmpx.updates.ranks.sharding import local

Optimizer = torch.optim.Optimizer
Parameter = torch.nn.Parameter
Tensor = torch.Tensor
_use_count = private("torch._C._storage_Use_Count")
_EMPTY = types.CellType()
_Container = list | tuple | set | frozenset | deque | Mapping

_SEARCHED = 3  # containers inside containers


@functools.cache
def _of_all() -> frozenset[str]:
    """Return the attributes that every optimizer has: groups, state, hooks. To make one imports Dynamo."""
    return frozenset(vars(torch.optim.SGD([torch.zeros(1)], lr=0.0)))


def refuse_lookups(optimizer: Optimizer, shown: Iterable[Parameter] = ()) -> None:
    """Refuse an optimizer of which an attribute, or an option of a group, holds its parameters or their ids.

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
        if id(value) not in own_lists and any(_is_one(each, params) for each in _inside(value, _SEARCHED, own_lists)):
            raise HmpxError(
                f"{type(optimizer).__name__} knows parameters by {name}, a {type(value).__name__}, and would not find "
                "the FP32 copies there that hmpx steps in their place: keep its weights in FP32, without hmpx.attach, "
                "or let it read such facts from options of param_groups"
            )


def _is_one(value: Any, params: Mapping[int, Parameter]) -> bool:
    found = params.get(id(value)) is value if isinstance(value, torch.Tensor) else False
    return found or (type(value) is int and value in params)


def _inside(value: Any, depth: int, own_lists: set[int]) -> Iterator[Any]:
    """Yield what a container holds, keys of dicts and containers inside included; lists of `param_groups` aside."""
    if id(value) in own_lists or depth < 0:
        return
    value = _held_by(value) if depth == _SEARCHED else value
    if isinstance(value, Mapping):
        for key in value:
            yield from _inside(key, depth - 1, own_lists)
        value = [*value.values()]
    if isinstance(value, _Container):
        for each in value:
            yield from _inside(each, depth - 1, own_lists)
    else:
        yield value


def _held_by(value: Any) -> Any:
    """Return by what a function or an object in an attribute may look parameters up; any other value as it is.

    A model, or a list in such a place, may be there to be read. A write to a parameter in it is seen.
    """
    if isinstance(value, functools.partial):
        return [value.args, value.keywords, _held_by(value.func)]
    if isinstance(value, torch.nn.ParameterList | torch.nn.ParameterDict):
        return list(value.parameters())
    if isinstance(value, torch.nn.Module | Optimizer | type | types.ModuleType | Tensor | _Container):
        return value
    found = list(getattr(value, "__dict__", {}).values())
    if isinstance(value, types.FunctionType):
        found = [*(cell.cell_contents for cell in value.__closure__ or () if cell != _EMPTY), value.__defaults__]
    if not found or type(value).__module__.startswith("hmpx.") or getattr(value, "__module__", "").startswith("hmpx."):
        return value
    lists = [isinstance(each, list | tuple | deque) for each in found]
    found = [
        [x for x in v if not isinstance(x, Tensor)] if is_list else v for v, is_list in zip(found, lists, strict=True)
    ]
    return [each for each in found if not isinstance(each, Tensor)]


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
