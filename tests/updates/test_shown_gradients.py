"""What a step does to gradients, beside the same optimizer on FP32 copies; weights written past the shown list."""

import contextlib
import copy
import itertools

import pytest
import torch
from torch import nn, optim
from torch.utils.flop_counter import FlopCounterMode

import hmpx
from hmpx.updates.stepping import transfers
from tests.support.oracle import away_from_zero
from tests.support.training import needs_grad_dtype

BF16 = torch.bfloat16


class SAM(optim.Optimizer):
    """Sharpness-aware minimisation by two calls, of which neither is `step`."""

    def __init__(self, params, rho=0.5, **options):
        super().__init__(params, {"rho": rho, **options})
        self.base = optim.SGD(self.param_groups, **options)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def first_step(self):
        for p in self.param_groups[0]["params"]:
            self.state[p]["start"] = p.data.clone()
            p.add_(p.grad * (self.param_groups[0]["rho"] / p.grad.norm()))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self):
        for p in self.param_groups[0]["params"]:
            p.data = self.state[p]["start"]
        self.base.step()
        self.zero_grad()


class Named(SAM):
    """The same under names that hmpx does not know."""

    def climb(self):
        super().first_step()

    def descend(self):
        super().second_step()


class Sharing(SAM):
    """The state of its base is its own, too."""

    def __init__(self, params, **options):
        super().__init__(params, **options)
        self.state = self.base.state


WAYS = ("stochastic", "nearest", "master", "split")
HALVES = ("first_step", "second_step")


@pytest.mark.parametrize("cls, calls", [(SAM, HALVES), (Sharing, HALVES), (Named, ("climb", "descend"))])
@pytest.mark.parametrize("way", WAYS)
def test_each_call_of_an_optimizer_that_has_several_ends_with_a_write_back(way, cls, calls):
    """What it keeps in its state is FP32. `test_programs.py` has SAM by a closure."""
    torch.manual_seed(0)
    weight, target = torch.randn(64).bfloat16(), torch.randn(64)
    p, q = nn.Parameter(weight.clone()), nn.Parameter(weight.float())
    optimizer, reference = (cls([("w", each)], lr=0.1, momentum=0.9) for each in (p, q))
    hmpx.attach(optimizer, way, methods=() if calls is HALVES else calls)
    for number in range(8):
        for each in (p, q):
            each.grad = (p.detach().float() - target).bfloat16().to(each.dtype)
        for each in (optimizer, reference):
            getattr(each, calls[number % 2])()
        if way == "stochastic":
            expected = hmpx.stochastic_round(q.detach(), seed=0, step=number, name="w")
        else:
            expected = away_from_zero(q.detach()) if way == "split" else q.detach().bfloat16()
        assert p.grad is None and torch.equal(p, expected)
        assert optimizer.state[p]["start"].dtype is torch.float32
        if way not in ("master", "split"):
            q.data = expected.float()
    assert not torch.equal(p, weight)


@pytest.mark.parametrize(
    "methods, said", [("clim", "'clim' .* did you mean 'climb'"), (["step"], "'step' is no method")]
)
def test_a_method_that_rewrites_weights_is_one_of_the_optimizers_own(methods, said):
    optimizer = Named([nn.Parameter(torch.ones(3, dtype=BF16))], lr=0.1)
    with pytest.raises(hmpx.HmpxError, match=said):
        hmpx.attach(optimizer, methods=methods)
    hmpx.attach(optimizer, methods=("climb", "descend"))
    assert copy.deepcopy(optimizer)._hmpx_attachment.methods == ("climb", "descend")


class Touching(optim.Optimizer):
    """Steps by the gradient, then does something to it, and may raise."""

    def __init__(self, params, touch, fail=False):
        super().__init__(params, {})
        self.touch, self.fail = touch, fail

    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                p.data.sub_(p.grad.data)
            self.touch(p)
        if self.fail:
            raise RuntimeError("after the gradients")


TOUCHES = {
    "clears": lambda p: setattr(p, "grad", None),
    "zeroes": lambda p: p.grad.zero_(),
    "scales": lambda p: p.grad.mul_(0.3),
    "scales by data": lambda p: p.grad.data.mul_(0.3),
    "replaces": lambda p: setattr(p, "grad", p.grad * 3 + 0.1),
    "looks": lambda p: p.grad.sum(),
}


@pytest.mark.parametrize("touch, fp32", list(zip(TOUCHES, itertools.cycle([False, True]))))
@pytest.mark.parametrize("fail", [False, True])
def test_what_a_step_does_to_a_gradient_stays_unless_it_raises(touch, fail, fp32):
    if fp32 and not hasattr(torch.Tensor, "grad_dtype"):
        pytest.skip("torch before 2.11 has no grad_dtype")
    p, q = nn.Parameter(torch.ones(8, dtype=BF16)), nn.Parameter(torch.ones(8))
    optimizer, reference = Touching([p], TOUCHES[touch], fail), Touching([q], TOUCHES[touch])
    hmpx.attach(optimizer, use_fp32_grad_acc=fp32)
    dtype = torch.float32 if fp32 else BF16
    gradient = p.grad = torch.linspace(-1, 1, 8).bfloat16().to(dtype)
    q.grad = gradient.float()
    before, version = gradient.clone(), gradient._version
    if fail:
        with pytest.raises(RuntimeError, match="after the gradients"):
            optimizer.step()
        assert p.grad is gradient and torch.equal(gradient, before) and (p == 1).all()
        return
    optimizer.step()
    reference.step()
    if q.grad is None:
        assert p.grad is None
        return
    assert p.grad.dtype is dtype and torch.equal(p.grad, q.grad.to(dtype))
    assert (p.grad is gradient) == (touch != "replaces")
    assert (gradient._version == version) == (touch in ("looks", "replaces"))


