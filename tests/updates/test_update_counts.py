"""`Attachment.updates()`: the counts are those that NumPy makes of the same steps in FP32."""

from __future__ import annotations

import copy
import doctest
import gc
import inspect
import json
import re

import numpy as np
import pytest
import torch
from torch import nn, optim
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh

import hmpx
from hmpx.rounding import native
from hmpx.updates import update_counts
from hmpx.updates.segment import Segment
from hmpx.updates.update_table import UpdateRow
from hmpx.updates.watched import Updates
from tests.support import ranks
from tests.support.models import SharpnessAware
from tests.support.sharded import Small, digest, fixed_gradients

BF16 = torch.bfloat16
WAYS = ("stochastic", "nearest", "master", "split")
SHAPES = {"long": (1000,), "matrix": (24, 40), "tall": (33, 5), "one": (1,), "scalar": ()}


class Whole(optim.SGD):
    """A class that hmpx does not know, so that it steps on a whole FP32 copy."""


class ClearsItsGradients(optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        self.zero_grad()


OPTIMIZERS = {
    "AdamW": (optim.AdamW, {"lr": 1e-3}),
    "SGD": (optim.SGD, {"lr": 1e-3, "momentum": 0.9}),
    "Adafactor": (optim.Adafactor, {"lr": 1e-3}),
    "a class of one's own": (Whole, {"lr": 1e-2}),
    "clears": (ClearsItsGradients, {"lr": 1e-3}),
}


def drawn(seed):
    """Weights of many sizes, one in eight of them zero, and one zero gradient."""
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for name, shape in SHAPES.items():
        x = torch.randn(shape, generator=generator) * 10 ** torch.empty(shape).uniform_(-4, 2, generator=generator)
        made[name] = torch.where(torch.rand(shape, generator=generator) < 0.125, 0.0, x).bfloat16()
    return made


def parameters(layout=lambda x: x):
    return {name: nn.Parameter(layout(weight)) for name, weight in drawn(0).items()}


def transposed(x):
    return x.mT.contiguous().mT if x.dim() == 2 else x


def unit(x):
    """The unit in the last place of BF16 (8 bits of significand) at each FP32 number, in FP64."""
    exponent = np.frexp(np.abs(x))[1]
    return np.ldexp(1.0, np.where(x == 0, -125, np.maximum(exponent, -125)) - 8)


class Expected:
    """Counts of one parameter: NumPy in FP64, but for torch's rounding to BF16."""

    def __init__(self):
        self.updates = self.lost = self.moved = 0
        self.error = self.bias = self.size = 0.0
        self.idle = 0

    def add(self, old, weight, x, written):
        """One step: what was held (FP32), the weight (BF16), the result (FP32), the weight afterwards (BF16)."""
        changed = (x != old).numpy()
        nearest = (weight.double() + (x.double() - old.double())).float().bfloat16()
        moved = (written != weight).numpy()
        self.updates += changed.sum()
        self.lost += ((nearest == weight).numpy() & changed).sum()
        self.moved += (moved & changed).sum()
        self.idle = 0 if moved.any() else self.idle + 1
        old, x, written = (each.double().numpy() for each in (old, x, written))
        off = ((written - x) / unit(x))[changed]
        self.error, self.bias = self.error + np.abs(off).sum(), self.bias + off.sum()
        self.size += (np.abs(x - old) / unit(np.maximum(np.abs(x), np.abs(old))))[changed].sum()


def give(params, step):
    """Given gradients; what a closure returns."""
    for name, grad in drawn(100 + step).items():
        params[name].grad = (grad * 1e-2).to(params[name].dtype)
    return torch.zeros(())


def train(params, optimizer, steps=5, closure=False, after=lambda step: None):
    for step in range(steps):
        if closure:
            optimizer.step(lambda step=step: give(params, step))
        else:
            give(params, step)
            optimizer.step()
        after(step)


def watched(params, optimizer, way, closure=False):
    """Train an attached optimizer watched, beside an FP32 twin; the updates, and what NumPy counts."""
    updates, expected = optimizer.attachment.updates(), {name: Expected() for name in params}
    twins = {name: nn.Parameter(p.detach().float()) for name, p in params.items()}
    twin = type(optimizer)(list(twins.items()), **optimizer.options)
    before = {name: (twins[name].detach().clone(), p.detach().clone()) for name, p in params.items()}

    def follow(step):
        if closure:
            twin.step(lambda: give(twins, step))
        else:
            give(twins, step)
            twin.step()
        for name, p in params.items():
            expected[name].add(*before[name], twins[name].detach(), p.detach())
            if way in ("stochastic", "nearest"):
                twins[name].data.copy_(p.data)
            before[name] = twins[name].detach().clone(), p.detach().clone()

    train(params, optimizer, closure=closure, after=follow)
    return updates, expected


def attached(cls, options, params, way="stochastic", **settings):
    optimizer = cls(list(params.items()), **options)
    optimizer.attachment, optimizer.options = hmpx.attach(optimizer, way, **settings), options
    return optimizer


def assert_counts(updates, expected):
    assert {row.name for row in updates.rows} == set(expected)
    for name, want in expected.items():
        row, n = updates[name], max(want.updates, 1)
        assert row.updates == want.updates, name
        assert (row.lost, row.moved, row.idle_steps) == (want.lost / n, want.moved / n, want.idle), name
        assert row.error == pytest.approx(want.error / n, abs=1e-9)  # these two are exact
        assert row.bias == pytest.approx(want.bias / n, abs=1e-9)
        assert row.size == pytest.approx(want.size / n, abs=2**-16)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_counts_are_those_of_an_fp32_copy(name, way, sliced):
    cls, options = OPTIMIZERS[name]
    params = parameters(transposed)
    updates, expected = watched(params, attached(cls, options, params, way), way)
    assert_counts(updates, expected)
    assert sum(row.updates for row in updates.rows) > 5000 and 0.05 < updates.lost < 0.95


@pytest.mark.parametrize("way", WAYS)
def test_trial_points_of_a_closure_are_no_updates(way):
    """SAM overwrites the model's weights while it climbs; its update is from where it began."""
    params = parameters()
    optimizer = attached(SharpnessAware, {"lr": 1e-3}, params, way)
    updates, expected = watched(params, optimizer, way, closure=True)
    assert_counts(updates, expected)
    # Before the step there is no gradient, and none after it: the update tells that there was one.
    assert [updates[name].no_gradient_steps for name in ("long", "matrix", "tall")] == [0, 0, 0]


@torch.no_grad()
def test_numbers_of_every_size_are_counted_in_their_own_unit():
    """From the subnormal ones to the largest, each moved by up to two units."""
    random, n = np.random.default_rng(0), 100_000
    upper, sign = random.integers(0, 0x7F80, n) << 16, random.integers(0, 2, n) << 31
    moved = np.clip(upper + random.integers(-(2**17), 2**17, n), 0, 0x7F7F0000) | sign
    old, x = (torch.tensor(bits.astype(np.uint32).view(np.float32)) for bits in (upper | sign, moved))
    assert (old.abs() < 1e-38).sum() > 100 and (old.abs() > 1e38).sum() > 100
    weight, written, expected = old.bfloat16(), hmpx.stochastic_round(x, seed=0, step=0, name="w"), Expected()
    expected.add(old, weight, x, written)
    found = update_counts.Totals(*update_counts.count(old, weight, x, written).tolist())
    assert found[:3] == (expected.updates, expected.lost, expected.moved) and found.nonfinite == 0
    want = expected.error, expected.bias, expected.size
    assert [each / update_counts.ULP for each in found[3:6]] == pytest.approx(want, abs=n * 2**-16)
    assert (found.error, found.bias) == tuple(each * update_counts.ULP for each in want[:2])


def test_a_case_worked_by_hand():
    """The BF16 numbers next to 1 are 1 - 2^-8 and 1 + 2^-7; next to 0.5 - 2^-9 and 0.5 + 2^-8."""
    weight = nn.Parameter(torch.tensor([1.0, 1.0, 1.0, 1.0, 0.5, 0.0, -3.0, 2.0], dtype=BF16))
    weight.grad = torch.tensor(
        [-(2.0**-9), -(2.0**-8), -(3 * 2.0**-9), 0.0, 2.0**-11, -(2.0**-20), 8.0, 2.0**-30], dtype=BF16
    )
    optimizer = optim.SGD([("weight", weight)], lr=1.0)
    updates = hmpx.attach(optimizer, "nearest").updates()
    optimizer.step()
    # quarter of a unit: lost; half, a tie: to even, which is 1: lost; three quarters: up; none; half of a unit of the
    # smaller numbers: lost; from 0, exact; -3 to -11: exact; 2^-30 is none in FP32
    assert weight.tolist() == [1.0, 1.0, 1.0 + 2**-7, 1.0, 0.5, 2.0**-20, -11.0, 2.0]
    (row,) = updates.rows
    assert (row.name, row.elements, row.steps, row.updates) == ("weight", 8, 1, 6)
    assert (row.lost, row.moved, row.idle_steps) == (3 / 6, 3 / 6, 0)
    off = [-0.25, -0.5, 0.25, 0.25, 0.0, 0.0]  # of 0.5 - 2^-11, the unit is 2^-9
    assert (row.error, row.bias) == (sum(map(abs, off)) / 6, sum(off) / 6)
    # of the larger of the two, before and after: 2^-20 is 128 units of its own, 8 is 128 units of 11's
    assert row.size == (0.25 + 0.5 + 0.75 + 0.125 + 128 + 128) / 6
    assert (updates.lost, updates.needed) == (0.5, True)
    weight.grad.zero_()
    optimizer.step()
    weight.grad = None
    optimizer.step()
    (row,) = updates.rows
    assert (row.steps, row.updates, row.idle_steps) == (3, 6, 2)
    assert (row.zero_gradient_steps, row.no_gradient_steps) == (1, 1)


@pytest.mark.parametrize("way", WAYS)
def test_a_small_rate_loses_all_and_a_large_one_nothing(way):
    """Nearest loses them for good; the others carry them, and say so."""
    answers = {}
    for rate in (1e-4, 100.0):
        weight = nn.Parameter(torch.full((4096,), 1.5, dtype=BF16))
        optimizer = attached(optim.SGD, {"lr": rate}, {"weight": weight}, way)
        updates = optimizer.attachment.updates()
        for step in range(8):
            weight.grad = torch.randn(4096, generator=torch.Generator().manual_seed(step)).abs().add(1).bfloat16()
            optimizer.step()
        answers[rate] = updates["weight"]
        assert updates.needed == (rate < 1)
    small, large = answers.values()
    assert (small.lost, large.lost) == (1.0, 0.0) and 0.02 < small.size < 0.03 and large.size > 50
    assert large.moved > 0.99 and large.idle_steps == 0
    assert (small.moved > 0, small.idle_steps) == ((True, small.idle_steps) if way == "stochastic" else (False, 8))
    if way == "stochastic":
        assert small.moved == pytest.approx(small.size, rel=0.1)  # an update of a tenth moves one weight in ten
        assert all(abs(row.bias) < 5 * row.bias_noise for row in (small, large))
    else:
        assert small.bias > 5 * small.bias_noise  # every one of them went down, and the weight did not


@pytest.mark.parametrize(
    "settings",
    [
        *({"way": way} for way in WAYS),
        {"way": "stochastic", "fused": True},
        {"way": "stochastic", "state_dtype": BF16},
        {"way": "split", "release_gradients": True},
    ],
    ids=str,
)
def test_no_bit_changes_by_being_watched(settings, sliced):
    found = []
    for is_watched in (False, True):
        params = parameters()
        optimizer = attached(optim.AdamW, {"lr": 1e-3}, params, **settings)
        if is_watched:
            assert optimizer.attachment.updates().active
        for step in range(5):
            if settings.get("release_gradients"):
                sum((p.float() * (drawn(100 + step)[name] * 1e-2)).sum() for name, p in params.items()).backward()
            else:
                give(params, step)
            optimizer.step()
        state = {f"{name}.{key}": v for name, p in params.items() for key, v in optimizer.state[p].items()}
        found.append((digest(params), digest(state)))
    assert found[0] == found[1]
    assert optimizer.attachment.updates().lost > 0.05


@pytest.mark.skipif(native.library() is None, reason="no C compiler here, so the kernels do not run")
@pytest.mark.parametrize("cls, options", [(optim.AdamW, {}), (optim.SGD, {}), (optim.SGD, {"momentum": 0.9})])
@pytest.mark.parametrize("state_dtype", [torch.float32, BF16])
def test_what_is_counted_of_a_kernel_is_what_it_rounds(cls, options, state_dtype, monkeypatch):
    """The FP32 numbers, rounded by hand, are the weights that it wrote, bit for bit."""
    seen = []
    plain = update_counts.count
    monkeypatch.setattr(update_counts, "count", lambda *tensors: seen.append(tensors) or plain(*tensors))
    params = parameters()
    optimizer = attached(cls, {"lr": 1e-3, **options}, params, seed=3, fused=True, state_dtype=state_dtype)
    updates = optimizer.attachment.updates()

    def check(step):
        for name, (old, weight, x, written) in zip(params, seen, strict=True):
            assert torch.equal(hmpx.stochastic_round(x, seed=3, step=step, name=name), written)
            assert torch.equal(written, params[name]) and torch.equal(old, weight.float())
        seen.clear()

    train(params, optimizer, after=check)
    assert updates.steps == 5 and updates.lost > 0.05


def test_released_gradients_count_once_a_step():
    """Counted in backward; who begins in the middle of a step counts from the next one on."""
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)).bfloat16()
    optimizer = optim.AdamW(model.named_parameters(), lr=1e-3)
    attachment = hmpx.attach(optimizer, release_gradients=True)

    def backward():
        model(torch.ones(4, 16, dtype=BF16)).float().square().sum().backward()

    backward()
    updates = attachment.updates()
    optimizer.step()
    assert updates.steps == 0 and updates.rows == []
    for _ in range(3):
        backward()
        optimizer.step()
    assert updates.steps == 3 and len(updates.rows) == 4
    assert all(0 < row.updates <= 3 * row.elements and not row.no_gradient_steps for row in updates.rows)
    assert updates["0.weight"].updates == 3 * 256


