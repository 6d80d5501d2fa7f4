"""What `state_dict` and `load_state_dict` of an attached optimizer do with masters.

They travel as FP32 tensors in the state of their parameter, under one key for both ways of holding them, so that a
checkpoint moves between `master` and `split`, and a plain torch optimizer finds what is its own.
"""

from __future__ import annotations

import contextlib
import logging

import torch

from hmpx.errors import HmpxError
from hmpx.sharding import is_sharded
from hmpx.updates.names import parameters
from hmpx.updates.stepping import MASTER_KEY, SEED_KEY, STEP_KEY, WeightUpdates
from hmpx.updates.weights import Run

logger = logging.getLogger("hmpx")
Optimizer = torch.optim.Optimizer

HELD_KEY = "hmpx_masters"  # in param_groups[0] of a checkpoint that holds masters


class Checkpoints:
    """The hooks on one optimizer."""

    def __init__(self, updates: WeightUpdates) -> None:
        self._updates, self._settings = updates, updates.settings
        self._incoming: dict[int, torch.Tensor] = {}
        self._complete = self._saw_state_dict = False

    def register(self, optimizer: Optimizer, undo: contextlib.ExitStack) -> None:
        """Install the hooks; `undo` removes them.

        A wrapper that never ran `Optimizer.__init__` has none: its checkpoints are its own, and hold no masters.
        """
        wanted = self._settings.use_master_weights_in_ckpt
        if not hasattr(optimizer, "_optimizer_state_dict_post_hooks"):
            if wanted:
                raise HmpxError(f"{type(optimizer).__name__} has no state_dict hooks to put masters into a checkpoint")
            return
        for handle in (
            optimizer.register_state_dict_post_hook(self._saved),
            optimizer.register_load_state_dict_pre_hook(self._loading, prepend=True),
            optimizer.register_load_state_dict_post_hook(self._loaded),
        ):
            undo.callback(handle.remove)
        if wanted:
            optimizer.state_dict()
            if not self._saw_state_dict:
                raise HmpxError(f"{type(optimizer).__name__}.state_dict runs no hooks, so it would hold no masters")

    @torch.no_grad()
    def _saved(self, optimizer: Optimizer, state_dict: dict) -> None:
        self._saw_state_dict = True
        if not self._settings.use_master_weights_in_ckpt:
            return
        state_dict["param_groups"][0][HELD_KEY] = True  # also where no master says more than its weight
        index = {p: i for i, p in enumerate(parameters(optimizer))}
        stateless = STEP_KEY in optimizer.param_groups[0] and not state_dict["state"]
        for run in self._updates.runs(optimizer):
            masters, i = self._updates.way.masters(run), index[run.param]
            # A parameter that has no state yet must not seem to have some: optimizers look for "no state" to make it.
            if stateless or i in state_dict["state"] or _tell_more(run, masters):
                state_dict["state"][i] = {**state_dict["state"].get(i, {}), MASTER_KEY: masters}

    def _loading(self, optimizer: Optimizer, state_dict: dict) -> dict:
        ids = [i for group in state_dict["param_groups"] for i in group["params"]]
        params = dict(zip(ids, parameters(optimizer), strict=False))
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
        params = dict(zip(self._ids, parameters(optimizer), strict=True))
        incoming, self._incoming = {params[i]: masters for i, masters in self._incoming.items()}, {}
        if self._settings.seed is not None:
            optimizer.param_groups[0][SEED_KEY] = self._settings.seed
        self._take(incoming)

    @torch.no_grad()
    def take_from_state(self, optimizer: Optimizer) -> None:
        """Take over masters that a load has put into the state itself."""
        states = [(p, values) for p, values in optimizer.state.items() if isinstance(values, dict)]
        self._take({p: values.pop(MASTER_KEY) for p, values in states if MASTER_KEY in values})

    def _take(self, incoming: dict[torch.nn.Parameter, torch.Tensor]) -> None:
        if not self._settings.has_masters:
            if incoming:
                logger.warning(
                    "hmpx: the checkpoint's masters of %d parameters are dropped: weights=%r holds none",
                    len(incoming),
                    self._settings.weights,
                )
            return
        way = self._updates.way
        way.forget()
        for p, masters in incoming.items():
            way.set_masters(p, masters)
        if not incoming and not self._complete:
            logger.warning(
                "hmpx: the checkpoint has no masters (it was saved without use_master_weights_in_ckpt, or with other "
                "weights): what was below BF16's precision is lost, the masters start from the BF16 weights"
            )


def _tell_more(run: Run, masters: torch.Tensor) -> bool:
    """Whether masters say more than the weights. Of a shard no rank may say so alone."""
    return not is_sharded(run.param) and not torch.equal(masters, run.param.float())
