"""`prepare`: set a model and its optimizer up as a recipe says, beside the models that were prepared before.

The first model converts torch by its lists. A model with other lists has them as rules in its modules
(`ops.forwards`); ops outside of all models, such as losses, follow the first one's, which is logged. A model that is
restored before the others is left uncast.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, TypeVar
from weakref import WeakSet

import torch

from hmpx.base import process_state
from hmpx.base.tensors import parameters_in
from hmpx.conversion import Conversion, install, installed
from hmpx.errors import HmpxError, kind_of
from hmpx.ops.forwards import ListsRule, rules_of_lists
from hmpx.ops.module_rules import ModuleRule
from hmpx.ops.policies.policy import Policy
from hmpx.recipes.casting import cast_models, parameter_dtypes, tell_cast, tell_scripted
from hmpx.recipes.module_patterns import check_names, rules_for
from hmpx.recipes.reading import Stated, as_recipe
from hmpx.recipes.recipe import Recipe
from hmpx.updates.attach import attach, attached, refuse_unseen, steppers
from hmpx.updates.holding.stores import Settings
from hmpx.updates.ranks import compare, raising_everywhere
from hmpx.updates.stepping.names import inside_zero, named, names_in, parameters

logger = logging.getLogger("hmpx")
Module = torch.nn.Module
Optimizers = TypeVar("Optimizers", torch.optim.Optimizer, Sequence[torch.optim.Optimizer])


def prepare(
    model: torch.nn.Module, optimizer: Optimizers, recipe: Stated, *, process_group: Any = None, **keys: Any
) -> tuple[torch.nn.Module, Optimizers]:
    """Set a model and its optimizer up as a recipe says: cast the parameters, `hmpx.convert`, `hmpx.attach`.

    Parameters stay the same objects, so schedulers, tied weights and the optimizer go on as they are. A model that is
    to be replicated or sharded is cast before it is wrapped (``model.bfloat16()``) and prepared after that. The
    `prepare` of Accelerate may run before this or after it. ``hmpx.restore(optimizer)`` undoes it; the parameters keep
    their dtype.

    Several models may be prepared by different recipes: the ops in each follow its own lists. An op outside of all
    models, such as a loss, follows the lists of the first one, which a warning says; `hmpx.casts` lays others over
    them. `where`, `dtype_map`, `kernels` and `verbose` of the first one hold for all.

    Args:
        optimizer: one, or a list of those that train the model.
        recipe: a name (``"nxd-standard"``), the path of a YAML file, a dict of a recipe's keys, a `Recipe`, or NxD's
            own configuration under its one key, ``{"mixed_precision_config": {...}}``, with the defaults of
            `Recipe.from_nxd`; a `ZeroRedundancyOptimizer` is NxD's ZeRO-1. In a file or a dict, the key `extends` names
            a recipe, and the other keys change it: ``{"extends": "lean", "weights": "split"}``. None: the default lists
            with FP32 weights.
        process_group: in a distributed job, the ranks that hold the same parameters: those of one stage of a pipeline,
            say. None: all ranks.
        keys: of a recipe, over those of `recipe`: ``prepare(model, optimizer, "bf16-sr", state_dtype="8bit")``.

    Returns:
        The model and the optimizer, the same objects.

    Raises:
        HmpxError: something does not fit, or differs between ranks, or the optimizer is prepared by another recipe;
            model, torch and optimizer are as they were.

    Example:
        >>> model, optimizer = hmpx.prepare(model, optimizer, {"weights": "split", "fp32": ["linear"]})
        >>> model.weight.dtype, model(inputs).dtype
        (torch.bfloat16, torch.float32)
        >>> hmpx.restore(optimizer)
    """
    with raising_everywhere("hmpx.prepare", process_group), contextlib.ExitStack() as undo:
        asked: _Asked = _asked(model, optimizer, recipe, keys)
        compare("hmpx.prepare", facts(asked.recipe), process_group)
        with asked.recipe.naming_lines():
            tell_scripted([model], asked.recipe)
            tell_cast(cast_models([model], asked.recipe, undo))
            has_narrow = any(p.dtype is torch.bfloat16 for p in parameters_in(model))
            attached_here = asked.stepping if has_narrow else {}
            compare("hmpx.prepare", in_bf16(attached_here), process_group)
            for each, settings in attached_here.items():
                before = attached(each)
                attachment = attach(each, model=model, process_group=process_group, **vars(settings))
                if attachment is not before:
                    undo.callback(attachment.abandon)
        optimizers = WeakSet([*asked.optimizers, *asked.stepping])
        take(model, Prepared(asked.recipe, asked.policy, optimizers, asked.rules))
        undo.pop_all()
    logger.info("hmpx: prepared by this recipe:\n%s", asked.recipe)
    return model, optimizer


class _Asked(NamedTuple):
    """What a call of `prepare` asks for. stepping: the optimizers that step, with their settings."""

    recipe: Recipe
    policy: Policy | None
    rules: list[ModuleRule]
    optimizers: list[torch.optim.Optimizer]
    stepping: dict[torch.optim.Optimizer, Settings]


def _asked(model: torch.nn.Module, optimizer: Any, recipe: Stated, keys: Mapping[str, Any]) -> _Asked:
    """Check all that can be checked before anything is changed."""
    if not isinstance(model, torch.nn.Module):
        swapped = isinstance(model, torch.optim.Optimizer) and isinstance(optimizer, torch.nn.Module)
        hint = "; the two arguments are swapped: prepare(model, optimizer, recipe)" if swapped else ""
        raise HmpxError(f"model is {kind_of(model)}, not a torch.nn.Module{hint}")
    optimizers = [*optimizer] if isinstance(optimizer, list | tuple) else [optimizer]
    for each in optimizers:
        if not isinstance(each, torch.optim.Optimizer):
            raise HmpxError(f"prepare needs a torch.optim.Optimizer, not {type(each).__name__}")
    if not optimizers:
        raise HmpxError("prepare needs an optimizer, and the list has none; hmpx.convert() casts ops alone")
    stepping = [each for one in optimizers for each in steppers(one)]
    for each in stepping:
        refuse_unseen(each)
    stated = as_recipe(recipe, **keys)
    recipes = [stated.under_zero(inside_zero(each) is not None) for each in stepping]
    whole = recipes[0]
    policy = whole.policy()
    with whole.naming_lines():
        pairs = zip(recipes, stepping, strict=True)
        settings = {each: of_own(own.settings(), each, model, [model]) for own, each in pairs}
    for each, its in settings.items():
        _refuse_another(each, its, model, whole)
    with whole.naming_lines():
        check_names([model], whole)
        return _Asked(whole, policy, rules_for([model], whole), optimizers, settings)


def _refuse_another(
    optimizer: torch.optim.Optimizer, settings: Settings, model: torch.nn.Module, recipe: Recipe
) -> None:
    """Raise if an optimizer is attached already, in a way that is not the recipe's."""
    before = attached(optimizer)
    if before is None:
        return
    dtypes = parameter_dtypes(model, recipe)
    widens = any(p.dtype is torch.bfloat16 is not dtypes.get(p, torch.bfloat16) for p in parameters(optimizer))
    if widens or before.settings != settings:
        raise HmpxError(
            f"this {type(optimizer).__name__} is attached already ({before!r}), and the recipe holds weights in "
            "another way: call hmpx.detach(optimizer) first, then prepare; weights keep their dtype and values"
        )


