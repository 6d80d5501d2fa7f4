"""Models with `torch.autocast` regions inside."""

import torch
from torch import nn

BF16, FP32 = torch.bfloat16, torch.float32
LISTS = {"bf16": ["mm", "matmul", "linear", "addmm"], "fp32": [], "promote": [], "kernels": "native"}
X = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """A forward is what `body` makes of the module and its input."""

    def __init__(self, body):
        super().__init__()
        torch.manual_seed(1)
        self.body, self.w, self.linear = body, nn.Parameter(torch.randn(4, 4)), nn.Linear(4, 4)

    def forward(self, x):
        return self.body(self, x)


def off(device="cpu"):
    return torch.autocast(device, enabled=False)


@torch.autocast("cpu", enabled=False)
def decorated(x, w):
    return x @ w
