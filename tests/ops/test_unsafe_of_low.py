"""Ops that are unsafe on what was rounded before, as torch.autocast("cuda") has them.

The first probability below is .99988, and 1 in BF16: torch cuts the loss at 100, and the gradient is lost.
"""

import pytest
import torch
import torch.nn.functional as F

import hmpx

LOGITS = torch.tensor([[9.0, 4.0]])
WRONG = torch.zeros(1, 2)


CALLS = [
    lambda probabilities, targets: F.binary_cross_entropy(probabilities, targets),
    torch.nn.BCELoss(),
    lambda probabilities, targets: torch._C._nn.binary_cross_entropy(probabilities, targets),
]


@pytest.mark.parametrize("recipe", ["autocast-cuda", "neuron-bf16-sr", "hmp-o1", "autocast-cpu", "hmp-o2"])
def test_shipped_lists_refuse_it(recipe):
    probabilities = LOGITS.sigmoid()
    with hmpx.activate(recipe):
        for call in CALLS:
            with pytest.raises(hmpx.HmpxError, match="use binary_cross_entropy_with_logits on the logits"):
                call(probabilities.bfloat16(), WRONG)
            assert call(probabilities, WRONG).isfinite().all()
            with hmpx.disable_casts():
                call(probabilities.bfloat16(), WRONG.bfloat16())
    F.binary_cross_entropy(probabilities.bfloat16(), WRONG.bfloat16())


def test_nothing_is_refused_where_no_op_is_cast(lists):
    with hmpx.convert(**lists()):
        assert F.binary_cross_entropy(LOGITS.sigmoid().bfloat16(), WRONG.bfloat16()).isfinite()


def test_a_list_of_ones_own_warns_once(lists, caplog):
    with hmpx.convert(**lists(bf16="linear", fp32="binary_cross_entropy")):
        for _ in range(2):
            assert F.binary_cross_entropy(LOGITS.sigmoid().bfloat16(), WRONG).dtype is torch.float32
    assert caplog.text.count("use binary_cross_entropy_with_logits on the logits") == 1
