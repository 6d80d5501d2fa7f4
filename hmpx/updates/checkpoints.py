"""Master weights in checkpoints: hooks on `state_dict` and `load_state_dict` of an attached optimizer.

A checkpoint holds masters as FP32 tensors in the state of their parameter, under one key for `master` and `split`, so
that it can be loaded into either. A plain torch optimizer can load the checkpoint too.
"""

from __future__ import annotations

import contextlib
import logging
from typing import Any, cast

import torch
from torch.utils.hooks import RemovableHandle

from hmpx.errors import HmpxError
from hmpx.rounding.devices import lacks_data
from hmpx.updates.holding.segment import Segment
from hmpx.updates.holding.state_tensors import check_codes, is_coded
from hmpx.updates.optimizer_hooks import attachment_of
from hmpx.updates.ranks.sharding import is_sharded, local
from hmpx.updates.stepping import step_count
from hmpx.updates.stepping.names import inside_zero, parameters
from hmpx.updates.stepping.step import WeightUpdates
from hmpx.updates.stepping.step_call import is_incomplete
from hmpx.updates.stepping.step_count import SEED_KEY, STEP_KEY

logger = logging.getLogger("hmpx")
Optimizer = torch.optim.Optimizer

MASTER_KEY = "hmpx_master"  # in the state of a parameter, in a checkpoint
HELD_KEY = "hmpx_masters"  # in param_groups[0] of a checkpoint that holds masters


class Checkpoints:
    """The hooks on one optimizer."""

    def __init__(self, updates: WeightUpdates) -> None:
        self._updates, self._settings = updates, updates.settings
        self._incoming: dict[int, torch.Tensor] = {}
        self._complete = self._saw_state_dict = self._warned = False
        self._is_own, self._stepped = False, True
        self._loading_handle: RemovableHandle | None = None

    def register(self, optimizer: Optimizer, undo: contextlib.ExitStack) -> None:
        """Install the hooks; `undo` removes them.

        An optimizer that never ran `Optimizer.__init__` has no hooks, so its checkpoints hold no masters.

        Raises:
            HmpxError: masters in checkpoints were asked for, and `state_dict` runs no hooks.
        """
        wanted = self._settings.use_master_weights_in_ckpt
        if not hasattr(optimizer, "_optimizer_state_dict_post_hooks"):
            if wanted:
                raise HmpxError(f"{type(optimizer).__name__} has no state_dict hooks to put masters into a checkpoint")
            return
        self._saved_handle = optimizer.register_state_dict_post_hook(self._saved)
        self._loading_handle = optimizer.register_load_state_dict_pre_hook(self._loading)
        for handle in (
            self._saved_handle,
            self._loading_handle,
            optimizer.register_state_dict_pre_hook(self._saving),
            optimizer.register_load_state_dict_post_hook(self._loaded),
        ):
            undo.callback(handle.remove)
        if wanted:
            optimizer.state_dict()
            if not self._saw_state_dict:
                raise HmpxError(f"{type(optimizer).__name__}.state_dict runs no hooks, so it would hold no masters")

    def hook_last(self, optimizer: Optimizer) -> None:
        """Before a load: let our hook run last, so that it sees the checkpoint as the user's hooks have changed it."""
        if self._loading_handle is not None:
            optimizer._optimizer_load_state_dict_pre_hooks.move_to_end(self._loading_handle.id)

    def _saving(self, optimizer: Optimizer) -> None:
        """Before `state_dict`: let our hook run first, so that hooks of the user see the masters and may move them."""
        optimizer._optimizer_state_dict_post_hooks.move_to_end(self._saved_handle.id, last=False)
        attachment_of(optimizer).cast_state_along()
        known = step_count.stored(optimizer)
        if known:
            step_count.keep(optimizer)

    @torch.no_grad()
    def _saved(self, optimizer: Optimizer, state_dict: dict) -> None:
        self._saw_state_dict = True
        if not self._settings.use_master_weights_in_ckpt:
            self._warn_of_lost(optimizer)
            return
        state_dict["param_groups"][0][HELD_KEY] = True  # even if there are none, because all equal their weights
        index = {p: i for i, p in enumerate(parameters(optimizer))}
        stateless = STEP_KEY in step_count.stored(optimizer) and not state_dict["state"]
        for segment in self._updates.segments(optimizer):
            masters, i = self._updates.stores.masters(segment), index[segment.param]
            if masters is None:
                continue
            # Optimizers create the state of a parameter that has none, so a master alone must not look like state.
            if stateless or i in state_dict["state"] or _tell_more(segment, masters):
                state_dict["state"][i] = {**state_dict["state"].get(i, {}), MASTER_KEY: masters}

    def _warn_of_lost(self, optimizer: Optimizer) -> None:
        """Warn at the first save that the masters are not in it, and not at the resume that misses them."""
        if not self._warned and self._settings.has_masters and step_count.stored(optimizer).get(STEP_KEY):
            self._warned = True
            logger.warning(
                "hmpx: the checkpoint of %s holds no masters: who resumes from it starts from the BF16 weights; say "
                "use_master_weights_in_ckpt=True, of attach or in the recipe, to save them",
                type(optimizer).__name__,
            )

    def _loading(self, optimizer: Optimizer, state_dict: dict) -> dict:
        steps = state_dict["param_groups"][0].get(STEP_KEY)
        self._stepped = bool(state_dict["state"] if steps is None else steps)
        self._is_own = not is_incomplete(optimizer) and _is_present_state(optimizer, state_dict)
        ids = [i for group in state_dict["param_groups"] for i in group["params"]]
        params = dict(zip(ids, parameters(optimizer), strict=False))
        for i, values in state_dict["state"].items():
            if i in params and is_coded(values):
                check_codes(values, params[i], i)
        self._incoming, state = {}, {}
        for i, values in state_dict["state"].items():
            if not isinstance(values, dict) or MASTER_KEY not in values:
                state[i] = values
                continue
            own = {key: value for key, value in values.items() if key != MASTER_KEY}
            if own:
                state[i] = own
            masters, p = values[MASTER_KEY], params.get(i)
            if p is not None and masters.shape != p.shape:
                raise HmpxError(
                    f"the checkpoint's masters of parameter {i} have the shape {tuple(masters.shape)}, "
                    f"the parameter {tuple(p.shape)}; nothing was loaded"
                )
            self._incoming[i] = masters
        self._ids = ids
        self._complete = any(HELD_KEY in group for group in state_dict["param_groups"])
        groups = [{k: v for k, v in group.items() if k != HELD_KEY} for group in state_dict["param_groups"]]
        return {**state_dict, "state": state, "param_groups": groups}

    @torch.no_grad()
    def _loaded(self, optimizer: Optimizer) -> None:
        step_count.forget(optimizer)
        params = dict(zip(self._ids, parameters(optimizer), strict=True))
        incoming = {params[i]: masters for i, masters in self._incoming.items()}
        self._incoming = {}
        if self._settings.seed is not None:
            step_count.keep(optimizer, **{SEED_KEY: self._settings.seed})
        self._take(optimizer, incoming)
        self._is_own, self._stepped = False, True

    def watch_loads(self, outer: Optimizer, undo: contextlib.ExitStack) -> None:
        """Take masters out of a load of a ZeroRedundancyOptimizer; `undo` removes the hook.

        The load gives the inner optimizer its state without running hooks.
        """

        @torch.no_grad()
        def loaded(outer: Optimizer) -> None:
            inner = inside_zero(outer)
            assert inner is not None, "its loads alone are watched"
            self._take(inner, _masters_in(inner))
            outer.state.clear()  # a second copy, which nothing reads

        undo.callback(outer.register_load_state_dict_post_hook(loaded).remove)

    def take_earlier(self, optimizer: Optimizer) -> None:
        """Take over masters that a load before `attach` has left in the optimizer's state."""
        found = _masters_in(optimizer)
        held = {p: masters for p, masters in found.items() if masters.dtype is torch.float32}
        lost = self._updates.set_masters(optimizer, held)
        lost = {f"weights={weights!r}": count for weights, count in lost.items()}
        if cast_down := len(found) - len(held):
            why = "the load cast them to BF16" if self._settings.has_masters else f"weights={self._settings.weights!r}"
            lost[why] = lost.get(why, 0) + cast_down
        for why, count in lost.items():
            logger.warning("hmpx: masters of %d parameters, loaded before attach, are dropped: %s", count, why)

    def _take(self, optimizer: Optimizer, incoming: dict[torch.nn.Parameter, torch.Tensor]) -> None:
        if self._is_own and not incoming:
            return  # a wrapper loads the state that it has just saved: the present masters belong to it
        self._updates.stores.forget()
        for weights, count in self._updates.set_masters(optimizer, incoming).items():
            logger.warning(
                "hmpx: the checkpoint's masters of %d parameters are dropped: weights=%r holds none", count, weights
            )
        if self._settings.has_masters and not incoming and not self._complete and self._stepped:
            logger.warning(
                "hmpx: the checkpoint has no masters (it was saved without use_master_weights_in_ckpt, or with other "
                "weights): what was below BF16's precision is lost, the masters start from the BF16 weights"
            )


