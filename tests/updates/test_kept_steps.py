"""A step in the batches of the one before, beside the same step that looks at everything each time."""

from __future__ import annotations

import weakref

import pytest
import torch
from lion_pytorch import Lion
from torch import optim

from hmpx.bench.measure import memory
from hmpx.errors import HmpxError
from hmpx.rounding import native
from hmpx.updates.stepping import batching, optimizer_scope
from tests.support.kept_steps import ADAM, BF16, everything, give_gradients, made, same
from tests.support.training import needs_grad_dtype

pytestmark = pytest.mark.skipif(native.library() is None, reason="no C compiler here, so no step is remembered")


CASES = {
    "AdamW": (*ADAM, {}),
    "AdamW, BF16 state": (*ADAM, {"state_dtype": BF16}),
    "AdamW, FP32 parameters beside": (*ADAM, {"more": (torch.ones(30),)}),
    "AdamW, FP32 gradients": (*ADAM, {"use_fp32_grad_acc": True}),
    "AdamW, nearest": (*ADAM, {"weights": "nearest"}),
    "AdamW, master": (*ADAM, {"weights": "master"}),
    "AdamW, split": (*ADAM, {"weights": "split", "state_dtype": BF16}),
    "AdamW, split8": (*ADAM, {"weights": "split8"}),
    "AdamW, split, state as it is": (*ADAM, {"weights": "split"}),
    "AdamW, 8-bit state": (*ADAM, {"state_dtype": "8bit"}),
    "AdamW, master, 8-bit state": (*ADAM, {"weights": "master", "state_dtype": "8bit"}),
    "AdamW, nearest, 8-bit state": (*ADAM, {"weights": "nearest", "state_dtype": "8bit"}),
    "AdamW, master, BF16 state": (*ADAM, {"weights": "master", "state_dtype": BF16}),
    "AdamW, rules": (*ADAM, {"parameters": {"p1": {"weights": "split"}, "p4": {"state_dtype": BF16}}}),
    "SGD": (optim.SGD, {}, {}),
    "SGD momentum": (optim.SGD, {"momentum": 0.9}, {"state_dtype": BF16}),
    "NAdam": (optim.NAdam, {}, {}),
    "ASGD, each parameter by itself": (optim.ASGD, {"foreach": False}, {"state_dtype": BF16}),
}


@pytest.mark.parametrize("number, case", list(enumerate(CASES)), ids=str)
def test_a_remembered_step_has_the_bits_of_one_that_is_not(number, case, monkeypatch):
    cls, options, settings = CASES[case]
    if settings.get("use_fp32_grad_acc") and not hasattr(torch.Tensor, "grad_dtype"):
        pytest.skip("FP32 gradients of BF16 weights want torch 2.13")
    monkeypatch.setattr(batching, "_FLOOR", 64 if number % 2 else 1 << 17)  # in slices, and whole
    results = []
    for forget in (False, True):
        params, optimizer, handle = made(cls, options, **settings)
        for turn in range(5):
            give_gradients(optimizer, turn, torch.float32 if settings.get("use_fp32_grad_acc") else None)
            if forget:
                handle.look_again()
            optimizer.step()
        results.append(everything(params, optimizer, handle))
        kept = 4 if case == "SGD" else 3  # once all state is there
        assert handle.kept_steps == (0 if forget else kept)
    assert same(*results)


def test_a_step_is_remembered_on_the_cpu_whatever_the_default_device_is():
    params, optimizer, _ = made(*ADAM)
    for turn in range(4):
        give_gradients(optimizer, turn)
        with torch.device("cpu" if turn == 0 else "meta"):  # the first step makes the count of steps there
            optimizer.step()
    assert optimizer.state[params[0]]["step"] == 4


@needs_grad_dtype
def test_between_two_steps_nothing_holds_gradients():
    """Those in FP32 are shown to the optimizer as they are."""
    params, optimizer, handle = made(*ADAM)
    for turn in range(4):
        for p in params:
            p.grad_dtype = torch.float32
        give_gradients(optimizer, turn, torch.float32)
        optimizer.step()
    held = [weakref.ref(p.grad) for p in params]
    for p in params:
        p.grad = None
    assert handle.kept_steps == 2 and not any(grad() is not None for grad in held)


def test_between_two_steps_what_is_kept_has_no_memory():
    _, optimizer, handle = made(*ADAM)
    for turn in range(4):
        give_gradients(optimizer, turn)
        peak, stays = memory(optimizer.step, torch.device("cpu"))
    assert handle.kept_steps == 2 and stays == 0 < peak


@pytest.mark.parametrize("turns, fused", [(0, False), (1, True), (4, False), (4, True)])
def test_a_gradient_without_memory_is_an_error(fused, turns):
    params, optimizer, _ = made(*ADAM, fused=fused)
    for turn in range(turns + 1):
        give_gradients(optimizer, turn)
        if turn < turns:
            optimizer.step()
    params[1].grad.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="not allocated"):
        optimizer.step()


