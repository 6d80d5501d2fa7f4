"""`attach`: ways to hold weights and state, against reference loops written out here."""

from __future__ import annotations

import copy
import gc
import logging
import pickle
import weakref

import pytest
import torch
from torch import nn, optim

import hmpx
from hmpx.updates import names, plain_steps, sliced_step, step_hooks
from tests.support.training import parameters, set_gradients

BF16 = torch.bfloat16


def train(named, optimizer, start, stop):
    for step in range(start, stop):
        set_gradients(named, step)
        optimizer.step()


def weights(named):
    return [p.detach().clone() for _, p in named]


def masters_in(optimizer):
    return [state["hmpx_master"] for _, state in sorted(optimizer.state_dict()["state"].items())]


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.fixture(autouse=True)
def nothing_stays_installed():
    yield
    gc.collect()
    with hmpx.disable_casts():  # what was collected is taken away on the next occasion
        pass
    assert step_hooks._users == 0


@pytest.fixture(params=["whole", "slices"])
def sliced(request, monkeypatch):
    """The same in slices of 64 elements at most, and with nothing cut."""
    if request.param == "slices":
        monkeypatch.setattr(sliced_step, "_FLOOR", 64)


def test_attached_is_the_same_as_in_a_region(sliced):
    (named, optimizer), (twin, reference) = [(n, optim.AdamW(n, lr=1e-2)) for n in (parameters(), parameters())]
    hmpx.attach(optimizer, seed=5)
    for step in range(4):
        set_gradients(named, step)
        set_gradients(twin, step)
        optimizer.step()
        with hmpx.disable_casts(seed=5):
            reference.step()
    assert same(weights(named), weights(twin)) and optimizer.param_groups[0]["hmpx_seed"] == 5


@pytest.mark.parametrize("cls", [optim.AdamW, optim.SGD, optim.Adafactor, optim.LBFGS])
def test_master_is_an_fp32_copy_of_the_parameters(cls, sliced):
    named, twin = parameters(), parameters(torch.float32)
    optimizer, reference = cls(named, lr=1e-2), cls(twin, lr=1e-2)
    hmpx.attach(optimizer, "master")
    for step in range(5):
        set_gradients(named, step)
        set_gradients(twin, step)
        closure = (lambda: torch.tensor(0.0),) if cls is optim.LBFGS else ()
        optimizer.step(*closure)
        reference.step(*closure)
        assert same(weights(named), [q.bfloat16() for q in weights(twin)])


def half_away_from_zero(x):
    """FP32 to BF16 in float64 arithmetic: an independent account of ties away from zero."""
    x = x.double()
    unit = torch.exp2(torch.floor(torch.log2(x.abs())) - 7)
    return (torch.sign(x) * torch.floor(x.abs() / unit + 0.5) * unit).bfloat16()


def test_split_holds_the_same_masters_in_two_bytes(sliced):
    named, twin = parameters(), parameters(torch.float32)
    optimizer, reference = optim.AdamW(named, lr=1e-2), optim.AdamW(twin, lr=1e-2)
    hmpx.attach(optimizer, "split", use_master_weights_in_ckpt=True)
    for step in range(5):
        set_gradients(named, step)
        set_gradients(twin, step)
        optimizer.step()
        reference.step()
        assert same(masters_in(optimizer), weights(twin))
        assert same(weights(named), [half_away_from_zero(q) for q in weights(twin)])
    assert "hmpx_master" not in optimizer.state[named[0][1]]


def test_nearest_computes_in_fp32_and_warns_nobody(sliced, monkeypatch, caplog):
    monkeypatch.setattr(plain_steps, "_warned", False)
    named, twin = parameters(), parameters(torch.float32)
    optimizer, reference = optim.AdamW(named, lr=1e-2), optim.AdamW(twin, lr=1e-2)
    hmpx.attach(optimizer, "nearest")
    for step in range(3):
        set_gradients(named, step)
        set_gradients(twin, step)
        optimizer.step()
        reference.step()
        with torch.no_grad():
            for _, q in twin:
                q.copy_(q.bfloat16())
        assert same(weights(named), [q.bfloat16() for q in weights(twin)])
    assert "round-to-nearest" not in caplog.text


