"""The regions a user writes, `disable_casts` and `enable_casts`: nestable, per thread, exception-safe, decorators."""

from __future__ import annotations

import contextlib
import threading
from contextlib import AbstractContextManager

from hmpx import scope
from hmpx.rounding import check_seed
from hmpx.updates import steps


class _Region(contextlib.ContextDecorator):
    """One object may be entered many times, nested and from several threads: what is open lives with the thread."""

    def __init__(self) -> None:
        self._open = threading.local()

    def _enter(self) -> AbstractContextManager:
        raise NotImplementedError

    def __enter__(self):
        opened = self._enter()
        opened.__enter__()
        self._open.__dict__.setdefault("stack", []).append(opened)
        return self

    def __exit__(self, *exception: object) -> None:
        self._open.stack.pop().__exit__(None, None, None)


class disable_casts(_Region):
    """No casts inside; and an optimizer step inside writes BF16 parameters by stochastic rounding.

    ``with hmpx.disable_casts(): optimizer.step()`` computes the step of any `torch.optim.Optimizer` in FP32, on FP32
    copies of the BF16 parameters and gradients and with FP32 state, and rounds the result into the parameters
    stochastically (`hmpx.stochastic_round`). FP32 parameters get a plain step. Works without `convert()` as well.

    Args:
        seed: of the rounding numbers, in [0, 2^64). None: the one that the optimizer's `state_dict` carries, else 0.
    """

    def __init__(self, *, seed: int | None = None) -> None:
        super().__init__()
        self._how = scope.Rounding(None if seed is None else check_seed(seed))

    @contextlib.contextmanager
    def _enter(self):
        steps.install()
        try:
            with scope.region(casting=False, how=self._how):
                yield
        finally:
            steps.uninstall()


class enable_casts(_Region):
    """Casts on inside a `disable_casts` region, or under ``convert(enabled=False)``; optimizer steps are plain ones."""

    def _enter(self) -> AbstractContextManager:
        return scope.region(casting=True)
