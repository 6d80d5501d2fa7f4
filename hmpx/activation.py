"""`activate`: a recipe for all that a program makes from here on, without its model and optimizer in hand."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Mapping

import torch

from hmpx import conversion
from hmpx.making import models_of, watch_distribution, watch_optimizers
from hmpx.preparing import cast_model, check_names, facts
from hmpx.recipe import Recipe, as_recipe
from hmpx.updates.agreement import compare
from hmpx.updates.attachment import attach, attached
from hmpx.updates.names import parameters

logger = logging.getLogger("hmpx")
VARIABLE = "HMPX_RECIPE"
_active: Activation | None = None


class Activation:
    """What one `activate` did: the handle that it returns.

    As a context manager it ends on exit. Optimizers that were made meanwhile stay attached, and weights keep their
    dtype.

    Attributes:
        recipe: what is in force; ``print(handle.recipe)`` writes it as a file.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self._settings, self._policy = recipe.settings(), recipe.policy()
        self._undo = contextlib.ExitStack()

    @property
    def active(self) -> bool:
        """Whether this is the recipe that is in force now."""
        return _active is self

    def restore(self) -> None:
        """End it; nothing happens if it has ended."""
        global _active
        if self.active:
            _active = None
            conversion.beside.discard(self.restore)
            self._undo.close()

    def __enter__(self) -> Activation:
        return self

    def __exit__(self, *exception: object) -> None:
        self.restore()

    def __repr__(self) -> str:
        return f"<hmpx.Activation, {'active' if self.active else 'restored'}: {self.recipe}>"

    def _install(self) -> None:
        if self._policy is not None:
            self._undo.callback(conversion.install(self._policy, dtype_map=self.recipe.mapped()).restore)
        watch_optimizers(self._made, self._undo)
        watch_distribution(self._distributes, self._undo)

    def _cast(self, params: list[torch.nn.Parameter]) -> list[torch.nn.Module]:
        """Cast every model that has some of these parameters; the models."""
        models = models_of(params)
        alone = set(params).difference(*(model.parameters() for model in models))
        if alone:
            logger.warning("hmpx: %d parameters are in no module that can be found, and keep their dtype", len(alone))
        check_names(models, self.recipe)
        if not self.recipe.dtype_map:  # what was made under a map is of the right dtype
            with contextlib.ExitStack() as undo:
                for model in models:
                    cast_model(model, self.recipe, undo)
                undo.pop_all()
        return models

    def _distributes(self, module: torch.nn.Module) -> None:
        params = list(module.parameters())
        if params:
            self._cast(params)

    def _made(self, optimizer: torch.optim.Optimizer) -> None:
        if any(isinstance(held, torch.optim.Optimizer) and attached(held) for held in vars(optimizer).values()):
            return  # Lookahead and its like: the steps are those of the one inside
        params = parameters(optimizer)
        compare("hmpx.activate", facts(self.recipe))
        models = self._cast(params)
        if any(p.dtype is torch.bfloat16 for p in params):
            whole = next((model for model in models if set(params) <= set(model.parameters())), None)
            named = any("param_names" in group for group in optimizer.param_groups)
            attach(optimizer, model=None if named else whole, **vars(self._settings))


def activate(recipe: str | os.PathLike | Mapping | Recipe) -> Activation:
    """From here on, run whatever this program makes as a recipe says; a second call replaces the first.

    Ops are converted at once. Every optimizer is attached as soon as it is made, and the model that its parameters are
    of is cast then, or before DistributedDataParallel or `fully_shard` take it. So call it before the model is
    distributed and the optimizer made; under a recipe with a `dtype_map`, before the model is made.

    Args:
        recipe: a name (``"neuron-bf16-sr"``), the path of a YAML file, or a dict of a recipe's keys.

    Returns:
        A handle: `recipe`, `restore()`, and ``with activate(...):``. `hmpx.restore()` ends it too.

    Raises:
        HmpxError: before anything is changed.
    """
    global _active
    activation = Activation(as_recipe(recipe))
    if _active is not None:
        _active.restore()
    try:
        activation._install()
    except BaseException:
        activation._undo.close()
        raise
    _active = activation
    conversion.beside.add(activation.restore)
    return activation


def activate_from_environment() -> None:
    """`activate` what HMPX_RECIPE names, if it names anything. The shell commands look at it themselves."""
    if os.environ.get(VARIABLE) and sys.orig_argv[1:3] != ["-m", "hmpx"]:
        activate(os.environ[VARIABLE])