@pytest.mark.parametrize("cls, options", [(optim.AdamW, {"foreach": False}), (optim.Adafactor, {}), (optim.LBFGS, {})])
def test_state_in_bf16_is_rounded_stochastically(cls, options, sliced):
    named, twin = parameters(), parameters(torch.float32)
    optimizer, reference = cls(named, lr=1e-2, **options), cls(twin, lr=1e-2, **options)
    hmpx.attach(optimizer, state_dtype=BF16)
    closure = (lambda: torch.tensor(0.0),) if cls is optim.LBFGS else ()
    for step in range(4):
        set_gradients(named, step)
        set_gradients(twin, step)
        optimizer.step(*closure)
        reference.step(*closure)
        with torch.no_grad():
            for name, q in twin:
                for key, value in reference.state[q].items():
                    if isinstance(value, torch.Tensor) and value.dim() and value.is_floating_point():
                        value.copy_(hmpx.stochastic_round(value, seed=0, step=step, name=f"{name}.{key}"))
                q.copy_(hmpx.stochastic_round(q, seed=0, step=step, name=name))
        for (_, p), (_, q) in zip(named, twin, strict=True):
            assert torch.equal(p.float(), q)
            for key, value in reference.state[q].items():
                held = optimizer.state[p][key]
                if isinstance(value, torch.Tensor) and value.dim() and value.is_floating_point():
                    assert held.dtype is BF16 and torch.equal(held.float(), value), key


def test_weights_that_somebody_writes_to_count_more_than_their_masters():
    named = parameters()
    optimizer = optim.SGD(named, lr=0.0)
    for way in ("master", "split"):
        hmpx.attach(optimizer, way)
        train(named, optimizer, 0, 1)
        named[0][1].data.fill_(0.5)  # .data leaves no trace in the version counter
        before = weights(named)
        train(named, optimizer, 1, 2)
        assert same(weights(named), before) and (named[0][1] == 0.5).all()
        hmpx.detach(optimizer)


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="torch before 2.13 has no grad_dtype")
def test_gradients_accumulate_in_fp32(sliced):
    generator = torch.Generator().manual_seed(0)
    batches = [torch.rand(11, generator=generator).bfloat16() * 1e-2 for _ in range(256)]
    named, twin = parameters(sizes=((11,),)), parameters(torch.float32, sizes=((11,),))
    optimizer, reference = optim.SGD(named, lr=1.0), optim.SGD(twin, lr=1.0)
    p, q = named[0][1], twin[0][1]
    p.grad = torch.zeros_like(p)  # a gradient from before is kept, wider
    handle = hmpx.attach(optimizer, "master", use_fp32_grad_acc=True)
    for batch in batches:
        (p * batch).sum().backward()
    q.grad = torch.stack([b.float() for b in batches]).cumsum(0)[-1]
    exact = torch.stack([b.double() for b in batches]).sum(0)
    assert p.grad.dtype is torch.float32 and ((p.grad - exact) / exact).abs().max() < 1e-5
    plain = torch.zeros(11, dtype=BF16)
    for batch in batches:
        plain += batch
    assert ((plain - exact) / exact).abs().max() > 0.02  # what BF16 would have made of it
    q.grad = p.grad.clone()
    kept = p.grad.clone()
    optimizer.step()
    reference.step()
    assert torch.equal(p, q.bfloat16()) and torch.equal(p.grad, kept)
    handle.detach()
    assert p.grad.dtype is BF16
    (p * batches[0]).sum().backward()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 9), nn.Linear(9, 6)
        self.down.weight.data.mul_(2)

    def forward(self, x):
        return self.down(torch.relu(self.up(x))) + self.up.weight.sum()


@pytest.mark.parametrize("cls", [optim.AdamW, optim.SGD, optim.Adafactor, optim.Muon])
@pytest.mark.parametrize("way", ["stochastic", "split"])
def test_released_gradients_give_the_same_bits(cls, way, sliced):
    results = []
    for release in (False, True):
        torch.manual_seed(0)
        model = Net().bfloat16()
        model.up.bias.data = model.up.bias.data.float()  # one parameter gets a plain step
        if cls is optim.Muon:
            named = [(n, p) for n, p in model.named_parameters() if p.dim() == 2]
        else:
            named = list(model.named_parameters())
        optimizer = cls(named, lr=1e-2)
        scheduler = optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        hmpx.attach(optimizer, way, release_gradients=release)
        for step in range(3):
            optimizer.zero_grad()
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step)).bfloat16()
            nn.functional.linear(
                torch.relu(nn.functional.linear(x, model.up.weight, model.up.bias.bfloat16())),
                model.down.weight,
                model.down.bias,
            ).float().square().sum().backward()
            if release:
                assert all(p.grad is None for _, p in named)
            optimizer.step()
            scheduler.step()
        assert optimizer.param_groups[0]["hmpx_step"] == 3
        results.append(weights(named))
    assert same(*results)


