"""The models that `prepare` has set up, and their op lists: one set for all, or each model its own.

Models with equal lists share a conversion. As soon as one has other lists, the lists of each stand as rules in its
modules, and an op outside of all models follows the model whose output it takes (`ops.model_lists`). A model that is
restored before the others is left uncast.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from weakref import WeakSet

import torch

from hmpx.base import process_state
from hmpx.conversion import Conversion, install, installed
from hmpx.ops.model_lists import ListsRule, ModelLists, rules_of_lists
from hmpx.ops.module_rules import ModuleRule
from hmpx.ops.overlays import registered
from hmpx.ops.policies.policy import Policy, in_common
from hmpx.recipes.recipe import Recipe

logger = logging.getLogger("hmpx")
Module = torch.nn.Module


@dataclass(eq=False)
class Prepared:
    """What `prepare` was given for one model.

    policy: its lists; None leaves its ops alone. rules: of its modules. lists: the rules that put the policy in force,
    where models have different ones.
    """

    recipe: Recipe
    policy: Policy | None
    optimizers: WeakSet[torch.optim.Optimizer]
    rules: Sequence[ModuleRule]
    lists: Sequence[ListsRule] = field(default=())

    @property
    def everywhere(self) -> bool:
        return self.recipe.where == "everywhere"

    def overlay(self) -> ModelLists:
        if self.policy is None:
            return registered(ModelLists("a model that is left alone"))
        return registered(ModelLists(self.recipe.place, policy=self.policy, everywhere=self.everywhere))


def take(model: Module, new: Prepared) -> None:
    """Put the lists of a model in force beside those of the models that were prepared before."""
    with process_state.lock:
        inside, before = set(model.modules()), dict(process_state.prepared)
        if model in before:
            new.optimizers |= before[model].optimizers
        models = {each: known for each, known in before.items() if each not in inside} | {model: new}
        if all(each.policy is None for each in models.values()):
            process_state.prepared[model] = new
        else:
            gone = [rule for each in before if each in inside for rule in (*before[each].rules, *before[each].lists)]
            _put_in_force(models, gone)


def leave(optimizers: Iterable[torch.optim.Optimizer]) -> bool:
    """Leave the models of these optimizers uncast from here on; False if no other model has lists."""
    with process_state.lock:
        models = dict(process_state.prepared)
        ending = [each for each in models.values() if not each.optimizers.isdisjoint(optimizers)]
        if not ending or all(each.policy is None for each in models.values() if each not in ending):
            return False
        gone = [rule for each in ending for rule in each.rules]
        for each in ending:
            each.policy, each.rules, each.optimizers = None, (), WeakSet()
        _put_in_force(models, gone)
        return True


def _put_in_force(models: Mapping[Module, Prepared], gone: list[ModuleRule]) -> None:
    """Put the lists of models in force, and end rules, without a gap for what other threads compute.

    A new conversion is made only where a setting of the whole process changes: where, verbose, dtype_map or kernels.
    """
    recipes = [each.recipe for each in models.values() if each.policy is not None]
    policies = [each.policy for each in models.values() if each.policy is not None]
    differ = len({(each.policy, each.everywhere and each.policy is not None) for each in models.values()}) > 1
    settings = _settings(recipes)
    conversion = installed()
    if (
        conversion is None
        or conversion.settings != settings
        or not (differ or conversion.model_lists or conversion.policy == policies[0])
    ):
        where, verbose, mapped, kernels = settings
        rules = [rule for each in models.values() for rule in each.rules]
        conversion = install(policies[0], verbose, True, dict(mapped), kernels, rules, where)
        conversion.settings, gone = settings, []
        for each in models.values():
            each.lists = ()
    else:
        conversion.add_rules(rule for each in models.values() for rule in each.rules if not rule.active)
    if differ or conversion.model_lists:
        gone += _share(models, policies, conversion)
    conversion.drop_rules(gone)
    conversion.prepared.clear()
    conversion.prepared.update(models)


def _settings(recipes: Sequence[Recipe]) -> tuple:
    """Return what holds for the whole process: of several models, the last one decides."""
    last = recipes[-1]
    for key in ("dtype_map", "kernels"):
        if any(getattr(each, key) != getattr(last, key) for each in recipes):
            logger.warning("hmpx: the recipes of the prepared models differ in `%s`; the last one's holds for all", key)
    where = "everywhere" if all(each.where == "everywhere" for each in recipes) else "model"
    return where, any(each.verbose for each in recipes), tuple(last.mapped().items()), last.kernels


def _share(models: Mapping[Module, Prepared], policies: Sequence[Policy], conversion: Conversion) -> list[ModuleRule]:
    """Give each model its own lists; return the rules that these replace."""
    new: list[ListsRule] = []
    gone: list[ModuleRule] = []
    for model, each in models.items():
        lists = each.overlay()
        if not each.lists or each.lists[0].overlay is not lists:
            gone += each.lists
            each.lists = rules_of_lists(model, lists)
            new += each.lists
    agreed = registered(ModelLists("the lists of all prepared models", policy=in_common(policies)))
    numbers = dict.fromkeys(each.overlay().number for each in models.values() if each.policy is not None)
    conversion.share(new, (agreed.number, *numbers))
    return gone
