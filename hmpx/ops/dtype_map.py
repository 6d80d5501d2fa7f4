"""Replaces dtypes by others wherever one is asked for, as XLA_USE_BF16 and XLA_DOWNCAST_BF16 did below Python.

With ``{float32: bfloat16}``, `torch.zeros(3)`, `x.float()`, `x.to(torch.float32)`, `torch.sum(x, dtype=torch.float32)`,
`nn.Linear(4, 4)` and `torch.load(file)` all give BF16. The mapping is applied once to each dtype that a caller asks
for, and once to data from outside of torch (NumPy, buffers, files); a tensor that is there already is left alone. So a
tensor's `dtype` is its dtype. On XLA it was not: there it remained the one that had been asked for.

Calls by hmpx itself, by torch's compiler and other internals, and by optimizer steps are not mapped: steps compute and
count in FP32.
"""

from __future__ import annotations

import dataclasses
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from hmpx.base import region_state, run_in_region
from hmpx.base.changes import Attribute, Changes, Flag
from hmpx.base.torch_private import LOADED
from hmpx.errors import HmpxError
from hmpx.ops.outside_model import functions_in, places
from hmpx.ops.policies import op_facts
from hmpx.ops.policies.catalog import catalog
from hmpx.ops.policies.signatures import schemas
from hmpx.ops.wrapping.callers import frames
from hmpx.ops.wrapping.overriding import COMPILER, call
from hmpx.ops.wrapping.rules import METHODS
from hmpx.ops.wrapping.switch import Switch
from hmpx.ops.wrapping.wrappers import Patch, Patching, named_like, patch_at

Tensor = torch.Tensor
_LEGACY = {
    torch.float64: torch.DoubleTensor,
    torch.float32: torch.FloatTensor,
    torch.bfloat16: torch.BFloat16Tensor,
}
_DEFAULT_DTYPE = Flag("the default dtype", torch.get_default_dtype, torch.set_default_dtype)
# Calls from these modules get the dtype that they ask for: their numbers are no part of the model.
_INTERNAL = (*COMPILER, "hmpx.", "torch._tensor_str.", "torch._utils.", "torch.amp.", "torch.optim.", "torch.testing.")
_IN_BETWEEN = "torch._subclasses.functional_tensor"  # hands on a request of a compiled function