def test_released_gradients_refuse_to_accumulate_and_optimizers_that_look_across():
    model = Net().bfloat16()
    x = torch.randn(4, 6).bfloat16()
    with pytest.raises(hmpx.HmpxError, match=r"updates each parameter by itself \(Adadelta.*and LBFGS may look"):
        hmpx.attach(optim.LBFGS(model.parameters()), release_gradients=True)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    handle = hmpx.attach(optimizer, release_gradients=True)
    model(x).sum().backward()
    with pytest.raises(hmpx.HmpxError, match=r"a second gradient before optimizer.step\(\)"):
        model(x).sum().backward()
    handle.detach()
    model(x).sum().backward()
    assert model.up.weight.grad is not None


def test_an_optimizer_dies_in_the_middle_of_a_released_step():
    """Without a step after the last backward, its hooks would go on stepping beside those of its successor."""
    named = parameters()
    for _ in range(2):
        optimizer = optim.SGD(named, lr=0.25)
        hmpx.attach(optimizer, "nearest", release_gradients=True)
        before = weights(named)
        sum(p.sum() for _, p in named).backward()
        assert same(weights(named), [(w.float() - 0.25).bfloat16() for w in before])
        died = weakref.ref(optimizer)
        del optimizer
        gc.collect()
        assert died() is None


class RecentGradients(optim.Optimizer):
    """Steps by the last three gradients, which it keeps in a list."""

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            recent = self.state[p].setdefault("recent", [])
            recent.append(p.grad.clone())
            del recent[:-3]
            p.sub_(sum(recent), alpha=0.5)


def test_state_in_lists_that_was_cast_to_bf16_is_computed_with_in_fp32():
    """By hand: 1 + 2^-8 needs a bit more than BF16 has, so a sum of two of the list's in BF16 would be 1."""
    p = nn.Parameter(torch.zeros(3, dtype=BF16))
    optimizer = RecentGradients([("w", p)], {})
    for grad in (1.0, 2.0**-8, 0.0):
        hmpx.attach(optimizer, "master", state_dtype=BF16, use_master_weights_in_ckpt=True)
        p.grad = torch.full_like(p, grad)
        optimizer.step()
        last = masters_in(optimizer)[0]
        hmpx.detach(optimizer)
    assert torch.equal(last, torch.full((3,), -1.0 - 0.5 * (1 + 2.0**-8)))


def test_a_parameter_that_is_cast_to_fp32_takes_bf16_state_of_earlier_along():
    named = parameters()
    optimizer = optim.AdamW(named, lr=1e-2)
    for _ in range(2):  # what is detached holds its state in BF16
        hmpx.attach(optimizer)
        set_gradients(named, 0)
        optimizer.step()
        state = [optimizer.state[p]["exp_avg"].clone() for _, p in named]
        hmpx.detach(optimizer)
    hmpx.attach(optimizer)
    for _, p in named:
        p.grad, p.data = None, p.data.float()
    set_gradients(named, 1)
    optimizer.step()
    for (_, p), before in zip(named, state, strict=True):
        assert torch.equal(optimizer.state[p]["exp_avg"], before.bfloat16().float().lerp(p.grad, 1 - 0.9))


# Checkpoints


def _trained(way, steps, **options):
    """A BF16 model and its optimizer after some steps; `options` of the optimizer."""
    torch.manual_seed(0)
    named = list(Net().bfloat16().named_parameters())
    optimizer = options.pop("cls", optim.AdamW)(named, lr=1e-3, **options)
    hmpx.attach(optimizer, way)
    train(named, optimizer, 0, steps)
    return named, optimizer


@pytest.mark.parametrize("way", ["master", "split"])
@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("copied", [False, True])
def test_a_load_of_the_present_state_warns_of_nothing_and_loses_no_master(way, steps, copied, caplog):
    """As wrappers do when they are made (Accelerate's moves it to its device); the run goes on to the bit."""
    straight, optimizer = _trained(way, steps)
    train(straight, optimizer, steps, steps + 3)
    named, optimizer = _trained(way, steps)
    state = optimizer.state_dict()
    optimizer.load_state_dict(copy.deepcopy(state) if copied else state)
    assert not caplog.text
    train(named, optimizer, steps, steps + 3)
    assert same(weights(named), weights(straight))


