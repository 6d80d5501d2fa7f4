"""A small model whose variance goes wrong in BF16, for the first hour with hmpx: see README.md beside this file."""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 10)

    def forward(self, x):
        x = self.first(x) + 20
        variance = x.square().mean(-1, keepdim=True) - x.mean(-1, keepdim=True).square()
        return self.last((x - 20) / (variance + 0.1).sqrt())


def setup():
    torch.manual_seed(0)
    batches = [(torch.randn(32, 64), torch.randint(10, (32,))) for _ in range(6)]
    return Model(), batches, lambda model, x, y: nn.functional.cross_entropy(model(x), y)


if __name__ == "__main__":
    model, batches, loss = setup()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for batch in batches:
        with torch.autocast(batch[0].device.type, dtype=torch.bfloat16):
            value = loss(model, *batch)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
    print("trained")
