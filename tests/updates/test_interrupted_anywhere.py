"""An interrupt at each instruction of hmpx's own code in a step: nothing stays taken, and every signal is handled."""

import signal
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn, optim

import hmpx
from hmpx.base import region_state, run_in_region
from hmpx.updates import step_hooks
from hmpx.updates.stepping import step, step_call
from tests.support.optimizers import UnlistedSGD
from tests.support.same import same

BF16 = torch.bfloat16
# All that takes something from the thread or the process, and one in 31 of the other instructions.
TAKES = {Path(module.__file__) for module in (region_state, run_in_region, step_hooks, step, step_call)}
EVERY_OTHER, PACKAGE = 31, str(Path(hmpx.__file__).parent)
NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


class AtInstruction:
    """Calls `act` at the instruction of this number, as a tracer."""

    def __init__(self, number, act):
        self.number, self.act, self.reached = number, act, 0

    def __call__(self, frame, event, argument):
        name = frame.f_code.co_filename
        if not name.startswith(PACKAGE):
            return None
        weight = 1 if Path(name) in TAKES else 1 / EVERY_OTHER

        def inside(frame, event, argument):
            if event == "opcode":
                before, self.reached = self.reached, self.reached + weight
                if before < self.number <= self.reached:
                    self.act()
            return inside

        frame.f_trace = inside  # from Python 3.13 on, a frame without a tracer is not told of its opcodes
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return inside


def raises():
    raise KeyboardInterrupt


def sends(*numbers):
    """Send these signals to this thread, so that all of them come at once."""
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    for number in numbers:
        signal.pthread_kill(threading.get_ident(), number)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)


@pytest.fixture
def handled():
    """The signals whose handlers were called, in order; that of SIGINT raises then, as Python's own does."""
    numbers, called = NUMBERS, []

    def of_user(number, frame):
        called.append(number)
        if number == signal.SIGINT:
            raise KeyboardInterrupt

    before = [signal.signal(number, of_user) for number in numbers]
    yield called
    left = [signal.getsignal(number) for number in numbers]
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)
    assert left == [of_user] * len(numbers)


def interrupted(number, act, function):
    """Call `function` with `act` at that instruction; return whether it was reached."""
    tracer, before = AtInstruction(number, act), sys.gettrace()
    sys._getframe().f_trace_opcodes = True  # for which Python 3.12 looks when it is given a tracer, not later
    sys.settrace(tracer)
    try:
        function()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    signal.pthread_sigmask(signal.SIG_BLOCK, ())  # Python then calls the handlers that waited for one that raised
    return tracer.reached >= number


def stepped(p, optimizer):
    p.grad = torch.ones_like(p)
    optimizer.step()


def as_it_was(probe, optimizer, p):
    """Whether ops are cast, gradients are on, and the optimizer has its own parameter and the state of it alone."""
    cast = probe(torch.ones(2, 4)).dtype is BF16
    own = [each for group in optimizer.param_groups for each in group["params"]]
    return (
        cast and torch.is_grad_enabled() and same(own, [p]) and own[0] is p and {*map(id, optimizer.state)} <= {id(p)}
    )


@pytest.mark.parametrize("cls", [optim.SGD, UnlistedSGD])
@pytest.mark.parametrize("every", [11, pytest.param(1, marks=pytest.mark.slow)])
def test_an_interrupt_at_any_instruction_of_a_step_leaves_nothing_taken(every, cls, handled):
    """The optimizer refuses to go on only where weights or state were half written."""
    probe, p = nn.Linear(4, 4), nn.Parameter(torch.ones(8, dtype=BF16))
    optimizer = cls([("p", p)], lr=0.1, momentum=0.9)
    hmpx.attach(optimizer)
    number, refused = 1, 0
    with hmpx.convert():
        stepped(p, optimizer)
        good = optimizer.state_dict()
        while interrupted(number, raises, lambda: stepped(p, optimizer)):
            assert all(signal.getsignal(each) is signal.getsignal(signal.SIGINT) for each in NUMBERS), number
            assert as_it_was(probe, optimizer, p), number
            try:
                saved = optimizer.state_dict()
            except hmpx.HmpxError as error:
                assert "interrupted by KeyboardInterrupt" in str(error)
                refused += 1
                optimizer.load_state_dict(good)
            else:
                good = saved
            before = optimizer.param_groups[0]["hmpx_step"]
            stepped(p, optimizer)
            assert optimizer.param_groups[0]["hmpx_step"] == before + 1, number
            number += every
    assert number > 300 and refused < number / every / 2


