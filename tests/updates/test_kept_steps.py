"""A step in the batches of the one before, beside the same step that looks at everything each time."""

from __future__ import annotations

import weakref

import pytest
import torch
from lion_pytorch import Lion
from torch import nn, optim

import hmpx
from hmpx.bench.measure import memory
from hmpx.errors import HmpxError
from hmpx.rounding import native
from hmpx.updates.stepping import batching, optimizer_scope

BF16 = torch.bfloat16
SIZES = ((40, 9), (201,), (5,), (130,), (64, 33), (10, 300))
pytestmark = pytest.mark.skipif(native.library() is None, reason="no C compiler here, so no step is remembered")


@pytest.fixture(params=[64, 1 << 17], ids=["slices", "whole"])
def floor(request, monkeypatch):
    monkeypatch.setattr(batching, "_FLOOR", request.param)


def made(cls, options, fp32=False, **settings):
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(size, generator=generator).bfloat16()) for size in SIZES]
    if fp32:
        params.insert(2, nn.Parameter(torch.randn(30, generator=generator)))
    groups = [{"params": params[:3]}, {"params": params[3:], "lr": 2e-2}]
    optimizer = cls(groups, lr=1e-2, **options)
    return params, optimizer, hmpx.attach(optimizer, names=[f"p{i}" for i in range(len(params))], **settings)


def grads_for(params, turn, dtype=None):
    generator = torch.Generator().manual_seed(10 + turn)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator).to(dtype or p.dtype)


def everything(params, optimizer):
    state = [value for p in params for value in optimizer.state.get(p, {}).values()]
    return [p.detach() for p in params] + [value for value in state if isinstance(value, torch.Tensor)]


def same(one, other):
    both = zip(one, other, strict=True)
    return len(one) == len(other) and all(torch.equal(a, b) and a.dtype is b.dtype for a, b in both)


ADAM = (optim.AdamW, {"fused": True})
CASES = {
    "AdamW": (*ADAM, {}),
    "AdamW, BF16 state": (*ADAM, {"state_dtype": BF16}),
    "AdamW, FP32 parameters beside": (*ADAM, {"fp32": True}),
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


@pytest.mark.parametrize("case", CASES)
def test_a_remembered_step_has_the_bits_of_one_that_is_not(case, floor):
    cls, options, settings = CASES[case]
    if settings.get("use_fp32_grad_acc") and not hasattr(torch.Tensor, "grad_dtype"):
        pytest.skip("FP32 gradients of BF16 weights want torch 2.13")
    results = []
    for forget in (False, True):
        params, optimizer, handle = made(cls, options, **settings)
        for turn in range(5):
            grads_for(params, turn, torch.float32 if settings.get("use_fp32_grad_acc") else None)
            if forget:
                handle.look_again()
            optimizer.step()
        results.append(everything(params, optimizer))
        kept = 4 if case == "SGD" else 3  # once all state is there
        assert handle.kept_steps == (0 if forget else kept)
    assert same(*results)


def test_a_step_is_remembered_on_the_cpu_whatever_the_default_device_is():
    params, optimizer, _ = made(*ADAM)
    for turn in range(4):
        grads_for(params, turn)
        with torch.device("cpu" if turn == 0 else "meta"):  # the first step makes the count of steps there
            optimizer.step()
    assert optimizer.state[params[0]]["step"] == 4


@pytest.mark.parametrize("fused", [False, True])
def test_steps_that_keep_batches_and_take_them_again_take_at_most_half_a_byte_per_parameter(fused):
    params = [nn.Parameter(torch.ones(shape, dtype=BF16)) for shape in ((2000, 2000), (4_000_000,))]
    optimizer = optim.AdamW(params, fused=fused)
    hmpx.attach(optimizer, state_dtype=BF16)
    for _ in range(3):
        for p in params:
            p.grad = torch.ones_like(p)
        peak, stays = memory(optimizer.step, torch.device("cpu"))
        assert (peak - stays) / 8_000_000 <= 0.5


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="torch before 2.13 has no grad_dtype")
def test_between_two_steps_nothing_holds_gradients(floor):
    """Those in FP32 are shown to the optimizer as they are."""
    params, optimizer, handle = made(*ADAM)
    for turn in range(4):
        for p in params:
            p.grad_dtype = torch.float32
        grads_for(params, turn, torch.float32)
        optimizer.step()
    held = [weakref.ref(p.grad) for p in params]
    for p in params:
        p.grad = None
    assert handle.kept_steps == 2 and not any(grad() is not None for grad in held)


def test_between_two_steps_what_is_kept_has_no_memory():
    params, optimizer, handle = made(*ADAM)
    for turn in range(4):
        grads_for(params, turn)
        peak, stays = memory(optimizer.step, torch.device("cpu"))
    assert handle.kept_steps == 2 and stays == 0 < peak


@pytest.mark.parametrize("turns", [0, 1, 4])
@pytest.mark.parametrize("fused", [False, True])
def test_a_gradient_without_memory_is_an_error(fused, turns):
    params, optimizer, _ = made(*ADAM, fused=fused)
    for turn in range(turns + 1):
        grads_for(params, turn)
        if turn < turns:
            optimizer.step()
    params[1].grad.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="not allocated"):
        optimizer.step()


