"""What an attachment wants of its parameters is its own: others come and go, and parameters change, and it holds."""

import copy
import gc
import itertools
import pickle
import threading

import pytest
import torch
from torch import nn, optim

import hmpx
from hmpx.updates import gradients, step_hooks
from hmpx.updates.stepping.released import Released
from tests.support.training import needs_grad_dtype, parameters, set_gradients

BF16, FP32 = torch.bfloat16, torch.float32
PRISTINE = torch.utils.swap_tensors, optim.Optimizer.load_state_dict


@pytest.fixture(autouse=True)
def nothing_is_left():
    yield
    gc.collect()
    hmpx.restore()
    assert not gradients._claimed and not gradients._ended and not step_hooks._is_installed
    assert (torch.utils.swap_tensors, optim.Optimizer.load_state_dict) == PRISTINE


def gradient_dtype(p):
    p.grad = None
    (p * 2).sum().backward()
    return p.grad.dtype


@needs_grad_dtype
@pytest.mark.parametrize(
    "order, how", list(zip(itertools.permutations(range(3)), itertools.cycle(["detached", "collected"])))
)
def test_the_last_of_those_that_live_decides_in_whatever_order_they_end(order, how):
    wants = True, False, True
    p = nn.Parameter(torch.ones(3, dtype=BF16))
    living = {}
    for i, want in enumerate(wants):
        living[i] = optim.SGD([p], lr=0.1)
        hmpx.attach(living[i], use_fp32_grad_acc=want)
        assert gradient_dtype(p) is (FP32 if want else BF16)
    for i in order:
        if how == "detached":
            hmpx.detach(living.pop(i))
        else:
            del living[i]
            gc.collect()
        expected = FP32 if living and wants[max(living)] else BF16
        assert gradient_dtype(p) is expected, (i, sorted(living))
    assert p.grad_dtype is BF16


@needs_grad_dtype
def test_what_another_ends_with_leaves_a_gradient_as_it_is():
    p = nn.Parameter(torch.ones(3, dtype=BF16))
    old, new = optim.SGD([p], lr=0.1), optim.SGD([p], lr=0.1)
    for each in (old, new):
        hmpx.attach(each, use_fp32_grad_acc=True)
    (p * (1 + 2**-7)).sum().backward()
    (p * 2**-7).sum().backward()
    p.grad += 2**-12  # which BF16 has no room for
    before = p.grad
    hmpx.detach(new)
    assert p.grad is before and (before == 1 + 2**-6 + 2**-12).all()


def test_only_the_last_releases_and_then_the_one_before_it():
    p, q = (nn.Parameter(torch.ones(3, dtype=BF16)) for _ in range(2))
    first, second = optim.SGD([p, q], lr=0.5), optim.SGD([p], lr=0.25)
    hmpx.attach(first, release_gradients=True)
    hmpx.attach(second, release_gradients=True)
    (p + q).sum().backward()
    assert (p == 0.75).all() and (q == 0.5).all()
    second.step()
    hmpx.detach(second)
    first.step()
    p.sum().backward()
    assert (p == 0.25).all() and type(p.grad) is Released


@pytest.mark.parametrize("how", ["detached", "collected"])
def test_state_is_loaded_in_fp32_after_another_optimizer_has_ended(how):
    named = parameters()
    old, new = optim.AdamW(named), optim.AdamW(named)
    for each in (old, new):
        hmpx.attach(each)
    set_gradients(named, 0)
    new.step()
    saved = copy.deepcopy(new.state_dict())
    for group in saved["param_groups"]:
        group.pop("hmpx_step"), group.pop("hmpx_seed")  # as a plain FP32 run would have saved it
    if how == "detached":
        hmpx.detach(old)
    del old, each
    gc.collect()
    new.load_state_dict(saved)
    for i, (_, p) in enumerate(named):
        assert torch.equal(new.state[p]["exp_avg"], saved["state"][i]["exp_avg"])
        assert new.state[p]["exp_avg"].dtype is FP32


def test_a_plain_optimizer_of_the_same_parameters_loads_as_torch_does():
    named, twin = parameters(), parameters(FP32)
    reference, plain, attached = optim.AdamW(twin), optim.AdamW(named), optim.AdamW(named)
    hmpx.attach(attached)
    set_gradients(twin, 0)
    reference.step()
    plain.load_state_dict(reference.state_dict())
    assert {plain.state[p]["exp_avg"].dtype for _, p in named} == {BF16}


@needs_grad_dtype
@pytest.mark.parametrize("how", ["pickle", "copy"])
def test_copies_have_claims_of_their_own(how):
    p = nn.Parameter(torch.ones(3, dtype=BF16))
    optimizer = optim.SGD([p], lr=0.1)
    hmpx.attach(optimizer, use_fp32_grad_acc=True)
    twin = pickle.loads(pickle.dumps(optimizer)) if how == "pickle" else getattr(copy, how)(optimizer)
    q = twin.param_groups[0]["params"][0]
    assert gradient_dtype(q) is FP32
    twin.step()
    del twin
    gc.collect()
    assert gradient_dtype(p) is FP32


def test_an_optimizer_that_is_collected_while_another_one_attaches_lets_go_afterwards(monkeypatch):
    """The garbage collector may run anywhere; here it runs while the other one holds the lock."""
    p = nn.Parameter(torch.ones(3, dtype=BF16))
    old = {"optimizer": optim.SGD([p], lr=0.1)}
    new = optim.SGD([p], lr=0.5)
    hmpx.attach(old["optimizer"], release_gradients=True)
    exchange_of = gradients.exchange_of

    def collecting(modules):
        assert gradients._lock.locked()
        old.clear()
        gc.collect()
        return exchange_of(modules)

    monkeypatch.setattr(gradients, "exchange_of", collecting)
    attaching = threading.Thread(target=hmpx.attach, args=(new,), daemon=True)
    attaching.start()
    attaching.join(20)
    waits_for_itself = attaching.is_alive()
    if waits_for_itself:
        gradients._lock.release()
        attaching.join()
    assert not waits_for_itself and not old and len(gradients._claimed[id(p)].claims) == 1
    p.sum().backward()
    assert (p == 1).all() and (p.grad == 1).all()  # nobody releases any more


@needs_grad_dtype
def test_a_parameter_that_leaves_the_optimizer_is_as_it_was():
    p, q = (nn.Parameter(torch.ones(3, dtype=BF16)) for _ in range(2))
    optimizer = optim.SGD([{"params": [p]}, {"params": [q]}], lr=0.5)
    hmpx.attach(optimizer, use_fp32_grad_acc=True)
    optimizer.param_groups.pop(0)
    q.grad = torch.ones(3)
    optimizer.step()
    assert gradient_dtype(p) is BF16 and gradient_dtype(q) is FP32