@pytest.mark.parametrize("way", ["master", "split"])
def test_a_checkpoint_of_before_the_first_step_has_lost_no_master(way, caplog):
    fresh = _trained(way, 0)[1].state_dict()
    named, optimizer = _trained(way, 2)
    optimizer.load_state_dict(fresh)
    assert not caplog.text
    train(named, optimizer, 0, 2)  # from the BF16 weights, not from masters of another run
    _, reference = _trained(way, 0)
    start = [(name, nn.Parameter(w)) for name, w in zip(dict(named), weights(_trained(way, 2)[0]), strict=True)]
    reference = optim.AdamW(start, lr=1e-3)
    hmpx.attach(reference, way)
    train(start, reference, 0, 2)
    assert same(weights(named), weights(start))


@pytest.mark.parametrize("options", [{}, {"cls": optim.SGD}, {"cls": optim.SGD, "momentum": 0.9}])
def test_a_state_of_another_moment_without_masters_warns(options, caplog):
    _, later = _trained("master", 3, **options)
    _, optimizer = _trained("master", 2, **options)
    optimizer.load_state_dict(copy.deepcopy(later.state_dict()))
    assert caplog.text.count("the checkpoint has no masters") == 1
    if not optimizer.state_dict()["state"]:  # nothing to tell two runs by
        optimizer.load_state_dict(optimizer.state_dict())
        assert caplog.text.count("the checkpoint has no masters") == 2


@pytest.mark.parametrize("way", ["stochastic", "nearest", "master", "split"])
@pytest.mark.parametrize("state_dtype", [torch.float32, BF16])
@pytest.mark.parametrize("model_first", [True, False])
def test_a_resumed_run_is_the_run(way, state_dtype, model_first, tmp_path):
    options = {"state_dtype": state_dtype, "seed": 9, "use_master_weights_in_ckpt": way in ("master", "split")}

    def fresh(seed):
        named = parameters()
        optimizer = optim.AdamW(named, lr=1e-2)
        hmpx.attach(optimizer, way, **{**options, "seed": seed})
        return named, optimizer

    named, optimizer = fresh(9)
    train(named, optimizer, 0, 3)
    torch.save({"weights": weights(named), "optimizer": optimizer.state_dict()}, tmp_path / "checkpoint.pt")
    train(named, optimizer, 3, 6)

    saved = torch.load(tmp_path / "checkpoint.pt")
    resumed, loaded = fresh(None)

    def load_model():
        with torch.no_grad():
            for (_, p), weight in zip(resumed, saved["weights"], strict=True):
                p.copy_(weight)

    if model_first:
        load_model()
    loaded.load_state_dict(saved["optimizer"])
    if not model_first:
        load_model()
    train(resumed, loaded, 3, 6)
    assert same(weights(named), weights(resumed))
    for (_, p), (_, q) in zip(named, resumed, strict=True):
        assert all(torch.equal(v, loaded.state[q][k]) for k, v in optimizer.state[p].items())


@pytest.mark.parametrize("one, other", [("master", "split"), ("split", "master")])
@pytest.mark.parametrize("model_last", [True, False])
def test_a_checkpoint_moves_between_master_and_split(one, other, model_last):
    named = parameters()
    optimizer = optim.AdamW(named, lr=1e-2)
    hmpx.attach(optimizer, one, use_master_weights_in_ckpt=True)
    train(named, optimizer, 0, 3)
    with torch.no_grad():  # a master between two BF16 numbers, which the two ways round differently
        store = optimizer._hmpx_attachment._updates.store
        masters = masters_in(optimizer)
        masters[0][0, 0] = 1 + 2**-8
        named[0][1][0, 0] = 1 if one == "master" else 1 + 2**-7
        store.set_masters(named[0][1], masters[0])
    saved, before = copy.deepcopy(optimizer.state_dict()), weights(named)
    moved = parameters()
    loaded = optim.AdamW(moved, lr=1e-2)
    hmpx.attach(loaded, other, use_master_weights_in_ckpt=True)
    if model_last:
        loaded.load_state_dict(saved)
    with torch.no_grad():
        for (_, p), weight in zip(moved, before, strict=True):
            p.copy_(weight)
    if not model_last:
        loaded.load_state_dict(saved)
    again = masters_in(loaded)
    assert same(again, masters) and again[0][0, 0] == 1 + 2**-8
    train(named, optimizer, 3, 5)
    train(moved, loaded, 3, 5)
    assert same(masters_in(optimizer), masters_in(loaded))