def _masters_in(optimizer: Optimizer) -> dict[torch.nn.Parameter, torch.Tensor]:
    """Take the masters out of the optimizer's state."""
    states = [(p, values) for p, values in optimizer.state.items() if isinstance(values, dict)]
    return {cast(torch.nn.Parameter, p): values.pop(MASTER_KEY) for p, values in states if MASTER_KEY in values}


def _tell_more(segment: Segment, masters: torch.Tensor) -> bool:
    """Whether masters differ from the weights. False for a shard, since its ranks must agree, and without data."""
    p = segment.param
    return not is_sharded(p) and not lacks_data(p) and not torch.equal(masters, p.float())


def _is_present_state(optimizer: Optimizer, state_dict: dict) -> bool:
    """Whether a checkpoint changes nothing: it is from before the first step, or has the optimizer's own state.

    False after the first step of an optimizer that keeps no state, which says nothing.
    """
    first = state_dict["param_groups"][0]
    if any(first.get(key) != optimizer.param_groups[0].get(key) for key in (STEP_KEY, SEED_KEY)):
        return False
    index: dict[torch.Tensor, int] = {p: i for i, p in enumerate(parameters(optimizer))}
    ids = [i for group in state_dict["param_groups"] for i in group["params"]]
    if len(ids) != len(index):
        return False
    held = {ids[index[p]]: values for p, values in optimizer.state.items() if p in index}
    if not held and not state_dict["state"]:
        return not first.get(STEP_KEY)
    return _equal(held, state_dict["state"])


def _equal(one: Any, other: Any) -> bool:
    """Whether two values of optimizer state are equal; False for kinds of values that cannot be compared here."""
    if one is other:
        return True
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and is_sharded(one) == is_sharded(other):
        a, b = local(one), local(other)
        alike = type(a) is type(b) and (a.dtype, a.device, a.shape) == (b.dtype, b.device, b.shape)
        return alike and (lacks_data(a) or torch.equal(a, b))
    return type(one) is type(other) and isinstance(one, int | float | str) and one == other
