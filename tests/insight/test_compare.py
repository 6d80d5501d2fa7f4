"""`hmpx.compare`: it names what was planted, and nothing in healthy models."""

import dataclasses
import math
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hmpx
from hmpx.insight.looks.nonfinite import Nonfinite
from hmpx.insight.trials.comparison import Row
from tests.support.planted import (
    WIDTH,
    Model,
    Steps,
    batches,
    gradient_error,
    gradients,
    line_of,
    loss_of,
    noise_of,
    policy,
    state_of,
)


def test_a_loss_on_bf16_logits_is_named():
    """Of many classes and large logits, as at the end of a decoder."""
    model = Model(lambda h: h, 60.0)
    found = hmpx.compare(model, batches(), loss_of, lists=policy("cross_entropy", "linear mul"), scores=True)
    assert [row.op for row in found.worst()] == ["cross_entropy"] == [row.op for row in found.by_op()]
    assert found.worst(1)[0].where == line_of(loss_of, "cross_entropy") and found.worst(1)[0].loss_change > 0.001


def test_a_look_for_an_inf_that_raises_is_told(monkeypatch, caplog):
    def raises(*given):
        raise RuntimeError("a fault of the look")

    monkeypatch.setattr(Nonfinite, "see", raises)
    found = hmpx.compare(Model(torch.relu), batches(), lambda model, *batch: loss_of(model, *batch) / 0)
    assert "the look for the op has raised" in found.stopped and "a fault of the look" in found.stopped
    assert "no op that hmpx sees" not in found.stopped and "a fault of the look" in caplog.text


class MaskedInPlace(nn.Module):
    """Attention as in T5: scores in BF16 take an FP32 mask in place, which is -inf there."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.query, self.last = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x):
        scores = self.query(x) @ x.transpose(0, 1)
        scores += torch.zeros(len(x), len(x)).masked_fill(torch.ones(len(x), len(x)).triu(1) > 0, torch.finfo().min)
        return self.last(scores.float().softmax(-1) @ x)


def test_a_mask_that_is_minus_infinity_breaks_nothing_where_the_gradients_are_those_of_fp32():
    data = [(torch.randn(8, 16), torch.randint(4, (8,))) for _ in range(4)]
    found = hmpx.compare(MaskedInPlace(), data, loss_of, lists="autocast-cpu")
    assert found.first_nonfinite.is_fill and not found.is_broken and "this is a mask" in str(found)
    assert str(found).splitlines()[0].startswith(("healthy", "tolerable"))


def test_a_gradient_that_overflows_where_it_is_cast_to_fp16_is_found_behind_the_op():
    """Autograd's node of the cast follows that of the product, and belongs to the same call."""
    model, lists = Model(torch.relu), policy("linear", "mul mean")
    found = hmpx.compare(
        model,
        [batch[:1] for batch in batches(2)],
        lambda model, x: (model(x) * 1e8).mean(),
        lists=dataclasses.replace(lists, low_precision=torch.float16),
    )
    assert (found.first_nonfinite.op, found.first_nonfinite.phase) == ("mul", "backward"), str(found)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_is_left_behind_and_random_ops_draw_the_same(reentrant, dtype):
    model = Steps(reentrant, nn.functional.relu).to(dtype)
    data = [(x.to(dtype), y) for x, y in batches()]
    loss_of(model, *data[0]).backward()
    before = state_of(model)
    found = hmpx.compare(model, data, loss_of)
    assert state_of(model) == before
    assert found.gradient_error < 0.1 and found.first_nonfinite is None, str(found)
    assert {"linear", "batch_norm", "relu", "dropout", "mul"} <= {row.op for row in found.rows}
    assert {row.calls for row in found.rows if row.op == "dropout"} == {4}


