"""`hmpx.record` on architectures that people train, beside what torch's dispatcher sees of them."""

from __future__ import annotations

import os
import sys

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

import hmpx
from hmpx.base import process_state
from tests.support.untouched import attributes_of_torch

LIBRARIES = tuple(os.path.dirname(module.__file__) + os.sep for module in (torch, hmpx))
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
EAGER = {"attn_implementation": "eager"}  # attention of matmul and softmax, each an op for both to see
FAMILIES = {  # ops in record, and what the dispatcher runs for them
    "linear matmul bmm baddbmm addmm": "addmm mm bmm baddbmm",
    "layer_norm": "native_layer_norm",
    "batch_norm": "native_batch_norm",
    "softmax": "_softmax",
    "conv1d conv2d": "convolution",
    "gelu": "gelu",
    "relu": "relu",
    "tanh": "tanh",
    "rsqrt": "rsqrt",
    "embedding": "embedding",
}


class Seen(TorchDispatchMode):
    """(operator, the line of code outside of torch, the floating dtypes that it was given)"""

    def __init__(self):
        super().__init__()
        self.ops = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        frame = sys._getframe(1)
        while frame.f_code.co_filename.startswith((*LIBRARIES, "<hmpx")):
            frame = frame.f_back
        tensors = torch.utils._pytree.tree_leaves((args, kwargs))
        dtypes = {x.dtype for x in tensors if isinstance(x, torch.Tensor) and x.is_floating_point()}
        name = func._schema.name.removeprefix("aten::")
        self.ops.add((name, f"{frame.f_code.co_filename}:{frame.f_lineno}", frozenset(dtypes)))
        return func(*args, **(kwargs or {}))


def text(**more):
    return {"input_ids": torch.randint(3, 40, (2, 12)), **more}


def pixels():
    return {"pixel_values": torch.randn(2, 3, 32, 32)}


MODELS = {
    "bert": lambda: (transformers.BertModel(transformers.BertConfig(vocab_size=40, **SIZES, **EAGER)), text()),
    "gpt2": lambda: (
        transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=40, **EAGER)),
        text(),
    ),
    "vit": lambda: (
        transformers.ViTModel(transformers.ViTConfig(image_size=32, patch_size=8, **SIZES, **EAGER)),
        pixels(),
    ),
    "t5": lambda: (
        transformers.T5Model(
            transformers.T5Config(vocab_size=40, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, **EAGER)
        ),
        text(decoder_input_ids=torch.randint(3, 40, (2, 5))),
    ),
    "resnet": lambda: (
        transformers.ResNetModel(
            transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic")
        ),
        pixels(),
    ),
}


def ran_in(site):
    """What the kernel ran in: `softmax` may be told by dtype=, and torch then casts inside of it."""
    dtypes = site.result if site.op == "softmax" else site.seen
    return frozenset(getattr(torch, dtype) for dtype in dtypes)


@pytest.mark.parametrize("recipe", ["hmp-o1", "autocast-cpu"])
@pytest.mark.parametrize("name", MODELS)
def test_the_dtypes_in_the_record_are_those_that_the_dispatcher_sees(name, recipe):
    before = attributes_of_torch()
    model, inputs = MODELS[name]()
    model.eval()
    seen = Seen()
    with hmpx.activate(recipe), hmpx.record() as log, seen:
        model(**inputs)
    compared = 0
    for ops, operators in FAMILIES.items():
        recorded = {(site.where, ran_in(site)) for site in log.sites if site.op in ops.split()}
        dispatched = {(where, dtypes) for operator, where, dtypes in seen.ops if operator in operators.split()}
        assert recorded == dispatched, ops
        compared += len(recorded)
    first = log.first_nonfinite
    assert compared >= 4 and (first is None or (name, first.op) == ("t5", "log"))  # of distance 0, in FP32 as well
    assert str(log).startswith(f"{sum(site.calls for site in log.sites)} calls of ")
    assert attributes_of_torch() == before and not process_state.in_use().keys() - {"awaited"}
