"""The catalogue: it knows what the lists name, and what it says of torch is measured."""

import itertools
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import yaml
from torch.utils._pytree import tree_leaves, tree_map

import hmpx
from hmpx.ops.policies import op_facts
from hmpx.ops.policies.catalog import aten_only, canonical, catalog, retired
from hmpx.ops.policies.composition import ARITHMETIC, COMPOSED, ONLY_FP32
from tests.support.same import same
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
    assert not (op_facts.REFUSES_MIXED | op_facts.O2_BF16) - ops
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


def _made(call):
    """Return the tensors that a call and its backward pass make; None where torch raises."""
    torch.manual_seed(0)
    try:
        inputs, results = call()
        results = [result for result in tree_leaves(results) if torch.is_tensor(result)]
        trained = [result.float().sum() for result in results if result.requires_grad]
        gradients = torch.autograd.grad(trained, inputs, allow_unused=True) if trained else ()
    except Exception:
        return None
    return [each.detach().nan_to_num(3.0) for each in (*results, *gradients) if each is not None]


def _of(op, *shapes, grad=False):
    """Return a call of an op with inputs of these shapes: BF16 for "b 2 3", FP32 for "f 2 3"; and what else stands."""

    def call():
        made = [
            torch.randn([int(size) for size in each.split()[1:]]).to({"b": torch.bfloat16, "f": torch.float32}[each[0]])
            if isinstance(each, str)
            else each
            for each in shapes
        ]
        inputs = [each.requires_grad_(grad) for each in made if torch.is_tensor(each) and each.is_floating_point()]
        return inputs, op(*made)

    return call


def _einsum(equation):
    return lambda *operands: torch.einsum(equation, *operands)


def _lstm(x, h, c, *weights):
    return torch.lstm(x, (h, c), weights, False, 1, 0.0, False, False, False)


TAKEN = {
    "positions of rotary angles": _of(_einsum("i,j->ij"), "b 32", "f 64", grad=True),
    "an outer product in a batch": _of(_einsum("bi,bj->bij"), "f 2 3", "b 2 4"),
    "sums before a product": _of(_einsum("ij,k->ik"), "b 2 3", "f 4", grad=True),
    "three operands": _of(_einsum("i,j,k->ijk"), "b 3", "f 2", "b 4"),
    "soft targets": _of(F.cross_entropy, "b 4 5", "f 4 5", grad=True),
    "soft targets, weights of classes": _of(F.cross_entropy, "b 4 5", "f 4 5", "f 5"),
    "inner with a number": _of(lambda a, b: torch.inner(a, b), "b", "f 7", grad=True),
    "addr": _of(lambda *three: torch.addr(*three), "b 3 4", "f 3", "f 4"),
    "addr, in place": _of(lambda x, a, b: x.addr_(a, b), "b 3 4", "f 3", "f 4"),
    "huber_loss": _of(F.huber_loss, "b 9", "f 9"),
    "a share of an average as a number in FP32": _of(lambda *three: torch.lerp(*three), "b 9", "b 9", "f", grad=True),
    "a share of an average, in place": _of(lambda x, end, share: x.lerp_(end, share), "b 9", "b 9", "f"),
    "a mask in FP32": _of(F.scaled_dot_product_attention, *["b 1 2 5 8"] * 3, "f 5 5", grad=True),
    "the state of a cell in FP32": _of(
        lambda x, h, c, *w: torch.lstm_cell(x, (h, c), *w), "b 2 4", "b 2 4", "f 2 4", *["b 16 4"] * 2
    ),
    "the state of a layer in FP32": _of(_lstm, "b 5 2 4", "b 1 2 4", "f 1 2 4", *["b 16 4"] * 2),
    "rms_norm": _of(lambda x, w: F.rms_norm(x, [4], w), "f 2 4", "b 4", grad=True),
    "layer_norm": _of(lambda x, w: F.layer_norm(x, [4], w), "b 2 4", "f 4", grad=True),
}
BY_CPU = {"the state of a layer in FP32"}  # torch has no BF16 LSTM for a CPU with AVX2 alone
REFUSED = {
    "a matrix product": _of(_einsum("ij,jk->ik"), "b 2 3", "f 3 4"),
    "classes": _of(lambda x, w: F.cross_entropy(x, torch.tensor([0, 1]), w), "b 2 3", "f 3"),
    "a loss to be minimised": _of(F.huber_loss, "b 9", "f 9", grad=True),
    "addr with gradients": _of(lambda *three: torch.addr(*three), "b 3 4", "b 3", "f 4", grad=True),
}


@pytest.mark.parametrize("how", [{}, {"where": "model"}], ids=["everywhere", "model"])
def test_a_mixture_that_torch_takes_keeps_torchs_bits(how):
    """What an op refuses in other calls is no matter. What it refuses in this one is cast to the first."""
    wanted, refused = ({name: _made(call) for name, call in table.items()} for table in (TAKEN, REFUSED))
    with hmpx.convert(bf16=["relu6"], fp32=[], promote=[], **how):
        for name, call in TAKEN.items():
            if name not in BY_CPU or torch.ops.mkldnn._is_mkldnn_bf16_supported():
                assert same(_made(call), wanted[name]), name
        for name, call in REFUSED.items():
            assert refused[name] is None and _made(call)[0].dtype is torch.bfloat16, name