def test_a_gradient_with_nan_that_a_step_only_reads_keeps_its_bits():
    """NaN is not equal to NaN, and casts give it other bits."""
    p = nn.Parameter(torch.ones(64, dtype=BF16))
    optimizer = Touching([p], TOUCHES["looks"])
    hmpx.attach(optimizer)
    p.grad = torch.full((64,), 0x7FC1, dtype=torch.int16).view(BF16)
    for _ in range(4):
        optimizer.step()
        assert (p.grad.view(torch.int16) == 0x7FC1).all() and p.grad._version == 0


@pytest.mark.parametrize(
    "sliced, expanded, looked_at",
    [
        (False, False, FlopCounterMode(display=False)),
        (False, True, contextlib.nullcontext()),
        (True, False, contextlib.nullcontext()),
        (True, True, FlopCounterMode(display=False)),
    ],
)
def test_torchs_own_classes_write_to_gradients_too(sliced, expanded, looked_at, monkeypatch):
    """foreach SGD with Nesterov's momentum adds the momentum to the gradient itself."""
    if sliced:
        monkeypatch.setattr(transfers, "_FLOOR", 64)
    p, q = nn.Parameter(torch.ones(20, 18, dtype=BF16)), nn.Parameter(torch.ones(20, 18))
    optimizer, reference = (optim.SGD([x], lr=0.1, momentum=0.9, nesterov=True, foreach=True) for x in (p, q))
    hmpx.attach(optimizer, "master", fused=False)
    for _ in range(2):
        p.grad = torch.full((20, 1), 0.3, dtype=BF16).expand(20, 18) if expanded else torch.full_like(p, 0.3)
        q.grad = p.grad.float().contiguous()
        with looked_at:
            optimizer.step()
        reference.step()
        assert torch.equal(p.grad, q.grad.bfloat16()) and torch.equal(p, q.bfloat16())
    assert q.grad[0, 0] != p.grad.new_tensor(0.3).float()


def test_a_sparse_gradient_that_nobody_writes_to_is_the_same_object_afterwards():
    p = nn.Parameter(torch.ones(4, 3, dtype=BF16))
    gradient = torch.sparse_coo_tensor([[1]], torch.ones(1, 3, dtype=BF16), (4, 3), check_invariants=True)
    optimizer = optim.SGD([p], lr=0.5)
    hmpx.attach(optimizer)
    p.grad = gradient
    optimizer.step()
    assert p.grad is gradient and p[1].tolist() == [0.5] * 3 and p[0].tolist() == [1.0] * 3


class HandsOnItsState(optim.Optimizer):
    """Puts a tensor of its state in the place of the gradient."""

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            p.grad = self.state[p]["mean"] = p.grad * 0.5
            p.sub_(p.grad)


@needs_grad_dtype
def test_a_gradient_that_a_step_puts_there_shares_no_memory_with_the_state():
    p = nn.Parameter(torch.ones(5, dtype=BF16))
    optimizer = HandsOnItsState([p], {})
    hmpx.attach(optimizer, use_fp32_grad_acc=True)
    p.sum().backward()
    optimizer.step()
    assert p.grad.dtype is torch.float32 and p.grad.tolist() == [0.5] * 5 == p.tolist()
    p.grad.zero_()
    assert optimizer.state[p]["mean"].tolist() == [0.5] * 5


class OwnList(optim.Optimizer):
    """Its list stands in a closure, where `attach`, which refuses such lists, does not see it."""

    def __init__(self, params, write):
        super().__init__(params, {})
        own = list(self.param_groups[0]["params"])
        self.own, self.write = lambda: own, write

    def step(self, closure=None):
        for p in self.own():
            self.write(p)


@pytest.mark.parametrize(
    "way, write", list(zip(WAYS, itertools.cycle([lambda p: p.data.sub_(0.5), lambda p: p.detach().fill_(2)])))
)
def test_an_optimizer_with_a_list_of_its_own_is_refused_and_writes_nothing(way, write):
    p = nn.Parameter(torch.ones(8, dtype=BF16))
    optimizer = OwnList([("w", p)], write)
    hmpx.attach(optimizer, way)
    p.grad = torch.ones_like(p)
    for _ in range(2):
        with pytest.raises(hmpx.HmpxError, match="OwnList wrote to parameter 'w' itself"):
            optimizer.step()
        assert (p == 1).all() and optimizer.param_groups[0]["params"] == [p]


def test_an_optimizer_that_only_looks_at_a_list_of_its_own_steps():
    p = nn.Parameter(torch.ones(8, dtype=BF16))
    optimizer = OwnList([p], lambda own: own.sum())
    hmpx.attach(optimizer)
    optimizer.step()
    assert (p == 1).all()
