"""Parameters that are stepped by a formula, whatever their optimizer's own step does, and how: by kernels or torch.

Every class with a formula in `optimizer_classes.py` steps so, unless ``fused=False`` asks for its own step. A formula
has its own order of operations, so results agree with the optimizer's to rounding and not to the bit. State has the
optimizer's keys and shapes, so a training run may change between fused and other steps.

A kernel, in C or in Triton, steps and writes back in one pass over weights, gradients and state. torch's operators step
parameters that no kernel takes as they are held, from FP32 copies and with the same bits:

- there is no C compiler, or no Triton; the device is neither a CPU nor CUDA; or the tensor has an unknown subclass;
- this rank's elements have gaps between them in the whole parameter, or reach past its first 2^32;
- weight, gradient or state is not contiguous, or the gradient is neither BF16 nor FP32.

Where the copies lie in one piece, a kernel steps them.

With amsgrad, differentiable, capturable, or sparse gradients, the optimizer's own step runs. So it does where a
GradScaler leaves the unscaling to the optimizer.
"""

from __future__ import annotations

import functools
import logging
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch

from hmpx.base.tensors import dtype_name, is_lazy, lacks_data
from hmpx.base.torch_private import add_to_all
from hmpx.errors import HmpxError
from hmpx.rounding import eager, native, table
from hmpx.rounding.devices import kernels_for
from hmpx.rounding.native import KERNELS, StoredTensor
from hmpx.rounding.shared import name_id
from hmpx.rounding.state_codes import SCALES, STATE_CODES
from hmpx.rounding.table import Tables, row_of_step, run_all
from hmpx.updates.holding.held import (
    Held,
    HeldCodes,
    HeldState,
    HeldTensor,
    RoundingKey,
    Segment,
    by_own_keys,
    held_states,
    laid_as,
)
from hmpx.updates.holding.sharding import local
from hmpx.updates.holding.state_forms import form_of
from hmpx.updates.holding.stores import WAYS, Stores
from hmpx.updates.stepping.optimizer_classes import Formula
from hmpx.updates.stepping.step_call import StepCall, StepContext, WriteBack
from hmpx.updates.stepping.transfers import together

logger = logging.getLogger("hmpx")


class _MissingState(HmpxError, KeyError):
    """A KeyError, too, as the optimizer's own step raises one."""


Tensor = torch.Tensor


def fused_batches(
    segments: list[Segment], formula: Formula, context: StepContext, key: RoundingKey, tables: Tables
) -> list[FusedBatch]:
    """Make a batch for the parameters of each device that a kernel can step, and one for those that torch steps."""
    optimizer, found = context.optimizer, dict[tuple[torch.device, bool], list[Segment]]()
    for segment in segments:
        p, group = segment.param, optimizer.param_groups[context.group[segment.param]]
        grad, state = context.gradients[context.indices[p]], optimizer.state.get(p) or {}
        if _is_stepped_by(formula, group, segment, grad, state):
            by_kernel = _can_be_by_kernel(formula, segment, grad, state)
            if by_kernel or not lacks_data(local(p)):
                found.setdefault((p.device, by_kernel), []).append(segment)
    return [FusedBatch(each, formula, context, key, tables if by else None) for (_, by), each in found.items()]


def _is_stepped_by(formula: Formula, group: dict, segment: Segment, grad: Tensor, state: dict) -> bool:
    """Return whether the formula steps this parameter. If not, the optimizer's own step does, or raises.

    Raises:
        HmpxError: a state tensor has a dtype that no step gives it.
    """
    if not formula.supports(group, by_own_keys(state)) or grad.layout is not torch.strided:
        return False
    _refuse_dtypes(segment, formula.states(group), state)
    held = held_states(state, segment.param)
    found = [held.get(key) for key in formula.states(group) if key is not None]
    return all([value is None or isinstance(value, HeldState) for value in found])


def _can_be_by_kernel(formula: Formula, segment: Segment, grad: Tensor, state: dict) -> bool:
    """Return whether a kernel can step this parameter as it is held."""
    if segment.first is None or segment.first + segment.count > 2**32:
        return False
    if WAYS[segment.way.weights].kind is None:  # no kernel knows this way to hold weights
        return False
    p, kernels, known = local(segment.param), kernels_for(local(segment.param)), by_own_keys(state)
    if kernels is None or formula.kernel not in kernels.KERNELS:
        return False
    dtype = segment.way.state_dtype
    if isinstance(dtype, str) and STATE_CODES[dtype].kind is None:
        return False
    # Kernels read by address, and `can_read` below compares no scales.
    scales = [local(value) for key, value in state.items() if key.startswith(SCALES)]
    if not all([native.is_plain(each) and each.device == p.device for each in scales]):
        return False
    held = [local(v) for v in known.values() if isinstance(v, Tensor) and v.dim()]
    alike, codes = [v for v in held if v.dtype is not torch.uint8], [v for v in held if v.dtype is torch.uint8]
    if grad.dtype not in (torch.bfloat16, torch.float32):
        return False
    return kernels.can_read(p, grad, *alike) and all(map(kernels.can_read, codes))


