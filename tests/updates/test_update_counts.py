"""`Attachment.updates()`: the counts are those that NumPy makes of the same steps in FP32."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn, optim
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

import hmpx
from hmpx.rounding import native
from hmpx.updates.stepping import batching, update_counts
from tests.support import ranks
from tests.support.models import SharpnessAware
from tests.support.oracle import to_24_bits
from tests.support.watched import BF16, WAYS, ClearsItsGradients, Whole, attached, drawn, give, parameters, train

OPTIMIZERS = {
    "AdamW": (optim.AdamW, {"lr": 1e-3}),
    "SGD": (optim.SGD, {"lr": 1e-3, "momentum": 0.9}),
    "Adafactor": (optim.Adafactor, {"lr": 1e-3}),
    "a class of one's own": (Whole, {"lr": 1e-2}),
    "clears": (ClearsItsGradients, {"lr": 1e-3}),
}


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
            elif way == "split8":
                twins[name].data.copy_(to_24_bits(twins[name].detach(), seed=0, step=step, name=name))
            before[name] = twins[name].detach().clone(), p.detach().clone()

    train(params, optimizer, closure=closure, after=follow)
    return updates, expected


def assert_counts(updates, expected):
    assert {row.name for row in updates.rows} == set(expected)
    for name, want in expected.items():
        row, n = updates[name], max(want.updates, 1)
        assert row.updates == want.updates, name
        assert (row.lost, row.moved, row.idle_steps) == (want.lost / n, want.moved / n, want.idle), name
        assert row.error == pytest.approx(want.error / n, abs=1e-9)  # these two are exact
        assert row.bias == pytest.approx(want.bias / n, abs=1e-9)
        assert row.size == pytest.approx(want.size / n, abs=2**-16)


@pytest.mark.parametrize(
    "name, way, floor",
    [
        (name, WAYS[(i + turn) % 5], floor)
        for turn, floor in ((0, 64), (2, 1 << 17))
        for i, name in enumerate(OPTIMIZERS)
    ],
)
def test_the_counts_are_those_of_an_fp32_copy(name, way, floor, monkeypatch):
    monkeypatch.setattr(batching, "_FLOOR", floor)
    cls, options = OPTIMIZERS[name]
    params = parameters(transposed)
    updates, expected = watched(params, attached(cls, options, params, way), way)
    assert_counts(updates, expected)
    assert sum(row.updates for row in updates.rows) > 5000 and 0.05 < updates.lost < 0.95


@pytest.mark.parametrize("way", ["nearest", "split"])
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


@pytest.mark.parametrize("way", ["stochastic", "nearest"])
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


@pytest.mark.skipif(native.library() is None, reason="no C compiler here, so the kernels do not run")
@pytest.mark.parametrize(
    "cls, options, weights, state_dtype",
    [
        (optim.AdamW, {}, "stochastic", torch.float32),
        (optim.SGD, {}, "stochastic", torch.float32),
        (optim.SGD, {"momentum": 0.9}, "stochastic", BF16),
        *((optim.AdamW, {}, weights, torch.float32) for weights in ("nearest", "split", "split8")),
    ],
)
def test_what_is_counted_of_a_kernel_is_what_it_rounds(cls, options, weights, state_dtype, monkeypatch):
    """The FP32 numbers go from those of before to those of after the step, and to count them changes neither."""
    seen, plain = [], update_counts.count
    monkeypatch.setattr(update_counts, "count", lambda *tensors: seen.append(tensors) or plain(*tensors))
    settings = {"seed": 3, "fused": True, "state_dtype": state_dtype}
    params, twins = parameters(), parameters()
    both = [attached(cls, {"lr": 1e-3, **options}, each, weights, **settings) for each in (params, twins)]
    handle = both[0].attachment
    updates, has_masters = handle.updates(), weights in ("split", "split8")

    def held():
        return [handle.masters_of(p) if has_masters else p.detach().float() for p in params.values()]

    before = [held()]

    def check(step):
        for (name, p), known, after, counted in zip(params.items(), before[0], held(), seen, strict=True):
            old, _, x, written = counted
            assert torch.equal(old, known) and torch.equal(written, p)
            if weights == "stochastic":
                assert torch.equal(hmpx.stochastic_round(x, seed=3, step=step, name=name), p)
            elif weights == "nearest":
                assert torch.equal(x.bfloat16(), p)
            else:
                assert (x - after).abs().max() <= (2**-15 * x.abs().max() if weights == "split8" else 0)
        before[0] = held()
        seen.clear()

    train(params, both[0], after=check)
    train(twins, both[1])
    assert updates.steps == 5 and updates.lost > 0.05
    assert all(torch.equal(p, q) for p, q in zip(params.values(), twins.values(), strict=True))


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
