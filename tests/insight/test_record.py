"""The dtypes, calls, casts and bytes that `record` writes down are those that torch's dispatcher sees."""

import gc
import os
import sys
import weakref
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import hmpx
from tests.support.autocast_lists import AUTOCAST_LISTS
from tests.support.small_models import MODELS

MADE_OF = {  # what record calls it: what the dispatcher runs for it
    "linear": "addmm mm",
    "relu": "relu relu_",
    "matmul": "mm bmm",
    "scaled_dot_product_attention": "_scaled_dot_product_flash_attention_for_cpu",
    "layer_norm": "native_layer_norm",
    "batch_norm": "native_batch_norm",
    "cross_entropy": "nll_loss_forward",
    "conv2d": "convolution",
    "max_pool2d": "max_pool2d_with_indices",
    "dropout": "",  # nothing, as p is 0
}


LIBRARIES = (*(os.path.dirname(module.__file__) + os.sep for module in (torch, hmpx)), "<hmpx")
NO_OPS = set(  # views and factories, and parts of other ops
    "view _unsafe_view transpose t permute reshape expand slice select unsqueeze squeeze unbind as_strided alias clone "
    "stack arange zeros empty full ones copy_ new_zeros detach _log_softmax _local_scalar_dense".split()
)


class Seen(TorchDispatchMode):
    """The dtypes of the floating inputs of each aten op of a forward pass, and casts, by the line outside of torch."""

    def __init__(self):
        super().__init__()
        self.ops, self.casts, self.bytes = Counter(), Counter(), Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        frame = sys._getframe(1)
        while frame.f_code.co_filename.startswith(LIBRARIES):
            frame = frame.f_back
        name, at = func._schema.name.removeprefix("aten::"), f"{frame.f_code.co_filename}:{frame.f_lineno}"
        tensors = torch.utils._pytree.tree_leaves((args, kwargs or {}))
        tensors = [x for x in tensors if isinstance(x, torch.Tensor) and x.is_floating_point()]
        if name == "_to_copy":
            if tensors and tensors[0].dtype is not result.dtype:
                self.casts[at] += 1
                self.bytes[at] += tensors[0].nbytes + result.nbytes
        elif tensors and name not in NO_OPS:
            self.ops[at, name, frozenset(x.dtype for x in tensors)] += 1
        return result


def named(dtype):
    return getattr(torch, dtype)


def compared(log, seen):
    """The calls of each line as record has them and as the dispatcher saw them, under the dispatcher's names."""
    recorded, dispatched = Counter(), Counter(seen.ops)
    for site in log.sites:
        if site.op == "to":
            continue
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


@pytest.mark.parametrize(
    "name, lists", [("character transformer", AUTOCAST_LISTS), ("conv net", {}), ("TransformerEncoder", {})]
)
def test_the_dtypes_are_those_that_the_dispatcher_sees(name, lists):
    model, batches, loss_of = MODELS[name](dropout=0.0)
    seen = Seen()
    with hmpx.convert(**lists), hmpx.record() as log, seen:
        loss_of(model, *batches[0])
    recorded, dispatched = compared(log, seen)
    assert recorded == dispatched and len(recorded) >= 3
    assert casts(log, "casts") == seen.casts and casts(log, "bytes_cast") == seen.bytes


def test_a_model_that_is_done_with_goes_while_a_record_is_open():
    with hmpx.convert(), hmpx.record() as log:
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters())
        for _ in range(2):
            model(torch.randn(2, 4)).sum().backward()
            optimizer.step()
        left = weakref.ref(model), weakref.ref(optimizer)
        del model, optimizer
        gc.collect()
        assert [each() for each in left] == [None, None] and log.steps == 2
