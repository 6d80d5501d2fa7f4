"""Random models, optimizers and ways to hold weights, as data: what prints them makes them again."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn, optim

from tests.support.state_codes import PREFIXES

BF16, FP32 = torch.bfloat16, torch.float32
FORMATS = {"channels_last": torch.channels_last, "channels_last_3d": torch.channels_last_3d}

# What is not tried, and why.
OFF: dict[str, str] = {
    "parameters that share elements": "their FP32 copies would have to share them too, and round in between",
    "optimizers that write past their groups": "they are refused: test_shown_gradients",
    "torch's Adam and its kind, another default device": "they make their count of steps there: test_kept_steps",
    "use_fp32_grad_acc and model.to() between backward and step": "torch casts the gradient that waits",
    "Adagrad and LBFGS, add_param_group": "torch's own cannot step a parameter that came later",
    "Adagrad, unattached, and model.to()": "torch alone keeps the state that its constructor has made in the old dtype",
    "BF16 state by hand, unattached, and model.float()": "torch alone steps on BF16 state, or refuses it: test_steps",
    "LBFGS of FP32 parameters, failing closures": "torch alone steps them, and keeps what state it has made",
    "FP32 parameters, expanded gradients": "torch's own ASGD computes them to other bits than contiguous ones",
    "regions, copies after the first group is another": "torch's copies have no hook that tells the step's number",
    "LBFGS, copies": "torch's own forgets its list of parameters",
    "ranks, devices, threads": "tests of their own",
}


class ClearsItsGradients(optim.Optimizer):
    """A class whose `step` takes the gradients away when it is done, as some trainers' own optimizers do."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"])
        self.zero_grad()
        return loss


class SharpnessAware(optim.Optimizer):
    """SAM as its authors' code does it, on SGD: climb, clear, evaluate the model there, go back, descend, clear."""

    def __init__(self, params, lr=1e-2, rho=0.5):
        super().__init__(params, {"lr": lr, "rho": rho})

    @torch.no_grad()
    def step(self, closure):
        torch.enable_grad()(closure)()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["before"] = p.clone()
                    p.add_(p.grad, alpha=group["rho"])
        self.zero_grad()
        loss = torch.enable_grad()(closure)()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and "before" in self.state[p]:
                    p.copy_(self.state[p]["before"])
                    p.add_(p.grad, alpha=-group["lr"])
        self.zero_grad()
        return loss


class KeepsLists(optim.Optimizer):
    """The mean of the last three gradients, which stand in a list in the state."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    recent = self.state[p].setdefault("recent", [])
                    recent.append(p.grad.clone())
                    del recent[:-3]
                    p.add_(sum(recent), alpha=-group["lr"] / len(recent))
        return loss


class ScalesItsGradients(optim.Optimizer):
    """Momentum that clips each gradient in place inside `step`, and replaces it where it is large."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                if p.grad.numel() % 2:
                    p.grad.mul_(0.5)
                else:
                    p.grad = p.grad.clamp(-1, 1)
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                mean.mul_(0.5).add_(p.grad)
                p.add_(mean, alpha=-group["lr"])
        return loss


_ELEMENT = {"foreach": [None, True]}
_FUSED = {"foreach": [None, True], "fused": [None, None, True]}

# Options of each class, one of every list at a time. What stands under "fits" limits the parameters.
OPTIMIZERS: dict[type, dict[str, list]] = {
    optim.Adadelta: {**_ELEMENT, "lr": [1.0], "maximize": [False, True]},
    optim.Adagrad: {**_FUSED, "lr_decay": [0, 0.1], "initial_accumulator_value": [0, 0.1]},
    optim.Adam: {**_FUSED, "amsgrad": [False, True], "weight_decay": [0, 0.1]},
    optim.AdamW: {**_FUSED, "amsgrad": [False, True], "maximize": [False, True]},
    optim.Adamax: {**_ELEMENT, "weight_decay": [0, 0.1]},
    optim.ASGD: {**_ELEMENT, "t0": [2, 1e6]},
    optim.NAdam: {**_ELEMENT, "decoupled_weight_decay": [False, True], "weight_decay": [0.1]},
    optim.RAdam: {**_ELEMENT},
    optim.RMSprop: {**_ELEMENT, "momentum": [0, 0.9], "centered": [False, True]},
    optim.Rprop: {**_ELEMENT},
    optim.SGD: {
        **_FUSED,
        "momentum": [0, 0.9],
        "weight_decay": [0, 0.1],
        "dampening": [0, 0.25],
        "nesterov": [False, True],
    },
    optim.Adafactor: {"foreach": [None, True]},
    optim.Muon: {"momentum": [0.95], "weight_decay": [0, 0.1]},
    optim.LBFGS: {"max_iter": [3], "history_size": [2]},
    optim.SparseAdam: {},
    ClearsItsGradients: {},
    SharpnessAware: {},
    KeepsLists: {},
    ScalesItsGradients: {},
}
CLASSES = {cls.__name__: cls for cls in OPTIMIZERS}
BY_ELEMENT = list(OPTIMIZERS)[:11]
BY_PARTS = list(OPTIMIZERS)[:13]  # hmpx steps each parameter of these alone, all parameters of any other at once
NO_DEFAULTS = (optim.SGD, ClearsItsGradients, KeepsLists, ScalesItsGradients)  # they make nothing without a device
IN_ONE_KERNEL = (optim.Adam, optim.AdamW, optim.SGD)  # of hmpx: `attach(fused=True)`

