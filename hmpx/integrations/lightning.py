"""A recipe as a precision plugin of Lightning: ``Trainer(plugins=HmpxPrecision("neuron-bf16-sr"))``.

It is that of ``lightning.pytorch``; of ``pytorch_lightning`` where only that is installed, or only that is imported so
far, since the two do not take each other's plugins.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection

from hmpx import hmp
from hmpx.errors import HmpxError
from hmpx.recipes.activate import Activation, activate_for, recipe_of_trainer
from hmpx.recipes.reading import Stated, as_recipe
from hmpx.recipes.recipe import Recipe
from hmpx.updates.attach import attached, detach, unwrapped

_imported = "lightning.pytorch" in sys.modules or "pytorch_lightning" not in sys.modules
if TYPE_CHECKING or (_imported and importlib.util.find_spec("lightning")):
    from lightning.pytorch.plugins.precision import Precision
else:
    from pytorch_lightning.plugins.precision import Precision

__all__ = ["HPUPrecisionPlugin", "HmpxPrecision"]


class HmpxPrecision(Precision):
    """Train, validate, test and predict as a recipe says.

    While the trainer runs, the recipe is in force as by `hmpx.activate`, for this trainer's model and optimizers.
    Weights are cast before the strategy wraps the model, and in `configure_model` before `fully_shard` takes a module.
    Every optimizer that `configure_optimizers` returns is attached; its state in the checkpoint is that of
    `hmpx.attach`, so a resumed run has the same bits. When the trainer is done torch is as it was, and the optimizers
    stay attached, for `trainer.save_checkpoint`.

    Args:
        recipe, keys: as for `hmpx.prepare`: ``HmpxPrecision("bf16-sr", state_dtype="8bit")``. Without a recipe,
            `opt_level`, `bf16_file_path` and `fp32_file_path` are HMP's, and weights stay FP32.

    Attributes:
        recipe: what is in force; ``print(plugin.recipe)`` writes it as a file.

    Raises:
        HmpxError: the recipe is wrong, when the plugin is made; and before training starts if another recipe is in
            force, or if the model is replicated or sharded in another dtype. Nothing is changed then. `precision=`
            beside a plugin is an error of Lightning's own.

    Example:
        >>> from hmpx.integrations.lightning import HmpxPrecision
        >>> quiet = {"enable_progress_bar": False, "enable_model_summary": False}
        >>> trainer = pl.Trainer(max_epochs=1, plugins=HmpxPrecision("neuron-bf16-sr"), **quiet)
        >>> trainer.fit(module, batches)
        >>> module.net[0].weight.dtype, trainer.optimizers[0].state_dict()["param_groups"][0]["hmpx_step"]
        (torch.bfloat16, 8)
    """

    def __init__(self, recipe: Stated = None, **keys: Any) -> None:
        if recipe is None:
            said = [keys.pop(key, None) for key in ("opt_level", "bf16_file_path", "fp32_file_path")]
            if not any(said):
                raise HmpxError("HmpxPrecision needs a recipe, or HMP's opt_level and lists")
            level, lists = hmp.lenient(said[0] or "O1", *said[1:])
            paths: Any = {key: os.fspath(path or "") for key, path in lists.items()}
            recipe = Recipe(opt_level=level, parameter_dtype="float32", **paths)
        self._set_up(recipe, **keys)

    def _set_up(self, recipe: Stated, **keys: Any) -> None:
        given = os.fspath(recipe) if isinstance(recipe, str | os.PathLike) else as_recipe(recipe)
        self._words = f"{type(self).__name__}({', '.join([repr(given), *(f'{k}={v!r}' for k, v in keys.items())])})"
        self.recipe = recipe_of_trainer(recipe, **keys)
        self._activation: Activation | None = None
        self._undo = contextlib.ExitStack()  # until the optimizers are attached
        narrow = self.recipe.parameter_dtype == "bfloat16"
        self.precision: Any = "bf16-true" if narrow else "32-true"  # what Lightning computes the size of the model by

    def __repr__(self) -> str:
        return self._words

    def _start(self, undo: contextlib.ExitStack) -> Activation:
        self._activation = activate_for(type(self).__name__, self.recipe, undo)
        return self._activation

    @contextlib.contextmanager
    def module_init_context(self) -> Iterator[None]:
        """Put the recipe in force before `configure_model` shards a module."""
        self._start(self._undo)
        yield

    def convert_module(self, module: torch.nn.Module) -> torch.nn.Module:
        """Put the recipe in force, and cast the model before the strategy wraps it."""
        with contextlib.ExitStack() as undo:
            undo.push(self._undo.pop_all())
            self._start(undo).take_model(module, undo)
            self._undo = undo.pop_all()
        return module

    def connect(self, model: Any, optimizers: list, lr_schedulers: list) -> tuple[Any, list, list]:
        """Attach the optimizers."""
        with self._undo:
            for optimizer in map(unwrapped, optimizers):
                if attached(optimizer) is None:
                    self._undo.callback(detach, optimizer)
                self._start(self._undo).take_optimizer(optimizer, model)
            self._undo.pop_all()
        return model, optimizers, lr_schedulers

    def convert_input(self, data: Any) -> Any:
        """Return a batch in the dtypes of the recipe's `dtype_map`: it was made outside of the model."""
        mapped = self.recipe.mapped()
        if not mapped:
            return data
        return apply_to_collection(data, torch.Tensor, lambda x: x.to(mapped.get(x.dtype, x.dtype)))

    def teardown(self) -> None:
        """Put torch back."""
        self._undo.pop_all()
        if self._activation is not None:
            self._activation.restore()


class HPUPrecisionPlugin(HmpxPrecision):
    """Lightning's removed plugin for Habana's HMP, by its arguments, on any device: one import changes.

    Args:
        precision: 16 or "bf16" (also "16-mixed", "bf16-mixed") casts ops as the rest says; 32 casts nothing.
        opt_level, bf16_file_path, fp32_file_path, verbose: see `HmpxPrecision`.

    Raises:
        HmpxError: another `precision`, or a list that is wrong.

    Example:
        >>> from hmpx.integrations.lightning import HPUPrecisionPlugin
        >>> HPUPrecisionPlugin(precision=16, opt_level="O1", bf16_file_path="bf16.txt").recipe.opt_level
        'O1'
    """

    def __init__(
        self,
        precision: str | int,
        opt_level: str = "O2",
        bf16_file_path: str | os.PathLike[str] | None = None,
        fp32_file_path: str | os.PathLike[str] | None = None,
        verbose: bool = False,
    ) -> None:
        if precision in (16, "16", "bf16", "16-mixed", "bf16-mixed"):
            lists: dict[str, Any] = {"bf16_file_path": bf16_file_path, "fp32_file_path": fp32_file_path}
            super().__init__(opt_level=opt_level, verbose=verbose, **lists)
        elif precision in (32, "32", "32-true"):
            self._set_up(Recipe(opt_level=None, parameter_dtype="float32"))
        else:
            raise HmpxError(f"precision={precision!r} is none of 16, 'bf16', 32")