def test_sparse_gradients_count_the_rows_that_they_have():
    table = nn.Embedding(50, 8, sparse=True).bfloat16()
    optimizer = optim.SparseAdam(list(table.named_parameters()), lr=1e-3)
    updates = hmpx.attach(optimizer).updates()
    table(torch.tensor([1, 7, 7])).float().sum().backward()
    optimizer.step()
    (row,) = updates.rows
    assert (row.updates, row.elements, row.zero_gradient_steps) == (16, 400, 0)


def test_what_does_not_move_says_why():
    """One without a gradient, one with zeros alone, one whose updates are lost, and results that are no numbers."""
    names = ("none", "zeros", "lost", "broken", "fine")
    params = {name: nn.Parameter(torch.ones(8, dtype=BF16)) for name in names}
    for cls in (optim.SGD, Whole, ClearsItsGradients):
        optimizer = cls(list(params.items()), lr=1e-4)
        updates = hmpx.attach(optimizer, "nearest").updates()
        for _ in range(3):
            for value, name in zip((0.0, 1.0, float("nan"), 1e3), names[1:], strict=True):
                params[name].grad = torch.full((8,), value, dtype=BF16)
            optimizer.step()
        rows = {row.name: row for row in updates.rows}
        assert [rows[name].no_gradient_steps for name in names] == [3, 0, 0, 0, 0]
        assert [rows[name].zero_gradient_steps for name in names] == [0, 3, 0, 0, 0]
        assert [rows[name].nonfinite for name in names] == [0, 0, 0, 24, 0]
        assert [rows[name].updates for name in names] == [0, 0, 24, 0, 24]
        assert [rows[name].idle_steps for name in names] == [3, 3, 3, 3, 0]
        assert updates.rows[0] is not None and updates.rows[0].name == "lost"
        text = str(updates)
        assert "none has not moved for 3 steps, had no gradient in 3 of 3" in text
        assert "zeros has not moved for 3 steps, had a gradient of zeros in 3 of 3" in text
        assert "broken has not moved for 3 steps, got inf or NaN 24 times" in text and "\nfine has" not in text
        hmpx.detach(optimizer)
        with torch.no_grad():
            for p in params.values():
                p.fill_(1)


