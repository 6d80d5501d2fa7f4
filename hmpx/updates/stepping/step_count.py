"""The step number and the seed of an optimizer, from which the rounding key is made.

They are stored in ``param_groups[0]``, where `state_dict`, pickle and copies carry them and plain torch keeps them.
They belong to the optimizer, though: a user may remove groups, insert one in front, or replace one.

An optimizer that begins goes on from the last number of its parameters: whoever makes a new one in each round or epoch
would otherwise round the same weights by the same random numbers in every round, and their errors would add up.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.optim import Optimizer

from hmpx.errors import HmpxError
from hmpx.version import __version__

STEP_KEY, SEED_KEY = "hmpx_step", "hmpx_seed"
VERSION_KEY = "hmpx_version"  # beside them: the version that has taken the last step; versions up to 0.2 did not say it
_KEYS = (STEP_KEY, SEED_KEY)
_MOVED = (*_KEYS, VERSION_KEY)
_trial = threading.local()  # runs: whether a trial step is running in this thread

# By optimizer: its list of groups at that time, the group that has number, seed and version, and these by their keys.
# `load_state_dict` makes a new list; whoever removes or inserts groups does not. ZeRO-1 writes what it loads into the
# groups that are there.
_known: WeakKeyDictionary[Optimizer, tuple[list[dict], dict | None, dict[str, Any]]] = WeakKeyDictionary()

NEXT_KEY = "_hmpx_next_step"  # of a parameter: the number of its next step, in a list that its last optimizer writes to


def stored(optimizer: Optimizer) -> dict[str, Any]:
    """Return the step number, the seed and the version by their keys, if known."""
    groups, known = optimizer.param_groups, _known.get(optimizer)
    carrier = next((group for group in groups if STEP_KEY in group or SEED_KEY in group), {})
    if known is not None:
        own_groups, own_carrier, values = known
        if not carrier or (own_groups is groups and carrier is not own_carrier):
            return dict(values)
    return {key: carrier[key] for key in _MOVED if key in carrier}


def keep(optimizer: Optimizer, **new: Any) -> None:
    """Store new values, by their keys, in the first group, with those that are known."""
    version = {VERSION_KEY: __version__} if STEP_KEY in new else {}
    now = {**({} if set(_KEYS) <= new.keys() else stored(optimizer)), **version, **new}
    groups = optimizer.param_groups
    for group in groups[1:]:
        _drop(group)
    if groups:
        groups[0].update(now)
    _known[optimizer] = groups, groups[0] if groups else None, now


def first_of(params: Iterable[torch.Tensor]) -> int:
    """Return the number of the first step of a new optimizer: one by which none of these parameters was rounded."""
    return max([vars(p).get(NEXT_KEY, (0,))[0] for p in params], default=0)


def follow(params: Iterable[torch.Tensor], number: list[int]) -> None:
    """From here on, the next step of these parameters has the number in this list."""
    for p in params:
        vars(p)[NEXT_KEY] = number


def follows(param: torch.Tensor, number: list[int]) -> bool:
    """Return whether the next step of this parameter has the number in this list."""
    return vars(param).get(NEXT_KEY) is number


def swapped(*tensors: torch.Tensor) -> None:
    """`torch.utils.swap_tensors` has exchanged the attributes of two tensors: each has its own number again."""
    found = [vars(each).pop(NEXT_KEY, None) for each in tensors]
    for each, number in zip(tensors, reversed(found), strict=True):
        if number is not None:
            vars(each)[NEXT_KEY] = number


def is_of_before(optimizer: Optimizer) -> bool:
    """Return whether version 0.2 or one before has taken the last step: a checkpoint of it was loaded."""
    stepped = [group for group in optimizer.param_groups if group.get(STEP_KEY)]
    return bool(stepped) and VERSION_KEY not in stepped[0]


def forget(optimizer: Optimizer) -> None:
    """Use the values in the groups from here on: a checkpoint was loaded, or this is a copy."""
    _known.pop(optimizer, None)
    known = stored(optimizer)
    if known:
        keep(optimizer)  # so that the group that carries them may go
    follow([p for group in optimizer.param_groups for p in group["params"]], [known.get(STEP_KEY, 0)])


def remove(optimizer: Optimizer) -> None:
    """Remove both from the optimizer."""
    _known.pop(optimizer, None)
    for group in optimizer.param_groups:
        _drop(group)


def check(groups: Iterable[Mapping[str, Any]], whose: str = "param_groups'", rest: str = "no step was taken") -> None:
    """Check step number and seed in groups, to which a user may write, or in those of a checkpoint.

    Raises:
        HmpxError: one is no integer in [0, 2^64).
    """
    for group in groups:
        for key in _KEYS:
            value = group.get(key, 0)
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**64:
                raise HmpxError(f"{whose} {key!r} is {value!r}, not an integer in [0, 2^64); {rest}")


@contextlib.contextmanager
def trial() -> Iterator[None]:
    """Steps inside, whose gradients and learning rates are zero, change nothing and do not count."""
    before, _trial.runs = is_trial(), True
    try:
        yield
    finally:
        _trial.runs = before


def is_trial() -> bool:
    """Return whether this step is inside of `trial`."""
    return getattr(_trial, "runs", False)


def _drop(group: dict) -> None:
    for key in _MOVED:
        group.pop(key, None)
