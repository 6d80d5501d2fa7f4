"""Signals and errors in the middle of a step: all of it or none, or a mark that says which parameters have moved."""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import signal
from itertools import cycle

import pytest
import torch
from torch import nn, optim
from torch.utils._python_dispatch import TorchDispatchMode

import hmpx
from hmpx.updates.holding.state_tensors import HeldCodes
from hmpx.updates.holding.stores import WAYS
from hmpx.updates.stepping import batching, optimizer_scope
from tests.support.eight_bits import widened
from tests.support.training import parameters, same, set_gradients, train

BF16 = torch.bfloat16


class Acts:
    """Does something before or after one of the calls of a class's own step."""

    calls, at, act, after = 0, None, None, False

    def step(self, *args):
        now = self.calls == self.at
        self.calls += 1
        if now and not self.after:
            self.act()
        result = super().step(*args)
        if now and self.after:
            self.act()
        return result

    def arm(self, at, act, after):
        self.calls, self.at, self.act, self.after = 0, at, act, after


def prepared(cls, way, options):
    torch.manual_seed(0)
    params = [(name, nn.Parameter(torch.randn(n).bfloat16())) for name, n in (("large", 300), ("small", 20))]
    optimizer = cls(params, lr=0.1, **options)
    hmpx.attach(optimizer, way)
    return [p for _, p in params], optimizer


def stepped(params, optimizer):
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)


def out_of_memory():
    raise MemoryError("no memory")


@pytest.fixture
def acting(monkeypatch):
    """A class that acts, and is stepped in slices as the class itself is."""
    monkeypatch.setattr(batching, "_FLOOR", 64)

    def derived(cls):
        made = type(cls.__name__, (Acts, cls), {})
        monkeypatch.setitem(optimizer_scope.SCOPES, made, optimizer_scope.SCOPES[cls])
        return made

    return derived


OPTIONS = [(optim.AdamW, {"fused": True}), (optim.SGD, {"momentum": 0.9, "foreach": True}), (optim.Adafactor, {})]
CASES = [(*options, way) for options, way in zip(cycle(OPTIONS), WAYS)]


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("cls, options, way", CASES)
def test_ctrl_c_at_any_slice_comes_when_the_step_is_complete(cls, options, way, after, acting):
    cls = acting(cls)
    params, optimizer = prepared(cls, way, options)
    stepped(params, optimizer)
    stepped(params, optimizer)
    expected, count = [p.detach().clone() for p in params], optimizer.calls // 2
    handler = signal.getsignal(signal.SIGINT)
    for at in range(count):
        params, optimizer = prepared(cls, way, options)
        stepped(params, optimizer)
        optimizer.arm(at, interrupt, after)
        with pytest.raises(KeyboardInterrupt):
            stepped(params, optimizer)
        assert all(torch.equal(p, e) for p, e in zip(params, expected, strict=True))
        assert optimizer.param_groups[0]["hmpx_step"] == 2 and signal.getsignal(signal.SIGINT) is handler
    assert count > 1


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("cls, options, way", CASES)
def test_an_error_at_any_slice_takes_nothing_or_is_told_until_a_checkpoint_is_loaded(cls, options, way, after, acting):
    cls, count, told, at = acting(cls), 2, 0, 0
    while at < count:
        params, optimizer = prepared(cls, way, options)
        stepped(params, optimizer)
        count = optimizer.calls
        before, saved = [p.detach().clone() for p in params], optimizer.state_dict()
        optimizer.arm(at, out_of_memory, after)
        with pytest.raises(MemoryError):
            stepped(params, optimizer)
        optimizer.arm(None, None, after)
        if not at:
            assert all(torch.equal(p, e) for p, e in zip(params, before, strict=True))
        if at or after:  # after the first slice's step its state has moved
            told += 1
            for use in (functools.partial(stepped, params, optimizer), optimizer.state_dict):
                with pytest.raises(hmpx.HmpxError, match=r"step 1 of \w+ was interrupted by MemoryError.*'small'"):
                    use()
            optimizer.load_state_dict(saved)
            optimizer.state_dict()
            stepped(params, optimizer)
        at += 1
    assert told == count - (not after)


def test_an_interrupt_in_a_closure_comes_at_once_and_takes_everything_back():
    p = nn.Parameter(torch.ones(4, dtype=BF16))
    optimizer = optim.LBFGS([p], lr=0.1)
    hmpx.attach(optimizer)
    points = []

    def closure():
        points.append(p.detach().clone())
        if len(points) == 3:
            interrupt()
        optimizer.zero_grad()
        loss = (p.float() ** 2).sum()
        loss.backward()
        return loss

    with pytest.raises(KeyboardInterrupt):
        optimizer.step(closure)
    assert len(points) == 3 and not torch.equal(points[2], points[0])
    assert (p == 1).all() and p.grad is None and not optimizer.state and "hmpx_step" not in optimizer.param_groups[0]


class Fails(optim.Optimizer):
    """Fails in a step in which it has changed its state: in place, or by new tensors and items alone."""

    in_place = fails = False

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            state.setdefault("items", []).append(p.grad.clone())
            if "mean" not in state or not self.in_place:
                state["mean"] = p.grad + state.get("mean", 0)
            else:
                state["mean"].add_(p.grad)
            p.sub_(state["mean"])
        if self.fails:
            raise RuntimeError("of the test")


