"""Master weights in checkpoints: hooks on `state_dict` and `load_state_dict` of an attached optimizer.

A checkpoint holds masters as FP32 tensors in the state of their parameter. `master`, `split` and `split8` use the same
key, so each can load a checkpoint of another. A plain torch optimizer can load it, too.
"""

from __future__ import annotations

import contextlib
import logging
from typing import Any, cast

import torch
from torch.utils.hooks import RemovableHandle

from hmpx.base.tensors import lacks_data
from hmpx.errors import HmpxError
from hmpx.updates.holding.held import Segment, checked_codes
from hmpx.updates.holding.sharding import is_sharded
from hmpx.updates.optimizer_hooks import takes_hooks
from hmpx.updates.stepping import step_count
from hmpx.updates.stepping.names import inside_zero, own_attachment, parameters
from hmpx.updates.stepping.step import WeightUpdates
from hmpx.updates.stepping.step_count import SEED_KEY, STEP_KEY, VERSION_KEY
from hmpx.version import __version__

logger = logging.getLogger("hmpx")
Optimizer = torch.optim.Optimizer

MASTER_KEY = "hmpx_master"  # in the state of a parameter, in a checkpoint
HELD_KEY = "hmpx_masters"  # in param_groups[0] of a checkpoint that holds masters
_IN_HALVES = ("split", "split8")
_BEFORE = (
    "hmpx: %s: this checkpoint is of hmpx 0.2 or before, and goes on with the same numbers; since then 'split' and "
    "'split8' take 2 and 1 bytes beside a weight (2.06 and 1.06 before), and the upper half of a weight that somebody "
    "writes keeps its lower half ('master' sees each write)"
)