@dataclass(eq=False, slots=True)
class Taken:
    """One parameter of a batch. The gradient is not in it, so that its memory can be freed.

    Attributes:
        index: the index of the gradient in the list of all gradients.
        group: the index of the group, and not its dict, which a user may replace.
        keys: the keys of the state tensors, in the kernel's order.
        known: the state by the optimizer's own keys, with the new entries.
        new: the entries that the step will put into the optimizer's state.
    """

    segment: Segment
    index: int
    group: int
    keys: tuple[str | None, ...]
    known: Mapping[str, Any]
    new: dict[str, Any]


class _Counts:
    """The counts of steps of many parameters. One call of C reads or raises them, if all are FP32; else torch does."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self._tensors, self._addresses = tensors, array("Q")
        self._in_c = native.library() is not None and all([t.dtype is torch.float32 for t in tensors])
        if self._in_c:
            self._addresses.extend([tensor.data_ptr() for tensor in tensors])

    def values(self) -> array[float]:
        return native.counts_at(self._addresses) if self._in_c else array("d", [each.item() for each in self._tensors])

    def raise_by_one(self) -> None:
        if self._in_c:
            native.raise_counts(self._addresses)
            return
        floating = [each for each in self._tensors if each.is_floating_point()]
        if floating:
            add_to_all(floating, torch.ones(()), alpha=1.0)  # torch would make many tensors of a plain 1
        for each in self._tensors if len(floating) < len(self._tensors) else ():
            if not each.is_floating_point():
                each.add_(1)


class FusedBatch:
    """Parameters of one device that are stepped by a formula. The methods need `torch.no_grad()`.

    Args:
        tables: of the kernels that step them. None: torch's operators do.

    Attributes:
        is_reusable: whether the next step can use the same table, with other gradients and scalars filled in.
    """

    def __init__(
        self, segments: list[Segment], formula: Formula, context: StepContext, key: RoundingKey, tables: Tables | None
    ) -> None:
        self.segments, self._formula, self._states = segments, formula, context.optimizer.state
        self.is_reusable = formula.tensors_alone
        self._taken = [self._take(segment, context) for segment in segments]
        self._by: TorchBackend | KernelBackend
        if tables is None:
            self._by = TorchBackend(self._taken, formula, context)
        else:
            self._by = KernelBackend(self._taken, formula, context, key, tables)
        self._counts = _Counts([each.known["step"] for each in self._taken] if formula.counts else [])
        self._params = [each.segment.param for each in self._taken]
        self._names = [each.segment.name for each in self._taken]
        self._has_new = any([each.new for each in self._taken])
        in_groups = [list(each) for _, each in groupby(self._taken, lambda each: each.group)]
        self._firsts, self._sizes = [each[0] for each in in_groups], list(map(len, in_groups))

    def _take(self, segment: Segment, context: StepContext) -> Taken:
        p, formula, form = segment.param, self._formula, form_of(segment)
        at = context.group[p]
        keys, state = formula.states(context.optimizer.param_groups[at]), self._states.get(p) or {}
        known, new = by_own_keys(state), dict[str, Any]()
        count = known.get("step")
        if formula.counts and count is None:
            new["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
        elif formula.counts and not count.is_cpu:  # type: ignore[union-attr]
            new["step"] = count.to("cpu")  # type: ignore[union-attr]  # each read on the device is a wait
        for key in keys:
            if key is not None and known.get(key) is None:
                if count is not None:  # the optimizer's own step raises the same error
                    raise _MissingState(
                        f"{key}: parameter {segment.name!r} has a count of steps, and not this state: load all of "
                        "it, or none, by load_state_dict"
                    )
                new.update(form.zeros(p).entries(key))
        return Taken(segment, context.indices[p], at, keys, by_own_keys({**state, **new}), new)

    def fits(self, groups: list[dict]) -> bool:
        """Return whether the options of all groups still ask for this kernel and for the same state tensors."""
        for each in self._firsts:
            options = groups[each.group]
            if not self._formula.supports(options, each.known) or self._formula.states(options) != each.keys:
                return False
        return True

    def begin(self, call: StepCall) -> None:
        """Compute the scalars, and put them into the table. Wrong options raise here, when nothing is written yet."""
        formula, begin = self._formula, 0
        counted = self._counts.values() if formula.counts else array("f", bytes(4 * len(self._taken)))
        found: list[tuple[float, ...]] = []
        self._extra: list[tuple[Taken, Mapping[str, Any]]] = []
        for first, size in zip(self._firsts, self._sizes, strict=True):
            steps, group = counted[begin : begin + size], call.optimizer.param_groups[first.group]
            if formula.tensors_alone and not self._has_new and steps == steps[:1] * size:
                step, seen = steps[0] + formula.counts, formula.depends_on(first.known)
                found += [formula.scalars(call.optimizer, group, step, seen)] * size
            else:
                taken = self._taken[begin : begin + size]
                found += self._begin_each(call.optimizer, group, taken, [step + formula.counts for step in steps])
            begin += size
        self._by.scale(found)

    def _begin_each(
        self, optimizer: Any, group: dict, taken: list[Taken], steps: Sequence[float]
    ) -> list[tuple[float, ...]]:
        """Compute the scalars of each parameter of one group: their counts and other state may differ."""
        formula, scalars = self._formula, list[tuple[float, ...]]()
        known: dict[Any, tuple[float, ...]] = {}  # most parameters share their scalars
        for each, step in zip(taken, steps, strict=True):
            before = self._states.get(each.segment.param) or {} if each.new else each.known
            seen = formula.depends_on(by_own_keys(before))
            if (step, seen) not in known:
                known[step, seen] = formula.scalars(optimizer, group, step, seen)
            scalars.append(known[step, seen])
            extra = formula.extra_state(group, step, seen)
            if each.new or extra:
                self._extra.append((each, extra))
        return scalars

    def step(self, write_back: WriteBack, gradients: Sequence[Tensor]) -> None:
        """Step the parameters. Before it, the caller has called `begin` and has sent the table."""
        write_back.written.append(self._names)
        self._by.run(gradients, write_back.rounding_key)
        self._counts.raise_by_one()
        for each, extra in self._extra:
            self._states[each.segment.param].update({**each.new, **extra})
            each.new = {}
        self._has_new = False
        torch.autograd.graph.increment_version(self._params)


class KernelBackend:
    """Steps parameters by one launch of a kernel in C; in Triton, by one for each way to hold them."""

    def __init__(
        self, taken: list[Taken], formula: Formula, context: StepContext, key: RoundingKey, tables: Tables
    ) -> None:
        kernels = kernels_for(local(taken[0].segment.param))
        assert kernels is not None, "they take these parameters"
        for each in taken:
            context.stores.of(each.segment).prepare_for_kernels(each.segment, key)
        rows = [row_of_step(self._arguments(each, context), each.index) for each in taken]
        self._table = tables.of(taken[0].segment.param.device, kernels)
        self._launches = self._table.add("step_list", rows, KERNELS.index(formula.kernel))

    def _arguments(self, each: Taken, context: StepContext) -> native.StepArguments:
        segment, state = each.segment, {**(context.optimizer.state.get(each.segment.param) or {}), **each.new}
        weight = context.stores.of(segment).for_kernels(segment, name_id(segment.name))
        assert weight is not None, "the store is prepared for kernels"
        states = tuple([_stored(segment, key, state) for key in each.keys])
        gradient = StoredTensor.of(context.gradients[each.index])
        return native.StepArguments(weight, gradient, states, first=segment.first or 0)

    def scale(self, scalars: list[tuple[float, ...]]) -> None:
        """Put the scalars of all parameters into the table."""
        for launch in self._launches:
            is_all = launch.count == len(scalars)
            self._table.scale(launch, scalars if is_all else [scalars[i] for i in launch.rows])

    def run(self, gradients: Sequence[Tensor], key: RoundingKey) -> None:
        """Step, after the table was sent."""
        run_all(self._launches)


def _refuse_dtypes(segment: Segment, keys: tuple[str | None, ...], state: dict) -> None:
    """Refuse a state tensor of a dtype that no step gives it: somebody else has put it there."""
    for key in keys:
        value = state.get(key)
        if isinstance(value, Tensor) and value.dtype not in native.KINDS:
            raise HmpxError(
                f"parameter {segment.name!r}: its state {key!r} is {dtype_name(value.dtype)}, where a step of BF16 "
                f"parameters takes float32 or bfloat16: put optimizer.state[parameter][{key!r}].float() there"
            )


def _stored(segment: Segment, key: str | None, state: dict) -> StoredTensor | None:
    """Return a state tensor in the form that a kernel takes; None for a key that is None."""
    if key is None:
        return None
    name = name_id(f"{segment.name}.{key}")
    code = next((code for code in STATE_CODES.values() if code.prefix + key in state), None)
    if code is None:
        return StoredTensor.of(local(state[key]), name)
    return HeldCodes(code, state[code.prefix + key], state[SCALES + key], segment.param).for_kernels(segment, name)


class TorchBackend:
    """Steps parameters by torch's operators, from FP32 copies of some of them at a time."""

    def __init__(self, taken: list[Taken], formula: Formula, context: StepContext) -> None:
        device = taken[0].segment.param.device
        self._kernel, self._stores, self._states = formula.kernel, context.stores, context.optimizer.state
        numbered = together(list(enumerate(taken)), context.size(device), lambda each: each[1].segment.share)
        self._few = list(numbered)

    def scale(self, scalars: list[tuple[float, ...]]) -> None:
        self._scalars = scalars

    def run(self, gradients: Sequence[Tensor], key: RoundingKey) -> None:
        for few in self._few:
            copies = [_Copies(each, self._stores, self._states, gradients, self._scalars[i]) for i, each in few]
            step_copies(self._kernel, [each.arguments for each in copies])
            for each in copies:
                each.write(key)
            key.flush()