def _raises_the_second_time():
    calls = iter(range(10))

    def mark_written(segment):
        if next(calls):
            raise RuntimeError("no memory")

    return mark_written


def test_steps_that_do_not_count(monkeypatch, sliced):
    """One that raises, before it writes or in the middle; one that a GradScaler skips; one for a checkpoint's sake."""
    params = parameters()
    optimizer = attached(ClearsItsGradients, {"lr": 1e-3}, params)
    updates = optimizer.attachment.updates()
    give(params, 0)
    with pytest.raises(ValueError, match="mine"):
        optimizer.step(lambda: (_ for _ in ()).throw(ValueError("mine")))
    assert updates.steps == 0 and updates.rows == []
    give(params, 0)
    optimizer.step()
    assert updates.steps == 1

    params = parameters()
    optimizer = attached(optim.SGD, {"lr": 1e-3}, params)
    updates, saved = optimizer.attachment.updates(), optimizer.state_dict()
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="no memory"):
        patch.setattr(Segment, "mark_written", _raises_the_second_time())
        give(params, 0)
        optimizer.step()
    optimizer.load_state_dict(saved)
    params["long"].grad = None
    optimizer.step()
    rows = {row.name: row for row in updates.rows}
    assert updates.steps == 1 and (rows["long"].updates, rows["long"].no_gradient_steps) == (0, 1)
    assert 0 < rows["matrix"].updates <= 960

    model = nn.Linear(8, 8).bfloat16()
    optimizer = optim.SGD(model.named_parameters(), lr=1e-3, momentum=0.9, fused=True)
    updates = hmpx.attach(optimizer).updates()
    model(torch.ones(2, 8, dtype=BF16)).sum().backward()
    optimizer.grad_scale, optimizer.found_inf = torch.ones(()), torch.ones(())
    optimizer.step()
    assert updates.steps == 0

    optimizer = optim.AdamW(model.named_parameters(), lr=1e-3)
    updates = hmpx.attach(optimizer).updates()
    optimizer.zero_grad()
    assert get_optimizer_state_dict(model, optimizer)["state"]
    assert updates.steps == 0 and updates.rows == []