@pytest.mark.parametrize("in_place", [True, False])
def test_a_whole_step_that_fails_gives_its_state_back_or_says_that_it_cannot(in_place):
    p = torch.nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    optimizer = Fails([("w", p)], {})
    optimizer.in_place = in_place
    hmpx.attach(optimizer, "nearest")
    p.grad = torch.ones_like(p)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.fails = True
    with pytest.raises(RuntimeError, match="of the test"):
        optimizer.step()
    optimizer.fails = False
    assert p.tolist() == [-1.0] * 4 and len(optimizer.state[p]["items"]) == 1
    if in_place:
        with pytest.raises(hmpx.HmpxError, match="step 1 of Fails was interrupted by RuntimeError in the middle: 'w'"):
            optimizer.step()
        optimizer.load_state_dict(saved)
    optimizer.step()
    assert p.tolist() == [-3.0] * 4  # 1 of the first step, and a mean of 2


class LooksAtOps(TorchDispatchMode):
    """As a counter of FLOPs does; has no memory for the operation of this name, the second time."""

    def __init__(self, name):
        super().__init__()
        self.name, self.calls = name, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += func.name() == self.name
        if self.calls == 2:
            raise torch.OutOfMemoryError()
        return func(*args, **(kwargs or {}))


def test_an_error_is_told_where_a_mode_hides_the_writes_of_foreach_kernels():
    named = parameters(sizes=((7,), (7,)))
    optimizer = optim.SGD([{"params": [each]} for each in named], lr=0.1, momentum=0.9, foreach=True)
    hmpx.attach(optimizer)
    train(named, optimizer, 0, 1)
    set_gradients(named, 1)
    with LooksAtOps("aten::_foreach_mul_.Scalar"), pytest.raises(torch.OutOfMemoryError):
        optimizer.step()
    with pytest.raises(hmpx.HmpxError, match="step 1 of SGD was interrupted by OutOfMemoryError"):
        optimizer.state_dict()


@contextlib.contextmanager
def room_for(tensors, monkeypatch):
    """No more of state in 8 bits can be seen in FP32."""
    whole, calls = HeldCodes.whole, []

    def until_full(self):
        calls.append(self)
        if len(calls) > tensors:
            raise torch.OutOfMemoryError()
        return whole(self)

    with monkeypatch.context() as patch:
        patch.setattr(HeldCodes, "whole", until_full)
        yield


def test_lack_of_memory_for_what_a_step_sees_of_state_in_8_bits_loses_no_state(monkeypatch):
    named = parameters(sizes=((8, 6), (5, 7)))
    optimizer = optim.SparseAdam(named, lr=0.1)
    hmpx.attach(optimizer, state_dtype="8bit")
    for _, p in named:
        p.grad = torch.ones_like(p).to_sparse()
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict()["state"])
    with room_for(2, monkeypatch), pytest.raises(torch.OutOfMemoryError):
        optimizer.step()
    after = optimizer.state_dict()["state"]
    assert after.keys() == before.keys() and all(str(after[i]) == str(before[i]) for i in before)
    optimizer.step()


def test_lack_of_memory_for_wider_state_leaves_what_there_is(monkeypatch):
    named = parameters(sizes=((8, 6),))
    optimizer = optim.Adam(named, lr=0.1)
    hmpx.attach(optimizer, state_dtype="8bit")
    train(named, optimizer, 0, 1)
    state = optimizer.state[named[0][1]]
    expected = widened(state)
    with room_for(1, monkeypatch), pytest.raises(torch.OutOfMemoryError):
        hmpx.detach(optimizer)
    after = widened(state)
    assert after.keys() == expected.keys() and all(torch.equal(after[key].float(), expected[key]) for key in after)


@pytest.mark.parametrize("way", ["master", "split", "split8"])
def test_a_load_after_an_incomplete_step_takes_no_masters_of_that_step(way, acting):
    """The checkpoint is that of before the first step, as the state still is: none is made before the last slice."""
    cls, runs = acting(optim.ASGD), []
    for at in (2, None):
        p = nn.Parameter(torch.linspace(-1, 1, 300).bfloat16())
        before, optimizer = p.detach().clone(), cls([("w", p)], lr=1e-4)  # most weights stay as they are
        hmpx.attach(optimizer, way)
        saved = copy.deepcopy(optimizer.state_dict())
        if at is not None:
            optimizer.arm(at, out_of_memory, False)
            with pytest.raises(MemoryError):
                stepped([p], optimizer)
            optimizer.arm(None, None, False)
            p.detach().copy_(before)
            optimizer.load_state_dict(saved)
        runs.append([])
        for _ in range(10):
            stepped([p], optimizer)
            runs[-1].append(p.detach().clone())
    assert same(*runs)


def test_lack_of_memory_before_the_first_step_leaves_what_a_constructor_made():
    """Adagrad's state comes into its dtype when the first step begins; the room for it may not be there."""
    p = nn.Parameter(torch.ones(4, dtype=BF16))
    optimizer = optim.Adagrad([("w", p)], lr=0.1, initial_accumulator_value=0.1)
    hmpx.attach(optimizer, "nearest")
    p.grad = torch.ones_like(p)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "full_like", lambda *_, **__: (_ for _ in ()).throw(torch.OutOfMemoryError()))
        with pytest.raises(torch.OutOfMemoryError):
            optimizer.step()
    optimizer.step()
    assert torch.equal(optimizer.state[p]["sum"], torch.full((4,), 0.1).add(1))
