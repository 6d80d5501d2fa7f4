"""What becomes of an attachment: copied, pickled, given more parameters, detached, forgotten."""

import copy
import gc
import pickle

import pytest
import torch
from torch import nn, optim

import hmpx
from hmpx.updates import step_hooks
from tests.support.same import same
from tests.support.training import needs_grad_dtype, parameter, parameters, step_by, train, weights

BF16 = torch.bfloat16


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


def test_detach_leaves_nothing_behind():
    named = parameters()
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
    assert not step_hooks._attached


def test_copies_that_take_every_attribute_along_step_themselves():
    p = parameter(4)
    optimizer = Copying([p], lr=0.5)
    hmpx.attach(optimizer)
    twin = copy.deepcopy(optimizer)
    step_by(twin)
    assert (p == 1).all() and (twin.param_groups[0]["params"][0] == 0.5).all()
    hmpx.detach(twin)
    assert optimizer._hmpx_attachment.active
    whole = WholeState([p], lr=0.5)
    hmpx.attach(whole)
    again = pickle.loads(pickle.dumps(whole))
    step_by(again)
    assert (again.param_groups[0]["params"][0] == 0.5).all()


@needs_grad_dtype
def test_a_grad_dtype_of_the_users_own_comes_back():
    p = parameter(4)
    p.grad_dtype = None
    handle = hmpx.attach(optim.SGD([p], lr=0.1), use_fp32_grad_acc=True)
    assert p.grad_dtype is torch.float32 or handle.optimizer is None
    handle.detach()
    assert p.grad_dtype is None


@pytest.mark.parametrize("way, size", [("split", 10), ("split", 300_000), ("master", 10), ("stochastic", 300_000)])
def test_a_parameter_that_changes_its_size(way, size):
    p = parameter(1000)
    optimizer = optim.SGD([p], lr=0.5)
    hmpx.attach(optimizer, way)
    step_by(optimizer)
    p.grad = None
    p.data = torch.ones(size, dtype=BF16)
    step_by(optimizer)
    assert (p == 0.5).all()


def test_detach_after_a_cast_leaves_the_state_that_a_step_before_it_would_leave():
    """That of a parameter which never had a gradient, as the constructor makes it, too."""
    runs = []
    for seen_by_a_step in (True, False):
        named, idle = parameters(sizes=((8, 6), (5,))), parameter(3)
        optimizer = optim.Adagrad([*named, ("idle", idle)], lr=0.1, initial_accumulator_value=0.1)
        hmpx.attach(optimizer, "split", state_dtype=BF16)
        train(named, optimizer, 0, 2)
        for p in (*(p for _, p in named), idle):
            p.grad, p.data = None, p.data.float()
        if seen_by_a_step:
            optimizer.step()
        hmpx.detach(optimizer)
        assert torch.equal(optimizer.state[idle]["sum"], torch.full((3,), 0.1))
        train(named, optimizer, 2, 4)
        runs.append(weights(named))
    assert same(*runs)


def test_what_stands_in_optimizers_stays_until_restore_finds_that_nobody_needs_it():
    original = optim.Optimizer.load_state_dict
    named = parameters()
    optimizer = optim.AdamW(named, lr=1e-2)
    with hmpx.disable_casts():
        installed = optim.Optimizer.load_state_dict
        hmpx.restore()
        assert installed is not original and optim.Optimizer.load_state_dict is installed, "the region needs it"
    with hmpx.disable_casts():
        assert optim.Optimizer.load_state_dict is installed, "installed once"
    hmpx.attach(optimizer)
    with hmpx.convert():
        pass
    hmpx.restore()
    assert optim.Optimizer.load_state_dict is installed, "the attached optimizer needs it"
    train(named, optimizer, 0, 2)
    assert optimizer.param_groups[0]["hmpx_step"] == 2
    hmpx.detach(optimizer)
    hmpx.restore()
    assert optim.Optimizer.load_state_dict is original


@pytest.mark.parametrize("converted", [False, True])
def test_an_attached_optimizer_that_nobody_holds_any_more_keeps_nothing_installed(converted):
    original = optim.Optimizer.load_state_dict
    hmpx.attach(optim.SGD(parameters(), lr=0.1))
    gc.collect()
    if converted:
        hmpx.convert()
    hmpx.restore()
    assert optim.Optimizer.load_state_dict is original


@pytest.mark.parametrize("name", ["updates", "watched", "places", "kept_steps"])
def test_what_is_gone_says_what_to_use(name):
    handle = hmpx.attach(optim.SGD([parameter(4)], lr=0.5))
    with pytest.raises(AttributeError, match=f"Attachment.{name} is gone: .*(doctor|DTensors|bench step)"):
        getattr(handle, name)
    assert not hasattr(handle, "nosuch")
    with pytest.raises(hmpx.HmpxError, match=r"attach\(places=\) is gone: .*DTensors.*names="):
        hmpx.attach(optim.SGD([parameter(4)], lr=0.5), places={"0": ((8,), (4,))})


def test_detach_takes_away_what_regions_have_left():
    named = parameters()
    optimizer = optim.AdamW(named, lr=1e-2)
    before = set(optimizer.param_groups[0])
    with hmpx.disable_casts():
        train(named, optimizer, 0, 2)
    assert optimizer.param_groups[0]["hmpx_step"] == 2
    hmpx.detach(optimizer)
    assert set(optimizer.param_groups[0]) == before
    with hmpx.disable_casts():
        train(named, optimizer, 2, 3)
    assert optimizer.param_groups[0]["hmpx_step"] == 3  # the parameters have taken two steps


@needs_grad_dtype
def test_a_parameter_that_was_cast_since_has_gradients_of_its_own_dtype_afterwards():
    """It was FP32 when its gradients were claimed, and so were they; now it is BF16."""
    layer = nn.Linear(3, 3)
    optimizer = optim.SGD(layer.parameters(), lr=0.1)
    hmpx.attach(optimizer, use_fp32_grad_acc=True)
    layer.bfloat16()
    hmpx.detach(optimizer)
    assert {p.grad_dtype for p in layer.parameters()} == {torch.bfloat16}
    layer(torch.ones(1, 3).bfloat16()).sum().backward()
    assert {p.grad.dtype for p in layer.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("fused", [None, False])
def test_a_rate_that_is_a_bf16_tensor_is_copied_to_fp32_and_said(when, fused, caplog):
    """In BF16, 0.01 times 0.999 is 0.01 again, so a scheduler would do nothing. The given tensor stays as it was."""
    rate, plain, p = torch.tensor(0.01, dtype=BF16), optim.SGD([parameter(3)], lr=0.0), parameter(3)
    hmpx.attach(plain)
    if when == "before":
        hmpx.detach(plain)  # nobody sees the optimizer being made
    optimizer = optim.AdamW([p], lr=rate, foreach=False)
    hmpx.attach(optimizer, fused=fused)
    scheduler = optim.lr_scheduler.ExponentialLR(optimizer, 0.999)
    for _ in range(10):
        step_by(optimizer)
        scheduler.step()
    held = optimizer.param_groups[0]["lr"]
    assert held.dtype is torch.float32 and rate.dtype is BF16 and rate == torch.tensor(0.01).bfloat16()
    assert float(held) == pytest.approx(float(rate) * 0.999**10, rel=1e-5)
    assert caplog.text.count("'lr' was given as a BF16 tensor") == 1
    optimizer.add_param_group({"params": [parameter(3)], "lr": torch.tensor(0.5, dtype=BF16)})
    assert optimizer.param_groups[1]["lr"].dtype is torch.float32 and caplog.text.count("'lr' was given") == 2
