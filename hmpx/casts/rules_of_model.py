"""The rules that a model has, for whoever does not hold their handles."""

from __future__ import annotations

from hmpx.casts.module_rules import Module, ModuleRule, rules_of
from hmpx.errors import HmpxError


def policies_of(model: Module) -> list[ModuleRule]:
    """The rules that are in force in a model: of whatever gave them, `policy_for` or a recipe.

    Of a model that was copied or loaded they are not what `policy_for` has returned; `remove()` takes them away all the
    same.

    Returns:
        Each rule once, in the order of `model.modules()`; of one module those of its containers first.

    Example:
        >>> import copy
        >>> _ = hmpx.policy_for(model, fp32=["linear"])
        >>> rules = hmpx.policies_of(copy.deepcopy(model))
        >>> [rule.remove() for rule in rules], hmpx.policies_of(model)
        ([None], [])
    """
    if not isinstance(model, Module):
        raise HmpxError(f"policies_of takes a torch.nn.Module, not a {type(model).__name__}")
    found = [rule for module in model.modules() for _, rule in rules_of(module) if rule.active]
    return list(dict.fromkeys(found))
