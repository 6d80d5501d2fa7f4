"""A recipe that a trainer sets up in parts, as it makes things: the model, its optimizers, casts around each forward.

`hmpx.prepare` does the same at once, for whoever has model and optimizer in hand.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from weakref import WeakSet

import torch

from hmpx import installation, region_state
from hmpx.changes import Changes
from hmpx.conversion import Conversion
from hmpx.errors import HmpxError
from hmpx.ops.module_rules import ModuleRule
from hmpx.recipes import frameworks
from hmpx.recipes.activate import Activation, cast_models_of
from hmpx.recipes.constructor_hooks import watch_distribution
from hmpx.recipes.module_patterns import check_names, rules_for
from hmpx.recipes.prepare import cast_model, convert, facts
from hmpx.recipes.recipe import Recipe, changed
from hmpx.recipes.stated import Stated, with_and_without_zero
from hmpx.updates.attach import attach, attached, check_torch
from hmpx.updates.ranks.checks import compare, in_job
from hmpx.updates.stepping.names import has_bf16, inside_zero, parameters

_of_trainers: WeakSet[Conversion] = WeakSet()  # those that a trainer's plugin has made


class SettingUp:
    """One recipe in the hands of one trainer.

    recipe: what is in force. words: the plugin as a user would write it.

    Raises:
        HmpxError: the recipe is wrong, or asks for what this torch does not have.
    """

    def __init__(self, plugin: str, framework: str, asked: Stated, verbose: bool = False) -> None:
        under_zero, recipe = with_and_without_zero(asked)
        if verbose:
            under_zero, recipe = changed(under_zero, verbose=True), changed(recipe, verbose=True)
        self.recipe = recipe
        self.words = (
            f"{plugin}({os.fspath(asked)!r})" if isinstance(asked, str | os.PathLike) else f"{plugin}({recipe!r})"
        )
        self._plugin, self._recipes = plugin, {True: under_zero, False: recipe}
        for each in self._recipes.values():
            with each.naming_lines():
                check_torch(each.settings())
        self._policy = recipe.policy()  # lists are read now: a script may change its folder
        self._conversion: Conversion | None = None
        self._rules: list[ModuleRule] = []
        frameworks.say_version(framework)

    def refuse(self, asked: Iterable[frameworks.FrameworkSetting]) -> None:
        """Raise if the framework was asked for what does not go with the recipe, or another recipe is in force."""
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
            cast_model(model, self.recipe, undo)

    @contextlib.contextmanager
    def casting_what_is_distributed(self) -> Iterator[None]:
        """A context that casts each model before `fully_shard` or DistributedDataParallel take it."""
        with Changes() as changes:
            if in_job():
                watch_distribution(lambda module: _cast_whole(module, self.recipe), changes)
            yield

    def attach(self, optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> None:
        """Attach an optimizer, whatever it is wrapped in, unless it has no BF16 parameters."""
        optimizer = frameworks.unwrapped(optimizer)
        params = parameters(optimizer)
        if not has_bf16(optimizer):
            return
        recipe = self._recipes[inside_zero(optimizer) is not None]
        named = any("param_names" in group for group in optimizer.param_groups)
        whole = set(params) <= set(model.parameters())
        with recipe.naming_lines():
            attach(optimizer, model=model if whole and not named else None, **vars(recipe.settings()))

    def install(self) -> None:
        """Convert torch; casts stay off but in `casts()`."""
        if self._conversion is None or not self._conversion.active:
            self._conversion = convert(self.recipe, self._policy, enabled=False, rules=self._rules)
            if self._conversion is not None:
                _of_trainers.add(self._conversion)

    def restore(self) -> None:
        """Put torch back, if this is what it is converted by. Optimizers stay attached: their state is to be saved."""
        if self._conversion is not None:
            self._conversion.restore()
            self._conversion = None

    @property
    def casts_ops(self) -> bool:
        """Whether ops are cast while the dtypes that code asks for are left alone."""
        return self._policy is not None and not self.recipe.dtype_map

    def enter(self) -> region_state.Region:
        """Casts are on from here on, until `region_state.leave` is given the result.

        After `hmpx.restore()` there is nothing that casts.
        """
        current = installation.current(Conversion)
        if not torch.compiler.is_compiling() and current is not None and current is not self._conversion:
            self.install()  # another trainer's was in force
        return region_state.enter(True)

    @contextlib.contextmanager
    def casts(self) -> Iterator[None]:
        """A context in which ops are cast."""
        region = self.enter()
        try:
            yield
        finally:
            region_state.leave(region)


def _cast_whole(module: torch.nn.Module, recipe: Recipe) -> None:
    with contextlib.ExitStack() as undo:
        cast_models_of(list(module.parameters()), recipe, undo)
        undo.pop_all()


def detach_new(optimizers: Iterable[torch.optim.Optimizer], undo: contextlib.ExitStack) -> None:
    """Let `undo` detach those of some optimizers that are not attached yet."""
    for optimizer in map(frameworks.unwrapped, optimizers):
        if attached(optimizer) is None:
            undo.callback(_detach, optimizer)


def _detach(optimizer: torch.optim.Optimizer) -> None:
    attachment = attached(optimizer)
    if attachment is not None:
        attachment.detach()
