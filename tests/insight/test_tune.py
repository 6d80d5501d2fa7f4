"""`hmpx.tune`: it finds what was planted, keeps the rest in BF16, and says what it will do."""

import functools
import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import hmpx
from tests.support import python
from tests.support.planted import (
    PLANTED,
    WIDTH,
    Masked,
    Model,
    Rotary,
    Steps,
    batches,
    gradients,
    long_sum,
    loss_of,
    masked_loss,
    noise_of,
    padded,
    position_left_in_bf16,
    root_of_a_small_difference,
    sharp_softmax,
    state_of,
    tuned,
)
from tests.support.small_models import MODELS


@functools.cache
def of_planted(name):
    return tuned(Model(PLANTED[name].function), batches(8))


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_put_into_fp32_and_the_products_stay_in_bf16(name):
    found = of_planted(name)
    assert found.met and found.gradient_error < 0.1 and found.share >= 0.9, str(found)
    assert PLANTED[name].ops & {*found.policy.fp32} and "linear" in found.policy.bf16
    default = hmpx.compare(Model(PLANTED[name].function), batches(8), loss_of, lists=hmpx.Recipe())
    assert default.gradient_error > 2 * found.gradient_error


@pytest.mark.parametrize("name", ["variance", "softmax"])
def test_the_error_of_the_lists_is_what_a_hand_measures_and_near_what_was_predicted(name, tmp_path):
    """With the files that it writes, on the batches that were held out."""
    found, model, data = of_planted(name), Model(PLANTED[name].function), batches(8)
    found.save(tmp_path)
    found.save(tmp_path / "alone.yaml")
    assert (tmp_path / "alone.yaml").read_text() == (tmp_path / "recipe.yaml").read_text()
    exact = gradients(model, data)
    noise = noise_of(exact)
    data, exact = data[-2:], exact[-2:]
    with hmpx.convert(**{f"{side}_file_path": tmp_path / f"{side}.txt" for side in ("bf16", "fp32", "promote")}):
        error = gradients(model, data) - exact
    assert found.gradient_error == pytest.approx(float(error.square().sum(1).mean().sqrt() / noise), rel=1e-3)
    shared = max(float(error[0] @ error[1]), 0) ** 0.5 / float(noise)
    assert found.gradient_bias == pytest.approx(shared, rel=1e-2, abs=1e-6)
    assert found.gradient_error / 2 < found.predicted < 2 * found.gradient_error


def train(function, policy=None):
    """The weights after 30 steps."""
    model, data = Model(function), batches(8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)  # a larger one makes chaos of `cumsum`, in FP32 too
    with hmpx.activate(policy) if policy else hmpx.disable_casts():
        for step in range(30):
            optimizer.zero_grad()
            loss_of(model, *data[step % 8]).backward()
            optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("name", ["variance", "cumsum"])
def test_it_trains_like_fp32_where_the_default_lists_do_not(name):
    function = PLANTED[name].function
    start = torch.cat([p.detach().flatten() for p in Model(function).parameters()])
    exact = train(function)
    far, near = (
        float((train(function, recipe) - exact).norm() / (exact - start).norm())
        for recipe in ({"parameter_dtype": "float32"}, of_planted(name).recipe)
    )
    assert near < 0.1 and near < far / 3, (near, far)


OTHERS = {  # a model, batches and a loss; what goes to FP32; the share of the products in BF16
    "a backward pass that overflows": (
        lambda: (Model(root_of_a_small_difference), batches(6), loss_of),
        {"add", "sub", "linear"},
        0.2,
    ),
    "a mask that overflows": (lambda: (Masked(), padded(6), masked_loss), {"mul", "add", "softmax"}, 1),
    "two ops": (
        lambda: (Model(lambda h: sharp_softmax(h) * 4 + long_sum(h)), batches(6), loss_of),
        {"softmax", "cumsum"},
        1,
    ),
}


@functools.cache
def of_other(name):
    return tuned(*OTHERS[name][0]())


@pytest.mark.parametrize("name", OTHERS)
def test_faults_of_other_kinds_are_put_into_fp32_too(name):
    found, (_, names, share) = of_other(name), OTHERS[name]
    assert found.met and found.share == pytest.approx(share) and names <= {*found.policy.fp32}, str(found)


