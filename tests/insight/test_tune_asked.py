"""What `hmpx.tune` is asked for: what it refuses, what it takes for the same, and the reasons that it gives."""

import math
import re
from functools import cache

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.benchmark import Measurement
from torch.utils.benchmark.utils.common import TaskSpec

import hmpx
from hmpx.insight.trials import tune as tuning
from tests.support import planted
from tests.support.planted import batches, loss_of


def classes(number=6):
    return batches(number, 16)


def model(seed=0):
    torch.manual_seed(seed)
    return nn.Linear(16, 4)


def tuned(data=None, loss=loss_of, made=None, **options):
    return planted.tuned(made or model(), classes() if data is None else data, loss, **options)


@cache
def usual():
    return tuned()


def double(data):
    return [(a.double(), y) for a, y in data]


class Counting(nn.Linear):
    calls, first = 0, 1

    def forward(self, x):
        self.calls += 1
        return super().forward(x) * max(self.calls, self.first)


class CountingLate(Counting):
    first = 12  # all batches have run in FP32 by then


class Nothing(nn.Linear):
    def forward(self, x):
        return self.bias.view(4)[:1].squeeze()


def test_masters_that_nxd_has_under_zero_stay_in_the_recipe():
    found = tuned(lists={"mixed_precision_config": {}}).recipe
    assert (found.weights, found.under_zero().weights, found.under_zero().use_fp32_grad_acc) == (
        "nearest",
        "master",
        True,
    )


@pytest.mark.parametrize(
    "arguments, said",
    [
        ({"made": torch.relu}, "tune: model is a builtin_function_or_method"),
        (
            {"made": nn.Linear(16, 4).double(), "data": double(classes())},
            "'weight' is float64; it begins",
        ),
        ({"made": nn.Linear(16, 4).bfloat16()}, "'weight' is bfloat16; it begins"),
        ({"made": Counting(16, 4)}, "when it is computed again"),
        ({"made": CountingLate(16, 4)}, "when it is computed again"),
        ({"made": Nothing(16, 4), "loss": lambda m, a, y: m(a)}, "nothing to choose from"),
        ({"data": classes(1)}, "1 batch: the noise between batches is the scale"),
        ({"data": classes(1) * 4}, "the batches are all alike"),
        ({"data": classes(4), "held_out": classes(1)}, "4 batches and 1 held out"),
        ({"held_out": 3}, "held_out is a list of tuples of arguments, not a int"),
        ({"loss": None}, "loss is a NoneType"),
        ({"loss": lambda m, a, y: loss_of(m, a, y) * math.nan}, "the loss of batch 0 is nan in FP32 already"),
        ({"loss": lambda m, a, y: loss_of(m, a, y) + torch.sqrt(m.bias.sum() * 0)}, "gradients of batch 0 are not"),
        ({"tolerance": True}, "tolerance=True is no gradient error"),
        ({"tolerance": -1}, "tolerance=-1 is no gradient error"),
        ({"lists": "xla-use-bf16"}, "maps dtypes"),
        ({"lists": hmpx.Recipe(low_precision="float16")}, "low_precision is float16, and what is tried runs in BF16"),
        ({"lists": hmpx.Recipe(modules={"first": "float32"})}, "the recipe has rules for modules already"),
    ],
)
def test_bad_input_is_told_and_nothing_is_changed(arguments, said):
    function = F.linear
    with pytest.raises(hmpx.HmpxError, match=re.escape(said)):
        tuned(**arguments)
    assert F.linear is function


def test_rules_and_regions_around_it_are_refused():
    made = nn.Sequential(model())
    rule = hmpx.policy_for(made[0], fp32=["linear"])
    with pytest.raises(hmpx.HmpxError, match=r"module '0' has a rule \(.*test_tune_asked.py:\d+.*remove\(\)"):
        tuned(made=made)
    rule.remove()
    with hmpx.casts(fp32=["linear"]), pytest.raises(hmpx.HmpxError, match=r"casts\(\.\.\.\) is open around it"):
        tuned(made=made)
    with hmpx.disable_casts(), pytest.raises(hmpx.HmpxError, match=r"disable_casts\(\) is open around it"):
        tuned(made=made)
    assert tuned(made=made).share == 1


def test_batches_may_be_lists_as_a_dataloader_gives_them():
    lists = [list(batch) for batch in classes()]
    assert tuned(lists).as_json()["choices"][1]["gradient_error"] == usual().as_json()["choices"][1]["gradient_error"]
    one, other = hmpx.compare(model(), lists, loss_of), hmpx.compare(model(), classes(), loss_of)
    assert one.gradient_error == other.gradient_error > 0