@pytest.mark.parametrize("fused", [False, True])
def test_a_gradient_whose_sign_is_turned_by_a_flag(fused, floor):
    results = []
    for negative in (torch.neg, torch._neg_view):
        params, optimizer, _ = made(*ADAM, fused=fused)
        for turn in range(5):
            grads_for(params, turn)
            for p in params:
                p.grad = negative(p.grad)
            optimizer.step()
        results.append(everything(params, optimizer))
    assert all(torch.allclose(a, b, atol=1e-2, rtol=2**-7) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("weights", ["master", "split"])
def test_masters_of_an_optimizer_that_writes_to_them_unseen_and_raises(weights):
    """Lion decays ``p.data`` first, which has no version."""
    params, optimizer, handle = made(Lion, {"weight_decay": 0.5}, weights=weights)
    for turn in range(4):
        grads_for(params, turn)
        optimizer.step()
    before = [handle.masters_of(p) for p in params]
    optimizer.param_groups[0]["betas"] = ("fast", 0.99)
    with pytest.raises(TypeError):
        optimizer.step()
    assert handle.kept_steps == 3 and same([handle.masters_of(p) for p in params], before)


@pytest.mark.parametrize("turns", [1, 4])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_an_error_after_a_fused_kernel_that_raises_no_versions(momentum, turns):
    params, optimizer, handle = made(optim.SGD, {"momentum": momentum, "fused": True}, weights="master")
    for turn in range(turns):
        grads_for(params, turn)
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
    """Does from its fourth step on what it did not do before."""

    turn = 0

    def step(self, closure=None):
        super().step(closure)
        self.turn += len(self.param_groups[0]["params"]) > 0 or len(self.param_groups[1]["params"]) > 0
        if self.turn > self.odd_from:
            for group in self.param_groups:
                for p in group["params"]:
                    self.oddly(p)

    def oddly(self, p):
        state = self.state[p]
        if self.what == "new tensors":
            state["momentum_buffer"] = state["momentum_buffer"] + 1
        elif self.what == "more tensors":
            state["more"] = p.detach() * 2
            state["count"] = torch.tensor(float(self.turn))
        elif self.what == "written gradients":
            p.grad.mul_(0.5)
        elif self.what == "new gradients":
            p.grad = p.grad * 0.25
        elif self.what == "no gradients":
            p.grad = None
        elif self.what == "an error" and p.numel() == 5:
            raise ZeroDivisionError


@pytest.mark.parametrize("state_dtype", [torch.float32, BF16])
@pytest.mark.parametrize("what", ["new tensors", "more tensors", "written gradients", "new gradients", "no gradients"])
def test_what_an_optimizer_does_for_the_first_time_is_seen(what, state_dtype, floor, monkeypatch):
    monkeypatch.setitem(optimizer_scope.SCOPES, Odd, "element")
    results = []
    for forget in (False, True):
        monkeypatch.setattr(Odd, "what", what, raising=False)
        monkeypatch.setattr(Odd, "odd_from", 1 << 30, raising=False)
        params, optimizer, handle = made(Odd, {"momentum": 0.9}, state_dtype=state_dtype)
        for turn in range(6):
            if turn == 3:
                monkeypatch.setattr(Odd, "odd_from", 0)
            grads_for(params, turn)
            if forget:
                handle.look_again()
            optimizer.step()
            grads = [p.grad for p in params]
        results.append([*everything(params, optimizer), *(grad for grad in grads if grad is not None)])
        assert forget or handle.kept_steps >= 2
    assert same(*results)


def test_an_error_leaves_what_was_not_written_as_it_was(monkeypatch):
    monkeypatch.setitem(optimizer_scope.SCOPES, Odd, "element")
    monkeypatch.setattr(Odd, "what", "an error", raising=False)
    monkeypatch.setattr(Odd, "odd_from", 1 << 30, raising=False)
    params, optimizer, handle = made(Odd, {})  # keeps no state, so that nothing of it is written
    for turn in range(3):
        grads_for(params, turn)
        optimizer.step()
    monkeypatch.setattr(Odd, "odd_from", 0)
    before, groups = everything(params, optimizer), [list(group["params"]) for group in optimizer.param_groups]
    before, grads = [tensor.clone() for tensor in before], [p.grad for p in params]
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    assert handle.kept_steps >= 2 and same(before, everything(params, optimizer))
    assert [list(group["params"]) for group in optimizer.param_groups] == groups
    assert all(p.grad is grad for p, grad in zip(params, grads, strict=True))
    monkeypatch.setattr(Odd, "odd_from", 1 << 30)
    optimizer.step()


@pytest.mark.parametrize("weights", ["stochastic", "master"])
def test_an_error_in_the_middle_is_marked(weights, monkeypatch):
    monkeypatch.setitem(optimizer_scope.SCOPES, Odd, "element")
    monkeypatch.setattr(Odd, "what", "an error", raising=False)
    monkeypatch.setattr(Odd, "odd_from", 1 << 30, raising=False)
    params, optimizer, _ = made(Odd, {"momentum": 0.9}, weights=weights)
    for turn in range(3):
        grads_for(params, turn)
        optimizer.step()
    monkeypatch.setattr(Odd, "odd_from", 0)
    before = [p.detach().clone() for p in params]
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
    params, optimizer, handle = made(*ADAM, weights="master")
    for turn in range(4):
        grads_for(params, turn)
        seen.clear()
        optimizer.step()
    assert seen == {tensor.untyped_storage().data_ptr() for tensor in handle.beside()}
