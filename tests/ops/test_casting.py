"""The rules of `oplists/README.md`, each on the ops a person would meet, against torch's own results."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hmpx

BF16, FP32, FP16, FP64 = torch.bfloat16, torch.float32, torch.float16, torch.float64


def tensor(*shape, dtype=FP32):
    return torch.randn(shape).to(dtype)


# bf16 and fp32: every eligible tensor, wherever it stands in the call


def test_bf16_list_casts_positional_and_keyword_arguments(lists):
    with hmpx.convert(**lists(bf16="linear")):
        for dtype in (FP32, BF16, FP16):
            x, w, b = tensor(4, 8, dtype=dtype), tensor(3, 8, dtype=dtype), tensor(3)
            results = [
                F.linear(x, w, b),
                F.linear(x, w, bias=b),
                F.linear(input=x, weight=w, bias=b),
                F.linear(x, bias=b, weight=w),
            ]
            with hmpx.disable_casts():
                expected = F.linear(x.bfloat16(), w.bfloat16(), b.bfloat16())
            assert all(torch.equal(r, expected) and r.dtype is BF16 for r in results), dtype


def test_fp32_list_casts_to_fp32(lists):
    x = tensor(4, 8, dtype=BF16)
    expected = torch.softmax(x.float(), 1)
    with hmpx.convert(**lists(fp32="softmax")):
        assert torch.equal(torch.softmax(x, 1), expected)
        assert torch.equal(F.softmax(x, dim=1), expected)
        assert torch.equal(nn.Softmax(1)(x), expected)


def test_tensors_in_lists_and_tuples_are_cast(lists):
    a, b = tensor(2, 3), tensor(2, 3, dtype=FP16)
    with hmpx.convert(**lists(bf16="cat stack")):
        assert torch.cat([a, b]).dtype is BF16
        assert torch.stack((a, b), dim=1).dtype is BF16
        assert torch.cat(tensors=[a, b], dim=0).dtype is BF16


def test_tensors_that_are_not_eligible_pass_through(lists):
    values = [torch.ones(2, 2, dtype=dtype) for dtype in (FP64, torch.int64, torch.bool, torch.complex64)]
    with hmpx.convert(**lists(bf16="mul abs")):
        for value in (*values, torch.ones(2, 2).to_sparse()):
            assert (value * value).dtype is value.dtype
            assert value.mul(value).layout is value.layout


def test_sparse_companions_leave_the_call_alone(lists):
    x, sparse = tensor(4, 4), torch.eye(4).to_sparse()
    with hmpx.convert(**lists(bf16="matmul mm")):
        assert torch.equal(sparse @ x, x) and torch.equal(torch.mm(sparse, x), x)


def test_none_and_numbers_are_legal_everywhere(lists):
    x = tensor(2, 3, 4, 4)
    with hmpx.convert(**lists(bf16="conv2d layer_norm mul batch_norm add")):
        assert F.conv2d(x, tensor(5, 3, 1, 1), None).dtype is BF16
        assert F.layer_norm(x, (4,), None, None).dtype is BF16
        assert F.batch_norm(x, None, None, training=True).dtype is BF16
        assert (2 * x * 3.0).dtype is BF16 and torch.add(x, 1, alpha=2).dtype is BF16


def test_gradients_come_back_in_the_parameters_dtype(lists):
    layer, x = nn.Linear(4, 4), tensor(2, 4)
    with hmpx.convert(**lists(bf16="linear")):
        layer(x).sum().backward()
    assert layer.weight.grad.dtype is FP32
    expected = torch.ones(2, 4, dtype=BF16).t() @ x.bfloat16()
    assert torch.equal(layer.weight.grad, expected.float())


# promote: the widest dtype


def test_promote_takes_the_widest_dtype_where_torch_refuses(lists):
    a, b = tensor(4, dtype=BF16), tensor(4)
    with pytest.raises(RuntimeError):
        torch.dot(a, b)
    with hmpx.convert(**lists(promote="dot add")) as handle:
        assert torch.equal(torch.dot(a, b), torch.dot(a.float(), b))
        assert torch.dot(a, a).dtype is BF16
        assert torch.dot(a, b.half()).dtype is FP32  # the widest of BF16 and FP16 is FP32
        assert torch.add(a, b).dtype is FP32
        assert not [patch for patch in handle.patched if patch.op == "add"]  # torch does it by itself


# In no list: the dtype of the first input


def test_an_unlisted_op_that_refuses_mixed_dtypes_follows_its_first_input(lists):
    x, w, b = tensor(4, 8, dtype=BF16), tensor(3, 8), tensor(3)
    with hmpx.convert(**lists()):
        assert torch.equal(F.linear(x, w, b), F.linear(x, w.bfloat16(), b.bfloat16()))
        assert torch.equal(w @ x.t(), w @ x.t().float())
        assert F.layer_norm(x, (8,), tensor(8), tensor(8)).dtype is BF16
        assert torch.equal(F.linear(w, w), torch.nn.functional.linear(w, w))
        q = tensor(1, 2, 4, 8, dtype=BF16)
        assert F.scaled_dot_product_attention(q, q.float(), q.half()).dtype is BF16
        assert F.nll_loss(tensor(3, 4).log_softmax(1), torch.tensor([0, 1, 2]), tensor(4, dtype=BF16)).dtype is FP32


# A name stands for every way to call the op


def test_a_name_stands_for_every_way_to_call_the_op(lists):
    x = tensor(3, 3)
    ways = [
        lambda: torch.softmax(x, 1),
        lambda: x.softmax(1),
        lambda: F.softmax(x, 1),
        lambda: torch.special.softmax(x, 1),
        lambda: torch.add(x, x),
        lambda: x.add(x),
        lambda: x + x,
        lambda: 1 + x,
        lambda: x / 2,
        lambda: 2 / x,
        lambda: torch.matmul(x, x),
        lambda: x.matmul(x),
        lambda: x @ x,
        lambda: torch.linalg.matmul(x, x),
        lambda: 1 - x,
        lambda: torch.rsub(x, 1),
        lambda: x**2,
        lambda: 2**x,
        lambda: torch.pow(x, 2),
    ]
    with hmpx.convert(**lists(bf16="softmax add truediv matmul rsub pow")):
        assert [way().dtype for way in ways] == [BF16] * len(ways)
        assert (x - 1).dtype is FP32  # sub is another op than rsub
        assert torch.div(x, 2).dtype is FP32  # truediv stands for the operator
    assert [way().dtype for way in ways] == [FP32] * len(ways)


def test_nonzero_never_reaches_bool(lists):
    with hmpx.convert(**lists(fp32="nonzero")) as handle:
        assert {patch.attribute for patch in handle.patched if patch.op == "nonzero"} == {"nonzero"}
        assert bool(torch.ones(1)) is True


# In-place ops keep storage and dtype; what an op writes to is the caller's own


@pytest.mark.parametrize("side", ["bf16", "fp32", "promote"])
def test_in_place_keeps_storage_dtype_and_aliases(lists, side):
    with hmpx.convert(**lists(**{side: "add iadd addmm mul relu"})):
        for dtype, other in itertools.product((BF16, FP32), repeat=2):
            x, y = tensor(4, 4, dtype=dtype), tensor(4, 4, dtype=other)
            expected = (x.double() + y.double()).to(dtype)
            before, alias = x, x.view(-1)
            x += y
            assert x is before and x.dtype is dtype
            assert x.data_ptr() == alias.data_ptr() and torch.equal(alias.view(4, 4), x)
            assert torch.allclose(x.double(), expected.double(), rtol=1e-2, atol=1e-2)
            assert x.addmm_(y, y) is x and x.dtype is dtype
            assert x.mul_(y) is x and F.relu(x, inplace=True) is x and F.relu_(x) is x
            assert x.min() >= 0


def test_in_place_where_torch_refuses_casts_the_others(lists):
    x, y = tensor(3, 3, dtype=BF16), tensor(3, 3)
    expected = x.clone().addmm_(y.bfloat16(), y.bfloat16())
    with hmpx.convert(**lists(fp32="addmm")):
        assert torch.equal(x.addmm_(y, y), expected)


def test_indexed_assignment_casts_the_value_to_the_destination(lists):
    buffer, value = torch.zeros(4, 4), tensor(2, 4, dtype=BF16)
    with hmpx.convert(**lists()):
        buffer[torch.tensor([0, 1])] = value
        buffer[torch.tensor([False, False, True, True])] = value
        buffer[0, 0] = 7
    assert torch.equal(buffer[2:], value.float()) and buffer[0, 0] == 7


def test_every_argument_that_an_op_writes_to_is_the_callers_own():
    mean, var, noise = torch.zeros(3), torch.ones(3), torch.zeros(8, 3)
    with hmpx.convert():
        torch.native_batch_norm(tensor(8, 3).bfloat16() + 5, torch.ones(3), torch.zeros(3), mean, var, True, 0.1, 1e-5)
        assert (mean > 0.3).all()
        torch._C._nn.rrelu_with_noise(-tensor(8, 3).abs(), noise, 0.1, 0.3, True)
    assert noise.any()


# `out=` and `dtype=` are the caller's decision


def test_out_and_dtype_are_the_callers_decision(lists):
    x, out = tensor(3, 3), torch.empty(3, 3)
    with hmpx.convert(**lists(bf16="mm matmul", fp32="softmax sum")):
        assert torch.mm(x, x, out=out) is out
        assert torch.softmax(x, 1, dtype=FP64).dtype is FP64
        assert torch.softmax(x, 1, BF16).dtype is BF16
        assert F.softmax(x, 1, dtype=BF16).dtype is BF16
        assert x.sum(dtype=BF16).dtype is BF16
        assert torch.softmax(x.bfloat16(), 1, dtype=None).dtype is FP32
    assert torch.equal(out, x @ x)


def test_out_by_position_of_a_python_function(lists):
    x, out = tensor(4, 4), torch.zeros(4, 4)
    with hmpx.convert(**lists(bf16="normalize")):
        assert F.normalize(x, 2.0, 1, 1e-12, out) is out and out.any()


# The outermost listed op decides


def test_the_outermost_listed_op_decides(lists):
    x = tensor(2, 3, 4, 4)
    attention = nn.MultiheadAttention(8, 2)
    q = tensor(5, 1, 8)
    with hmpx.convert(**lists(bf16="multi_head_attention_forward", fp32="softmax linear matmul bmm")):
        assert attention(q, q, q)[0].dtype is BF16
    with hmpx.convert(**lists(bf16="linear bmm baddbmm matmul scaled_dot_product_attention")):
        assert attention(q, q, q)[0].dtype is BF16  # not listed itself: what it calls is
    with hmpx.convert(**lists(bf16="interpolate", fp32="upsample_bilinear2d")):
        assert F.interpolate(x, scale_factor=2, mode="bilinear").dtype is BF16
    with hmpx.convert(**lists(fp32="upsample_bilinear2d")):
        assert F.interpolate(x.bfloat16(), scale_factor=2, mode="bilinear").dtype is FP32


# Never cast: optimizer steps, initialisers, clipping


def test_casts_are_off_in_optimizers_initialisers_and_clipping(lists):
    everything = (
        "mul div truediv add sub sqrt lerp addcdiv addcmul qr linalg_qr linalg_vector_norm stack norm pow matmul"
    )
    weight = torch.empty(16, 16)

    def train(seed):
        torch.manual_seed(seed)
        nn.init.orthogonal_(weight)
        parameter = nn.Parameter(weight.clone())
        optimizer = torch.optim.AdamW([parameter], lr=0.1, foreach=False, amsgrad=True)
        for _ in range(3):
            parameter.grad = torch.randn(16, 16)
            total = nn.utils.clip_grad_norm_([parameter], 0.5)
            optimizer.step()
        return parameter.detach(), total

    expected = train(1)
    with hmpx.convert(**lists(bf16=everything)):
        assert (weight * weight).dtype is BF16
        got = train(1)
    assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])


# Calls that are out of the ordinary


def test_torchs_other_names_of_arguments_are_understood(lists):
    x, y = tensor(3), tensor(3)
    with hmpx.convert(**lists(bf16="dot mul mean", fp32="sum")):
        assert torch.dot(x, tensor=y).dtype is BF16
        assert torch.mul(input=x, other=y).dtype is BF16
        assert torch.mean(input=x, dim=0).dtype is BF16
        assert torch.sum(x, axis=0).dtype is FP32


def test_torchs_other_names_respect_regions_and_restore(lists):
    x = tensor(3, 3)
    with hmpx.convert(**lists(bf16="mm")):
        with hmpx.disable_casts():
            assert torch.mm(x=x, mat2=x).dtype is FP32
        held = (torch.mm,)
    assert held[0](x=x, mat2=x).dtype is FP32


def test_errors_are_torchs_own(lists):
    x = tensor(3, 4)
    with pytest.raises(RuntimeError) as plain:
        torch.mm(x, x)
    with hmpx.convert(**lists(bf16="mm")), pytest.raises(RuntimeError) as wrapped:
        torch.mm(x, x)
    assert str(wrapped.value) == str(plain.value)
    with hmpx.convert(**lists(bf16="mm")), pytest.raises(TypeError):
        torch.mm(x)


def test_numbers_on_the_left_and_foreign_operands(lists):
    class Foreign:
        def __radd__(self, other):
            return "theirs"

    with hmpx.convert(**lists(bf16="add mul")):
        assert tensor(2) + Foreign() == "theirs"
        with pytest.raises(TypeError):
            tensor(2) + "text"