@pytest.mark.parametrize("fused", [False, True])
def test_a_gradient_whose_sign_is_turned_by_a_flag(fused):
    results = []
    for negative in (torch.neg, torch._neg_view):
        params, optimizer, _ = made(*ADAM, fused=fused)
        for turn in range(5):
            give_gradients(optimizer, turn)
            for p in params:
                p.grad = negative(p.grad)
            optimizer.step()
        results.append([p.detach() for p in params])
    assert all(torch.allclose(a, b, atol=1e-2, rtol=2**-7) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("weights", ["master", "split"])
def test_masters_of_an_optimizer_that_writes_to_them_unseen_and_raises(weights):
    """Lion decays ``p.data`` first, which has no version."""
    params, optimizer, handle = made(Lion, {"weight_decay": 0.5}, weights=weights)
    for turn in range(4):
        give_gradients(optimizer, turn)
        optimizer.step()
    before = [handle.masters_of(p) for p in params]
    optimizer.param_groups[0]["betas"] = ("fast", 0.99)
    with pytest.raises(TypeError):
        optimizer.step()
    assert handle.kept_steps == 3 and same([handle.masters_of(p) for p in params], before)


@pytest.mark.parametrize("turns, momentum", [(1, 0.9), (4, 0.0), (4, 0.9)])
def test_an_error_after_a_fused_kernel_that_raises_no_versions(momentum, turns):
    params, optimizer, handle = made(optim.SGD, {"momentum": momentum, "fused": True}, weights="master")
    for turn in range(turns):
        give_gradients(optimizer, turn)
        optimizer.step()
    before = [handle.masters_of(p) for p in params]
    optimizer.param_groups[1]["lr"] = "fast"
    with pytest.raises(TypeError):
        optimizer.step()
    optimizer.param_groups[1]["lr"] = 1e-2
    if momentum:
        with pytest.raises(HmpxError, match="was interrupted by TypeError in the middle"):
            optimizer.step()
    else:
        assert same(before, [handle.masters_of(p) for p in params])
        optimizer.step()


class Odd(optim.SGD):
    """Does something after its steps, once it is told what."""

    act = None

    def step(self, closure=None):
        super().step(closure)
        for p in (p for group in self.param_groups for p in group["params"]):
            if self.act is not None:
                self.act(p, self.state[p])


@pytest.fixture
def odd(monkeypatch):
    """Three steps of `Odd`, in batches."""
    monkeypatch.setitem(optimizer_scope.SCOPES, Odd, "element")

    def stepped(momentum=0.9, forget=False, **settings):
        params, optimizer, handle = made(Odd, {"momentum": momentum}, **settings)
        for turn in range(3):
            give_gradients(optimizer, turn)
            if forget:
                handle.look_again()
            optimizer.step()
        return params, optimizer, handle

    return stepped


def raises(p, state):
    if p.numel() == 5:
        raise ZeroDivisionError


ACTS = {
    "new tensors": lambda p, state: state.update(momentum_buffer=state["momentum_buffer"] + 1),
    "more tensors": lambda p, state: state.update(more=p.detach() * 2, count=state.get("count", torch.zeros(())) + 1),
    "written gradients": lambda p, state: p.grad.mul_(0.5),
    "new gradients": lambda p, state: setattr(p, "grad", p.grad * 0.25),
    "no gradients": lambda p, state: setattr(p, "grad", None),
}


@pytest.mark.parametrize("number, what", list(enumerate(ACTS)), ids=str)
@pytest.mark.parametrize("floor", [64, 1 << 17])
def test_what_an_optimizer_does_for_the_first_time_is_seen(number, what, floor, odd, monkeypatch):
    monkeypatch.setattr(batching, "_FLOOR", floor)
    results = []
    for forget in (False, True):
        state_dtype = BF16 if (floor == 64) == number % 2 else torch.float32
        params, optimizer, handle = odd(forget=forget, state_dtype=state_dtype)
        optimizer.act = ACTS[what]
        for turn in range(3, 6):
            give_gradients(optimizer, turn)
            if forget:
                handle.look_again()
            optimizer.step()
        grads = [p.grad for p in params if p.grad is not None]
        results.append([*everything(params, optimizer, handle), *grads])
        assert forget or handle.kept_steps >= 2
    assert same(*results)


def test_an_error_leaves_what_was_not_written_as_it_was(odd):
    params, optimizer, handle = odd(momentum=0.0)  # keeps no state, so that nothing of it is written
    before, groups = everything(params, optimizer, handle), [list(group["params"]) for group in optimizer.param_groups]
    before, grads = [tensor.clone() for tensor in before], [p.grad for p in params]
    optimizer.act = raises
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    assert handle.kept_steps >= 2 and same(before, everything(params, optimizer, handle))
    assert [list(group["params"]) for group in optimizer.param_groups] == groups
    assert all(p.grad is grad for p, grad in zip(params, grads, strict=True))
    optimizer.act = None
    optimizer.step()


@pytest.mark.parametrize("weights", ["stochastic", "master"])
def test_an_error_in_the_middle_is_marked(weights, odd):
    params, optimizer, _ = odd(weights=weights)
    before = [p.detach().clone() for p in params]
    optimizer.act = raises
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    assert set(optimizer.state) == set(params)
    assert same(before, [p.detach() for p in params])
    with pytest.raises(HmpxError, match="step 3 of Odd was interrupted by ZeroDivisionError in the middle: 'p0'"):
        optimizer.step()


def test_masters_are_stepped_where_they_are(monkeypatch):
    seen, begin = set(), optim.AdamW._init_group

    def told(self, group, *lists):
        seen.update(p.untyped_storage().data_ptr() for p in group["params"])
        return begin(self, group, *lists)

    monkeypatch.setattr(optim.AdamW, "_init_group", told)
    _, optimizer, handle = made(*ADAM, weights="master")
    for turn in range(4):
        give_gradients(optimizer, turn)
        seen.clear()
        optimizer.step()
    assert seen == {tensor.untyped_storage().data_ptr() for tensor in handle.beside()}
