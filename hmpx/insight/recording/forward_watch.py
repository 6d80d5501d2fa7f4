"""A `Watch` of forward passes alone: closed in backward passes and in optimizer steps, of which it has nothing to say.

While it is open, torch calls into Python at each op. A step of a small model has ten times as many ops in these as in
its forward pass.
"""

from __future__ import annotations

import functools
import threading
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import _get_current_dispatch_mode

from hmpx.changes import Attribute, Changes
from hmpx.insight.dispatched import Finding, Watch


class ForwardWatch:
    """Watches the forward passes of the thread that enters it."""

    def __init__(self) -> None:
        self._watch = Watch()
        self._changes = Changes()
        self._open = False

    def __enter__(self) -> ForwardWatch:
        self._thread = threading.get_ident()
        self._resume()
        backward = torch.autograd.backward

        @functools.wraps(backward)
        def unwatched(*args: Any, **kwargs: Any) -> None:
            self._pause()
            try:
                backward(*args, **kwargs)
            finally:
                self._resume()

        self._changes.put(Attribute(torch.autograd, "backward", "torch.autograd.backward"), unwatched)
        self._changes.callback(register_optimizer_step_pre_hook(self._before_step).remove)
        self._changes.callback(register_optimizer_step_post_hook(self._after_step).remove)
        return self

    def __exit__(self, *exception: object) -> None:
        self._changes.close()
        if self._open:
            self._open = False
            self._watch.__exit__(*exception)

    def findings(self) -> tuple[Finding, ...]:
        return self._watch.findings()

    def _before_step(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        if len(args) < 2 and not kwargs:  # no closure, in which a forward pass would run
            self._pause()

    def _after_step(self, *_: object) -> None:
        self._resume()

    def _pause(self) -> None:
        """Close it, if it is the innermost mode; a step that raises leaves it so until the next backward pass."""
        if self._open and self._is_here() and _get_current_dispatch_mode() is self._watch:
            self._open = False
            self._watch.__exit__(None, None, None)

    def _resume(self) -> None:
        if not self._open and self._is_here():
            self._watch.__enter__()
            self._open = True

    def _is_here(self) -> bool:
        """Whether this is the thread to watch, and no pass inside a backward one, at whose end torch resets modes."""
        return threading.get_ident() == self._thread and torch._C._current_graph_task_id() == -1