def test_the_error_of_a_name_alone_is_that_of_a_run_with_this_name_alone_in_the_worst_batch(lists):
    model, data = Model(lambda h: torch.softmax(h, -1), 3.0), batches(8)
    found = hmpx.compare(model, data, loss_of, lists=policy("linear softmax", "cross_entropy mul"), scores=True)
    exact = gradients(model, data)
    with hmpx.convert(**lists("linear softmax", "cross_entropy mul")):
        worst = int((gradients(model, data) - exact).square().sum(1).argmax())
    for op, others in (("linear", "softmax mul cross_entropy"), ("softmax", "linear mul cross_entropy")):
        with hmpx.convert(**lists(op, others)):
            error = (gradients(model, data)[worst] - exact[worst]).norm() / noise_of(exact)
            change = loss_of(model, *data[worst]).detach() - hmpx_off(loss_of, model, *data[worst]).detach()
        row = next(row for row in found.by_op() if row.op == op)
        assert row.gradient_error == pytest.approx(float(error), rel=1e-3), op
        assert row.loss_change == pytest.approx(abs(float(change)), rel=1e-2), op


def hmpx_off(function, *arguments):
    with hmpx.disable_casts():
        return function(*arguments)


def test_of_one_batch_there_is_no_error_and_rows_say_what_ran():
    model, (x, y) = Model(lambda h: h), batches(1)[0]
    found = hmpx.compare(model, [(x, y)], loss_of, lists=policy("linear", "mul cross_entropy"))
    row = found.rows[0]
    assert (row.op, row.module, row.calls, row.rule, row.dtypes) == (
        "linear",
        "first",
        1,
        "bf16",
        "float32 -> bfloat16",
    )
    assert math.isnan(found.gradient_error)  # one batch has no noise
    assert found.loss == pytest.approx(loss_of(model, x, y).item(), rel=1e-6)


def test_gradient_errors_are_those_that_a_hand_computes():
    model, data = Model(lambda h: h), batches(3)
    found = hmpx.compare(model, data, loss_of, lists={"opt_level": "O2"})
    exact = gradients(model, data)
    with hmpx.convert(opt_level="O2"):
        low = gradients(model, data)
        loss = sum(loss_of(model, *batch).item() for batch in data) / len(data)
    assert found.gradient_error == pytest.approx(gradient_error(exact, low), rel=1e-4)
    pairs = [(low - exact)[i] @ (low - exact)[j] for i in range(3) for j in range(3) if i != j]
    bias = max(float(sum(pairs)) / len(pairs), 0.0) ** 0.5 / float(noise_of(exact))
    assert found.gradient_bias == pytest.approx(bias, rel=1e-3)
    assert found.loss + found.loss_change == pytest.approx(loss, rel=1e-6) and found.loss_change


def test_log_probs_that_the_loss_returns_change_as_a_hand_computes(lists):
    model, data = Model(lambda h: h), batches(3)

    def loss(model, x, y):
        log_probs = model(x).log_softmax(-1).gather(1, y[:, None])
        return -log_probs.mean(), log_probs

    found = hmpx.compare(model, data, loss, lists=policy("linear", "mul log_softmax"))
    exact = [loss(model, *batch)[1].detach() for batch in data]
    with hmpx.convert(**lists("linear", "mul log_softmax")):
        low = [loss(model, *batch)[1].detach() for batch in data]
    assert found.log_prob_change == pytest.approx((torch.cat(low) - torch.cat(exact)).abs().mean().item(), rel=1e-5)
    inputs = model.first(data[0][0]).bfloat16(), model.last.weight.bfloat16(), model.last.bias.bfloat16()
    last = nn.functional.linear(*inputs).float().log_softmax(-1).gather(1, data[0][1][:, None])
    change = (last - exact[0]).abs().mean().item()
    moved = {row.module: row.log_prob_change for row in found.rows if not math.isnan(row.log_prob_change)}
    assert [*moved] == ["first", "last"] and moved["last"] == pytest.approx(change, rel=1e-5)
    assert f"log-probs by {found.log_prob_change:.2g} in the mean" in str(found)
    assert "log-prob" not in str(hmpx.compare(model, data, loss_of))


@pytest.mark.parametrize("data", [batches(1), batches(1) * 3])
def test_without_noise_there_is_no_scale(data):
    found = hmpx.compare(Model(torch.relu), data, loss_of, scores=True)
    assert math.isnan(found.gradient_error) and all(math.isnan(row.gradient_error) for row in found.names)
    assert not found.is_broken and "give two batches or more that differ" in str(found)
    assert found.names[0].op == "linear" and found.names[0].loss_change > 0


