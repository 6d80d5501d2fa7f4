"""The dtypes, calls, casts and bytes that `record` writes down are those that torch's dispatcher sees."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hmpx
from tests.support.autocast_lists import AUTOCAST_LISTS
from tests.support.dispatched import Seen

MADE_OF = {  # what record calls it: what the dispatcher runs for it
    "linear": "addmm mm",
    "matmul": "mm bmm",
    "scaled_dot_product_attention": "_scaled_dot_product_flash_attention_for_cpu",
    "layer_norm": "native_layer_norm",
    "batch_norm": "native_batch_norm",
    "cross_entropy": "nll_loss_forward",
    "conv2d": "convolution",
    "max_pool2d": "max_pool2d_with_indices",
    "dropout": "",  # nothing, as p is 0
    "lstm": "mkldnn_rnn_layer lstm",  # an op of its own where oneDNN has BF16 instructions
}


def named(dtype):
    return getattr(torch, dtype)


def compared(log, seen):
    """The calls of each line as record has them and as the dispatcher saw them, under the dispatcher's names."""
    recorded, dispatched = Counter(), Counter(seen.ops)
    for site in log.sites:
        if site.op == "to":
            continue
        parts = [key for key in dispatched if key[0] == site.where]
        if site.op == "lstm" and len(parts) > 1:  # as on a CPU without BF16 instructions
            dtypes = frozenset().union(*(dtypes for _, _, dtypes in parts))
            dispatched = Counter({key: count for key, count in dispatched.items() if key not in parts})
            dispatched[site.where, "lstm", dtypes] = site.calls
        names = MADE_OF.get(site.op, site.op).split()
        if not names:
            continue
        dtypes = frozenset(map(named, site.seen))
        name = next((name for name in names if (site.where, name, dtypes) in dispatched), names[0])
        recorded[site.where, name, dtypes] += site.calls
    return recorded, dispatched


def casts(log, attribute):
    found = Counter()
    for site in log.sites:
        found[site.where] += getattr(site, attribute)
    return +found


class Net(nn.Module):
    """The conv net's kinds of layers."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.head = nn.Linear(8 * 16, 10)

    def forward(self, x):
        y = self.conv(x)
        y = self.norm(y)
        y = F.relu(y)
        y = F.max_pool2d(y, 2)
        return self.head(y.flatten(1))


class Block(nn.Module):
    """The character transformer's block."""

    def __init__(self, width=16, heads=2):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        y = self.norm2(x)
        y = F.gelu(self.up(y))
        return x + self.down(y)


class Text(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(11, 16), nn.Embedding(6, 16)
        self.blocks = nn.Sequential(Block(), Block())
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 11)

    def forward(self, text):
        x = self.tokens(text) + self.positions(torch.arange(text.shape[1]))
        return self.head(self.norm(self.blocks(x)))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 10)

    def forward(self, x):
        y = self.lstm(x)[0]
        return self.head(y[:, -1])


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, bias=False)
        self.layers, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(16, 10)

    def forward(self, x):
        y = self.layers(x)
        return self.head(y.mean(1))


MODELS = {
    "text": (Text, lambda: torch.randint(11, (2, 6))),
    "conv": (Net, lambda: torch.randn(3, 1, 8, 8)),
    "encoder": (Encoder, lambda: torch.randn(2, 5, 16)),
    "lstm": (Recurrent, lambda: torch.randn(2, 5, 8)),
}


def loss_of(model, x):
    logits = model(x).float()
    return F.cross_entropy(logits.flatten(0, -2), torch.zeros(logits.flatten(0, -2).shape[0], dtype=torch.long))


@pytest.fixture(params=MODELS)
def model(request):
    make, inputs = MODELS[request.param]
    return make(), inputs()


@pytest.fixture(params=[{}, AUTOCAST_LISTS], ids=["default", "autocast"])
def converted(request):
    with hmpx.convert(**request.param) as handle:
        yield handle


def test_the_dtypes_are_those_that_the_dispatcher_sees(model, converted):
    model, x = model
    seen = Seen()
    with hmpx.record() as log, seen:
        loss_of(model, x)
    recorded, dispatched = compared(log, seen)
    assert recorded == dispatched and len(recorded) >= 3
    assert casts(log, "casts") == seen.casts and casts(log, "bytes_cast") == seen.bytes


def test_healthy_models_raise_no_alarm(model, converted):
    model, x = model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hmpx.record() as log:
        for _ in range(2):
            loss_of(model, x).backward()
            optimizer.step()
    assert not log.unchosen and log.first_nonfinite is None and log.escaped == converted.escaped
    assert not [trip for trip in log.round_trips if not trip.listed]
    assert not log.unmatched and log.unmatched_of_hmpx and log.steps == 2
    assert all(site.calls % 2 == 0 for site in log.sites)
