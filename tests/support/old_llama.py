"""A Llama in the style of older transformers: a region of torch.autocast holds its angles in FP32."""

import torch
import torch.nn.functional as F
from torch import nn

LENGTH = 2100  # positions above 2,048, of which BF16 knows every sixteenth


class Rotary(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.register_buffer("inv_freq", 1.0 / (10000.0 ** (torch.arange(0, size, 2).float() / size)))

    def forward(self, x, positions):
        with torch.autocast(device_type=x.device.type, enabled=False):
            angles = (self.inv_freq[None, :, None].float() @ positions[:, None, :].float()).transpose(1, 2)
            angles = torch.cat((angles, angles), -1)
            cos, sin = angles.cos(), angles.sin()
        return cos.to(x.dtype), sin.to(x.dtype)


def rotated(x, cos, sin):
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up, self.down = nn.Linear(width, 24), nn.Linear(width, 24), nn.Linear(24, width)

    def forward(self, x, cos, sin):
        y = self.norm(x)
        q, k = rotated(self.q(y), cos, sin), rotated(self.k(y), cos, sin)
        x = x + self.o(F.scaled_dot_product_attention(q[:, None], k[:, None], self.v(y)[:, None], is_causal=True)[:, 0])
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class OldLlama(nn.Module):
    def __init__(self, width=16, words=32):
        super().__init__()
        self.words, self.rotary, self.layer = nn.Embedding(words, width), Rotary(width), Layer(width)
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, ids):
        x = self.words(ids)
        cos, sin = self.rotary(x, torch.arange(ids.shape[1])[None])
        return self.head(self.layer(x, cos, sin))


def old_llama():
    """A model and token ids of one sequence; a sharp attention shows every angle in the logits."""
    torch.manual_seed(0)
    model = OldLlama()
    with torch.no_grad():
        for each in (model.layer.q, model.layer.k):
            each.weight.mul_(8)
    return model, torch.randint(32, (1, LENGTH))
