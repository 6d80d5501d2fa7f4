"""A training loop written by hand, for a trainer's run to be compared with, to the bit.

It knows no framework: the model is BF16, a plain torch optimizer works on FP32 copies, ops are cast by torch.autocast.
Of hmpx it uses `stochastic_round` alone, which has tests of its own.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import nn

import hmpx

LISTS = Path(hmpx.__file__).parent / "oplists" / "autocast-cpu"
# What torch.autocast("cpu") does to ops. A test adds how weights are held, and that the step is torch's own.
AUTOCASTS = {f"{side}_file_path": str(LISTS / f"{side}.txt") for side in ("bf16", "fp32", "promote")}
IN_CHECKPOINT = {"use_master_weights_in_ckpt": True}
RECIPES = {
    "FP32 weights": {**AUTOCASTS, "parameter_dtype": "float32"},
    "stochastic": {**AUTOCASTS, "weights": "stochastic", "fused": False},
    "stochastic, released": {**AUTOCASTS, "weights": "stochastic", "fused": False, "release_gradients": True},
    "master": {**AUTOCASTS, "weights": "master", **IN_CHECKPOINT, "fused": False},
}


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4))


def batches(count: int = 8) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(8, 16, generator=generator), torch.randint(4, (8,), generator=generator)) for _ in range(count)
    ]


def loader(count: int = 8) -> torch.utils.data.DataLoader:
    return torch.utils.data.DataLoader(batches(count), batch_size=None)


def adamw(params: Iterable, weight_decay: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, weight_decay=weight_decay)


class ByHand:
    """A model, and an optimizer on FP32 copies of its parameters.

    Args:
        weights: how BF16 weights are held between steps; "FP32 weights" leaves the model as it is.
        of: the names of the parameters that the optimizer is given; None for all.
    """

    def __init__(
        self,
        model: nn.Module,
        weights: str,
        optimizer: Callable = adamw,
        of: Callable[[str], bool] = lambda name: True,
        prefix: str = "",
    ) -> None:
        self.model, self.weights, self.prefix, self.steps = model, weights, prefix, 0
        if weights != "FP32 weights":
            model.bfloat16()
        self.params = {name: p for name, p in model.named_parameters() if of(name)}
        self.copies = {name: nn.Parameter(p.detach().float()) for name, p in self.params.items()}
        self.optimizer = optimizer(self.copies.values())

    def loss(self, batch, loss_of: Callable | None = None) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
            if loss_of is not None:
                return loss_of(self.model, batch)
            inputs, targets = batch
            return nn.functional.cross_entropy(self.model(inputs), targets)

    def step(self) -> None:
        for name, p in self.params.items():
            self.copies[name].grad = None if p.grad is None else p.grad.float()
        self.optimizer.step()
        self.write_back()

    @torch.no_grad()
    def write_back(self) -> None:
        for name, p in self.params.items():
            held = self.copies[name]
            if self.weights == "stochastic" and p.grad is not None:
                rounded = hmpx.stochastic_round(held, seed=0, step=self.steps, name=self.prefix + name)
                held.copy_(rounded)
            p.copy_(held)
        self.steps += 1

    def train(self, data, *, accumulate: int = 1, clip: Callable = lambda params: None, loss_of=None) -> ByHand:
        for i, batch in enumerate(data):
            (self.loss(batch, loss_of) / accumulate).backward()
            if (i + 1) % accumulate == 0:
                clip(list(self.params.values()))
                self.step()
                self.model.zero_grad()
        return self


def clip_norm(params: Iterable[nn.Parameter], most: float) -> None:
    """Clip gradients by their norm: beside BF16 weights, which hmpx rounds, it is taken in FP64."""
    params = list(params)
    if all(p.dtype is torch.float32 for p in params):
        torch.nn.utils.clip_grad_norm_(params, most)
        return
    norm = sum(p.grad.double().square().sum() for p in params if p.grad is not None).sqrt().float()
    torch.nn.utils.clip_grads_with_norm_(params, most, norm)


def bits(model: nn.Module) -> dict[str, bytes]:
    """Of every parameter and buffer, with its dtype."""
    return {name: digest(tensor) for name, tensor in model.state_dict().items()}


def digest(tensor: torch.Tensor) -> str:
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{tensor.dtype} {hashlib.sha256(raw).hexdigest()[:16]}"


def state_bits(optimizer: torch.optim.Optimizer) -> dict:
    """Of an optimizer's checkpoint: every tensor, and what stands beside them."""
    saved = copy.deepcopy(optimizer.state_dict())
    return {
        (i, key): digest(value) if isinstance(value, torch.Tensor) else value
        for i, values in saved["state"].items()
        for key, value in values.items()
    }
