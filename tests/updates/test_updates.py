"""An optimizer step inside disable_casts: the optimizer on an FP32 copy, then stochastic rounding, bit for bit."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from torch import nn, optim

import hmpx
from hmpx.updates import step_hooks
from hmpx.updates.stepping import batching
from tests.support.training import parameter, parameters, set_gradients, step_by

BF16 = torch.bfloat16


def reference_step(optimizer, named, step, seed=0):
    """The contract: a plain step on FP32 parameters, then SR; the rounded values are what the next step starts from."""
    optimizer.step()
    with torch.no_grad():
        for name, p in named:
            p.copy_(hmpx.stochastic_round(p, seed=seed, step=step, name=name))


def test_sparse_adam():
    runs = []
    for dtype in (BF16, torch.float32):
        table = nn.Embedding(10, 4, sparse=True)
        nn.init.ones_(table.weight)
        weight = nn.Parameter(table.weight.detach().to(dtype))
        optimizer = optim.SparseAdam([("w", weight)], lr=0.3)
        runs.append((weight, optimizer))
    (w, optimizer), (v, reference) = runs
    for step in range(3):
        index = torch.tensor([1, 3])
        for p in (w, v):
            p.grad = torch.sparse_coo_tensor(index[None], torch.full((2, 4), 0.3, dtype=p.dtype), p.shape)
        with hmpx.disable_casts():
            optimizer.step()
        reference_step(reference, [("w", v)], step)
    assert torch.equal(w.float(), v) and (w[0] == 1).all() and (w[1] != 1).any()


def test_lbfgs_converges_through_its_closure():
    target = torch.tensor([1.5, -2.0, 0.25], dtype=BF16)
    w = nn.Parameter(torch.zeros(3, dtype=BF16))
    optimizer = optim.LBFGS([w], lr=0.5, max_iter=8)
    seen = []

    def closure():
        optimizer.zero_grad()
        assert optimizer.param_groups[0]["params"][0] is w  # zero_grad reaches the real parameter
        seen.append(torch.matmul(w, w).dtype)
        loss = ((w - target).float() ** 2).sum()
        loss.backward()
        return loss

    with hmpx.convert():
        for _ in range(6):
            with hmpx.disable_casts():
                loss = optimizer.step(closure)
    assert torch.allclose(w.float(), target.float(), atol=2e-2) and torch.isfinite(loss)
    assert set(seen) == {BF16} and len(seen) > 6


def test_a_closure_that_raises_at_a_trial_point_rolls_back():
    w = nn.Parameter(torch.ones(4, dtype=BF16))
    optimizer = optim.LBFGS([w], lr=0.1, max_iter=5)
    points = []

    def closure():
        points.append(w.detach().clone())
        if len(points) == 3:
            raise RuntimeError("third evaluation")
        optimizer.zero_grad()
        loss = (w.float() ** 2).sum()
        loss.backward()
        return loss

    with pytest.raises(RuntimeError, match="third"), hmpx.disable_casts():
        optimizer.step(closure)
    assert not torch.equal(points[2], points[0]) and torch.equal(w, points[0])
    assert optimizer.param_groups[0]["params"][0] is w and not optimizer.state


def test_a_closure_by_keyword_and_its_result():
    w = nn.Parameter(torch.ones(4, dtype=BF16))
    optimizer = optim.SGD([w], lr=0.5)

    def closure():
        optimizer.zero_grad()
        loss = (w.float() ** 2).sum()
        loss.backward()
        return loss

    with hmpx.disable_casts():
        assert optimizer.step(closure=closure) == 4.0
    assert torch.equal(w, torch.zeros(4, dtype=BF16))


@pytest.mark.parametrize(
    "dtype, how", [(torch.float32, "plain"), (BF16, "plain"), (BF16, "region"), (BF16, "attached")]
)
def test_a_closure_is_the_models_forward_and_so_is_cast(dtype, how):
    w = nn.Parameter(torch.ones(4, 4, dtype=dtype))
    x = torch.ones(4, 4)
    optimizer = optim.SGD([w], lr=0.1)
    if how == "attached":
        hmpx.attach(optimizer)
    seen = []

    def closure():
        product = x @ w
        seen.append((product.dtype, (x @ x).dtype))
        product.sum().backward()

    with hmpx.convert():
        with hmpx.disable_casts() if how == "region" else contextlib.nullcontext():
            optimizer.step(closure)
            optimizer.step(closure=closure)
        with hmpx.convert(enabled=False):
            optimizer.step(lambda: seen.append((x @ x).dtype))
    assert seen == [(BF16, BF16), (BF16, BF16), torch.float32]


def test_fp32_parameters_get_the_plain_step():
    named, twin = parameters(torch.float32), parameters(torch.float32)
    optimizer, reference = optim.AdamW(named), optim.AdamW(twin)
    for step in range(3):
        set_gradients(named, step)
        set_gradients(twin, step)
        with hmpx.convert(), hmpx.disable_casts():
            optimizer.step()
        reference.step()
    for (_, p), (_, q) in zip(named, twin, strict=True):
        assert torch.equal(p, q)
    assert "hmpx_step" not in optimizer.param_groups[0]


def test_mixed_groups_untouched_parameters_and_identity():
    bf16, fp32, idle = (nn.Parameter(torch.randn(6).to(d)) for d in (BF16, torch.float32, BF16))
    half = nn.Parameter(torch.randn(6).half())
    before = idle.detach().clone()
    optimizer = optim.AdamW([{"params": [bf16, idle]}, {"params": [fp32, half], "lr": 1e-2}])
    for p in (bf16, fp32, half):
        p.grad = torch.randn(6).to(p.dtype)
    pointer, version = bf16.data_ptr(), bf16._version
    with hmpx.disable_casts():
        optimizer.step()
    assert optimizer.param_groups[0]["params"] == [bf16, idle] and optimizer.param_groups[0]["params"][0] is bf16
    assert bf16.data_ptr() == pointer and bf16._version > version
    assert torch.equal(idle, before) and idle not in optimizer.state
    assert optimizer.state[bf16]["exp_avg"].dtype is torch.float32 and half.dtype is torch.float16


class Failing(optim.SGD):
    """Does half of its work, then raises."""

    def step(self, closure=None):
        first = self.param_groups[0]["params"][0]
        with torch.no_grad():
            first.add_(100)
        self.state[first]["seen"] = True
        raise RuntimeError("half-way")


@pytest.mark.parametrize("caught_inside", [True, False])
@pytest.mark.parametrize("converted", [True, False])
def test_a_step_that_raises_rolls_back(caught_inside, converted):
    named = parameters(BF16)
    optimizer = Failing(named, lr=0.1)
    set_gradients(named, 0)
    before = [(p.detach().clone(), p.grad.clone()) for _, p in named]

    def check():
        assert [p for group in optimizer.param_groups for p in group["params"]] == [p for _, p in named]
        for (_, p), (weight, grad) in zip(named, before, strict=True):
            assert torch.equal(p, weight) and torch.equal(p.grad, grad)
        assert not optimizer.state and "hmpx_step" not in optimizer.param_groups[0]

    if converted:
        hmpx.convert()
    if caught_inside:
        with hmpx.disable_casts():
            with pytest.raises(RuntimeError, match="half-way"):
                optimizer.step()
            check()
    else:
        with pytest.raises(RuntimeError, match="half-way"), hmpx.disable_casts():
            optimizer.step()
    check()
    if converted:
        x = torch.randn(2, 2)
        assert (x @ x).dtype is BF16  # casts are on again
        hmpx.restore()


def test_a_scheduler_made_before_the_region_does_not_pass_it_by():
    named = parameters(BF16)
    optimizer = optim.SGD(named, lr=1e-3)
    scheduler = optim.lr_scheduler.StepLR(optimizer, 1)  # keeps the bound step it found
    set_gradients(named, 0)
    with hmpx.disable_casts():
        optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["hmpx_step"] == 1 and optimizer.param_groups[0]["lr"] == 1e-4


def test_user_hooks_see_the_real_parameters():
    named = parameters(BF16)
    optimizer = optim.SGD(named, lr=1.0)
    real = [p for _, p in named]
    seen = []

    def before(opt, args, kwargs):
        assert opt.param_groups[0]["params"] == real
        for p in real:
            p.grad.zero_()  # as a hook that clips or unscales would

    def after(opt, args, kwargs):
        seen.append([p.detach().clone() for p in opt.param_groups[0]["params"]])

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)
    set_gradients(named, 0)
    weights = [p.detach().clone() for p in real]
    with hmpx.disable_casts():
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(seen[0], weights, strict=True))


def test_grad_scaler_taken_and_skipped():
    named, twin = parameters(BF16), parameters(torch.float32)
    optimizer, reference = optim.AdamW(named), optim.AdamW(twin)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1000)
    scaler.scale(torch.ones(1))
    for step, bad in enumerate((False, True, False)):
        set_gradients(named, step)
        set_gradients(twin, step)
        for _, p in named:
            p.grad.mul_(scaler.get_scale())
        if bad:
            named[0][1].grad[0, 0] = float("inf")
        with hmpx.disable_casts():
            scaler.step(optimizer)
        scaler.update()
        if not bad:
            reference_step(reference, twin, optimizer.param_groups[0]["hmpx_step"] - 1)
    assert optimizer.param_groups[0]["hmpx_step"] == 2
    assert all(torch.equal(p.float(), q) for (_, p), (_, q) in zip(named, twin, strict=True))


def test_the_seed_comes_from_the_region_then_from_the_state_dict():
    def run(optimizer, named, seed=None):
        set_gradients(named, 0)
        with hmpx.disable_casts(seed=seed):
            optimizer.step()
        return torch.cat([p.detach().flatten() for _, p in named])

    def fresh():
        named = parameters(BF16, sizes=((64, 64),))
        return optim.SGD(named, lr=1e-3), named

    zero, one = run(*fresh()), run(*fresh(), seed=1)
    assert not torch.equal(zero, one) and torch.equal(zero, run(*fresh(), seed=0))
    optimizer, named = fresh()
    run(optimizer, named, seed=1)
    resumed, resumed_named = fresh()
    with torch.no_grad():
        resumed_named[0][1].copy_(named[0][1])
    resumed.load_state_dict(optimizer.state_dict())
    assert torch.equal(run(optimizer, named), run(resumed, resumed_named))
    assert resumed.param_groups[0]["hmpx_seed"] == 1
    with pytest.raises(hmpx.HmpxError, match="seed -3 is out of range"):
        hmpx.disable_casts(seed=-3)


@pytest.mark.parametrize("how", ["in a region", "under convert", "outside"])
def test_a_resumed_run_is_the_run(how, caplog):
    def fresh():
        named = parameters(BF16)
        return named, optim.AdamW(named, lr=1e-2)

    def steps_of(named, optimizer, start, stop):
        for step in range(start, stop):
            set_gradients(named, step)
            with hmpx.disable_casts():
                optimizer.step()

    named, optimizer = fresh()
    steps_of(named, optimizer, 0, 3)
    saved = copy.deepcopy(([p.detach() for _, p in named], optimizer.state_dict()))
    steps_of(named, optimizer, 3, 6)

    resumed, loaded = fresh()
    with torch.no_grad():
        for (_, p), weight in zip(resumed, saved[0], strict=True):
            p.copy_(weight)
    region = {"in a region": hmpx.disable_casts, "under convert": hmpx.convert, "outside": contextlib.nullcontext}
    with region[how]():
        loaded.load_state_dict(saved[1])
    steps_of(resumed, loaded, 3, 6)
    same = all(torch.equal(p, q) for (_, p), (_, q) in zip(named, resumed, strict=True))
    assert same == (how != "outside")
    assert ("cast the FP32 optimizer state down" in caplog.text) == (how == "outside")


def test_nothing_of_the_watch_stays_behind():
    optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    functions = {cls: vars(cls).get("step") for cls in optim.Optimizer.__subclasses__()}
    profile = optim.Optimizer.profile_hook_step
    cells = {id(cell): cell.cell_contents for _, cell in step_hooks._cells()}
    with hmpx.convert(), hmpx.disable_casts():

        class Late(optim.SGD):
            def step(self, closure=None):
                return super().step(closure)

        p = nn.Parameter(torch.ones(4, dtype=BF16))
        late = Late([p], lr=1e-3)
        p.grad = torch.ones(4, dtype=BF16)
        late.step()
        assert late.param_groups[0]["hmpx_step"] == 1  # once, although it calls its parent's step
    assert optim.Optimizer.profile_hook_step is profile
    assert {cls: vars(cls).get("step") for cls in functions} == functions
    after = {id(cell): cell.cell_contents for _, cell in step_hooks._cells()}
    assert all(after[key] is function for key, function in cells.items() if key in after)
    assert not any(hasattr(cell.cell_contents, "__hmpx_original__") for _, cell in step_hooks._cells())


def test_nearest_rounding_that_nobody_asked_for_is_warned_of_once_for_each_optimizer(caplog):
    named = parameters(BF16)
    optimizers = optim.SGD(named, lr=0.1), optim.Adam(named, lr=0.1)
    for conversions in (1, 2):  # which forget
        with hmpx.convert():
            for step in range(2):
                set_gradients(named, step)
                for optimizer in optimizers:
                    optimizer.step()
        assert caplog.text.count("with hmpx.disable_casts(): optimizer.step()") == 2 * conversions
        assert caplog.text.count("Adam updates") == conversions


def test_small_updates_survive_where_nearest_loses_them():
    """1000 updates of 1e-4 of a unit weight: nearest stays at 1.0, stochastic rounding arrives near 1.1."""
    weights = {}
    for stochastic in (False, True):
        p = nn.Parameter(torch.ones(256, dtype=BF16))
        optimizer = optim.SGD([p], lr=1e-4)
        for _ in range(1000):
            p.grad = -torch.ones(256, dtype=BF16)
            if stochastic:
                with hmpx.disable_casts():
                    optimizer.step()
            else:
                optimizer.step()
        weights[stochastic] = p.detach().float().mean().item()
    # 1000 steps of 1e-4; one weight's standard deviation is about sqrt(1000 * 1e-4 * 2**-7) = 0.028, over 256: 0.0017
    assert weights[False] == 1.0 and abs(weights[True] - 1.1) < 0.008


@pytest.mark.parametrize("dtype", [torch.float64, BF16])
@pytest.mark.parametrize("fused", [False, True])
def test_another_default_dtype(dtype, fused):
    p, q = parameter(1000), parameter(1000)
    optimizers = optim.Adam([p], lr=0.01), optim.Adam([q], lr=0.01)
    for optimizer in optimizers:
        hmpx.attach(optimizer, fused=fused)
    step_by(optimizers[0])
    torch.set_default_dtype(dtype)
    try:
        step_by(optimizers[1])
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(p, q) and optimizers[1].state[q]["step"].dtype is not BF16


def test_state_that_is_none(monkeypatch):
    monkeypatch.setattr(batching, "_FLOOR", 64)
    p = parameter(1000)
    optimizer = optim.SGD([p], lr=0.5, momentum=0.9)
    optimizer.state[p] = {"momentum_buffer": None}
    with hmpx.disable_casts():
        step_by(optimizer)
    assert (p == 0.5).all() and optimizer.state[p]["momentum_buffer"].shape == p.shape


def test_a_subclass_of_adagrad_starts_from_the_exact_value():
    class Mine(optim.Adagrad):
        pass

    p = parameter(4)
    optimizer = Mine([p], lr=0.0, initial_accumulator_value=0.1)
    hmpx.attach(optimizer)
    step_by(optimizer, 0.0)
    assert (optimizer.state[p]["sum"] == torch.tensor(0.1)).all()


def test_sparse_state_stays_as_it_is():
    table = nn.Embedding(10, 4, sparse=True).bfloat16()
    optimizer = optim.SGD(table.parameters(), lr=0.1, momentum=0.9)
    hmpx.attach(optimizer, state_dtype=BF16)
    for _ in range(2):
        optimizer.zero_grad()
        table(torch.tensor([1, 3])).sum().backward()
        optimizer.step()