def test_masters_are_in_the_file_only_when_asked_for(caplog):
    named = parameters()
    optimizer = optim.AdamW(named, lr=1e-2)
    hmpx.attach(optimizer, "master")
    train(named, optimizer, 0, 2)
    saved = optimizer.state_dict()
    assert set(saved["state"][0]) == {"step", "exp_avg", "exp_avg_sq"}
    train(named, optimizer, 2, 3)  # what is saved is not what is here any more
    optimizer.load_state_dict(saved)
    assert "has no masters (it was saved without use_master_weights_in_ckpt, or" in caplog.text
    before = weights(named)
    optimizer.param_groups[0].update(lr=0.0, weight_decay=0.0)
    train(named, optimizer, 2, 3)
    assert same(weights(named), before)  # the masters start from the BF16 weights again


def test_a_plain_optimizer_reads_what_is_its_own(caplog):
    named = parameters()
    optimizer = optim.AdamW(named, lr=1e-2)
    hmpx.attach(optimizer, "master", use_master_weights_in_ckpt=True)
    train(named[:2], optimizer, 0, 2)  # the third parameter has no gradient, so no state
    saved = optimizer.state_dict()
    assert 2 not in saved["state"]
    plain = optim.AdamW(parameters(torch.float32), lr=1e-2)
    plain.load_state_dict(saved)
    twin = [(n, p) for n, p in zip("abc", plain.param_groups[0]["params"], strict=True)]
    train(twin, plain, 2, 4)
    stochastic = optim.AdamW(parameters(), lr=1e-2)
    hmpx.attach(stochastic)
    stochastic.load_state_dict(saved)
    assert "masters of 2 parameters are dropped" in caplog.text
    assert "hmpx_master" not in stochastic.state[stochastic.param_groups[0]["params"][0]]


def test_a_checkpoint_of_another_layout_changes_nothing():
    named, others = parameters(), parameters(sizes=((6, 8), (5, 7), (11,)))
    optimizer, other = optim.AdamW(named, lr=1e-2), optim.AdamW(others, lr=1e-2)
    for each, its in ((optimizer, named), (other, others)):
        hmpx.attach(each, "split", use_master_weights_in_ckpt=True)
        train(its, each, 0, 2)
    before = copy.deepcopy((weights(named), optimizer.state_dict()))
    with pytest.raises(hmpx.HmpxError, match=r"masters of parameter 0 have the shape \(6, 8\), the parameter \(8, 6\)"):
        optimizer.load_state_dict(other.state_dict())
    shorter = optimizer.state_dict()
    shorter["param_groups"][0]["params"] = [0, 1]
    with pytest.raises(ValueError, match="doesn't match the size"):
        optimizer.load_state_dict(shorter)
    after = optimizer.state_dict()
    assert same(weights(named), before[0])
    assert all(same(after["state"][i].values(), before[1]["state"][i].values()) for i in range(3))


# The optimizer around it


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "copied with the parameters"])
@pytest.mark.parametrize("way", ["stochastic", "master", "split"])
def test_copies_and_pickles_are_attached(how, way):
    named = parameters()
    optimizer = optim.AdamW([p for _, p in named], lr=1e-2)
    hmpx.attach(optimizer, way, names=[n for n, _ in named], use_master_weights_in_ckpt=way != "stochastic")
    train(named, optimizer, 0, 2)
    if how == "pickle":
        twin = pickle.loads(pickle.dumps(optimizer))
    elif how == "deepcopy":
        twin = copy.deepcopy(optimizer)
    else:
        copied, twin = copy.deepcopy((named, optimizer))
        assert copied[0][1] is twin.param_groups[0]["params"][0]
    theirs = [(n, p) for (n, _), p in zip(named, twin.param_groups[0]["params"], strict=True)]
    train(named, optimizer, 2, 4)
    train(theirs, twin, 2, 4)
    assert same(weights(named), weights(theirs)) and theirs[0][1] is not named[0][1]
    hmpx.detach(twin)
    assert optimizer._hmpx_attachment.active


