"""Which op lists a user means."""

from __future__ import annotations

from typing import Any

import torch

from hmpx.conversion import installed
from hmpx.errors import HmpxError
from hmpx.ops.computing.kernels import KernelsAsked
from hmpx.ops.module_rules import ModuleRule
from hmpx.ops.policies.build_policy import build_policy
from hmpx.ops.policies.policy import Policy
from hmpx.recipes.module_patterns import check_names, rules_for
from hmpx.recipes.recipe import Recipe
from hmpx.recipes.stated import as_recipe


def lists_meant(lists: Any, asked: str = "compare") -> tuple[Policy, Recipe | None, KernelsAsked]:
    """The policy that is meant, the recipe whose parameters go with it, and its kernels.

    asked: the function that a user has called, for errors.
    """
    if lists is None:
        now = installed()
        if now is None:
            return build_policy(), None, "auto"
        if now.dtype_map is not None:
            raise HmpxError(f"{asked}: the conversion in force maps dtypes, so that there is no FP32 beside it")
        return now.policy, None, now.kernels.asked
    if isinstance(lists, Policy):
        return lists, None, "auto"
    recipe = as_recipe(lists)
    policy = recipe.policy()
    if policy is None or recipe.dtype_map:
        why = "leaves ops as they are (opt_level null)" if policy is None else "maps dtypes"
        raise HmpxError(f"{asked}: this recipe {why}, so that there are no op lists to compare with FP32")
    return policy, recipe, recipe.kernels


def rules_meant(lists: Any, recipe: Recipe | None, model: torch.nn.Module) -> list[ModuleRule]:
    """The rules for modules that go with these lists: of the recipe, or of the conversion that is in force."""
    now = installed() if lists is None else None
    if now is not None:
        return list(now.rules)
    if recipe is None or not recipe.modules:
        return []
    with recipe.naming_lines():
        check_names([model], recipe)
        return rules_for([model], recipe)