def test_what_breaks_one_batch_alone_is_not_in_bf16():
    """By hand: the root of zero has no slope, and `first` in BF16 gives zero in two of four batches."""
    model, data = Model(root_of_a_small_difference), batches(6)
    others = {"parameter_dtype": "float32", "bf16": ["linear"], "fp32": ["add", "sub", "mul", "sqrt", "square"]}
    with hmpx.activate(others):
        finite = [bool(gradients(model, [batch]).isfinite().all()) for batch in data]
    assert finite == [False, False, True, True, True, True]
    found = of_other("a backward pass that overflows")
    assert found.recipe.modules == {"last": {"bf16": ["linear"]}}
    with hmpx.activate(found.recipe):
        assert gradients(model, data).isfinite().all()


def test_what_autograd_does_not_see_is_found_by_verification():
    found = tuned(Rotary(), batches(6), tolerance=0.2)
    assert found.met and "outer" not in found.policy.bf16, str(found)


def test_nothing_is_left_behind_and_the_prediction_holds_through_a_checkpoint():
    model, data = Steps(True, nn.functional.silu), batches(6)
    loss_of(model, *data[0]).backward()
    before = state_of(model)
    found = tuned(model, data)
    assert state_of(model) == before
    assert found.met and found.share == 1 and found.gradient_error / 2 < found.predicted < 2 * found.gradient_error


def test_a_tolerance_that_no_list_meets_comes_with_what_stands_in_the_way():
    found = tuned(Model(position_left_in_bf16), batches(6))
    assert not found.met and found.share == 1
    assert "casts that the program makes itself" in found.unmet and "planted.py:" in found.unmet
    assert "NOT within the tolerance of 0.1" in str(found)


def test_what_is_not_finite_in_fp32_already_holds_with_no_list():
    """A cast by hand to FP16 overflows, whatever the lists say."""
    found = tuned(Model(lambda h: (h * 1e6).half().float() * 1e-6), batches(6))
    assert not found.met and found.share == 0 and "the gradient error is inf already" in found.unmet, str(found)


def test_a_tolerance_of_nothing_puts_everything_into_fp32():
    found = tuned(Model(torch.relu), batches(4), tolerance=0, lists="hmp-o1")
    assert found.met and found.share == 0 and found.gradient_error == 0 == found.predicted
    assert found.recipe.parameter_dtype == "float32"
    assert {"linear", "mul", "relu", "cross_entropy"} <= {*found.policy.fp32}


def test_the_same_batches_give_the_same_answer_in_few_passes():
    """FP32, and again; all products; each name that multiplies nothing; these together; the lists."""
    found, again = of_planted("softmax"), tuned(Model(PLANTED["softmax"].function), batches(8))
    assert again.policy == found.policy
    one, other = (replace(each, step_seconds={}, step_spread=0.0).as_json() for each in (found, again))
    assert one == other
    assert found.steps <= (8 + 1) + 6 + (1 + 4 + 1 + 6) + 2 and f"{found.steps} steps" in str(found)


def test_ctrl_c_leaves_nothing_behind(untouched):
    calls = []

    def interrupted(module, inputs):
        calls.append(1)
        if len(calls) == 12:
            raise KeyboardInterrupt

    model = Model(sharp_softmax)
    hook = model.register_forward_pre_hook(interrupted)
    with pytest.raises(KeyboardInterrupt):
        tuned(model, batches(8))
    hook.remove()
    assert not untouched.changed() and all(p.grad is None for p in model.parameters())


class Attention(nn.Module):
    def __init__(self, sharp):
        super().__init__()
        self.first, self.last, self.sharp = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), sharp

    def forward(self, x):
        h = self.first(x)
        scores = torch.matmul(h * 40 + 300 if self.sharp else h, torch.eye(WIDTH))
        weights = torch.softmax(scores, -1)
        return x + self.last(weights * x)


