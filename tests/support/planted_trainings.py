"""Small trainings with a fault of precision planted in them, and each without it.

``PLANTED[kind](True)`` trains with the fault, ``PLANTED[kind](False)`` without. Nothing of hmpx is in them, so the
twin without does what doctor advises where that needs no hmpx.
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

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
    planted_by(kind, training, (BF16, FP32), **faults)


def planted_by(kind: str, training: Callable, values: tuple, **faults: Callable) -> None:
    """Plant faults in what `training(fault, value)` trains, with the first value; with the second it is healthy."""
    for name, fault in faults.items():
        PLANTED[f"{kind}: {name}"] = lambda sick, fault=fault: training(fault, values[not sick])


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
        with torch.autocast("cpu", autocast) if autocast else contextlib.nullcontext():
            logits = model(x.to(dtype))
            loss = loss_of(logits, y) if loss_of else F.cross_entropy(logits.float(), y)
        loss.backward()
        optimizer.step()
        after()


# Weights that are rounded to nearest


def of_weights(make, dtype, width=32):
    model = mlp(dtype, width)
    train(model, make(model.parameters()))


def muon(params):
    params = [*params]
    for p in params:
        p.requires_grad_(p.ndim == 2)
    return optim.Muon([p for p in params if p.ndim == 2], lr=2e-5, adjust_lr_fn="match_rms_adamw")


class Queued(optim.Optimizer):
    """SGD by the mean of two gradients, in a queue; an attribute is the dtype of the mean, an object holds factors."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})
        self.held = self.param_groups[0]["params"][0].dtype

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            queue = state.setdefault("queue", deque([torch.zeros_like(p)], maxlen=2))
            mean = state.setdefault("mean", torch.zeros_like(p, dtype=self.held))
            scale = state.setdefault("scale", SimpleNamespace(factors=torch.zeros_like(p).flatten()))
            queue.append(p.grad.clone())
            mean.lerp_(torch.lerp(*queue, 0.5).to(self.held), 1.0)
            extra = torch.dot(scale.factors, p.grad.flatten()).item()  # refuses two dtypes
            p.sub_(mean, alpha=self.param_groups[0]["lr"] + extra)


