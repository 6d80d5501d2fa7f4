"""What `doctor` judges one by one: parameters, writes however spelt, the path to a NaN, what nobody looked at."""

import math
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hmpx
from hmpx.insight.dispatch import Iterations, OpWatch
from hmpx.insight.looks.lost_updates import Updates
from tests.support.examined import only, trained
from tests.support.planted_trainings import mlp

BF16, FP32 = torch.bfloat16, torch.float32


def adam(*groups):
    return torch.optim.AdamW([{"params": each, "lr": lr} for each, lr in groups], weight_decay=0, betas=(0.9, 0.95))


def test_a_backbone_that_stands_still_or_falls_behind_a_head_is_wrong_and_norms_alone_are_a_note():
    model = mlp(BF16, width=64)
    one = only(trained(model, adam((model[0].parameters(), 1e-6), (model[2].parameters(), 3e-2))), "lost updates")
    share = model[0].weight.numel() / sum(p.numel() for p in model.parameters())
    assert one.wrong and one.said == f"{100 * share:.1f} % of the bfloat16 weights (0.weight) do not move", one
    assert one.evidence and "0.weight" in one.names
    model = mlp(BF16, width=64)
    groups = ([model[0].weight], 5e-4), ([model[0].bias, *model[2].parameters()], 3e-2)
    one = only(trained(model, adam(*groups)), "lost updates")
    said = rf"{100 * share:.1f} % of the bfloat16 weights \(0.weight\) move 5\d.\d % as far as float32 weights would"
    assert one.wrong and re.fullmatch(said, one.said), one
    model = nn.Sequential(nn.Linear(16, 256), nn.LayerNorm(256), nn.Linear(256, 4))
    with torch.no_grad():
        for each in (model[0], model[2]):
            each.weight.mul_(1e-3), each.bias.mul_(1e-3)
    one = only(trained(model.to(BF16), adam((model.parameters(), 3e-4))), "lost updates")
    assert not one.wrong and one.names[0] == "1.weight", one


@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
def test_a_recipe_for_a_script_with_torch_autocast_keeps_its_products_low(dtype):
    def loss_of(model, x, step):
        with torch.autocast("cpu", dtype):
            return torch.log(model(x).square() + 1).mean()

    model = mlp()
    found = trained(model, adam((model.parameters(), 1e-3)), steps=4, loss_of=loss_of)
    policy = found.recipe.policy()
    assert "log" in policy.fp32 and {"linear", "matmul", "bmm"} <= {*policy.bf16} and policy.low_precision is dtype
    assert "extends: autocast-cpu\n" in found.recipe_text and "fp32: [..., log]\n" in found.recipe_text
    assert found.recipe.parameter_dtype is None
    with hmpx.activate(found.recipe), hmpx.record() as log:
        loss_of(model, torch.randn(32, 16), 0)
    assert {site.op: site.rule for site in log.sites if site.op in ("linear", "log")} == {
        "linear": "fp16" if dtype is torch.float16 else "bf16",
        "log": "fp32",
    }


@pytest.mark.parametrize("sparse", [True, False])
def test_rows_of_a_table_that_a_gradient_touches_are_judged(sparse):
    torch.manual_seed(0)
    table = nn.Embedding(200, 16, sparse=sparse).to(BF16)
    for lr, wrong in ((0.05, True), (30.0, False)):
        optimizer = torch.optim.SGD(table.parameters(), lr=lr)
        of_rows = trained(
            None, optimizer, loss_of=lambda *_: table(torch.randint(0, 200, (64,))).float().square().mean()
        )
        assert of_rows.wrong == wrong and not of_rows.not_checked, str(of_rows)


def test_tables_with_sparse_gradients_that_share_an_optimizer_are_judged():
    torch.manual_seed(0)
    tables = nn.ModuleList(nn.Embedding(200, 16, sparse=True) for _ in range(2)).to(BF16)
    for lr, wrong in ((1e-4, True), (0.5, False)):
        optimizer = torch.optim.SparseAdam([*tables.parameters()], lr=lr)
        found = trained(
            None,
            optimizer,
            loss_of=lambda *_: sum(t(torch.randint(0, 200, (64,))) for t in tables).float().square().mean(),
        )
        assert found.wrong == wrong and not found.not_checked, str(found)


def _log(p, x, step):
    return -torch.log(p.sigmoid() * (step != 3)).mean()


def _root(p, x, step):
    return (p * (step != 3)).square().sqrt().mean()


