"""`hmpx.compare` where the fault shows at another place than where it is: it names what a run alone bears out."""

import contextlib
import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import nn

import hmpx
from hmpx.insight.trials import compare
from tests.support.planted import (
    PLANTED,
    WIDTH,
    Masked,
    Model,
    Rotary,
    advised_error,
    batches,
    gradient_error,
    gradients,
    line_of,
    long_sum,
    loss_of,
    masked_loss,
    padded,
    policy,
    position_left_in_bf16,
    root_of_a_small_difference,
    sharp_softmax,
)


def variance_then_exp(h):
    """The difference comes out as 0 in BF16, where it is 0.3; `exp` then overflows, which is right for its input."""
    h = h + 30
    variance = (h * h).mean(-1, keepdim=True) - h.mean(-1, keepdim=True).square()
    return torch.exp((h - 30) * torch.rsqrt(variance.abs() + 1e-6) * 0.1)


def one_minus_probability(h):
    """In BF16 a probability near 1 has an error as large as its distance from 1, which `log` is given."""
    p = torch.sigmoid(h * 0.1 + 6)
    return torch.log(1 - p)


class Experts(nn.Module):
    """A mixture of experts whose router has logits around 50 that are some hundredths apart: in BF16 they are equal."""

    def __init__(self, choice, top=1, sparse=False, experts=8):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.router = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, experts)
        with torch.no_grad():
            self.router.weight.mul_(0.05)
            self.router.bias.fill_(50.0)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(experts))
        self.last, self.choice, self.top, self.sparse = nn.Linear(WIDTH, 4), choice, top, sparse

    def chosen(self, p):
        if self.choice == "topk":
            return p.topk(self.top, -1).indices
        if self.choice == "sort":
            return p.sort(-1, descending=True).indices[:, : self.top]
        if self.choice == "max":
            return p.max(-1, keepdim=True).indices
        return p.argmax(-1, keepdim=True)

    def forward(self, x):
        h = torch.tanh(self.first(x))
        p = torch.softmax(self.router(h), -1)
        chosen = self.chosen(p)
        weights = p.gather(-1, chosen)
        out = torch.zeros_like(h)
        for number, expert in enumerate(self.experts):
            if self.sparse:  # each expert sees its own tokens alone, another number of them in each run
                token, place = torch.where(chosen == number)
                if len(token):
                    out = out.index_add(0, token, expert(h[token]) * weights[token, place, None])
            else:
                out = out + expert(h) * (weights * (chosen == number)).sum(-1, keepdim=True)
        return self.last(out)


class Codes(nn.Module):
    """A codebook whose entries are looked up without gradients, by distances that are large and alike."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)
        self.register_buffer("codes", torch.randn(32, WIDTH) * 0.1 + 20)

    def forward(self, x):
        h = self.first(x)
        with torch.no_grad():
            code = torch.matmul(h + 20, self.codes.t()).argmax(-1)
        picked = (self.codes - 20)[code]
        return self.last(h + (picked - h).detach() * 10)


def exp_of_large_numbers(h):
    """`sub` and `add` round numbers near 86; with these in FP32, the list of `exp` rounds them."""
    return torch.exp(h * 4 + 86 - (h.detach() * 4).amax(-1, keepdim=True)) * 1e-36


def masked_by_a_constant(h):
    """FP16 does not hold the constant."""
    return torch.softmax(h.masked_fill(h > 1, -1e9), -1)


def log_of_negative(h):
    """Not finite in FP32."""
    return torch.log(torch.relu(h) - 0.1)


class RootOfZero(torch.autograd.Function):
    """A backward pass that is not finite in FP32, of a forward pass that is."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient / 0


class Blocks(nn.Module):
    """Equal blocks; the output of one of them may have to be exact, for a softmax of large numbers comes behind it."""

    def __init__(self, count=6, sharp=None):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))
        self.last, self.sharp = nn.Linear(WIDTH, 4), sharp

    def forward(self, x):
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number == self.sharp:
                x = torch.softmax(x * 200 + 300, -1) * WIDTH
            x = torch.tanh(x)
        return self.last(x)


ELEMENTWISE = "add sub mul mean square exp rsqrt sqrt sigmoid log linear"


def fp16(*names):
    return dataclasses.replace(hmpx.Policy(bf16=names), low_precision=torch.float16)


@pytest.mark.parametrize("lists", ["autocast-cpu", policy(ELEMENTWISE)], ids=["autocast", "own"])
def test_what_overflows_because_of_its_input_is_no_culprit(lists):
    found = hmpx.compare(Model(variance_then_exp), batches(), loss_of, lists=lists)
    first, worst = found.first_nonfinite, found.worst(1)[0]
    assert (first.op, first.where) == ("exp", line_of(variance_then_exp, "torch.exp("))
    assert worst.where == line_of(variance_then_exp, "variance =") and worst.op in {"sub", "mean", "mul", "square"}
    assert worst.gradient_error > 0.1 > found.advised
    assert {row.where for row in found.broken} == {worst.where}
    assert "its inputs are wrong: with the fix it is finite" in str(found)