@pytest.mark.parametrize("cls", [optim.SGD, UnlistedSGD])
@pytest.mark.parametrize("every", [13, pytest.param(1, marks=pytest.mark.slow)])
def test_signals_at_any_instruction_of_a_step_are_all_handled_and_the_step_is_whole(every, cls, handled):
    probe, p = nn.Linear(4, 4), nn.Parameter(torch.ones(8, dtype=BF16))
    optimizer = cls([("p", p)], lr=2.0**-4)
    hmpx.attach(optimizer, "nearest")
    number, taken = 1, 0
    with hmpx.convert():
        stepped(p, optimizer)
        while interrupted(number, lambda: sends(*NUMBERS), lambda: stepped(p, optimizer)):
            assert sorted(handled) == sorted(NUMBERS), number
            handled.clear()
            assert as_it_was(probe, optimizer, p), number
            steps = optimizer.state_dict()["param_groups"][0]["hmpx_step"]
            assert (p == 1 - steps * 2.0**-4).all() and steps in (1, 2), number
            taken += steps == 2
            stepped(p, optimizer)
            assert optimizer.param_groups[0]["hmpx_step"] == steps + 1, number
            with torch.no_grad():
                p.fill_(1 - 2.0**-4)
            optimizer.param_groups[0]["hmpx_step"] = 1
            number += every
    assert 0 < taken < number / every


@pytest.mark.parametrize("cls", [optim.SGD, UnlistedSGD])
def test_the_same_signal_twice_in_a_step_is_handled_twice(cls, handled):
    class Sends(cls):
        def step(self):
            for _ in range(2):
                sends(signal.SIGUSR1)
                sends(signal.SIGINT, signal.SIGTERM)
            super().step()

    p = nn.Parameter(torch.ones(8, dtype=BF16))
    optimizer = Sends([("p", p)], lr=0.1)
    hmpx.attach(optimizer)
    with pytest.raises(KeyboardInterrupt) as raised:
        stepped(p, optimizer)
    assert sorted(handled) == sorted(2 * [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
    assert isinstance(raised.value.__context__, KeyboardInterrupt)  # both are told
    assert optimizer.state_dict()["param_groups"][0]["hmpx_step"] == 1


def test_an_interrupt_in_a_closure_waits_where_the_step_cannot_be_taken_back(handled):
    """LBFGS writes to its state between two evaluations of its second step."""
    p = nn.Parameter(torch.ones(4, dtype=BF16))
    optimizer = optim.LBFGS([("p", p)], lr=0.1, max_iter=3)
    hmpx.attach(optimizer)
    armed, evaluations = [None], []

    def closure():
        evaluations.append(None)
        if len(evaluations) == armed[0]:
            sends(signal.SIGINT)
        optimizer.zero_grad()
        loss = (p.float() ** 2).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    for armed[0], steps in ((1, 1), (2, 2)):  # at once, with everything as it was; when the step is complete
        evaluations.clear()
        with pytest.raises(KeyboardInterrupt):
            optimizer.step(closure)
        assert optimizer.state_dict()["param_groups"][0]["hmpx_step"] == steps
    optimizer.step(closure)


def test_an_interrupt_at_any_instruction_of_a_listed_function_leaves_casts_on():
    """Casts are off inside a Python function that has a rule."""
    probe, doubled, number = nn.Linear(4, 4), hmpx.fp32(lambda x: x + x), 1
    with hmpx.convert():
        while interrupted(number, raises, lambda: doubled(torch.ones(2))):
            assert probe(torch.ones(2, 4)).dtype is BF16, number
            number += 1
    assert number > 100
