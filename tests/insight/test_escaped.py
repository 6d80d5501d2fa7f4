"""A record finds the listed ops that no patch in Python reaches, and names the user's line."""

import re
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.functional import softmax as own_softmax

import hmpx
from tests.support.recorded import escaped, line

FP32, BF16 = torch.float32, torch.bfloat16
X = torch.randn(4, 4)
ESCAPED = frozenset({torch.mm})  # which cannot be changed


def found(call, *args):
    lines = escaped(call, *(args or (X,)))
    return {re.fullmatch(r".*: (\w+) is in the \w+ list and ran in (\w+) \((\S+)\)", line).groups() for line in lines}


def scripted(module):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(module)


MM = {("mm", "float32", "aten.mm.default")}


@pytest.mark.parametrize(
    "call, expected",
    [
        (lambda x: torch.einsum("ij,jk", x, x), set()),
        (lambda x: torch.ops.aten.mm(x, x), MM),
        (lambda x: torch.linalg.matrix_power(x, -2), MM),
        (lambda x: torch.ops.aten.einsum("ij,jk", [x, x]), {("bmm", "float32", "aten.bmm.default")}),
        (lambda x: next(iter(ESCAPED))(x, x), MM),
        (lambda x: torch.ops.aten.mm(x.bfloat16(), x.bfloat16()), set()),
        (lambda x: torch.cond(x.sum() > 99, lambda x: x * 2, lambda x: x, (x,)), set()),
        (
            lambda x: torch.ops.aten._softmax(x.bfloat16(), -1, False),
            {("softmax", "bfloat16", "aten._softmax.default")},
        ),
        (
            lambda x: torch.ops.aten.native_layer_norm(x, (4,), None, None, 1e-5),
            {("layer_norm", "float32", "aten.native_layer_norm.default")},
        ),
        (
            lambda x: torch.ops.aten.convolution(x[None], x[None], None, [1], [0], [1], False, [0], 1),
            {("conv1d", "float32", "aten.convolution.default")},
        ),
    ],
)
def test_what_passes_no_wrapper_is_found(call, expected):
    with hmpx.convert():
        assert found(call) == expected


def test_scripted_modules_are_found_with_the_line_that_calls_them():
    inner = scripted(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Softmax(-1)))

    def model(x):
        return inner(x), inner(x)  # this line

    with hmpx.convert():
        lines = escaped(model, X)
    ran = "is in the bf16 list and ran in float32"  # softmax ran in FP32
    assert sorted(lines) == [
        f"{line(model, 1)}: addmm {ran} (aten.addmm.default, 2 times)",
        f"{line(model, 1)}: layer_norm {ran} (aten.native_layer_norm.default, 2 times)",
    ]


def test_an_op_that_stands_for_several_is_found_under_the_one_that_is_listed(lists):
    linear = scripted(nn.Linear(4, 4))
    with hmpx.convert(**lists(bf16="linear")):
        assert found(linear) == {("linear", "float32", "aten.addmm.default")}
        assert not found(lambda x: F.linear(x, x)) and not found(lambda x: torch.relu(x))


class Everything(nn.Module):
    """Layers of every kind, each as the default lists want it."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.lstm = nn.Conv1d(4, 4, 3, padding=1), nn.BatchNorm1d(4), nn.LSTM(4, 4)
        self.encoder = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        self.group, self.embed = nn.GroupNorm(2, 4), nn.Embedding(4, 4)

    def forward(self, x):
        y = self.encoder(self.norm(self.conv(x)))
        y = self.lstm(y)[0] + self.group(x) + self.embed(torch.arange(4))
        y = F.dropout(y) @ y.mT * 2
        y += 1
        return F.cross_entropy(F.log_softmax(y / 2, -1).flatten(1), torch.zeros(len(y), dtype=torch.long))


@pytest.mark.parametrize("train", [True, False])
def test_nothing_is_found_where_every_op_runs_as_listed(train):
    with hmpx.convert():
        assert not found(Everything().train(train), torch.randn(2, 4, 4))


def test_an_op_in_no_list_is_not_taken_for_a_listed_one_that_is_made_of_it(lists):
    """Called by itself it is in no list; called as `torch.ops.aten`, it may be any of them."""
    with hmpx.convert(**lists(fp32="quantile renorm dist")):
        for call in (lambda x: x.sort(), lambda x: torch.msort(x), lambda x: x.norm(), lambda x: torch.linalg.norm(x)):
            assert found(call, X.bfloat16()) == set()
        sorts = {("quantile", "bfloat16", "aten.sort.default")}
        assert found(lambda x: torch.ops.aten.sort(x), X.bfloat16()) == sorts


def test_decisions_of_the_user_are_not_found():
    def model(x):
        with hmpx.disable_casts():
            x @ x
        torch.mm(x, x, out=torch.empty(4, 4))
        torch.softmax(x, -1, dtype=BF16)
        x.mul_(2)
        return own(x)

    @hmpx.fp32
    def own(x):
        return torch.linalg.multi_dot([x, x, x])

    with hmpx.convert():
        assert not found(model)
        with hmpx.disable_casts():
            assert not found(lambda x: torch.ops.aten.mm(x, x))


def test_backward_is_not_looked_at():
    def model(x):
        weight = x.bfloat16().requires_grad_()
        F.linear(weight, weight).float().square().sum().backward()

    with hmpx.convert():
        assert not found(model)


def test_captured_names_that_could_not_be_changed_are_told():
    with hmpx.convert(), hmpx.record() as log:
        own_softmax(X, -1)
    assert any("ESCAPED" in line for line in log.escaped)
