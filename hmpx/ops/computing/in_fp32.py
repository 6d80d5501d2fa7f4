"""What is computed in FP32 wherever it is called, with the dtype of its input as that of its result.

- Ops whose BF16 and FP16 kernels give garbage without an error (`op_facts.WRONG_IN_LOW`).
- torch's own parametrizations: a weight of norm 1, or an orthogonal one, is so only to the precision in which it is
  made. A program makes it wherever it reads the weight, in a forward or outside; so this holds everywhere, in
  `disable_casts()` too.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from hmpx.base.torch_private import PARAMETRIZATIONS
from hmpx.ops.policies import op_facts
from hmpx.ops.policies.policy import LOW_RULES
from hmpx.ops.wrapping.overriding import call, stand_in
from hmpx.ops.wrapping.rules import cast, eligible_dtypes, is_eligible
from hmpx.ops.wrapping.switch import Switch
from hmpx.ops.wrapping.wrappers import Patch, Patching, named_like, patch_of, uncast_inside


def in_fp32(function: Callable) -> Callable:
    """Return `function` computed in FP32 where it is given BF16 or FP16; its result is rounded to that dtype."""

    @functools.wraps(function)
    @stand_in(function)
    def wide(*args: Any, **kwargs: Any) -> Any:
        low = next((dtype for dtype in eligible_dtypes((*args, *kwargs.values())) if dtype in LOW_RULES), None)
        if low is None:
            return call(function, args, kwargs)
        args = tuple([cast(value, torch.float32) for value in args])
        kwargs = {key: cast(value, torch.float32) for key, value in kwargs.items()}
        return cast(call(function, args, kwargs), low)

    return wide


def parametrizations(switch: Switch) -> Iterator[Patch]:
    """Yield the patches of torch's own parametrizations: modules, and the older hooks."""
    for path in op_facts.PARAMETRIZATIONS if PARAMETRIZATIONS.is_on() else ():
        module, cls, method = path.rsplit(".", 2)
        owner = getattr(sys.modules[module], cls)
        yield patch_of(owner, method, path, Patching.FP32, functools.partial(_parametrization, path, switch))


def _parametrization(path: str, switch: Switch, original: Callable) -> Callable:
    """Return the method of a parametrization computed in FP32, with the tensors that its module holds."""
    wide = in_fp32(uncast_inside(original))

    def parametrization(self, *args, **kwargs):
        if switch.retired:
            return original(self, *args, **kwargs)
        # An older hook is given the layer, which holds the tensors under names that begin with the weight's.
        holder, prefix = (self, "") if isinstance(self, torch.nn.Module) else (args[0], f"{self.name}_")
        with _widened(holder, prefix) as low:
            result = wide(self, *args, **kwargs)
        return result if low is None else cast(result, low)

    return named_like(parametrization, path, original)


@contextlib.contextmanager
def _widened(module: torch.nn.Module, prefix: str) -> Iterator[torch.dtype | None]:
    """Let a module hold its BF16 and FP16 tensors in FP32, and give their dtype; None if there are none.

    What is written to a buffer meanwhile is rounded into it.
    """
    held = [
        (kind, name, own)
        for kind in ("_parameters", "_buffers")
        for name, own in vars(module)[kind].items()
        if name.startswith(prefix) and is_eligible(own) and own.dtype in LOW_RULES
    ]
    for kind, name, own in held:
        vars(module)[kind][name] = cast(own, torch.float32)
    try:
        yield held[0][2].dtype if held and prefix else None
    finally:
        for kind, name, own in held:
            tensors = vars(module)[kind]
            wide, tensors[name] = tensors[name], own
            if kind == "_buffers" and module.training:
                with torch.no_grad():
                    own.copy_(wide)
