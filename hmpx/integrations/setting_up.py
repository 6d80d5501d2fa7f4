"""Sets a recipe up in parts, as a trainer makes its model and optimizers and calls each forward.

`hmpx.prepare` does the same at once, where model and optimizer are made already.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from weakref import WeakSet

import torch

from hmpx.base import installation, run_in_region
from hmpx.base.changes import Changes
from hmpx.conversion import Conversion
from hmpx.errors import HmpxError
from hmpx.ops.module_rules import ModuleRule
from hmpx.recipes import frameworks
from hmpx.recipes.activate import Activation, cast_before_distribution
from hmpx.recipes.constructor_hooks import watch_distribution
from hmpx.recipes.module_patterns import check_names, rules_for
from hmpx.recipes.prepare import attach_made, cast_model, convert, facts, tell_cast
from hmpx.recipes.reading import Stated, as_recipe
from hmpx.recipes.recipe import changed
from hmpx.updates.attach import attached, check_torch, detach
from hmpx.updates.ranks.checks import compare, in_job
from hmpx.updates.stepping.names import inside_zero

_of_trainers: WeakSet[Conversion] = WeakSet()  # those that a trainer's plugin has made


class SettingUp:
    """Sets one recipe up for one trainer.

    recipe: the recipe that is in force. words: the plugin as a user would write it.

    Raises:
        HmpxError: the recipe is wrong, or asks for what this torch does not have.
    """

    def __init__(self, plugin: str, asked: Stated, verbose: bool = False) -> None:
        recipe = as_recipe(asked)
        if verbose:
            recipe = changed(recipe, verbose=True)
        self.recipe = recipe
        self.words = (
            f"{plugin}({os.fspath(asked)!r})" if isinstance(asked, str | os.PathLike) else f"{plugin}({recipe!r})"
        )
        self._plugin = plugin
        for each in (recipe, recipe.under_zero()):
            with each.naming_lines():
                check_torch(each.settings())
        self._policy = recipe.policy()  # lists are read now: a script may change its folder
        self._conversion: Conversion | None = None
        self._rules: list[ModuleRule] = []

    def refuse(self, asked: Iterable[frameworks.FrameworkSetting]) -> None:
        """Raise if a setting of the framework conflicts with the recipe, or another recipe is in force."""
        if installation.current(Activation) is not None:
            raise HmpxError(
                f"{self._plugin} sets a recipe up, and hmpx.activate (or `python -m hmpx run`) has one in force: take "
                "one of the two"
            )
        current = installation.current(Conversion)
        if current is not None and current not in _of_trainers:
            raise HmpxError(
                f"{self._plugin} converts torch itself, and hmpx.convert (or hmpx.prepare) has done so already: call "
                "hmpx.restore(), or leave the plugin out"
            )
        with self.recipe.naming_lines():
            frameworks.refuse(asked, self.recipe)

    def cast(self, model: torch.nn.Module, undo: contextlib.ExitStack) -> None:
        """Cast the parameters of a model in place, before the framework distributes it."""
        compare(self._plugin, facts(self.recipe))
        with self.recipe.naming_lines():
            check_names([model], self.recipe)
            own = set(model.modules())
            if self._policy is not None and all(own.isdisjoint(rule.modules()) for rule in self._rules):
                rules = rules_for([model], self.recipe)
                self._rules += rules
                if self._conversion is not None and self._conversion.active:
                    self._conversion.add_rules(rules)
            tell_cast(cast_model(model, self.recipe, undo))

    @contextlib.contextmanager
    def casting_what_is_distributed(self) -> Iterator[None]:
        """Return a context that casts each model before `fully_shard` or DistributedDataParallel takes it."""
        with Changes() as changes:
            if in_job():
                watch_distribution(lambda module: cast_before_distribution(module, self.recipe), changes)
            yield

    def attach(self, optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> None:
        """Attach an optimizer, whatever it is wrapped in, unless it has no BF16 parameters."""
        optimizer = frameworks.unwrapped(optimizer)
        recipe = self.recipe.under_zero(inside_zero(optimizer) is not None)
        with recipe.naming_lines():
            attach_made(optimizer, recipe.settings(), [model])

    def install(self) -> None:
        """Convert torch; casts stay off except in `casts()`."""
        if self._conversion is None or not self._conversion.active:
            self._conversion = convert(self.recipe, self._policy, enabled=False, rules=self._rules)
            if self._conversion is not None:
                _of_trainers.add(self._conversion)

    def restore(self) -> None:
        """Put torch back, if this converted it. Optimizers stay attached: their state is to be saved."""
        if self._conversion is not None:
            self._conversion.restore()
            self._conversion = None

    @property
    def casts_ops(self) -> bool:
        """Return whether ops are cast, and the dtypes that code asks for are not mapped."""
        return self._policy is not None and not self.recipe.dtype_map

    def take_over(self) -> None:
        """Convert anew if another trainer's conversion is in force.

        After `hmpx.restore()` there is nothing that casts.
        """
        current = installation.current(Conversion)
        if not torch.compiler.is_compiling() and current is not None and current is not self._conversion:
            self.install()

    @contextlib.contextmanager
    def casts(self) -> Iterator[None]:
        """Return a context in which ops are cast."""
        self.take_over()
        with run_in_region.region(True):
            yield


def detach_new(optimizers: Iterable[torch.optim.Optimizer], undo: contextlib.ExitStack) -> None:
    """Let `undo` detach those of some optimizers that are not attached yet."""
    for optimizer in map(frameworks.unwrapped, optimizers):
        if attached(optimizer) is None:
            undo.callback(detach, optimizer)
