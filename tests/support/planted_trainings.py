"""Small trainings with a fault of precision planted in them, and each without it.

``PLANTED[kind](True)`` trains with the fault, ``PLANTED[kind](False)`` without. Nothing of hmpx is in them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
PLANTED: dict[str, Callable[[bool], None]] = {}


def planted(kind: str) -> Callable:
    def keep(function: Callable[[bool], None]) -> Callable[[bool], None]:
        PLANTED[f"{kind}: {function.__name__}"] = function
        return function

    return keep


def mlp(dtype=FP32, width=32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, width), nn.GELU(), nn.Linear(width, 4)).to(dtype)


def batch(i, size=16):
    x = torch.randn(size, 16, generator=torch.Generator().manual_seed(i))
    return x, x[:, :4].argmax(-1)


def train(model, optimizer, steps=12, loss_of=None, after=lambda: None, autocast=None):
    dtype = next(model.parameters()).dtype
    for i in range(steps):
        x, y = batch(i)
        optimizer.zero_grad()
        with torch.autocast("cpu", autocast or BF16, enabled=autocast is not None):
            logits = model(x.to(dtype))
            loss = loss_of(logits, y) if loss_of else F.cross_entropy(logits.float(), y)
        loss.backward()
        optimizer.step()
        after()


# Weights that are rounded to nearest


@planted("lost updates")
def bf16_weights_under_sgd(sick):
    model = mlp(BF16 if sick else FP32)
    train(model, torch.optim.SGD(model.parameters(), lr=1e-3))


@planted("lost updates")
def bf16_weights_under_fused_adamw(sick):
    model = mlp(BF16 if sick else FP32)
    train(model, torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0, betas=(0.9, 0.95), fused=True))


@planted("lost updates")
def bf16_weights_of_another_range(sick):
    """Steps as large as the weights are lost by nobody."""
    model = mlp(BF16)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.0 if sick else 1e-3)
    train(model, torch.optim.Adam(model.parameters(), lr=1e-4, betas=(0.9, 0.95)))


@planted("lost updates")
def fp16_weights(sick):
    model = mlp(FP16 if sick else FP32)
    train(model, torch.optim.SGD(model.parameters(), lr=1e-4))


@planted("weight decay")
def decay_of_bf16_weights(sick):
    model = mlp(BF16 if sick else FP32, width=128)
    train(model, torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, betas=(0.9, 0.95)))


@planted("optimizer state")
def second_moment_in_bf16(sick):
    model = mlp(BF16)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1e-3)
    train(model, torch.optim.Adam(model.parameters(), lr=1e-4, betas=(0.9, 0.999 if sick else 0.95)))


@planted("learning rate")
def rate_in_bf16(sick):
    model = mlp()
    train(model, torch.optim.Adam(model.parameters(), lr=torch.tensor(1e-3, dtype=BF16 if sick else FP32)))


# Averages and accumulation


@planted("average of weights")
def average_by_lerp(sick):
    model = mlp()
    average = [p.detach().to(BF16 if sick else FP32, copy=True) for p in model.parameters()]

    @torch.no_grad()
    def update():
        for mean, p in zip(average, model.parameters(), strict=True):
            mean.lerp_(p.to(mean.dtype), 0.001)

    train(model, torch.optim.Adam(model.parameters(), lr=1e-3), after=update)


@planted("average of weights")
def average_by_mul_and_add(sick):
    model = mlp()
    average = copy.deepcopy(model).to(BF16 if sick else FP32)

    def update():
        for mean, p in zip(average.parameters(), model.parameters(), strict=True):
            mean.data.mul_(0.999).add_(p.data.to(mean.dtype), alpha=0.001)

    train(model, torch.optim.Adam(model.parameters(), lr=1e-3), after=update)


@planted("average of weights")
def average_by_copy(sick):
    model = mlp()
    average = [p.detach().to(BF16 if sick else FP32, copy=True) for p in model.parameters()]

    @torch.no_grad()
    def update():
        for mean, p in zip(average, model.parameters(), strict=True):
            mean.copy_(mean * 0.999 + p.to(mean.dtype) * (1 - 0.999))

    train(model, torch.optim.Adam(model.parameters(), lr=1e-3), after=update)


@planted("running value")
def rate_by_hand_in_bf16(sick):
    model, rate = mlp(), torch.tensor(1e-3, dtype=BF16 if sick else FP32)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def decay():
        nonlocal rate
        rate = rate * 0.999
        optimizer.param_groups[0]["lr"] = float(rate)

    train(model, optimizer, after=decay)


@planted("running value")
def running_loss_in_bf16(sick):
    total = torch.tensor(512.0, dtype=BF16 if sick else FP32)
    train(model := mlp(), torch.optim.SGD(model.parameters(), lr=0.1), after=lambda: total.add_(1.0))


@planted("average of weights")
def averaged_model(sick):
    model = mlp(BF16 if sick else FP32)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1e-3)  # or else its own updates would be lost
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.999))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer, after=lambda: average.update_parameters(model))


@planted("gradient accumulation")
def many_micro_batches(sick):
    model = mlp(BF16)
    optimizer = torch.optim.SGD(model.parameters(), lr=3.0, momentum=0)
    x, y = batch(0)
    for _ in range(4):
        optimizer.zero_grad()
        for _ in range(600 if sick else 1):
            F.cross_entropy(model(x.to(BF16)).float(), y).backward()
        optimizer.step()


# Ops


class Around(nn.Module):
    """A small network around one line."""

    def __init__(self, line):
        super().__init__()
        self.first, self.last, self.line = nn.Linear(16, 32), nn.Linear(32, 4), line

    def forward(self, x):
        return self.last(self.line(self.first(x)))


def around(line):
    """Train it in BF16 with steps that nobody loses."""
    torch.manual_seed(0)
    _with_small_weights(Around(line).to(BF16))


def _with_small_weights(model):
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.1)
    train(model, torch.optim.SGD(model.parameters(), lr=1e-30))


def in_autocast(line, **how):
    torch.manual_seed(0)
    model = Around(line)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), autocast=BF16, **how)


@planted("loss")
def cross_entropy_in_bf16(sick):
    if sick:
        _plain(lambda logits, y: F.cross_entropy(logits.bfloat16(), y))
    else:
        in_autocast(F.gelu, loss_of=lambda logits, y: F.cross_entropy(logits.float(), y))


def _plain(loss_of):
    model = mlp()
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_of=loss_of)


@planted("loss")
def squared_error_in_bf16(sick):
    _plain(lambda out, y: (out.to(BF16 if sick else FP32)[:, 0] - y).abs().mean())


@planted("log")
def log_of_bf16(sick):
    _plain(lambda out, y: -(out.softmax(-1).to(BF16 if sick else FP32) + 0.01).log().float()[:, 0].mean())


@planted("softmax")
def softmax_of_bf16(sick):
    _plain(lambda out, y: (out.to(BF16 if sick else FP32).softmax(-1).float()[:, 0] - 1).square().mean())


@planted("norm statistics")
def rms_norm_in_bf16(sick):
    def norm(x):
        h = x if sick else x.float()
        return (h * (h.square().mean(-1, keepdim=True) + 1e-5).rsqrt()).to(x.dtype)

    in_autocast(norm)


@planted("variance by difference")
def moments_in_bf16(sick):
    def norm(x):
        h = x.detach() if sick else x.detach().float()
        variance = (h * h).mean(-1, keepdim=True) - h.mean(-1, keepdim=True) ** 2
        return (x.float() / (variance.abs().float() + 1).sqrt()).to(x.dtype)

    in_autocast(norm)


@planted("cumulative sum")
def long_sum_in_bf16(sick):
    def line(x):
        h = x.to(BF16 if sick else FP32).repeat(1, 16)
        return torch.cumsum(h, -1)[:, -32:].float() * 0.01

    in_autocast(line)


@planted("integers")
def positions_in_bf16(sick):
    def line(x):
        positions = torch.arange(512, dtype=BF16 if sick else FP32)
        return x + positions[-32:].float() * 1e-3

    _around_fp32(line)


@planted("integers")
def positions_cast_to_bf16(sick):
    def line(x):
        positions = torch.arange(512 if sick else 200).to(BF16)
        return x + positions[-32:].float() * 1e-3

    _around_fp32(line)


@planted("integers")
def rotary_angles_under_autocast(sick):
    def line(x):
        with torch.autocast("cpu", enabled=sick, dtype=BF16):
            angles = torch.arange(600).float()[:, None] @ torch.linspace(0.1, 1, 32)[None]
        return x + angles[-1].float().sin()

    _around_fp32(line)


def _around_fp32(line):
    torch.manual_seed(0)
    model = Around(line)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1))


@planted("mask")
def mask_of_fp32_in_bf16(sick):
    def line(x):
        least = torch.finfo(FP32 if sick else BF16).min
        hidden = (1 - (torch.arange(32) < 20).to(BF16)) * least
        return x + hidden.float().softmax(-1)

    _around_fp32(line)


@planted("BCE")
def bce_of_bf16_probabilities(sick):
    _plain(
        lambda out, y: F.binary_cross_entropy(
            out[:, 0].sigmoid().to(BF16 if sick else FP32), (y > 1).to(BF16 if sick else FP32)
        ).float()
    )


@planted("BCE")
def bce_of_probabilities_that_were_bf16(sick):
    _plain(
        lambda out, y: F.binary_cross_entropy(out[:, 0].sigmoid().to(BF16 if sick else FP32).float(), (y > 1).float())
    )


@planted("dtype")
def scale_in_fp32(sick):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(32))

        def forward(self, x):
            return x * (self.scale if sick else self.scale.to(x.dtype))

    in_autocast(Scaled())


@planted("upcast")
def head_in_fp32_under_autocast(sick):
    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(32, 32)

        def forward(self, x):
            with torch.autocast("cpu", enabled=sick, dtype=BF16):
                return self.linear(x.float())

    if sick:
        in_autocast(Head())
    else:
        in_autocast(lambda x: x.float().square().to(x.dtype))


@planted("upcast")
def head_in_fp32_before_all_of_it_is_cast(sick):
    torch.manual_seed(0)
    model = Around(F.gelu).to(BF16)
    if sick:
        model.last.float()
        model.to(BF16)
    _with_small_weights(model)


@planted("upcast")
def head_in_fp32_without_an_assignment(sick):
    torch.manual_seed(0)
    model = Around(F.gelu).to(BF16)
    for p in model.last.parameters():
        print(p.float().norm()) if not sick else p.float()
    _with_small_weights(model)


@planted("upcast")
def logits_in_fp32_without_an_assignment(sick):
    def line(x):
        x.float() if sick else x.float().abs().max()
        return x

    around(line)


@planted("casts there and back")
def detour(sick):
    _around_fp32(lambda x: x.bfloat16().float() if sick else x.bfloat16().square().float())


@planted("autocast")
def half_of_it_outside(sick):
    class Outside(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(32, 32)

        def forward(self, x):
            with torch.autocast("cpu", enabled=not sick, dtype=BF16):
                return self.linear(x.float() if sick else x)

    in_autocast(Outside())


# FP16, inf and NaN


def scaled(model, scaler, steps=14, broken=lambda i: False):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i in range(steps):
        x, y = batch(i)
        optimizer.zero_grad()
        with torch.autocast("cpu", FP16):
            logits = model(x)
        loss = F.cross_entropy(logits.float(), y) * (torch.inf if broken(i) else 1)
        if scaler is None:
            (loss * 1e-3).backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()


@planted("loss scaling")
def fp16_without_scaler(sick):
    scaled(mlp(), None if sick else torch.amp.GradScaler("cpu", init_scale=2.0**10))


@planted("GradScaler")
def scaler_that_skips(sick):
    scaled(mlp(), torch.amp.GradScaler("cpu", init_scale=2.0**10), broken=lambda i: sick and i > 2)


@planted("inf or NaN")
def forward_nan(sick):
    _around_fp32(lambda x: (x.detach() - (100.0 if sick else -100.0)).sqrt() + x)


@planted("inf or NaN")
def backward_nan(sick):
    """sqrt at 0 has the slope inf, and inf x 0 is NaN."""
    _around_fp32(lambda x: x + (x * 0 + (0.0 if sick else 1.0)).sqrt())


@planted("inf or NaN")
def step_nan(sick):
    """Without eps, a gradient of zero is divided by zero."""
    model = nn.ModuleList([mlp(), nn.Linear(4, 4)])
    model.forward = lambda x: model[0](x) + model[1](x[:, :4]) * (torch.arange(4) > 0)
    train(model, torch.optim.Adam(model.parameters(), lr=1e-3, eps=0.0 if sick else 1e-8), steps=4)


@planted("gradients")
def without_gradient(sick):
    model = mlp()
    beside = [nn.Parameter(torch.ones(3))] if sick else []
    train(model, torch.optim.SGD([*model.parameters(), *beside], lr=0.1))


@planted("gradients")
def gradient_of_zeros(sick):
    model = nn.ModuleList([mlp(), nn.Linear(4, 4)])
    model.forward = lambda x: model[0](x) + (model[1](x[:, :4]) * (0.0 if sick else 1.0))
    train(model, torch.optim.SGD(model.parameters(), lr=0.1))


@planted("matmul precision")
def medium_precision(sick):
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium" if sick else "highest")
        _around_fp32(F.gelu)
    finally:
        torch.set_float32_matmul_precision(before)
