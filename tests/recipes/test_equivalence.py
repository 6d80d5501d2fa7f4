"""Each recipe beside the system that it names, where that system runs on a CPU.

Elsewhere: autocast's CPU lists over torch's sample database (`test_opinfo`) and on real models (`downstream/test_zoo`),
FP32 masters and gradients beside FP32 copies (`updates/test_programs`), dtypes under the XLA modes (`test_dtype_map`),
`torch.autocast("xla")` on an XLA device (`test_xla`).
"""

from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import yaml
from torch.testing._internal.autocast_test_lists import AutocastCPUTestLists, AutocastTestLists
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import hmpx
from hmpx.ops.policies.catalog import canonical, catalog
from hmpx.ops.policies.op_facts import UNSAFE_OF_LOW
from hmpx.recipes.reading import read_recipe
from tests.support.dispatched import autocasting
from tests.support.samples import database, samples
from tests.support.small_models import MODELS

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
                "tensordot", "chain_matmul", "linalg_multi_dot", "grouped_mm"}  # fmt: skip
    convolutions = {name for name in catalog() if name.startswith("conv") and "backward" not in name} - {"conj"}
    assert products | {"conv2d", "conv_transpose2d"} <= set(policy.bf16) and set(policy.bf16) - products <= convolutions
    assert {"softmax", "layer_norm", "add", "mul", "gelu", "exp", "sum", "cross_entropy"} <= set(policy.fp32)
    assert not policy.promote and not set(policy.bf16) & set(policy.fp32)
    # views, factories and Python functions that only call other ops have no precision of their own
    assert not {"view", "t", "zeros_like", "to", "multi_head_attention_forward"} & set(policy.fp32)
    with hmpx.activate("hmp-o2"):
        x = torch.randn(4, 4)
        assert (x @ x).dtype is BF16 and ((x @ x) + (x @ x)).dtype is FP32 and F.gelu(x @ x).dtype is FP32


GAUDI = yaml.safe_load((Path(__file__).parents[1] / "data" / "autocast" / "autocast_hpu.yaml").read_text())[
    "schema_ops"
]


def test_gaudis_lists_are_those_of_its_source():
    policy = read_recipe("gaudi-autocast").policy()
    low = {canonical(name) for name in GAUDI["lower_precision_fp"] + GAUDI["lower_first_arg"]}
    fp32 = {canonical(name) for name in GAUDI["fp32"]} - low
    assert (set(policy.bf16), set(policy.fp32)) == (low, fp32)
    assert set(policy.promote) == set(GAUDI["promote"]) - low - fp32


class Ran(TorchDispatchMode):
    """Every op below autograd, with the dtype of its result; casts and views aside."""

    def __init__(self):
        super().__init__()
        self.ops = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        dtypes = [each.dtype for each in tree_leaves(out) if isinstance(each, torch.Tensor)]
        if dtypes and func is not torch.ops.aten._to_copy.default and not func.is_view:
            self.ops.append((str(func), dtypes[0]))
        return out


def _ran(kind, around):
    """What ran in a forward, with the loss, and the backward of a small model."""
    torch.manual_seed(0)
    model, batches, loss = MODELS[kind](0.1)
    with Ran() as ran:
        with around():
            value = loss(model.train(), *batches[0])
        value.backward()
    return ran.ops, [p.grad for p in model.parameters()]


@pytest.mark.parametrize("kind", ["TransformerEncoder", "conv net"])
def test_a_model_under_gaudis_recipe_runs_as_by_its_lists_at_the_dispatcher(kind):
    with autocasting(GAUDI) as region:
        expected, gradients = _ran(kind, region)
    recipe = read_recipe("gaudi-autocast").inlined()
    lists = {"bf16": recipe.bf16, "fp32": recipe.fp32, "promote": recipe.promote}
    got, own = _ran(kind, lambda: hmpx.convert(**lists, where="model", kernels="native"))
    assert got == expected and len(got) > 15
    same = [torch.equal(*pair) for pair in zip(own, gradients, strict=True)]
    assert all(same) or kind == "TransformerEncoder"  # gradients of the weights of its norms are rounded to BF16 here
    with torch.autocast("cpu"):
        assert torch.ones(2, 2).mean().dtype is FP32  # the region's lists are gone


# Of PyTorch's samples of Gaudi's ops: one that hmpx refuses of BF16, and two that stand for other calls (`1 / x` is a
# product for torch; a mask).
NOT_THE_SAME = ("binary_cross_entropy", "__rdiv__", "masked.")


def _made(op, sample, dtype):
    """What an op makes of a sample in `dtype`."""

    def in_dtype(value):
        return value.to(dtype) if isinstance(value, torch.Tensor) and value.dtype is FP32 else value

    sample = sample.transform(in_dtype)
    torch.manual_seed(0)
    made = op(sample.input, *sample.args, **sample.kwargs)
    return [each for each in (made if isinstance(made, tuple) else [made]) if isinstance(each, torch.Tensor)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("everything_is_looked_through")  # the database holds torch's functions
def test_gaudis_recipe_casts_as_its_lists_do_at_the_dispatcher():
    """The dtypes of every op in these lists, and its bits, except of norms, whose weights are cast here."""
    named = {canonical(name) for group in GAUDI.values() for name in group}
    ops = {op.name.removeprefix("nn.functional."): op for op in database() if not op.variant_test_name}
    ops = {name: op for name, op in ops.items() if canonical(name) in named and not name.startswith(NOT_THE_SAME)}
    cases = [(name, sample, dtype) for name in ops for sample in samples(ops[name], FP32, 3) for dtype in (FP32, BF16)]
    with autocasting(GAUDI) as region:
        expected = []
        for name, sample, dtype in cases:
            with region():
                expected.append(_made(ops[name], sample, dtype))
    with hmpx.activate({"extends": "gaudi-autocast", "where": "everywhere", "kernels": "native"}):
        for (name, sample, dtype), outs in zip(cases, expected, strict=True):
            got = _made(ops[name], sample, dtype)
            assert [out.dtype for out in got] == [out.dtype for out in outs], (name, dtype, sample)
            if name not in ("layer_norm", "group_norm"):
                assert all(torch.equal(*map(torch.nan_to_num, pair)) for pair in zip(got, outs, strict=True)), name
    assert len(ops) > 60