class DtypeMap:
    """The mapping of one conversion.

    Args:
        mapping: from torch.float32 and torch.float64 to torch.bfloat16 and torch.float32.

    Raises:
        HmpxError: a mapping of other dtypes.
    """

    def __init__(self, mapping: Mapping[torch.dtype, torch.dtype]) -> None:
        for old, new in mapping.items():
            if old not in (torch.float32, torch.float64) or new not in (torch.bfloat16, torch.float32):
                raise HmpxError(
                    f"dtype_map: {old} to {new}; it maps torch.float32 and torch.float64 to torch.bfloat16 and "
                    "torch.float32"
                )
        self._mapping = dict(mapping)
        self._asked: dict[Any, Any] = self._mapping | {
            f"torch.{_LEGACY[old].__name__}": f"torch.{_LEGACY[new].__name__}" for old, new in self._mapping.items()
        }

    def __str__(self) -> str:
        return "".join(f"{old} -> {new}\n" for old, new in self._mapping.items())

    def apply(self, changes: Changes) -> None:
        """Map the default dtype and the old tensor types (`torch.FloatTensor`)."""
        default = torch.get_default_dtype()
        changes.put(_DEFAULT_DTYPE, self._mapping.get(default, default))
        for dtype, new in self._mapping.items():
            name = _LEGACY[dtype].__name__
            changes.put(Attribute(torch, name, f"torch.{name}"), _LEGACY[new])

    def patches(self, patches: tuple[Patch, ...], switch: Switch) -> Iterator[Patch]:
        """Yield `patches` and those that map dtypes; an attribute that needs both gets one patch."""
        places = {(id(patch.owner), patch.attribute): patch for patch in patches}
        made: dict[tuple[int, Callable], Callable] = {}
        for path, build in self._wanted():
            patch = patch_at(path, Patching.DTYPE_MAP, lambda function: function)
            before = places.get((id(patch.owner), patch.attribute), patch)
            key = id(before.wrapper), build
            if key not in made:
                made[key] = named_like(build(before.wrapper, switch), path, patch.original)
            places[id(patch.owner), patch.attribute] = dataclasses.replace(before, wrapper=made[key])
        yield from places.values()

    def _wanted(self) -> Iterator[tuple[str, Callable]]:
        """Yield every function that takes a dtype or loads data, with the factory of its wrapper."""
        asked, found, either = (partial(self._mapped, *how) for how in ((True, False), (False, True), (True, True)))
        special: dict[str, Callable] = {
            **dict.fromkeys(op_facts.DTYPE_ASKED, asked),
            **dict.fromkeys(op_facts.DTYPE_FOUND, found),
            **dict.fromkeys(op_facts.DTYPE_ASKED_OR_FOUND, either),
            "torch.Tensor.float": partial(self._as, torch.float32),
            "torch.Tensor.double": partial(self._as, torch.float64),
            **{"torch.Tensor.numpy": self._to_numpy, "torch.load": self._loaded},
            **dict.fromkeys(_initialisers(), self._initialised),
        }
        for op in catalog().values():
            if not op.name.startswith("_") and any(a.name == "dtype" for s in schemas(op.name) for a in s.arguments):
                for entry in op.entries:
                    path = f"torch.{entry.label}" if entry.owner is Tensor else entry.label
                    if not entry.signature.python and path not in special:
                        yield path, asked
        yield from special.items()

    def _mapped(self, asks: bool, finds: bool, inner: Callable, switch: Switch) -> Callable:
        """Wrap `inner`, which is asked for a dtype, finds one in data from outside, or does either."""

        def wrapper(*args, **kwargs):
            if not _acts(switch):
                return _call(inner, args, kwargs)
            stated = asks and kwargs.get("dtype") is not None
            if asks:
                args, kwargs = self._new(args, kwargs)
            out = _call(inner, args, kwargs)
            # A tensor, viewed or handed on, is narrowed only if it was asked to be of another dtype.
            first = next((each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)), None)
            own = first is not None and (asks or out.dtype is first.dtype)
            return self._narrowed(out) if finds and not stated and not own else out

        return wrapper

    def _new(self, values: tuple, kwargs: dict) -> tuple[tuple, dict]:
        def new(value: Any) -> Any:
            return self._asked.get(value, value) if type(value) in (torch.dtype, str) else value

        return tuple(map(new, values)), {key: new(value) for key, value in kwargs.items()}

    def _narrowed(self, value: Any) -> Any:
        """Return a loaded tensor in the dtype that its own is mapped to."""
        if not isinstance(value, Tensor) or value.dtype not in self._mapping:
            return value
        new = METHODS[self._mapping[value.dtype]]
        return new(value.detach()).requires_grad_(value.requires_grad) if value.is_leaf else new(value)

    def _as(self, dtype: torch.dtype, inner: Callable, switch: Switch) -> Callable:
        new = self._mapping.get(dtype)
        instead = inner if new is None else METHODS[new]

        def wrapper(*args, **kwargs):
            return _call(instead if _acts(switch) else inner, args, kwargs)

        return wrapper

    def _to_numpy(self, inner: Callable, switch: Switch) -> Callable:
        """Hand BF16 to NumPy as FP32: it has no BF16, and the mapping itself closes ``x.float().numpy()``."""

        def wrapper(self, *args, **kwargs):
            wide = self.dtype is torch.bfloat16 and not switch.retired
            return _call(inner, (METHODS[torch.float32](self) if wide else self, *args), kwargs)

        return wrapper

    def _initialised(self, inner: Callable, switch: Switch) -> Callable:
        """Initialise weights in FP32 and round them, as on XLA, where they came from the host; BF16 has no QR."""

        def wrapper(tensor, *args, **kwargs):
            if tensor.dtype is not torch.bfloat16 or not _acts(switch):
                return inner(tensor, *args, **kwargs)
            wide = METHODS[torch.float32](tensor.detach())
            inner(wide, *args, **kwargs)
            with torch.no_grad():
                return tensor.copy_(wide)

        return wrapper

    def _loaded(self, inner: Callable, switch: Switch) -> Callable:
        def wrapper(*args, **kwargs):
            if not _acts(switch):
                return inner(*args, **kwargs)
            with run_in_region.region(region_state.innermost().casting, region_state.innermost().rounding, maps=False):
                loaded = inner(*args, **kwargs)
                return self._tree(loaded, {})

        return wrapper

    def _tree(self, value: Any, seen: dict[int, Any]) -> Any:
        """Return a loaded value with its tensors mapped; containers and modules stay the same objects.

        A tensor without a dimension stays: a count of steps would stop at 256 in BF16.
        """
        if id(value) in seen:
            return seen[id(value)]
        new = value
        if isinstance(value, torch.nn.Module):
            if LOADED.is_on():
                value._apply(lambda t: self._tree(t, seen))
        elif isinstance(value, Tensor):
            new = self._narrowed(value) if value.dim() else value
            if isinstance(value, torch.nn.Parameter) and new is not value:
                new = torch.nn.Parameter(new.detach(), value.requires_grad)
        elif isinstance(value, dict):
            for key in value:
                value[key] = self._tree(value[key], seen)
        elif isinstance(value, list):
            value[:] = [self._tree(item, seen) for item in value]
        elif isinstance(value, tuple):
            items = [self._tree(item, seen) for item in value]
            new = type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        seen[id(value)] = new
        return new


def _call(function: Callable, args: tuple, kwargs: dict) -> Any:
    """Call a function: torch's own by `overriding.call`, a wrapper of ours directly."""
    return function(*args, **kwargs) if type(function) is types.FunctionType else call(function, args, kwargs)


def _initialisers() -> Iterator[str]:
    """Yield the public functions of torch.nn.init that write to their argument."""
    for _, attribute, path in functions_in("torch.nn.init", places()):
        if attribute.endswith("_") and not attribute.startswith("_"):
            yield path


def _acts(switch: Switch) -> bool:
    """Return whether dtypes are mapped in the call that is running."""
    if switch.retired or not region_state.innermost().maps:
        return False
    if is_dynamo_compiling():
        return True
    callers = (frame.f_globals.get("__name__", "") for frame in frames(sys._getframe(2)))
    caller = next((name for name in callers if name != _IN_BETWEEN), "")
    return not (caller + ".").startswith(_INTERNAL)
