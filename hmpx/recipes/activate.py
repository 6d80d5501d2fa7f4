"""`activate`: a recipe in force for every model and optimizer that the program makes from here on.

Hooks in constructors see every optimizer when it has been made, and every model before it is distributed.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import os
import re
import sys
import threading
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any
from weakref import WeakSet

import torch
from torch.nn.parallel import DistributedDataParallel

from hmpx.base.changes import Attribute, Changes
from hmpx.base.compiling import when_imported
from hmpx.base.process_state import Installation, in_force
from hmpx.base.raw import MISSING, with_subclasses
from hmpx.base.tensors import modules_in, parameters_in
from hmpx.conversion import Conversion, install
from hmpx.errors import HmpxError
from hmpx.ops.rebinding import Rebinding
from hmpx.recipes.casting import cast_models, tell_cast, tell_scripted
from hmpx.recipes.module_patterns import check_names, rules_for
from hmpx.recipes.prepare import attach_made, facts, in_bf16
from hmpx.recipes.reading import Stated, as_recipe, recipe_of_environment
from hmpx.recipes.recipe import Recipe
from hmpx.updates import step_hooks
from hmpx.updates.attach import attached, check_torch, detach, steppers
from hmpx.updates.ranks import compare, raising_everywhere
from hmpx.updates.stepping.names import has_bf16, inner_optimizers, inside_zero, parameters

logger = logging.getLogger("hmpx")
Module = torch.nn.Module
Optimizer = torch.optim.Optimizer
VARIABLE = "HMPX_RECIPE"


class Activation(Installation):
    """What one `activate` did: the handle that it returns.

    As a context manager it ends on exit, and the one that it replaced is in force again. Optimizers that were made
    meanwhile stay attached, and weights keep their dtype.

    Attributes:
        recipe: what is in force; ``print(handle.recipe)`` writes it as a file.
        active: whether this is the one that is in force now.

    `restore()` ends it before its ``with`` does; nothing happens if it is not the one in force.

    Example:
        >>> with hmpx.activate("neuron-bf16-sr") as handle:
        ...     print(handle)
        <hmpx.Activation, active: bfloat16 weights, ops O1, weights='stochastic'>
        >>> handle.active, handle.recipe.weights
        (False, 'stochastic')
    """

    def __init__(self, recipe: Recipe, group: Any = None, *, trainer: str = "") -> None:
        super().__init__()
        self._group, self._trainer = group, trainer  # the name of the plugin that hands over its models; "" without one
        self._policy = recipe.policy()
        self.recipe = recipe.inlined()
        self._settings = {under_zero: recipe.under_zero(under_zero).settings() for under_zero in (True, False)}
        self._overlays = recipe.overlays()
        self._ruled: WeakSet[torch.nn.Module] = WeakSet()  # models that have the recipe's rules

    def __enter__(self) -> Activation:
        super().__enter__()
        if self._conversion is not None and self._conversion.active:
            self._conversion.__enter__()
        return self

    def __repr__(self) -> str:
        recipe, state = self.recipe, "active" if self.active else "restored"
        ops = f"ops {recipe.opt_level}" if recipe.opt_level else "ops as they are"
        weights = f"{recipe.parameter_dtype} weights" if recipe.parameter_dtype else "weights as they are"
        return f"<hmpx.Activation, {state}: {weights}, {ops}, weights={recipe.weights!r}>"

    def _change(self, changes: Changes) -> None:
        recipe, policy = self.recipe, self._policy
        how = recipe.verbose, True, recipe.mapped(), recipe.kernels, (), recipe.where
        self._conversion = None if policy is None else install(Conversion(policy, *how))
        if self._conversion is not None:
            changes.callback(self._conversion.restore)
            self._conversion.expect(self._overlays.values())
            if self._entered:
                self._conversion.__enter__()
        changes.callback(step_hooks.uninstall)
        step_hooks.install()  # where no op is converted, too: a checkpoint may come before the attachment
        if not self._trainer:
            watch_optimizers(self._made, changes)
        watch_distribution(self._distributes, changes)

    def _distributes(self, module: torch.nn.Module) -> None:
        with contextlib.ExitStack() as undo:
            models = cast_models_of(parameters_in(module), self.recipe, undo)
            undo.pop_all()
        self._take(models)

    def _take(self, models: list[torch.nn.Module]) -> None:
        new = [model for model in models if model not in self._ruled]
        if self._conversion is not None and new:
            with self.recipe.naming_lines():
                self._conversion.add_rules(rules_for(new, self.recipe))
            tell_scripted(new, self.recipe)
        self._ruled.update(new)

    def take_model(self, model: torch.nn.Module, undo: contextlib.ExitStack) -> None:
        """Cast a model, until `undo` is closed, and give it the recipe's rules.

        The second time only dtypes are looked at: a checkpoint of adapters brings its own.
        """
        if model in self._ruled:
            cast_models([model], self.recipe, undo)
        else:
            with raising_everywhere(self._trainer), self.recipe.naming_lines():
                compare(self._trainer, facts(self.recipe))
                check_names([model], self.recipe)
                tell_cast(cast_models([model], self.recipe, undo))
            self._take([model])
            undo.callback(self._ruled.discard, model)

    def take_optimizer(self, optimizer: torch.optim.Optimizer, *models: torch.nn.Module) -> None:
        """Attach an optimizer of models that were cast, unless it has no BF16 parameters."""
        self._attach(steppers(optimizer), models)

    def _attach(self, optimizers: Sequence[torch.optim.Optimizer], models: Sequence[torch.nn.Module]) -> None:
        with self.recipe.naming_lines():
            for each in optimizers:
                attach_made(each, self._settings[inside_zero(each) is not None], models, self._group)

    def _made(self, optimizer: torch.optim.Optimizer, inside: Sequence[torch.optim.Optimizer] = ()) -> None:
        """Cast the models of an optimizer, and attach it. inside: those that its constructor has made."""
        stepping = steppers(optimizer, inside)
        if optimizer not in stepping:
            for each in stepping:
                if not attached(each):
                    self._made(each)
            return
        for each in inner_optimizers(optimizer):  # Lookahead and its kind write weights themselves
            if each not in stepping and attached(each):
                detach(each)
        with raising_everywhere("hmpx.activate", self._group), contextlib.ExitStack() as undo:
            compare("hmpx.activate", facts(self.recipe), self._group)
            params = [p for each in stepping for p in parameters(each)]
            models = cast_models_of(params, self.recipe, undo)  # a refusal leaves them as they were
            compare("hmpx.activate", in_bf16(filter(has_bf16, stepping)), self._group)
            self._attach([each for each in stepping if not attached(each)], models)
            undo.pop_all()
        self._take(models)


def cast_models_of(
    params: list[torch.nn.Parameter], recipe: Recipe, undo: contextlib.ExitStack
) -> list[torch.nn.Module]:
    """Cast every model that holds some of these parameters, until `undo` is closed; return the models."""
    if not params:
        return []
    models = models_of(params)
    alone = set(params).difference(*map(parameters_in, models))
    if alone:
        logger.warning("hmpx: %d parameters are in no module that can be found, and keep their dtype", len(alone))
    with recipe.naming_lines():
        check_names(models, recipe)
    if not recipe.dtype_map:  # under a map, a model is made in the right dtype
        tell_cast(cast_models(models, recipe, undo))
    return models


def activate(recipe: Stated = None, *, process_group: Any = None, **keys: Any) -> Activation:
    """From here on, run whatever this program makes as a recipe says; a second call replaces the first.

    Ops are converted at once. Every optimizer is attached as soon as it is made, and the model that its parameters are
    of is cast then, or before DistributedDataParallel or `fully_shard` take it. So call it before the model is
    distributed and the optimizer made; under a recipe with a `dtype_map`, before the model is made.

    Args:
        recipe: as for `hmpx.prepare`. NxD's defaults are each optimizer's own. None: what the variables of Neuron or
            PyTorch/XLA in the environment stand for, which the log says; else the default lists, FP32 weights.
        process_group: in a distributed job, the ranks whose optimizers hold the same parameters: those of one stage of
            a pipeline, say. None: all ranks.
        keys: of a recipe, over those of `recipe`: ``activate("bf16-sr", state_dtype="8bit")``.

    Returns:
        A handle: `recipe`, `restore()`, and ``with activate(...):``. `hmpx.restore()` ends it too.

    Raises:
        HmpxError: before anything is changed.

    Example:
        >>> with hmpx.activate("neuron-bf16-sr"):
        ...     model = torch.nn.Linear(4, 4)
        ...     optimizer = torch.optim.AdamW(model.parameters())  # attached as it is made, its model cast
        >>> model.weight.dtype
        torch.bfloat16
    """
    if recipe is None and (found := recipe_of_environment()) is not None:
        recipe, said = found
        logger.warning("hmpx: %s", said)
    activation = Activation(as_recipe(recipe, **keys), process_group)
    activation._install()
    return activation


def recipe_of_trainer(stated: Stated, **keys: Any) -> Recipe:
    """Return the recipe that a trainer's plugin is given, with its lists read now: a script may change its folder."""
    recipe = as_recipe(stated, **keys).inlined()
    for each in (recipe, recipe.under_zero()):
        with each.naming_lines():
            check_torch(each.settings())
    return recipe


