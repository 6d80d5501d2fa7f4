"""Parameters of several shapes, in two groups of an attached optimizer, for tests of steps that follow each other."""

import torch
from torch import nn, optim

import hmpx

BF16 = torch.bfloat16
SIZES = ((40, 9), (201,), (5,), (64, 64), (10, 300))
ADAM = (optim.AdamW, {"fused": True})


def made(cls=optim.AdamW, options=None, more=(), **settings):
    """Return parameters, those in `more` the last ones, their optimizer and its attachment.

    Steps are the optimizer's own, in batches, unless `fused` is given.
    """
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(size, generator=generator).bfloat16()) for size in SIZES]
    params += [nn.Parameter(tensor) for tensor in more]
    named = [(f"p{i}", p) for i, p in enumerate(params)]
    groups = [{"params": named[:3]}, {"params": named[3:], "lr": 2e-2}]
    optimizer = cls(groups, lr=1e-2, **(options or {}))
    return params, optimizer, hmpx.attach(optimizer, **{"fused": False, **settings})


def give_gradients(optimizer, turn, dtype=None):
    generator = torch.Generator().manual_seed(10 + turn)
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.randn(p.shape, generator=generator).to(dtype or p.dtype)


def everything(params, optimizer, handle):
    """Weights, state and masters, of parameters that were added or taken out, too."""
    parameters = [*params, *(p for group in optimizer.param_groups for p in group["params"])]
    state = [value for p in parameters for value in optimizer.state.get(p, {}).values()]
    found = [*(p.detach() for p in parameters), *state, *map(handle.masters_of, parameters)]
    return [each for each in found if isinstance(each, torch.Tensor)]
