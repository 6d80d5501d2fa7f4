"""Reads modules as torch keeps them. It calls no method that a class may override: modules of others are read too."""

from __future__ import annotations

from collections.abc import Iterator

import torch

Module = torch.nn.Module


def modules_in(module: Module) -> Iterator[Module]:
    """Yield a module and all modules in it, each once."""
    found = {id(module): module}
    waiting = [module]
    while waiting:
        each = waiting.pop()
        yield each
        inside = {id(child): child for child in each._modules.values() if child is not None and id(child) not in found}
        found.update(inside)
        waiting += reversed(inside.values())


def own_parameters(module: Module) -> dict[str, torch.nn.Parameter]:
    """Return the parameters that a module itself holds, by name."""
    return {name: p for name, p in module._parameters.items() if p is not None}


def parameters_in(module: Module) -> list[torch.nn.Parameter]:
    """Return all parameters of a module, each once."""
    return list({id(p): p for each in modules_in(module) for p in own_parameters(each).values()}.values())
