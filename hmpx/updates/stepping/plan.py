"""The plan of a step: all batches and chunks of an optimizer. It is kept while nothing has changed.

A batch is stepped by a formula, a chunk by the optimizer's own code.

To make a plan, hmpx looks at each parameter, gradient and state tensor several times: for names, dtypes, overlaps,
kernels. With many tensors this takes longer than the step. So the plan is kept, and a `Fingerprint` says whether
it still fits.
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Collection, Iterable, Sequence
from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import Any, NamedTuple

import torch

from hmpx.base.torch_private import KEPT_SHARDS, KEPT_STEPS, private
from hmpx.rounding import native
from hmpx.rounding.native import PLAIN
from hmpx.rounding.shared import step_key
from hmpx.rounding.state_codes import SCALES
from hmpx.rounding.table import Tables
from hmpx.updates.holding.sharding import held_part, is_sharded, local
from hmpx.updates.stepping.chunk import chunks
from hmpx.updates.stepping.fused_batch import FusedBatch, fused_batches
from hmpx.updates.stepping.names import Members, parameters, shared_names
from hmpx.updates.stepping.optimizer_classes import Formula, is_scaled
from hmpx.updates.stepping.step_call import StepCall, StepContext, WriteBack, are_same, grads_of, values_of
from hmpx.updates.stepping.transfers import room_size

Tensor = torch.Tensor
Parameter = torch.nn.Parameter
Optimizer = torch.optim.Optimizer
TensorGuards = private("torch._C._dynamo.guards.TensorGuards")
_OF_GROUP = itemgetter("params")
_END = [None]  # added to two lists that hold no None: ``map(is_, a, b)`` then also tells lists of other lengths
_TOGETHER = 256  # tensors that guards check in one call: it puts them into a table, which is to stay in the cache
_OF_SHARD = attrgetter("_local_tensor", "device_mesh", "placements")  # of a DTensor


class Gradients(NamedTuple):
    """The gradients of a step as this rank holds them, and where they are."""

    tensors: list[Tensor]
    addresses: array[int]


class Guards:
    """What torch's guards see of tensors: class, dtype, device, shape, strides."""

    def __init__(self, tensors: list[Tensor]) -> None:
        options = {"dynamic_dims_sizes": None, "dynamic_dims_strides": None}
        self._all = [TensorGuards(*some, **options) for some in _together(tensors)]

    def hold(self, tensors: list[Tensor]) -> bool:
        """Return whether these are as those that the guards were made of."""
        return all([guards.check(*some) for guards, some in zip(self._all, _together(tensors), strict=True)])


