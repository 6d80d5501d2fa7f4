"""A batch of whole parameters: all of an optimizer that may look across them, or one that is gathered from all ranks.

The optimizer is shown FP32 shadows, real Parameters in `param_groups` with its state re-keyed to them, so that any
optimizer computes in FP32 without knowing. The model's own parameters are never swapped: exchanging `p.data` resets
AccumulateGrad, after which DDP stops synchronising in silence.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from hmpx.errors import HmpxError
from hmpx.updates.holding.segment import Segment
from hmpx.updates.stepping.batch import ShownParameters
from hmpx.updates.stepping.optimizer_classes import by_memory
from hmpx.updates.stepping.shadows import Shadow, seen_state
from hmpx.updates.stepping.shown_state import ShownState
from hmpx.updates.stepping.step_call import DeferredSignals, StepCall, WriteBack

Optimizer = torch.optim.Optimizer


class WholeBatch:
    """One step on shadows. Optimizers that this one holds (Lookahead's base) see the same shadows.

    gathers: the segments are sharded, and the optimizer sees whole parameters, these alone. Every rank computes the
        same, and keeps its part of the result.
    """

    def __init__(self, segments: list[Segment], *, gathers: bool = False) -> None:
        self.segments, self._gathers = segments, gathers
        self._shadows: list[Shadow] = []
        self._states: list[tuple[Shadow, ShownState]] = []
        self._shown = ShownParameters([], [])

    def step(self, call: StepCall, write_back: WriteBack, gradients: list[torch.Tensor]) -> Any:
        """Step the parameters; see `Batch.step`. If that raises, weights, gradients and `state` are as they were.

        State that the step has written to in place cannot be restored.
        """
        on_real = functools.partial(self._on_real_parameters, call.optimizer, write_back.signals)
        try:
            with torch.no_grad():
                self._show(call.optimizer, write_back)
            with self._shown:
                result = call.with_functions(on_real).run()
            with torch.no_grad():
                self._refuse_bypass(call.optimizer)
                for shadow in self._shadows:
                    shadow.hand_back()
                self._write(call.optimizer, write_back)
        except BaseException as error:
            self._shown.hide()  # an interrupt may have come while they were shown or hidden
            for shadow, state in self._states:
                state.undo(shadow.q)
                if state.is_written(call.optimizer):
                    write_back.written.append(shadow.segment.name)
            with torch.no_grad():
                for shadow in self._shadows:
                    shadow.undo()
            if isinstance(error, RuntimeError) and "does not require grad" in str(error):
                raise HmpxError(
                    f"{type(call.optimizer).__name__} differentiates gradients inside step(), and the FP32 "
                    "copies that hmpx hands it have no graph: keep its weights in FP32, without hmpx.attach, or take "
                    "another optimizer"
                ) from error
            raise
        self._shadows, self._states = [], []  # other batches of the step need the memory
        return result

    def _show(self, optimizer: Optimizer, write_back: WriteBack) -> None:
        members = list(_nested(optimizer))
        one_layout = by_memory(*members)
        for segment in self.segments:
            shadow = Shadow(segment, write_back.stores.of(segment), one_layout=one_layout, gathers=self._gathers)
            self._shadows.append(shadow)
        new = {shadow.p: shadow.q for shadow in self._shadows}
        lists = list({id(g["params"]): g["params"] for each in members for g in each.param_groups}.values())
        shown = [[new.get(p, p) for p in params if p in new or not self._gathers] for params in lists]
        self._shown = ShownParameters(lists, shown)
        for member in members:
            for shadow in self._shadows:
                state = ShownState(member, shadow.segment)
                state.shown = seen_state(shadow, state.form, state.own)
                state.keeps_left &= not self._gathers
                self._states.append((shadow, state))
                state.move_to(shadow.q, watched=not self._gathers)

    def _refuse_bypass(self, optimizer: Optimizer) -> None:
        """Raise if the step wrote to the BF16 weights: the optimizer then has a list of parameters of its own."""
        if bypassed := [shadow for shadow in self._shadows if shadow.is_bypassed()]:
            raise HmpxError(
                f"{type(optimizer).__name__} wrote to parameter {bypassed[0].segment.name!r} itself: it "
                "does not take its parameters from param_groups, so hmpx cannot step it in FP32"
            )

    def _write(self, optimizer: Optimizer, write_back: WriteBack) -> None:
        results = [shadow.own_part() for shadow in self._shadows]
        for shadow, x in zip(self._shadows, results, strict=True):
            write_back.written.append(shadow.segment.name)
            shadow.segment.mark_written()
            shadow.store.write(shadow.segment, x, shadow.segment.name, write_back.rounding_key)
        write_back.rounding_key.flush()
        for shadow, state in self._states:
            state.take_from(shadow.q, optimizer, write_back.rounding_key)
        write_back.rounding_key.flush()

    def _on_real_parameters(self, optimizer: Optimizer, signals: DeferredSignals, closure: Callable) -> Callable:
        """Wrap a closure: it evaluates the model, so it must see the real parameters, with the values of the step.

        A signal that comes in it does not wait, unless the step has written to state by then.
        """

        def evaluate(*args: Any, **kwargs: Any) -> Any:
            with torch.no_grad():
                for shadow in self._shadows:
                    shadow.show_trial_point()
            self._shown.hide()
            try:
                with torch.enable_grad():
                    if any(state.is_written(optimizer) for _, state in self._states):
                        return closure(*args, **kwargs)
                    return signals.let_through(closure, args, kwargs)
            finally:
                self._shown.show()
                with torch.no_grad():
                    for shadow in self._shadows:
                        shadow.take_evaluation()

        return evaluate


def _nested(optimizer: Optimizer) -> Iterator[Optimizer]:
    """Yield `optimizer` and every optimizer that it holds in an attribute, directly or in a list."""
    found = [optimizer]
    for member in found:
        yield member
        for value in vars(member).values():
            inner = value if isinstance(value, (list, tuple)) else (value,)
            found += [o for o in inner if isinstance(o, Optimizer) and not any(o is seen for seen in found)]