def softmax_and_sum(h):
    return sharp_softmax(h) * 4 + long_sum(h)


class Blamed(NamedTuple):
    """A model with a fault, and what is to be said of it.

    ops: what is to be in FP32, some with their modules. line: of what is blamed first. first: the op, line and pass of
    the first inf or NaN. said: what the report says besides.
    """

    model: nn.Module
    lists: hmpx.Policy | str
    ops: set
    line: str = ""
    first: tuple[str, str, str] | None = None
    said: tuple[str, ...] = ()
    data: Callable = batches
    loss: Callable = loss_of


BLAMED = {
    "a cast that was left in by hand": Blamed(
        *(Model(position_left_in_bf16), policy("linear", "mul sin"), {"to"}, line_of(position_left_in_bf16, "sin(")),
        said=("planted.py:", "fix      keep in FP32: the cast by hand at ", "in float32 -> bfloat16, cast by hand"),
    ),
    "two ops that each break it": Blamed(
        Model(softmax_and_sum), policy("softmax cumsum", "linear mul add"), {"softmax", "cumsum"}
    ),
    "a mask that overflows": Blamed(
        *(Masked(), policy("mul linear", "softmax cross_entropy"), {"mul"}, line_of(Masked.forward, "mask =")),
        first=("mul", line_of(Masked.forward, "mask ="), "forward"),
        said=("and bfloat16 ends at 3.39e+38: if this is a mask, fill it with torch.finfo(x.dtype).min",),
        data=padded,
        loss=masked_loss,
    ),
    "what runs without gradients": Blamed(Rotary(), policy("outer", "linear sin mul cross_entropy"), {"outer"}),
    "a slope that is infinite because of its input": Blamed(
        *(Model(root_of_a_small_difference), policy(ELEMENTWISE), {"sub", "add", ("linear", "first")}),
        first=("sqrt", line_of(root_of_a_small_difference, "sqrt"), "backward"),
        said=("its inputs are wrong: with the fix it is finite",),
    ),
    "the probability and not its logarithm": Blamed(Model(one_minus_probability), "autocast-cpu", {"sigmoid"}),
    "a codebook without gradients": Blamed(
        Codes(), policy("matmul linear", "cross_entropy mul add sub"), {"matmul"}, said=("argmax in Codes: ",)
    ),
    "one of equal blocks": Blamed(
        Blocks(sharp=4), policy("linear", "softmax mul cross_entropy"), {("linear", "blocks.4")}
    ),
}


@pytest.mark.parametrize("name", BLAMED)
def test_what_is_to_blame_is_named_and_nothing_else(name):
    case = BLAMED[name]
    found = hmpx.compare(case.model, case.data(), case.loss, lists=case.lists)
    named = {(row.op, row.module) if (row.op, row.module) in case.ops else row.op for row in found.broken}
    assert named == case.ops and found.advised < 0.1 <= found.gradient_error, str(found)
    assert not case.line or found.worst(1)[0].where == case.line, str(found)
    first = found.first_nonfinite
    assert (first and (first.op, first.where, first.phase)) == case.first, str(found)
    assert all(said in str(found) for said in case.said), str(found)
    assert found.passes <= 2 * 4 + 2 + 7 + 20  # each batch, one three times; names alone; parts on up to four batches


def test_advice_that_is_not_enough_goes_on_until_it_is():
    model, data = Model(exp_of_large_numbers), batches()
    found = hmpx.compare(model, data, loss_of, lists=policy(ELEMENTWISE))
    assert {row.op for row in found.broken} == {"sub", "add", "exp"}, str(found)
    assert found.advised == pytest.approx(advised_error(found, model, data, ELEMENTWISE, "cross_entropy"), rel=1e-3)
    alone = dataclasses.replace(found, broken=tuple(row for row in found.broken if row.op != "exp"))
    assert found.advised < 0.1 < advised_error(alone, model, data, ELEMENTWISE, "cross_entropy")
    assert f"(measured: gradient error {found.advised:.2g}; another training begins at 0.2)" in str(found)


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_named_first_and_the_lists_with_what_is_advised_are_healthy(name):
    fault, data = PLANTED[name], batches()
    model, others = Model(fault.function), "linear mul add cross_entropy"
    lists = policy(fault.bf16, " ".join({*others.split()} - {*fault.bf16.split()}))
    found = hmpx.compare(model, data, loss_of, lists=lists)
    worst = found.worst(1)[0]
    assert worst.op in fault.ops and worst.where == line_of(fault.function, fault.text), str(found)
    assert found.advised < 0.1 <= found.gradient_error
    assert found.advised == pytest.approx(advised_error(found, model, data, fault.bf16, others), rel=1e-3)