def _row(p, x, step):
    mask = torch.zeros_like(p).masked_fill(torch.arange(4) < 9 * (step == 3), -torch.inf)
    return torch.softmax(p + mask, -1).square().mean()


def _metric(p, x, step):
    ratio = (step != 3) / x.new_full((), step != 3)  # of a metric: no gradient sees it
    return (p / p.new_full((), step != 3) * (step != 3)).mean() + 0 * (ratio == 1)


def _data(p, x, step):
    return (p * x[:, :4] * x.new_tensor(torch.nan if step == 3 else 1.0)).mean()


@pytest.mark.parametrize(
    ("loss_of", "line", "said"),
    [
        (_log, 1, "log is the first op that makes an inf of finite numbers, forward"),
        (_root, 1, "in the backward pass (SqrtBackward0)"),
        (_row, 2, "softmax is the first op that makes a NaN of an inf that the script itself has set"),
        (_metric, 2, "div is the first op that makes an inf of finite numbers, forward; mul makes a NaN of it"),
        (_data, 1, "is given a NaN that no op has made"),
    ],
)
def test_what_makes_the_first_nan_of_a_gradient_is_named_by_the_line_of_its_forward_op(loss_of, line, said):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    one = only(
        trained(model, optimizer, steps=3, loss_of=lambda model, x, step: loss_of(model(x), x, step)), "inf or NaN"
    )
    assert one.where == f"{__file__}:{loss_of.__code__.co_firstlineno + line}" and said in one.said, one
    assert one.wrong and "gradients are inf or NaN" in one.said
    assert loss_of is not _data or one.do.startswith("look where these numbers come from: in the data of this step")


class FromNumpy(torch.autograd.Function):
    """A gradient that no op of torch makes."""

    @staticmethod
    def forward(ctx, weight):
        return weight.square().sum()

    @staticmethod
    def backward(ctx, gradient):
        return torch.from_numpy(np.full((32, 16), np.nan, np.float32))


def made_by_numpy(model, x, step):
    return FromNumpy.apply(model[0].weight)


def test_what_no_op_has_made_is_named_by_anomaly_detection_as_advised():
    def train():
        model = mlp()
        return trained(model, torch.optim.SGD(model.parameters(), 1e-3), steps=4, loss_of=made_by_numpy)

    advice = only(train(), "inf or NaN").do
    assert advice == "torch.autograd.set_detect_anomaly(True) names the op of the forward pass"
    with (
        torch.autograd.set_detect_anomaly(True),
        pytest.warns(UserWarning, match="made_by_numpy"),
        pytest.raises(RuntimeError, match="FromNumpyBackward"),
    ):
        train()


@pytest.mark.parametrize(
    ("dtype", "rate", "advice"),
    [
        (torch.float16, 1e-3, "keep the weights in float32, where it is not 0"),
        (FP32, 1e-3, None),
        (FP32, math.inf, "look at its rate"),  # an eps that is 0 for a parameter that stays finite is not blamed
    ],
)
def test_weights_that_a_step_makes_nan_are_not_blamed_on_the_forward_pass(dtype, rate, advice):
    torch.manual_seed(0)
    model, idle = nn.Linear(16, 64).to(dtype), nn.Parameter(torch.ones(4, dtype=torch.float16))
    optimizer = torch.optim.AdamW([*model.parameters(), idle], lr=rate)
    with hmpx.doctor() as found:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(32, 16).to(dtype)).float().square().mean().backward()
            optimizer.step()
    told = [each for each in found.findings if each.kind == "inf or NaN"]
    assert len(told) == bool(advice) and all(each.do.startswith(advice) for each in told), str(found)
    assert all("made by AdamW" in each.said for each in told)
    assert ("eps" in "".join(each.said for each in told)) == (dtype is torch.float16)
    assert ("copies became inf or NaN" in "".join(found.not_checked)) == (dtype is torch.float16)


def test_a_nan_that_reaches_no_gradient_is_a_note():
    def loss_of(model, x, step):
        none = torch.zeros(())
        assert (none / none).isnan()
        return model(x).square().mean()

    model = mlp()
    one = only(trained(model, torch.optim.SGD(model.parameters(), lr=0.01), steps=4, loss_of=loss_of), "inf or NaN")
    assert not one.wrong and "no gradient is inf or NaN in that step" in one.said, one


def test_the_first_step_is_looked_at_where_it_is_asked_for_with_several_backward_passes():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with hmpx.doctor(at=[1]) as found:
        for _ in range(2):
            (model(torch.zeros(4, 16)) * 0).sqrt().mean().backward()
        optimizer.step()
    assert "SqrtBackward0" in only(found, "inf or NaN").said and not found.not_checked, str(found)


