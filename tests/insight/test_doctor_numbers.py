"""`doctor` says of numbers what it says: WRONG begins at an error that was measured, and a cure was tried."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler

import hmpx
from tests.support.examined import only, trained

BF16 = torch.bfloat16


def found_in(line, model=None, steps=4):
    """Train a model by FP32 SGD; `line` gets its output."""
    torch.manual_seed(0)
    model = model or nn.Linear(16, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return trained(model, optimizer, steps=steps, loss_of=lambda model, x, step: line(model(x)))


def total(x):
    return x.cumsum(0)


def variance(x):
    return x.square().mean(-1) - x.mean(-1).square()


def bce(x):
    return F.binary_cross_entropy(x.sigmoid(), (torch.arange(len(x)) % 2).to(x.dtype))


NUMBERS = {  # a line and its input: whether it is off by 2 % or more, by FP64
    "cumsum of ones": (total, torch.ones(1024)),
    "variance beside a mean of 0": (variance, torch.randn(64, 512)),
    "variance beside a mean of 30": (variance, torch.randn(64, 512) + 30),
    "bce from .27 to .73": (bce, torch.linspace(-1, 1, 64)),
    "bce up to 1": (bce, torch.linspace(-9, 9, 64)),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_wrong_begins_at_an_error_and_where_a_gradient_depends_on_it(name):
    function, numbers = NUMBERS[name]
    x = numbers.to(BF16)

    def of(x):  # what the training feels: the gradient of a loss, or else the result
        x = x.requires_grad_()
        return torch.autograd.grad(function(x), x)[0] if function is bce else function(x).detach()

    exact = of(x.double())
    is_off = bool((of(x.clone()).double() - exact).norm() > 0.02 * exact.norm())
    read = found_in(lambda out: (function(x.clone().requires_grad_()).float().mean() + 1) * out.square().mean())
    logged = found_in(lambda out: out.square().mean() + 0 * float(function(x.clone()).float().mean()))
    assert read.wrong == is_off and not logged.wrong, (str(read), str(logged))


VIEWS = {
    "the whole": lambda p: p,
    "transposed, of the same shape": lambda p: p.t(),
    "a part": lambda p: p[3:9],
    "the second of two": lambda p: p.chunk(2, 1)[1],
    "of one dimension": lambda p: p.view(-1),
}


@pytest.mark.parametrize("name", VIEWS)
def test_what_a_view_shows_is_off_as_far_as_its_own_numbers_are(name):
    """Logarithms of a view of probabilities that BF16 has rounded, beside those of the same numbers in FP64."""
    x = torch.randn(16, 16, generator=torch.Generator().manual_seed(1)).bfloat16()
    view = VIEWS[name]
    exact = view(x.double().softmax(0)).log()
    off = float((view(x.softmax(0)).log().double() - exact).norm() / exact.norm())
    found = found_in(lambda out: out.square().mean() - 0 * view(x.clone().requires_grad_().softmax(0)).log().sum())
    one = only(found, "log")
    assert not one.wrong and f"off by {100 * off:.1f} %" in one.said, (one, off)


def test_numbers_that_lie_otherwise_in_fp32_are_seen_through_no_view():
    """A cast of an expanded row is dense; the row itself cannot be viewed as one dimension."""
    row = torch.rand(16, generator=torch.Generator().manual_seed(1)) + 1

    def loss_of(out):
        dense = row.expand(16, 16).to(BF16, memory_format=torch.contiguous_format)
        return out.square().mean() - 0 * dense.view(-1).requires_grad_().log().sum()

    assert not found_in(loss_of).wrong


def _half(p):
    return p.mul_(0.5)


def _copy(p):
    return p.copy_(p.flip(0) * 0.1)


def _part(p):
    p[:8] = 0.9
    return p


@pytest.mark.parametrize("write", [_half, _copy, _part])
def test_what_is_written_to_is_not_off_from_what_it_was(write):
    """Logarithms of what a line has made of probabilities in place: only their own rounding counts."""
    x = torch.randn(16, 16, generator=torch.Generator().manual_seed(1)).bfloat16()
    written = write(x.softmax(0))
    off = float((written.log().double() - written.double().log()).norm() / written.double().log().norm())

    def loss_of(out):
        with torch.no_grad():
            given = write(x.softmax(0))
        return out.square().mean() - 0 * given.requires_grad_().log().sum()

    one = only(found_in(loss_of), "log")
    assert not one.wrong and f"off by {100 * off:.1f} %" in one.said, (one, off)


def test_a_state_of_which_fewer_rows_go_on_is_looked_at():
    """As in recurrent layers over sequences that are packed."""

    def loss_of(out):
        state, sizes = torch.zeros(4, 4, dtype=BF16), (4, 4, 3, 3, 1)
        for size in sizes:
            state = state[:size] + 0.1 * out[:size].to(BF16)
        return state.float().square().mean()

    assert not found_in(loss_of).findings


def test_numbers_that_torch_leaves_unwritten_are_no_nan():
    """The second result of CTC's loss, beyond the ends of shorter sequences and targets."""

    def loss_of(out):
        log_probs = out[:12, None].expand(12, 4, 4).log_softmax(-1)
        lengths = torch.tensor([12, 10, 9, 12]), torch.tensor([5, 4, 5, 3])
        return F.ctc_loss(log_probs, torch.ones(4, 5, dtype=torch.long), *lengths)

    torch.use_deterministic_algorithms(True, warn_only=True)  # it fills such memory with NaN
    try:
        assert not found_in(loss_of).findings
    finally:
        torch.use_deterministic_algorithms(False)