def test_one_object_goes_on_until_it_is_closed():
    params = parameters()
    optimizer = attached(optim.SGD, {"lr": 1e-3}, params)
    attachment = optimizer.attachment
    first = attachment.updates()
    train(params, optimizer, 2)
    assert attachment.updates() is first and first.active and first.steps == 2
    with attachment.updates() as same:
        assert same is first
    assert not first.active
    train(params, optimizer, 2)
    assert first.steps == 2 and first["long"].steps == 2
    second = attachment.updates()
    assert second is not first and second.steps == 0 and "no update" in str(second)
    train(params, optimizer, 3)
    other = copy.deepcopy(optimizer)
    assert other._hmpx_attachment._updates.watch is None  # a copy is watched by nobody
    attachment.detach()
    assert (second.active, second.steps, first.steps) == (False, 3, 2) and second.rows
    with pytest.raises(hmpx.HmpxError, match=r"detached.* takes no steps .*hmpx\.attach\(optimizer\) first"):
        attachment.updates()
    hmpx.detach(other)


def test_an_optimizer_that_nobody_holds_is_watched_no_more():
    params = parameters()
    optimizer = attached(optim.SGD, {"lr": 1e-3}, params)
    updates = optimizer.attachment.updates()
    train(params, optimizer, 1)
    assert updates.active
    del optimizer
    gc.collect()
    assert not updates.active and updates.steps == 1 and updates.lost > 0
    with hmpx.disable_casts():  # what was collected is taken away on the next occasion
        pass


