"""What the author of an operator has registered for autocast: it is heeded where op lists cast.

``torch.library.register_autocast``, and a kernel under an Autocast key in Python or C++, say in which dtype an operator
takes its tensors, as ``custom_fwd(cast_inputs=)`` does. Such an operator is called with torch's own autocast on, which
finds that kernel, and no list casts what it computes inside. torch's own operators have kernels under these keys too,
and are the lists' matter.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from hmpx.base import region_state, run_in_region
from hmpx.base.torch_private import REGISTERED, private
from hmpx.ops.autocast import casts_here, low_precision
from hmpx.ops.overlays import Policies
from hmpx.ops.wrapping.overriding import stand_in
from hmpx.ops.wrapping.rules import autocast_inside, device_of
from hmpx.ops.wrapping.switch import Switch
from hmpx.ops.wrapping.wrappers import Patch, Patching, patch_at

_has_kernel = private("torch._C._dispatch_has_kernel_for_dispatch_key")
_key_of = private("torch._C._dispatch_key_for_device")
_OF_TORCH = ("aten::", "prim::", "prims::", "profiler::", "hmpx::")  # a step of an optimizer calls two of the profiler


def registered(switch: Switch, policies: Policies) -> Iterator[Patch]:
    """Yield the patches of the two classes by which Python calls an operator."""
    names = {"OpOverload": "_name", "OpOverloadPacket": "_qualified_op_name"}  # a missing attribute of a packet is slow
    for each, attribute in names.items() if REGISTERED.is_on() else ():
        build = functools.partial(_calling, switch, policies, attribute)
        yield patch_at(f"torch._ops.{each}.__call__", Patching.AUTOCAST, build)


def _calling(switch: Switch, policies: Policies, attribute: str, original: Callable) -> Callable:
    @functools.wraps(original)
    def __call__(operator, /, *args, **kwargs):
        name = getattr(operator, attribute)
        if name.startswith(_OF_TORCH) or switch.retired or not casts_here():
            return original(operator, *args, **kwargs)
        low = low_precision(policies, region_state.scope())
        if low is None or not _is_registered(operator, name, device_of((*args, *kwargs.values()))):
            return original(operator, *args, **kwargs)

        @stand_in(original, computes=False)
        def as_registered(*args: Any, **kwargs: Any) -> Any:
            return original(operator, *args, **kwargs)

        return run_in_region.run_uncast(autocast_inside, (low, as_registered, args, kwargs), {})

    return __call__


def _is_registered(operator: Any, name: str, device: str) -> bool:
    """Return whether one of the overloads that this may call has a kernel for autocast on the device."""
    if not device:
        return False
    overloads = operator.overloads() if hasattr(operator, "overloads") else [""]
    names = {f"{name}.{each}".removesuffix(".default").removesuffix(".") for each in overloads}
    return any(_has_kernel(each, f"Autocast{_key_of(device)}") for each in names)
