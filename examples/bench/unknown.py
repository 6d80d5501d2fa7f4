"""Optimizer classes that hmpx does not know, as people write them and as packages have them."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch

Params = list[torch.nn.Parameter]


class Subclass(torch.optim.AdamW):
    """What people write: a step of their own around torch's."""

    def step(self, closure: Any = None) -> Any:
        """Take torch's step."""
        return super().step(closure)


class InLoops(torch.optim.Optimizer):
    """Adam by loops over parameters, each weight moved only where the gradient agrees with the average."""

    def __init__(self, params: Params, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take a step."""
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(step=0, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
                state["step"] += 1
                average, squares = state["exp_avg"], state["exp_avg_sq"]
                average.lerp_(p.grad, 0.1)
                squares.mul_(0.999).addcmul_(p.grad, p.grad, value=0.001)
                root = (squares / (1 - 0.999 ** state["step"])).sqrt_().add_(1e-8)
                agrees = (average * p.grad > 0).to(p.dtype)
                p.addcdiv_(average * agrees, root, value=-group["lr"] / (1 - 0.9 ** state["step"]))


def _of_package(package: str, name: str) -> Callable[[Params], torch.optim.Optimizer]:
    def make(params: Params) -> torch.optim.Optimizer:
        optimizer = getattr(importlib.import_module(package), name)(params, lr=1e-4)
        if hasattr(optimizer, "train"):
            optimizer.train()  # schedule-free steps the weights of training
        return optimizer

    return make


_OF_PACKAGES = {"ADOPT": "pytorch_optimizer", "CAME": "pytorch_optimizer", "AdamWScheduleFree": "schedulefree"}

UNKNOWN: dict[str, Callable[[Params], torch.optim.Optimizer]] = {
    "a subclass of AdamW": lambda params: Subclass(params, lr=1e-4, foreach=True),
    "Adam in loops": lambda params: InLoops(params, lr=1e-4),
} | {name: _of_package(at, name) for name, at in _OF_PACKAGES.items() if importlib.util.find_spec(at)}
"""Name -> makes the optimizer of parameters. Classes of packages that are not installed have no row."""
