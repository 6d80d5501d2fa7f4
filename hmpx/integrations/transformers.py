"""A recipe as a callback of transformers' Trainer: ``Trainer(callbacks=[HmpxCallback("neuron-bf16-sr")])``."""

from __future__ import annotations

import contextlib
import logging
import weakref
from typing import Any

import torch
from accelerate.utils import convert_to_fp32
from transformers import PreTrainedModel, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hmpx.base import region_state, run_in_region
from hmpx.errors import HmpxError
from hmpx.integrations.setting_up import SettingUp, Stated
from hmpx.recipes import frameworks
from hmpx.recipes.recipe import Recipe
from hmpx.updates.attach import attached
from hmpx.updates.checkpoints import MASTER_KEY

__all__ = ["HmpxCallback"]

logger = logging.getLogger("hmpx")
Module = torch.nn.Module
_COMPILES = hasattr(torch.Tensor, "grad_dtype")  # torch 2.13, from which on a region may stand in compiled code


class HmpxCallback(TrainerCallback):
    """Train, evaluate and predict as a recipe says.

    The model is cast when the Trainer is made, before anything wraps it. The optimizer is attached when training
    begins, whatever made it, after a checkpoint was loaded into it; its state in a Trainer's checkpoint is that of
    `hmpx.attach`, so a resumed run has the same bits. Ops are cast in the forward of the model, whoever calls it
    (`evaluate`, `predict`, `generate`, a compiled model), and what it returns is FP32 outside, as with `bf16=True`.
    `hmpx.restore()` takes the casts away.

    Args:
        recipe: as for `hmpx.prepare`.
        verbose: log each distinct decision once.

    Attributes:
        recipe: what is in force; ``print(callback.recipe)`` writes it as a file.

    Raises:
        HmpxError: the recipe is wrong, when the callback is made; and when the Trainer is made if it was asked for what
            does not go with it (`bf16=True`, any clipping or accumulation beside `release_gradients`), if another
            recipe is in force, or if the model is sharded in another dtype. Nothing is changed then.

    Example:
        >>> from hmpx.integrations.transformers import HmpxCallback
        >>> trainer = Trainer(model, arguments, train_dataset=texts, callbacks=[HmpxCallback("neuron-bf16-sr")])
        >>> result = trainer.train()
        {'train_runtime': ...}
        >>> model.dtype, trainer.optimizer.state_dict()["param_groups"][0]["hmpx_step"]
        (torch.bfloat16, 2)
    """

    def __init__(self, recipe: Stated, *, verbose: bool = False) -> None:
        self._setting_up = SettingUp(type(self).__name__, recipe, verbose)

    @property
    def recipe(self) -> Recipe:
        """Return the recipe that is in force."""
        return self._setting_up.recipe

    def __repr__(self) -> str:
        return self._setting_up.words

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, *, model: Module, **more: Any
    ) -> None:
        """Check what the Trainer was asked for when it has been made, and cast its model."""
        self._set_up(args, control, model)

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
        self._set_up(args, control, model)
        optimizer = frameworks.unwrapped(optimizer)
        if state.global_step and attached(optimizer) is None:
            self._warn_of_lost_masters(optimizer)
        self._setting_up.attach(optimizer, model)

    def _set_up(self, args: TrainingArguments, control: TrainerControl, model: Module) -> None:
        before = _forwards.get(model)
        if before is not None and before.setting_up is not self._setting_up and before.control() is control:
            raise HmpxError("two HmpxCallbacks in one Trainer: a model has one recipe")
        self._setting_up.refuse(frameworks.of_transformers(args))
        if args.torch_compile and not _COMPILES and self.recipe.opt_level is not None:
            raise HmpxError(
                "torch_compile=True compiles the forward with its casts, which wants torch 2.13; `python -m hmpx run` "
                "does without"
            )
        with contextlib.ExitStack() as undo:
            self._setting_up.cast(model, undo)
            self._setting_up.install()
            undo.pop_all()
        if before is None or before.setting_up is not self._setting_up:
            if before is not None:  # of a Trainer that had the model before
                before.remove()
            _forwards[model] = Forward(self._setting_up, control, model)

    def _warn_of_lost_masters(self, optimizer: torch.optim.Optimizer) -> None:
        held = any(MASTER_KEY in values for values in optimizer.state.values() if isinstance(values, dict))
        if self.recipe.settings().has_masters and not held:
            logger.warning(
                "hmpx: the checkpoint has no masters (it was saved without use_master_weights_in_ckpt, or with other "
                "weights): what was below BF16's precision is lost, the masters start from the BF16 weights"
            )


class Forward(run_in_region.Opener):
    """Casts around the forward of a model, by hooks on it and on each model inside, which `generate` calls.

    Copies of the model share this object; a pickle of it is empty.
    """

    def __init__(self, setting_up: SettingUp | None = None, control: Any = None, model: Module | None = None) -> None:
        self.setting_up = setting_up
        self.control = (lambda: None) if control is None else weakref.ref(control)
        self._handles = []
        for module in model.modules() if model is not None else ():
            if module is model or isinstance(module, PreTrainedModel):
                self._handles += [
                    module.register_forward_pre_hook(self._enter),
                    module.register_forward_hook(self._leave, always_call=True),
                ]

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def _enter(self, module: Module, inputs: Any) -> None:
        if self.setting_up is not None:
            self.setting_up.take_over()
            self._enter_region(True)

    def _leave(self, module: Module, inputs: Any, outputs: Any) -> Any:
        if self.setting_up is None:
            return None
        self._leave_region()
        inside = region_state.casting() is True
        return outputs if inside or not self.setting_up.casts_ops else convert_to_fp32(outputs)

    def __deepcopy__(self, memo: Any) -> Forward:
        return self

    def __reduce__(self) -> tuple:
        return Forward, ()


_forwards: weakref.WeakKeyDictionary[Module, Forward] = weakref.WeakKeyDictionary()
