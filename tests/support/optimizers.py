"""Every optimizer of torch, as people set it up, in each of the forms that it has."""

from __future__ import annotations

import torch
from torch import optim

CONFIGURATIONS = {
    "Adadelta": (optim.Adadelta, {}),
    "Adafactor": (optim.Adafactor, {}),
    "Adagrad": (optim.Adagrad, {}),
    "Adagrad initial": (optim.Adagrad, {"initial_accumulator_value": 0.1, "lr_decay": 0.1}),
    "Adam": (optim.Adam, {}),
    "Adam amsgrad": (optim.Adam, {"amsgrad": True}),
    "Adam maximize": (optim.Adam, {"maximize": True}),
    "Adam tensor lr": (optim.Adam, {"lr": torch.tensor(1e-2)}),
    "Adamax": (optim.Adamax, {}),
    "AdamW": (optim.AdamW, {"lr": 1e-2}),
    "AdamW amsgrad": (optim.AdamW, {"amsgrad": True}),
    "ASGD": (optim.ASGD, {}),
    "Muon": (optim.Muon, {}),
    "NAdam": (optim.NAdam, {}),
    "NAdam decoupled": (optim.NAdam, {"decoupled_weight_decay": True, "weight_decay": 0.1}),
    "RAdam": (optim.RAdam, {}),
    "RMSprop": (optim.RMSprop, {}),
    "RMSprop centered": (optim.RMSprop, {"centered": True, "momentum": 0.9}),
    "Rprop": (optim.Rprop, {}),
    "SGD": (optim.SGD, {"lr": 1e-2}),
    "SGD nesterov": (optim.SGD, {"lr": 1e-2, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-3}),
}
FUSED = {"Adagrad", "Adagrad initial", "Adam", "Adam amsgrad", "AdamW", "AdamW amsgrad", "SGD", "SGD nesterov"}
SINGLE_FORM = {"Adafactor", "Muon"}


def forms():
    for name in CONFIGURATIONS:
        if name in SINGLE_FORM:
            yield name, {}
            continue
        yield name, {"foreach": False}
        if name != "Adam tensor lr":  # torch: a tensor lr with foreach needs capturable
            yield name, {"foreach": True}
        if name in FUSED:
            yield name, {"fused": True}


class UnlistedSGD(optim.SGD):
    """A class that hmpx does not know: it steps on a whole FP32 copy."""


class UnlistedAdamW(optim.AdamW):
    """A class that hmpx does not know, with two moments."""


class Around(optim.Optimizer):
    """An optimizer around another one, which steps, and whose groups it has."""

    def __init__(self, inner):
        self.inner = inner
        super().__init__(inner.param_groups, {})
        self.param_groups = inner.param_groups

    def step(self, closure=None):
        return self.inner.step(closure)
