"""What one call of an op would round in BF16, in its forward and in its backward pass."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

import torch

from hmpx import region_state
from hmpx.insight import generators
from hmpx.insight.comparing.calls import Asked
from hmpx.insight.comparing.computing import in_fp32
from hmpx.insight.comparing.difference import Distance
from hmpx.insight.tensors import LOW, Tensor, floating
from hmpx.ops.observing import Seen


class Rounded(NamedTuple):
    """What one call rounds in BF16, in FP32.

    inputs: by position among its floating inputs, of those that are cast: input rounded - input. results: of each,
    BF16 result - FP32 result of the same rounded inputs. nonfinite: values of the results that BF16 does not hold.
    seen: the call in BF16.
    """

    inputs: dict[int, Tensor]
    results: list[Tensor]
    nonfinite: int
    seen: Seen


@contextlib.contextmanager
def redrawing() -> Iterator[Tensor]:
    """The state of torch's generator, that what runs here may set again and again; it is back at the end."""
    state = generators.get_state()
    try:
        yield state
    finally:
        generators.set_state(state)


def rounded(asked: Asked) -> Rounded | None:
    """What a call rounds under the bf16 list; None where that casts nothing."""
    with torch.no_grad(), redrawing() as drawn:
        with region_state.region(True):
            seen = asked.run(*asked.args, **asked.kwargs)
        given, cast = floating((asked.args, asked.kwargs)), floating((seen.args, seen.kwargs))
        if not seen.casting or len(given) != len(cast):
            return None
        inputs = {i: difference(b, a) for i, (a, b) in enumerate(zip(given, cast, strict=True)) if _is_cast(a, b)}
        if not inputs:
            return None
        generators.set_state(drawn)
        exact = floating((in_fp32(asked),))
        generators.set_state(drawn)
        beside = floating((in_fp32(asked.with_arguments(seen.args, seen.kwargs)),))
    whole = Distance()
    for low, other in zip(floating((seen.result,)), exact, strict=False):
        whole.add(low, other)
    results = [difference(a, b) for a, b in zip(floating((seen.result,)), beside, strict=False)]
    return Rounded(inputs, results, whole.nonfinite, seen)


def computed(asked: Asked, cast: Collection[int]) -> tuple[list[Tensor], Any]:
    """The op in FP32; what stands for each of its floating inputs, so that its own gradient can be told from others'.

    cast: positions of inputs whose gradient is asked for even where autograd needs none, if it needs another's and the
        op has one (`cross_entropy` has none for its `weight`).
    """
    tensors = floating((asked.args, asked.kwargs))
    if not torch.is_grad_enabled() or not any(t.requires_grad for t in tensors):
        return tensors, in_fp32(asked)

    def run(more: Collection[int]) -> tuple[list[Tensor], Any]:
        inputs = [
            t.view_as(t) if t.requires_grad else t.detach().requires_grad_() if i in more else t
            for i, t in enumerate(tensors)
        ]
        return inputs, in_fp32(with_inputs(asked, inputs))

    more = [i for i in cast if not tensors[i].requires_grad]
    if not more:
        return run(())
    drawn = generators.get_state()
    try:
        return run(more)
    except RuntimeError:
        more = [i for i in more if _has_gradient(run, i)]
        generators.set_state(drawn)
        return run(more)


def _has_gradient(run: Callable[[Collection[int]], object], i: int) -> bool:
    """Whether an op runs with an input whose gradient is asked for; torch says that it has none by raising."""
    try:
        run((i,))
    except RuntimeError:
        return False
    return True


def moved(asked: Asked, inputs: list[Tensor], i: int, delta: Tensor, results: list[Tensor]) -> list[Tensor]:
    """What the rounding of one input changes in the results; for an op that draws no random numbers."""
    with torch.no_grad(), redrawing():
        beside = [t + delta if k == i else t for k, t in enumerate(inputs)]
        found = floating((in_fp32(with_inputs(asked, beside)),))
    return [difference(a, b) for a, b in zip(found, results, strict=True)]