def test_nothing_is_in_the_way_of_a_step_that_nobody_watches(monkeypatch):
    monkeypatch.setattr(update_counts, "count", None)
    monkeypatch.setattr(update_counts, "UpdateCounts", None)
    params, seen = parameters(), []
    optimizer = attached(optim.SGD, {"lr": 1e-3}, params)
    updates = optimizer.attachment._updates
    make = updates._write_back
    monkeypatch.setattr(updates, "_write_back", lambda call: seen.append(make(call)) or seen[-1])
    train(params, optimizer, 2)
    assert [(each.store, each.counts) for each in seen] == [(updates.store, None)] * 2


def test_plain_parameters_are_not_counted():
    params = {"half": nn.Parameter(torch.ones(8, dtype=BF16)), "full": nn.Parameter(torch.ones(8))}
    optimizer = optim.SGD(list(params.items()), lr=1e-3)
    updates = hmpx.attach(optimizer).updates()
    for p in params.values():
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert [row.name for row in updates.rows] == ["half"]
    with pytest.raises(hmpx.HmpxError, match="no update of a parameter 'halv' was counted; did you mean 'half'"):
        updates["halv"]
    with pytest.raises(hmpx.HmpxError, match="'full' was counted"):
        updates["full"]


def test_the_answer_is_yes_for_some_or_no():
    answers = []
    for rates in ((1e-6, 1e-6), (1e-6, 1.0), (1.0, 1.0)):
        small, large = nn.Parameter(torch.ones(10, dtype=BF16)), nn.Parameter(torch.ones(990, dtype=BF16))
        optimizer = optim.SGD(
            [{"params": [("small", small)], "lr": rates[0]}, {"params": [("large", large)], "lr": rates[1]}]
        )
        with hmpx.attach(optimizer, "nearest").updates() as updates:
            small.grad, large.grad = torch.ones_like(small), torch.ones_like(large)
            optimizer.step()
        answers.append(" ".join(str(updates).partition("here? ")[2].split()))
    assert answers == [
        "Yes: round-to-nearest would lose 100.0 % of the updates, and more than 5 % in 2 of 2 parameters, worst in "
        "'small' (100.0 %).",
        "For some parameters: round-to-nearest would lose 1.0 % of the updates, and more than 5 % in 1 of 2 "
        "parameters, worst in 'small' (100.0 %).",
        "No: round-to-nearest would lose 0.0 % of the updates, and more than 5 % in 0 of 2 parameters.",
    ]