def test_detach_leaves_a_plain_optimizer():
    named, twin = parameters(), parameters()
    optimizer = optim.AdamW(named, lr=1e-2)
    before = set(vars(optimizer)), set(optimizer.param_groups[0])
    handle = hmpx.attach(optimizer, "master", state_dtype=torch.float32)
    assert "weights='master'" in repr(handle) and handle.active
    train(named, optimizer, 0, 2)
    hmpx.detach(optimizer)
    hmpx.detach(optimizer)
    assert not handle.active and "detached" in repr(handle)
    assert (set(vars(optimizer)), set(optimizer.param_groups[0])) == before
    assert not optimizer._optimizer_state_dict_post_hooks and not optimizer._optimizer_load_state_dict_pre_hooks
    assert {v.dtype for v in optimizer.state[named[0][1]].values() if v.dim()} == {BF16}
    reference = optim.AdamW(twin, lr=1e-2)
    reference.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    with torch.no_grad():
        for (_, p), (_, q) in zip(named, twin, strict=True):
            q.copy_(p)
    train(named, optimizer, 2, 4)
    train(twin, reference, 2, 4)
    assert same(weights(named), weights(twin))
    assert step_hooks._users == 0


def test_a_forgotten_attachment_leaves_torch_as_it_was():
    optimizer = optim.SGD(parameters(), lr=0.1)
    hmpx.attach(optimizer)
    del optimizer
    gc.collect()
    with hmpx.disable_casts():
        pass
    assert step_hooks._users == 0 and optim.Optimizer.profile_hook_step.__module__ == "torch.optim.optimizer"


def test_parameters_added_later_are_taken_over(sliced):
    named = parameters()
    late = nn.Parameter(torch.ones(70, dtype=BF16))
    optimizer = optim.SGD([p for _, p in named], lr=1e-3)
    hmpx.attach(optimizer, names=[n for n, _ in named], use_fp32_grad_acc=hasattr(torch.Tensor, "grad_dtype"))
    (sum(p.float().sum() for _, p in named)).backward()
    optimizer.step()
    optimizer.add_param_group({"params": [late], "lr": 1e-3})
    late.float().sum().backward()
    if hasattr(torch.Tensor, "grad_dtype"):
        assert late.grad.dtype is torch.float32
    optimizer.step()
    assert torch.equal(late, hmpx.stochastic_round(torch.full((70,), 1 - 1e-3), seed=0, step=1, name="3"))


def test_two_optimizers_on_one_model():
    named, twin = parameters(), parameters()
    pairs = []
    for each in (named, twin):
        pairs.append((optim.SGD(each[:2], lr=1e-2), optim.AdamW(each[1:], lr=1e-2)))
    hmpx.attach(pairs[0][0])
    hmpx.attach(pairs[0][1], "master")
    for step in range(3):
        set_gradients(named, step)
        set_gradients(twin, step)
        pairs[0][0].step()
        pairs[0][1].step()
        with hmpx.disable_casts():
            pairs[1][0].step()
        assert torch.equal(named[0][1], twin[0][1])
    assert [o.param_groups[0]["hmpx_step"] for o in pairs[0]] == [3, 3]


class Failing(optim.SGD):
    def step(self, closure=None):
        super().step(closure)
        raise RuntimeError("half-way")


@pytest.mark.parametrize("way", ["stochastic", "master", "split"])
def test_a_step_that_raises_leaves_weights_and_masters(way):
    named = parameters()
    optimizer = Failing(named, lr=0.1)
    hmpx.attach(optimizer, way, use_master_weights_in_ckpt=way != "stochastic")
    set_gradients(named, 0)
    before = copy.deepcopy((weights(named), optimizer.state_dict()["state"]))
    grads = [p.grad.clone() for _, p in named]
    with pytest.raises(RuntimeError, match="half-way"):
        optimizer.step()
    assert same(weights(named), before[0]) and same([p.grad for _, p in named], grads)
    assert optimizer.state_dict()["state"] == before[1] == {} and "hmpx_step" not in optimizer.param_groups[0]


@pytest.mark.parametrize(
    "cls, broken, how",
    [
        (optim.AdamW, {"betas": None}, {"weights": "split"}),
        (optim.AdamW, {"betas": None}, {"fused": True}),
        (optim.Adafactor, {"eps": None}, {"weights": "split"}),
    ],
)
def test_a_broken_group_shows_before_anything_is_written(cls, broken, how, monkeypatch):
    monkeypatch.setattr(sliced_step, "_FLOOR", 64)
    named = parameters(sizes=((30, 30), (20, 20), (7,), (25, 25), (3, 3)))
    params = [p for _, p in named]
    optimizer = cls([{"params": params[:3]}, {"params": params[3:]}], lr=1e-2)
    hmpx.attach(optimizer, **how)
    train(named, optimizer, 0, 1)
    optimizer.param_groups[1].update(broken)
    set_gradients(named, 1)
    before = weights(named)
    with pytest.raises(TypeError):
        optimizer.step()
    assert same(weights(named), before) and optimizer.param_groups[0]["hmpx_step"] == 1
    assert [p for g in optimizer.param_groups for p in g["params"]] == params and set(optimizer.state) == set(params)