class Backward:
    """The backward pass of one call: under the bf16 list, and in FP32 on the same rounded inputs.

    positions: of the floating inputs that need a gradient; tensors: these.
    """

    def __init__(self, asked: Asked, rounded: Rounded, drawn: Tensor) -> None:
        tensors = [t.detach() for t in floating((asked.args, asked.kwargs))]
        self.positions = [i for i, t in enumerate(floating((asked.args, asked.kwargs))) if t.requires_grad]
        self.tensors = [tensors[i] for i in self.positions]
        beside = [t + rounded.inputs[i] if i in rounded.inputs else t for i, t in enumerate(tensors)]
        # A checkpoint around the call must not see what is saved here for a backward pass of its own.
        with redrawing(), torch.autograd.graph.saved_tensors_hooks(_itself, _itself):
            generators.set_state(drawn)
            with region_state.region(True):
                low = self._leaves(tensors)
                self._low = low, floating((asked.run(*_arguments(asked, low)[0], **_arguments(asked, low)[1]).result,))
            generators.set_state(drawn)
            exact = self._leaves(beside)
            self._exact = exact, floating((in_fp32(with_inputs(asked, exact)),))

    def _leaves(self, tensors: list[Tensor]) -> list[Tensor]:
        return [t.detach().requires_grad_() if i in self.positions else t for i, t in enumerate(tensors)]

    def roundings(self, result: int, gradient: Tensor) -> Iterator[tuple[int, Tensor, Tensor, bool]]:
        """Of a gradient of one result: position and value of an input, how its gradient is rounded, if it is finite."""
        pairs = zip(*(self._gradients(*each, result, gradient) for each in (self._low, self._exact)), strict=True)
        for i, t, (low, exact) in zip(self.positions, self.tensors, pairs, strict=True):
            if low is not None and exact is not None:
                yield i, t, difference(low, exact), bool(torch.isfinite(low).all())

    def _gradients(
        self, inputs: list[Tensor], results: list[Tensor], which: int, gradient: Tensor
    ) -> tuple[Tensor | None, ...]:
        result, wanted = results[which], [inputs[i] for i in self.positions]
        if not result.requires_grad:
            return (None,) * len(wanted)
        gradient = gradient.bfloat16().to(result.dtype)
        return torch.autograd.grad(result, wanted, gradient, retain_graph=len(results) > 1, allow_unused=True)


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def difference(low: Tensor, exact: Tensor) -> Tensor:
    """In FP32, with zeros where it is not finite."""
    with torch.no_grad():
        return Distance().add(low, exact)


def dot(a: Tensor, b: Tensor) -> Tensor:
    """The sum of products, of no dimension, on the device."""
    return torch.dot(a.detach().float().reshape(-1), b.detach().float().reshape(-1))


def _is_cast(given: Tensor, seen: Tensor) -> bool:
    return seen.dtype in LOW and given.dtype not in LOW


def with_inputs(asked: Asked, inputs: list[Tensor]) -> Asked:
    """A call with other floating inputs, one after another."""
    return asked.with_arguments(*_arguments(asked, inputs))


def _arguments(asked: Asked, inputs: list[Tensor]) -> tuple[tuple, dict]:
    rest = iter(inputs)
    return _replaced(asked.args, rest), _replaced(asked.kwargs, rest)


def _replaced(value: Any, tensors: Iterator[Tensor]) -> Any:
    """`value` with its floating tensors replaced, one after another, in lists, tuples and dicts too."""
    if isinstance(value, Tensor):
        return next(tensors) if value.dtype.is_floating_point else value
    if isinstance(value, list | tuple):
        items = [_replaced(item, tensors) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if type(value) is dict:
        return {key: _replaced(item, tensors) for key, item in value.items()}
    return value
