"""Trains with hmpx where torch lacks names: ``without_names.py NAME ...``; prints what is off, and bits, as JSON.

A stand-in for the package `hmpx` lets the one place that asks torch for names be imported, and changed, before hmpx.
"""

import json
import logging
import sys
import types
from pathlib import Path

import torch

TAKEN = set(sys.argv[1:])
ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
stand_in = types.ModuleType("hmpx")
stand_in.__path__ = [str(ROOT / "hmpx")]
sys.modules["hmpx"] = stand_in
from hmpx.base import torch_features  # noqa: E402

find, exists = torch_features.find, torch_features.exists
torch_features.find = lambda path: torch_features._NOTHING if path in TAKEN else find(path)
torch_features.exists = lambda path: path not in TAKEN and exists(path)
del sys.modules["hmpx"]

said: list[str] = []
listening = logging.Handler()
listening.emit = lambda record: said.append(record.getMessage())
logging.getLogger("hmpx").addHandler(listening)

import hmpx  # noqa: E402
from hmpx.base.torch_private import COMPILED, FEATURES  # noqa: E402


def train(begin, *, compiled=False):
    """Return the bits of the weights after two steps."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.LayerNorm(8), torch.nn.GELU(), torch.nn.Linear(8, 1))
    model.bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    dtype = begin(model, optimizer)
    run = torch.compile(model, backend="eager") if compiled else model
    for _ in range(2):
        run(torch.ones(3, 6, dtype=dtype)).float().square().mean().backward()
        with hmpx.disable_casts(seed=1):
            optimizer.step()
        optimizer.zero_grad()
    return [p.detach().view(torch.int16).tolist() for p in model.parameters()]


def converted(model, optimizer):
    hmpx.convert(kernels="native")
    hmpx.attach(optimizer, seed=1)
    return torch.float32


def attached(model, optimizer):
    hmpx.attach(optimizer, seed=1)
    return torch.bfloat16


bits = [train(lambda *_: torch.bfloat16), train(attached), train(converted)]
if COMPILED.names.keys() & TAKEN or not TAKEN:
    bits.append(train(converted, compiled=True))
hmpx.restore()
off = [feature.title for feature in FEATURES if not feature.is_on()]
print(json.dumps({"off": off, "said": said, "bits": bits}))
