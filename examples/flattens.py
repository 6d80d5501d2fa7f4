"""A BF16 training whose loss flattens, with nothing wrong to be seen: what `python -m hmpx doctor` is for."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 10)).bfloat16()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
losses = []
for _ in range(1000):
    inputs = torch.randn(64, 64).bfloat16()
    loss = nn.functional.cross_entropy(model(inputs), inputs[:, :10].argmax(1))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
print(f"loss of the last 100 steps: {sum(losses[-100:]) / 100:.3f}")