def test_a_fault_inside_vmap_is_named():
    def faulty(h):
        return torch.func.vmap(lambda row: torch.softmax(row * 40 + 300, -1))(h)

    model, data = Model(faulty), batches()
    found = hmpx.compare(model, data, loss_of, lists=policy("softmax linear"))
    assert found.is_broken and {"add", "softmax"} == {row.op for row in found.broken}, str(found)
    assert {row.where for row in found.broken} == {line_of(faulty, "torch.softmax")}
    assert found.advised == pytest.approx(
        advised_error(found, model, data, "softmax linear", "cross_entropy"), rel=1e-3
    )
    tuned = hmpx.tune(model, batches(6), loss_of, progress=False)
    assert tuned.met and {"add", "softmax"} <= {*tuned.policy.fp32} and tuned.share == 1


def test_where_every_op_in_fp32_is_not_enough_nothing_is_advised():
    """The weights are in BF16: 300 of them is 300 or 302."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Softmax(-1), nn.Linear(WIDTH, 4))
    with torch.no_grad():
        model[0].bias += torch.linspace(300, 310, WIDTH)
    found = hmpx.compare(model, batches(), loss_of, lists={"bf16": ["linear"], "parameter_dtype": "bfloat16"})
    assert found.advised > 0.1 and not found.broken, str(found)
    errors = f"{found.advised:.2g}, {found.advised_part:.2g} of one parameter"
    assert f"with every op in FP32 the gradient error is {errors}, already" in str(found)


class Parts(nn.Module):
    """Two parts, one of which has large numbers in BF16: a variance as the difference of moments."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.exact, self.faulty = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 64)

    def forward(self, x):
        h = self.faulty(x) + 30
        return self.exact(x), h.square().mean(-1) - h.mean(-1).square()


@pytest.mark.parametrize("count", [1, 4], ids=["one batch", "several"])
@pytest.mark.parametrize("share", [1e-3, 1e-2])
def test_a_part_whose_gradients_are_small_is_judged_by_their_own_size(share, count):
    model = Parts()

    def loss(model, x, y):
        exact, faulty = model(x)
        return exact.square().mean() + share * (faulty - x.square().mean(-1)).square().mean()

    def of_all(**lists):
        with hmpx.convert(**lists) if lists else contextlib.nullcontext():
            return [torch.autograd.grad(loss(model, *batch), [*model.parameters()]) for batch in batches(count)]

    found = hmpx.compare(model, batches(count), loss, lists=policy("linear"), progress=False)
    exact, low = of_all(), of_all(bf16=["linear"], fp32=["cross_entropy"], promote=[])
    off = {}
    for i, (name, _) in enumerate(model.named_parameters()):
        error = sum((a[i] - b[i]).square().sum() for a, b in zip(exact, low, strict=True))
        off[name] = (error / sum(a[i].square().sum() for a in exact)).sqrt().item()
    assert found.is_broken and found.part_error == pytest.approx(off[found.part]) == pytest.approx(max(off.values()))
    assert math.isnan(found.gradient_error) if count == 1 else found.gradient_error < 0.1
    assert str(found).startswith(f"BROKEN: the gradient of {found.part}, the worst parameter, is off by ")
    assert {row.op for row in found.broken} <= {"square", "mean", "sub"} and found.advised_part < 0.25


@pytest.mark.parametrize(
    "choice, top, sparse",
    [("topk", 1, False), ("topk", 2, True), ("sort", 2, False), ("argmax", 1, True), ("max", 1, False)],
)
def test_of_a_router_that_flips_the_router_is_named_and_no_expert(choice, top, sparse):
    model, data = Experts(choice, top, sparse), batches()
    lists = policy("linear", "softmax cross_entropy mul add sum")
    found = hmpx.compare(model, data, loss_of, lists=lists)
    worst = found.worst(1)[0]
    assert (worst.op, worst.module) == ("linear", "router"), str(found)
    assert worst.gradient_error > 0.3 and {row.module for row in found.broken} <= {"router", "first"}
    (decided,) = [row for row in found.rows if row.decisions]
    assert decided.op == choice and f"{choice} in Experts: {decided.decisions}" in str(found)


def test_what_is_measured_of_a_router_is_what_a_rule_for_the_module_does(lists):
    model, data = Experts("topk"), batches()
    found = hmpx.compare(model, data, loss_of, lists=policy("linear", "softmax cross_entropy mul add sum"))
    (router,) = found.broken
    exact = gradients(model, data)
    rule = hmpx.policy_for(model.router, bf16=["linear"])
    with hmpx.convert(**lists()):
        error = gradient_error(exact, gradients(model, data))
    rule.remove()
    assert error == pytest.approx(router.gradient_error, rel=0.5)


