"""Programs whose fault shows at another place than where it is; what is to blame is known by hand."""

from __future__ import annotations

import torch
from torch import nn

from tests.support.planted import WIDTH


def variance_then_exp(h):
    """The difference comes out as 0 in BF16, where it is 0.3; `exp` then overflows, which is right for its input."""
    h = h + 30
    variance = (h * h).mean(-1, keepdim=True) - h.mean(-1, keepdim=True).square()
    return torch.exp((h - 30) * torch.rsqrt(variance.abs() + 1e-6) * 0.1)


def one_minus_probability(h):
    """In BF16 a probability near 1 has an error as large as its distance from 1, which `log` is given."""
    p = torch.sigmoid(h * 0.1 + 6)
    return torch.log(1 - p)


class Experts(nn.Module):
    """A mixture of experts whose router has logits around 50 that are some hundredths apart: in BF16 they are equal."""

    def __init__(self, choice, top=1, sparse=False, experts=8):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.router = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, experts)
        with torch.no_grad():
            self.router.weight.mul_(0.05)
            self.router.bias.fill_(50.0)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(experts))
        self.last, self.choice, self.top, self.sparse = nn.Linear(WIDTH, 4), choice, top, sparse

    def chosen(self, p):
        if self.choice == "topk":
            return p.topk(self.top, -1).indices
        if self.choice == "sort":
            return p.sort(-1, descending=True).indices[:, : self.top]
        if self.choice == "max":
            return p.max(-1, keepdim=True).indices
        return p.argmax(-1, keepdim=True)

    def forward(self, x):
        h = torch.tanh(self.first(x))
        p = torch.softmax(self.router(h), -1)
        chosen = self.chosen(p)
        weights = p.gather(-1, chosen)
        out = torch.zeros_like(h)
        for number, expert in enumerate(self.experts):
            if self.sparse:  # each expert sees its own tokens alone, another number of them in each run
                token, place = torch.where(chosen == number)
                if len(token):
                    out = out.index_add(0, token, expert(h[token]) * weights[token, place, None])
            else:
                out = out + expert(h) * (weights * (chosen == number)).sum(-1, keepdim=True)
        return self.last(out)


class Codes(nn.Module):
    """A codebook whose entries are looked up without gradients, by distances that are large and alike."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)
        self.register_buffer("codes", torch.randn(32, WIDTH) * 0.1 + 20)

    def forward(self, x):
        h = self.first(x)
        with torch.no_grad():
            code = torch.matmul(h + 20, self.codes.t()).argmax(-1)
        picked = (self.codes - 20)[code]
        return self.last(h + (picked - h).detach() * 10)


def masked_by_a_constant(h):
    """FP16 does not hold the constant."""
    return torch.softmax(h.masked_fill(h > 1, -1e9), -1)


def log_of_negative(h):
    """Not finite in FP32."""
    return torch.log(torch.relu(h) - 0.1)


class RootOfZero(torch.autograd.Function):
    """A backward pass that is not finite in FP32, of a forward pass that is."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient / 0


class Blocks(nn.Module):
    """Equal blocks; the output of one of them may have to be exact, for a softmax of large numbers comes behind it."""

    def __init__(self, count=6, sharp=None):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))
        self.last, self.sharp = nn.Linear(WIDTH, 4), sharp

    def forward(self, x):
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number == self.sharp:
                x = torch.softmax(x * 200 + 300, -1) * WIDTH
            x = torch.tanh(x)
        return self.last(x)