class Decoder(nn.Module):
    """One bad product among several."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Attention(sharp=i == 2) for i in range(6))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_where_one_module_spoils_a_name_it_is_given_up_there_alone(tmp_path):
    model, data = Decoder(), batches(8)
    found = tuned(model, data)
    assert found.met and found.recipe.modules == {"blocks.2": {"fp32": ["matmul"]}}, str(found)
    assert "matmul" in found.policy.bf16
    exceptions = [(choice.name, choice.module, choice.dtype) for choice in found.choices if choice.module]
    assert exceptions == [("matmul", "blocks.2", "float32")] and "matmul in blocks.2: float32" in str(found)
    hmpx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), found.recipe)
    with hmpx.record() as log:
        loss_of(model, *data[0])
    hmpx.restore()
    ran = {site.module: {*site.seen} for site in log.sites if site.op == "matmul"}
    assert [ran[f"blocks.{i}"] for i in range(6)] == [{"float32"} if i == 2 else {"bfloat16"} for i in range(6)]
    found.save(tmp_path)
    assert re.search(
        r"^matmul .*with recipe.yaml in BF16, and in FP32 in blocks.2$", (tmp_path / "fp32.txt").read_text(), re.M
    )
    assert hmpx.Recipe(bf16_file_path=str(tmp_path / "bf16.txt")).policy()
    assert "# matmul in blocks.2: float32  # breaks" in (tmp_path / "recipe.yaml").read_text()


def test_a_recipe_keeps_its_other_keys_and_brings_its_weights():
    found = tuned(Model(torch.relu), batches(4), lists="neuron-bf16-sr")
    assert (found.recipe.parameter_dtype, found.recipe.weights) == ("bfloat16", "stochastic") and found.met
    assert found.recipe.policy() == found.policy and "linear" in found.policy.bf16
    narrow = tuned(Model(torch.relu), batches(4), lists="lean", tolerance=0)
    assert not narrow.met and narrow.gradient_error > 0 and "the weights in BF16" in narrow.unmet


def test_what_is_written_says_why_and_is_read_again(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    found = of_planted("softmax")
    found.save(tmp_path)
    text = (tmp_path / "fp32.txt").read_text()
    assert re.search(
        r"^softmax +# breaks the tolerance by itself; alone: gradient error \S+, .*planted.py:\d+$", text, re.M
    ), text
    recipe = hmpx.Recipe(**{key: getattr(found.recipe, key) for key in ("bf16", "fp32", "promote", "parameter_dtype")})
    with hmpx.activate(tmp_path / "recipe.yaml") as handle:
        assert handle.recipe.policy() == found.policy == recipe.policy()
        assert Model(torch.relu)(batches(1)[0][0]).dtype is torch.bfloat16
    saved = json.loads((tmp_path / "tuned.json").read_text())
    assert saved["gradient_error"] == found.gradient_error and saved["schema"] == 3
    assert [*saved["step_seconds"]] == ["tuned", "FP32", "torch.autocast"]
    # Not called: as in the lists that it began with.
    assert "conv2d" in found.policy.bf16 and {"stack", "lerp", "cdist"} <= {*found.policy.promote}


@pytest.mark.parametrize("name", ["conv net", "TransformerEncoder"])
def test_the_lists_do_about_as_little_as_the_default_ones_at_the_same_share(name):
    torch.manual_seed(0)
    model, data, loss = MODELS[name](dropout=0.1)
    found = tuned(model, data, loss, tolerance=0.2)
    default = hmpx.compare(model, data, loss, lists=hmpx.Recipe())
    assert found.met and found.gradient_error <= default.gradient_error * 1.1 and found.share == 1, str(found)
    assert found.gradient_error / 2 < found.predicted < 2 * found.gradient_error, str(found)


def test_progress_is_each_pass_on_a_terminal(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    found = tuned(Model(torch.relu), batches(4), progress=True)
    shown = capsys.readouterr()
    assert not shown.out and re.search(r"\rtune: FP32, step 3, \d+ s +\r", shown.err)
    assert "searching" in shown.err and "verifying" in shown.err and f"\rtune: {found.steps} steps in " in shown.err


@pytest.mark.slow
def test_the_example_learns_under_the_lists_that_it_finds(tmp_path):
    script = Path(__file__).parents[2] / "examples" / "tune_lists.py"
    done = python.run(script, "--steps", "60", "--out", "tuned", check=True, cwd=tmp_path)
    reached = {name: float(value) for name, value in re.findall(r"^(.+?) +accuracy (\S+)$", done.stdout, re.M)}
    assert reached["default lists"] < reached["FP32"] - 0.1 and reached["tuned lists"] > reached["FP32"] - 0.05, reached
    assert (tmp_path / "tuned" / "tuned.html").exists()
