"""Where hmpx stands in an optimizer step: around the optimizer's own function, inside its hooks.

torch wraps `step` of every optimizer class once (`Optimizer.profile_hook_step`): user pre-hooks, the class's own
function, user post-hooks. hmpx exchanges that inner function, held by the wrapper's closure, because the places beside
it do not serve:

- global step hooks do not run when a step raises, and run outside the user's own hooks, which would then see shadows
  instead of parameters, or parameters that are not written back yet;
- a patch on the class is passed by: every LR scheduler keeps the bound `step` that it found.

Installed as long as a conversion, a `disable_casts` region or an attached optimizer needs it, then put back exactly.
Meanwhile `load_state_dict` keeps the FP32 state that such steps made, and `add_param_group` tells the attachment.
"""

from __future__ import annotations

import functools
import logging
import threading
import types
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from hmpx import compiling, scope, weight_cache
from hmpx.updates import zero
from hmpx.updates.names import parameters
from hmpx.updates.settings import Settings
from hmpx.updates.stepping import STEP_KEY, WeightUpdates, has_bf16
from hmpx.updates.whole import replace_closure

Optimizer = torch.optim.Optimizer
logger = logging.getLogger("hmpx")

_lock = threading.RLock()
_users = 0
_profile_hook_step = Optimizer.profile_hook_step
_process_value = Optimizer._process_value_according_to_param_policy
_add_param_group = Optimizer.add_param_group
_HOOKED = _profile_hook_step(lambda optimizer: None).__code__  # of torch's wrapper around every step
_EXCHANGED = {
    name: vars(Optimizer)[name]
    for name in ("profile_hook_step", "_process_value_according_to_param_policy", "add_param_group")
}
ATTRIBUTE = "_hmpx_attachment"  # of an attached optimizer
_keeps_fp32 = WeakIdKeyDictionary()  # BF16 parameters of attached optimizers
_collected: deque[None] = deque()  # one for each attached optimizer that nobody holds any more
_running = threading.local()  # optimizers whose step is running in this thread
_warned = _for_graphs = False
_in_region = WeightUpdates(Settings())  # for optimizers that nobody attached


def install() -> None:
    """Watch every optimizer step from here on. Calls nest."""
    global _users
    with _lock:
        uninstall_collected()
        _users += 1
        if _users == 1:
            for cell in _cells():
                cell.cell_contents = _watched(cell.cell_contents)
            Optimizer.profile_hook_step = staticmethod(lambda step: _profile_hook_step(_watched(step)))
            Optimizer._process_value_according_to_param_policy = staticmethod(_loaded_value)
            Optimizer.add_param_group = _added


def uninstall() -> None:
    """Take back one `install`; the last one leaves torch as it was."""
    global _users
    with _lock:
        _users -= 1
        if _users == 0:
            for name, descriptor in _EXCHANGED.items():
                setattr(Optimizer, name, descriptor)
            for cell in _cells():
                step = cell.cell_contents
                cell.cell_contents = getattr(step, "__hmpx_original__", step)


def install_for_graphs(_: Any = None) -> None:
    """Watch from here on: a compiled function has a region in it, which installs nothing when it runs."""
    global _for_graphs
    if not _for_graphs:
        _for_graphs = True
        install()


def uninstall_for_graphs() -> None:
    """Take that back, when compiled functions are compiled anew."""
    global _for_graphs
    if _for_graphs:
        _for_graphs = False
        uninstall()


def uninstall_later() -> None:
    """`uninstall` from the garbage collector, which may come while one of the above is at work."""
    _collected.append(None)


def uninstall_collected() -> None:
    """Do what `uninstall_later` put off."""
    while _collected:
        _collected.pop()
        uninstall()


def keep_fp32_state(p: torch.nn.Parameter, keep: bool) -> None:
    """Whether FP32 state of this BF16 parameter stays FP32 when it is loaded."""
    if keep:
        _keeps_fp32[p] = True
    else:
        _keeps_fp32.pop(p, None)


