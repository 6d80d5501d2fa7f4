"""The rules of `oplists/README.md`, each on the ops a person would meet, against torch's own results."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import hmpx

BF16, FP32, FP16, FP64 = torch.bfloat16, torch.float32, torch.float16, torch.float64


def tensor(*shape, dtype=FP32):
    return torch.randn(shape).to(dtype)


X, IMAGE, QUERY = tensor(4, 4), tensor(2, 3, 4, 4), tensor(5, 1, 8)
LOW, HALF, SPARSE = X.bfloat16(), X.half(), torch.eye(4).to_sparse()
WEIGHT, BIAS, CLASSES = tensor(3, 4), tensor(3), torch.tensor([0, 1, 2, 3])
ATTENTION = nn.MultiheadAttention(8, 2)


class Batch(list):
    """A list of one's own."""


# Lists, and by the dtype of the result what is called under them.
DTYPES = [
    # positional and keyword arguments, and tensors in lists and tuples
    ({"bf16": "cat stack"}, BF16, "torch.cat([X, HALF]) torch.stack((X,HALF),dim=1) torch.cat(tensors=[X,HALF],dim=0)"),
    ({"fp32": "cat stack"}, FP32, "torch.stack(torch.aminmax(LOW,dim=0)) torch.cat(Batch([LOW]))"),
    ({"fp32": "softmax"}, FP32, "torch.softmax(LOW,1) F.softmax(LOW,dim=1) nn.Softmax(1)(LOW)"),
    ({"bf16": "matmul mm"}, FP32, "SPARSE@X torch.mm(SPARSE,X)"),
    ({"bf16": "conv2d layer_norm"}, BF16, "F.conv2d(IMAGE,IMAGE,None) F.layer_norm(IMAGE,(4,),None,None)"),
    ({"bf16": "batch_norm"}, BF16, "F.batch_norm(IMAGE,None,None,training=True)"),
    ({"bf16": "mul add"}, BF16, "2*X*3.0 torch.add(X,1,alpha=2)"),
    ({"bf16": "dot mul mean"}, BF16, "torch.dot(X[0],tensor=X[0]) torch.mul(input=X,other=X)"),
    ({"bf16": "mean"}, BF16, "torch.mean(input=X,dim=0)"),
    ({"fp32": "sum"}, FP32, "torch.sum(LOW,axis=0)"),
    # promote: the widest dtype; that of BF16 and FP16 is FP32
    ({"promote": "dot add"}, FP32, "torch.dot(LOW[0],X[0]) torch.dot(LOW[0],HALF[0]) torch.add(LOW,X)"),
    ({"promote": "dot add"}, BF16, "torch.dot(LOW[0],LOW[0])"),
    # an unlisted op that refuses mixed dtypes: that of its first input
    ({}, BF16, "F.linear(LOW,WEIGHT,BIAS) F.layer_norm(LOW,(4,),X[0],X[0]) LOW@X"),
    ({}, BF16, "F.scaled_dot_product_attention(LOW[None],X[None],HALF[None])"),
    ({}, FP32, "F.nll_loss(X.log_softmax(1),CLASSES,LOW[0]) WEIGHT@LOW F.linear(X,X)"),
    # a name stands for every way to call the op, and for no other op: sub is another one than rsub
    ({"bf16": "softmax"}, BF16, "torch.softmax(X,1) X.softmax(1) F.softmax(X,1) torch.special.softmax(X,1)"),
    ({"bf16": "add"}, BF16, "torch.add(X,X) X.add(X) X+X 1+X"),
    ({"bf16": "truediv matmul"}, BF16, "X/2 2/X torch.matmul(X,X) X.matmul(X) X@X torch.linalg.matmul(X,X)"),
    ({"bf16": "rsub pow"}, BF16, "1-X torch.rsub(X,1) X**2 2**X torch.pow(X,2)"),
    ({"bf16": "rsub truediv"}, FP32, "X-1 torch.div(X,2)"),
    # `dtype=` is the caller's decision
    ({"fp32": "softmax sum"}, BF16, "torch.softmax(X,1,BF16) F.softmax(X,1,dtype=BF16) X.sum(dtype=BF16)"),
    ({"fp32": "softmax"}, FP64, "torch.softmax(X,1,dtype=FP64)"),
    ({"fp32": "softmax"}, FP32, "torch.softmax(LOW,1,dtype=None)"),
    # the outermost listed op decides; where none is, what it calls
    ({"bf16": "multi_head_attention_forward", "fp32": "softmax linear matmul bmm"}, BF16, "attend()"),
    ({"bf16": "linear bmm baddbmm matmul scaled_dot_product_attention"}, BF16, "attend()"),
    ({"bf16": "interpolate", "fp32": "upsample_bilinear2d"}, BF16, "enlarged(IMAGE)"),
    ({"fp32": "upsample_bilinear2d"}, FP32, "enlarged(IMAGE.bfloat16())"),
]  # fmt: skip


def attend():
    return ATTENTION(QUERY, QUERY, QUERY)[0]


def enlarged(images):
    return F.interpolate(images, scale_factor=2, mode="bilinear")


