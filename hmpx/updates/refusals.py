"""Plain steps of BF16 parameters: refused if state of regions or in codes forbids them, else warned of once."""

from __future__ import annotations

import logging
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch

from hmpx.base import region_state
from hmpx.errors import HmpxError
from hmpx.updates.holding import state_dtypes
from hmpx.updates.optimizer_hooks import own_attachment
from hmpx.updates.stepping import step_count
from hmpx.updates.stepping.names import has_bf16

Optimizer = torch.optim.Optimizer
logger = logging.getLogger("hmpx")

_hooks: WeakKeyDictionary[Optimizer, Any] = WeakKeyDictionary()  # what `refuse_plain_steps` has put on them
_warned: WeakSet[Optimizer] = WeakSet()  # of steps by round-to-nearest


def refuse_plain_steps(optimizer: Optimizer) -> None:
    """After a step in a region or a load of codes: refuse plain steps, and keep the step number in checkpoints.

    By hooks on the optimizer: hmpx may not be installed by then.
    """
    if optimizer not in _hooks and hasattr(optimizer, "_optimizer_step_pre_hooks"):
        _hooks[optimizer] = [optimizer.register_step_pre_hook(_refuse)]
        if hasattr(optimizer, "_optimizer_state_dict_pre_hooks"):  # not every class that wraps another has these
            _hooks[optimizer].append(optimizer.register_state_dict_pre_hook(_carry_number))


def _carry_number(optimizer: Optimizer) -> None:
    """Store step number and seed again, in case their group was removed since the last step."""
    if own_attachment(optimizer) is None and step_count.stored(optimizer):
        step_count.keep(optimizer)


def _refuse(optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
    is_plain = region_state.rounding() is None and own_attachment(optimizer) is None
    if is_plain:
        refuse_codes(optimizer)
    if is_plain and state_dtypes.has_fp32_state(optimizer):
        raise HmpxError(
            f"{type(optimizer).__name__} has stepped in hmpx.disable_casts(), or has loaded the state of such a step, "
            "so its state is FP32, which a plain step on BF16 parameters cannot go on with. Write "
            "`with hmpx.disable_casts(): optimizer.step()` for every step, "
            "or hmpx.attach(optimizer) once; hmpx.detach(optimizer) brings the state to BF16 for plain steps"
        )


def refuse_steps_on_loaded(optimizer: Optimizer) -> None:
    """After a load, refuse plain steps if it has brought state in codes, or FP32 state of hmpx."""
    is_wide = step_count.stored(optimizer) and state_dtypes.has_fp32_state(optimizer)
    if is_wide or state_dtypes.code_in(optimizer) is not None:
        refuse_plain_steps(optimizer)


def refuse_codes(optimizer: Optimizer) -> None:
    """Refuse a plain step on state in codes. One that asks for its state by `get`, as SGD, would begin anew.

    Raises:
        HmpxError: there is state in codes.
    """
    code = state_dtypes.code_in(optimizer) if step_count.stored(optimizer) else None
    if code is not None:
        raise HmpxError(
            f"{type(optimizer).__name__} has state in {code.bits} bits, from a checkpoint of an optimizer with "
            f'state_dtype="{code.name}", which a plain step cannot read: hmpx.attach(optimizer) takes it over, '
            "hmpx.detach(optimizer) brings it to the dtype of the parameters"
        )


def allow_plain_steps(optimizer: Optimizer) -> bool:
    """Take `refuse_plain_steps` back; whether there was something to take back."""
    handles = _hooks.pop(optimizer, ())
    for handle in handles:
        handle.remove()
    return bool(handles)


def warn_of_nearest(optimizer: Optimizer) -> None:
    """Warn of a plain step of BF16 parameters, once for each optimizer."""
    rounds_itself = getattr(optimizer, "bf16_stochastic_round", False)  # as torchao's
    if optimizer not in _warned and has_bf16(optimizer) and not rounds_itself:
        _warned.add(optimizer)
        logger.warning(
            "hmpx: %s updates BF16 parameters with round-to-nearest, which drops small updates; "
            "write `with hmpx.disable_casts(): optimizer.step()` for stochastic rounding",
            type(optimizer).__name__,
        )


def forget_warnings() -> None:
    """Forget which warnings were given, so that a new conversion warns again."""
    _warned.clear()
