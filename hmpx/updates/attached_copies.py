"""Copies and pickles of an attached optimizer are attached, as it is.

The class of an attachment comes from the attachment itself, which imports this file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from hmpx.updates import step_count
from hmpx.updates.optimizer_hooks import ATTRIBUTE, attachment_of
from hmpx.updates.settings import Settings
from hmpx.updates.stores import Stores


def attach_copy(optimizer: Optimizer, original: Any) -> Any:
    """Attach a copy that took every attribute along, `original` too; its own attachment."""
    for name in (ATTRIBUTE, *original._added):
        vars(optimizer).pop(name, None)
    attachment = type(original)(optimizer, original.settings, original.names)
    attachment.install()
    return attachment


def reduce(reference: Callable[[], Any], protocol: int) -> tuple:
    """An attached optimizer's `__reduce_ex__`; torch's own would hold state, groups and defaults alone."""
    optimizer = reference()
    attachment = attachment_of(optimizer)
    attachment.cast_state_along()
    if step_count.stored(optimizer):
        step_count.keep(optimizer)
    added = {ATTRIBUTE, *attachment._added}
    state = {key: value for key, value in optimizer.__getstate__().items() if key not in added}
    settings, names, stores = attachment.settings, attachment.names, attachment._updates.stores
    return _rebuild, (type(attachment), type(optimizer), state, settings, names, stores)


def _rebuild(
    kind: type, cls: type[Optimizer], state: dict, settings: Settings, names: dict, stores: Stores
) -> Optimizer:
    optimizer = cls.__new__(cls)
    optimizer.__setstate__(state)
    step_count.forget(optimizer)
    attachment = kind(optimizer, settings, names)
    attachment._updates.stores = stores
    attachment.install()
    return optimizer
