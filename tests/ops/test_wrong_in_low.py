"""What torch computes wrongly in BF16 and FP16, without an error, is computed in FP32 wherever a program calls it."""

import warnings

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map

import hmpx
from hmpx.ops.policies import op_facts
from hmpx.ops.policies.catalog import canonical
from tests.support.samples import database, samples

LOW = (torch.bfloat16, torch.float16)
WAYS = (torch.matrix_exp, torch.linalg.matrix_exp, torch.Tensor.matrix_exp)


def series(x):
    """The exponential by its power series, in FP64."""
    term = total = torch.eye(len(x), dtype=torch.float64)
    for n in range(1, 20):
        term = term @ x.double() / n
        total = total + term
    return total


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("lists", [{}, {"bf16": ["matrix_exp"]}, {"bf16": [], "fp32": []}], ids=str)
def test_matrix_exp_has_the_numbers_of_fp32_and_the_dtype_of_its_input(dtype, lists):
    x = (torch.arange(9.0).reshape(3, 3) / 8 - 0.5).to(dtype)
    narrowed = "matrix_exp" in lists.get("bf16", ())
    with hmpx.convert(low_precision=dtype, **lists):
        for way in WAYS:
            found, wide = way(x), way(x.float())
            with hmpx.disable_casts():
                assert torch.equal(way(x), found)
            listed = way is not torch.linalg.matrix_exp  # another name in lists
            assert found.dtype is dtype and wide.dtype is (dtype if narrowed and listed else torch.float32)
            assert torch.allclose(found.double(), series(x), rtol=2**-7, atol=1e-3)


def test_its_gradient_is_that_of_fp32():
    x = (torch.arange(9.0).reshape(3, 3) / 8 - 0.5).bfloat16()
    narrow, wide = x.clone().requires_grad_(), x.double().requires_grad_()
    series(wide).square().sum().backward()
    with hmpx.convert():
        torch.matrix_exp(narrow).float().square().sum().backward()
    assert narrow.grad.dtype is torch.bfloat16
    assert torch.allclose(narrow.grad.double(), wide.grad, rtol=0.03, atol=0.03)


def test_a_list_in_fp32_decides_about_the_result():
    with hmpx.convert(fp32=["matrix_exp"]):
        assert torch.matrix_exp(torch.eye(3).bfloat16()).dtype is torch.float32


# What the sweep finds and is no fault of a kernel: memory that nobody has written, random numbers, what lies beside the
# sample in its storage; and `exp` in a loss, which goes beyond the range of FP16 and is inf for everybody to see.
NO_FAULT = frozenset(
    """
    empty empty_like empty_permuted empty_strided new_empty new_empty_strided normal rand_like randn_like as_strided
    soft_margin_loss
    """.split()
)


def numbers(op, sample, dtype):
    """Return the results of a sample, and its gradients, in FP64; of inputs that are rounded to `dtype` before."""
    inputs = []

    def cast(value):
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value
        inputs.append(value.detach().to(dtype).requires_grad_(value.requires_grad))
        return inputs[-1]

    args, kwargs = tree_map(cast, ((sample.input, *sample.args), sample.kwargs))
    found = [leaf for leaf in tree_leaves(op(*args, **kwargs)) if isinstance(leaf, torch.Tensor)]
    found = [leaf for leaf in found if leaf.is_floating_point() and leaf.layout is torch.strided]
    wanted = [each for each in inputs if each.requires_grad]
    moving = [leaf for leaf in found if leaf.requires_grad]
    gradients = torch.autograd.grad(moving, wanted, list(map(weights, moving)), allow_unused=True) if moving else ()
    return [None if each is None else each.detach().double() for each in (*found, *gradients)]


def weights(result):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(result.shape, generator=generator).to(result.dtype)


def is_garbage(low, exact):
    if low is None or exact is None or low.shape != exact.shape:
        return False
    finite = torch.isfinite(exact) & (exact.abs() < 3e4)
    low, exact = low[finite], exact[finite]
    return bool(low.isnan().any()) or float((low - exact).norm()) > 0.25 * float(exact.norm()) + 0.05


def garbage(dtype):
    """Return the ops of torch's sample database whose results or gradients in a dtype are far from those in FP32."""
    wrong = set()
    for op in database():
        for sample in samples(op, dtype, 6):
            try:
                torch.manual_seed(0)
                low = numbers(op, sample, dtype)
                torch.manual_seed(0)
                exact = numbers(op, sample, torch.float32)
            except Exception:
                continue  # torch refuses it
            if any(map(is_garbage, low, exact)):
                wrong.add(op.name)
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize("dtype", LOW)
def test_no_other_op_of_torch_gives_garbage(dtype):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = {canonical(f"torch.{name}") for name in garbage(dtype)}
    assert "matrix_exp" in found  # or this torch has mended it
    assert found - NO_FAULT <= op_facts.WRONG_IN_LOW
