"""`hmpx.tune` with losses that autograd or BF16 knows in part: weights without a gradient, ops that raise."""

import math

import torch
from torch import nn
from torch.nn import functional as F

from tests.support.planted import batches, tuned

WEIGHT = torch.tensor([0.1, 1.0, 5.0, 2.0])


def tuned_under(loss, data):
    torch.manual_seed(0)
    return tuned(nn.Linear(16, 4), data, loss)


def one_hot(y):
    return F.one_hot(y, 4).float()


WEIGHTED = {
    "cross_entropy": lambda z, y: F.cross_entropy(z, y, weight=WEIGHT),
    "nll_loss": lambda z, y: F.nll_loss(torch.log_softmax(z, 1), y, weight=WEIGHT),
    "binary_cross_entropy": lambda z, y: F.binary_cross_entropy(torch.sigmoid(z), one_hot(y), weight=WEIGHT),
    "binary_cross_entropy_with_logits": lambda z, y: F.binary_cross_entropy_with_logits(
        z, one_hot(y), pos_weight=WEIGHT
    ),
}


def test_losses_with_weights_are_tuned():
    found = tuned_under(lambda m, a, y: sum(loss(m(a), y) for loss in WEIGHTED.values()), batches(6, 16))
    assert found.met and "linear" in found.policy.bf16
    choices = {choice.name: choice for choice in found.choices}
    for name in WEIGHTED:
        assert 0 < choices[name].loss_change < math.inf and 0 < choices[name].gradient_error < 0.1, name


def test_the_rounding_of_a_weight_that_has_no_gradient_is_measured_as_by_hand():
    """A name alone is measured on one of the batches."""
    weight = torch.tensor([1.003, 2.006, 1.003, 2.006])  # BF16 has 1 and 2
    torch.manual_seed(0)
    model, data = nn.Linear(16, 4), batches(8, 16)

    def of(z, y, weight):
        return F.binary_cross_entropy_with_logits(z, y, pos_weight=weight, weight=weight)

    def loss(m, a, y):
        return of(m(a), one_hot(y), weight)

    found = tuned_under(loss, data)
    changes = []
    with torch.no_grad():
        for a, y in data[:6]:
            z = model(a)
            low = of(z.bfloat16(), one_hot(y).bfloat16(), weight.bfloat16())
            changes.append(float(low.float() - of(z, one_hot(y), weight)))
    choice = next(each for each in found.choices if each.name == "binary_cross_entropy_with_logits")
    assert min(abs(choice.loss_change - abs(change)) for change in changes) < 1e-6
    assert choice.loss_error > 0.1 > choice.gradient_error, choice
    assert choice.why == "breaks the tolerance by itself, by its change of the loss"


def test_an_op_that_does_not_run_in_bf16_stays_in_fp32():
    found = tuned_under(lambda m, a, y: F.multi_margin_loss(m(a), y), batches(6, 16))
    assert found.met and found.share == 1 and "multi_margin_loss" in found.policy.fp32
    choice = next(each for each in found.choices if each.name == "multi_margin_loss")
    assert choice.why.startswith("it does not run in BF16: NotImplementedError: ")