class Counting(nn.Module):
    def __init__(self, first=1):
        super().__init__()
        self.linear, self.calls, self.first = nn.Linear(WIDTH, 4), 0, first

    def forward(self, x):
        self.calls += 1
        return self.linear(x) * max(self.calls, self.first)


@pytest.mark.parametrize(
    "arguments, said",
    [
        (lambda: (Model(torch.relu), batches(), lambda m, x, y: m(x)), "scalar tensor, not a tensor of shape (32, 4)"),
        (lambda: (Model(torch.relu), batches(), lambda m, x, y: 1.0), "scalar tensor, not a float"),
        (lambda: (Model(torch.relu), batches(), lambda m, x, y: m(x).sum().detach()), "the loss has no gradient"),
        (lambda: (Counting(), batches(), loss_of), "when it is computed again"),
        (lambda: (Counting(first=9), batches(), loss_of), "when it is computed again"),  # once all batches have run
        (lambda: (Model(torch.relu), [], loss_of), "batches is empty"),
        (lambda: (Model(torch.relu), torch.ones(2), loss_of), "not a Tensor"),
        (lambda: (torch.relu, batches(), loss_of), "not a torch.nn.Module"),
        (lambda: (Model(torch.relu), batches(), loss_of, {"bf16_file": "x"}), "did you mean 'bf16_file_path'"),
        (lambda: (Model(torch.relu), batches(), loss_of, "xla-use-bf16"), "maps dtypes"),
    ],
)
def test_bad_input_is_told_and_nothing_is_changed(arguments, said):
    model, data, loss, *lists = arguments()
    function = torch.nn.functional.linear
    with pytest.raises(hmpx.HmpxError, match=re.escape(said)):
        hmpx.compare(model, data, loss, lists=lists[0] if lists else None)
    assert torch.nn.functional.linear is function


def test_the_conversion_in_force_is_what_is_compared_and_is_there_afterwards():
    with hmpx.convert(opt_level="O2") as handle:
        found = hmpx.compare(Model(torch.relu), batches(2), loss_of)
        assert handle.active and found.policy == str(handle.policy)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return torch.tanh(x) * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


def test_ops_inside_an_autograd_function_are_measured():
    found = hmpx.compare(Model(Doubled.apply), batches(2), loss_of, lists=policy("tanh", "linear mul"), scores=True)
    row = next(row for row in found.by_op() if row.op == "tanh")
    assert row.loss_change > 0 and 0 < row.gradient_error < 0.1


def test_compiled_models_run_as_they_are_written():
    found = hmpx.compare(torch.compile(Model(torch.relu)), batches(2), loss_of)
    assert [row.op for row in found.rows] == ["linear", "mul", "relu", "linear", "cross_entropy"]
    assert found.rows[0].module == "first"


class Complex(torch.nn.Module):
    """A complex product between two layers; `parts` holds its matrix as two real ones."""

    def __init__(self, parts):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = torch.nn.Linear(16, 16), torch.nn.Linear(16, 4)
        matrix = torch.randn(16, 16, dtype=torch.complex64) / 4
        split = torch.nn.ParameterList([matrix.real.clone(), matrix.imag.clone()])
        self.matrix = split if parts else torch.nn.Parameter(matrix)

    def forward(self, x):
        matrix = torch.complex(*self.matrix) if isinstance(self.matrix, torch.nn.ParameterList) else self.matrix
        return self.last((torch.tanh(self.first(x)).to(torch.complex64) @ matrix).abs())


def test_complex_weights_count_as_their_real_and_imaginary_parts():
    torch.manual_seed(1)
    batches = [(torch.randn(8, 16), torch.randint(4, (8,))) for _ in range(4)]
    lists = {"bf16": ["linear", "tanh"], "fp32": ["cross_entropy"]}

    def found(parts):
        loss = lambda model, x, y: torch.nn.functional.cross_entropy(model(x), y)  # noqa: E731
        return hmpx.compare(Complex(parts), batches, loss, lists=lists)

    whole, parts = found(False), found(True)
    assert whole.gradient_error == pytest.approx(parts.gradient_error, rel=1e-3)