SHAPES = {
    "contiguous": [(), (0,), (1,), (7,), (130,), (3, 50), (4, 5, 6), (2, 3, 3, 3), (66, 64)],
    "buffer": [(7,), (130,), (3, 50), (8, 8)],
    "transposed": [(3, 50), (16, 40), (7, 5, 11)],
    "sliced": [(7,), (3, 50), (16, 16)],
    "channels_last": [(2, 3, 3, 3), (7, 5, 3, 2)],
    "channels_last_3d": [(2, 3, 2, 2, 2), (4, 3, 3, 2, 2)],
}
# torch's fused kernels compute the last elements of a tensor, those after a multiple of 16, to other bits than the
# rest. Which elements these are depends on the layout, so a comparison to the bit needs sizes without such a rest.
EVEN_SHAPES = {
    "transposed": [(3, 48), (16, 32)],
    "sliced": [(16,), (3, 48), (16, 16)],
    "channels_last": [(2, 16, 3, 3), (7, 16, 3, 1)],
    "channels_last_3d": [(2, 16, 2, 2, 2)],
}


@dataclass(frozen=True)
class Spec:
    """One parameter."""

    shape: tuple[int, ...]
    layout: str = "contiguous"
    dtype: str = "bf16"
    frozen: bool = False


@dataclass(frozen=True)
class Setup:
    """All that a program starts from.

    Attributes:
        attach: the arguments of `hmpx.attach`; None: the optimizer stays as it is, and each step runs in a region.
        names: "named_parameters", "positions", "names" or "model": where the names of parameters come from.
        groups: how many param_groups; parameters go round.
        floor: of a slice, in elements.
        waits: so many elements of gradients that are released wait at most.
        default_device: while hmpx works. Parameters decide where things are; what is made on "meta" has no numbers.
    """

    params: tuple[Spec, ...]
    optimizer: str = "SGD"
    options: dict[str, Any] = field(default_factory=dict)
    attach: dict[str, Any] | None = field(default_factory=dict)
    names: str = "named_parameters"
    groups: int = 1
    floor: int = 1 << 17
    waits: int = 1 << 20
    default_device: str = "cpu"