def attach_made(
    optimizer: torch.optim.Optimizer, settings: Settings, models: Sequence[torch.nn.Module], process_group: Any = None
) -> None:
    """Attach an optimizer, unless it has no BF16 parameters.

    Their names are those that the optimizer was given, or else those in the model that holds all of them.
    """
    params = parameters(optimizer)
    if not any(p.dtype is torch.bfloat16 for p in params):
        return
    whole = next((model for model in models if set(params) <= set(parameters_in(model))), None)
    model = None if any("param_names" in group for group in optimizer.param_groups) else whole
    own = of_own(settings, optimizer, model, models)
    attach(optimizer, model=model, process_group=process_group, **vars(own))


def of_own(
    settings: Settings,
    optimizer: torch.optim.Optimizer,
    model: torch.nn.Module | None,
    models: Sequence[torch.nn.Module],
) -> Settings:
    """Return the settings with only the rules that fit parameters of this optimizer.

    Raises:
        HmpxError: rules go by names that the optimizer does not know.
    """
    if not settings.rules:
        return settings
    in_models = {p: name for each in models for p, name in names_in(each).items()}
    names = []
    for name, p in named(optimizer, names_in(model) if model is not None else {}):
        names.append(name)
        if settings.way(in_models.get(p, name)) != settings.way(name):
            raise HmpxError(
                f"parameters: {type(optimizer).__name__} knows parameter {in_models[p]!r} as {name!r}, so that other "
                "patterns fit it: give it the named_parameters() of the whole model, or parameters()",
                key=("parameters",),
            )
    return replace(
        settings, parameters=tuple(rule for rule in settings.rules if any(fnmatchcase(name, rule[0]) for name in names))
    )


