"""hmpx is deleted from `sys.modules` and imported again, as notebooks do."""

import textwrap

from tests.support import python

BEGIN = """
import gc, sys
import torch, hmpx
from torch import nn

def again():
    for name in [name for name in sys.modules if name.partition(".")[0] == "hmpx"]:
        del sys.modules[name]
    gc.collect()
    import hmpx
    return hmpx

original, earlier = torch.matmul, hmpx
model = nn.Linear(8, 8).bfloat16()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(2, 8).bfloat16()
"""
USED = """
for _ in range(3):
    with hmpx.convert(kernels="float32"):
        compiled = torch.compile(lambda x: x @ x.T, backend="aot_eager")
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is compiled(torch.ones(2, 2)).dtype is torch.bfloat16
        hmpx.attach(optimizer)
        model(x).float().square().sum().backward()
        optimizer.step()
        hmpx.detach(optimizer)
    with hmpx.convert(fp8=["linear"]):
        nn.functional.linear(torch.ones(16, 16), torch.ones(16, 16))
    assert torch.matmul is original
    before, hmpx = hmpx, again()
    assert hmpx is not before
"""


def test_a_new_import_does_what_the_first_one_does():
    python.run("-c", textwrap.dedent(BEGIN + USED), check=True)