POLES = {
    "acos": torch.acos,
    "atanh": torch.atanh,
    "log1p": lambda out: torch.log1p(-out),
    "log": lambda out: torch.log(1 - out),
    "sqrt": lambda out: torch.sqrt(1 - out * out),
    "reciprocal": lambda out: torch.reciprocal(1 - out),
}


@pytest.mark.parametrize("name", POLES)
def test_the_cure_of_a_nan_was_tried_and_its_recipe_mends_it(name):
    """A product just below 1, which BF16 rounds to 1, before an op that is not finite there."""

    def train(recipe=None):
        model = nn.Linear(8, 1, bias=False)
        nn.init.constant_(model.weight, 0.125)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        if recipe:
            hmpx.prepare(model, optimizer, recipe)
        found = trained(model, optimizer, steps=3, loss_of=loss_of)
        hmpx.restore(optimizer)
        return found

    def loss_of(model, x, step):
        with torch.autocast("cpu"):
            return POLES[name](model(torch.full((4, 8), 0.999 if step == 3 else 0.5))).float().sum()

    found = train()
    one = only(found, "inf or NaN")
    assert "the linear that it is of" in one.do and "was tried" in one.do and name in one.recipe["fp32"], one
    assert not train(found.recipe).wrong


NAN = float("nan")
WRITTEN = {
    "where": lambda v: torch.where(v.abs() > 9, v, torch.full_like(v, NAN)),
    "a number in where": lambda v: torch.where(v.abs() > 9, v, NAN),
    "masked_fill": lambda v: v.masked_fill(v.abs() < 9, NAN),
    "full": lambda v: torch.full((3,), NAN),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_a_nan_that_the_program_writes_is_made_by_no_op(name):
    found = found_in(lambda out: out.square().mean() + 0 * torch.nanmean(WRITTEN[name](out.detach())).nan_to_num())
    assert not found.findings, str(found)


@pytest.mark.parametrize("how", ["a row", "an expert"])
def test_a_nan_that_stays_in_one_parameter_is_named(how):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.experts = nn.Embedding(4000, 16), nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
            self.body = nn.Sequential(*(nn.Linear(16, 16) for _ in range(5)))
            self.table.weight.data[7] = 0

        def forward(self, i, e):
            x = self.table(i)
            x = x / (1 + x.square().sum(-1, keepdim=True).sqrt()) if how == "a row" else x
            x = self.experts[e](x)
            bias = self.experts[e].bias
            return self.body(x + (bias - bias.detach()).square().sum().sqrt() if e == 3 else x)

    torch.manual_seed(0)
    model = Net()

    def loss_of(model, x, step):
        i = torch.randint(8, 4000, (32,))
        i[0] = 7 if step == 5 and how == "a row" else i[0]
        return model(i, 3 if step == 5 and how == "an expert" else step % 3).square().mean()

    found = trained(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_of=loss_of)
    bad = [name for name, p in model.named_parameters() if p.isnan().any()]
    assert len(bad) == 1 and bad[0] in only(found, "inf or NaN").said, str(found)


def test_a_sum_that_becomes_too_large_is_no_mask():
    def residual(out):
        h = torch.sigmoid(out + 2).half() * 40000
        return (h + h.detach()).float().sum() * 0 + out.square().mean()

    one = only(found_in(residual), "inf or NaN")
    assert one.wrong and one.said.startswith("add is the first op that makes an inf of finite numbers"), one


SCHEDULES = {
    "none": lambda rate: lr_scheduler.ConstantLR(rate, 1.0),
    "of the first rate": lambda rate: lr_scheduler.LambdaLR(rate, lambda step: 0.97**step),
    "of the last rate": lambda rate: lr_scheduler.ExponentialLR(rate, 0.999),
    "cosine": lambda rate: lr_scheduler.CosineAnnealingLR(rate, 400),
    "in large steps": lambda rate: lr_scheduler.ExponentialLR(rate, 0.9),
}


@pytest.mark.parametrize("how", SCHEDULES)
def test_a_rate_in_low_precision_is_wrong_where_its_schedule_goes_another_way(how):
    """Judge: the rate as a Python number, after as many steps."""
    ends = []
    for rate in (torch.tensor(1e-3, dtype=BF16), 1e-3):
        model = nn.Sequential(nn.Linear(16, 16))
        optimizer = torch.optim.Adam(model.parameters(), rate)
        schedule = SCHEDULES[how](optimizer)
        found = trained(model, optimizer, steps=24, after=schedule.step)
        ends += [(found.wrong, float(optimizer.param_groups[0]["lr"]))]
    (wrong, low), (never, exact) = ends
    goes_astray = abs(low - exact) > 0.1 * abs(exact - 1e-3) + 4e-6  # half a last digit of 1e-3
    assert wrong == goes_astray and not never, (ends, str(found))


@pytest.mark.parametrize("weight", [1.0, 1e-2, 1e-4])
def test_fp16_without_a_scaler_is_wrong_by_what_gradients_are_off_by(weight):
    """Judge: the gradients of the same steps without autocast. That small numbers are many does not harm by itself."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4))
    sums = torch.zeros(2)

    def loss_of(model, x, step, low=True):
        with torch.autocast("cpu", torch.float16, enabled=low):
            out = model(x)
        return weight * F.cross_entropy(out.float(), x[:, :4].argmax(-1))

    for step in range(8):
        x = torch.randn(64, 16)
        grads = (torch.autograd.grad(loss_of(model, x, step, low), [*model.parameters()]) for low in (True, False))
        low, exact = (torch.cat([each.flatten() for each in some]) for some in grads)
        sums += torch.stack([(low - exact).square().sum(), exact.square().sum()])
    off = float(sums[0] / sums[1]) ** 0.5
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    one = only(trained(model, optimizer, steps=4, loss_of=loss_of), "loss scaling")
    told = float(one.said.split("off by about ")[1].split(" %")[0]) / 100
    assert one.wrong == (off > 0.02) and (off < 0.002 or 0.5 < told / off < 2), (off, one)
    many = float(one.said.split(": ")[1].split(" %")[0])
    assert many > 1, "what is below the normal numbers of FP16"


@pytest.mark.parametrize("by", ["torch.autograd.grad", "hand"])
def test_what_fp16_costs_gradients_that_no_backward_pass_leaves_to_an_optimizer_is_not_checked(by):
    """Where nothing was measured, no number is said, and doctor does not say that nothing is wrong."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
    params = [*model.parameters()]
    optimizer = torch.optim.Adam(params, 1e-3) if by != "hand" else None
    with hmpx.doctor() as found:
        for _ in range(12):
            with torch.autocast("cpu", torch.float16):
                loss = F.cross_entropy(model(torch.randn(32, 16)).float(), torch.arange(32) % 4) * 2e-5
            if optimizer is None:
                loss.backward()
                with torch.no_grad():
                    for p in params:
                        p -= 100 * p.grad
                        p.grad = None
            else:
                for p, grad in zip(params, torch.autograd.grad(loss, params), strict=True):
                    p.grad = grad
                optimizer.step()
    (said,) = [each for each in found.findings if each.kind == "loss scaling"]
    assert not said.wrong and "off by" not in said.said
    assert any("FP16 without a GradScaler" in each for each in found.not_checked)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_scaler_is_advised_with_weights_that_it_takes(dtype):
    """torch's GradScaler refuses to unscale gradients in FP16."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4)).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with hmpx.doctor() as found:
        for _ in range(12):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16, enabled=dtype is torch.float32):
                out = model(torch.randn(32, 16).to(dtype))
            (F.cross_entropy(out.float(), torch.arange(32) % 4) * 2e-5).backward()
            optimizer.step()
    (advice,) = [each.do for each in found.findings if each.kind == "loss scaling"]
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.zeros(()))
    with contextlib.nullcontext() if dtype is torch.float32 else pytest.raises(ValueError, match="FP16 gradients"):
        scaler.unscale_(optimizer)
    assert advice.startswith("keep the weights in float32") == (dtype is torch.float16)


def test_another_loss_is_advised_alone_where_autocast_has_rounded_probabilities():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 1), nn.Sigmoid())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with hmpx.doctor() as found:
        for _ in range(12):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                p = model(torch.randn(32, 16)).float()
            F.binary_cross_entropy(p, torch.ones_like(p)).backward()
            optimizer.step()
    (bce,) = [each for each in found.findings if each.kind == "BCE"]
    assert "what sigmoid has rounded" in bce.said and bce.do == "binary_cross_entropy_with_logits"