@pytest.mark.parametrize("sides, dtype, calls", DTYPES, ids=str)
def test_the_dtype_of_a_call_under_lists(lists, sides, dtype, calls):
    with hmpx.convert(**lists(**sides)):
        found = {call: eval(call).dtype for call in calls.replace(", ", ",").split()}
    assert found == dict.fromkeys(found, dtype)


SOFTMAXES = "torch.softmax", "F.softmax", "torch.Tensor.softmax"
LINEARS = (
    "X, WEIGHT, BIAS",
    "LOW, WEIGHT, bias=BIAS",
    "input=X, weight=WEIGHT, bias=BIAS",
    "X, bias=BIAS, weight=WEIGHT",
)
# What is computed: the op on inputs that were cast by hand
CAST_BY_HAND = [
    *(({"fp32": "softmax"}, f"{softmax}(LOW, dim=1)", "torch.softmax(LOW.float(), 1)") for softmax in SOFTMAXES),
    ({"bf16": "matmul mm"}, "SPARSE @ X", "X"),
    ({"bf16": "matmul mm"}, "torch.mm(SPARSE, X)", "X"),
    ({"promote": "dot"}, "torch.dot(LOW[0], X[0])", "torch.dot(LOW[0].float(), X[0])"),
    ({}, "F.linear(LOW, WEIGHT, BIAS)", "F.linear(LOW, WEIGHT.bfloat16(), BIAS.bfloat16())"),
    ({}, "WEIGHT @ LOW", "WEIGHT @ LOW.float()"),
    *(
        ({"bf16": "linear"}, f"F.linear({call})", "F.linear(LOW, WEIGHT.bfloat16(), BIAS.bfloat16())")
        for call in LINEARS
    ),
    ({"fp32": "addmm"}, "X.bfloat16().addmm_(X, X)", "X.bfloat16().addmm_(LOW, LOW)"),
]


@pytest.mark.parametrize("sides, call, by_hand", CAST_BY_HAND, ids=str)
def test_the_bits_of_a_call_under_lists(lists, sides, call, by_hand):
    expected = eval(by_hand)
    with hmpx.convert(**lists(**sides)):
        assert torch.equal(eval(call), expected)


class Products(TorchDispatchMode):
    """Notes the dtypes that matrix products are handed, and computes none: with `out_dtype` a CPU has none."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if "mm" not in operator.name():
            return operator(*args, **(kwargs or {}))
        self.seen.append([each.dtype for each in args if isinstance(each, torch.Tensor)])
        return torch.empty(())


@pytest.mark.parametrize("side, x, cast", [("bf16", X, BF16), ("fp32", LOW, FP32)], ids=["bf16", "fp32"])
def test_a_product_with_an_out_dtype_is_the_callers_decision(side, x, cast, lists):
    """As a keyword and by position; its inputs are the caller's, too. Without one they are cast."""
    calls = "mm(x,x{}) addmm(x,x,x{}) bmm(batch,batch{}) baddbmm(batch,batch,batch{}) _grouped_mm(x,x,None,None{})"
    with hmpx.convert(**lists(**{side: "mm addmm bmm baddbmm _grouped_mm"})), Products() as products:
        for given, dtype in (("", cast), (",out_dtype=FP32", x.dtype), (",FP32", x.dtype)):
            for call in calls.format(*[given] * 5).split():
                products.seen.clear()
                eval(f"torch.{call}", globals(), {"x": x, "batch": x[None]})
                assert [{*each} for each in products.seen] == [{dtype}], call


def test_out_is_the_callers_decision(lists):
    out = torch.empty(4, 4)
    with hmpx.convert(**lists(bf16="mm matmul")):
        assert torch.mm(X, X, out=out) is out
    assert torch.equal(out, X @ X)


def test_torchs_other_names_respect_regions_and_restore(lists):
    with hmpx.convert(**lists(bf16="mm")):
        with hmpx.disable_casts():
            assert torch.mm(x=X, mat2=X).dtype is FP32
        held = (torch.mm,)
    assert held[0](x=X, mat2=X).dtype is FP32


# bf16 and fp32: every eligible tensor, wherever it stands in the call


def test_tensors_that_are_not_eligible_pass_through(lists):
    values = [torch.ones(2, 2, dtype=dtype) for dtype in (FP64, torch.int64, torch.bool, torch.complex64)]
    with hmpx.convert(**lists(bf16="mul abs")):
        for value in (*values, torch.ones(2, 2).to_sparse()):
            assert (value * value).dtype is value.dtype
            assert value.mul(value).layout is value.layout


def test_gradients_come_back_in_the_parameters_dtype(lists):
    layer, x = nn.Linear(4, 4), tensor(2, 4)
    with hmpx.convert(**lists(bf16="linear")):
        layer(x).sum().backward()
    assert layer.weight.grad.dtype is FP32
    expected = torch.ones(2, 4, dtype=BF16).t() @ x.bfloat16()
    assert torch.equal(layer.weight.grad, expected.float())


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


def test_out_by_position_of_a_python_function(lists):
    x, out = tensor(4, 4), torch.zeros(4, 4)
    with hmpx.convert(**lists(bf16="normalize")):
        assert F.normalize(x, 2.0, 1, 1e-12, out) is out and out.any()


# Calls that are out of the ordinary


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