def facts(recipe: Recipe) -> dict[str, Any]:
    """Return the keys that must be equal on every rank, with names of ops for list files, whose paths may differ."""
    return asdict(recipe.inlined())


def in_bf16(optimizers: Iterable[torch.optim.Optimizer]) -> dict[str, Any]:
    """Return which optimizers are about to be attached, as a fact that must be equal on every rank."""
    return {"list of optimizers in BF16": [type(each).__name__ for each in optimizers]}


# The models that have been prepared

_OF_PROCESS = ("where", "verbose", "dtype_map", "kernels")  # keys that cannot differ between models
_OUTSIDE = (
    "hmpx: the op lists of %s hold in the modules of its model; ops outside of all models, such as losses, follow "
    "those of %s, which was prepared first: call them in a module of a model, or in hmpx.casts(...)"
)


@dataclass(eq=False)
class Prepared:
    """What `prepare` was given for one model.

    policy: its lists; None leaves its ops alone. rules: of its modules. lists: the rules that put the policy in force,
    where it is not the conversion's own.
    """

    recipe: Recipe
    policy: Policy | None
    optimizers: WeakSet[torch.optim.Optimizer]
    rules: Sequence[ModuleRule]
    lists: Sequence[ListsRule] = field(default=())


def take(model: Module, new: Prepared) -> None:
    """Put the lists of a model in force beside those of the models that were prepared before."""
    with process_state.lock:
        inside, before = set(model.modules()), dict(process_state.prepared)
        if model in before:
            new.optimizers |= before[model].optimizers
        models = {each: known for each, known in before.items() if each not in inside} | {model: new}
        cast = [each for each in models.values() if each.policy is not None]
        conversion = installed()
        if not cast:
            process_state.prepared[model] = new
            return
        if conversion is None or conversion.prepared_by is None:
            return _convert_by(cast[0], models)
        others = [key for key in _OF_PROCESS if getattr(conversion.prepared_by, key) != getattr(new.recipe, key)]
        if cast == [new] and (others or new.policy != conversion.policy):
            return _convert_by(new, models)
        for key in others if new.policy is not None else ():
            logger.warning("hmpx: the recipes of the prepared models differ in `%s`; the first's holds", key)
        _put_in_force(conversion, models)


def leave(optimizers: Iterable[torch.optim.Optimizer]) -> bool:
    """Leave the models of these optimizers uncast from here on; False if no other model has lists."""
    with process_state.lock:
        models, conversion = dict(process_state.prepared), installed()
        ending = [each for each in models.values() if not each.optimizers.isdisjoint(optimizers)]
        left = [each for each in models.values() if each.policy is not None and each not in ending]
        if not ending or not left or conversion is None:
            return False
        for each in ending:
            each.policy, each.rules, each.optimizers = None, (), WeakSet()
        _put_in_force(conversion, models)
        return True


def _convert_by(first: Prepared, models: Mapping[Module, Prepared]) -> None:
    """Convert torch by the recipe of one of these models."""
    assert first.policy is not None
    recipe, rules = first.recipe, [rule for each in models.values() for rule in each.rules]
    how = recipe.verbose, True, recipe.mapped(), recipe.kernels, rules, recipe.where
    conversion = install(Conversion(first.policy, *how))
    conversion.prepared_by, conversion.leave = recipe, leave
    for each in models.values():
        each.lists = ()
    _put_in_force(conversion, models)


def _put_in_force(conversion: Conversion, models: Mapping[Module, Prepared]) -> None:
    """Put the lists and rules of these models in force, and end all others, without a gap for other threads.

    A model that shares modules with another one has its lists as rules, too: those of the other are in the modules.
    """
    some_differ = any(each.policy != conversion.policy for each in models.values())
    times = Counter(module for model in models for module in model.modules())
    for model, each in models.items():
        differs = each.policy != conversion.policy
        shares = some_differ and any(times[part] > 1 for part in model.modules())
        if (differs or shares) and not (each.lists and each.lists[0].overlay.policy == each.policy):
            each.lists = rules_of_lists(model, each.recipe.place, each.policy)
            if differs and each.optimizers:  # it was not restored
                logger.warning(_OUTSIDE, each.recipe.place, conversion.prepared_by.place)
    rules = [rule for each in models.values() for rule in (*each.rules, *each.lists)]
    conversion.add_rules(rule for rule in rules if not rule.active)
    conversion.drop_rules([rule for rule in conversion.rules if rule not in rules])
    conversion.prepared.clear()
    conversion.prepared.update(models)
