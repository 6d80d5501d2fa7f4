"""Lack of memory where random programs do not see it; `test_programs.py` has it at any operation of a step."""

import contextlib
import gc
import signal
import sys
import threading
import weakref

import pytest
import torch
from torch import nn, optim
from torch.utils._python_dispatch import TorchDispatchMode

import hmpx
from hmpx.updates.holding.held import HeldCodes
from tests.support.state_codes import widened
from tests.support.training import parameters, set_gradients, train

BF16 = torch.bfloat16


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
    hmpx.attach(optimizer, fused=False)
    train(named, optimizer, 0, 1)
    set_gradients(named, 1)
    with LooksAtOps("aten::_foreach_mul_.Scalar"), pytest.raises(torch.OutOfMemoryError):
        optimizer.step()
    with pytest.raises(hmpx.HmpxError, match="step 1 of SGD was interrupted by OutOfMemoryError"):
        optimizer.state_dict()


class Interrupts(optim.SGD):
    """Ctrl-C comes while it steps."""

    def step(self, closure=None):
        super().step(closure)
        signal.raise_signal(signal.SIGINT)


class SteppingByHand(optim.Optimizer):
    """A class that hmpx does not know. While it has a copy in hand, `happens` is called with the number of the step."""

    def __init__(self, params, happens):
        super().__init__(params, {"lr": 0.1})
        self.happens, self.steps = happens, 0

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p].setdefault("moment", torch.zeros_like(p)).lerp_(p.grad, 0.1)
                self.happens(self.steps)
                p.sub_(self.state[p]["moment"], alpha=group["lr"])
        self.steps += 1


@pytest.mark.parametrize("what", ["a signal", "a signal whose handler raises", "a look at the stack"])
def test_what_happens_in_the_loop_of_an_unknown_class_leaves_the_step_as_it_is(what):
    """A scheduler of jobs says that time is up; a watchdog's thread takes a stack, and drops it a little later."""
    found, told = [], []

    def handler(number, frame):
        told.append(number)
        if what.endswith("raises"):
            raise SystemExit

    def happens(step):
        if step in (0, 2, 3):
            if "signal" in what:
                return signal.raise_signal(signal.SIGUSR1)
            stack = [sys._getframe(1)]
            told.append(step)
            threading.Timer(0.05, stack.clear).start()

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        for each in (lambda step: None, happens):
            named = parameters(sizes=((5, 4), (4,)))
            optimizer = SteppingByHand(named, each)
            hmpx.attach(optimizer, "split")
            for step in range(5):
                with contextlib.suppress(SystemExit):
                    train(named, optimizer, step, step + 1)
            found.append([tensor.clone() for _, p in named for tensor in (p.detach(), optimizer.state[p]["moment"])])
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert len(told) == 6 and all(map(torch.equal, *found))


def test_an_interrupt_that_has_waited_for_the_end_of_a_step_keeps_nothing_of_its_callers():
    """They may hold a loss, and with it activations."""
    p = nn.Parameter(torch.ones(4, dtype=BF16))
    optimizer, held = Interrupts([("w", p)], lr=0.1), []
    hmpx.attach(optimizer)

    def trained():
        p.grad = torch.ones_like(p)
        loss = torch.zeros(())
        held.append(weakref.ref(loss))
        optimizer.step()

    gc.disable()
    try:
        with contextlib.suppress(KeyboardInterrupt):
            trained()
        assert held[0]() is None
    finally:
        gc.enable()


def test_lack_of_memory_for_wider_state_leaves_what_there_is(monkeypatch):
    """Of two tensors in 8 bits, one can be seen in FP32."""
    named = parameters(sizes=((8, 6),))
    optimizer = optim.Adam(named, lr=0.1)
    hmpx.attach(optimizer, state_dtype="8bit")
    train(named, optimizer, 0, 1)
    state, whole, calls = optimizer.state[named[0][1]], HeldCodes.whole, []

    def until_full(self):
        calls.append(self)
        if len(calls) > 1:
            raise torch.OutOfMemoryError()
        return whole(self)

    expected = widened(state)
    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        patch.setattr(HeldCodes, "whole", until_full)
        hmpx.detach(optimizer)
    after = widened(state)
    assert after.keys() == expected.keys() and all(torch.equal(after[key].float(), expected[key]) for key in after)


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
