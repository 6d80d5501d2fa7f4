"""Layers with each of torch's own parametrizations."""

import warnings

import torch
from torch.nn.utils import parametrizations as new
from torch.nn.utils import spectral_norm, weight_norm

KINDS = {
    "weight_norm": new.weight_norm,
    "spectral_norm": new.spectral_norm,
    "matrix_exp": lambda layer: new.orthogonal(layer, orthogonal_map="matrix_exp"),
    "cayley": lambda layer: new.orthogonal(layer, orthogonal_map="cayley"),
    "householder": lambda layer: new.orthogonal(layer, orthogonal_map="householder"),
    "no trivialization": lambda layer: new.orthogonal(layer, use_trivialization=False),
    "older weight_norm": weight_norm,
    "older spectral_norm": spectral_norm,
}


def parametrized(kind, dtype=torch.float32):
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        layer = KINDS[kind](torch.nn.Linear(8, 6))
    return layer.to(dtype)