class _Copies:
    """FP32 tensors of one parameter, which lie alike: those that are held so themselves, copies of the others."""

    def __init__(
        self,
        taken: Taken,
        stores: Stores,
        states: Mapping[Any, Any],
        gradients: Sequence[Tensor],
        scalars: tuple[float, ...],
    ) -> None:
        self._segment, self._read = taken.segment, list[tuple[Held, str, Tensor]]()
        store, name, p = stores.of(taken.segment), taken.segment.name, taken.segment.param
        store.begin()
        state = held_states({**(states.get(p) or {}), **taken.new}, p)
        weight = self._copy(store, name)
        own = [None if key is None else self._copy(state[key], f"{name}.{key}") for key in taken.keys]
        grad = gradients[taken.index]
        grad = grad if grad.dtype is torch.float32 and _lie_alike(grad, weight) else laid_as(grad, weight, weight.dtype)
        strides = weight.stride()
        order = sorted(range(weight.dim()), key=lambda dim: -strides[dim])  # of memory, for the kernels

        def stored(x: Tensor) -> StoredTensor:
            return StoredTensor.of(x.permute(order))

        of_states = tuple([None if x is None else stored(x) for x in own])
        self.arguments = native.StepArguments(stored(weight), stored(grad), of_states, scalars)

    def _copy(self, held: Held, name: str) -> Tensor:
        p, tensor = local(self._segment.param), local(held.tensor)
        is_wide = isinstance(held, HeldTensor) and tensor.dtype is torch.float32
        if is_wide and _lie_alike(tensor, torch.empty_like(p, device="meta")):
            return tensor
        x = torch.empty_like(p, dtype=torch.float32, requires_grad=False)
        held.read(self._segment, x)
        self._read.append((held, name, x))
        return x

    def write(self, key: RoundingKey) -> None:
        for held, name, x in self._read:
            held.write(self._segment, x, name, key)
        self._segment.mark_written()