def test_fused_grad_scaler_skips_are_not_counted():
    named = parameters()
    optimizer = optim.AdamW(named, fused=True)
    hmpx.attach(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(1))
    set_gradients(named, 0)
    named[0][1].grad[0, 0] = float("inf")
    before = weights(named)
    scaler.step(optimizer)
    scaler.update()
    assert same(weights(named), before) and "hmpx_step" not in optimizer.param_groups[0]
    set_gradients(named, 1)
    scaler.step(optimizer)
    assert optimizer.param_groups[0]["hmpx_step"] == 1 and not same(weights(named), before)


# Names, and what is refused


def test_names_come_from_the_model_a_list_or_the_optimizer():
    results = []
    for source in ("named", "model", "list"):
        torch.manual_seed(0)
        model = Net().bfloat16()
        optimizer = optim.SGD(model.named_parameters() if source == "named" else model.parameters(), lr=1e-3)
        given = {"model": {"model": model}, "list": {"names": [n for n, _ in model.named_parameters()]}, "named": {}}
        hmpx.attach(optimizer, **given[source])
        train(list(model.named_parameters()), optimizer, 0, 2)
        results.append(weights(model.named_parameters()))
    assert same(*results[:2]) and same(*results[1:])


def test_a_compiled_model_has_the_names_of_the_model():
    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = Net().bfloat16()
        optimizer = optim.SGD(model.parameters(), lr=1e-3)
        hmpx.attach(optimizer, model=torch.compile(model) if compiled else model)
        train(list(model.named_parameters()), optimizer, 0, 2)
        results.append(weights(model.named_parameters()))
    assert same(*results)


def test_positions_instead_of_names_are_told_of_once(monkeypatch, caplog):
    monkeypatch.setattr(names, "_told_of_positions", False)
    p = nn.Parameter(torch.ones(300, dtype=BF16))
    optimizer = optim.SGD([nn.Parameter(torch.ones(1)), p], lr=1e-3)
    with caplog.at_level(logging.INFO, "hmpx"), hmpx.disable_casts():
        for _ in range(2):
            p.grad = torch.ones_like(p)
            optimizer.step()
    assert caplog.text.count("keyed by position") == 1
    first = hmpx.stochastic_round(torch.full((300,), 0.999), seed=0, step=0, name="1")
    second = hmpx.stochastic_round(first.float() - 1e-3, seed=0, step=1, name="1")
    assert torch.equal(p, second)


def test_attaching_again():
    optimizer = optim.SGD(parameters(), lr=0.1)
    handle = hmpx.attach(optimizer, "split", seed=3)
    assert hmpx.attach(optimizer, "split", seed=3) is handle
    with pytest.raises(
        hmpx.HmpxError, match=r"SGD: weights='split', seed=3> is in force; hmpx.detach\(optimizer\) first"
    ):
        hmpx.attach(optimizer, "master")
    assert handle.active