def test_few_weights_that_all_lose_their_updates_are_wrong_together():
    model = nn.Linear(8, 8).to(BF16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0)
    found = trained(
        model, optimizer, steps=30, loss_of=lambda model, x, _: model(x[:, :8].to(BF16)).float().square().mean()
    )
    assert only(found, "lost updates").wrong, str(found)


class Curved(torch.optim.SGD):
    def step(self, curvature):
        for p in self.param_groups[0]["params"]:
            p.data.sub_(1e-6 * p.grad / curvature)


def test_a_step_that_takes_more_than_a_closure_is_not_checked():
    model = mlp(BF16)
    optimizer = Curved(model.parameters(), lr=1.0)
    with hmpx.doctor() as found:
        for _ in range(4):
            model(torch.randn(8, 16).to(BF16)).float().square().mean().backward()
            optimizer.step(1.0)
    assert found.status == 2 and "by Curved: its step takes curvature" in found.not_checked[0], str(found)


def test_work_of_every_tenth_and_twentieth_iteration_is_met_wherever_a_script_counts_from():
    iterations = Iterations(())
    for _ in range(50):
        iterations.over(iterations.is_due)
    assert {0, 1, 2} <= {each % 10 for each in iterations.watched}, iterations.watched
    assert {0, 1, 2} <= {each % 20 for each in iterations.watched}, iterations.watched
    assert not iterations.passed_over


def test_updates_of_weights_that_others_have_replaced_in_their_optimizer_are_judged():
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(20, 16, dtype=BF16))
    optimizer = torch.optim.AdamW([weight], lr=1e-5, weight_decay=0)
    with hmpx.doctor() as found:
        for step in range(6):
            if step == 3:  # an embedding that grows
                weight = nn.Parameter(torch.cat([weight.detach(), weight.detach()[:4]]))
                optimizer.param_groups[0]["params"] = [weight]
                optimizer.state.clear()
            F.embedding(torch.arange(20), weight).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert only(found, "lost updates").wrong and not found.not_checked, str(found)


def test_weights_that_nobody_steps_are_not_checked():
    model = mlp(BF16)
    with torch.no_grad():
        model[2].weight.mul_(1e-4), model[2].bias.mul_(1e-4)
    found = trained(model, torch.optim.SGD(model[2].parameters(), lr=0.1))
    assert found.status == 2 and "weights in bfloat16" in found.not_checked[0], str(found)
    model[0].requires_grad_(False)
    assert trained(model, torch.optim.SGD(model[2].parameters(), lr=0.1)).status == 0


class Image(torch.Tensor):
    pass


@pytest.mark.parametrize("kind", [torch.Tensor, Image])
def test_ops_of_a_class_without_own_ops_are_looked_at(kind):
    def loss_of(model, x, _):
        p = torch.sigmoid(model(x.as_subclass(kind)).to(BF16) + 8)
        return F.binary_cross_entropy(p.float(), (x[:, :4] > 0).float())

    model = mlp()
    found = trained(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=4, loss_of=loss_of)
    assert only(found, "BCE").wrong and not found.not_checked


def test_a_second_stage_is_looked_at_as_the_first():
    first, second = mlp(), mlp()
    one, other = (torch.optim.SGD(model.parameters(), lr=0.1) for model in (first, second))
    with hmpx.doctor() as found:
        for _ in range(6):
            one.zero_grad(), first(torch.randn(8, 16)).square().mean().backward(), one.step()
        for _ in range(6):
            other.zero_grad()
            F.mse_loss(second(torch.randn(8, 16)).to(BF16), torch.zeros(8, 4, dtype=BF16)).backward()
            other.step()
    assert only(found, "loss") and any("iterations 1, 3, " in each for each in found.looked), str(found)


def test_a_logarithm_of_probabilities_that_were_rounded_is_mended_with_what_rounds_them():
    def loss_of(model, x, step):
        p = torch.sigmoid(model(x.to(BF16)) + (10 if step == 3 else 0))
        return -(torch.log(p) + torch.log(1 - p)).float().mean()

    model = mlp(BF16)
    found = trained(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=3, loss_of=loss_of)
    nan, log = only(found, "inf or NaN"), only(found, "log")
    assert nan.recipe == {"fp32": ["log", "sigmoid"]} and "the sigmoid that it is of" in nan.do, nan
    assert log.recipe == {"fp32": ["log", "sigmoid"]} and "sigmoid has rounded" in log.said, log
    with hmpx.activate(found.recipe):
        model = mlp(BF16)
        mended = trained(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=3, loss_of=loss_of)
    assert not {"inf or NaN", "log"} & {each.kind for each in mended.findings}, str(mended)