class Fingerprint:
    """An optimizer as a step left it, to tell whether something other than its options has changed since.

    Args:
        params: the parameters that were stepped; they still have their gradients.
        is_part: the optimizer steps other parameters by other plans, and this fingerprint looks at none of them.
    """

    def __init__(self, optimizer: Optimizer, params: list[Parameter], *, is_part: bool) -> None:
        self._look_at_members(optimizer, params, is_part=is_part)
        self._keys_of_states, self._own = map(list, self._look_at_states())
        self._dicts = [state for state in map(optimizer.state.get, params) if state is not None]
        keys, self._values = list(chain(*self._dicts)), [*values_of(self._dicts), *_END]
        self._keys = keys
        # Scales are hmpx's own, so comparing objects is enough. Nothing exchanges masters while a plan is kept.
        named = zip(keys, self._values, strict=False)
        of_states = [value for key, value in named if not str(key).startswith(SCALES)]
        self._look_at_memory(of_states)

    def _look_at_members(self, optimizer: Optimizer, params: list[Parameter], *, is_part: bool) -> None:
        self._params, self._is_part = params, is_part
        self._all, self._shared = params if is_part else parameters(optimizer), shared_names(optimizer)
        self._groups = self._look_at_groups(optimizer.param_groups)
        self._states: dict[Any, Any] = optimizer.state

    def _look_at_memory(self, of_states: list[Tensor], replaceable: Sequence[Tensor] = ()) -> None:
        """Look at parameters, gradients and tensors of state, which stay where they are.

        replaceable: tensors of state that a step may replace.
        """
        tensors = list({id(each): each for each in (*self._all, *of_states)}.values())
        grads = self._found()
        self._sharded = [each for each in tensors if is_sharded(each)]
        self._shards, self._grad_types = list(map(_OF_SHARD, self._sharded)), list(map(type, grads))
        self._tensors = [each for each in tensors if not is_sharded(each)] + [part for part, _, _ in self._shards]
        self._addresses = list(map(Tensor.data_ptr, self._tensors))
        flat = {id(value) for value in of_states if value.dim() < 2}  # one layout is possible, so guards need not look
        self._laid, self._replaceable = [each for each in self._tensors if id(each) not in flat], replaceable
        self._guards, self._guards_of_grads = Guards([*self._laid, *replaceable]), Guards(list(map(local, grads)))

    def _look_at_groups(self, groups: list[dict]) -> tuple[list[int], list[list[str]], int]:
        """Return each group's number of parameters and their names, and how many names an outer ZeRO has given."""
        names = [list(group.get("param_names", ())) for group in groups]
        return [len(group["params"]) for group in groups], names, len(self._shared)

    def _look_at_states(self) -> tuple[Collection[Any], Collection[Any]]:
        """Return parameters and their states. A walk through the dict is fast: lookups hash tensors, in Python."""
        if self._is_part:
            return [], list(map(self._states.get, self._params))
        return self._states.keys(), self._states.values()

    @staticmethod
    def can_be(optimizer: Optimizer, params: Iterable[Parameter]) -> bool:
        """Return whether every change would be seen: plain tensors on a CPU or a GPU, or DTensors with such parts.

        False after a step whose gradients a GradScaler has left scaled.
        """
        every = parameters(optimizer)
        if is_scaled(optimizer) or not KEPT_STEPS.is_on() or not all(map(is_parameter, every)):
            return False
        if any(map(is_sharded, every)) and not KEPT_SHARDS.is_on():
            return False
        for p in params:
            grad = p.grad
            if grad is None or not is_seen(grad) or grad.dtype not in native.KINDS:
                return False
            for value in (optimizer.state.get(p) or {}).values():
                if not isinstance(value, Tensor) or not value.numel() or not is_seen(value):
                    return False
        return True

    def gradients_if_unchanged(self, optimizer: Optimizer) -> Gradients | None:
        """Return the gradients of the next step if its parameters and state tensors are the same; else None.

        Guards in torch's C++ check that all tensors have the class, dtype, device, shape and strides that they had.
        """
        if optimizer.state is not self._states or is_scaled(optimizer):
            return None
        if not self._has_members(optimizer.param_groups) or not self._has_state():
            return None
        if not self._guards.hold([*self._laid, *self._replaceable]):
            return None
        return self.gradients() if list(map(Tensor.data_ptr, self._tensors)) == self._addresses else None

    def gradients(self) -> Gradients | None:
        """Return the gradients that there are now, if a step by the plan can take them; else None."""
        grads = self._gradients()
        if grads is None or not self._guards_of_grads.hold(grads):
            return None
        addresses = array("Q", list(map(Tensor.data_ptr, grads)))
        if not all(addresses) and not all([at or not grad.numel() for at, grad in zip(addresses, grads, strict=True)]):
            return None  # somebody has freed the memory of a gradient
        return Gradients(grads, addresses) if self._has_these(grads) else None

    def _has_these(self, grads: list[Tensor]) -> bool:
        """Return whether no other parameter has a gradient."""
        return len(self._all) == len(grads) or sum([p.grad is not None for p in self._all]) == len(grads)

    def _has_members(self, groups: list[dict]) -> bool:
        """Return whether the groups hold the same parameters, with the same names."""
        if self._is_part:  # a step in parts compares the members when it begins
            return True
        params = chain.from_iterable(map(_OF_GROUP, groups))
        return self._look_at_groups(groups) == self._groups and all(map(is_, params, self._all))

    def _has_state(self) -> bool:
        """Return whether the state is the same dicts, with the same objects in the same order, and no new keys."""
        params, own = self._look_at_states()
        if not are_same(params, self._keys_of_states) or not are_same(own, self._own):
            return False
        values = chain(chain.from_iterable(map(dict.values, self._dicts)), _END)
        return list(chain.from_iterable(self._dicts)) == self._keys and all(map(is_, values, self._values))

    def _found(self) -> list[Any]:
        return grads_of(self._params)

    def _gradients(self) -> list[Any] | None:
        """Return this rank's part of each gradient; None if the sharding of a tensor has changed."""
        grads = self._found()
        if not self._sharded:
            return grads  # the guards see a gradient that is None or of another class
        if list(map(type, grads)) != self._grad_types:
            return None
        if not all([are_same(*each) for each in zip(map(_OF_SHARD, self._sharded), self._shards, strict=True)]):
            return None
        for i, (grad, p) in enumerate(zip(grads, self._params, strict=True)):
            if is_sharded(grad):
                grads[i], mesh, placements = _OF_SHARD(grad)
                if (mesh, placements) != _OF_SHARD(p)[1:]:
                    return None
        return grads


def is_seen(tensor: Tensor) -> bool:
    tensor = _OF_SHARD(tensor)[0] if is_sharded(tensor) else tensor
    return type(tensor) is Tensor and tensor.layout is torch.strided and (tensor.data_ptr() != 0 or not tensor.numel())


def is_parameter(p: Parameter) -> bool:
    held = _OF_SHARD(p)[0] if is_sharded(p) else p
    return type(held) in PLAIN and (held.is_cpu or held.is_cuda)


def _together(tensors: list[Tensor]) -> list[list[Tensor]]:
    return [tensors[i : i + _TOGETHER] for i in range(0, len(tensors), _TOGETHER)]


