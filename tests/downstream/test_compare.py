"""`hmpx.compare` on architectures that people train, built tiny from their configurations."""

import pytest
import torch

import hmpx
from tests.downstream.comparing import made, under_its_lists
from tests.downstream.zoo import ZOO, floating


@pytest.mark.parametrize("name", ["t5", "timm efficientnet"])
def test_every_op_is_compared_and_the_model_left_as_it_was(name):
    model, inputs = made(name)
    batches = [tuple(inputs.values()), *(tuple(ZOO[name]()[1].values()) for _ in range(3))]

    def loss_of(model, *batch):
        outputs = floating(model(**dict(zip(inputs, batch, strict=True))))
        return sum(output.float().square().mean() for output in outputs if output.requires_grad)

    model.eval()  # the loss is computed again below, without dropout's numbers
    before = {key: value.clone() for key, value in model.state_dict().items()}
    linear = torch.nn.functional.linear
    found = hmpx.compare(model, batches, loss_of, lists="autocast-cpu")
    assert torch.nn.functional.linear is linear
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert not found.is_broken, str(found)
    assert "linear" in {row.op for row in found.names} and found.gradient_error < 0.1
    with under_its_lists():
        low = sum(float(loss_of(model, *batch).detach()) for batch in batches) / 4
    assert found.loss + found.loss_change == pytest.approx(low, rel=1e-6)
