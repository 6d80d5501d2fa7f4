"""One step on its way through hmpx: the call itself, and how results are written back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from hmpx.updates.holding.rounding_key import Deferred, RoundingKey
from hmpx.updates.holding.stores import Stores
from hmpx.updates.stepping.update_counts import UpdateCounts
from hmpx.updates.stepping.write_counts import counted_writes


@dataclass(frozen=True, eq=False)
class StepCall:
    """A call of an optimizer's own `step`, or of another method that rewrites weights.

    Attributes:
        method: the function of the optimizer's class.
        seed: the one that the `disable_casts` region was given, if any.
    """

    optimizer: torch.optim.Optimizer
    method: Callable
    args: tuple = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None

    def run(self) -> Any:
        """Call the method."""
        with counted_writes():
            return self.method(self.optimizer, *self.args, **self.kwargs)

    @property
    def closure(self) -> Callable | None:
        """The closure, where the method is `step` with torch's signature."""
        return self.args[0] if self.args else self.kwargs.get("closure")

    def without_arguments(self) -> StepCall:
        """The same step for one part of the parameters, after the closure was called."""
        return replace(self, args=(), kwargs={}) if self.args or self.kwargs else self

    def with_functions(self, wrap: Callable[[Callable], Callable]) -> StepCall:
        """The same call with its closure, and any other function of the user, replaced by ``wrap(function)``.

        A module is callable, and is left alone: some optimizers look for parameters in it.
        """

        def wrapped(key: str | None, value: Any) -> Any:
            is_function = callable(value) and (key == "closure" or not isinstance(value, (torch.nn.Module, type)))
            return wrap(value) if is_function else value

        if not self.args and not self.kwargs:
            return self
        args = tuple(wrapped(None, value) for value in self.args)
        return replace(self, args=args, kwargs={key: wrapped(key, value) for key, value in self.kwargs.items()})


@dataclass(frozen=True, eq=False)
class WriteBack:
    """How one step writes weights and state.

    Attributes:
        counts: what counts the updates, where somebody watches them.
    """

    stores: Stores
    rounding_key: RoundingKey
    counts: UpdateCounts | None = None

    def deferred(self) -> WriteBack:
        """The same, with roundings put off until `rounding_key.flush()`."""
        return replace(self, rounding_key=Deferred(self.rounding_key.seed, self.rounding_key.step))