def activate_for(plugin: str, recipe: Recipe, undo: contextlib.ExitStack) -> Activation:
    """`activate` for a trainer, whose plugin hands over its models and optimizers; others are left alone.

    Returns the activation in force, if it is of a trainer and has this recipe.

    Raises:
        HmpxError: another recipe or conversion is in force.
    """
    before, said = in_force(Activation), ""
    if before is None and in_force(Conversion) is not None:
        said = (
            " converts torch itself, and hmpx.convert (or hmpx.prepare) has done so already: call hmpx.restore(), or "
            "leave the plugin out"
        )
    elif before is not None and not before._trainer:
        said = " sets a recipe up, and hmpx.activate (or `python -m hmpx run`) has one in force: take one of the two"
    elif before is not None and any(
        before.recipe.under_zero(zero) != recipe.under_zero(zero) for zero in (False, True)
    ):
        said = (
            ": another recipe is in force, of a second plugin or of a trainer that was made before: one at a time, and "
            "hmpx.restore() ends it"
        )
    if said:
        raise HmpxError(plugin + said)
    if before is not None:
        return before
    activation = Activation(recipe, trainer=plugin)
    activation._install()
    undo.callback(activation.restore)
    return activation


def activate_from_environment() -> None:
    """`activate` the recipe that HMPX_RECIPE names, if it is set. The shell commands read the variable themselves.

    Raises:
        SystemExit: there is no such recipe, or it is wrong. The script must not run without it; and as the script is
            not at fault, there is one line and no traceback.
    """
    name = os.environ.get(VARIABLE)
    if name and not runs_a_shell_command():
        try:
            activate(name)
        except HmpxError as error:
            raise SystemExit(f"hmpx: {VARIABLE}={name}: {error}") from None


