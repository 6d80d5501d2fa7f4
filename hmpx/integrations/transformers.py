"""A recipe as a callback of transformers' Trainer: ``Trainer(callbacks=[HmpxCallback("neuron-bf16-sr")])``."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hmpx.recipes.activate import Activation, activate_for, recipe_of_trainer
from hmpx.recipes.reading import Stated
from hmpx.updates.attach import attached, unwrapped
from hmpx.updates.checkpoints import MASTER_KEY

__all__ = ["HmpxCallback"]

logger = logging.getLogger("hmpx")
Module = torch.nn.Module


class HmpxCallback(TrainerCallback):
    """Train, evaluate and predict as a recipe says.

    The recipe is in force, as by `hmpx.activate`, from when the Trainer is made until `hmpx.restore()`: in `train`,
    `evaluate`, `predict` and `generate`. Ops are cast in every model; parameters are those of this Trainer's. The model
    is cast when the Trainer is made, before anything wraps it. The optimizer is attached when training begins, whatever
    made it, after a checkpoint was loaded into it; its state in a Trainer's checkpoint is that of `hmpx.attach`, so a
    resumed run has the same bits.

    Args:
        recipe, keys: as for `hmpx.prepare`: ``HmpxCallback("bf16-sr", state_dtype="8bit", verbose=True)``.

    Attributes:
        recipe: what is in force; ``print(callback.recipe)`` writes it as a file.

    Raises:
        HmpxError: the recipe is wrong, when the callback is made; and when the Trainer is made if another recipe is in
            force, or if the model is sharded in another dtype. Nothing is changed then.

    Example:
        >>> from hmpx.integrations.transformers import HmpxCallback
        >>> trainer = Trainer(model, arguments, train_dataset=texts, callbacks=[HmpxCallback("neuron-bf16-sr")])
        >>> result = trainer.train()
        {'train_runtime': ...}
        >>> model.dtype, trainer.optimizer.state_dict()["param_groups"][0]["hmpx_step"]
        (torch.bfloat16, 2)
    """

    def __init__(self, recipe: Stated, **keys: Any) -> None:
        self.recipe = recipe_of_trainer(recipe, **keys)

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, *, model: Module, **more: Any
    ) -> None:
        """Put the recipe in force when the Trainer has been made, and cast its model."""
        self._take(model)

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        model: Module,
        optimizer: torch.optim.Optimizer,
        **more: Any,
    ) -> None:
        """Attach the optimizer. `model_init` has made another model by now, and a callback may be added late."""
        activation = self._take(model)
        optimizer = unwrapped(optimizer)
        if state.global_step and attached(optimizer) is None:
            self._warn_of_lost_masters(optimizer)
        activation.take_optimizer(optimizer, model)

    def _take(self, model: Module) -> Activation:
        with contextlib.ExitStack() as undo:
            activation = activate_for(type(self).__name__, self.recipe, undo)
            activation.take_model(model, undo)
            undo.pop_all()
        return activation

    def _warn_of_lost_masters(self, optimizer: torch.optim.Optimizer) -> None:
        held = any(MASTER_KEY in values for values in optimizer.state.values() if isinstance(values, dict))
        if self.recipe.settings().has_masters and not held:
            logger.warning(
                "hmpx: the checkpoint has no masters (it was saved without use_master_weights_in_ckpt, or with other "
                "weights): what was below BF16's precision is lost, the masters start from the BF16 weights"
            )