def _lie_alike(one: Tensor, other: Tensor) -> bool:
    return one.stride() == other.stride() or (one.is_contiguous() and other.is_contiguous())


def step_copies(kernel: str, stepped: list[native.StepArguments]) -> None:
    """Step FP32 tensors of one device, by a kernel if there is one."""
    tensors = [each.tensor for one in stepped for each in one.tensors() if each is not None]
    modules = {kernels_for(each) if each.numel() < 2**32 else None for each in tensors}
    module = modules.pop() if len(modules) == 1 else None
    if module is not None:
        table.step_list(module, kernel, stepped, 0)
        torch.autograd.graph.increment_version(tensors)
        return
    if not (tensors[0].is_cpu or is_lazy(tensors[0])):
        _warn_of_slow_steps(tensors[0].device.type)
    for _, alike in groupby(stepped, lambda one: ([each is None for each in one.states], one.scalars)):
        few = list(alike)
        weights, grads = [one.weight.tensor for one in few], [one.grad.tensor for one in few]
        columns = zip(*(one.states for one in few), strict=True)
        states = [None if column[0] is None else [each.tensor for each in column if each] for column in columns]
        eager.step_list(kernel, weights, grads, states, [one.scalars for one in few])


@functools.cache
def _warn_of_slow_steps(device: str) -> None:
    """Warn, once for each kind of device that has no kernels; `native` warns of a CPU without them."""
    logger.warning(
        "hmpx: there is no kernel for steps on %s (Triton is not installed, or does not know the device): torch's "
        "operators take them, with the same bits, and go through memory about 20 times where a kernel does so once; "
        "attach(optimizer, fused=False) asks for the optimizer's own step, with its bits",
        device,
    )
