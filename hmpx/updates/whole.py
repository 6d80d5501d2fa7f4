"""A step of an optimizer that may look across parameters: FP32 shadows of all of them, for the length of the step.

The shadows are real Parameters put into `param_groups` in place, with the optimizer's state re-keyed to them, so that
any optimizer computes in FP32 without knowing. The model's own parameters are never swapped: exchanging `p.data` resets
AccumulateGrad, after which DDP stops synchronising in silence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from hmpx.errors import HmpxError
from hmpx.sharding import local
from hmpx.updates.state import Handover
from hmpx.updates.weights import Numbers, Run, Stochastic

Parameter = torch.nn.Parameter
Optimizer = torch.optim.Optimizer


class WholeStep:
    """One step on shadows. Optimizers that `optimizer` holds (Lookahead's base) see the same shadows."""

    def __init__(self, optimizer: Optimizer, runs: list[Run], way: Stochastic, state_dtype: torch.dtype) -> None:
        self._members = list(_nested(optimizer))
        self._lists = list({id(g["params"]): g["params"] for o in self._members for g in o.param_groups}.values())
        self._runs, self._way, self._state_dtype = {run.param: run for run in runs}, way, state_dtype
        self._shadow: dict[Parameter, Parameter] = {}
        self._states: list[Handover] = []
        self._before: dict[Parameter, torch.Tensor] = {}  # weights that a closure's trial points overwrite
        self._versions: dict[Parameter, int] = {}
        self._moved = False

    def run(self, step: Callable, args: tuple, kwargs: dict, numbers: Numbers) -> Any:
        """Step; if that raises, parameters, gradients, `param_groups` and the keys of `state` are as they were."""
        try:
            with torch.no_grad():
                self._put_in()
            args, kwargs = replace_closure(args, kwargs, self._on_real_parameters)
            result = step(self._members[0], *args, **kwargs)
            self._refuse_bypass()
        except BaseException:
            self._exchange({q: p for p, q in self._shadow.items()})
            for handover in self._states:
                handover.undo()
            with torch.no_grad():
                for p, before in self._before.items():
                    p.copy_(before)
                    self._way.accept(p)
            raise
        self._exchange({q: p for p, q in self._shadow.items()})
        with torch.no_grad():
            for handover in self._states:
                handover.finish(numbers)
            for p, q in self._shadow.items():
                self._runs[p].written()
                self._way.write(self._runs[p], local(q.detach()), numbers)
        return result

    def _put_in(self) -> None:
        for p, run in self._runs.items():
            weight = torch.empty_like(p, dtype=torch.float32, requires_grad=False)
            self._way.read_all([run], [local(weight)])
            self._shadow[p] = q = Parameter(weight, requires_grad=p.requires_grad)
            for mark, value in vars(p).items():  # that an optimizer may look for, such as a weight-decay flag
                vars(q).setdefault(mark, value)  # what a DTensor holds is there too
            q.grad = _widened_grad(p)
            self._versions[p] = p._version
        self._exchange(self._shadow)
        for member in self._members:
            for p, q in self._shadow.items():
                self._states.append(Handover(member, self._runs[p], q, self._state_dtype))

    def _refuse_bypass(self) -> None:
        """An optimizer that keeps a list of its own has stepped on the BF16 weights themselves."""
        for p, version in self._versions.items():
            if p._version != version:
                raise HmpxError(
                    f"{type(self._members[0]).__name__} wrote to parameter {self._runs[p].name!r} itself: it does not "
                    "take its parameters from param_groups, so hmpx cannot step it in FP32"
                )

    def _exchange(self, new: dict[Parameter, Parameter]) -> None:
        for params in self._lists:
            params[:] = [new.get(p, p) for p in params]

    def _on_real_parameters(self, closure: Callable) -> Callable:
        """A closure evaluates the model, so it must see the real parameters, at the point the optimizer is trying."""

        def evaluate() -> Any:
            with torch.no_grad():
                for p, q in self._shadow.items() if self._moved else ():
                    self._before.setdefault(p, p.clone())
                    p.copy_(q)  # to nearest: the shadow keeps the exact point
            self._moved = True
            self._exchange({q: p for p, q in self._shadow.items()})
            try:
                with torch.enable_grad():
                    return closure()
            finally:
                self._exchange(self._shadow)
                for p, q in self._shadow.items():
                    q.grad = _widened_grad(p)
                    self._versions[p] = p._version

        return evaluate


def replace_closure(args: tuple, kwargs: dict, wrap: Callable[[Callable], Callable]) -> tuple[tuple, dict]:
    """The arguments of a step with its closure, if there is one, in the hands of `wrap`."""
    if callable(kwargs.get("closure")):
        return args, {**kwargs, "closure": wrap(kwargs["closure"])}
    if args and callable(args[0]):
        return (wrap(args[0]), *args[1:]), kwargs
    return args, kwargs


def _widened_grad(p: Parameter) -> torch.Tensor | None:
    """A gradient of its own, so that a step that raises leaves the real one alone."""
    return None if p.grad is None else p.grad.detach().to(torch.float32, copy=True)


def _nested(optimizer: Optimizer) -> Iterator[Optimizer]:
    """`optimizer` and every optimizer that it holds in an attribute, directly or in a list."""
    found = [optimizer]
    for member in found:
        yield member
        for value in vars(member).values():
            inner = value if isinstance(value, (list, tuple)) else (value,)
            found += [o for o in inner if isinstance(o, Optimizer) and not any(o is seen for seen in found)]
