"""Copies and pickles of an attached optimizer are attached in the same way.

The class of an attachment comes from the attachment itself, which imports this file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from hmpx.updates.holding.stores import Stores
from hmpx.updates.optimizer_hooks import ATTRIBUTE, attachment_of
from hmpx.updates.stepping import step_count


def attach_copy(optimizer: Optimizer, original: Any) -> Any:
    """Attach a copy that has every attribute of `original`; return the copy's own attachment."""
    for name in (ATTRIBUTE, *original._added):
        vars(optimizer).pop(name, None)
    attachment = type(original)(optimizer, original.settings, original.names, original.places)
    attachment.install()
    return attachment


def reduce(reference: Callable[[], Any], protocol: int) -> tuple:
    """Reduce an attached optimizer for copies and pickles; torch's own would keep state, groups and defaults alone."""
    optimizer = reference()
    attachment = attachment_of(optimizer)
    attachment.cast_state_along()
    if step_count.stored(optimizer):
        step_count.keep(optimizer)
    added = {ATTRIBUTE, *attachment._added}
    state = {key: value for key, value in optimizer.__getstate__().items() if key not in added}
    stated, stores = (attachment.settings, attachment.names, attachment.places), attachment._updates.stores
    return _rebuild, (type(attachment), type(optimizer), state, stated, stores)


def _rebuild(kind: type, cls: type[Optimizer], state: dict, stated: tuple, stores: Stores) -> Optimizer:
    optimizer = cls.__new__(cls)
    optimizer.__setstate__(state)
    step_count.forget(optimizer)
    attachment = kind(optimizer, *stated)
    attachment._updates.stores = stores
    attachment.install()
    return optimizer
