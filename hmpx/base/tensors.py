"""The tensors in containers (lists, tuples, mappings, in which calls hand them over) and in modules; dtypes by name.

Also whether the values of a tensor may be looked at: on an accelerator that takes long, and some tensors have none.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

from hmpx.base.torch_private import FakeTensor

# What most arguments are that hold nothing; to ask whether one is a mapping takes longer.
ATOMS: frozenset[type] = frozenset({type(None), bool, int, float, str, torch.dtype, torch.device})
_COPIED = (OrderedDict, defaultdict)  # by their method: Dynamo knows that


def leaves(values: Iterable[Any]) -> list[Any]:
    """Return `values`, with what containers among them hold in the place of these."""
    found: list[Any] = []
    for value in values:
        if isinstance(value, Tensor) or type(value) in ATOMS:
            found.append(value)
        elif isinstance(value, (list, tuple)):  # Dynamo of torch 2.9 cannot trace `list | tuple`
            found += leaves(value)
        elif isinstance(value, Mapping):
            found += leaves(value.values())
        else:
            found.append(value)
    return found


def tensors_in(values: Iterable[Any]) -> list[Tensor]:
    """Return the tensors among `values`, in containers too."""
    return [value for value in leaves(values) if isinstance(value, Tensor)]


def with_items(container: Any, items: Collection[Any]) -> Any:
    """Return a container of the same class with other items, of the same keys for a mapping.

    A mapping that cannot be written to becomes a dict, as for ``torch.amp.custom_fwd(cast_inputs=...)``.
    """
    new: Any
    kind: Any = type(container)
    if kind in (list, tuple):
        return kind(items)
    if isinstance(container, tuple):
        if hasattr(container, "_fields"):
            return kind(*items)
        try:
            new = tuple.__new__(kind, items)
        except TypeError:  # one of `torch.return_types`
            return kind(items)
        vars(new).update(vars(container))
        return new
    if kind is dict or not isinstance(container, (list, MutableMapping)):
        return dict(zip(container.keys(), items, strict=True))
    new = kind.copy(container) if kind in _COPIED else copy.copy(container)
    for key, item in zip(range(len(items)) if isinstance(new, list) else list(new.keys()), items, strict=True):
        new[key] = item
    return new


# Whether the values of a tensor may be looked at


def is_on_host(tensor: Tensor) -> bool:
    """Return whether it is cheap to look at a value: on a CPU, with data. On an accelerator the host would wait."""
    return tensor.is_cpu and not isinstance(tensor, FakeTensor)


def is_lazy(tensor: Tensor) -> bool:
    """Return whether the values of `tensor` are computed later, in one graph with what comes after it."""
    return tensor.device.type in ("xla", "lazy")


def lacks_data(tensor: Tensor) -> bool:
    """Return whether a tensor is on the meta device or of a `FakeTensorMode`: it has a shape, a dtype and no data.

    A step on such tensors gives dtypes and sizes, asks for no value, and keeps nothing for real steps.
    """
    return tensor.is_meta or isinstance(tensor, FakeTensor)


def shows_values(tensor: Tensor) -> bool:
    """Return whether it is cheap to look at a tensor's values: a lazy one would have to be computed first."""
    return not is_lazy(tensor) and not lacks_data(tensor)


# Modules, read as torch keeps them: no method is called that a class may override, since modules of others are read

Module = torch.nn.Module


def modules_in(module: Module) -> Iterator[Module]:
    """Yield a module and all modules in it, each once."""
    found = {id(module): module}
    waiting = [module]
    while waiting:
        each = waiting.pop()
        yield each
        inside = {id(child): child for child in each._modules.values() if child is not None and id(child) not in found}
        found.update(inside)
        waiting += reversed(inside.values())


def own_parameters(module: Module) -> dict[str, torch.nn.Parameter]:
    """Return the parameters that a module itself holds, by name."""
    return {name: p for name, p in module._parameters.items() if p is not None}


def parameters_in(module: Module) -> list[torch.nn.Parameter]:
    """Return all parameters of a module, each once."""
    return list({id(p): p for each in modules_in(module) for p in own_parameters(each).values()}.values())


# Dtypes by name: "bf16", "bfloat16" and "torch.bfloat16" all mean `torch.bfloat16`

SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}


def dtype_named(value: Any) -> Any:
    """The dtype that a string names; any other value is returned unchanged."""
    if not isinstance(value, str):
        return value
    name = value.removeprefix("torch.")
    found = getattr(torch, SHORT.get(name, name), None)
    return found if isinstance(found, torch.dtype) else value


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype without "torch.": ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")