def test_what_moves_nothing_changes_no_score():
    """Results that go to the device where they are already come from the op that has made them."""
    moved = tuned(loss=lambda m, a, y: F.cross_entropy(m(a).to(a.device), y))
    assert moved.predicted == usual().predicted > 0 and moved.policy == usual().policy


def test_losses_that_happen_to_be_alike_in_the_held_out_batches_do_not_decide():
    """Two held-out batches with nearly one loss: their gradients differ as those of others do."""
    made, data = model(), classes(8)
    a, y = data[-1]
    shift = loss_of(made, *data[-2]).item() - loss_of(made, a, y).item()

    def loss(m, a, y, more):
        return loss_of(m, a, y) + more

    with_shift = [(a, y, 0.0) for a, y in data[:-1]] + [(a, y, shift * 0.999999)]
    found = tuned(with_shift, loss, made)
    losses = torch.tensor([loss(made, *batch).item() for batch in with_shift])
    assert found.met and found.share == 1 and abs(losses[-1] - losses[-2]) < 1e-5
    assert found.loss_error == pytest.approx(found.loss_change / float(losses.std()), rel=1e-4)


def only_fp32(m, a, y):
    z = m(a)
    if z.dtype is not torch.float32:
        raise ValueError("logits are to be FP32")
    return F.cross_entropy(z, y)


def reason(found, name):
    return next(choice for choice in found.choices if choice.name == name).reason


def test_the_reason_is_the_one_that_decided():
    linear, raising = F.linear, tuned(loss=only_fp32)
    assert raising.met and raising.share == 0 and "linear" in raising.policy.fp32 and F.linear is linear
    assert "with it in BF16 the program raises ValueError: logits are to be FP32" in reason(raising, "linear")
    nothing = tuned(tolerance=0)
    assert nothing.share == 0 and "breaks the tolerance by itself; alone: gradient error" in reason(nothing, "linear")
    assert re.search(r"loss change \S+ \(0.0\d+ of the noise\)", reason(nothing, "linear"))


class Two(nn.Module):
    """Products, and by another op one that takes a hundredth of their FLOPs and rounds more."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(16, 64), nn.Linear(64, 4)
        self.small = nn.Parameter(torch.randn(4, 4) * 9)

    def forward(self, x):
        z = self.last(torch.relu(self.first(x)))
        return z + torch.matmul(x[:, :4], self.small)


def test_what_saves_next_to_nothing_says_so():
    found = tuned(made=Two())
    assert "matmul" in found.policy.fp32 and "linear" in found.policy.bf16
    assert "has under 2 % of the product FLOPs" in reason(found, "matmul")


def products(x):
    return x @ x.transpose(0, 1)


def test_a_users_function_that_is_listed_runs_as_a_whole(lists):
    """What it calls is no choice of its own."""
    given = {"fp32_file_path": lists(fp32=f"{__name__}.products")["fp32_file_path"]}
    found = tuned(loss=lambda m, a, y: F.cross_entropy(products(m(a)), y), lists=given)
    names = {choice.name for choice in found.choices}
    assert "linear" in names and "matmul" not in names


@pytest.mark.parametrize(
    "step_ms, slower, first_line",
    [
        ((2.4, 2.0, 1.5), 1.09, "a step takes 2.4 ms, 20 % MORE than in FP32 (2 ms; 1.5 ms under torch.autocast)"),
        (
            *((1.2, 2.4, 1.3), 1.5),
            "a step takes 1.2 ms, 50 % less than in FP32 (2.4 ms; 1.3 ms under torch.autocast); timings varied by "
            "40 %: time it again on a machine that is idle",
        ),
    ],
)
def test_the_first_line_says_what_a_step_takes_beside_fp32_and_autocast(step_ms, slower, first_line, monkeypatch):
    """slower: by this factor, half of the rounds."""
    steps, dtypes = iter(step_ms), []

    def timed(step):
        step()
        least = next(steps) / 1000
        return Measurement(1, [least, least, least * slower, least * slower], TaskSpec("", ""))

    class Seen(nn.Linear):
        def forward(self, x):
            z = super().forward(x)
            dtypes.append(z.dtype)
            return z

    monkeypatch.setattr(tuning, "timed", timed)
    found = tuned(made=Seen(16, 4))
    assert found.step_spread == pytest.approx(2 * (slower - 1) / (1 + slower))
    assert str(found).splitlines()[0] == f"100 % of the product FLOPs run in BF16; {first_line}"
    assert dtypes[-3:] == [torch.bfloat16, torch.float32, torch.bfloat16]
    assert found.step_seconds == {
        "tuned": step_ms[0] / 1000,
        "FP32": step_ms[1] / 1000,
        "torch.autocast": step_ms[2] / 1000,
    }
