"""What a finding says to do, done: the finding is gone."""

import math

import numpy as np
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


class FromNumpy(torch.autograd.Function):
    """A gradient that no op of torch makes."""

    @staticmethod
    def forward(ctx, weight):
        return weight.square().sum()

    @staticmethod
    def backward(ctx, gradient):
        return torch.from_numpy(np.full((64, 16), np.nan, np.float32))


def made_by_numpy(model, x):
    return FromNumpy.apply(model[0].weight)


def of_batch(row):
    """The third batch has a row of `row`."""

    def train():
        model = nn.Sequential(nn.Linear(16, 64))

        def loss(model, x, step):
            x[0] = row if step == 3 else x[0]
            return model(x).square().mean()

        return trained(model, torch.optim.SGD(model.parameters(), 1e-3), steps=4, loss_of=loss)

    return train


def cast_back(is_island):
    def loss(model, x, step):
        with torch.autocast("cpu", BF16):
            h = torch.mm(x, x.T).sigmoid()
            with torch.autocast("cpu", enabled=not is_island):
                h = h.float()
                out = model(h[:, :16])
        return out.float().square().mean()

    def train():
        model = nn.Sequential(nn.Linear(16, 64))
        return trained(model, torch.optim.SGD(model.parameters(), 1e-3), steps=4, loss_of=loss)

    return train


def products(is_inside):
    def loss(model, x, step):
        with torch.autocast("cpu", BF16):
            h = model[0](x)
        with torch.autocast("cpu", BF16, enabled=is_inside):
            return model[1](h.float()).float().square().mean()

    def train():
        model = nn.Sequential(nn.Linear(16, 64), nn.Linear(64, 16))
        return trained(model, torch.optim.SGD(model.parameters(), 1e-3), steps=4, loss_of=loss)

    return train


def at_precision(name):
    def train():
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision(name)
        try:
            return stepped()()
        finally:
            torch.set_float32_matmul_precision(before)

    return train


def summed(total):
    """A running sum of what the losses are, 200 at the start."""

    def train():
        sums = {"loss": total}

        def loss(model, x, step):
            loss = model(x).square().mean()
            sums["loss"] += loss.item()
            return loss

        model = nn.Sequential(nn.Linear(16, 64))
        return trained(model, torch.optim.SGD(model.parameters(), 1e-3), loss_of=loss)

    return train


def scaled(factor, has_scaler=True, clips=""):
    """FP16, a loss of some size, and a GradScaler. clips: "before" or "after" `unscale_`."""

    def train():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 64), nn.Linear(64, 4))
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        scaler = torch.amp.GradScaler("cpu", enabled=has_scaler, init_scale=2.0**12)
        with hmpx.doctor() as found:
            for _ in range(12):
                optimizer.zero_grad()
                with torch.autocast("cpu", FP16):
                    loss = model(torch.randn(32, 16)).float().square().mean() * factor
                scaler.scale(loss).backward()
                if clips == "after":
                    scaler.unscale_(optimizer)
                if clips:
                    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                scaler.step(optimizer)
                scaler.update()
        return found

    return train


def accumulated(**keys):
    def train():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 64)).to(BF16)
        optimizer = torch.optim.SGD(model.parameters(), 3.0)
        if keys:
            hmpx.attach(optimizer, **keys)
        x = torch.randn(16, 16, dtype=BF16)
        with hmpx.doctor() as found:
            for _ in range(4):
                optimizer.zero_grad()
                for _ in range(600):
                    model(x).float().square().mean().backward()
                optimizer.step()
        if keys:
            hmpx.detach(optimizer)
        return found

    return train


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
    "inf or NaN: of the batch": (
        "look where these numbers come from: in the data of this step, or in weights",
        of_batch(torch.nan),
        of_batch(0.0),
    ),
    "inf or NaN: of an eps that is 0": (
        "keep the weights in float32, where it is not 0",
        stepped(FP16, torch.optim.AdamW),
        stepped(torch.float32, torch.optim.AdamW),
    ),
    "inf or NaN: of the rate": ("look at its rate", stepped(rate=math.inf), stepped()),
    "autocast": (
        "call them inside of torch.autocast, unless they are in float32 for a reason",
        products(is_inside=False),
        products(is_inside=True),
    ),
    "matmul precision": (
        'torch.set_float32_matmul_precision("highest")',
        at_precision("medium"),
        at_precision("highest"),
    ),
    "upcast: under autocast": (
        'leave autocast there: with torch.autocast("cpu", enabled=False)',
        cast_back(is_island=False),
        cast_back(is_island=True),
    ),
    "running value": (
        "keep it in a Python float, or in float32",
        summed(torch.tensor(200.0, dtype=BF16)),
        summed(200.0),
    ),
    "running value: a tensor": (
        "keep it in a Python float, or in float32",
        summed(torch.tensor(200.0, dtype=BF16)),
        summed(torch.tensor(200.0)),
    ),
    "loss scaling": ('torch.amp.GradScaler("cpu")', scaled(1e-6, has_scaler=False), scaled(1e-6)),
    "clipping": (
        "scaler.unscale_(optimizer) before the line that clips",
        scaled(1.0, clips="before"),
        scaled(1.0, clips="after"),
    ),
    "gradient accumulation": (
        "hmpx.attach(optimizer, use_fp32_grad_acc=True) accumulates in float32",
        accumulated(),
        accumulated(use_fp32_grad_acc=True),
    ),
    "running statistics": ("norm.float()", normed(lambda norm: norm), normed(lambda norm: norm.float())),
}


@pytest.mark.parametrize("kind", CURES)
def test_what_is_advised_mends_what_it_is_said_of(kind):
    (words, sick, mended), kind = CURES[kind], kind.partition(":")[0]
    told = {each.kind: each for each in sick().findings}
    assert kind in told and words in told[kind].do, told
    assert kind not in {each.kind for each in mended().findings}


def test_anomaly_detection_names_what_no_op_has_made():
    def train():
        model = nn.Sequential(nn.Linear(16, 64))
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        return trained(model, optimizer, steps=4, loss_of=lambda model, x, step: made_by_numpy(model, x))

    (told,) = [each.do for each in train().findings if each.kind == "inf or NaN"]
    assert told == "torch.autograd.set_detect_anomaly(True) names the op of the forward pass"
    with (
        torch.autograd.set_detect_anomaly(True),
        pytest.warns(UserWarning, match="made_by_numpy"),
        pytest.raises(RuntimeError, match="FromNumpyBackward"),
    ):
        train()


def test_an_eps_that_is_0_for_a_parameter_that_stays_finite_is_not_blamed():
    torch.manual_seed(0)
    model, idle = nn.Linear(16, 4), nn.Parameter(torch.ones(4, dtype=FP16))
    optimizer = torch.optim.AdamW([*model.parameters(), idle], lr=math.inf)
    with hmpx.doctor() as found:
        for _ in range(2):
            model(torch.randn(8, 16)).square().mean().backward()
            optimizer.step()
    (said,) = [each.said for each in found.findings if each.kind == "inf or NaN"]
    assert "made by AdamW" in said and "eps" not in said