def step_alone(optimizer: Optimizer, updates: WeightUpdates, p: torch.nn.Parameter) -> None:
    """Step one parameter of an attached optimizer, outside of the optimizer's `step`."""
    own = _cell(type(optimizer).step).cell_contents
    with scope.region(casting=False), torch.no_grad():
        updates.step_alone(optimizer, getattr(own, "__hmpx_original__", own), p)


def _cells() -> Iterator[types.CellType]:
    """The closure cell that holds the own step function, of every optimizer class that torch has wrapped."""
    classes = [Optimizer]
    for cls in classes:
        classes += [sub for sub in cls.__subclasses__() if sub not in classes]
        cell = _cell(vars(cls).get("step"))
        if cell is not None:
            yield cell


def _cell(step: Any) -> types.CellType | None:
    """That of one class. Dynamo puts a wrapper around torch's in some classes, LBFGS for one."""
    while step is not None and getattr(step, "__code__", None) is not _HOOKED:
        step = getattr(step, "__wrapped__", None)
    return None if step is None else step.__closure__[_HOOKED.co_freevars.index("func")]


def _watched(step: Callable) -> Callable:
    @functools.wraps(step)
    def watched(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        running = _running.__dict__.setdefault("optimizers", set())
        if id(optimizer) in running:  # a subclass that calls its parent's step
            return step(optimizer, *args, **kwargs)
        how, attached = scope.rounding(), vars(optimizer).get(ATTRIBUTE)
        # A closure is the model's forward: cast as outside of the step, and in a disable_casts region cast as well.
        args, kwargs = replace_closure(
            args, kwargs, functools.partial(_cast_inside, scope.casting() if how is None else True)
        )
        running.add(id(optimizer))
        try:
            with scope.region(casting=False, how=how):
                if zero.inner(optimizer) is not None:  # whose own step is watched as well
                    return step(optimizer, *args, **kwargs)
                if attached is not None:
                    return attached.step(optimizer, step, args, kwargs, how.seed if how else None)
                if how is not None and has_bf16(optimizer):
                    return _in_region.step(optimizer, step, args, kwargs, how.seed)
                _warn_of_nearest(optimizer)
                return step(optimizer, *args, **kwargs)
        finally:
            running.discard(id(optimizer))
            if weight_cache.open_caches:
                weight_cache.forget(parameters(optimizer))

    watched.__hmpx_original__ = step
    watched._torchdynamo_disable = True
    return watched


compiling.never_compile(_watched(lambda optimizer: None))  # one code serves every class


def _cast_inside(casting: bool | None, closure: Callable) -> Callable:
    def evaluate() -> Any:
        with scope.region(casting, scope.rounding()):
            return closure()

    return evaluate


def _added(optimizer: Optimizer, param_group: dict) -> None:
    _add_param_group(optimizer, param_group)
    attached = vars(optimizer).get(ATTRIBUTE)
    if attached is not None:
        attached.adopt()


def _loaded_value(param: torch.Tensor, value: torch.Tensor, param_id: int, param_groups: list, key: Any = None) -> Any:
    """What `load_state_dict` makes of a state tensor: torch casts it to the parameter's dtype, a resume needs FP32."""
    kept = param.dtype is torch.bfloat16 and value.dtype is torch.float32 and key != "step"
    ours = param in _keeps_fp32 or scope.rounding() is not None or any(STEP_KEY in group for group in param_groups)
    if kept and ours:
        return value.to(device=param.device)
    return _process_value(param, value, param_id, param_groups, key)


def _warn_of_nearest(optimizer: Optimizer) -> None:
    global _warned
    if not _warned and has_bf16(optimizer):
        _warned = True
        logger.warning(
            "hmpx: %s updates BF16 parameters with round-to-nearest, which drops small updates; "
            "write `with hmpx.disable_casts(): optimizer.step()` for stochastic rounding",
            type(optimizer).__name__,
        )
