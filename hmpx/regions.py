"""The regions a user writes, `disable_casts` and `enable_casts`: nestable, per thread, exception-safe, decorators.

One object may be entered many times, nested and from several threads: what is open lives with the thread, in `scope`.
Plain enough for torch.compile to trace through.
"""

from __future__ import annotations

import contextlib

import torch

from hmpx import compiling, scope
from hmpx.rounding import check_seed
from hmpx.updates import steps

_UNSEEDED = scope.Rounding()


class disable_casts(contextlib.ContextDecorator):
    """No casts inside; and an optimizer step inside writes BF16 parameters by stochastic rounding.

    ``with hmpx.disable_casts(): optimizer.step()`` computes the step of any `torch.optim.Optimizer` in FP32, on FP32
    copies of the BF16 parameters and gradients and with FP32 state, and rounds the result into the parameters
    stochastically (`hmpx.stochastic_round`). FP32 parameters get a plain step. Works without `convert()` as well. An
    attached optimizer (`hmpx.attach`) goes on as it was attached.

    Args:
        seed: of the rounding numbers, in [0, 2^64). None: the one that the optimizer's `state_dict` carries, else 0.
    """

    def __init__(self, *, seed: int | None = None) -> None:
        self._how = _UNSEEDED if seed is None else scope.Rounding(check_seed(seed))

    def _recreate_cm(self) -> disable_casts:  # of ContextDecorator: torch.compile wants one made inside the function
        return disable_casts(seed=self._how.seed)

    def __enter__(self) -> disable_casts:
        if torch.compiler.is_dynamo_compiling():
            from torch._dynamo.comptime import comptime

            comptime(steps.install_for_graphs)
        else:
            steps.install()
        scope.enter(False, self._how)
        return self

    def __exit__(self, *exception: object) -> None:
        scope.leave()
        if not torch.compiler.is_dynamo_compiling():
            steps.uninstall()


class enable_casts(contextlib.ContextDecorator):
    """Casts on inside a `disable_casts` region, or under ``convert(enabled=False)``; optimizer steps are plain ones."""

    def _recreate_cm(self) -> enable_casts:
        return enable_casts()

    def __enter__(self) -> enable_casts:
        scope.enter(True)
        return self

    def __exit__(self, *exception: object) -> None:
        scope.leave()


compiling.never_compile_alone(
    *(scope.enter, scope.leave, scope.run_uncast),
    *(disable_casts.__enter__, disable_casts.__exit__, enable_casts.__enter__, enable_casts.__exit__),
)
