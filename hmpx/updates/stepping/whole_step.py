"""Steps an optimizer that may look across parameters, on FP32 shadows of all of them.

The shadows are real Parameters put into `param_groups` in place, with the optimizer's state re-keyed to them, so that
any optimizer computes in FP32 without knowing. The model's own parameters are never swapped: exchanging `p.data` resets
AccumulateGrad, after which DDP stops synchronising in silence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from hmpx.errors import HmpxError
from hmpx.updates.holding.segment import Segment
from hmpx.updates.ranks.sharding import local
from hmpx.updates.stepping.optimizer_scope import by_memory
from hmpx.updates.stepping.shadows import Shadow, ShadowState
from hmpx.updates.stepping.step_call import DeferredSignals, StepCall, WriteBack, mark_incomplete
from hmpx.updates.stepping.update_counts import OldValues, before_step

Optimizer = torch.optim.Optimizer


class WholeStep:
    """One step on shadows. Optimizers that this one holds (Lookahead's base) see the same shadows."""

    def __init__(self, call: StepCall, segments: list[Segment], write_back: WriteBack) -> None:
        self._call, self._segments, self._write_back = call, segments, write_back
        self._members = list(_nested(call.optimizer))
        self._lists = list({id(g["params"]): g["params"] for o in self._members for g in o.param_groups}.values())
        self._shadows: list[Shadow] = []
        self._states: list[ShadowState] = []
        self._old: list[OldValues] = []  # while updates are watched

    def run(self, signals: DeferredSignals) -> Any:
        """Step; if that raises, parameters, gradients, `param_groups` and `state` are as they were.

        State that the step has written to in place cannot be restored: then the optimizer is marked incomplete.
        """
        try:
            with torch.no_grad():
                self._show_shadows()
            result = self._call.with_functions(self._on_real_parameters).run()
            with torch.no_grad():
                self._refuse_bypass()
                for shadow in self._shadows:
                    shadow.hand_back()
            signals.begin()
        except BaseException as error:
            signals.begin()
            self._put_back(error)
            if isinstance(error, RuntimeError) and "does not require grad" in str(error):
                raise HmpxError(
                    f"{type(self._call.optimizer).__name__} differentiates gradients inside step(), and the FP32 "
                    "copies that hmpx hands it have no graph: keep its weights in FP32, without hmpx.attach, or take "
                    "another optimizer"
                ) from error
            raise
        self._swap(to_shadows=False)
        written: list[str] = []
        try:
            with torch.no_grad():
                self._write(written)
        except BaseException as error:
            mark_incomplete(self._call.optimizer, self._write_back.rounding_key.step, written, error)
            raise
        return result

    def _show_shadows(self) -> None:
        one_layout, key = by_memory(*self._members), self._write_back.rounding_key
        for segment in self._segments:
            shadow = Shadow(segment, self._write_back.stores.of(segment), one_layout=one_layout)
            self._shadows.append(shadow)
            if self._write_back.counts is not None:
                self._old.append(before_step(segment, local(shadow.q.detach())))
        self._swap(to_shadows=True)
        for member in self._members:
            for shadow in self._shadows:
                self._states.append(ShadowState(member, shadow.segment, shadow.q, key, one_layout))
                self._states[-1].show()

    def _refuse_bypass(self) -> None:
        """Raise if the step wrote to the BF16 weights: the optimizer then has a list of parameters of its own."""
        if bypassed := [shadow for shadow in self._shadows if shadow.is_bypassed()]:
            raise HmpxError(
                f"{type(self._call.optimizer).__name__} wrote to parameter {bypassed[0].segment.name!r} itself: it "
                "does not take its parameters from param_groups, so hmpx cannot step it in FP32"
            )

    def _swap(self, *, to_shadows: bool) -> None:
        new = {s.p: s.q for s in self._shadows} if to_shadows else {s.q: s.p for s in self._shadows}
        for params in self._lists:
            params[:] = [new.get(p, p) for p in params]

    def _put_back(self, error: BaseException) -> None:
        self._swap(to_shadows=False)
        moved = [name for state in self._states if (name := state.undo()) is not None]
        if moved:
            mark_incomplete(self._call.optimizer, self._write_back.rounding_key.step, moved, error)
        with torch.no_grad():
            for shadow in self._shadows:
                shadow.undo()

    def _write(self, written: list[str]) -> None:
        """Write weights and state back. `written` gets the names of parameters that have begun to change."""
        results = [local(shadow.q.detach()) for shadow in self._shadows]
        for shadow, x in zip(self._shadows, results, strict=True):
            written.append(shadow.segment.name)
            shadow.segment.mark_written()
            shadow.store.write(shadow.segment, x, written[-1], self._write_back.rounding_key)
        for old, x in zip(self._old, results, strict=False):
            assert self._write_back.counts is not None
            self._write_back.counts.compare(old, x)
        for state in self._states:
            state.finish()

    def _on_real_parameters(self, closure: Callable) -> Callable:
        """Wrap a closure: it evaluates the model, so it must see the real parameters, with the values of the step."""

        def evaluate(*args: Any, **kwargs: Any) -> Any:
            with torch.no_grad():
                for shadow in self._shadows:
                    shadow.show_trial_point()
            self._swap(to_shadows=False)
            try:
                with torch.enable_grad():
                    return closure(*args, **kwargs)
            finally:
                self._swap(to_shadows=True)
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