@pytest.mark.parametrize("where", ["everywhere", "model"])
def test_ops_with_lists_of_tensors_mix_as_the_op_without(where):
    """Each tensor is cast to its partner's dtype, in lists of several dtypes too; FP64 stays torch's matter."""
    held = [torch.zeros(3), torch.zeros(2).bfloat16(), torch.zeros(2)]
    new = [torch.ones(3).bfloat16(), torch.ones(2), torch.ones(2)]
    rates = [torch.full_like(each, 0.25) for each in new]
    with hmpx.convert(bf16=["linear"], where=where), torch.no_grad():
        for weight in (0.25, rates, [0.25] * 3):
            given = [each.clone() for each in held]
            torch._foreach_lerp_(given, new, weight)
            made = torch._foreach_lerp(held, new, weight)
            assert [each.dtype for each in given] == [each.dtype for each in made] == [each.dtype for each in held]
            key = "weights" if weight is rates else "weight"
            named = torch._foreach_lerp(**{"tensors1": new, "self": held, key: weight})
            named += torch._foreach_lerp(held, **{"tensors1": new, key: weight})
            assert [each.dtype for each in named] == [each.dtype for each in held] * 2
            assert all((each == 0.25).all() for each in (*given, *made, *named))
        with pytest.raises(RuntimeError):
            torch._foreach_lerp([torch.zeros(3)], [torch.zeros(3).double()], 0.5)


def test_numbers_that_say_where_to_look_and_averages_are_not_rounded():
    """Beside BF16, which torch refuses, they are computed in FP32, with the bits of FP32."""
    grid, steps = torch.rand(1, 3, 3, 2) * 2 - 1, torch.linspace(0.001, 0.999, 7)
    calls = {
        "grid_sample": (lambda x: F.grid_sample(x, grid, align_corners=True), (1, 2, 64, 64)),
        "grid_sample, volumes": (
            lambda x: F.grid_sample(x, torch.rand(1, 2, 2, 2, 3), align_corners=True),
            (1, 1, 4, 4, 4),
        ),
        "quantile": (lambda x: torch.quantile(x, steps), (99,)),
        "nanquantile": (lambda x: x.nanquantile(steps), (99,)),
        "histogram": (lambda x: torch.histogram(x, steps)[0], (99,)),
        "polar": (lambda x: torch.polar(x, steps), (7,)),
        "cdist": (lambda x: torch.cdist(x, steps.view(7, 1)), (5, 1)),
        "lerp": (lambda x: x.lerp(steps, 0.999), (7,)),
        "lerp, shares": (lambda x: torch.lerp(x, x, steps), (7,)),
    }

    def computed(widened):
        found = {}
        for name, (call, shape) in calls.items():
            torch.manual_seed(1)
            found[name] = call(widened(torch.rand(shape).bfloat16()))
        return found

    wanted = computed(torch.Tensor.float)
    with hmpx.convert(bf16=["linear"], fp32=[], promote=[]):
        assert same(computed(lambda x: x), wanted)
    with hmpx.convert(bf16=["lerp"], fp32=[], promote=[]):  # their own listing counts
        assert torch.lerp(steps, steps, 0.5).dtype is torch.bfloat16


# Mixtures that torch takes by the kernel that it picks for these sizes on this CPU, and refuses for others.
BY_SIZES = {"conv_transpose1d", "conv_transpose2d"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_every_mixture_that_torch_takes_in_a_sample_keeps_its_bits():
    """Of each op with the rule: its function, its method, and in place, with and without gradients."""
    calls = []
    for op in database():
        name = canonical(op.name.removeprefix("nn.functional.").replace(".", "_"))
        if name in op_facts.REFUSES_MIXED - BY_SIZES and not op.name.startswith("torch.ops."):
            for function in filter(None, (op.op, op.method_variant, op.inplace_variant)):
                for sample in samples(op, torch.float32, 6):
                    count = sum(map(_is_wide, tree_leaves((sample.input, sample.args, sample.kwargs))))
                    for pick in itertools.product((torch.float32, torch.bfloat16), repeat=count if count < 5 else 0):
                        if len({*pick}) > 1:
                            calls += [(name, partial(_sampled, function, sample, pick, grad)) for grad in (True, False)]
    wanted = [_made(call) for _, call in calls]
    with hmpx.convert(bf16=["relu6"], fp32=[], promote=[]):
        kept = [found is None or same(_made(call), found) for (_, call), found in zip(calls, wanted, strict=True)]
    differ = {(name, *call.args[2:]) for (name, call), keeps in zip(calls, kept, strict=True) if not keeps}
    assert sum(found is not None for found in wanted) > 100
    assert {name for name, *_ in differ} <= {"addr"}  # whose gradients decide, one by one
    assert not [pick for _, pick, grad in differ if not grad]


def _is_wide(x):
    return isinstance(x, torch.Tensor) and x.dtype is torch.float32 and x.layout is torch.strided


def _sampled(function, sample, pick, grad):
    dtypes, inputs = iter(pick), []

    def choose(x):
        if _is_wide(x):
            inputs.append(x.detach().to(next(dtypes)).requires_grad_(grad))
            return inputs[-1].clone()
        return x

    first, args, kwargs = tree_map(choose, (sample.input, sample.args, sample.kwargs))
    return inputs, function(first, *args, **kwargs)


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
