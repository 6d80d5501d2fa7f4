"""Steps with the write-back in one kernel: one pass over weights, gradients and state, for all parameters at once.

Opt-in, ``attach(optimizer, fused=True)``. The formulas are the optimizer's and the order of operations is the kernel's
own, so results agree with the optimizer's to rounding and not to the bit. State has the optimizer's keys and shapes, so
a training run may change between fused and sliced steps.

Parameters that no kernel takes are stepped in slices:

- where there is no C compiler, or no Triton; on a device that is neither CPU nor CUDA;
- sharded ones (DTensors), and other subclasses of tensors; ones with 2^32 elements or more;
- ones that share elements with another parameter;
- where weight, gradient or state is not contiguous, or the gradient is sparse, or neither BF16 nor FP32;
- with amsgrad or differentiable, and where a GradScaler leaves the unscaling to the optimizer;
- on CPUs, with more than 4096 weights in halves ("split", "split8") beside state in 8 bits, in several rows whose
  length is no multiple of 128.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import optim

from hmpx.dtype_names import dtype_name
from hmpx.errors import HmpxError
from hmpx.rounding import native
from hmpx.rounding.kernels import Kernels, kernels_for
from hmpx.rounding.keys import name_id
from hmpx.updates.block_layout import Layout
from hmpx.updates.checksums import block_of
from hmpx.updates.fused_formulas import Formula, formula_of, is_scaled
from hmpx.updates.fused_plan import FusedPlan
from hmpx.updates.held_state import CODES, SCALES, by_own_keys
from hmpx.updates.segment import Segment
from hmpx.updates.state_forms import form_of
from hmpx.updates.step_call import WriteBack

Tensor = torch.Tensor
Launch = Callable[[], None]


class FusedStep:
    """The part of one step that fused kernels take."""

    def __init__(self, optimizer: optim.Optimizer, write_back: WriteBack) -> None:
        self._optimizer, self._write_back, self._store = optimizer, write_back, write_back.store
        self._formula = None if is_scaled(optimizer) else formula_of(optimizer)
        self._taken: list[tuple[dict, Segment]] = []
        self._done: list[native.Stepped] = []
        self._scalars: dict[Any, tuple[float, ...]] = {}  # most parameters of a group have the same

    def takes(self, group: dict, segment: Segment) -> bool:
        """Whether a kernel can step this parameter."""
        if segment.overlaps is not None:  # a kernel's threads would write to the same elements
            return False
        p, grad, formula, kernels = segment.param, segment.grad, self._formula, kernels_for(segment.param)
        state = self._optimizer.state.get(p, {})
        if formula is None or not formula.takes(group, by_own_keys(state)):
            return False
        if kernels is None or formula.kernel not in kernels.KERNELS:
            return False
        _refuse_dtypes(segment, formula.states(group), state)
        in_8_bits = segment.way.state_dtype == "8bit" and any(formula.states(group))
        if in_8_bits and not _can_be_coded(segment, state, kernels):
            return False
        held = [v for v in by_own_keys(state).values() if isinstance(v, Tensor) and v.dim()]
        return p.numel() < 2**32 and grad.dtype in (torch.bfloat16, torch.float32) and kernels.can_read(p, grad, *held)

    def prepare(self, taken: list[tuple[dict, Segment]]) -> Launch:
        """A function that steps parameters that a kernel `takes`.

        Before it is called, nothing changes but that masters are there, and weights are what theirs round to.
        """
        for _, segment in taken:
            self._store.begin(segment, self._write_back.rounding_key)
        states = [self._optimizer.state.get(segment.param) or {} for _, segment in taken]
        weights: list[Tensor] = [segment.param for _, segment in taken]
        stepped, new = self._stepped(taken, weights, [segment.grad for _, segment in taken], states)

        def run() -> None:
            self._launch(stepped)
            for (_, segment), state in zip(taken, new, strict=True):
                self._optimizer.state[segment.param].update(state)
            torch.autograd.graph.increment_version(weights)
            self._taken, self._done = taken, stepped

        return run

    def exact(self, group: dict, segment: Segment) -> tuple[Tensor, Tensor]:
        """What the kernel begins with and what it is going to round, in FP32.

        It runs the same kernel on an FP32 copy of the weights, which are not rounded, and on a copy of the state.
        """
        held = self._optimizer.state.get(segment.param) or {}
        state = {key: value.clone() if isinstance(value, Tensor) else value for key, value in held.items()}
        kept = self._kept(segment)
        before = segment.param.float() if kept is None else _kernels(kept.tensor).read(kept)
        weights = before.clone()
        self._launch(self._stepped([(group, segment)], [weights], [segment.grad.float()], [state])[0])
        return before, weights

    def plan(self) -> FusedPlan | None:
        """What the next step can do again, after one that was prepared; None if it must look at all parameters."""
        formula = self._formula
        if formula is None or not self._taken or not FusedPlan.can_be(self._optimizer, formula, self._taken):
            return None
        return FusedPlan(self._optimizer, formula, self._taken, self._done, self._store)

    def _stepped(
        self, taken: list[tuple[dict, Segment]], weights: list[Tensor], grads: list[Tensor], states: list[dict]
    ) -> tuple[list[native.Stepped], list[dict]]:
        """What kernels are given to step `weights` with `grads`, and the state that is new afterwards."""
        formula = self._formula
        assert formula is not None, "a kernel takes these parameters"
        counts = _counted(states) if formula.counts else []
        steps = [count.item() for count in counts] or [0.0] * len(taken)
        stepped: list[native.Stepped] = []
        new: list[dict] = [{"step": count} for count in counts] or [{} for _ in taken]
        for i, ((group, segment), weight, state) in enumerate(zip(taken, weights, states, strict=True)):
            keys, known = formula.states(group), by_own_keys(state)
            seen = formula.depends_on(known)
            for key in keys:
                if key is not None and known.get(key) is None:
                    new[i].update(form_of(segment).zeros(segment.param).entries(key))
            new[i].update(formula.beside(group, steps[i], seen))
            held = tuple([None if key is None else _in_kernel({**state, **new[i]}, key) for key in keys])
            names = tuple([name_id(f"{segment.name}.{key}") for key in keys])
            scalars = self._scalars_of(formula, group, steps[i], seen)
            kept = self._kept(segment) if weight is segment.param else None
            stepped.append(native.Stepped(weight, name_id(segment.name), grads[i], held, names, scalars, kept))
        return stepped, new

    def _kept(self, segment: Segment) -> native.Held | None:
        """How the weights are held, where that is not in BF16 alone."""
        if segment.way.weights == "stochastic":
            return None
        held = self._store.kept(segment)
        assert held is not None, "the store has begun with it"
        return held

    def _launch(self, stepped: list[native.Stepped]) -> None:
        by_device: dict[torch.device, list[native.Stepped]] = {}
        for each in stepped:
            by_device.setdefault(each.weight.device, []).append(each)
        for here in by_device.values():
            _kernels(here[0].weight).step_list(self._kernel, here, self._write_back.rounding_key.of_step)

    @property
    def _kernel(self) -> str:
        assert self._formula is not None, "a kernel takes these parameters"
        return self._formula.kernel

    def _scalars_of(self, formula: Formula, group: dict, step: float, seen: Any) -> tuple[float, ...]:
        key = id(group), step, seen
        if key not in self._scalars:
            self._scalars[key] = formula.scalars(self._optimizer, group, step, seen)
        return self._scalars[key]


def _refuse_dtypes(segment: Segment, keys: tuple[str | None, ...], state: dict) -> None:
    """Raise for a state tensor that somebody has put there in a dtype in which no step leaves it."""
    for key in keys:
        value = state.get(key)
        if isinstance(value, Tensor) and value.dtype not in native.KINDS:
            raise HmpxError(
                f"parameter {segment.name!r}: its state {key!r} is {dtype_name(value.dtype)}, where a step of BF16 "
                f"parameters takes float32 or bfloat16: put optimizer.state[parameter][{key!r}].float() there"
            )


def _in_kernel(state: dict, key: str) -> Tensor | native.Coded:
    """A tensor of the state as a kernel gets it."""
    codes = state.get(CODES + key)
    if codes is None:
        return state[key]
    return native.Coded(codes, state[SCALES + key], Layout.of(codes).rows.width)


def _can_be_coded(segment: Segment, state: dict, kernels: Kernels) -> bool:
    """Whether these kernels can step a parameter whose state is in 8 bits."""
    p, in_halves = segment.param, segment.way.weights in ("split", "split8")
    if kernels is native and in_halves and block_of(p) > 1 and not Layout.of(p).rows.are_even(p.numel()):
        return False  # the C kernels would cut the blocks of weights that share a checksum
    scales = [value for key, value in state.items() if key.startswith(SCALES)]
    return all(native.is_plain(each) and each.device == p.device for each in scales)


def _kernels(weight: Tensor) -> Kernels:
    """Those that step weights that they `take`."""
    kernels = kernels_for(weight)
    assert kernels is not None, "a kernel takes these parameters"
    return kernels


def _counted(states: list[dict]) -> list[Tensor]:
    """The counts of steps, with this one counted; each a tensor of its own, as torch's optimizers have them."""
    counts = [state.get("step") for state in states]
    known = [torch.zeros((), dtype=torch.float32) if count is None else count for count in counts]
    return list(torch._foreach_add(known, 1))
