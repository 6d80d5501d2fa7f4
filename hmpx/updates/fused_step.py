"""Steps with the write-back in one kernel: one pass over weights, gradients and state, for all parameters at once.

Opt-in, ``attach(optimizer, fused=True)``. The formulas are the optimizer's and the order of operations is the kernel's
own, so results agree with the optimizer's to rounding and not to the bit. State has the optimizer's keys and shapes, so
a training run may change between fused and sliced steps. Parameters that no kernel takes (no C compiler, a device that
is neither CPU nor CUDA, sparse gradients, strides, amsgrad) are stepped in slices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import optim

from hmpx.rounding import native, triton
from hmpx.rounding.keys import name_id
from hmpx.updates.fused_formulas import Formula, formula_of
from hmpx.updates.segment import Segment
from hmpx.updates.step_call import WriteBack

Tensor = torch.Tensor
Launch = Callable[[], None]


class FusedStep:
    """The part of one step that fused kernels take."""

    def __init__(self, optimizer: optim.Optimizer, write_back: WriteBack) -> None:
        self._optimizer, self._write_back = optimizer, write_back
        self._formula = None if _is_scaled(optimizer) else formula_of(optimizer)
        self._scalars: dict[Any, tuple[float, ...]] = {}  # most parameters of a group have the same

    def takes(self, group: dict, segment: Segment) -> bool:
        """Whether a kernel can step this parameter."""
        p, grad, formula = segment.param, segment.grad, self._formula
        state = self._optimizer.state.get(p, {})
        if formula is None or not formula.takes(group, state) or formula.kernel not in _kernels(p):
            return False
        held = [v for v in state.values() if isinstance(v, Tensor) and v.dim()]
        return (
            p.numel() < 2**32
            and grad.dtype in (torch.bfloat16, torch.float32)
            and all(native.is_plain(t) and t.device == p.device and t.shape == p.shape for t in (p, grad, *held))
        )

    def prepare(self, taken: list[tuple[dict, Segment]]) -> Launch:
        """A function that steps parameters that a kernel `takes`. Nothing changes before it is called."""
        states = [self._optimizer.state.get(segment.param) or {} for _, segment in taken]
        weights: list[Tensor] = [segment.param for _, segment in taken]
        launch = self._launch(taken, weights, [segment.grad for _, segment in taken], states)

        def run() -> None:
            for segment, state in zip(taken, launch(), strict=True):
                self._optimizer.state[segment[1].param].update(state)
            torch.autograd.graph.increment_version(weights)

        return run

    def exact(self, group: dict, segment: Segment) -> Tensor:
        """What the kernel is going to round, in FP32.

        It runs the same kernel on an FP32 copy of the weights, which are not rounded, and on a copy of the state.
        """
        held = self._optimizer.state.get(segment.param) or {}
        state = {key: value.clone() if isinstance(value, Tensor) else value for key, value in held.items()}
        weights = segment.param.float()
        self._launch([(group, segment)], [weights], [segment.grad.float()], [state])()
        return weights

    def _launch(
        self, taken: list[tuple[dict, Segment]], weights: list[Tensor], grads: list[Tensor], states: list[dict]
    ) -> Callable[[], list[dict]]:
        """What steps `weights` with `grads`; it returns the state that is new."""
        formula = self._formula
        assert formula is not None, "a kernel takes these parameters"
        counts = _counted(states) if formula.counts else []
        steps = [count.item() for count in counts] or [0.0] * len(taken)
        by_device: dict[torch.device, list[native.Stepped]] = {}
        new: list[dict] = [{"step": count} for count in counts] or [{} for _ in taken]
        for i, ((group, segment), weight, state) in enumerate(zip(taken, weights, states, strict=True)):
            keys, seen = formula.states(group), formula.depends_on(state)
            for key in keys:
                if key is not None and state.get(key) is None:
                    new[i][key] = torch.zeros_like(
                        segment.param, dtype=self._write_back.form.in_kernels, requires_grad=False
                    )
            new[i].update(formula.beside(group, steps[i], seen))
            held = tuple([None if key is None else new[i].get(key, state.get(key)) for key in keys])
            names = tuple([name_id(f"{segment.name}.{key}") for key in keys])
            scalars = self._scalars_of(formula, group, steps[i], seen)
            stepped = native.Stepped(weight, name_id(segment.name), grads[i], held, names, scalars)
            by_device.setdefault(weight.device, []).append(stepped)

        def launch() -> list[dict]:
            for device, stepped in by_device.items():
                kernels = native if device.type == "cpu" else triton
                kernels.step_list(formula.kernel, stepped, self._write_back.rounding_key.of_step)
            return new

        return launch

    def _scalars_of(self, formula: Formula, group: dict, step: float, seen: Any) -> tuple[float, ...]:
        key = id(group), step, seen
        if key not in self._scalars:
            self._scalars[key] = formula.scalars(self._optimizer, group, step, seen)
        return self._scalars[key]


def _is_scaled(optimizer: optim.Optimizer) -> bool:
    """Whether a GradScaler leaves the unscaling to torch's own kernels."""
    return getattr(optimizer, "grad_scale", None) is not None or getattr(optimizer, "found_inf", None) is not None


def _kernels(p: Tensor) -> tuple[str, ...]:
    """The kernels that there are for a parameter."""
    if p.is_cpu and native.library() is not None:
        return native.KERNELS
    return triton.KERNELS if p.is_cuda and triton.available() else ()


def _counted(states: list[dict]) -> list[Tensor]:
    """The counts of steps, with this one counted; each a tensor of its own, as torch's optimizers have them."""
    counts = [state.get("step") for state in states]
    known = [torch.zeros((), dtype=torch.float32) if count is None else count for count in counts]
    return list(torch._foreach_add(known, 1))