class Checkpoints:
    """The hooks on `state_dict` and `load_state_dict` of one optimizer."""

    def __init__(self, updates: WeightUpdates) -> None:
        self._updates, self._settings = updates, updates.settings
        self._saw_state_dict = self._warned = False
        self._is_present, self._loses = True, False  # is the loaded state the present one? does it lack masters?
        self._alone: dict[torch.nn.Parameter, torch.Tensor] = {}  # masters that were loaded without other state
        self._loading_handle: RemovableHandle | None = None
        self._in_load, self._has_loaded = False, False  # while a class's own `load_state_dict` runs, and torch's in it

    def register(self, optimizer: Optimizer, undo: contextlib.ExitStack) -> None:
        """Install the hooks; `undo` removes them.

        An optimizer that never ran `Optimizer.__init__` has no hooks, so its checkpoints hold no masters.

        Raises:
            HmpxError: masters in checkpoints were asked for, and `state_dict` runs no hooks.
        """
        wanted = self._settings.use_master_weights_in_ckpt
        if not takes_hooks(optimizer, "register_state_dict_post_hook"):
            if wanted:
                raise HmpxError(f"{type(optimizer).__name__} has no state_dict hooks to put masters into a checkpoint")
            return
        self._saved_handle = optimizer.register_state_dict_post_hook(self._saved)
        self._loading_handle = optimizer.register_load_state_dict_pre_hook(self._loading)
        undo.callback(self._remove_moving)
        for handle in (
            optimizer.register_state_dict_pre_hook(self._saving),
            optimizer.register_load_state_dict_post_hook(self._loaded),
        ):
            undo.callback(handle.remove)
        if wanted:
            optimizer.state_dict()
            if not self._saw_state_dict:
                raise HmpxError(f"{type(optimizer).__name__}.state_dict runs no hooks, so it would hold no masters")

    def _remove_moving(self) -> None:
        self._saved_handle.remove()
        if self._loading_handle is not None:
            self._loading_handle.remove()

    def hook_last(self, optimizer: Optimizer) -> None:
        """Before a load, make `_loading` the last hook: it must see the checkpoint as the user's hooks leave it."""
        if self._loading_handle is not None:
            self._loading_handle.remove()
            self._loading_handle = optimizer.register_load_state_dict_pre_hook(self._loading)

    def _saving(self, optimizer: Optimizer) -> None:
        """Prepare a save. Make `_saved` the first hook, so that the user's hooks see the masters and may move them."""
        self._saved_handle.remove()
        self._saved_handle = optimizer.register_state_dict_post_hook(self._saved, prepend=True)
        own_attachment(optimizer).refuse_open("state_dict()")
        own_attachment(optimizer).cast_state_along()
        known = step_count.stored(optimizer)
        if known:
            step_count.keep(optimizer)

    @torch.no_grad()
    def _saved(self, optimizer: Optimizer, state_dict: dict) -> None:
        self._saw_state_dict = True
        if step_count.stored(optimizer).get(STEP_KEY):
            state_dict["param_groups"][0][VERSION_KEY] = __version__
        if not self._settings.use_master_weights_in_ckpt:
            self._warn_of_lost(optimizer)
            return
        state_dict["param_groups"][0][HELD_KEY] = True  # even if there are none, because all equal their weights
        index = {p: i for i, p in enumerate(parameters(optimizer))}
        stateless = STEP_KEY in step_count.stored(optimizer) and not any(state_dict["state"].values())
        for segment in self._updates.segments(optimizer):
            masters, i = self._updates.stores.masters(segment), index[segment.param]
            if masters is None:
                continue
            # An optimizer begins the state of a parameter that has none, and would take a lone master for state.
            if state_dict["state"].get(i) or _tell_more(segment, masters, stateless):
                state_dict["state"][i] = {**state_dict["state"].get(i, {}), MASTER_KEY: masters}

    def _warn_of_lost(self, optimizer: Optimizer) -> None:
        """Warn at the first save that it holds no masters: at the resume that misses them it is too late."""
        if not self._warned and self._settings.has_masters and step_count.stored(optimizer).get(STEP_KEY):
            self._warned = True
            logger.warning(
                "hmpx: the checkpoint of %s holds no masters: who resumes from it starts from the BF16 weights; say "
                "use_master_weights_in_ckpt=True, of attach or in the recipe, to save them",
                type(optimizer).__name__,
            )

    def _loading(self, optimizer: Optimizer, state_dict: dict) -> dict:
        groups, params = state_dict["param_groups"], parameters(optimizer)
        steps = groups[0].get(STEP_KEY)
        stepped = bool(state_dict["state"] if steps is None else steps)
        if steps and VERSION_KEY not in groups[0] and any(way.weights in _IN_HALVES for way in self._settings.ways):
            logger.warning(_BEFORE, type(optimizer).__name__)
        self._loses = stepped and not any(HELD_KEY in group for group in groups)
        own = step_count.stored(optimizer)
        self._is_present = (
            not (self._updates.stores.are_torn or own_attachment(optimizer).is_open)
            and all(groups[0].get(key) == own.get(key) for key in (STEP_KEY, SEED_KEY))
            and (bool(steps) or bool(state_dict["state"]) == any(optimizer.state.values()))
        )
        state, self._alone = dict(state_dict["state"]), {}
        for i, p in zip([i for group in groups for i in group["params"]], params, strict=False):
            values = state.get(i)
            if not isinstance(values, dict):
                continue
            state[i] = checked_codes(values, p, i)
            masters = values.get(MASTER_KEY)
            if masters is not None and masters.shape != p.shape:
                raise HmpxError(
                    f"the checkpoint's masters of parameter {i} have the shape {tuple(masters.shape)}, "
                    f"the parameter {tuple(p.shape)}; nothing was loaded"
                )
            if masters is not None and len(values) == 1 and not self._in_load:  # torch would take it for full state
                self._alone[p] = state.pop(i)[MASTER_KEY]
        return {
            **state_dict,
            "state": state,
            "param_groups": [{k: v for k, v in g.items() if k != HELD_KEY} for g in groups],
        }

    def _loaded(self, optimizer: Optimizer) -> None:
        step_count.forget(optimizer)
        if self._settings.seed is not None:
            step_count.keep(optimizer, **{SEED_KEY: self._settings.seed})
        self._has_loaded = True
        if not self._in_load:
            self.take(optimizer)

    def load(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        """Call the `load_state_dict` of a class that has one of its own, and take the masters after it.

        It may go over the checkpoint after torch's, and look each key up in the loaded state.
        """
        self._in_load, self._has_loaded = True, False
        try:
            type(optimizer).load_state_dict(optimizer, *args, **kwargs)
        finally:
            self._in_load = False
            if self._has_loaded:
                self.take(optimizer)

    def watch_loads(self, outer: Optimizer, undo: contextlib.ExitStack) -> None:
        """After each load of a ZeroRedundancyOptimizer, take the masters out of its inner optimizer's state.

        The load runs no hooks of the inner optimizer, so there is one on the outer. `undo` removes it.
        """

        def loaded(outer: Optimizer) -> None:
            inner = inside_zero(outer)
            assert inner is not None, "its loads alone are watched"
            self._is_present, self._loses = False, True
            self.take(inner)
            outer.state.clear()  # a second copy, which nothing reads

        undo.callback(outer.register_load_state_dict_post_hook(loaded).remove)

    @torch.no_grad()
    def take(self, optimizer: Optimizer) -> None:
        """Move masters that torch has loaded from the optimizer's state to the stores: after a load, or in `attach`."""
        states = [(p, values) for p, values in optimizer.state.items() if isinstance(values, dict)]
        found = {cast(torch.nn.Parameter, p): values.pop(MASTER_KEY) for p, values in states if MASTER_KEY in values}
        for p in [p for p in found if not optimizer.state[p]]:
            del optimizer.state[p]
        found, self._alone = {**found, **self._alone}, {}
        if not found and self._is_present:
            return  # a wrapper has loaded what it has just saved, and the masters here still belong to that
        self._updates.stores.forget()
        dropped = self._updates.set_masters(optimizer, found)
        self._updates.stores.own()
        for why, count in dropped.items():
            logger.warning("hmpx: the checkpoint's masters of %d parameters are dropped: %s", count, why)
        if self._settings.has_masters and not found and self._loses:
            logger.warning(
                "hmpx: the checkpoint has no masters (it was saved without use_master_weights_in_ckpt, or with other "
                "weights, or torch.distributed.checkpoint loads it with flatten_optimizer_state_dict=True): what was "
                "below BF16's precision is lost, the masters start from the BF16 weights"
            )
        self._is_present = True


def _tell_more(segment: Segment, masters: torch.Tensor, stateless: bool) -> bool:
    """Return whether a save has masters of parameters without state: if none has state, or they are not the weights.

    A distributed load reads only what its target would save, and the target's masters equal its weights before the
    load. Shards are not compared, since ranks must agree on what they save.
    """
    p = segment.param
    return stateless or (not is_sharded(p) and not lacks_data(p) and not torch.equal(masters, p.float()))