class Plan:
    """The batches and chunks of parameters that have gradients. It is made and run under `torch.no_grad()`.

    A plan is made once and run in many steps. It holds no reference to the optimizer.

    Args:
        params: the parameters that the plan steps.
        formula: the arithmetic of the step. None: the optimizer's own step is called.
        is_part: the optimizer steps other parameters by other plans.
        is_known: whether hmpx knows the class. If not, its own code steps all parameters at once, also those without a
            gradient.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        members: Members,
        params: list[Parameter],
        write_back: WriteBack,
        formula: Formula | None = None,
        *,
        is_part: bool = False,
        is_known: bool = True,
    ) -> None:
        self._params, self._is_part, self._tables = params, is_part, Tables()
        self._fingerprint: Fingerprint | None = None
        gradients = self._gradients()
        context = StepContext(
            optimizer,
            write_back.stores,
            {p: i for i, p in enumerate(params)},
            gradients,
            members.group,
            functools.partial(room_size, members.elements, is_part=is_part),
        )
        own = params if is_known else members.segments
        self.segments = segments = [members.segments[p] for p in own if p in members.segments]
        for segment in segments:
            context.stores.of(segment).begin()
        self._fused: list[FusedBatch] = []
        if formula is not None:
            self._fused = fused_batches(segments, formula, context, write_back.rounding_key, self._tables)
        stepped = {segment.param for batch in self._fused for segment in batch.segments}
        others = [p for p in params if p not in members.segments] if is_known else None
        found = chunks([segment for segment in segments if segment.param not in stepped], others, context)
        self._chunks, self._once = [c for c in found if c.is_in_room], [c for c in found if not c.is_in_room]
        self._can_be_kept = not self._once
        sizes: dict[torch.device, int] = {}
        for chunk in self._chunks:
            sizes[chunk.device] = max(sizes.get(chunk.device, 0), chunk.size)
        # Buffers for the FP32 copies of each chunk in turn.
        self._rooms = {at: torch.empty(size, dtype=torch.float32, device=at) for at, size in sizes.items()}
        self._sizes = {at: room.nbytes for at, room in self._rooms.items()}
        for chunk in self._chunks:
            kernels = chunk.kernels(gradients)
            table = None if kernels is None else self._tables.of(chunk.device, kernels)
            chunk.place_in(self._rooms[chunk.device], table, gradients)

    def _gradients(self) -> list[Tensor]:
        """Return this rank's part of each gradient, redistributed where it is not sharded as its parameter is."""
        found = []
        for p in self._params:
            assert p.grad is not None, "only parameters with gradients are stepped"
            found.append(p.grad if type(p.grad) is Tensor else held_part(p, p.grad))
        return found

    def run(self, call: StepCall, write_back: WriteBack, found: Gradients | None = None) -> Any:
        """Take the step; return what the optimizer's own step returns. found: the result of `fits`, if it was asked."""
        key, (gradients, addresses) = write_back.rounding_key, found or (self._gradients(), None)
        for on, room in self._rooms.items() if self._fingerprint is not None else ():
            room.untyped_storage().resize_(self._sizes[on])
        for batch in self._fused:
            batch.begin(call)
        for device, table in self._tables.items():
            if table.has_launches:
                # Sparse gradients have no address; the table does not read them.
                at = [g.data_ptr() if g.layout is torch.strided else 0 for g in gradients] if addresses is None else []
                addresses = array("Q", at) if addresses is None else addresses
                room_at = self._rooms[device].data_ptr() if device in self._rooms else 0
                table.send(step_key(key.seed, key.step), addresses, room_at)
        results = []
        while self._once:  # the next one needs its memory
            results.append(self._once.pop(0).step(call, write_back, gradients))
        results += [chunk.step(call, write_back, gradients) for chunk in self._chunks]
        for batch in self._fused:
            batch.step(write_back, gradients)
        return results[0] if results else None

    def keep(self, optimizer: Optimizer) -> bool:
        """After the first step, take the fingerprint; return whether the plan can be run again."""
        if not self.free_copies(is_new=True) or not Fingerprint.can_be(optimizer, self._params):
            return False
        self._fingerprint = Fingerprint(optimizer, self._params, is_part=self._is_part)
        return True

    def free_copies(self, *, is_new: bool = False) -> bool:
        """After a step, free the copies; return whether the plan can be run again."""
        if not self._can_be_kept or not all([chunk.can_be_kept(is_new=is_new) for chunk in self._chunks]):
            return False
        if not all([batch.is_reusable for batch in self._fused]):
            return False
        for room in self._rooms.values():
            room.untyped_storage().resize_(0)
        return True

    def fits(self, optimizer: Optimizer) -> Gradients | None:
        """Return the gradients of the next step if only they and options have changed; else None."""
        found = None if self._fingerprint is None else self._fingerprint.gradients_if_unchanged(optimizer)
        if found is None or not all([batch.fits(optimizer.param_groups) for batch in self._fused]):
            return None
        return found if all([table.are_aligned(found.addresses) for table in self._tables.values()]) else None