class Entropy(nn.Module):
    def forward(self, logits):
        p = torch.softmax(logits, -1)
        return -(p * torch.log(p)).sum(-1)


def test_an_op_is_listed_at_its_module():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 4), Entropy()).to(BF16)
    found = trained(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=3)
    assert found.recipe.modules == {"1": {"fp32": ["log", "softmax"]}} and not found.recipe.policy().fp32


def test_a_gradient_that_is_thrown_away_is_no_accumulation():
    model = mlp(BF16)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1e-3)

    def loss_of(model, x, _):
        for _ in range(3):
            model(x.to(BF16)).float().square().mean().backward()
        model.zero_grad()
        return model(x.to(BF16)).float().square().mean()

    found = trained(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=4, loss_of=loss_of)
    assert "gradient accumulation" not in {each.kind for each in found.findings}, str(found)


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.router, self.linear, self.norm = nn.Linear(16, 4), nn.Linear(16, 16), Norm()

    def forward(self, x):
        return self.linear(self.norm(x.to(self.linear.weight.dtype))) * self.router(x.float()).softmax(-1)[:, :1]


class Norm(nn.Module):
    def forward(self, x):
        return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt()


def test_products_that_are_in_fp32_on_purpose_stay_so():
    torch.manual_seed(0)
    model = Normed().to(BF16)
    model.router.float()
    found = trained(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        steps=4,
        loss_of=lambda model, x, _: model(x).float().square().mean(),
    )
    assert found.recipe is not None and found.recipe.parameter_dtype is None and not found.recipe.parameters
    assert found.recipe.modules["norm"] == "float32" and "linear" in found.recipe.modules["router"]["fp32"]
    with hmpx.activate(found.recipe), torch.no_grad():
        made = Normed().to(BF16)
        made.router.float()
        torch.optim.SGD(made.parameters(), lr=0.1)
        seen = []
        made.router.register_forward_hook(lambda _, __, out: seen.append(out.dtype))
        made(torch.randn(4, 16))
    assert seen == [FP32]


class Headed(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear, self.head = Norm(), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x):
        return F.linear(self.linear(self.norm(x)).float(), self.head.weight.float())


