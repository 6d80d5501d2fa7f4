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
from torch.utils._pytree import tree_map_only

from hmpx import hmp
from hmpx.errors import HmpxError
from hmpx.integrations.setting_up import SettingUp, Stated, detach_new
from hmpx.recipes import frameworks
from hmpx.recipes.recipe import Recipe

_imported = "lightning.pytorch" in sys.modules or "pytorch_lightning" not in sys.modules
if TYPE_CHECKING or (_imported and importlib.util.find_spec("lightning")):
    from lightning.pytorch.plugins.precision import Precision
else:
    from pytorch_lightning.plugins.precision import Precision

__all__ = ["HPUPrecisionPlugin", "HmpxPrecision"]


class HmpxPrecision(Precision):
    """Train, validate, test and predict as a recipe says.

    Ops are cast in the forward contexts alone (`training_step`, `validation_step` and so on). Weights are cast before
    the strategy wraps the model, and in `configure_model` before `fully_shard` takes a module. Every optimizer that
    `configure_optimizers` returns is attached; its state in the checkpoint is that of `hmpx.attach`, so a resumed run
    has the same bits. When the trainer is done torch is as it was, and the optimizers stay attached, for
    `trainer.save_checkpoint`.

    Args:
        recipe: as for `hmpx.prepare`. None with the next four, which are those of HMP.
        opt_level, bf16_file_path, fp32_file_path: see `hmpx.convert`. Weights stay FP32.
        verbose: log each distinct decision once.

    Attributes:
        recipe: what is in force; ``print(plugin.recipe)`` writes it as a file.

    Raises:
        HmpxError: the recipe is wrong, when the plugin is made; and before training starts if the trainer was asked
            for what does not go with it (accumulation or clipping beside `release_gradients`), if another recipe is in
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

    def __init__(
        self,
        recipe: Stated = None,
        *,
        opt_level: str | None = None,
        bf16_file_path: str | os.PathLike[str] | None = None,
        fp32_file_path: str | os.PathLike[str] | None = None,
        verbose: bool = False,
    ) -> None:
        of_hmp = any((opt_level, bf16_file_path, fp32_file_path))
        if recipe is None and not of_hmp:
            raise HmpxError("HmpxPrecision needs a recipe, or HMP's opt_level and lists")
        if recipe is not None and of_hmp:
            raise HmpxError("HmpxPrecision takes a recipe or HMP's opt_level and lists, not both")
        if recipe is None:
            level, lists = hmp.lenient(opt_level or "O1", bf16_file_path, fp32_file_path)
            paths: Any = {key: os.fspath(path or "") for key, path in lists.items()}
            recipe = Recipe(opt_level=level, parameter_dtype="float32", **paths)
        self._set_up(recipe, verbose)

    def _set_up(self, recipe: Stated, verbose: bool = False) -> None:
        self._setting_up = SettingUp(type(self).__name__, recipe, verbose)
        self._undo = contextlib.ExitStack()  # until the optimizers are attached
        narrow = self.recipe.parameter_dtype == "bfloat16"
        self.precision: Any = "bf16-true" if narrow else "32-true"  # what Lightning computes the size of the model by

    @property
    def recipe(self) -> Recipe:
        """Return the recipe that is in force."""
        return self._setting_up.recipe

    def __repr__(self) -> str:
        return self._setting_up.words

    def convert_module(self, module: torch.nn.Module) -> torch.nn.Module:
        """Cast the model, before the strategy wraps it."""
        self._setting_up.refuse(frameworks.of_lightning(module.trainer))
        with contextlib.ExitStack() as undo:
            self._setting_up.cast(module, undo)
            self._undo = undo.pop_all()
        return module

    @contextlib.contextmanager
    def module_init_context(self) -> Iterator[None]:
        """Cast each module before `configure_model` shards it."""
        with self._setting_up.casting_what_is_distributed():
            yield

    def connect(self, model: Any, optimizers: list, lr_schedulers: list) -> tuple[Any, list, list]:
        """Attach the optimizers, and convert torch."""
        with self._undo:
            detach_new(optimizers, self._undo)
            for optimizer in optimizers:
                self._setting_up.attach(optimizer, model)
            self._setting_up.install()
            self._undo.pop_all()
        return model, optimizers, lr_schedulers

    def convert_input(self, data: Any) -> Any:
        """Return a batch in the dtypes of the recipe's `dtype_map`: it was made outside of the model."""
        mapped = self.recipe.mapped()
        return tree_map_only(torch.Tensor, lambda x: x.to(mapped.get(x.dtype, x.dtype)), data) if mapped else data

    @contextlib.contextmanager
    def forward_context(self) -> Iterator[None]:
        """Turn casts on inside."""
        with self._setting_up.casts():
            yield

    def teardown(self) -> None:
        """Put torch back."""
        self._undo.pop_all()
        self._setting_up.restore()


class HPUPrecisionPlugin(HmpxPrecision):
    """Lightning's removed plugin for Habana's HMP, by its arguments, on any device: one import changes.

    Args:
        precision: 16 or "bf16" (also "16-mixed", "bf16-mixed") casts ops as the rest says; 32 casts nothing.
        opt_level, bf16_file_path, fp32_file_path, verbose: see `HmpxPrecision`.

    Raises:
        HmpxError: another `precision`, or a list that is wrong.

    Example:
        >>> from hmpx.integrations.lightning import HPUPrecisionPlugin
        >>> HPUPrecisionPlugin(precision=16, opt_level="O1", bf16_file_path="bf16.txt").recipe.bf16_file_path
        'bf16.txt'
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