def test_the_table_fits_a_terminal_however_long_the_names_and_many_the_parameters():
    names = [f"model.decoder.layers.{i}.self_attention.output_projection.weight" for i in range(30)]
    params = [(name, nn.Parameter(torch.ones(4, dtype=BF16))) for name in names]
    optimizer = optim.SGD(params, lr=1e-6)
    updates = hmpx.attach(optimizer, "nearest").updates()
    for _, p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    lines = str(updates).splitlines()
    assert all(len(line) <= 80 for line in lines if " has not moved" not in line)
    assert "and 10 more, which lose no larger share" in lines
    assert sum("…" in line and "100.0 %" in line for line in lines) == 20 and len(lines) < 80


def test_the_json_has_all_of_it():
    params = parameters()
    optimizer = attached(optim.AdamW, {"lr": 1e-3}, params, "split")
    updates = optimizer.attachment.updates()
    train(params, optimizer)
    found = json.loads(json.dumps(updates.as_json()))
    assert found["schema"] == 1 and (found["optimizer"], found["weights"], found["steps"]) == ("AdamW", "split", 5)
    assert found["lost"] == updates.lost and found["needed"] is True and found["threshold"] == 0.05
    assert [each["name"] for each in found["rows"]] == [row.name for row in updates.rows]
    assert found["rows"][0] == vars(updates.rows[0])
    assert sorted(found["rows"], key=lambda row: -row["lost"]) == found["rows"]


