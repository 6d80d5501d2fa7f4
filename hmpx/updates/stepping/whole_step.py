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
from hmpx.rounding.xla import is_lazy
from hmpx.updates.holding.segment import Segment
from hmpx.updates.ranks.sharding import local
from hmpx.updates.stepping.optimizer_scope import by_memory
from hmpx.updates.stepping.shadows import ShadowGradients, ShadowState
from hmpx.updates.stepping.step_call import DeferredSignals, StepCall, WriteBack, mark_incomplete
from hmpx.updates.stepping.update_counts import OldValues, before_step

Parameter = torch.nn.Parameter
Optimizer = torch.optim.Optimizer


class WholeStep:
    """One step on shadows. Optimizers that this one holds (Lookahead's base) see the same shadows."""

    def __init__(self, call: StepCall, segments: list[Segment], write_back: WriteBack) -> None:
        self._call, self._write_back, self._stores = call, write_back, write_back.stores
        self._looks: list[OldValues] = []  # while updates are watched
        self._members = list(_nested(call.optimizer))
        self._lists = list({id(g["params"]): g["params"] for o in self._members for g in o.param_groups}.values())
        self._segments = {segment.param: segment for segment in segments}
        self._by_memory = by_memory(*self._members)
        self._shadow: dict[Parameter, Parameter] = {}
        self._states: list[ShadowState] = []
        self._grads = ShadowGradients(self._by_memory)
        self._before: dict[Parameter, torch.Tensor] = {}  # weights that trial points of a closure overwrite
        self._seen: dict[Parameter, tuple[int, torch.Tensor]] = {}  # weights, which nothing but a closure may change

    def run(self, signals: DeferredSignals) -> Any:
        """Step; if that raises, parameters, gradients, `param_groups` and `state` are as they were.

        State that the step has written to in place cannot be restored: then the optimizer is marked incomplete.
        """
        rounding_key = self._write_back.rounding_key
        try:
            with torch.no_grad():
                self._show_shadows()
            result = self._call.with_functions(self._on_real_parameters).run()
            with torch.no_grad():
                self._refuse_bypass()
                for p, q in self._shadow.items():
                    self._grads.hand_back(p, q)
            signals.begin()
        except BaseException as error:
            signals.begin()
            self._replace({q: p for p, q in self._shadow.items()})
            moved = [name for state in self._states if (name := state.undo()) is not None]
            if moved:
                mark_incomplete(self._members[0], rounding_key.step, moved, error)
            with torch.no_grad():
                self._grads.undo()
                for p, before in self._before.items():
                    p.copy_(before)
            if isinstance(error, RuntimeError) and "does not require grad" in str(error):
                raise HmpxError(
                    f"{type(self._members[0]).__name__} differentiates gradients inside step(), and the FP32 copies "
                    "that hmpx hands it have no graph: keep its weights in FP32, without hmpx.attach, or take another "
                    "optimizer"
                ) from error
            raise
        self._replace({q: p for p, q in self._shadow.items()})
        written: list[str] = []
        try:
            with torch.no_grad():
                for p, q in self._shadow.items():
                    written.append(self._segments[p].name)
                    self._segments[p].mark_written()
                    store = self._stores.of(self._segments[p])
                    store.write(self._segments[p], local(q.detach()), written[-1], rounding_key)
                for look in self._looks:
                    assert self._write_back.counts is not None
                    self._write_back.counts.compare(look, local(self._shadow[look.segment.param].detach()))
                for state in self._states:
                    state.finish()
        except BaseException as error:
            mark_incomplete(self._members[0], rounding_key.step, written, error)
            raise
        return result

    def _show_shadows(self) -> None:
        for p, segment in self._segments.items():
            weight = torch.empty_like(p, dtype=torch.float32, requires_grad=False)
            self._stores.of(segment).begin()
            self._stores.of(segment).read(segment, local(weight))
            if self._write_back.counts is not None:
                self._looks.append(before_step(segment, local(weight)))
            self._shadow[p] = q = Parameter(weight, requires_grad=p.requires_grad)
            for mark, value in vars(p).items():  # that an optimizer may look for, such as a weight-decay flag
                vars(q).setdefault(mark, value)  # not the attributes of a DTensor, which `q` has
            self._grads.show(p, q)
            self._seen[p] = p._version, p.detach().clone()
        self._replace(self._shadow)
        key = self._write_back.rounding_key
        for member in self._members:
            for p, q in self._shadow.items():
                self._states.append(ShadowState(member, self._segments[p], q, key, self._by_memory))
                self._states[-1].show()

    def _refuse_bypass(self) -> None:
        """Raise if the step wrote to the BF16 weights: the optimizer then has a list of parameters of its own."""
        written = [p for p, seen in self._seen.items() if _is_written(p, *seen)]
        for p in written:
            self._before.setdefault(p, self._seen[p][1])
        if written:
            raise HmpxError(
                f"{type(self._members[0]).__name__} wrote to parameter {self._segments[written[0]].name!r} itself: it "
                "does not take its parameters from param_groups, so hmpx cannot step it in FP32"
            )

    def _replace(self, new: dict[Parameter, Parameter]) -> None:
        for params in self._lists:
            params[:] = [new.get(p, p) for p in params]

    def _is_moved(self, p: Parameter, q: Parameter) -> bool:
        """Whether the step has changed the weights since it got them."""
        shown = torch.empty_like(q, requires_grad=False)
        self._stores.of(self._segments[p]).read(self._segments[p], local(shown))
        return is_lazy(q) or not torch.equal(local(shown), local(q.detach()))

    def _on_real_parameters(self, closure: Callable) -> Callable:
        """Wrap a closure: it evaluates the model, so it must see the real parameters, with the values of the step."""

        def evaluate(*args: Any, **kwargs: Any) -> Any:
            with torch.no_grad():
                for p, q in self._shadow.items():
                    self._grads.hand_back(p, q)
                    self._grads.keep(p)
                    if p in self._before or self._is_moved(p, q):
                        self._before.setdefault(p, p.clone())
                        p.copy_(q)  # rounded to nearest; the shadow keeps the exact values
            self._replace({q: p for p, q in self._shadow.items()})
            try:
                with torch.enable_grad():
                    return closure(*args, **kwargs)
            finally:
                self._replace(self._shadow)
                with torch.no_grad():
                    for p, q in self._shadow.items():
                        self._grads.show(p, q)
                        if _is_written(p, *self._seen[p]):
                            self._seen[p] = p._version, p.detach().clone()

        return evaluate


def _is_written(p: Parameter, version: int, seen: torch.Tensor) -> bool:
    if p._version != version or is_lazy(p):
        return p._version != version
    return not torch.equal(local(p.detach()).view(torch.int16), local(seen).view(torch.int16))


def _nested(optimizer: Optimizer) -> Iterator[Optimizer]:
    """`optimizer` and every optimizer that it holds in an attribute, directly or in a list."""
    found = [optimizer]
    for member in found:
        yield member
        for value in vars(member).values():
            inner = value if isinstance(value, (list, tuple)) else (value,)
            found += [o for o in inner if isinstance(o, Optimizer) and not any(o is seen for seen in found)]
