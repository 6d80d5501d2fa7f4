"""Errors in the middle of a step that random programs do not come to: lack of memory here, a mode that hides writes.

`test_interrupted_anywhere.py` has signals; `test_programs.py` both at any operation of a step.
"""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from torch import nn, optim
from torch.utils._python_dispatch import TorchDispatchMode

import hmpx
from hmpx.updates.holding.state_tensors import HeldCodes
from hmpx.updates.stepping import batching, optimizer_scope
from tests.support.eight_bits import widened
from tests.support.training import parameters, same, set_gradients, train

BF16 = torch.bfloat16


class RunsOut(optim.ASGD):
    """Has no memory for its third slice, once it is told so."""

    slices = None

    def step(self, closure=None):
        if self.slices is not None:
            self.slices += 1
            if self.slices == 3:
                raise MemoryError("no memory")
        return super().step(closure)


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
def test_a_load_after_an_incomplete_step_takes_no_masters_of_that_step(way, monkeypatch):
    """The checkpoint is that of before the first step, as the state still is: none is made before the last slice."""
    monkeypatch.setattr(batching, "_FLOOR", 64)
    monkeypatch.setitem(optimizer_scope.SCOPES, RunsOut, "element")
    runs = []
    for runs_out in (True, False):
        p = nn.Parameter(torch.linspace(-1, 1, 300).bfloat16())
        before, optimizer = p.detach().clone(), RunsOut([("w", p)], lr=1e-4)  # most weights stay as they are
        hmpx.attach(optimizer, way)
        saved = copy.deepcopy(optimizer.state_dict())
        if runs_out:
            optimizer.slices, p.grad = 0, torch.ones_like(p)
            with pytest.raises(MemoryError):
                optimizer.step()
            optimizer.slices = None
            p.detach().copy_(before)
            optimizer.load_state_dict(saved)
        runs.append([])
        for _ in range(10):
            p.grad = torch.ones_like(p)
            optimizer.step()
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