def test_a_line_that_computes_a_product_in_fp32_keeps_it_beside_modules_that_do_in_low_precision():
    torch.manual_seed(0)
    model = Headed().to(BF16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = trained(model, optimizer, steps=4, loss_of=lambda model, x, _: model(x.to(BF16)).square().mean())
    assert "linear" in found.recipe.modules["linear"]["bf16"], found.recipe_text
    with hmpx.activate(found.recipe), torch.no_grad():
        made = Headed().to(BF16)
        torch.optim.SGD(made.parameters(), lr=0.1)
        seen = []
        made.linear.register_forward_hook(lambda _, __, out: seen.append(out.dtype))
        seen.append(made(torch.randn(4, 16, dtype=BF16)).dtype)
    assert seen == [BF16, FP32]


def test_a_loss_that_no_product_reads_is_all_that_a_recipe_lists():
    model = mlp(BF16)
    found = trained(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        steps=4,
        loss_of=lambda model, x, _: F.mse_loss(model(x.to(BF16)), x[:, :4].to(BF16)),
    )
    policy = found.recipe.policy()
    assert policy.fp32 and not policy.bf16, found.recipe_text


def test_a_loss_is_named_by_the_line_that_makes_it_and_not_by_the_one_of_its_backward():
    """Only the iterations that are looked at know the line; the others know that of `trained`, which calls backward."""
    model = mlp(BF16)

    def squared(model, x, _):
        return (model(x.to(BF16)) - 1).square().mean()

    found = trained(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_of=squared)
    problem = only(found, "loss")
    assert problem.where.endswith(f":{squared.__code__.co_firstlineno + 1}"), problem.where
    assert "also at" not in problem.said, problem.said


def test_a_finding_at_two_lines_is_at_the_first_and_also_at_the_other():
    """As they run; a third call at the first line adds no place."""

    def logs(model, x, _):
        p = model(x.to(BF16)).sigmoid()
        first = [torch.log(1.5 - p) for _ in range(2)]
        second = torch.log(p + 0.5)
        return (first[0] + first[1] + second).float().mean()

    model = mlp(BF16)
    one = only(trained(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=4, loss_of=logs), "log")
    line = logs.__code__.co_firstlineno + 2
    assert one.where == f"{__file__}:{line}" and one.said.count(f"test_doctor_looks.py:{line + 1}") == 1, one
    assert one.said.count("also at") == 1 and f"test_doctor_looks.py:{line}" not in one.said, one


def test_a_rule_for_a_module_of_one_of_two_models_is_no_key_of_the_recipe():
    models = [nn.Sequential(nn.Linear(16, 16), Norm(), nn.Linear(16, 4)).to(BF16) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    found = trained(
        None,
        *optimizers,
        steps=4,
        loss_of=lambda _, x, __: models[1](models[0](x.to(BF16))[:, :1].expand(-1, 16)).float().square().mean(),
    )
    norm = only(found, "norm statistics")
    assert "modules" not in norm.recipe and (found.recipe is None or not found.recipe.modules)


class Positions(nn.Module):
    """Reads a table of positions by sines; `made` makes it, of positions in a dtype."""

    def __init__(self, dtype, made, read=lambda table: table, late=True):
        super().__init__()
        self.dtype, self.made, self.read, self.late = dtype, made, read, late
        self.table = None
        self.out = nn.Linear(16, 4)

    def forward(self, x):
        if self.table is None:
            self.table = self.made(torch.arange(1024, dtype=self.dtype)).float()
        return self.out(self.read(self.table)[: len(x)] * x)


RATES = torch.logspace(0, -3, 16)
TABLES = {
    "scaled": (lambda p: (p.float() / 8)[:, None] * RATES, lambda table: table[torch.arange(1023, 0, -8)]),
    "rotary": (lambda p: (p[:, None] * RATES.to(p.dtype)).cos(), lambda table: table[500:900]),
    "from 2": (
        lambda p: p[2:, None].expand(-1, 16),
        lambda table: nn.functional.embedding(torch.arange(999), table),
    ),
    "short": (lambda p: (p[:, None] * RATES.to(p.dtype)).cos(), lambda table: table[:200]),
}


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("how", TABLES)
def test_a_table_of_rounded_positions_is_found_whenever_it_was_made(how, dtype):
    model = Positions(dtype, *TABLES[how])
    optimizer = torch.optim.SGD(model.parameters(), 1e-8)
    found = trained(model, optimizer, loss_of=lambda model, x, step: model(x).square().mean())
    assert [each.kind for each in found.findings] == ["integers"] * (dtype is BF16 and how != "short"), str(found)
    assert found.wrong == bool(found.findings)


def test_no_op_of_the_twins_goes_through_the_dispatch_mode(monkeypatch):
    """Each op is several times as slow there, and the steps of copies have more ops than the step of the script."""
    inside, seen = [], {True: 0, False: 0}
    begin, watched = Updates.begin, OpWatch.__torch_dispatch__

    def begins(self, *args):
        inside.append(None)
        begin(self, *args)
        inside.pop()

    def dispatched(self, *args):
        seen[bool(inside)] += 1
        return watched(self, *args)

    monkeypatch.setattr(Updates, "begin", begins)
    monkeypatch.setattr(OpWatch, "__torch_dispatch__", dispatched)
    model = mlp(BF16, width=64)
    found = trained(model, adam((model.parameters(), 1e-3)))
    assert found.looked[1].startswith("looked at ops in iterations 1, 3, 11") and seen[False] > 100
    assert not seen[True]


def test_copies_of_weights_and_gradients_in_float32_are_no_data():
    """Norms near 1 vary by a few steps of BF16 alone, and so may gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 512), nn.LayerNorm(512), nn.Linear(512, 4)).to(BF16)
    with torch.no_grad():
        model[1].weight.add_(torch.randn(512) * 0.02)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    averages = [p.detach().float().clone() for p in model.parameters()]
    with hmpx.doctor() as found:
        for _ in range(3):
            loss = (model(torch.randn(8, 16).to(BF16)).float() - 100).square().mean()
            for p, gradient in zip(model.parameters(), torch.autograd.grad(loss, [*model.parameters()]), strict=True):
                p.grad = (gradient.float() / 2).to(BF16)
            optimizer.step()
            for average, p in zip(averages, model.parameters(), strict=True):
                average.lerp_(p.detach().float(), 0.01)
    assert "rounded data" not in {each.kind for each in found.findings}, str(found)
