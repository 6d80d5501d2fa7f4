"""A kept plan for classes that hmpx does not know: the shadows of all parameters stand from one step to the next.

The FP32 copies of weights, gradients and state lie in one room, whose memory is released between two steps if it is
large. The kernels move all of them in a few launches. What else a step does for each tensor is to compare it, in
functions in C. As soon as the optimizer does what needs more (it replaces a gradient, makes state, raises), the step
goes on as that of a `Chunk`, with the same shadows.

Nothing of the room may stay in other hands when its memory goes: an optimizer may keep ``p.grad`` in its state. So the
references to the room and to all that stands are counted after each step.
"""

from __future__ import annotations

import logging
import sys
from array import array
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import accumulate, chain, repeat
from operator import is_not
from typing import Any

import torch

from hmpx.base.torch_private import KEPT_SHADOWS, KEPT_STEPS, private, version_of
from hmpx.rounding import native
from hmpx.rounding.devices import kernels_for
from hmpx.rounding.native import PLAIN, Spans
from hmpx.rounding.shared import step_key
from hmpx.rounding.table import Table, run_all
from hmpx.updates.holding.held import Held, RoundingKey, Segment
from hmpx.updates.holding.sharding import local
from hmpx.updates.holding.state_dtypes import weight_keys
from hmpx.updates.holding.stores import Stores
from hmpx.updates.stepping.chunk import Chunk
from hmpx.updates.stepping.known_elsewhere import refuse_lookups
from hmpx.updates.stepping.names import parameters
from hmpx.updates.stepping.optimizer_classes import is_scaled
from hmpx.updates.stepping.plan import Gradients, Guards, is_parameter, is_seen
from hmpx.updates.stepping.shadow import Gradient, Shadow, ShownState
from hmpx.updates.stepping.standing_states import StandingFingerprint, StandingStates, Unfit, are_equal, need
from hmpx.updates.stepping.step_call import (
    ShownParameters,
    StepCall,
    WriteBack,
    are_same,
    grads_of,
    groups_of,
    lists_of,
    nested,
)
from hmpx.updates.stepping.step_count import NEXT_KEY
from hmpx.updates.stepping.transfers import Launches, Operators, Piece, row_back

Tensor = torch.Tensor
Parameter = torch.nn.Parameter
Optimizer = torch.optim.Optimizer
BF16, FP32 = torch.bfloat16, torch.float32
_uses_of, _references_of = private("torch._C._storage_Use_Count"), private("torch.Tensor._use_count")
logger = logging.getLogger("hmpx")
_STAYS = 128 << 20  # bytes: so large a room keeps its memory on a CPU, where fresh pages can take longer than the step


