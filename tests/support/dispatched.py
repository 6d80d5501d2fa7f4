"""`torch.autocast` with the lists of another device, at torch's dispatcher: an oracle for what runs on no CPU.

The kernels that autocast has for CPU tensors are replaced by casts that are written here. All else is torch's: which
ops a call ends in, and that nothing inside of an op is cast again.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping

import torch
from torch.utils._pytree import tree_leaves, tree_map

_KEY = "AutocastCPU"
_INSIDE = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
_LOW, _FLOATING = torch.bfloat16, (torch.float32, torch.bfloat16, torch.float16)


def _is_floating(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in _FLOATING


def _cast(values: object, dtype: torch.dtype) -> object:
    return tree_map(lambda value: value.to(dtype) if _is_floating(value) else value, values)


def _kernel(op: Callable, group: str) -> Callable:
    def kernel(*args: object, **kwargs: object) -> object:
        with torch._C._ExcludeDispatchKeyGuard(_INSIDE):
            if group == "lower_first_arg":
                return op(_cast(args[0], _LOW), *args[1:], **kwargs)
            dtype = _LOW if group == "lower_precision_fp" else torch.float32
            if group == "promote":
                dtypes = [value.dtype for value in tree_leaves((args, kwargs)) if _is_floating(value)]
                dtype = functools.reduce(torch.promote_types, dtypes, _LOW)
            return op(*_cast(args, dtype), **_cast(kwargs, dtype))

    return kernel


@contextlib.contextmanager
def autocasting(groups: Mapping[str, list[str]]) -> Iterator[Callable[[], torch.autocast]]:
    """Inside, the region that this gives casts by these lists of aten's functions, as Gaudi's do: the first decides."""
    group_of = {name: group for group in reversed(groups) for name in groups[group]}
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that kernels are replaced
        for schema in torch._C._jit_get_all_schemas():
            name, overload = schema.name.removeprefix("aten::"), schema.overload_name
            full = f"{name}.{overload}" if overload else name
            if "::" in name or not torch._C._dispatch_has_kernel(f"aten::{full}"):
                continue
            if name in group_of and not any(argument.is_out for argument in schema.arguments):
                op = getattr(getattr(torch.ops.aten, name), overload or "default")
                library.impl(full, _kernel(op, group_of[name]), _KEY, allow_override=True)
            elif torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{full}", _KEY):
                library.impl(full, torch.library.fallthrough_kernel, _KEY, allow_override=True)
        try:
            yield functools.partial(torch.autocast, "cpu", dtype=_LOW, cache_enabled=False)
        finally:
            library._destroy()