def values(shape: tuple[int, ...], seed: int, scale: float = 1.0) -> torch.Tensor:
    """Random numbers that BF16 can hold, in FP32."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return (torch.randn(shape, generator=generator, device="cpu") * scale).bfloat16().float()


def laid_out(x: torch.Tensor, layout: str) -> torch.Tensor:
    """A tensor of the values of `x`, of its shape and dtype, stored as `layout` says."""
    if layout == "transposed" and x.dim() > 1:
        return x.mT.contiguous().mT
    if layout == "sliced" and x.dim():
        return torch.stack([x, x], -1).flatten(-2)[..., ::2]
    if layout in FORMATS and x.dim() == (4 if layout == "channels_last" else 5):
        return x.contiguous(memory_format=FORMATS[layout])
    if layout == "expanded" and x.dim():
        return x[:1].expand(x.shape)
    return x.contiguous()


def make(specs: tuple[Spec, ...]) -> nn.Module:
    """A module that holds the parameters, those of layout "buffer" as neighbours in one tensor; the last is tied."""
    module = nn.Module()
    made = [values(spec.shape, 100 + i).to({"bf16": BF16, "fp32": FP32}[spec.dtype]) for i, spec in enumerate(specs)]
    for dtype in ("bf16", "fp32"):
        shared = [i for i, spec in enumerate(specs) if (spec.layout, spec.dtype) == ("buffer", dtype)]
        if shared:
            pieces = torch.cat([made[i].flatten() for i in shared]).split([made[i].numel() for i in shared])
            for i, piece in zip(shared, pieces, strict=True):
                made[i] = piece.view(specs[i].shape)
    for i, (spec, x) in enumerate(zip(specs, made, strict=True)):
        x = x if spec.layout == "buffer" else laid_out(x, spec.layout)
        module.register_parameter(f"w{i}", nn.Parameter(x, requires_grad=not spec.frozen))
    module.register_parameter("tied", module.w0)
    return module


def made_optimizer(setup: Setup, groups: list[list]) -> optim.Optimizer:
    """A new optimizer; no two groups learn at one rate."""
    optimizer = CLASSES[setup.optimizer]([{"params": group} for group in groups], **setup.options)
    for i, group in enumerate(optimizer.param_groups):
        group["lr"] *= 2.0**-i
    return optimizer


def random_setup(draw: random.Random) -> Setup:
    """Any setup that torch itself can train."""
    cls = draw.choice(list(OPTIMIZERS))
    options = {key: draw.choice(choices) for key, choices in OPTIMIZERS[cls].items()}
    options = {key: value for key, value in options.items() if value is not None}
    if options.get("fused"):
        options.pop("foreach", None)
    if options.get("nesterov"):
        options |= {"momentum": 0.9, "dampening": 0}
    attach = random_attach(draw, cls) if draw.random() < 0.8 else None
    return Setup(
        params=tuple(random_spec(draw, cls, options) for _ in range(draw.randint(1, 5))),
        optimizer=cls.__name__,
        options=options,
        attach=attach,
        names=draw.choice(["named_parameters", "named_parameters", "positions", "names", "model"])
        if attach is not None
        else draw.choice(["named_parameters", "positions"]),
        groups=1 if cls is optim.LBFGS else draw.choice([1, 1, 2, 3]),
        floor=draw.choice([64, 64, 1 << 17]),
        waits=draw.choice([1, 100, 1 << 20]),
        default_device=draw.choice(["cpu", "meta"]) if cls in NO_DEFAULTS else "cpu",
    )


def random_attach(draw: random.Random, cls: type) -> dict[str, Any]:
    """Arguments of `attach` that the class allows."""
    attach: dict[str, Any] = {"weights": draw.choice(["stochastic", "nearest", "master", "split", "split8", "split"])}
    if draw.random() < 0.5:
        attach["seed"] = draw.randrange(2**64)
    if draw.random() < 0.3:
        attach["state_dtype"] = draw.choice([BF16, "8bit", "8bit", "fp8", "4bit"])
    if draw.random() < 0.3 and hasattr(torch.Tensor, "grad_dtype"):
        attach["use_fp32_grad_acc"] = True
    if draw.random() < 0.6 and attach["weights"] in ("master", "split", "split8"):
        attach["use_master_weights_in_ckpt"] = True
    if draw.random() < 0.35 and cls in BY_PARTS:
        attach["release_gradients"] = True
    in_kernel = cls in IN_ONE_KERNEL and attach["weights"] == "stochastic" and attach.get("state_dtype") not in PREFIXES
    if draw.random() < 0.4 and in_kernel:
        attach["fused"] = True
    return attach


def random_spec(draw: random.Random, cls: type, options: dict[str, Any]) -> Spec:
    """A parameter that the class takes."""
    layouts = {optim.LBFGS: ["contiguous", "buffer"], optim.SparseAdam: ["contiguous"]}.get(cls, list(SHAPES))
    layout = draw.choice(layouts)
    if cls is optim.Muon:
        layout = draw.choice(["contiguous", "transposed", "sliced"])
    dtype = draw.choice(["bf16", "bf16", "bf16", "fp32"])
    if options.get("fused") and dtype == "fp32":
        layout = "contiguous"  # of what torch steps by itself, its fused kernels take nothing else
    if dtype == "fp32" and layout == "sliced" and cls not in BY_ELEMENT:
        layout = "contiguous"  # a copy has no gaps, and sums are taken in another order
    shapes = EVEN_SHAPES.get(layout, SHAPES[layout]) if options.get("fused") else SHAPES[layout]
    if cls in (optim.Muon, optim.SparseAdam):
        shapes = [shape for shape in shapes if len(shape) == 2]
    if cls in (optim.Adafactor, optim.LBFGS):
        shapes = [shape for shape in shapes if math.prod(shape)]
    return Spec(draw.choice(shapes), layout, dtype, draw.random() < 0.15)
