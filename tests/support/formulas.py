"""Optimizers whose steps the kernels take, with the options that change a formula."""

import torch
from lion_pytorch import Lion
from torch import optim

CONFIGURATIONS = {
    "AdamW": (optim.AdamW, {"weight_decay": 0.1}),
    "AdamW maximize": (optim.AdamW, {"maximize": True}),
    "AdamW tensor lr": (optim.AdamW, {"lr": torch.tensor(1e-2)}),
    "Adam": (optim.Adam, {}),
    "Adam weight decay": (optim.Adam, {"weight_decay": 0.1}),
    "Adam decoupled": (optim.Adam, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    "SGD": (optim.SGD, {}),
    "SGD maximize": (optim.SGD, {"maximize": True, "weight_decay": 0.1}),
    "SGD momentum": (optim.SGD, {"momentum": 0.9, "dampening": 0.1}),
    "SGD nesterov": (optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "Adagrad": (optim.Adagrad, {"lr_decay": 0.1, "initial_accumulator_value": 0.1}),
    "Adagrad maximize": (optim.Adagrad, {"maximize": True, "weight_decay": 0.1}),
    "RMSprop": (optim.RMSprop, {"weight_decay": 0.1}),
    "RMSprop centered": (optim.RMSprop, {"centered": True, "maximize": True}),
    "RMSprop momentum": (optim.RMSprop, {"centered": True, "momentum": 0.9}),
    "NAdam": (optim.NAdam, {"momentum_decay": 0.1}),
    "NAdam weight decay": (optim.NAdam, {"weight_decay": 0.1, "maximize": True}),
    "NAdam decoupled": (optim.NAdam, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    "Lion": (Lion, {"weight_decay": 0.1}),
    "Lion decoupled": (Lion, {"weight_decay": 0.01, "decoupled_weight_decay": True}),
}