class Standing(Chunk):
    """The plan. It is made after a step of a whole `Chunk`, and steps the same parameters while `fits` says so.

    Raises:
        Unfit: these parameters, gradients or states cannot be stepped so.
    """

    def __init__(self, optimizer: Optimizer, segments: list[Segment], stores: Stores) -> None:
        super().__init__(optimizer, segments, None)
        self.is_in_room = True
        need(
            KEPT_STEPS.is_on() and KEPT_SHADOWS.is_on() and segments, "no BF16 parameters, or this torch keeps no plans"
        )
        need(not is_scaled(optimizer), "its gradients are scaled")
        need(type(optimizer.state) is defaultdict, "its `state` is no defaultdict")
        need(len(list(nested(optimizer))) == 1, "it holds another optimizer")
        self._state, self._params = optimizer.state, [segment.param for segment in segments]
        self._kernels = kernels_for(self._params[0])
        self._look_at_parameters(optimizer)
        self._pieces = list[Piece]()
        made = [stores.of(segment) for segment in segments]
        weights = [self._piece(store, segment, segment.name) for store, segment in zip(made, segments, strict=True)]
        grads = [self._piece(Gradient(segment.param), segment, "") for segment in segments]
        self._of_states = StandingStates(self._state, segments, self._piece, weight_keys(optimizer))
        moved = [*weights, *self._of_states.pieces]
        need(
            all([piece.kernels(local(piece.held.tensor)) is self._kernels for piece in moved]),
            "no kernel moves its weights or state",
        )
        held = [*self._of_states.held, *chain.from_iterable(store.beside for store in made)]
        self._fingerprint = StandingFingerprint(optimizer, self._params, held, bool(self._of_states.copies))
        room = torch.empty(self.size, dtype=FP32, device=self.device)
        self._room, self._size = room, room.nbytes
        for piece in self._pieces:
            piece.place_in(room, piece.segment.param)
        self._stand(lists_of(optimizer.param_groups), [piece.x for piece in weights], [piece.x for piece in grads])
        self._has_masters = any(store.beside for store in made)
        self._make_table(grads, moved)
        both = zip(segments, made, self._qs, strict=True)
        self._all = [Shadow(segment, store, self._sight, q) for segment, store, q in both]

    # What is there

    def _look_at_parameters(self, optimizer: Optimizer) -> None:
        params, device, dtypes = self._params, self.device, set[torch.dtype]()
        need(self._kernels is not None, "no kernel reads its parameters")
        need(all(map(is_parameter, parameters(optimizer))), "it has tensors that are no parameters")
        for p, segment in zip(params, self.segments, strict=True):
            need(type(p) in PLAIN and segment.box is None, "a parameter is sharded, or of a class of its own")
            need(p.device == device and p.is_contiguous(), "a parameter is on another device, or not contiguous")
            need(0 < p.numel() < 2**32 and p.data_ptr(), "a parameter is empty, or has no memory, or too many elements")
            grad = p.grad
            if grad is not None:
                need(
                    is_seen(grad) and grad.is_contiguous() and not grad.is_inference(),
                    "a gradient is no plain dense tensor",
                )
            dtypes.add((getattr(p, "grad_dtype", None) or BF16) if grad is None else grad.dtype)
        need(dtypes in ({BF16}, {FP32}), "its gradients are in several dtypes")
        self._is_wide = FP32 in dtypes
        need(not self._is_wide or all([p.grad is not None for p in params]), "some FP32 gradients are None")

    def _piece(self, held: Held, segment: Segment, name: str) -> Piece:
        piece = Piece(held, segment, name, self.size)
        self.size = piece.end
        self._pieces.append(piece)
        return piece

    # What stands

    def _stand(self, lists: list[list], weights: list[Tensor], grads: list[Tensor]) -> None:
        """Make the shadows, and what holds them in a step. lists: of parameters, in groups."""
        pairs = zip(self._params, weights, strict=True)
        # `_qs` are the shadows, `_xs` the gradients that they have. What the parameters have is called real here.
        self._qs = [Parameter(x, requires_grad=p.requires_grad) for p, x in pairs]
        self._xs = grads
        for q, x in zip(self._qs, grads, strict=True):
            q.grad = x
        shadow_of = dict(zip(self._params, self._qs, strict=True))
        self._lists = [[shadow_of.get(p, p) for p in params] for params in lists]
        self._of_states.stand(shadow_of)
        self._has_own = [p in self._of_states.own for p in self._params]

    def _make_table(self, grads: list[Piece], moved: list[Piece]) -> None:
        kernels, found = self._kernels, self._fingerprint._found()
        assert kernels is not None
        self._table = Table(self.device, kernels)
        self._reads = Launches(grads, range(len(grads)), found, [], self._table)
        self._in_c = kernels is native
        back = grads if self._in_c and not self._is_wide else []
        self._backs = self._table.add("move_list", [row_back(piece, i, found[i]) for i, piece in enumerate(back)])
        self._moves = Launches([], [], [], moved, self._table)
        self._weights_at = array("Q", list(map(Tensor.data_ptr, self._params)))
        sizes = array("Q", [p.nbytes for p in self._params])
        self._of_weights = Spans(_after_each_other(sizes), sizes)
        sizes = array("Q", [x.numel() * (4 if self._is_wide else 2) for x in self._xs])
        at = self._room.data_ptr()
        self._of_grads = Spans(array("Q", [x.data_ptr() - at for x in self._xs]), sizes)
        self._of_shadows = Spans(array("Q", [q.data_ptr() - at for q in self._qs]), self._of_weights.sizes)

    def finish(self) -> None:
        """Count references, after the plan was made and all that is needed for making it is gone."""
        self._standing = [*self._qs, *self._xs, *self._of_states.moved]
        self._guards = Guards(self._standing)
        self._marks = list(map(vars, self._qs)), list(map(vars, self._params))
        at = self._room.data_ptr()
        self._offsets, self._placed, self._at = [each.data_ptr() - at for each in self._standing], list[int](), 0
        # In a step: the bits of the real weights, and the real gradients (objects, parts and bits), for `_undo`
        self._before: Tensor | None = None
        self._grads_before: tuple[list[Any], list[Tensor], Tensor] | None = None
        self._is_kept = True  # the plan may be used again
        self._is_shown = False  # the optimizer sees shadows, or some of what it is shown
        self._is_quick = True  # weights and state are where the kernels write them from
        self._are_bound = True  # each shadow has its own gradient of `_xs`
        del self._pieces
        self._counts = self._count()
        self._release()

    def _release(self) -> None:
        if not self._room.is_cpu or self._size > _STAYS:
            self._room.untyped_storage().resize_(0)

    def _count(self) -> tuple[int, list[int], list[int]]:
        """Return how many references there are, in Python and in C++, to the room and to what stands in it."""
        uses = _uses_of(self._room.untyped_storage()._cdata)
        counted = list(map(sys.getrefcount, chain(self._standing, self._of_states.copies)))
        return uses, counted, list(map(_references_of, self._standing))

    # Whether it fits

    def fits(self, optimizer: Optimizer) -> Gradients | None:
        """Return the gradients of the next step if only they, options and values have changed; else None."""
        found = self._fingerprint.gradients_if_unchanged(optimizer)
        return found if found is not None and self._table.are_aligned(found.addresses) else None

    def refuse_lookups(self, optimizer: Optimizer) -> None:
        """Before the shadows go for good, refuse an optimizer that knows them by their ids."""
        refuse_lookups(optimizer, self._qs)

    # The step

    def run(self, call: StepCall, write_back: WriteBack, found: Gradients) -> Any:
        """Take the step. found: what `fits` has returned."""
        self._found = found
        try:
            return self.step(call, write_back, found.tensors)
        finally:
            del self._found
            for shadow in self._shadows:
                shadow.forget()
            self._shadows, self._versioned, self._groups = [], [], []

    def free_copies(self) -> bool:
        """After a step, release the memory of a large room; return whether the plan may be used again."""
        self._of_states.begin([])
        self._is_shown = False
        self._versions, self._real = [], list[Any]()
        self._before = self._grads_before = None
        if not self._are_bound:
            self._put_gradients_back()
        if not self._is_kept or self._count() != self._counts:
            return False
        self._release()
        return True

    def _put_gradients_back(self) -> None:
        for q, x in zip(self._qs, self._xs, strict=True):
            q.grad = x

    def _show(self, optimizer: Optimizer, write_back: WriteBack, gradients: Sequence[Tensor]) -> ShownParameters:
        key = write_back.rounding_key
        self._key = step_key(key.seed, key.step)
        if self._room.untyped_storage().nbytes() != self._size:  # else resize_ allocates, too
            self._room.untyped_storage().resize_(self._size)
        self._read_gradients()
        self._moves.read(())
        if self._has_marks():
            for shadow in self._all:
                shadow.show_marks()
        self._remember_weights()
        self._of_states.begin(self._fingerprint.values)
        self._versions = list(map(version_of, self._of_states.worked_on()))
        self._is_shown = True
        self._of_states.show()
        self._groups = groups_of([optimizer])
        shown = ShownParameters(self._groups[0][2], self._lists)
        self._counted = list(map(sys.getrefcount, self._qs))
        return shown

    def _has_marks(self) -> bool:
        """Return whether something is bound to a shadow or a parameter, beside the number of the next step."""
        of_shadows, of_params = self._marks
        bound = list(chain.from_iterable(of_params))
        return any(of_shadows) or bound.count(NEXT_KEY) < len(bound)

    def _read_gradients(self) -> None:
        """Show the gradients that the parameters have now."""
        found, real = self._found, grads_of(self._params)
        self._table.send(self._key, found.addresses, self._room.data_ptr())
        self._reads.read(found.tensors)
        self._without = [] if all(map(is_not, real, repeat(None))) else [i for i, g in enumerate(real) if g is None]
        for i in self._without:
            self._qs[i].grad = None
        self._real, self._real_versions = real, list(map(version_of, found.tensors))

    def _remember_weights(self) -> None:
        if self._in_c:
            self._before = torch.empty(sum(self._of_weights.sizes), dtype=torch.uint8, device="cpu")
            self._of_weights.fill(self._before.data_ptr(), self._weights_at)
        else:
            self._before = torch.cat([p.detach().view(-1) for p in self._params]).view(torch.uint8)

    def _are_weights_as_seen(self) -> bool:
        before = self._before
        assert before is not None
        if self._in_c:
            return not self._of_weights.differing(before.data_ptr(), self._weights_at)
        return are_equal(self._params, before.view(BF16).split([p.numel() for p in self._params]))

    def _written_gradients(self) -> list[int]:
        """Return the indices of shown gradients whose values have changed: `.data` writes without a new version."""
        if self._in_c:
            return self._of_grads.differing(self._room.data_ptr(), self._found.addresses, widened=not self._is_wide)
        as_shown = are_equal(self._xs, [grad.float() for grad in self._found.tensors])
        return [] if as_shown else [*range(len(self._xs))]

    def _has_grads_as_shown(self) -> bool:
        """Return whether the shadows have the very gradients that they were shown, whatever their values are."""
        shown: list[Any] = self._xs
        if self._without:
            shown = [None if grad is None else x for x, grad in zip(self._xs, self._real, strict=True)]
        return are_same(grads_of(self._qs), shown)

    def _wake(self) -> None:
        """Take the step from here on as a `Chunk` does, parameter by parameter."""
        if self._shadows:
            return
        # What each shadow would have seen as the step began: real weights, the gradient that it was shown, the real one
        before = torch.cat([p.detach().view(-1) for p in self._params]) if self._before is None else self._before
        weights = before.view(BF16).split([p.numel() for p in self._params])
        seen = [(version_of(p), part.view(p.shape)) for p, part in zip(self._params, weights, strict=True)]
        shown = [(None, 0) if g is None else (x, version_of(x)) for x, g in zip(self._xs, self._real, strict=True)]
        real = [(g, 0 if g is None else v) for g, v in zip(self._real, self._real_versions, strict=True)]
        for shadow, weights_of, shown_of, gradient in zip(self._all, seen, shown, real, strict=True):
            shadow.resume(weights_of, shown_of, gradient)
        # and the state of its parameter
        states, own_by_p = self._of_states, self._of_states.own
        content = dict(zip(own_by_p, zip(states.content(), states.given, strict=True), strict=True))
        for shadow in self._all:
            state = ShownState(
                self._state, shadow.segment, self._sight, own := own_by_p.get(shadow.p), states.weight_keys
            )
            if own is not None:
                state.content, given = content[shadow.p]
                state.shown = None if given is own else given
            shadow.states = [state]
        self._transfer = Operators([], [], [shadow.weight for shadow in self._all])
        self._shadows = self._all[:]  # at last: an interrupt may come before it

    def _references(self) -> list[tuple[int, int, int]]:
        here = Counter(map(id, self._state))
        counted = list(map(sys.getrefcount, self._qs))
        return [(count - here[id(q)], 0, 0) for count, q in zip(counted, self._qs, strict=True)]

    def _show_trial_point(self) -> None:
        if not self._shadows and self._in_c and not self._has_masters and self._has_grads_as_shown():
            at = self._room.data_ptr()
            if not self._written_gradients() and not self._of_shadows.differing(at, self._weights_at, widened=True):
                self._keep_gradients()
                return
        self._wake()
        super()._show_trial_point()

    def _take_evaluation(self) -> None:
        if not self._shadows:
            found = self._fingerprint.gradients()
            if found is not None and self._table.are_aligned(found.addresses):
                self._put_gradients_back()
                self._found = found
                self._read_gradients()
                if not self._are_weights_as_seen():
                    self._remember_weights()
                return
            self._wake()
        super()._take_evaluation()

    def _hand_back(self, optimizer: Optimizer) -> None:
        """Find out how far the kernels can write what the step has left. What they cannot write, a `Chunk` does."""
        leaves_real = not self._shadows and self._has_left_real_alone()
        self._is_quick = self._is_as_made() and self._of_states.are_as_shown(self._room)
        leaves_shown = leaves_real and self._is_quick and self._has_grads_as_shown()
        self._written_to = self._written_gradients() if leaves_shown else []
        if self._written_to and (self._without or not self._backs):  # no kernel rounds them back
            self._written_to, leaves_shown = [], False
        if not leaves_shown:
            self._wake()
            if leaves_real:
                for shadow in self._shadows:
                    shadow.hand_back(is_blind=True)
            else:  # an undo wakes shadows, too, maybe before they were counted
                pairs = zip(self._counted, self._has_own, strict=True)
                self._referred = [(count - has_own, 0, 0) for count, has_own in pairs]
                super()._hand_back(optimizer)
        self._are_bound = leaves_shown and not self._without
        if self._is_quick:
            self._before = None  # the rounding needs memory, too

    def _has_left_real_alone(self) -> bool:
        """Return whether the step has left real weights and gradients alone, and nobody else refers to a shadow."""
        if not self._are_weights_as_seen() or not are_same(grads_of(self._params), self._real):
            return False
        is_same = list(map(version_of, self._found.tensors)) == self._real_versions
        return is_same and list(map(sys.getrefcount, self._qs)) == self._counted

    def _keep_gradients(self) -> None:
        """Keep the real gradients for `_undo`."""
        if self._grads_before is None:
            sizes = self._of_grads.sizes
            before = torch.empty(sum(sizes), dtype=torch.uint8, device="cpu")
            Spans(_after_each_other(sizes), sizes).fill(before.data_ptr(), self._found.addresses)
            self._grads_before = self._real, self._found.tensors, before

    def _is_as_made(self) -> bool:
        at = self._room.data_ptr()
        if at != self._at:
            self._at, self._placed = at, [at + offset for offset in self._offsets]
        return list(map(Tensor.data_ptr, self._standing)) == self._placed and self._guards.hold(self._standing)

    def _write(self, key: RoundingKey) -> None:
        if self._is_quick:
            self._moves.write(key)
        else:
            self._wake()
            super()._write(key)

    def _take(self, optimizer: Optimizer, key: RoundingKey) -> None:
        if not self._is_quick:
            self._is_kept = False
            super()._take(optimizer, key)
            return
        self._of_states.take()
        self._is_kept = self._fingerprint.take()
        if self._has_marks():
            for shadow in self._all:
                shadow.take_marks()
        if self._written_to:  # at last, when nothing can fail
            run_all(self._backs)
            torch.autograd.graph.increment_version([self._found.tensors[i] for i in self._written_to])

    def _undo(self) -> None:
        self._is_kept = False
        if not self._is_shown:
            return
        self._of_states.show_others()
        self._wake()
        super()._undo()
        if self._grads_before is not None:
            real, tensors, before = self._grads_before
            parts = before.view(tensors[0].dtype).split([p.numel() for p in self._params])
            for p, grad, values in zip(self._params, real, parts, strict=True):
                p.grad = grad
                if grad is not None:
                    grad.copy_(values.view(grad.shape))

    def _written(self, optimizer: Optimizer) -> list[str]:
        if not self._is_shown:
            return []
        self._versioned = self._of_states.versioned()
        return super()._written(optimizer)


def _after_each_other(sizes: array[int]) -> array[int]:
    return array("Q", [0, *accumulate(sizes[:-1])])


def standing_or_none(optimizer: Optimizer, segments: list[Segment], stores: Stores) -> Standing | None:
    """Return the plan of the next step; None if there can be none, for a reason that is logged."""
    try:
        with torch.no_grad():
            made = Standing(optimizer, segments, stores)
            made.finish()
            return made
    except Unfit as reason:
        logger.debug("%s: the next step is planned anew, as %s", type(optimizer).__name__, reason)
        return None
