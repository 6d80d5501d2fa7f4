"""The catalogue: it knows what the lists name, and what it says of torch is measured."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from torch.utils._pytree import tree_map

from hmpx.ops.policies import op_facts
from hmpx.ops.policies.catalog import aten_only, canonical, catalog, retired
from hmpx.ops.policies.composition import ARITHMETIC, COMPOSED, ONLY_FP32
from tests.support.samples import database, samples

DATA = Path(__file__).parents[1] / "data"


@pytest.mark.parametrize("device", ["cpu", "cuda", "xla", "hpu"])
def test_every_op_of_autocasts_lists_is_known(device):
    groups = yaml.safe_load((DATA / "autocast" / f"autocast_{device}.yaml").read_text())["schema_ops"]
    names = {name for group in groups.values() for name in group if not retired(name)}
    unknown = {name for name in names if canonical(name) not in catalog() and not aten_only(name)}
    unreachable = {name for name in names if canonical(name) not in catalog()} - unknown
    assert not unknown
    assert not unreachable  # each has a Python entry point in this torch


def test_ops_of_other_namespaces_are_found():
    labels = {name: {entry.label for entry in op.entries} for name, op in catalog().items()}
    assert {"torch.matmul", "Tensor.matmul", "Tensor.__matmul__", "Tensor.__rmatmul__"} <= labels["matmul"]
    assert "torch.linalg.matmul" in labels["linalg_matmul"] and "torch.fft.fft" in labels["fft_fft"]
    assert {"torch._VF.lstm", "torch.lstm"} == labels["lstm"]
    assert labels["iadd"] == {"Tensor.__iadd__"} and "Tensor.__rsub__" in labels["rsub"]
    assert "torch._C._nn.cross_entropy_loss" in labels["cross_entropy"]
    assert "Tensor.__add__" in labels["add"] and "Tensor.__iadd__" not in labels["add"]
    assert "_parse_to" not in labels  # in torch._C._nn, and no op


def test_the_tables_name_only_what_exists():
    ops = catalog().keys()
    assert not (op_facts.REFUSES_MIXED | op_facts.O2_BF16 | op_facts.STATISTICS.keys()) - ops
    assert not set(op_facts.RENAMED.values()) - ops
    parts = {part for rows in COMPOSED.values() for row in rows for way in row.ways for part in way}
    assert all(name in ops or aten_only(name) for name in parts | ARITHMETIC | ONLY_FP32)
    composed = {name for name in COMPOSED if not retired(name)}
    assert not (composed | op_facts.VIEWS | op_facts.CAST_VIEWS) - ops
    assert not (set(op_facts.FOLLOWS) | set(op_facts.FOLLOWS.values())) - ops


def test_none_is_legal_where_torch_says_so():
    """A call with None elsewhere takes the slow way."""
    signatures = {entry.label: entry.signature for op in catalog().values() for entry in op.entries}
    assert [p.optional for p in signatures["torch.nn.functional.linear"].lead] == [False, False, True]
    assert [p.optional for p in signatures["torch.batch_norm"].lead[:5]] == [False, *[True] * 4]  # and required


# Refused mixtures that the first-input rule leaves to torch, with the reason.
LEFT_TO_TORCH = {
    "comparisons of tensors": {"allclose", "isclose", "heaviside"},
    "composed of ops that have the rule": {
        "linear_cross_entropy", "multi_head_attention_forward", "cartesian_prod", "meshgrid",
    },
    "not of a model's forward": {"_chunk_cat", "_softmax_backward_data", "_unsafe_masked_index_put_accumulate"},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_which_ops_refuse_mixed_dtypes_is_measured():
    """Every op with two floating inputs and BF16 and FP32 kernels, called with one input in BF16, the other in FP32."""
    left = set().union(*LEFT_TO_TORCH.values())
    refusing = set()
    for op in database():
        overload = op.name.startswith("torch.ops.")  # called past every Python function
        if not overload and {torch.float32, torch.bfloat16} <= op.supported_dtypes("cpu"):
            name = canonical(op.name.removeprefix("nn.functional.").replace(".", "_"))
            if any(_mixtures_raise(op, sample) for sample in samples(op, torch.float32, 6)):
                refusing.add(name)
    unexplained = refusing - op_facts.REFUSES_MIXED - left
    assert len(refusing) > 40
    assert not unexplained
    assert sorted(left - refusing) == []  # an exception that is no longer one goes


def _mixtures_raise(op, sample):
    def call(pick):
        count = 0

        def choose(x):
            nonlocal count
            if isinstance(x, torch.Tensor) and x.dtype is torch.float32 and x.layout is torch.strided:
                count += 1
                return x.detach().to(pick(count))
            return x

        arguments = tree_map(choose, (sample.input, sample.args, sample.kwargs))
        try:
            op.op(arguments[0], *arguments[1], **arguments[2])
        except Exception:
            return count, True
        return count, False

    mixtures = [
        lambda i: torch.bfloat16 if i == 1 else torch.float32,
        lambda i: torch.float32 if i == 1 else torch.bfloat16,
    ]
    uniform = [call(lambda i, d=d: d)[1] for d in (torch.float32, torch.bfloat16)]
    results = [call(pick) for pick in mixtures]
    return results[0][0] > 1 and not any(uniform) and all(raised for _, raised in results)
