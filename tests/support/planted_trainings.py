"""Small trainings with a fault of precision planted in them, and each without it.

``PLANTED[kind](True)`` trains with the fault, ``PLANTED[kind](False)`` without. Nothing of hmpx is in them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn, optim

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
PLANTED: dict[str, Callable[[bool], None]] = {}


def planted(kind: str) -> Callable:
    def keep(function: Callable[[bool], None]) -> Callable[[bool], None]:
        PLANTED[f"{kind}: {function.__name__}"] = function
        return function

    return keep


def planted_in_bf16(kind: str, training: Callable, **faults: Callable) -> None:
    """Plant faults of one kind by name, in what `training(fault, dtype)` trains; the dtype is FP32 without them."""
    for name, fault in faults.items():
        PLANTED[f"{kind}: {name}"] = lambda sick, fault=fault: training(fault, BF16 if sick else FP32)


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


def of_weights(make, dtype, width=32):
    model = mlp(dtype, width)
    train(model, make(model.parameters()))


planted_in_bf16(
    "lost updates",
    of_weights,
    bf16_weights_under_sgd=partial(optim.SGD, lr=1e-3),
    bf16_weights_under_fused_adamw=partial(optim.AdamW, lr=1e-5, weight_decay=0, betas=(0.9, 0.95), fused=True),
)
planted_in_bf16(
    "weight decay",
    partial(of_weights, width=128),
    decay_of_bf16_weights=partial(optim.AdamW, lr=1e-3, weight_decay=0.1, betas=(0.9, 0.95)),
)


def small(model, factor=1e-3):
    """Make weights so small that their own updates are not lost."""
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(factor)
    return model


@planted("lost updates")
def bf16_weights_of_another_range(sick):
    """Steps as large as the weights are lost by nobody."""
    model = small(mlp(BF16), 1.0 if sick else 1e-3)
    train(model, optim.Adam(model.parameters(), lr=1e-4, betas=(0.9, 0.95)))


@planted("lost updates")
def fp16_weights(sick):
    model = mlp(FP16 if sick else FP32)
    train(model, optim.SGD(model.parameters(), lr=1e-4))


@planted("optimizer state")
def second_moment_in_bf16(sick):
    model = small(mlp(BF16))
    train(model, optim.Adam(model.parameters(), lr=1e-4, betas=(0.9, 0.999 if sick else 0.95)))


@planted("learning rate")
def rate_in_bf16(sick):
    model = mlp()
    train(model, optim.Adam(model.parameters(), lr=torch.tensor(1e-3, dtype=BF16 if sick else FP32)))


# Averages and accumulation


def averaging(update, dtype):
    model = mlp()
    average = [p.detach().to(dtype, copy=True) for p in model.parameters()]

    @torch.no_grad()
    def after():
        for mean, p in zip(average, model.parameters(), strict=True):
            update(mean, p.to(dtype))

    train(model, optim.Adam(model.parameters(), lr=1e-3), after=after)


planted_in_bf16(
    "average of weights",
    averaging,
    average_by_lerp=lambda mean, p: mean.lerp_(p, 0.001),
    average_by_mul_and_add=lambda mean, p: mean.data.mul_(0.999).add_(p.data, alpha=0.001),
    average_by_copy=lambda mean, p: mean.copy_(mean * 0.999 + p * (1 - 0.999)),
)


@planted("running value")
def rate_by_hand_in_bf16(sick):
    model, rate = mlp(), torch.tensor(1e-3, dtype=BF16 if sick else FP32)
    optimizer = optim.Adam(model.parameters(), lr=1e-3)

    def decay():
        nonlocal rate
        rate = rate * 0.999
        optimizer.param_groups[0]["lr"] = float(rate)

    train(model, optimizer, after=decay)


@planted("running value")
def running_loss_in_bf16(sick):
    total = torch.tensor(512.0, dtype=BF16 if sick else FP32)
    train(model := mlp(), optim.SGD(model.parameters(), lr=0.1), after=lambda: total.add_(1.0))


@planted("average of weights")
def averaged_model(sick):
    model = small(mlp(BF16 if sick else FP32))
    average = optim.swa_utils.AveragedModel(model, multi_avg_fn=optim.swa_utils.get_ema_multi_avg_fn(0.999))
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer, after=lambda: average.update_parameters(model))


@planted("gradient accumulation")
def many_micro_batches(sick):
    model = mlp(BF16)
    optimizer = optim.SGD(model.parameters(), lr=3.0, momentum=0)
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
    train(small(model, 0.1), optim.SGD(model.parameters(), lr=1e-30))


def around_fp32(line):
    torch.manual_seed(0)
    model = Around(line)
    train(model, optim.SGD(model.parameters(), lr=0.1))


def in_autocast(line, **how):
    torch.manual_seed(0)
    model = Around(line)
    train(model, optim.SGD(model.parameters(), lr=0.1), autocast=BF16, **how)


def planted_line(kind: str, training: Callable) -> Callable:
    """Plant a fault in one line of the network."""

    def keep(function: Callable) -> Callable:
        PLANTED[f"{kind}: {function.__name__}"] = lambda sick: training(lambda x: function(x, sick))
        return function

    return keep


@planted("loss")
def cross_entropy_in_bf16(sick):
    if sick:
        _plain(lambda logits, y: F.cross_entropy(logits.bfloat16(), y))
    else:
        in_autocast(F.gelu, loss_of=lambda logits, y: F.cross_entropy(logits.float(), y))


def _plain(loss_of):
    model = mlp()
    train(model, optim.SGD(model.parameters(), lr=0.1), loss_of=loss_of)


def by_loss(loss_of, dtype):
    _plain(lambda out, y: loss_of(out, y, dtype))


planted_in_bf16("loss", by_loss, squared_error_in_bf16=lambda out, y, dtype: (out.to(dtype)[:, 0] - y).abs().mean())
planted_in_bf16(
    "log", by_loss, log_of_bf16=lambda out, y, dtype: -(out.softmax(-1).to(dtype) + 0.01).log().float()[:, 0].mean()
)
planted_in_bf16(
    "softmax",
    by_loss,
    softmax_of_bf16=lambda out, y, dtype: (out.to(dtype).softmax(-1).float()[:, 0] - 1).square().mean(),
)
planted_in_bf16(
    "BCE",
    by_loss,
    bce_of_bf16_probabilities=lambda out, y, dtype: F.binary_cross_entropy(
        out[:, 0].sigmoid().to(dtype), (y > 1).to(dtype)
    ).float(),
    bce_of_probabilities_that_were_bf16=lambda out, y, dtype: F.binary_cross_entropy(
        out[:, 0].sigmoid().to(dtype).float(), (y > 1).float()
    ),
)


@planted_line("norm statistics", in_autocast)
def rms_norm_in_bf16(x, sick):
    h = x if sick else x.float()
    return (h * (h.square().mean(-1, keepdim=True) + 1e-5).rsqrt()).to(x.dtype)


@planted_line("variance by difference", in_autocast)
def moments_in_bf16(x, sick):
    h = x.detach() if sick else x.detach().float()
    variance = (h * h).mean(-1, keepdim=True) - h.mean(-1, keepdim=True) ** 2
    return (x.float() / (variance.abs().float() + 1).sqrt()).to(x.dtype)


@planted_line("cumulative sum", in_autocast)
def long_sum_in_bf16(x, sick):
    h = x.to(BF16 if sick else FP32).repeat(1, 16)
    return torch.cumsum(h, -1)[:, -32:].float() * 0.01


@planted_line("integers", around_fp32)
def positions_in_bf16(x, sick):
    positions = torch.arange(512, dtype=BF16 if sick else FP32)
    return x + positions[-32:].float() * 1e-3


@planted_line("integers", around_fp32)
def positions_cast_to_bf16(x, sick):
    positions = torch.arange(512 if sick else 200).to(BF16)
    return x + positions[-32:].float() * 1e-3


@planted_line("integers", around_fp32)
def rotary_angles_under_autocast(x, sick):
    with torch.autocast("cpu", enabled=sick, dtype=BF16):
        angles = torch.arange(600).float()[:, None] @ torch.linspace(0.1, 1, 32)[None]
    return x + angles[-1].float().sin()


@planted_line("mask", around_fp32)
def mask_of_fp32_in_bf16(x, sick):
    least = torch.finfo(FP32 if sick else BF16).min
    hidden = (1 - (torch.arange(32) < 20).to(BF16)) * least
    return x + hidden.float().softmax(-1)


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
    class Head(nn.Linear):
        def forward(self, x):
            with torch.autocast("cpu", enabled=sick, dtype=BF16):
                return super().forward(x.float())

    if sick:
        in_autocast(Head(32, 32))
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


@planted_line("upcast", around)
def logits_in_fp32_without_an_assignment(x, sick):
    x.float() if sick else x.float().abs().max()
    return x


@planted("casts there and back")
def detour(sick):
    around_fp32(lambda x: x.bfloat16().float() if sick else x.bfloat16().square().float())


@planted("autocast")
def half_of_it_outside(sick):
    class Outside(nn.Linear):
        def forward(self, x):
            with torch.autocast("cpu", enabled=not sick, dtype=BF16):
                return super().forward(x.float() if sick else x)

    in_autocast(Outside(32, 32))


# FP16, inf and NaN


def scaled(model, scaler, steps=14, broken=lambda i: False):
    optimizer = optim.SGD(model.parameters(), lr=0.1)
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
    around_fp32(lambda x: (x.detach() - (100.0 if sick else -100.0)).sqrt() + x)


@planted("inf or NaN")
def backward_nan(sick):
    """sqrt at 0 has the slope inf, and inf x 0 is NaN."""
    around_fp32(lambda x: x + (x * 0 + (0.0 if sick else 1.0)).sqrt())


@planted("inf or NaN")
def step_nan(sick):
    """Without eps, a gradient of zero is divided by zero."""
    model = nn.ModuleList([mlp(), nn.Linear(4, 4)])
    model.forward = lambda x: model[0](x) + model[1](x[:, :4]) * (torch.arange(4) > 0)
    train(model, optim.Adam(model.parameters(), lr=1e-3, eps=0.0 if sick else 1e-8), steps=4)


@planted("matmul precision")
def medium_precision(sick):
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium" if sick else "highest")
        around_fp32(F.gelu)
    finally:
        torch.set_float32_matmul_precision(before)
