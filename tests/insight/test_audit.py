"""`audit` finds what no patch in Python reaches, names the user's line, and leaves everything as it was."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.functional import softmax as own_softmax

import hmpx

FP32, BF16 = torch.float32, torch.bfloat16
X = torch.randn(4, 4)
ESCAPED = frozenset({torch.mm})  # which cannot be changed


def found(model, inputs=X):
    return {(finding.op, finding.aten, finding.dtypes) for finding in hmpx.audit(model, inputs).findings}


def scripted(module):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(module)


@pytest.mark.parametrize(
    "call, expected",
    [
        (lambda x: torch.einsum("ij,jk", x, x), set()),
        (lambda x: torch.ops.aten.mm(x, x), {("mm", "aten.mm.default", (FP32,))}),
        (lambda x: torch.linalg.matrix_power(x, -2), {("mm", "aten.mm.default", (FP32,))}),
        (lambda x: torch.ops.aten.einsum("ij,jk", [x, x]), {("bmm", "aten.bmm.default", (FP32,))}),
        (lambda x: next(iter(ESCAPED))(x, x), {("mm", "aten.mm.default", (FP32,))}),
        (lambda x: torch.ops.aten.mm(x.bfloat16(), x.bfloat16()), set()),
        (lambda x: torch.cond(x.sum() > 99, lambda x: x * 2, lambda x: x, (x,)), set()),
        (lambda x: torch.ops.aten._softmax(x.bfloat16(), -1, False), {("softmax", "aten._softmax.default", (BF16,))}),
        (
            lambda x: torch.ops.aten.native_layer_norm(x, (4,), None, None, 1e-5),
            {("layer_norm", "aten.native_layer_norm.default", (FP32,))},
        ),
        (
            lambda x: torch.ops.aten.convolution(x[None], x[None], None, [1], [0], [1], False, [0], 1),
            {("conv1d", "aten.convolution.default", (FP32,))},
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
        report = hmpx.audit(model, X)
    assert {f.op for f in report.findings} == {"addmm", "layer_norm"} and report  # softmax ran in FP32
    line = model.__code__.co_firstlineno + 1
    assert all(f.where == f"{__file__}:{line}" and f.calls == 2 for f in report.findings)
    expected = "layer_norm is in the bf16 list and ran in float32 (aten.native_layer_norm.default, 2 times)"
    assert f"{__file__}:{line}: {expected}" in str(report).splitlines()


def test_an_op_that_stands_for_several_is_found_under_the_one_that_is_listed(lists):
    linear = scripted(nn.Linear(4, 4))
    with hmpx.convert(**lists(bf16="linear")):
        assert found(linear) == {("linear", "aten.addmm.default", (FP32,))}
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
    model = Everything().train(train)
    with hmpx.convert():
        report = hmpx.audit(model, torch.randn(2, 4, 4))
    assert not report and not report.findings
    assert str(hmpx.Audit((), ())) == "every listed op ran in the dtype that its list says"


def test_decisions_of_the_user_are_no_findings():
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


def test_inputs_come_in_three_forms():
    def model(a, b=None):
        assert a is X and (b is None or b is X)
        return torch.ops.aten.mm(a, a)

    with hmpx.convert():
        assert found(model, X) == found(model, (X, X)) == found(model, {"a": X, "b": X}) != set()


def test_everything_is_as_it_was():
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout())
    before, state = {name: value.clone() for name, value in model.state_dict().items()}, torch.get_rng_state()
    with hmpx.convert():
        hmpx.audit(model, X)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state()) and not torch._C._len_torch_dispatch_stack()


def test_buffers_are_put_back_after_an_error():
    norm = nn.BatchNorm1d(4)

    class Raises(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = norm

        def forward(self, x):
            self.norm(x)
            raise ValueError("in forward")

    with hmpx.convert(), pytest.raises(ValueError, match="in forward"):
        hmpx.audit(Raises(), X)
    assert not norm.running_mean.any() and norm.num_batches_tracked == 0


def test_compiled_functions_run_as_they_are_written():
    compiled = torch.compile(lambda x: torch.ops.aten.einsum("ij,jk", [x, x]), backend="aot_eager")
    with hmpx.convert():
        compiled(X)
        assert {op for op, *_ in found(compiled)} == {"bmm"}
    torch._dynamo.reset()


def test_names_that_escaped_are_told():
    with hmpx.convert():
        report = hmpx.audit(lambda x: own_softmax(x, -1), X)
        assert not report and any("ESCAPED" in line for line in report.escaped)
        assert any(line.startswith("escaped: ") and "ESCAPED" in line for line in str(report).splitlines())


def test_without_a_conversion_it_says_so():
    with pytest.raises(hmpx.HmpxError, match=r"call hmpx\.convert\(\) first"):
        hmpx.audit(nn.Linear(4, 4), X)
