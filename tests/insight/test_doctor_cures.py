"""What a finding says to do, done: the finding is gone."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hmpx
from tests.support.examined import trained

BF16, FP16 = torch.bfloat16, torch.float16


def loss_by(line):
    """Return a training whose loss reads what `line` makes of the output of a model."""

    def train():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 64))
        loss = lambda model, x, step: line(model(x), x).float().square().mean()  # noqa: E731
        return trained(model, torch.optim.SGD(model.parameters(), 1e-3), steps=4, loss_of=loss)

    return train


def stepped(dtype=torch.float32, make=torch.optim.SGD, rate=1e-3, is_attached=False, after=None, **more):
    def train():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 64)).to(dtype)
        optimizer = make(model.parameters(), lr=rate, **more)
        if is_attached:
            hmpx.attach(optimizer)
        found = trained(model, optimizer, after=after(model) if after else lambda: None)
        if is_attached:
            hmpx.detach(optimizer)
        return found

    return train


def average(first, move):
    def after(model):
        averages = [first(p) for p in model.parameters()]
        return lambda: [move(a, p) for a, p in zip(averages, model.parameters(), strict=True)]

    return after


def normed(norm):
    def train():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 8).to(BF16), norm(nn.BatchNorm1d(8, momentum=1e-3).to(BF16)))
        return trained(model, torch.optim.SGD([*model[0].parameters()], 0.5))

    return train


def far(y):
    return y.to(BF16) + 30


def distances(x, y):
    return (x * x).sum(-1, keepdim=True) - 2 * x @ y.T + (y * y).sum(-1)


def upcast(x, is_kept):
    if is_kept:
        x = x.float()
    else:
        x.float()
    return x


def masked(value):
    return lambda y, x: torch.where(x[:, :1] > 0, y.to(FP16), torch.full_like(y, value).to(FP16)).float().softmax(-1)


POSITIONS = torch.arange(2000.0)
CURES = {  # a kind: words of its `do`, the training with the fault, and with what these words say
    "variance by difference": (
        "x.float().var()",
        loss_by(lambda y, x: far(y).square().mean(-1) - far(y).mean(-1).square()),
        loss_by(lambda y, x: far(y).float().var(-1)),
    ),
    "cumulative sum": (
        "compute it in float32 (x.float())",
        loss_by(lambda y, x: y.repeat(1, 8).to(BF16).cumsum(-1) / 512),
        loss_by(lambda y, x: y.repeat(1, 8).to(BF16).float().cumsum(-1) / 512),
    ),
    "log": (
        "compute it in float32 (x.float())",
        loss_by(lambda y, x: (y.sigmoid() + 1).to(BF16).log()),
        loss_by(lambda y, x: (y.sigmoid() + 1).to(BF16).float().log()),
    ),
    "distances": (
        "take the squares and the product in float32 (x.float()), outside of autocast",
        loss_by(lambda y, x: distances(far(y), far(y))),
        loss_by(lambda y, x: distances(far(y).float(), far(y).float())),
    ),
    "BCE": (
        "binary_cross_entropy_with_logits",
        loss_by(lambda y, x: F.binary_cross_entropy((9 * y).to(BF16).sigmoid(), (y > 0).to(BF16))),
        loss_by(lambda y, x: F.binary_cross_entropy_with_logits((9 * y).to(BF16), (y > 0).to(BF16))),
    ),
    "angles": (
        "multiply positions and frequencies in float32, and cast the result of sin and cos",
        loss_by(lambda y, x: y[:, :1] * (POSITIONS.to(BF16) * 0.3).sin()),
        loss_by(lambda y, x: y[:, :1] * (POSITIONS * 0.3).sin().to(BF16)),
    ),
    "mask": (
        "torch.finfo(x.dtype).min of the dtype that is masked",
        loss_by(masked(-1e9)),
        loss_by(masked(torch.finfo(FP16).min)),
    ),
    "upcast": (
        "x = x.float()",
        loss_by(lambda y, x: upcast(y.to(BF16), is_kept=False)),
        loss_by(lambda y, x: upcast(y.to(BF16), is_kept=True)),
    ),
    "average of weights": (
        "make it in float32: average = p.detach().float().clone(), then average.lerp_(p.float(), 1 - decay)",
        stepped(after=average(lambda p: p.detach().to(BF16), lambda a, p: a.lerp_(p.detach().to(BF16), 1e-3))),
        stepped(after=average(lambda p: p.detach().float().clone(), lambda a, p: a.lerp_(p.detach().float(), 1e-3))),
    ),
    "lost updates": ("hmpx.attach(optimizer)", stepped(BF16), stepped(BF16, is_attached=True)),
    "learning rate": (
        "give the optimizer a float",
        stepped(BF16, torch.optim.AdamW, torch.tensor(0.1, dtype=BF16), weight_decay=0.0),
        stepped(BF16, torch.optim.AdamW, 0.1, weight_decay=0.0),
    ),
    "running statistics": ("norm.float()", normed(lambda norm: norm), normed(lambda norm: norm.float())),
}


@pytest.mark.parametrize("kind", CURES)
def test_what_is_advised_mends_what_it_is_said_of(kind):
    words, sick, mended = CURES[kind]
    told = {each.kind: each for each in sick().findings}
    assert kind in told and words in told[kind].do, told
    assert kind not in {each.kind for each in mended().findings}
