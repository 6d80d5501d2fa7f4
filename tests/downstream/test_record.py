"""`hmpx.record` on architectures that people train, beside what torch's dispatcher sees of them."""

from __future__ import annotations

import pytest
import torch

import hmpx
from hmpx.base import process_state
from tests.downstream.comparing import made
from tests.support.dispatched import Seen
from tests.support.untouched import attributes_of_torch

FAMILIES = {  # ops in record, and what the dispatcher runs for them
    "linear matmul bmm baddbmm addmm": "addmm mm bmm baddbmm",
    "layer_norm": "native_layer_norm",
    "batch_norm": "native_batch_norm",
    "softmax": "_softmax",
    "conv1d conv2d": "convolution",
    "gelu": "gelu",
    "relu": "relu relu_",
    "tanh": "tanh",
    "rsqrt": "rsqrt",
    "embedding": "embedding",
}


def ran_in(site):
    """What the kernel ran in: `softmax` may be told by dtype=, and torch then casts inside of it."""
    dtypes = site.result if site.op == "softmax" else site.seen
    return frozenset(getattr(torch, dtype) for dtype in dtypes)


@pytest.mark.parametrize("recipe", ["hmp-o1", "autocast-cpu"])
@pytest.mark.parametrize("name", ["bert", "gpt2", "vit", "t5", "timm resnet"])
def test_the_dtypes_in_the_record_are_those_that_the_dispatcher_sees(name, recipe):
    before = attributes_of_torch()
    model, inputs = made(name)
    model.eval()
    if hasattr(model, "set_attn_implementation"):
        model.set_attn_implementation("eager")  # attention of matmul and softmax, each an op for both to see
    seen = Seen()
    with hmpx.activate(recipe), hmpx.record() as log, seen:
        model(**inputs)
    compared = 0
    for ops, operators in FAMILIES.items():
        recorded = {(site.where, ran_in(site)) for site in log.sites if site.op in ops.split()}
        dispatched = {(where, dtypes) for where, operator, dtypes in seen.ops if operator in operators.split()}
        assert recorded == dispatched, ops
        compared += len(recorded)
    first = log.first_nonfinite
    assert compared >= 4 and (first is None or (name, first.op) == ("t5", "log"))  # of distance 0, in FP32 as well
    assert str(log).startswith(f"{sum(site.calls for site in log.sites)} calls of ")
    assert attributes_of_torch() == before and not process_state.in_use().keys() - {"awaited"}