def runs_a_shell_command() -> bool:
    """Return whether the interpreter runs ``-m hmpx``, or the console script ``hmpx``."""
    if sys.argv[:1] == ["-m"]:  # `runpy` is still looking for the module; its word stands before the arguments
        return bool(re.fullmatch(r"(-\w*m)?hmpx(\.__main__)?", sys.orig_argv[-len(sys.argv)]))
    return bool(sys.argv) and Path(sys.argv[0]).name in ("hmpx", "hmpx.exe", "hmpx-script.py")


# Hooks in constructors


def watch_optimizers(made: Callable[[Optimizer, list[Optimizer]], None], changes: Changes) -> None:
    """Call `made` with each new optimizer when its constructor has returned, until `changes` are undone.

    With it come the optimizers that were made inside of the constructor (of a `ZeroRedundancyOptimizer`, say).
    """
    ended: list[bool] = []
    running = threading.local()  # inside: those made inside of the watched constructor that is running in this thread

    def watch(cls: type[Optimizer]) -> None:
        init = vars(cls).get("__init__")
        if init is None or ended:
            return

        @functools.wraps(init)
        def __init__(new: Any, *args: Any, **kwargs: Any) -> None:
            outer = getattr(running, "inside", None)
            if ended or outer is not None:
                init(new, *args, **kwargs)
                if outer is not None:
                    outer.append(new)
                return
            inside: list[Any] = []
            running.inside = inside
            try:
                init(new, *args, **kwargs)
                made(new, [each for each in inside if each is not new])  # hmpx itself may make an optimizer
            finally:
                running.inside = None

        changes.put(Attribute(cls, "__init__", f"{cls.__name__}.__init__"), __init__)

    def defined(cls: type[Optimizer], **kwargs: Any) -> None:
        if before is MISSING:
            super(Optimizer, cls).__init_subclass__(**kwargs)
        else:
            before.__get__(None, cls)(**kwargs)
        watch(cls)

    changes.callback(ended.append, True)
    subclassing = Attribute(Optimizer, "__init_subclass__", "torch.optim.Optimizer.__init_subclass__")
    before = changes.put(subclassing, classmethod(defined))
    for each in with_subclasses(Optimizer):
        watch(each)


def watch_distribution(distributes: Callable[[Module], object], changes: Changes) -> None:
    """Call `distributes` with each module that DistributedDataParallel or `fully_shard` is about to wrap."""
    init = DistributedDataParallel.__init__
    ended: list[bool] = []

    @functools.wraps(init)
    def __init__(ddp: DistributedDataParallel, module: Module, *args: Any, **kwargs: Any) -> None:
        if not ended:
            distributes(module)
        init(ddp, module, *args, **kwargs)

    rebinding, imported_before = Rebinding(), "torch.distributed.fsdp" in sys.modules
    changes.callback(rebinding.undo)
    changes.put(Attribute(DistributedDataParallel, "__init__", "DistributedDataParallel.__init__"), __init__)

    def imported(fsdp: ModuleType) -> None:
        fully_shard = fsdp.fully_shard

        @functools.wraps(fully_shard)
        def shard(module: Any, *args: Any, **kwargs: Any) -> Any:
            for each in module if isinstance(module, list | tuple) else (module,):
                if not ended:
                    distributes(each)
            return fully_shard(module, *args, **kwargs)

        changes.put(Attribute(fsdp, "fully_shard", "torch.distributed.fsdp.fully_shard"), shard)
        if imported_before:
            rebinding.add([(fully_shard, shard)])
        else:  # nobody can have imported the name yet
            rebinding.add_imported([(fully_shard, shard)], [fsdp])

    changes.callback(ended.append, True)
    when_imported("torch.distributed.fsdp", imported, changes)


def models_of(params: Collection[torch.nn.Parameter]) -> list[Module]:
    """Return the modules that hold some of `params` and are part of no other module, the smallest first."""
    modules = [thing for thing in gc.get_objects() if issubclass(type(thing), Module) and "training" in vars(thing)]
    parts = {id(child) for module in modules for child in module._modules.values()}
    wanted = set(params)
    found = [m for m in modules if id(m) not in parts and not wanted.isdisjoint(parameters_in(m))]
    return sorted(found, key=lambda module: sum(1 for _ in modules_in(module)))
