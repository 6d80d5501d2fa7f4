"""FP32 shadows of BF16 parameters for the length of one optimizer step.

The shadows are real Parameters put into `param_groups` in place, with the optimizer's state re-keyed to them, so that
any optimizer computes in FP32 without knowing. The model's own parameters are never swapped: exchanging `p.data` resets
AccumulateGrad, after which DDP stops synchronising in silence.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from hmpx import scope
from hmpx.rounding import check_seed, stochastic_round_

logger = logging.getLogger("hmpx")
Parameter = torch.nn.Parameter
Optimizer = torch.optim.Optimizer

STEP_KEY, SEED_KEY = "hmpx_step", "hmpx_seed"  # in param_groups[0], so that state_dict carries them


def has_bf16(optimizer: Optimizer) -> bool:
    """Whether some parameter of `optimizer` is BF16."""
    return any(p.dtype is torch.bfloat16 for group in optimizer.param_groups for p in group["params"])


def step_in_fp32(optimizer: Optimizer, how: scope.Rounding, step: Callable, args: tuple, kwargs: dict) -> Any:
    """Run one step of `optimizer` on FP32 shadows and write the result back by stochastic rounding.

    If the step raises, parameters, gradients, `param_groups` and the keys of `state` are as they were.
    """
    seed, count = _numbers(optimizer, how)
    if count:
        _warn_of_narrowed_state(optimizer)
    shadows = Shadows(optimizer)
    shadows.put_in()
    try:
        args, kwargs = shadows.wrap_closure(args, kwargs)
        result = step(optimizer, *args, **kwargs)
    except BaseException:
        shadows.take_out(keep_new_state=False)
        raise
    shadows.take_out(keep_new_state=True)
    shadows.write_back(seed, count)
    optimizer.param_groups[0][STEP_KEY] = count + 1
    optimizer.param_groups[0][SEED_KEY] = seed
    return result


def _numbers(optimizer: Optimizer, how: scope.Rounding) -> tuple[int, int]:
    """The seed and the number of this step; a seed given to the region outranks the stored one."""
    first = optimizer.param_groups[0]
    seed = first.get(SEED_KEY, 0) if how.seed is None else how.seed
    return check_seed(seed), first.get(STEP_KEY, 0)


class Shadows:
    """The BF16 parameters of one optimizer, each with its FP32 shadow and its name."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.shadow: dict[Parameter, Parameter] = {}
        self.names: dict[Parameter, str] = {}
        self._stateless: set[Parameter] = set()
        self._before: dict[Parameter, torch.Tensor] = {}  # weights that a closure's trial points overwrite
        index = 0
        for group in optimizer.param_groups:
            names = group.get("param_names")
            for position, p in enumerate(group["params"]):
                if p.dtype is torch.bfloat16 and p not in self.shadow:
                    self.shadow[p] = _shadow(p)
                    self.names[p] = names[position] if names else str(index)
                index += 1

    def put_in(self) -> None:
        """Show the optimizer the shadows."""
        self._exchange(self.shadow)
        state = self.optimizer.state
        for p, q in self.shadow.items():
            if p in state:
                state[q] = _widened(state.pop(p))
            else:
                self._stateless.add(p)

    def take_out(self, keep_new_state: bool) -> None:
        """Show it the real parameters again; state that the step made is kept or dropped."""
        self._exchange({q: p for p, q in self.shadow.items()})
        state = self.optimizer.state
        for p, q in self.shadow.items():
            if q in state:
                made = state.pop(q)
                if keep_new_state or p not in self._stateless:
                    state[p] = made
        if not keep_new_state:
            with torch.no_grad():
                for p, before in self._before.items():
                    p.copy_(before)

    def write_back(self, seed: int, count: int) -> None:
        """Round every shadow into its parameter."""
        for p, q in self.shadow.items():
            stochastic_round_(p, q, seed=seed, step=count, name=self.names[p])

    def _exchange(self, new: dict[Parameter, Parameter]) -> None:
        for group in self.optimizer.param_groups:
            params = group["params"]
            for i, p in enumerate(params):
                if p in new:
                    params[i] = new[p]

    def wrap_closure(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """A closure evaluates the model, so it must see the real parameters, at the point the optimizer is trying."""
        moved = False

        def on_real_parameters(closure: Callable) -> Callable:
            def evaluate() -> Any:
                nonlocal moved
                with torch.no_grad():
                    for p, q in self.shadow.items() if moved else ():
                        self._before.setdefault(p, p.detach().clone())
                        p.copy_(q)  # a trial point: to nearest, nothing is lost, the shadow keeps the exact one
                moved = True
                self._exchange({q: p for p, q in self.shadow.items()})
                try:
                    with torch.enable_grad():
                        return closure()
                finally:
                    self._exchange(self.shadow)
                    for p, q in self.shadow.items():
                        q.grad = _widened_grad(p)

            return evaluate

        return replace_closure(args, kwargs, on_real_parameters)


def replace_closure(args: tuple, kwargs: dict, wrap: Callable[[Callable], Callable]) -> tuple[tuple, dict]:
    """The arguments of a step with its closure, if there is one, in the hands of `wrap`."""
    if callable(kwargs.get("closure")):
        return args, {**kwargs, "closure": wrap(kwargs["closure"])}
    if args and callable(args[0]):
        return (wrap(args[0]), *args[1:]), kwargs
    return args, kwargs


def _shadow(p: Parameter) -> Parameter:
    q = Parameter(p.detach().float(), requires_grad=p.requires_grad)
    q.__dict__.update(p.__dict__)  # marks that an optimizer may look for, such as a sharding or a weight-decay flag
    q.grad = _widened_grad(p)
    return q


def _widened_grad(p: Parameter) -> torch.Tensor | None:
    return None if p.grad is None else p.grad.detach().float()


def _warn_of_narrowed_state(optimizer: Optimizer) -> None:
    """Steps taken here leave FP32 state; BF16 state beside a step count was cast down by a load."""
    tensors = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
    if any(v.dtype is torch.bfloat16 for v in tensors):
        logger.warning(
            "%s: load_state_dict cast the FP32 optimizer state down to BF16, so this run is not the resumed one; "
            "call it inside `with hmpx.disable_casts():` or after `hmpx.convert()`",
            type(optimizer).__name__,
        )


def _widened(state: Any) -> Any:
    """State that an earlier plain step left in BF16, in FP32."""
    for key, value in state.items() if isinstance(state, dict) else ():
        if isinstance(value, torch.Tensor) and value.dtype is torch.bfloat16:
            state[key] = value.float()
    return state
