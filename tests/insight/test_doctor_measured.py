"""`doctor` says WRONG of what it has measured, and of nothing else; what it has not looked at it says."""

import math

import pytest
import torch
from torch import nn

import hmpx
from tests.support.examined import only, trained
from tests.support.planted_trainings import mlp

BF16, FP32 = torch.bfloat16, torch.float32


class SquaresInBF16(torch.optim.Optimizer):
    """Adam without a mean: 0.999 of a square in BF16 is the square."""

    def __init__(self, params, dtype):
        super().__init__(params, {"dtype": dtype})

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            square = self.state[p].setdefault("square", p.grad.square().to(self.param_groups[0]["dtype"]))
            square.mul_(0.999).add_(p.grad.square(), alpha=1e-3)
            p.sub_(1e-3 * p.grad / (square.float().sqrt() + 1e-8))


@pytest.mark.parametrize(("dtype", "steps", "kinds"), [(BF16, 12, {0}), (BF16, 1400, {0, 1}), (FP32, 1400, set())])
def test_state_in_bf16_beside_fp32_weights_is_wrong_once_weights_fall_behind(dtype, steps, kinds):
    """The gradient falls to a fifth: by then squares in FP32 have fallen to a third, and steps are larger."""
    torch.manual_seed(0)
    weight, gradient = nn.Parameter(torch.randn(64)), torch.randn(64) / 10
    optimizer = SquaresInBF16([weight], dtype)
    with hmpx.doctor() as found:
        for step in range(steps):
            weight.grad = gradient / (5 if step > 8 else 1)
            optimizer.step()
    assert {each.wrong for each in found.findings} == kinds, str(found)
    assert not kinds or not only(found, "rounded state").wrong


def test_an_early_window_that_later_ones_make_up_for_is_no_harm():
    model = mlp(BF16)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3, weight_decay=0)
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: (1 - math.cos(math.pi * min(i, 25) / 25)) / 2 + 1e-4)
    assert not trained(model, optimizer, steps=60, after=rate.step).wrong


def test_weights_that_no_backward_pass_reaches_get_no_gradient():
    model, teacher = mlp(BF16), mlp(BF16)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)

    def loss_of(model, x, step):
        return (model(x.to(BF16)) - teacher(x.to(BF16)).detach()).float().square().mean() + model(x.to(BF16)).mean()

    assert trained(model, optimizer, loss_of=loss_of).not_checked == []
    found = trained(model, optimizer, loss_of=lambda model, x, step: model(teacher(x.to(BF16)).repeat(1, 4)).mean())
    assert "they get gradients" in found.not_checked[0]


@pytest.mark.parametrize(("octaves", "dtype", "wrong"), [(6, BF16, False), (7, BF16, True), (7, FP32, False)])
def test_angles_are_wrong_where_their_numbers_are_a_radian_apart(octaves, dtype, wrong):
    model = nn.Sequential(nn.Linear(octaves, 4))

    def loss_of(model, x, step):
        angles = torch.rand(64, 1).to(dtype) * (2.0 ** torch.arange(octaves)).to(dtype) * math.pi
        return model(angles.sin().float()).square().mean()

    assert trained(model, torch.optim.SGD(model.parameters(), 0.1), steps=4, loss_of=loss_of).wrong == wrong


def test_angles_that_are_positions_are_exact():
    model = nn.Sequential(nn.Linear(2, 4))
    angles = torch.arange(250, dtype=BF16)[:, None] * torch.tensor([1, 0.1]).to(BF16)
    loss_of = lambda model, x, step: model((angles * 1).sin().float()).square().mean()  # noqa: E731
    assert not trained(model, torch.optim.SGD(model.parameters(), 0.1), steps=4, loss_of=loss_of).findings


READS = {"index": lambda t, i: t[i], "index_select": lambda t, i: t.index_select(0, i)}
WRITES = {
    "index_put": lambda t, i, new: t.__setitem__(i, new),
    "index_copy": lambda t, i, new: t.index_copy_(0, i, new),
    "scatter": lambda t, i, new: t.scatter_(0, i[:, None].expand(-1, 4), new),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("read", READS)
def test_rows_that_are_moved_by_an_index_are_followed(read, write):
    for dtype in (BF16, FP32):
        bank, model = torch.randn(64, 4).to(dtype), mlp()

        def after(bank=bank, dtype=dtype):
            rows = torch.randperm(64)[:32]
            WRITES[write](bank, rows, 0.999 * READS[read](bank, rows) + 0.001 * torch.randn(32, 4).to(dtype))

        found = trained(model, torch.optim.SGD(model.parameters(), 0.1), after=after)
        assert [each.kind for each in found.findings] == ["average of weights"] * (dtype is BF16), str(found)


@torch.jit.script
def scripted(x):
    return x.cumsum(-1)


@pytest.mark.parametrize("total", [scripted, lambda x: torch.ops.aten.cumsum(x, -1), lambda x: x.cumsum(-1)])
def test_no_recipe_is_offered_where_no_list_reaches(total):
    model = mlp()
    loss_of = lambda model, x, step: total(model(x).repeat(1, 100).to(BF16)).float().mean()  # noqa: E731
    found = trained(model, torch.optim.SGD(model.parameters(), 0.1), steps=4, loss_of=loss_of)
    is_reached = total is not scripted and "ops" not in total.__code__.co_names
    assert bool(only(found, "cumulative sum").recipe) == is_reached


def test_the_first_iteration_is_looked_at_and_a_training_that_was_ended_says_so():
    weight = torch.randn(16, 4, requires_grad=True)
    optimizer = torch.optim.SGD([weight], 0.1)
    for wrong in ({"steps": 0}, {"at": [2, 0]}, {"at": [True]}):
        with pytest.raises(hmpx.HmpxError, match="numbers of steps from 1 on"), hmpx.doctor(**wrong):
            pass
    with hmpx.doctor(steps=4) as found:
        for step in range(9):
            optimizer.zero_grad()
            ((torch.randn(8, 16) @ weight) * bool(step)).abs().sqrt().sum().backward()
            optimizer.step()
    assert "SqrtBackward0" in only(found, "inf or NaN").said and step == 3
    assert found.looked[-2:] == [
        "looked at ops in iterations 1, 3",
        "it was ended after 4 steps: at=[N] looks at step N",
    ]
