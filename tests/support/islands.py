"""Models with `torch.autocast` regions inside; each computes the same under torch.autocast and under op lists."""

import contextlib

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


def maybe_autocast(device, enabled):
    """As in transformers 5.0 to 5.17."""
    if torch.is_autocast_enabled(device) or enabled:
        return torch.autocast(device, enabled=enabled)
    return contextlib.nullcontext()


@torch.autocast("cpu", enabled=False)
def decorated(x, w):
    return x @ w


def generated(x, w):
    with off():
        yield x @ w
        yield w @ x


def block(net, x):
    before = x @ net.w
    with off():
        inside = x @ net.w, torch.mm(x, net.w), net.linear(x)
    return before, *inside, net.linear(x)


def nested(net, x):
    found = []
    with off():
        found.append(x @ net.w)
        with torch.autocast("cpu", dtype=BF16):
            found.append(x @ net.w)
            with off():
                found.append(net.linear(x))
            found.append(net.linear(x))
        found.append(x @ net.w)
    return *found, x @ net.w


def raising(net, x):
    with contextlib.suppress(ValueError), off():
        raise ValueError
    return (x @ net.w,)


def asking(net, x):
    with maybe_autocast("cpu", False):
        inside = x @ net.w
    low = x.to(torch.get_autocast_dtype("cpu")) if torch.is_autocast_enabled("cpu") else x
    return inside, low, x @ net.w


def abandoned(net, x):
    inside = generated(x, net.w)
    first = next(inside)
    inside.close()
    return first, x @ net.w


BODIES = {  # by name; each computes the same under torch.autocast
    "a block": block,
    "a decorator": lambda net, x: (decorated(x, net.w), x @ net.w),
    "nested": nested,
    "an exception": raising,
    "a generator": lambda net, x: (*generated(x, net.w), x @ net.w),
    "a generator that is closed": abandoned,
    "a question first": asking,
}
