"""Parameters that one fused kernel steps and writes back: one pass over weights, gradients and state, all at once.

Opt-in, ``attach(optimizer, fused=True)``. The formulas are the optimizer's and the order of operations is the kernel's
own, so results agree with the optimizer's to rounding and not to the bit. State has the optimizer's keys and shapes, so
a training run may change between fused and other steps.

`formula_step.py` steps those that no kernel takes as they are held, to the same bits:

- where there is no C compiler, or no Triton; on a device that is neither CPU nor CUDA;
- sharded ones (DTensors), other subclasses of tensors; ones with 2^32 elements or more;
- where weight, gradient or state is not contiguous, or the gradient is neither BF16 nor FP32.

The optimizer's own step remains with amsgrad, differentiable, sparse gradients, and where a GradScaler leaves the
unscaling to the optimizer.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hmpx.base.dtype_names import dtype_name
from hmpx.errors import HmpxError
from hmpx.rounding import native
from hmpx.rounding.backends import kernels_for
from hmpx.rounding.keys import name_id
from hmpx.rounding.native import StoredTensor
from hmpx.rounding.state_codes import SCALES, STATE_CODES
from hmpx.updates.holding.segment import Segment
from hmpx.updates.holding.state_forms import form_of
from hmpx.updates.holding.state_tensors import HeldCodes, by_own_keys
from hmpx.updates.holding.stores import WAYS
from hmpx.updates.stepping.fused_formulas import Formula
from hmpx.updates.stepping.shown import StepContext
from hmpx.updates.stepping.step_call import StepCall, WriteBack

Tensor = torch.Tensor


def fused_batches(
    segments: list[Segment], formula: Formula, context: StepContext, write_back: WriteBack
) -> list[FusedBatch]:
    """Make a fused batch for each device, of the parameters that a kernel can step."""
    optimizer, together = context.optimizer, dict[torch.device, list[Segment]]()
    for segment in segments:
        p, group = segment.param, optimizer.param_groups[context.group[segment.param]]
        if _takes(formula, group, segment, optimizer.state.get(p) or {}):
            together.setdefault(p.device, []).append(segment)
    return [FusedBatch(each, formula, context, write_back) for each in together.values()]


def _takes(formula: Formula, group: dict, segment: Segment, state: dict) -> bool:
    """Whether a kernel can step this parameter.

    Raises:
        HmpxError: a state tensor is in a dtype in which no step leaves it.
    """
    if segment.box is not None:  # a kernel numbers elements as they lie in memory
        return False
    if WAYS[segment.way.weights].kind is None:  # no kernel writes weights that are held so
        return False
    p, grad, kernels, known = segment.param, segment.grad, kernels_for(segment.param), by_own_keys(state)
    if not formula.takes(group, known) or kernels is None or formula.kernel not in kernels.KERNELS:
        return False
    _refuse_dtypes(segment, formula.states(group), state)
    is_coded = segment.way.is_coded and any(formula.states(group))
    if is_coded and not _can_be_coded(segment, state):
        return False
    held = [v for v in known.values() if isinstance(v, Tensor) and v.dim()]
    alike, codes = [v for v in held if v.dtype is not torch.uint8], [v for v in held if v.dtype is torch.uint8]
    if p.numel() >= 2**32 or grad.dtype not in (torch.bfloat16, torch.float32):
        return False
    return kernels.can_read(p, grad, *alike) and all(map(kernels.can_read, codes))


@dataclass(eq=False, slots=True)
class _Taken:
    """One parameter in the form that a kernel takes, without its gradient, which nothing keeps alive.

    Attributes:
        index: of the gradient in the list of all gradients.
        group: the index of the group, where somebody may put another dict of options.
        keys: the keys of the state tensors, in the kernel's order.
        known: the state by the optimizer's own keys, new entries included.
        new: entries to put into the optimizer's state.
        weight, states: what the kernel steps.
    """

    segment: Segment
    index: int
    group: int
    keys: tuple[str | None, ...]
    known: Mapping[str, Any]
    new: dict[str, Any]
    weight: StoredTensor
    states: tuple[StoredTensor | None, ...]

    def with_gradient(self, grad: Tensor, scalars: tuple[float, ...] = ()) -> native.StepArguments:
        """Return the arguments of the kernel for one step."""
        return native.StepArguments(self.weight, StoredTensor.of(grad), self.states, scalars)


class FusedBatch:
    """Parameters of one device that a kernel can step; under `torch.no_grad()`. It has no copies."""

    def __init__(self, segments: list[Segment], formula: Formula, context: StepContext, write_back: WriteBack) -> None:
        self.segments, self._formula, self._states = segments, formula, context.optimizer.state
        for segment in segments:
            context.stores.of(segment).settle(segment, write_back.rounding_key)
        self._taken = [self._take(segment, context) for segment in segments]
        kernels = kernels_for(segments[0].param)
        assert kernels is not None, "they take these parameters"
        self._kernels = kernels
        self._words = None
        if kernels is native:
            self._words = native.words_of([each.with_gradient(context.gradients[each.index]) for each in self._taken])
        self._counts = [each.known["step"] for each in self._taken] if formula.counts else []

    def _take(self, segment: Segment, context: StepContext) -> _Taken:
        p, formula, form = segment.param, self._formula, form_of(segment)
        at = context.group[p]
        keys, state = formula.states(context.optimizer.param_groups[at]), self._states.get(p) or {}
        known, new = by_own_keys(state), dict[str, Any]()
        count = known.get("step")
        if formula.counts and count is None:
            new["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
        elif formula.counts and not count.is_cpu:  # type: ignore[union-attr]
            new["step"] = count.to("cpu")  # type: ignore[union-attr]  # where torch has put it, each look is a wait
        for key in keys:
            if key is not None and known.get(key) is None:
                if count is not None:  # as the optimizer's own step says it
                    raise KeyError(f"{key}: parameter {segment.name!r} has a count of steps, and not this state")
                new.update(form.zeros(p).entries(key))
        weight = context.stores.of(segment).for_kernels(segment, name_id(segment.name))
        assert weight is not None, "the store is settled"
        states = tuple([_stored(segment, key, {**state, **new}) for key in keys])
        return _Taken(segment, context.indices[p], at, keys, by_own_keys({**state, **new}), new, weight, states)

    def fits(self, groups: list[dict]) -> bool:
        """Whether the options still ask for the same kernel and the same state."""
        last = -1
        for each in self._taken:
            if each.group != last:
                last, options = each.group, groups[each.group]
                if not self._formula.takes(options, each.known) or self._formula.states(options) != each.keys:
                    return False
        return True

    def is_as_made(self) -> bool:
        """Whether the next step can pass the same words, with other gradients and scalars."""
        return self._formula.tensors_alone

    def begin(self, call: StepCall) -> None:
        """Compute the scalars. Wrong options raise here, before anything is written."""
        formula, groups = self._formula, call.optimizer.param_groups
        steps = [count.item() + 1.0 for count in self._counts] or [0.0] * len(self._taken)
        known: dict[Any, tuple[float, ...]] = {}  # most parameters of a group have the same
        self._scalars: list[tuple[float, ...]] = []
        self._beside: list[Mapping[str, Any]] = []
        for each, step in zip(self._taken, steps, strict=True):
            before = self._states.get(each.segment.param) or {} if each.new else each.known
            seen = formula.depends_on(by_own_keys(before))
            of = each.group, step, seen
            if of not in known:
                known[of] = formula.scalars(call.optimizer, groups[each.group], step, seen)
            self._scalars.append(known[of])
            self._beside.append(formula.beside(groups[each.group], step, seen))

    def step(self, call: StepCall, write_back: WriteBack, gradients: list[Tensor]) -> None:
        """Step the parameters; see `Batch.step`. `begin` comes before."""
        step_key = write_back.rounding_key.of_step
        write_back.written.extend([each.segment.name for each in self._taken])
        if self._words is not None:
            padded = array("f", [number for each in self._scalars for number in native.scalars_of(each)])
            native.gradients_at(self._words, [gradients[each.index].data_ptr() for each in self._taken])
            native.step_words(self._formula.kernel, self._words, padded, step_key)
        else:
            pairs = zip(self._taken, self._scalars, strict=True)
            stepped = [each.with_gradient(gradients[each.index], scalars) for each, scalars in pairs]
            self._kernels.step_list(self._formula.kernel, stepped, step_key)
        if self._counts:
            torch._foreach_add_(self._counts, 1)
        for each, beside in zip(self._taken, self._beside, strict=True):
            if each.new or beside:
                self._states[each.segment.param].update({**each.new, **beside})
                each.new = {}
        torch.autograd.graph.increment_version([each.segment.param for each in self._taken])


def _refuse_dtypes(segment: Segment, keys: tuple[str | None, ...], state: dict) -> None:
    """Raise for a state tensor that somebody has put there in a dtype that no step leaves."""
    for key in keys:
        value = state.get(key)
        if isinstance(value, Tensor) and value.dtype not in native.KINDS:
            raise HmpxError(
                f"parameter {segment.name!r}: its state {key!r} is {dtype_name(value.dtype)}, where a step of BF16 "
                f"parameters takes float32 or bfloat16: put optimizer.state[parameter][{key!r}].float() there"
            )


def _stored(segment: Segment, key: str | None, state: dict) -> StoredTensor | None:
    """Return a state tensor in the form that a kernel takes."""
    if key is None:
        return None
    name = name_id(f"{segment.name}.{key}")
    code = next((code for code in STATE_CODES.values() if code.prefix + key in state), None)
    if code is None:
        return StoredTensor.of(state[key], name)
    return HeldCodes(code, state[code.prefix + key], state[SCALES + key], segment.param).for_kernels(segment, name)


def _can_be_coded(segment: Segment, state: dict) -> bool:
    """Whether kernels can step a parameter whose state is in codes."""
    scales = [value for key, value in state.items() if key.startswith(SCALES)]
    return all(native.is_plain(each) and each.device == segment.param.device for each in scales)