def test_double_weights_stay_double():
    model = torch.nn.Linear(4, 4).double()
    batches = [(torch.randn(8, 4).double(),) for _ in range(2)]
    seen = []
    model.register_forward_pre_hook(lambda module, args: seen.append(module.weight.dtype))
    assert hmpx.compare(model, batches, lambda model, x: model(x).square().mean()).gradient_error == 0
    assert set(seen) == {torch.float64}


class Looking(torch.nn.Module):
    """An embedding whose gradient may be sparse."""

    def __init__(self, sparse):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.last = torch.nn.Embedding(12, 16, sparse=sparse), torch.nn.Linear(16, 4)

    def forward(self, x):
        return self.last(torch.tanh(self.words(x).mean(1)))


def cross_entropy(model, x, y):
    return torch.nn.functional.cross_entropy(model(x), y)


def test_sparse_gradients_count_as_dense_ones():
    torch.manual_seed(1)
    batches = [(torch.randint(12, (8, 3)), torch.randint(4, (8,))) for _ in range(4)]
    lists = {"bf16": ["linear"]}
    sparse, dense = (hmpx.compare(Looking(each), batches, cross_entropy, lists=lists) for each in (True, False))
    assert sparse.gradient_error == pytest.approx(dense.gradient_error, rel=0.5)
    assert hmpx.tune(Looking(True), batches, cross_entropy) is not None


def test_nested_tensors_count_as_their_rows_in_one_dense_tensor():
    torch.manual_seed(1)
    model = nn.Linear(8, 8)
    batches = [(torch.randn(5, 8), torch.randn(3, 8)) for _ in range(4)]

    def nested(model, *parts):
        return model(torch.nested.nested_tensor([*parts], layout=torch.jagged)).values().float().square().mean()

    def dense(model, *parts):
        return model(torch.cat(parts)).float().square().mean()

    found = [hmpx.compare(model, batches, loss, lists={"bf16": ["linear"]}) for loss in (nested, dense)]
    assert not found[0].stopped and found[0].gradient_error == found[1].gradient_error > 0


def test_products_of_nested_tensors_of_each_layout_have_flops():
    """By hand, of five rows and three: 2 of each product of numbers."""
    torch.manual_seed(1)
    batches = [(torch.randn(5, 8), torch.randn(3, 8)) for _ in range(4)]

    def strided(model, *parts):
        out = model(torch.nested.nested_tensor([*parts], layout=torch.strided))
        return sum(each.float().square().mean() for each in out.unbind())

    def attention(model, *parts):
        heads = model(torch.nested.nested_tensor([*parts], layout=torch.jagged)).unflatten(-1, (2, 4)).transpose(1, 2)
        return F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).values().float().square().mean()

    wanted = {strided: {"linear": 1024.0}}
    wanted[attention] = {"linear": 1024.0, "scaled_dot_product_attention": 2 * 2 * (5 * 5 + 3 * 3) * (4 + 4)}
    for loss, flops in wanted.items():
        tuned = hmpx.tune(nn.Linear(8, 8), batches, loss)
        assert {each.name: each.gain for each in tuned.choices if each.gain} == flops and tuned.share == 1


def test_a_row_in_words_says_where_it_is_as_far_as_that_is_known():
    assert str(Row("exp", dtypes="bfloat16", reason="in no list")) == "exp: bfloat16; in no list"
    row = Row("exp", "/a/model.py:3", "head", dtypes="bfloat16", reason="in no list", gradient_error=0.5)
    assert str(row) == "model.py:3: exp in head: by itself gradient error 0.5; in bfloat16, in no list"


def test_each_line_is_a_site():
    def loss(model, x):
        x = F.linear(x, model.weight)
        return F.linear(x, model.weight).square().mean()

    found = hmpx.compare(nn.Linear(4, 4), [(torch.randn(2, 4),)], loss, lists={"opt_level": "O2"})
    lines = [int(row.where.rpartition(":")[2]) for row in found.rows if row.op == "linear"]
    assert len(lines) == 2 and abs(lines[0] - lines[1]) == 1