@pytest.mark.parametrize("listed", [("linear", "masked_fill"), ("linear", "mul")], ids=["listed", "follows"])
def test_an_op_that_raises_is_named_with_its_line_and_list_and_all_else_is_compared(listed):
    found = hmpx.compare(Model(masked_by_a_constant), batches(), loss_of, lists=fp16(*listed))
    worst = found.worst(1)[0]
    assert (worst.op, worst.where) == ("masked_fill", line_of(masked_by_a_constant, "masked_fill("))
    assert "overflow" in worst.raised and found.is_broken and found.gradient_error < 0.01
    assert ("fp16:" if "masked_fill" in listed else "its input is that of mul at") in worst.reason
    line = str(found).splitlines()[0]
    assert line.startswith("raises under the lists: ") and "masked_fill in Model: RuntimeError" in line


def test_a_mask_of_the_dtype_at_hand_does_not_raise_and_is_healthy():
    def masked(h):
        return torch.softmax(h.masked_fill(h > 1, torch.finfo(h.dtype).min), -1)

    found = hmpx.compare(Model(masked), batches(), loss_of, lists=fp16("linear", "masked_fill", "mul"))
    assert not found.is_broken and not any(row.raised for row in found.rows), str(found)


def test_a_program_that_raises_under_the_lists_outside_of_any_op_is_told_with_its_line():
    def choosy(h):
        if h.dtype is not torch.float32:
            raise ValueError("float32 is wanted")
        return h

    found = hmpx.compare(Model(choosy), batches(), loss_of)
    assert found.is_broken and str(found).startswith("stopped: ")
    assert f"raises ValueError: float32 is wanted at {line_of(choosy, 'raise ')}" in found.stopped


def test_an_error_of_the_program_itself_is_raised_as_it_is():
    with pytest.raises(RuntimeError, match="invalid for input"):
        hmpx.compare(Model(lambda h: h.reshape(3)), batches(), loss_of)


def test_where_fp32_is_not_finite_the_line_is_named_and_nothing_else():
    found = hmpx.compare(Model(log_of_negative), batches(), loss_of)
    assert found.is_broken and not found.rows and "FP32 itself is not finite: the loss of batch 0" in found.stopped
    assert f"forward pass of log in Model, {line_of(log_of_negative, 'log(')}" in found.stopped
    assert len(str(found).splitlines()) == 1


def test_where_the_gradients_of_fp32_are_not_finite_they_are_named():
    def faulty(h):
        return RootOfZero.apply(torch.tanh(h))

    found = hmpx.compare(Model(faulty), batches(), loss_of)
    assert "FP32 itself is not finite: a gradient of batch 0" in found.stopped

    def root(h):
        return torch.sqrt(h * 0) + h

    found = hmpx.compare(Model(root), batches(), loss_of)
    assert f"backward pass of sqrt in Model, {line_of(root, 'sqrt(')}" in found.stopped


def test_inputs_that_are_not_finite_are_named():
    data = batches()
    data[2][0][0, 0] = math.nan
    found = hmpx.compare(Model(torch.relu), data, loss_of)
    assert "the loss of batch 2 has inf or NaN, and so have its inputs" in found.stopped


def test_a_model_or_a_loss_that_does_not_take_what_a_batch_holds_gets_one_line():
    four = [(*batch, 0, 0) for batch in batches()]
    with pytest.raises(hmpx.HmpxError, match=r"it calls loss\(model, \*batch\), here with 4 of a batch: too many"):
        hmpx.compare(Model(torch.relu), four, loss_of)


def test_complex_numbers_are_no_decisions_and_have_gradients():
    """A spectrum that Fourier's transform gives goes on into the loss; an index would have no gradient."""
    found = hmpx.compare(Model(lambda x: torch.fft.rfft(x.float(), n=2 * x.shape[-1] - 2).abs()), batches(), loss_of)
    assert {row.op for row in found.rows} >= {"fft_rfft", "abs", "linear"} and not found.broken


def test_a_search_that_comes_to_its_number_of_runs_says_so_and_its_advice_holds(monkeypatch):
    monkeypatch.setattr(compare, "_MOST", (0, 0))
    found = hmpx.compare(Blocks(sharp=4), batches(), loss_of, lists=policy("linear tanh", "softmax mul cross_entropy"))
    assert found.is_cut_short and {row.op for row in found.broken} >= {"linear"} and found.advised < 0.1, str(found)
    assert f"the search has ended after {found.passes} runs: fewer ops may be enough" in str(found)
