"""Steps inside `disable_casts`: closures, hooks, errors, checkpoints, and what torch has afterwards.

`test_programs.py` compares the bits of every optimizer, in every layout, with those on FP32 copies.
"""

import contextlib
import copy

import pytest
import torch
from torch import nn, optim

import hmpx
from hmpx.updates.stepping import transfers
from tests.support.training import parameter, parameters, set_gradients, step_by, train

BF16 = torch.bfloat16


def test_a_step_in_a_region_keeps_what_rounding_to_nearest_loses():
    found = []
    for region in (contextlib.nullcontext(), hmpx.disable_casts()):
        p = nn.Parameter(torch.ones(5000, dtype=BF16))
        p.grad = torch.ones_like(p)
        with region:
            optim.SGD([p], lr=1e-3).step()
        found.append(p.detach().float().mean().item())
    assert found[0] == 1 and found[1] == pytest.approx(1 - 1e-3, abs=1e-4)


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


@pytest.mark.parametrize("how", ["region", "converted", "master"])
def test_a_step_that_raises_rolls_back(how):
    named = parameters(BF16)
    optimizer = Failing(named, lr=0.1)
    set_gradients(named, 0)
    before = [(p.detach().clone(), p.grad.clone()) for _, p in named]
    if how == "converted":
        hmpx.convert()
    if how == "master":
        hmpx.attach(optimizer, how)
    with pytest.raises(RuntimeError, match="half-way"), hmpx.disable_casts():
        optimizer.step()
    assert [p for group in optimizer.param_groups for p in group["params"]] == [p for _, p in named]
    for (_, p), (weight, grad) in zip(named, before, strict=True):
        assert torch.equal(p, weight) and torch.equal(p.grad, grad)
    assert not optimizer.state and "hmpx_step" not in optimizer.param_groups[0]
    if how == "converted":
        x = torch.randn(2, 2)
        assert (x @ x).dtype is BF16  # casts are on again
        hmpx.restore()


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


@pytest.mark.parametrize("how", ["in a region", "under convert", "after one", "after restore"])
def test_a_resumed_run_is_the_run(how, caplog):
    """What keeps FP32 state in a load is installed by the first region, and stays until `restore()`."""

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
    if how == "after restore":
        hmpx.restore()
    region = {"in a region": hmpx.disable_casts, "under convert": hmpx.convert}.get(how, contextlib.nullcontext)
    with region():
        loaded.load_state_dict(saved[1])
    steps_of(resumed, loaded, 3, 6)
    same = all(torch.equal(p, q) for (_, p), (_, q) in zip(named, resumed, strict=True))
    assert same == (how != "after restore")
    assert ("optimizer state that is to be FP32 is in BF16" in caplog.text) == (how == "after restore")


def test_a_run_that_goes_on_from_plain_bf16_steps_says_what_begins_anew(caplog):
    named = parameters(BF16)
    optimizer = optim.AdamW(named, lr=1e-2)
    for step in range(3):
        set_gradients(named, step)
        if step == 1:
            hmpx.attach(optimizer, "master")
        optimizer.step()
    assert caplog.text.count("Masters, where") == caplog.text.count("a plain step, a load or a line") == 1
    assert optimizer.state[named[0][1]]["exp_avg"].dtype is torch.float32


def test_a_step_that_calls_its_parents_counts_once():
    optim.SGD([parameter(1)])  # torch has wrapped the parent's
    with hmpx.convert(), hmpx.disable_casts():

        class Late(optim.SGD):
            def step(self, closure=None):
                return super().step(closure)

        late = Late([parameter(4)], lr=1e-3)
        step_by(late)
    assert late.param_groups[0]["hmpx_step"] == 1


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


@pytest.mark.parametrize("dtype, fused", [(torch.float64, False), (BF16, True)])
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
    monkeypatch.setattr(transfers, "_FLOOR", 64)
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


@pytest.mark.parametrize("state_dtype", [torch.float32, BF16, "8bit"])
@pytest.mark.parametrize("fused", [None, False])
def test_sums_of_adagrad_that_somebody_has_warmed_are_not_filled_anew(state_dtype, fused, caplog):
    """Beside an FP32 twin. The sums that the constructor has made say nothing: only BF16 ones of others are rounded."""
    named, twin = parameters(BF16), parameters(torch.float32)
    made = [optim.Adagrad(each, lr=1e-2, initial_accumulator_value=0.1) for each in (named, twin)]
    fresh = optim.Adagrad(parameters(BF16), lr=1e-2)
    for optimizer in (made[0], fresh):
        hmpx.attach(optimizer, "master", state_dtype=state_dtype, fused=fused)
    train([("", p) for p in fresh.param_groups[0]["params"]], fresh, 0, 1)
    assert not caplog.messages
    for params, optimizer in zip((named, twin), made, strict=True):
        for _, p in params[:2]:
            optimizer.state[p]["sum"].fill_(64.0)
        train(params, optimizer, 0, 2)
    for (_, p), (_, q) in zip(named, twin, strict=True):
        masters = made[0]._hmpx_attachment.masters_of(p)
        with torch.no_grad():
            assert torch.allclose(masters, q, atol=2e-4), state_dtype
