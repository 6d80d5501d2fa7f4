"""Models around one line that may break in BF16, and what is to be found there."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hmpx

WIDTH = 16


def policy(bf16, fp32="cross_entropy"):
    """Lists with these names; one that is in the first is not in the second."""
    return hmpx.Policy(bf16=tuple(bf16.split()), fp32=tuple(name for name in fp32.split() if name not in bf16.split()))


def line_of(function, text):
    """The line of a function that holds a text, as file:line."""
    source, first = inspect.getsourcelines(function)
    return f"{inspect.getsourcefile(function)}:{first + next(i for i, line in enumerate(source) if text in line)}"


class Model(nn.Module):
    """A small network around one line that may break in BF16."""

    def __init__(self, faulty, scale=1.0):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)
        self.faulty, self.scale = faulty, scale

    def forward(self, x):
        h = self.first(x) * self.scale
        return self.last(self.faulty(h))


def loss_of(model, x, y):
    return nn.functional.cross_entropy(model(x), y)


def batches(number=4, size=32):
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(size, WIDTH, generator=generator), torch.randint(4, (size,), generator=generator))
        for _ in range(number)
    ]


def gradients(model, data, loss=loss_of):
    """Of each batch, flat and one after the other; zeros where there is none."""
    weights, found = [*model.parameters()], []
    for batch in data:
        each = torch.autograd.grad(loss(model, *batch), weights, allow_unused=True, materialize_grads=True)
        found.append(torch.cat([gradient.flatten() for gradient in each]))
    return torch.stack(found)


def noise_of(exact):
    """The standard deviation of gradients between batches: the scale of `gradient_error`."""
    return ((exact - exact.mean(0)).square().sum() / (len(exact) - 1)).sqrt()


def gradient_error(exact, low):
    """By hand, what `compare` and `tune` call by this name."""
    return float((low - exact).square().sum(1).mean().sqrt() / noise_of(exact))


def advised_error(found, model, data, bf16, fp32="", loss=loss_of):
    """By hand, the gradient error of lists with what a comparison advises in FP32: names, and rules for modules."""
    exact, modules = gradients(model, data, loss), dict(model.named_modules())
    inside = [(row.op, modules[row.module]) for row in found.broken if row.module in modules]
    names = {row.op for row in found.broken if row.module not in modules}
    rules = [hmpx.policy_for(module, fp32=[op]) for op, module in inside]
    lists = {"bf16": [*({*bf16.split()} - names)], "fp32": [*({*fp32.split()} - {*bf16.split()} | names)]}
    with hmpx.activate({**lists, "parameter_dtype": "float32", "where": "everywhere"}):
        low = gradients(model, data, loss)
    for rule in rules:
        rule.remove()
    return gradient_error(exact, low)


def state_of(model):
    """What a look at a model must leave as it is, as values that can be compared: its state, its gradients, draws."""
    held = [*model.state_dict().items(), *((name, p.grad) for name, p in model.named_parameters())]
    bits = [(name, value if value is None else (value.dtype, value.float().tolist())) for name, value in held]
    return bits, torch.get_rng_state().tolist(), torch.nn.functional.linear, torch.Tensor.mul_


def tuned(model, data, loss=loss_of, **options):
    return hmpx.tune(model, data, loss, **{"progress": False, **options})


def variance_by_difference(h):
    h = h + 30
    variance = (h * h).mean(-1, keepdim=True) - h.mean(-1, keepdim=True).square()
    return (h - 30) * torch.rsqrt(variance.abs() + 1e-3)


def sharp_softmax(h):
    return torch.softmax(h * 40 + 300, -1)


def long_sum(h):
    steps = torch.cumsum(torch.sigmoid(h).repeat(1, 32), -1)
    return torch.sin(steps[:, -WIDTH:])


def exponentials(h):
    return torch.exp(h * 6 + 60) * 1e-26


def position_left_in_bf16(h):
    positions = torch.arange(1000, 1000 + len(h)).float()
    return torch.sin(positions.to(torch.bfloat16).float()[:, None] * 0.7) * h


def root_of_a_small_difference(h):
    """In BF16 the difference is zero, and so is the root; its slope is not finite."""
    distance = (h * 1e-4 + 1) - 1
    return torch.sqrt(distance.square()) * 1e4


class Rotary(nn.Module):
    """Positions in BF16 are not exact beyond 256; autograd sees nothing of them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(WIDTH, 4)

    def forward(self, x):
        with torch.no_grad():
            angles = torch.outer(torch.arange(1000.0, 1000.0 + len(x)), torch.linspace(0.1, 1, WIDTH))
        return self.linear(x * angles.sin())


class Masked(nn.Module):
    """Attention over padded positions, whose mask is a product with a huge negative number."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(WIDTH, 4)

    def forward(self, x, keep):
        mask = (1 - keep) * torch.finfo(torch.float32).min
        weights = torch.softmax(x + mask, -1)
        return self.linear(weights * x)


def padded(number=4):
    keep = torch.ones(8, WIDTH)
    keep[3] = 0  # a whole row
    return [(x[:8], keep, y[:8]) for x, y in batches(number)]


def masked_loss(model, x, keep, y):
    return nn.functional.cross_entropy(model(x, keep), y)


@dataclass(frozen=True)
class Fault:
    """One line that breaks under some lists.

    bf16: the names in the list that breaks it. ops: those of which one is to blame. text: of the line.
    """

    function: Callable
    bf16: str
    ops: frozenset[str]
    text: str


PLANTED = {
    "variance": Fault(
        variance_by_difference,
        "sub mul mean square linear",
        frozenset({"sub", "mean", "mul", "square"}),
        "variance = ",
    ),
    "softmax": Fault(sharp_softmax, "softmax", frozenset({"softmax"}), "torch.softmax"),
    "cumsum": Fault(long_sum, "cumsum linear", frozenset({"cumsum"}), "cumsum"),
    "exp": Fault(exponentials, "exp linear", frozenset({"exp"}), "torch.exp"),
}


class Steps(nn.Module):
    """In-place ops, statistics, dropout, views, a checkpoint: what runs may disagree about."""

    def __init__(self, reentrant, activation):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.last, self.drop = nn.Linear(WIDTH, 4), nn.Dropout(0.3)
        self.reentrant, self.activation = reentrant, activation

    def inner(self, x):
        return self.drop(self.activation(self.norm(self.linear(x)), inplace=True))

    def forward(self, x):
        h = checkpoint(self.inner, self.linear(x), use_reentrant=self.reentrant)
        h.mul_(1.5)
        return self.last(h.view(-1, 2, WIDTH // 2).transpose(0, 1).transpose(0, 1).reshape(-1, WIDTH))