def test_the_docstrings_say_all_and_their_example_runs():
    said: list[str] = []
    for test in doctest.DocTestFinder(recurse=False).find(Updates, "Updates"):
        assert test.examples
        doctest.DocTestRunner(verbose=False).run(test, out=said.append)
    assert not said, "".join(said)
    for cls in (Updates, UpdateRow):
        own = {*vars(cls), *inspect.get_annotations(cls)}
        words = set(re.split(r"\W+", cls.__doc__))
        assert {name for name in own if not name.startswith("_")} <= words


FIELDS = ("updates", "lost", "moved", "error", "bias", "size")


def totals(updates):
    """The integers that were counted, by parameter."""
    return {name: [getattr(total, key) for key in FIELDS] for name, (total, _) in updates.counts.read().items()}


def _train_sharded(cls, way, place):
    params = {name: nn.Parameter(place(weight)) for name, weight in drawn(0).items() if weight.dim()}
    optimizer = attached(cls, {"lr": 1e-3}, params, way)
    updates = optimizer.attachment.updates()
    for step in range(3):
        grads = drawn(100 + step)
        for name, p in params.items():
            p.grad = place(grads[name] * 1e-2)
        optimizer.step()
    return totals(updates), {row.name: row.elements for row in updates.rows}


def _cut(rank, cases):
    mesh = init_device_mesh("cpu", (2,))

    def along(dim):
        return lambda x: distribute_tensor(x, mesh, [Shard(min(dim, x.dim() - 1))])

    return [[_train_sharded(*case, along(dim)) for dim in (0, 1)] for case in cases]


def test_shards_add_up_to_the_whole():
    """Each rank counts the elements that it holds; the counts of all are, to the last one, those of one process."""
    cases = [(optim.AdamW, "stochastic"), (optim.AdamW, "split"), (optim.Adafactor, "nearest")]
    found = ranks.run(2, _cut, cases)
    for i, case in enumerate(cases):
        whole, elements = _train_sharded(*case, lambda x: x)
        for way in range(2):
            parts = [found[rank][i][way] for rank in range(2)]
            for name in whole:
                assert [sum(n) for n in zip(*(part[0][name] for part in parts), strict=True)] == whole[name], case
                assert sum(part[1][name] for part in parts) == elements[name]


def _watched_on_one_rank(rank):
    model = fully_shard(Small())
    optimizer = optim.AdamW(model.named_parameters(), lr=1e-3)
    attachment = hmpx.attach(optimizer)
    updates = attachment.updates() if rank == 0 else None
    for step in range(3):
        fixed_gradients(model, step)
        optimizer.step()
    held = {name: p.to_local().numel() for name, p in model.named_parameters() if isinstance(p, DTensor)}
    if updates is not None:
        assert updates.steps == 3 and {row.name: row.elements for row in updates.rows} == held
    weights = digest(dict(model.named_parameters()))

    model = Small()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optim.AdamW, lr=1e-3)
    updates = hmpx.attach(optimizer, model=model).updates()
    fixed_gradients(model, 0)
    optimizer.step()
    return weights, [row.name for row in updates.rows]


def test_one_rank_may_watch_and_each_sees_its_own():
    """No rank waits for another: FSDP2 watched on the first alone. ZeRO: the parameters that a rank steps."""
    (first, mine), (second, yours) = ranks.run(2, _watched_on_one_rank)
    assert first == second
    assert mine and yours and sorted([*mine, *yours]) == sorted(dict(Small().named_parameters()))
