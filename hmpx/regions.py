"""The regions a user writes: nestable, per thread and task, exception-safe, decorators.

One object may be entered many times, nested and from several threads: what is open is kept by context in
`region_state`, and by thread in `weight_cache`. torch.compile traces through this code, so it is kept plain.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch

from hmpx.base import region_state, run_in_region
from hmpx.base.compiling import ask_once, never_compile_alone
from hmpx.base.process_state import casts_regions
from hmpx.errors import HmpxError
from hmpx.ops.overlays import overlay_by_hand, scope_inside
from hmpx.ops.policies.fp8_format import Format
from hmpx.ops.wrapping import weight_cache
from hmpx.ops.wrapping.callers import runs_later
from hmpx.ops.wrapping.observing import say_beats_island
from hmpx.rounding.stochastic import check_seed
from hmpx.updates import step_hooks

Function = TypeVar("Function", bound=Callable[..., Any])
_UNSEEDED = region_state.StochasticSteps()


class _Decorator(contextlib.ContextDecorator):
    """A context manager that also decorates functions, but not generators or coroutines."""

    def __call__(self, func: Function) -> Function:
        if runs_later(func):
            name = next(cls.__name__ for cls in type(self).__mro__ if not cls.__name__.startswith("_"))
            raise HmpxError(
                f"{name} over a generator or coroutine function, whose body runs after the call: use it inside"
            )
        return super().__call__(func)


class _Region(_Decorator, run_in_region.Opener):
    """A context manager, and a decorator with and without parentheses."""

    def __new__(cls, function: Callable | None = None, /, **how: Any) -> Any:
        if function is None:
            return super().__new__(cls)
        if not callable(function):
            seed = f"; a seed is given by its name: seed={function!r}" if cls is disable_casts else ""
            raise HmpxError(f"{cls.__name__}({function!r}) is over no function{seed}")
        return cls(**how)(function)

    def __init__(self) -> None:  # so that an argument too many is an error
        pass

    def _recreate_cm(self) -> Any:  # of ContextDecorator: torch.compile wants one made inside the function
        return type(self)()


class disable_casts(_Region):
    """Turn casts off inside, and round the BF16 parameters of optimizer steps inside stochastically.

    ``with hmpx.disable_casts(): optimizer.step()`` computes the step of any `torch.optim.Optimizer` in FP32: on FP32
    copies of the BF16 parameters and gradients, with FP32 state. It then rounds the result into the parameters
    stochastically (`hmpx.stochastic_round`). FP32 parameters get a plain step. This works without `convert()` too. The
    arithmetic is that of ``hmpx.attach(optimizer)``, which says where it is hmpx's own and where the optimizer's. An
    attached optimizer steps as it was attached.

    Args:
        seed: of the rounding numbers, in [0, 2^64). None: the one that the optimizer's `state_dict` carries, else 0.

    Example:
        >>> model = torch.nn.Linear(4, 4).bfloat16()
        >>> optimizer = torch.optim.AdamW(model.named_parameters())
        >>> model(inputs.bfloat16()).sum().backward()
        >>> with hmpx.disable_casts():
        ...     optimizer.step()
        >>> model.weight.dtype, optimizer.state[model.weight]["exp_avg"].dtype
        (torch.bfloat16, torch.float32)
    """

    def __init__(self, *, seed: int | None = None) -> None:
        self._how = _UNSEEDED if seed is None else region_state.StochasticSteps(check_seed(seed))

    def _recreate_cm(self) -> disable_casts:
        return disable_casts(seed=self._how.seed)

    def __enter__(self) -> disable_casts:
        _install()
        self._enter_region(False, self._how)
        return self


def _say(region: str) -> None:
    if not torch.compiler.is_dynamo_compiling() and region_state.innermost().island:
        say_beats_island(f"hmpx.{region}", sys._getframe(2))


class enable_casts(_Region):
    """Turn casts on, inside a `disable_casts` region or under ``convert(enabled=False)``; optimizer steps are plain.

    Example:
        >>> handle = hmpx.convert(enabled=False)
        >>> with hmpx.enable_casts():
        ...     model(inputs).dtype
        torch.bfloat16
        >>> model(inputs).dtype
        torch.float32
    """

    def __enter__(self) -> enable_casts:
        _say("enable_casts()")
        self._enter_region(True)
        return self


class casts(_Decorator, run_in_region.Opener):
    """Cast by other lists inside. The region nests, holds for one thread, ends on exceptions, and also decorates.

    The lists lie over those that hold around the region: they change the ops that they name and leave the others.
    Casts are on inside, in `disable_casts()` and under ``convert(enabled=False)`` too. Without `convert()`, nothing
    happens. For new lists the conversion builds more wrappers, which takes a part of a second: make the region before
    a loop, not in it.

    Args:
        rule, bf16, fp32, promote, fp8, low_precision, fp8_format: as of `hmpx.policy_for`.

    Raises:
        HmpxError, UnknownOpError, OpListError: as `hmpx.policy_for`.

    Example:
        >>> with hmpx.convert(), hmpx.casts(fp32=["linear"]):
        ...     model(inputs).dtype
        torch.float32
    """

    def __init__(
        self,
        rule: torch.dtype | str | Mapping[str, Any] | None = None,
        /,
        *,
        bf16: Iterable[str] | None = None,
        fp32: Iterable[str] | None = None,
        promote: Iterable[str] | None = None,
        fp8: Iterable[str] | None = None,
        low_precision: torch.dtype | str | None = None,
        fp8_format: Format | str | Mapping[str, Any] | None = None,
    ) -> None:
        self._overlay = _overlay(rule, bf16, fp32, promote, fp8, low_precision, fp8_format)
        if not torch.compiler.is_dynamo_compiling():
            casts_regions[self] = self._overlay

    def _recreate_cm(self) -> casts:  # of ContextDecorator: torch.compile wants one made inside the function
        return _CastsAgain(self._overlay)

    def __enter__(self) -> casts:
        _say("casts()")
        self._enter_region(True, None, scope_inside(region_state.scope(), self._overlay))
        return self


class _CastsAgain(casts):
    """The region of one call of a decorated function."""

    def __init__(self, overlay: int) -> None:
        self._overlay = overlay


def _overlay(rule: Any, *said: Any) -> int:
    """Return the number of the overlay for the arguments of a `casts` region."""
    number = overlay_by_hand("casts", rule, said, sys._getframe(2)).number
    scope_inside(0, number)
    return number


def _install() -> bool:
    step_hooks.install()
    return True


ask_once(_overlay)
ask_once(_install)


class cached_weights(_Region):
    """Cast each weight once, for inference: ops get the cast that was kept, until the region ends.

    The results have the same bits. The region keeps casts of `torch.nn.Parameter`s, one for each dtype that the lists
    ask for. A BF16 cast takes two bytes a parameter, or four if FP32 kernels compute with it (``kernels=``).

    A cast is made again after a write to the weight: by an in-place op, `load_state_dict`, `.data`, `numpy()`,
    `data_ptr()`, DLPack, an optimizer step, a collective. It is made in every call where a write could not be noticed:
    for a weight that needs a gradient while gradients are on, that was made in inference mode, or whose storage
    something else holds too, as another process does. The logger "hmpx" warns once for each such reason. A write
    through an address or a NumPy array from before the cast cannot be noticed; call `clear()` after one.

    The region nests, holds for one thread, ends on exceptions, and also decorates. Compiled code makes its own casts.
    Without `convert()`, nothing happens.

    Example:
        >>> with torch.no_grad(), hmpx.convert(), hmpx.cached_weights() as cache:
        ...     out = model(inputs), model(inputs)
        ...     print(cache)
        <hmpx.cached_weights: 2 casts, 0.0 MiB>
    """

    def __enter__(self) -> cached_weights:
        if not torch.compiler.is_dynamo_compiling():
            step_hooks.install()
            weight_cache.open_cache()
        return self

    def __exit__(self, *exception: object) -> None:
        if not torch.compiler.is_dynamo_compiling():
            weight_cache.close_cache()

    @staticmethod
    def clear() -> None:
        """Forget every cast of this thread; the next call makes it again."""
        cache = weight_cache.current()
        if cache is not None:
            cache.clear()

    def __repr__(self) -> str:
        cache = weight_cache.current()
        if cache is None:
            return "<hmpx.cached_weights, closed>"
        size = cache.nbytes / 2**20
        refused = "".join(f"; {count} casts made anew: {reason}" for reason, count in cache.refused.items())
        return f"<hmpx.cached_weights: {len(cache.casts)} casts, {size:.1f} MiB{refused}>"


never_compile_alone(
    *(region_state.enter, region_state.leave, run_in_region.run_in, run_in_region.run_uncast),
    *(run_in_region.Opener._enter_region, run_in_region.Opener._leave_region, run_in_region.Opener.__exit__),
    *(run_in_region.run_at, disable_casts.__enter__, enable_casts.__enter__, casts.__enter__),
)
