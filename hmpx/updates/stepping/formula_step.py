"""A step by a formula on what a batch shows: the road of parameters that no kernel takes as they are held.

These are parameters of which this rank holds a part that has gaps in the whole one, parameters that are not contiguous,
and all parameters where there is no C compiler or no Triton. A batch reads them to FP32 and writes them back as it does
for the optimizer's own step. In between stands the arithmetic of the kernels, to the bit, so that a step never depends
on a device, on a layout, or on the number of ranks.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Container
from dataclasses import dataclass
from itertools import groupby
from types import ModuleType
from typing import Any

import torch

from hmpx.base.torch_private import add_to_all
from hmpx.rounding import calls, eager
from hmpx.rounding.devices import is_lazy, kernels_for, lacks_data
from hmpx.rounding.native import StepArguments, StoredTensor
from hmpx.updates.holding.held import memory_order
from hmpx.updates.stepping.batch import ShownParameters
from hmpx.updates.stepping.optimizer_classes import Formula
from hmpx.updates.stepping.step_call import StepCall

logger = logging.getLogger("hmpx")
Tensor = torch.Tensor
Optimizer = torch.optim.Optimizer


def by_formula(call: StepCall, formula: Formula | None, real: Container[Tensor]) -> StepCall:
    """Return the same call with the formula in the place of the optimizer's own step, for the tensors that it takes.

    real: the optimizer's own parameters. Where it sees one of these, that one gets a plain step.
    """
    return call if formula is None else call._replace(method=_FormulaStep(formula, call.method, real))


@dataclass(eq=False, slots=True)
class _Stepped:
    """One tensor that the optimizer is shown, as the formula takes it."""

    weight: Tensor
    grad: Tensor
    states: tuple[Tensor | None, ...]
    scalars: tuple[float, ...]
    state: dict[str, Any]
    beside: dict[str, Any]

    def arguments(self) -> StepArguments:
        """Return the arguments of a kernel; all tensors as they lie in memory, if they lie alike."""
        tensors = [self.weight, self.grad, *(each for each in self.states if each is not None)]
        order = memory_order(self.weight)
        if order != tuple(range(self.weight.dim())) and len({each.stride() for each in tensors}) == 1:
            tensors = [each.permute(order) for each in tensors]
        weight, grad, *held = map(StoredTensor.of, tensors)
        left = iter(held)
        return StepArguments(weight, grad, tuple([x if x is None else next(left) for x in self.states]), self.scalars)


@dataclass(frozen=True, eq=False)
class _FormulaStep:
    """Stands in the place of the method of a `StepCall`."""

    formula: Formula
    method: Callable
    real: Container[Tensor]

    def __call__(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Step all tensors in `param_groups`. Wrong options raise before anything is written."""
        found, rest = list[_Stepped](), list[list[Any]]()
        for group in optimizer.param_groups:
            rest.append([])
            for p in group["params"]:
                if not self._takes(group, p, optimizer):
                    rest[-1].append(p)
                elif p.grad is not None:
                    found.append(self._prepared(optimizer, group, p))
        result = self._own_step(optimizer, rest, args, kwargs) if any(rest) else None
        kernels: dict[ModuleType, list[StepArguments]] = {}
        by_torch: list[_Stepped] = []
        for each in found:
            arguments = each.arguments()
            held = arguments.weight, arguments.grad, *(x for x in arguments.states if x is not None)
            module = kernels_for(*(x.tensor for x in held)) if arguments.weight.size < 2**32 else None
            if module is None:
                by_torch.append(each)
            else:
                kernels.setdefault(module, []).append(arguments)
        for module, stepped in kernels.items():
            calls.step_list(module, self.formula.kernel, stepped, 0)
            written = [x.tensor for each in stepped for x in (each.weight, *each.states) if x is not None]
            torch.autograd.graph.increment_version(written)
        self._by_torch(by_torch)
        counts = [each.state["step"] for each in found] if self.formula.counts else []
        if counts:
            add_to_all(counts, 1)
        for each in found:
            for key, value in each.beside.items():
                each.state[key].copy_(value)
        return result

    def _takes(self, group: dict, p: Tensor, optimizer: Optimizer) -> bool:
        if p in self.real or lacks_data(p) or (p.grad is not None and p.grad.layout is not torch.strided):
            return False
        return self.formula.takes(group, optimizer.state.get(p) or {})

    def _prepared(self, optimizer: Optimizer, group: dict, p: Tensor) -> _Stepped:
        """Make state that is missing, and the scalars."""
        formula, state = self.formula, optimizer.state[p]
        seen, count, keys = formula.depends_on(state), state.get("step"), formula.states(group)
        step = 1.0 if count is None else count.item() + 1.0
        scalars, beside = formula.scalars(optimizer, group, step, seen), dict(formula.beside(group, step, seen))
        if formula.counts and (count is None or not count.is_cpu):  # elsewhere, each look at it is a wait
            state["step"] = torch.zeros((), dtype=torch.float32, device="cpu") if count is None else count.cpu()
        for key in (*(key for key in keys if key is not None), *beside):
            if state.get(key) is None:
                if count is not None:  # as the optimizer's own step says it
                    raise KeyError(key)
                state[key] = torch.zeros_like(beside.get(key, p))
        assert p.grad is not None, "the others are not stepped"
        states = tuple([None if key is None else state[key] for key in keys])
        return _Stepped(p.detach(), p.grad, states, scalars, state, beside)

    def _own_step(self, optimizer: Optimizer, rest: list[list[Any]], args: tuple, kwargs: dict) -> Any:
        """Take the optimizer's own step on the parameters that the formula does not take."""
        with ShownParameters([group["params"] for group in optimizer.param_groups], rest):
            return self.method(optimizer, *args, **kwargs)

    def _by_torch(self, stepped: list[_Stepped]) -> None:
        if stepped and not (stepped[0].weight.is_cpu or is_lazy(stepped[0].weight)):
            _warn_of_slow_steps(stepped[0].weight.device.type)

        def alike(each: _Stepped) -> tuple[Any, ...]:
            return str(each.weight.device), tuple(state is None for state in each.states), each.scalars

        for _, group in groupby(stepped, alike):
            together = list(group)
            columns = zip(*(each.states for each in together), strict=True)
            eager.step_list(
                self.formula.kernel,
                [each.weight for each in together],
                [each.grad for each in together],
                [None if column[0] is None else list(column) for column in columns],
                [each.scalars for each in together],
            )


@functools.cache
def _warn_of_slow_steps(device: str) -> None:
    """Warn, once for each kind of device that has no kernels; `native_library` warns of a CPU without them."""
    logger.warning(
        "hmpx: there is no kernel for steps on %s (Triton is not installed, or does not know the device): torch's "
        "operators take them, with the same bits, and go through memory about 20 times where a kernel does so once; "
        "attach(optimizer, fused=False) asks for the optimizer's own step, with its bits",
        device,
    )