@pytest.mark.parametrize(
    "options, message",
    [
        ({"weights": "stochastik"}, "none of 'stochastic', .*did you mean 'stochastic'"),
        ({"seed": -1}, "seed -1 is out of range"),
        ({"seed": 2**64}, "out of range"),
        ({"state_dtype": torch.float16}, "state_dtype=torch.float16 is neither"),
        ({"state_dtype": "fp16"}, "state_dtype=torch.float16 is neither"),
        ({"state_dtype": "8bits"}, "state_dtype='8bits' is neither"),
        ({"use_master_weights_in_ckpt": True}, "'stochastic' has no masters"),
        ({"names": ["a", "b"]}, "2 names for 3 parameters"),
        ({"names": ["a", "b", "a"]}, "the name 'a' is given to parameters 0 and 2"),
        ({"names": ["a", "b", 3]}, "the name of parameter 2 is 3, not a string"),
        ({"model": nn.Linear(2, 2)}, "parameter 0 of the optimizer is not in the model"),
        ({"model": nn.Linear(2, 2), "names": []}, "not from both"),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_is_attached(options, message):
    optimizer = optim.SGD([p for _, p in parameters()], lr=0.1)
    before = set(vars(optimizer))
    with pytest.raises(hmpx.HmpxError, match=message):
        hmpx.attach(optimizer, **options)
    assert set(vars(optimizer)) == before and step_hooks._users == 0


def test_one_name_for_two_groups_is_refused():
    one, two = parameters()[:1], parameters()[:1]
    optimizer = optim.SGD([{"params": one}, {"params": two}], lr=0.1)
    with pytest.raises(hmpx.HmpxError, match=r"'layer0.weight' is given to parameters 0 and 1"):
        hmpx.attach(optimizer)


def test_no_optimizer_and_no_bf16(caplog):
    with pytest.raises(hmpx.HmpxError, match=r"needs a torch.optim.Optimizer, not Linear"):
        hmpx.attach(nn.Linear(2, 2))
    named, twin = parameters(torch.float32), parameters(torch.float32)
    optimizer, reference = optim.AdamW(named), optim.AdamW(twin)
    hmpx.attach(optimizer)
    assert "AdamW has no BF16 parameters" in caplog.text
    train(named, optimizer, 0, 2)
    train(twin, reference, 0, 2)
    assert same(weights(named), weights(twin))


def test_the_cast_scope_of_a_closure_is_that_outside_of_the_step():
    w = nn.Parameter(torch.ones(4, 4, dtype=BF16))
    optimizer = optim.SGD([w], lr=0.1)
    hmpx.attach(optimizer)
    seen = []

    def closure():
        optimizer.zero_grad()
        product = torch.ones(4, 4) @ torch.ones(4, 4)
        seen.append(product.dtype)
        loss = (product.to(BF16) @ w).sum()
        loss.backward()
        return loss

    with hmpx.convert():
        assert optimizer.step(closure) == 256.0
        with hmpx.disable_casts():
            optimizer.step(closure)
    optimizer.step(closure)
    assert seen == [BF16, BF16, torch.float32]


# Load hooks of the user


def by_names(optimizer, state_dict):
    """torch's documented recipe: a checkpoint whose parameters stand in another order, brought into this one's."""
    own = copy.deepcopy(optimizer.state_dict())
    theirs = {
        name: state_dict["state"].get(i)
        for group in state_dict["param_groups"]
        for name, i in zip(group["param_names"], group["params"], strict=True)
    }
    for group in own["param_groups"]:
        for name, i in zip(group["param_names"], group["params"], strict=True):
            own["state"].pop(i, None)
            if theirs[name] is not None:
                own["state"][i] = theirs[name]
    for key in ("hmpx_step", "hmpx_seed", "hmpx_masters"):
        own["param_groups"][0][key] = state_dict["param_groups"][0][key]
    return own


@pytest.mark.parametrize("way", ["master", "split"])
@pytest.mark.parametrize("prepend", [False, True])
@pytest.mark.parametrize("registered", ["before attach", "after"])
def test_masters_are_taken_from_what_hooks_of_the_user_make_of_a_checkpoint(way, prepend, registered):
    named = parameters()
    optimizer = optim.AdamW(named, lr=1e-2)
    hmpx.attach(optimizer, way, use_master_weights_in_ckpt=True)
    train(named, optimizer, 0, 3)
    saved = copy.deepcopy(optimizer.state_dict())
    turned = parameters()[::-1]
    loaded = optim.AdamW(turned, lr=1e-2)
    if registered == "before attach":
        loaded.register_load_state_dict_pre_hook(by_names, prepend=prepend)
    hmpx.attach(loaded, way, use_master_weights_in_ckpt=True)
    if registered == "after":
        loaded.register_load_state_dict_pre_hook(by_names, prepend=prepend)
    with torch.no_grad():
        for (_, p), (_, q) in zip(reversed(turned), named, strict=True):
            p.copy_(q)
    loaded.load_state_dict(saved)
    for number in range(3, 6):
        set_gradients(named, number)
        optimizer.step()
        for (_, p), (_, q) in zip(reversed(turned), named, strict=True):
            p.grad = q.grad.clone()
        loaded.step()
    assert same(weights(named), weights(turned[::-1]))
    assert same(masters_in(optimizer), masters_in(loaded)[::-1])


@pytest.mark.parametrize("prepend", [False, True])
def test_hooks_of_the_user_see_the_masters_that_are_saved(prepend):
    named = parameters()
    optimizer = optim.AdamW(named, lr=1e-2)
    seen = []

    def look(_, state_dict):
        seen.append("hmpx_master" in state_dict["state"][0])

    hmpx.attach(optimizer, "master", use_master_weights_in_ckpt=True)
    train(named, optimizer, 0, 1)
    optimizer.register_state_dict_post_hook(look, prepend=prepend)
    optimizer.state_dict()
    assert seen == [True]
