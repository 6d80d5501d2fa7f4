"""What becomes of an attachment: copied, pickled, given more parameters, detached, forgotten."""

from __future__ import annotations

import copy
import gc
import pickle

import pytest
import torch
from torch import nn, optim

import hmpx
from hmpx.updates import step_hooks
from tests.support.training import (
    parameter,
    parameters,
    same,
    set_gradients,
    step_by,
    train,
    weights,
)

BF16 = torch.bfloat16


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


class Copying(optim.SGD):
    def __deepcopy__(self, memo):
        twin = self.__class__.__new__(self.__class__)
        memo[id(self)] = twin
        twin.__dict__.update(copy.deepcopy({k: v for k, v in self.__dict__.items() if "hook" not in k}, memo))
        for key in (k for k in self.__dict__ if "hook" in k):
            setattr(twin, key, type(getattr(self, key))())
        return twin


class WholeState(optim.SGD):
    def __getstate__(self):
        return self.__dict__


def test_copies_that_take_every_attribute_along_step_themselves():
    p = parameter(4)
    optimizer = Copying([p], lr=0.5)
    hmpx.attach(optimizer)
    twin = copy.deepcopy(optimizer)
    step_by(twin)
    assert (p == 1).all() and (twin.param_groups[0]["params"][0] == 0.5).all()
    whole = WholeState([p], lr=0.5)
    hmpx.attach(whole)
    again = pickle.loads(pickle.dumps(whole))
    step_by(again)
    assert (again.param_groups[0]["params"][0] == 0.5).all()


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


def test_lbfgs_attached_and_detached_in_the_middle():
    p = parameter(6)
    optimizer = optim.LBFGS([p], lr=0.1, max_iter=3)

    def closure():
        optimizer.zero_grad()
        loss = (p.float() ** 2).sum()
        loss.backward()
        return loss

    before = closure().item()
    for _ in range(2):
        optimizer.step(closure)
        hmpx.attach(optimizer)
        optimizer.step(closure)
        hmpx.detach(optimizer)
    assert closure().item() < before


def test_a_grad_dtype_of_the_users_own_comes_back():
    if not hasattr(torch.Tensor, "grad_dtype"):
        pytest.skip("torch before 2.13 has no grad_dtype")
    p = parameter(4)
    p.grad_dtype = None
    handle = hmpx.attach(optim.SGD([p], lr=0.1), use_fp32_grad_acc=True)
    assert p.grad_dtype is torch.float32 or handle.optimizer is None
    handle.detach()
    assert p.grad_dtype is None


def test_a_forgotten_attachment_leaves_torch_as_it_was():
    optimizer = optim.SGD(parameters(), lr=0.1)
    hmpx.attach(optimizer)
    del optimizer
    gc.collect()
    with hmpx.disable_casts():
        pass
    assert step_hooks._users == 0 and optim.Optimizer.profile_hook_step.__module__ == "torch.optim.optimizer"


@pytest.mark.parametrize("how", ["release_gradients", "use_fp32_grad_acc"])
def test_a_forgotten_optimizer_leaves_its_parameters_alone(how):
    if how == "use_fp32_grad_acc" and not hasattr(torch.Tensor, "grad_dtype"):
        pytest.skip("torch before 2.13 has no grad_dtype")
    model = nn.Linear(4, 4).bfloat16()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    hmpx.attach(optimizer, **{how: True})
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 4, dtype=BF16)).sum().backward()
    assert model.weight.grad.dtype is BF16
    optimizer.step()


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


@pytest.mark.parametrize("how", [{"weights": "split"}, {"weights": "master"}, {"weights": "stochastic"}])
@pytest.mark.parametrize("size", [10, 300_000])
def test_a_parameter_that_changes_its_size(how, size):
    p = parameter(1000)
    optimizer = optim.SGD([p], lr=0.5)
    hmpx.attach(optimizer, **how)
    step_by(optimizer)
    p.grad = None
    p.data = torch.ones(size, dtype=BF16)
    step_by(optimizer)
    assert (p == 0.5).all()


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


@pytest.mark.parametrize("then", ["pickle", "deepcopy", "save", "detach", "save, detach"])
@pytest.mark.parametrize("way", ["stochastic", "split"])
def test_whoever_takes_the_state_after_a_cast_takes_it_in_the_dtype_of_the_parameters(way, then):
    """The same bits as of an optimizer that takes the next step at once."""
    runs = []
    for seen_by_a_step in (True, False):
        named = parameters(sizes=((8, 6), (5,)))
        idle = "idle", parameter(3)  # whose state stays what the constructor makes of it
        optimizer = optim.Adagrad([*named, idle], lr=0.1, initial_accumulator_value=0.1)
        hmpx.attach(optimizer, way, state_dtype=BF16)
        train(named, optimizer, 0, 2)
        for _, p in (*named, idle):
            p.grad, p.data = None, p.data.float()
        if seen_by_a_step:
            optimizer.step()
        if then == "save":
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        elif "detach" in then:
            saved = copy.deepcopy(optimizer.state_dict()) if "save" in then else None
            hmpx.detach(optimizer)
            if saved is not None:
                optimizer.load_state_dict(saved)
        else:
            both = named, optimizer
            named, optimizer = copy.deepcopy(both) if then == "deepcopy" else pickle.loads(pickle.dumps(both))
        state = [value for of in optimizer.state.values() for value in of.values()]
        assert {value.dtype for value in state} == {torch.float32}
        assert any(torch.equal(value, torch.full((3,), 0.1)) for value in state)
        train(named, optimizer, 2, 4)
        runs.append(weights(named))
    assert same(*runs)


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
