"""For tests of compiled code: each begins and ends with nothing compiled; some need a Dynamo that traces regions."""

import pytest
import torch

import hmpx

recent = pytest.mark.skipif(
    not hasattr(torch.Tensor, "grad_dtype"), reason="Dynamo traces through regions from torch 2.13 on"
)


@pytest.fixture(autouse=True)
def nothing_compiled():
    """Take effect in each file that imports it."""
    torch._dynamo.reset()
    yield
    hmpx.restore()
    torch._dynamo.reset()
