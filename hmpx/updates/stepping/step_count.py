"""The step number and the seed of an optimizer, from which the rounding key is made.

They are stored in ``param_groups[0]``, where `state_dict`, pickle and copies carry them and plain torch keeps them.
They belong to the optimizer, though: a user may remove groups, insert one in front, or replace one.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from torch.optim import Optimizer

STEP_KEY, SEED_KEY = "hmpx_step", "hmpx_seed"
_KEYS = (STEP_KEY, SEED_KEY)


class _Known(NamedTuple):
    groups: list[dict]  # `load_state_dict` makes a new list; whoever removes or inserts groups does not
    first: dict | None  # the group that carries the two
    stored: dict[str, int]


_known: WeakKeyDictionary[Optimizer, _Known] = WeakKeyDictionary()


def stored(optimizer: Optimizer) -> dict[str, int]:
    """Return the step number and the seed by their keys, if known."""
    groups, known = optimizer.param_groups, _known.get(optimizer)
    carrier = next((group for group in groups if STEP_KEY in group or SEED_KEY in group), {})
    if known is not None and known.groups is groups:
        moved = not groups or groups[0] is not known.first
        if moved or any(group is known.first for group in groups[1:]):
            return dict(known.stored)
    elif known is not None and not carrier:
        return dict(known.stored)
    return {key: carrier[key] for key in _KEYS if key in carrier}


def keep(optimizer: Optimizer, **new: Any) -> None:
    """Store new values, by their keys, in the first group, with those that are known."""
    now = new if set(_KEYS) <= new.keys() else {**stored(optimizer), **new}
    groups = optimizer.param_groups
    for group in groups[1:]:
        _drop(group)
    if groups:
        groups[0].update(now)
    _known[optimizer] = _Known(groups, groups[0] if groups else None, now)


def forget(optimizer: Optimizer) -> None:
    """Use what the groups carry from here on: a checkpoint was loaded, or this is a copy."""
    _known.pop(optimizer, None)
    if stored(optimizer):
        keep(optimizer)  # so that the group that carries them may go


def remove(optimizer: Optimizer) -> None:
    """Remove the two from the optimizer."""
    _known.pop(optimizer, None)
    for group in optimizer.param_groups:
        _drop(group)


def is_trial() -> bool:
    """Whether torch.distributed.checkpoint runs this step, to make the optimizer create its state.

    Its gradients and learning rates are zero, so it changes nothing and does not count.
    """
    module = sys.modules.get("torch.distributed.checkpoint.state_dict")
    code = getattr(getattr(module, "_init_optim_state", None), "__code__", None)
    frame = sys._getframe() if code is not None else None
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None


def _drop(group: dict) -> None:
    for key in _KEYS:
        group.pop(key, None)
