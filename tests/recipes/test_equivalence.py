"""Each recipe beside the system that it names, where that system runs on a CPU.

Elsewhere: autocast's CPU lists over torch's sample database (`test_opinfo`) and on real models (`downstream/test_zoo`),
FP32 masters and gradients beside FP32 copies (`updates/test_programs`), dtypes under the XLA modes (`test_dtype_map`),
`torch.autocast("xla")` on an XLA device (`test_xla`).
"""

from __future__ import annotations

from dataclasses import asdict

import pytest
import torch
import torch.nn.functional as F
from torch.testing._internal.autocast_test_lists import AutocastCPUTestLists, AutocastTestLists

import hmpx
from hmpx.ops.policies.catalog import catalog
from hmpx.ops.policies.op_facts import UNSAFE_OF_LOW
from hmpx.recipes.reading import read_recipe

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

# Of PyTorch's lists of what autocast does: not on a CPU, a result that is no tensor, arguments that torch refuses.
NOT_HERE = {"cudnn_convolution", "cudnn_convolution_transpose", "equal", "einsum"}
REFUSED = {(F, "margin_ranking_loss")}
MEANT = {**dict.fromkeys(("fp16", "bf16", "16"), "low"), "fp32": FP32, "promote": FP32}


def _cases(lists):
    """(op, arguments, the dtype that autocast gives, or "low") of PyTorch's own tests of autocast."""
    for key, cases in vars(lists).items():
        for op, args, *more in cases:
            stated = next((each for each in more if isinstance(each, torch.dtype)), None)
            kwargs = next((each for each in more if isinstance(each, dict)), {})
            if op not in NOT_HERE | UNSAFE_OF_LOW.keys() and not key.endswith("banned"):
                yield key, op, args, kwargs, stated or MEANT[key.rpartition("_")[2]]


def _entry_points(key, op, args):
    """Where a caller reaches it: namespaces, and methods of the first argument."""
    if not key.startswith("methods"):
        for module in (torch, torch._C._nn, F):
            yield from [(module, op)] if hasattr(module, op) and (module, op) not in REFUSED else []
        if op.startswith("linalg_"):
            yield torch.linalg, op.removeprefix("linalg_")
    if not key.startswith("nn") and isinstance(args[0], torch.Tensor) and hasattr(torch.Tensor, op):
        yield torch.Tensor, op


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("low", [BF16, FP16])
@pytest.mark.parametrize(
    "recipe, lists, count", [("autocast-cuda", AutocastTestLists, 150), ("autocast-cpu", AutocastCPUTestLists, 80)]
)
def test_autocasts_own_test_lists(recipe, lists, count, low):
    """PyTorch says in its tests which dtype autocast gives, for CUDA as well: here op by op, by every entry point."""
    wrong, seen = [], 0
    with hmpx.activate({**asdict(read_recipe(recipe)), "low_precision": low, "where": "everywhere"}):
        for key, op, args, kwargs, expected in _cases(lists(torch.device("cpu"))):
            expected = low if expected == "low" else expected
            places = list(_entry_points(key, op, args))
            assert places, op
            for owner, name in places:
                out = getattr(owner, name)(*args, **kwargs)
                out = out[0] if isinstance(out, tuple | list) else out
                seen += 1
                if out.dtype is not expected:
                    wrong.append(f"{owner.__name__}.{name}: {out.dtype}, not {expected}")
    assert not wrong and seen >= count


def test_hmp_o2_is_products_and_convolutions_in_bf16_and_the_rest_in_fp32():
    policy = read_recipe("hmp-o2").policy()
    products = {"linear", "matmul", "mm", "bmm", "addmm", "addbmm", "baddbmm", "mv", "addmv", "addr", "einsum", "inner",
                "tensordot", "chain_matmul", "linalg_multi_dot"}  # fmt: skip
    convolutions = {name for name in catalog() if name.startswith("conv") and "backward" not in name} - {"conj"}
    assert products | {"conv2d", "conv_transpose2d"} <= set(policy.bf16) and set(policy.bf16) - products <= convolutions
    assert {"softmax", "layer_norm", "add", "mul", "gelu", "exp", "sum", "cross_entropy"} <= set(policy.fp32)
    assert not policy.promote and not set(policy.bf16) & set(policy.fp32)
    # views, factories and Python functions that only call other ops have no precision of their own
    assert not {"view", "t", "zeros_like", "to", "multi_head_attention_forward"} & set(policy.fp32)
    with hmpx.activate("hmp-o2"):
        x = torch.randn(4, 4)
        assert (x @ x).dtype is BF16 and ((x @ x) + (x @ x)).dtype is FP32 and F.gelu(x @ x).dtype is FP32
