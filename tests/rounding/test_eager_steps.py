"""The twin of the kernels' steps, in torch's operators, beside the kernels in C: to the bit."""

import pytest
import torch

from hmpx.rounding import eager, native, table
from tests.support.kernel_steps import STATES, STEPS, same, stepped, with_special_values

FP32 = torch.float32
CASES = [(kernel, scalars) for kernel, given in STEPS.items() for scalars in given]
pytestmark = pytest.mark.skipif(native.library() is None, reason="no C compiler here, so the kernels do not run")


def by_twin(kernel, given):
    count = max((len(each.states) for each in given), default=0)
    states = [None if given[0].states[i] is None else [each.states[i].tensor for each in given] for i in range(count)]
    weights, grads = [each.weight.tensor for each in given], [each.grad.tensor for each in given]
    eager.step_list(kernel, weights, grads, states, [each.scalars for each in given])


def assert_same(one, other):
    for a, b in zip(one, other, strict=True):
        for x, y in zip((a.weight, *a.states), (b.weight, *b.states), strict=True):
            assert x is None or same(x.tensor, y.tensor)


@pytest.mark.parametrize("kernel, scalars", CASES, ids=str)
@torch.no_grad()
def test_three_steps_have_the_bits_of_c(kernel, scalars):
    """Of sizes below and above what is stepped at a time."""
    sizes = (70_003, 1, 70, 0, 1 << 15, (1 << 15) + 1)
    one, other = (stepped(kernel, scalars, FP32, FP32, FP32, sizes) for _ in range(2))
    before = one[0].weight.tensor.clone()
    for _ in range(3):
        table.step_list(native, kernel, one, 7)
        by_twin(kernel, other)
    assert_same(one, other)
    assert not torch.equal(one[0].weight.tensor, before)


@pytest.mark.parametrize("kernel, scalars", CASES, ids=str)
@torch.no_grad()
def test_special_values_in_each_place(kernel, scalars):
    """Zeros of both signs, numbers below the normal ones, the largest, inf and NaN; each with each as the gradient."""
    for place in range(1 + STATES[kernel]):
        both = [with_special_values(kernel, scalars, place) for _ in range(2)]
        table.step_list(native, kernel, both[0], 7)
        by_twin(kernel, both[1])
        assert_same(*both)


@torch.no_grad()
def test_a_tensor_without_weight_decay_beside_one_that_has_it():
    """Of several that are stepped at once, as on an accelerator: 0 times an infinite weight would be NaN."""
    scalars = STEPS["sgd"][0]
    without, with_decay = ((scalars[0], decay, *scalars[2:]) for decay in (0.0, 0.5))
    weights = [torch.tensor([torch.inf, 1.0]), torch.tensor([2.0, 1.0])]
    alone = [each.clone() for each in weights]
    grads, states = [torch.ones(2), torch.ones(2)], [[torch.zeros(2), torch.zeros(2)] for _ in range(STATES["sgd"])]
    one = [[torch.zeros(2)] for _ in range(STATES["sgd"])]
    for p, each in zip(alone, (without, with_decay), strict=True):
        eager.step_list("sgd", [p], [torch.ones(2)], [[torch.zeros(2)] for _ in one], [each])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(eager, "is_on_host", lambda tensor: False)
        eager.step_list("sgd", weights, grads, states, [without, with_decay])
    assert all(map(torch.equal, weights, alone)) and weights[0][0] == torch.inf


@torch.no_grad()
def test_tensors_that_are_not_contiguous():
    one, other = (torch.randn(4, 37, 20, generator=torch.Generator().manual_seed(i)) for i in range(2))
    laid = [x.transpose(0, 2).contiguous().transpose(0, 2) for x in (one, other, other.square(), other.square())]
    flat = [x.contiguous() for x in laid]
    scalars = STEPS["adam"][0]
    for p, grad, m, v in (laid, flat):
        eager.step_list("adam", [p], [grad], [[m], [v]], [scalars])
    assert all(map(torch.equal, laid, flat)) and laid[0].stride() != flat[0].stride()