planted_in_bf16(
    "lost updates",
    of_weights,
    bf16_weights_under_sgd=partial(optim.SGD, lr=1e-3),
    bf16_weights_under_fused_adamw=partial(optim.AdamW, lr=1e-5, weight_decay=0, betas=(0.9, 0.95), fused=True),
    bf16_weights_under_adafactor=partial(optim.Adafactor, lr=1e-3),
    bf16_weights_under_muon=muon,
    bf16_weights_under_adamw_with_a_tensor=lambda params: optim.AdamW(params, torch.tensor(1e-5), (0.9, 0.95)),
    bf16_weights_under_a_class_that_nobody_knows=partial(Queued, lr=1e-3),
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


def of_functions(make, dtype):
    """Weights that require no gradient: `torch.func.grad` makes it, and the script sets it."""
    model = mlp(dtype)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = make(weights.values())

    def loss(weights, x, y):
        return F.cross_entropy(torch.func.functional_call(model, weights, x.to(dtype)).float(), y)

    for i in range(12):
        for name, grad in torch.func.grad(loss)(weights, *batch(i)).items():
            weights[name].grad = grad
        optimizer.step()


planted_in_bf16("lost updates", of_functions, bf16_weights_of_functions=partial(optim.SGD, lr=1e-3))


def by_hand(update, dtype):
    """No optimizer at all."""
    model = mlp(dtype)
    for i in range(12):
        model.zero_grad()
        x, y = batch(i)
        F.cross_entropy(model(x.to(dtype)).float(), y).backward()
        for p in model.parameters():
            update(p, 1e-5 * p.grad)


planted_in_bf16(
    "lost updates",
    by_hand,
    by_hand_in_place=torch.no_grad()(lambda p, u: p.sub_(u)),
    by_hand_in_data=lambda p, u: p.data.add_(u, alpha=-1.0),
    by_hand_by_new_data=lambda p, u: setattr(p, "data", p.data - u),
    by_hand_by_copy=torch.no_grad()(lambda p, u: p.copy_(p - u)),
    by_hand_by_foreach=torch.no_grad()(lambda p, u: torch._foreach_add_([p], [u], alpha=-1.0)),
)


def in_hooks(rate, dtype):
    """Each weight moves as soon as its gradient is complete."""
    model = mlp(dtype)

    def move(p):
        p.data.add_(p.grad, alpha=-rate)
        p.grad = None

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(move)
    for i in range(24):
        x, y = batch(i)
        F.cross_entropy(model(x.to(dtype)).float(), y).backward()


planted_in_bf16("lost updates", in_hooks, by_hand_in_hooks=1e-4)


def body_by_hand(update, dtype):
    """An optimizer steps the head alone."""
    torch.manual_seed(0)
    body, head = nn.Linear(16, 32).to(dtype), nn.Linear(32, 4)

    @torch.no_grad()
    def after():
        for p in body.parameters():
            update(p, 1e-5 * p.grad.float().sign())
        body.zero_grad()

    model = nn.Sequential(body, Widened(), head)
    train(model, optim.SGD(head.parameters(), lr=0.1), after=after)


class Widened(nn.Module):
    def forward(self, x):
        return x.float()


planted_in_bf16(
    "lost updates",
    body_by_hand,
    body_by_hand_by_copy=lambda p, u: p.copy_(p - u),
    body_by_hand_by_new_data=lambda p, u: setattr(p, "data", (p.data.float() - u).to(p.dtype)),
    body_by_hand_by_set=lambda p, u: p.set_((p - u).to(p.dtype)),
)


# Averages and accumulation


def averaging(update, dtype):
    model = mlp()
    average = [p.detach().to(dtype, copy=True) for p in model.parameters()]

    @torch.no_grad()
    def after():
        for i, p in enumerate(model.parameters()):
            made = update(average[i], p.detach().to(dtype), 0.999)
            average[i] = average[i] if made is None else made

    train(model, optim.Adam(model.parameters(), lr=1e-3), after=after)


planted_in_bf16(
    "average of weights",
    averaging,
    average_by_lerp_in_place=lambda mean, p, d: mean.lerp_(p, 1 - d),
    average_by_mul_and_add_in_place=lambda mean, p, d: mean.data.mul_(d).add_(p.data, alpha=1 - d),
    average_by_copy=lambda mean, p, d: mean.copy_(mean * d + p * (1 - d)),
    average_by_data=lambda mean, p, d: setattr(mean, "data", mean.data * d + p * (1 - d)),
    average_by_sub=lambda mean, p, d: mean.sub_((1 - d) * (mean - p)),
    average_by_mul_and_add=lambda mean, p, d: mean.mul(d).add(p, alpha=1 - d),
    average_by_the_difference=lambda mean, p, d: mean + (p - mean) * (1 - d),
    average_by_lerp=lambda mean, p, d: torch.lerp(mean, p, 1 - d),
    average_as_stylegan_has_it=lambda mean, p, d: mean.copy_(p.lerp(mean, d)),
    average_through_fp32=lambda mean, p, d: mean.copy_((mean.float() * d + p.float() * (1 - d)).to(mean.dtype)),
    average_by_data_through_fp32=lambda mean, p, d: setattr(mean, "data", (mean.float() * d + p * (1 - d)).to(p.dtype)),
    average_by_data_as_stylegan_has_it=lambda mean, p, d: setattr(mean, "data", p.lerp(mean.data, d)),
    average_anew_through_fp32=lambda mean, p, d: (mean.float() * d + p.float() * (1 - d)).to(mean.dtype),
    average_from_fp32=lambda mean, p, d: mean.copy_(torch.lerp(p.float(), mean.float(), d)),
    average_by_addcmul=lambda mean, p, d: mean.copy_(torch.addcmul(mean, p - mean, torch.full_like(mean, 1 - d))),
)


def following(write, dtype):
    """An average follows a matrix; `write(average, matrix)` moves it a little."""
    model, average = mlp(), torch.ones(16, 16, dtype=dtype)
    after = lambda: write(average, (model[0].weight.detach()[:16] + 2).to(dtype))  # noqa: E731
    train(model, optim.SGD(model.parameters(), lr=0.1), after=after)


def by_rows(averages, rows):
    for average, row in zip(averages, rows, strict=True):
        average.lerp_(row, RATE)


RATE = 3e-4
planted_in_bf16(
    "average of weights",
    following,
    by_split=lambda mean, p: by_rows(mean.flatten().split([100, 156]), p.flatten().split([100, 156])),
    by_unbind=lambda mean, p: by_rows(mean.unbind(), p),
    by_iteration=lambda mean, p: by_rows(mean, p),
    of_a_diagonal=lambda mean, p: mean.diagonal().lerp_(p.diagonal(), RATE),
    by_out=lambda mean, p: torch.lerp(mean, p, RATE, out=mean),
    of_a_row_that_is_expanded=lambda mean, p: mean.lerp_(p[:1], RATE),
    by_addmm_in_place=lambda mean, p: mean.addmm_(p, p, beta=1 - RATE, alpha=1e-5),
    by_addr_in_place=lambda mean, p: mean.addr_(p[0], p[0], beta=1 - RATE, alpha=1e-4),
    by_foreach_copy=lambda mean, p: torch._foreach_copy_([mean], torch._foreach_lerp([mean], [p], RATE)),
    by_foreach_mul=lambda mean, p: torch._foreach_mul_([mean], 1 - RATE),
    by_scatter_reduce=lambda mean, p: mean.scatter_reduce_(0, torch.zeros(1, 16).long(), 1e-4 * p[:1], "sum"),
    by_where=lambda mean, p: mean.copy_(torch.where(p > mean, mean.lerp(p, RATE), mean)),
)


@planted("average of weights")
def in_a_hook(sick):
    model = mlp()
    average = torch.ones(16, 16, dtype=BF16 if sick else FP32)

    def hook(_):
        average.lerp_((model[0].weight.detach()[:16] + 2).to(average.dtype), RATE)

    model[0].bias.register_post_accumulate_grad_hook(hook)
    train(model, optim.SGD(model.parameters(), lr=0.1))


class Counting(nn.Module):
    def __init__(self, counted):
        super().__init__()
        self.linear, self.counted = nn.Linear(16, 4), counted
        self.register_buffer("count", torch.full((1000,), 256.0))

    def forward(self, x):
        with torch.no_grad():
            made = self.counted(self.count, torch.arange(1000), torch.ones_like(self.count))
        self.count = self.count if made is None else made
        return self.linear(x)


def counting(counted, dtype):
    """Every number of a count stands at 256, where BF16 has no next integer."""
    torch.manual_seed(0)
    model = small(Counting(counted).to(dtype))
    train(model, optim.SGD(model.parameters(), lr=1.0))


planted_in_bf16(
    "average of weights",
    counting,
    count_in_place=lambda count, i, ones: count.__iadd__(ones),
    count_that_is_new=lambda count, i, ones: count + ones,
    count_by_index_add=lambda count, i, ones: count.index_add_(0, i, ones),
    count_by_index_put=lambda count, i, ones: count.index_put_((i,), ones, accumulate=True),
    count_by_index_in_place=lambda count, i, ones: count.__setitem__(i, count[i].add_(1)),
    count_by_mask_in_place=lambda count, i, ones: count.__setitem__(count > 3, count[count > 3].add_(1)),
    count_by_index=lambda count, i, ones: count.__setitem__(i, count[i] + ones),
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
    for _ in range(3):
        optimizer.zero_grad()
        for _ in range(300 if sick else 1):
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
    train(small(model), optim.Adam(model.parameters(), lr=1e-4, betas=(0.9, 0.95)))


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


@planted("loss")
def squared_error_of_what_was_rounded(sick):
    """Outputs near their target: rounding them leaves little of the difference, and so of the gradient."""
    dtype = BF16 if sick else FP32
    _plain(lambda out, y: F.mse_loss((out + 8).to(dtype), (out.detach() + 8.02).to(dtype)))


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
    bce_of_probabilities_that_were_bf16=lambda out, y, dtype: F.binary_cross_entropy(
        (out[:, 0] + 8).sigmoid().to(dtype).float(), (y > 1).float()
    ),
)


@planted("BCE")
def bce_of_bf16_probabilities(sick):
    def loss_of(out, y):
        logits, target = out[:, 0] + 8, (y > 1).float()
        if sick:
            return F.binary_cross_entropy(logits.sigmoid().to(BF16), target.to(BF16)).float()
        return F.binary_cross_entropy_with_logits(logits, target)

    _plain(loss_of)


@planted_line("norm statistics", in_autocast)
def rms_norm_in_bf16(x, sick):
    h = x if sick else x.float()
    return (h * (h.square().mean(-1, keepdim=True) + 1e-5).rsqrt()).to(x.dtype)


@planted_line("variance by difference", in_autocast)
def moments_in_bf16(x, sick):
    """The difference of moments in FP32 is as healthy as what is advised."""
    h = x.detach() + 8 if sick else x.detach().float() + 8
    variance = (h * h).mean(-1, keepdim=True) - h.mean(-1, keepdim=True) ** 2
    if not sick:
        variance = (variance + h.var(-1, keepdim=True)) / 2
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


@planted_line("mask", around_fp32)
def mask_of_a_constant_in_fp16(x, sick):
    least = torch.full_like(x, -1e9 if sick else torch.finfo(FP16).min).to(FP16)
    scores = torch.where(torch.arange(32) < 20, x.detach().to(FP16), least)
    return x + scores.float().softmax(-1)


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
    """A small part of the products, so that nobody minds where they are computed."""

    class Head(nn.Linear):
        def forward(self, x):
            with torch.autocast("cpu", enabled=sick, dtype=BF16):
                return x + super().forward(x.float())

    in_autocast(nn.Sequential(nn.Linear(32, 256), nn.Linear(256, 32), Head(32, 32)))


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


@planted_line("integers", around_fp32)
def positions_of_linspace(x, sick):
    return x + torch.linspace(0, 511, 512, dtype=BF16 if sick else FP32)[:32].float() * 1e-4


@planted_line("integers", around_fp32)
def positions_in_a_list(x, sick):
    return x + torch.ones(1, dtype=BF16 if sick else FP32).new_tensor(list(range(512)))[:32].float() * 1e-4


@planted_line("integers", around_fp32)
def positions_copied(x, sick):
    """Sorted labels are no positions."""
    numbers = torch.arange(512) if sick else torch.randint(0, 2000, (512,)).sort().values
    return x + torch.empty(512, dtype=BF16).copy_(numbers)[:32].float() * 1e-4


@planted_line("indices", around_fp32)
def indices_in_bf16(x, sick):
    return x + (torch.rand(32).to(BF16 if sick else FP32) * 1000).long() * 1e-4


@planted_line("indices", around_fp32)
def indices_of_what_was_in_bf16(x, sick):
    return x + (torch.rand(512).to(BF16 if sick else FP32) * 1000).float().long()[:32] * 1e-4


def turned(positions, dtype):
    angles = torch.arange(positions)[:, None] * torch.tensor([10000.0 ** (-i / 16) for i in range(16)]).to(dtype)
    table = torch.cat([angles.sin(), angles.cos()], -1).to(BF16)
    return table[-1].float()


planted_in_bf16("angles", lambda positions, dtype: around_fp32(lambda x: x + turned(positions, dtype)), many_angles=512)
planted_by(
    "angles", lambda dtype, many: around_fp32(lambda x: x + turned(many, dtype)), (512, 200), angles_in_bf16=BF16
)


def state(part, dtype):
    def line(given):
        x = given.to(dtype)
        for _ in range(24):
            x = x + part * torch.sin(x)
        return given + 1e-4 * x.float()

    around_fp32(line)


planted_in_bf16("running value", state, state_of_an_ode=1e-3)
planted_by("running value", lambda dtype, part: state(part, dtype), (1e-3, 0.5), state_in_bf16=BF16)


def nearest(distances, cloud):
    """The mean of the nearest points of a cloud: how far it lies from the origin, and whether in autocast."""
    far, is_low = cloud

    def line(x):
        y = far + torch.rand(len(x), 6)
        with torch.autocast("cpu", enabled=is_low):
            squares = (y**2).sum(-1, keepdim=True)
            near = distances(squares, squares.T, y, y.T).topk(4, largest=False)[1]
        return x[near].mean(1)

    around_fp32(line)


planted_by(
    "distances",
    nearest,
    ((8.0, True), (0.0, True)),
    distances_a_product_b=lambda a, b, z, c: a - 2 * torch.matmul(z, c) + b,
    distances_a_b_product=lambda a, b, z, c: a + b - 2 * (z @ c),
    distances_a_b_doubled=lambda a, b, z, c: a + b - 2 * z @ c,
    distances_product_a_b=lambda a, b, z, c: -2 * (z @ c) + (a + b),
    distances_negated=lambda a, b, z, c: -(-a - -2 * (z @ c) - b),
    distances_by_baddbmm=lambda a, b, z, c: torch.baddbmm(b[None].expand(1, 16, 16), z[None], c[None], alpha=-2)[0] + a,
    distances_by_addmm=lambda a, b, z, c: torch.addmm(a + b, z, c, alpha=-2),
    distances_by_addmm_in_place=lambda a, b, z, c: (a + b).bfloat16().addmm_(-2 * z.bfloat16(), c.bfloat16()),
)
planted_by(
    "distances",
    nearest,
    ((8.0, True), (8.0, False)),
    distances_in_autocast=lambda a, b, z, c: a - 2 * torch.matmul(z, c) + b,
)


# What is FP32, and was rounded


class OwnAdam(optim.Optimizer):
    def __init__(self, params, dtype, decay=0.999):
        super().__init__(params, {"dtype": dtype, "decay": decay})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                square = state.setdefault("square", torch.zeros_like(p, dtype=group["dtype"]))
                square.mul_(group["decay"]).add_(p.grad.square(), alpha=1 - group["decay"])
                p.sub_(1e-4 * p.grad / (square.float().sqrt() + 1e-8))


def fp32_weights(optimizer, dtype):
    model = mlp()
    train(model, optimizer(model.parameters(), dtype))


planted_in_bf16("rounded state", fp32_weights, state_beside_fp32_weights=OwnAdam)


def rounded_between(between, dtype):
    model = mlp()
    train(model, optim.AdamW(model.parameters(), lr=1e-4), after=lambda: between(model, dtype))


def worker_average(model, dtype):
    for p in model.parameters():
        p.data.copy_(torch.stack([p.detach().to(dtype), p.detach().to(dtype)]).float().mean(0))


planted_in_bf16(
    "rounded between steps",
    rounded_between,
    checkpoint_in_bf16=lambda net, dtype: net.load_state_dict({k: v.to(dtype) for k, v in net.state_dict().items()}),
    average_of_workers_in_bf16=worker_average,
)


def on_data(data, dtype):
    model, data = mlp(), data.to(dtype).float()
    train(model, optim.SGD(model.parameters(), lr=1e-6), loss_of=lambda logits, y: model(data).square().mean())


planted_in_bf16(
    "rounded data",
    on_data,
    points_far_from_the_origin=torch.randn(64, 16, generator=torch.Generator().manual_seed(0)) + 100,
    times_of_a_day=torch.rand(64, 16, generator=torch.Generator().manual_seed(0)) * 100 + 8000,
)


# FP16, inf and NaN


def scaled(model, scaler, steps=14, weight=1e-3, broken=lambda i: False, clip=lambda params: None, unscales=False):
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    for i in range(steps):
        x, y = batch(i)
        optimizer.zero_grad()
        with torch.autocast("cpu", FP16):
            logits = model(x)
        loss = F.cross_entropy(logits.float(), y) * (torch.inf if broken(i) else 1)
        if scaler is None:
            (loss * weight).backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            if unscales:
                scaler.unscale_(optimizer)
            clip([*model.parameters()])
            scaler.step(optimizer)
            scaler.update()


@planted("loss scaling")
def fp16_without_scaler(sick):
    scaled(mlp(), None if sick else torch.amp.GradScaler("cpu", init_scale=2.0**10), weight=1e-5)


@planted("loss scaling")
def fp16_gradients_that_are_all_zero(sick):
    scaled(mlp(), None if sick else torch.amp.GradScaler("cpu", init_scale=2.0**10), weight=1e-9)


def clip_by_hand(params):
    norm = torch.stack([p.grad.norm() for p in params]).norm()
    for p in params:
        p.grad.mul_(torch.clamp(0.5 / norm, max=1))


planted_by(
    "clipping",
    lambda clip, unscales: scaled(mlp(), torch.amp.GradScaler("cpu", init_scale=2.0**14), clip=clip, unscales=unscales),
    (False, True),
    a_norm_is_clipped_while_scaled=lambda params: nn.utils.clip_grad_norm_(params, 0.5),
    values_are_clipped_while_scaled=lambda params: nn.utils.clip_grad_value_(params, 0.01),
    a_norm_is_clipped_by_hand_while_scaled=clip_by_hand,
)


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


@planted("running statistics")
def statistics_of_a_batch_that_was_left_out(sick):
    model = nn.Sequential(mlp(), nn.BatchNorm1d(4))
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    for i in range(24):
        loss = model(batch(i)[0] + (math.nan if sick and i == 14 else 0.0)).square().mean()
        optimizer.zero_grad()
        if loss.isfinite():
            loss.backward()
            optimizer.step()


@planted("matmul precision")
def medium_precision(sick):
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium" if sick else "highest")
        around_fp32(F.gelu)
    finally:
        torch.set_float32_matmul_precision(before)
