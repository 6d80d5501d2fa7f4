"""`doctor` measures how far weights, averages and counts move, and says what it could not look at."""

import contextlib
import re
import threading
from functools import partial

import pytest
import torch

import hmpx
from hmpx.insight.finding import _TRAINERS, in_words
from hmpx.insight.looks.steps import Moves
from hmpx.insight.notes import Notes
from hmpx.insight.tensors import ulp
from hmpx.recipes.activate import recipe_of_trainer
from hmpx.updates.stepping.names import parameters

BF16, FP32 = torch.bfloat16, torch.float32


def mlp(dtype=BF16):
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 16)).to(dtype)


def loss_of(model):
    x = torch.randn(32, 64)
    return (model(x.to(next(model.parameters()).dtype)).float() - x[:, :16]).square().mean()


def diagnosis(model, step, optimizers=(), steps=12):
    with hmpx.doctor() as found:
        for _ in range(steps):
            model.zero_grad()
            loss_of(model).backward()
            step()
    all_looks_were_made(found)
    return found


def all_looks_were_made(found):
    """Or else a healthy twin passes because a look has raised."""
    assert not [each for each in found.not_checked if "raised when it was looked at" in each], found.not_checked


def trained(optimizer, model, steps=12):
    return diagnosis(model, optimizer.step, steps=steps)


def matrices(model):
    for p in model.parameters():
        p.requires_grad_(p.ndim == 2)
    return [p for p in model.parameters() if p.ndim == 2]


class Kahan(torch.optim.Optimizer):
    """SGD that keeps what BF16 drops; its step uses the gradient as scratch."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for p in parameters(self):
            rest = self.state[p].setdefault("rest", torch.zeros_like(p))
            rest.sub_(p.grad.mul_(self.param_groups[0]["lr"]))
            before = p.clone()
            p.add_(rest)
            rest.add_(before.sub_(p))
            p.grad.zero_()


def attached(weights, model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    hmpx.attach(optimizer, weights)
    return optimizer


@pytest.mark.parametrize(
    "kept, deviation, is_below", [(0.87, 0.012, True), (0.895, 0.01, False), (0.17, 0.23, True), (0.17, 0.25, False)]
)
def test_weights_are_behind_beyond_the_accidents_of_rounding(kept, deviation, is_below):
    """BF16 rounded to nearest keeps .87 of the way of Muon and AdamW, with a gap of 5 % after 60 steps of GPT-2."""
    moves = Moves(kept, 1.0, deviation**2, due=1000.0, moved=1000.0, updates=1000.0)
    assert moves.is_below(0.9) == is_below


@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
def test_the_last_digit_of_a_weight_is_the_way_to_the_next_number(dtype):
    """By torch's nextafter, for numbers between powers of two, 0 and subnormal ones included."""
    least = torch.finfo(dtype).tiny
    weights = torch.tensor([0.0, least / 4, least, 1.5e-3, 1.0, 1.5, 3.0, 200.0], dtype=dtype)
    distance = torch.nextafter(weights, torch.tensor(float("inf"), dtype=dtype)).double() - weights.double()
    assert torch.equal(ulp(weights.float(), dtype).double(), distance)
    assert torch.equal(ulp(-weights.float(), dtype).double(), distance)


HEALTHY = {
    "Kahan": lambda model: Kahan(model.parameters(), lr=1e-3),
    **{weights: partial(attached, weights) for weights in ("stochastic", "master", "split")},
}


@pytest.mark.parametrize("name", HEALTHY)
def test_weights_that_move_as_fp32_weights_would_are_healthy(name):
    model = mlp()
    optimizer = HEALTHY[name](model)
    found = trained(optimizer, model)
    hmpx.restore(optimizer)
    assert found.findings == [] and found.status == 0, str(found)


def test_steps_of_one_line_make_one_finding():
    """One optimizer a parameter, as in torch's tutorial of steps in the backward pass."""
    model = mlp()
    optimizers = {p: torch.optim.AdamW([p], lr=1e-5, betas=(0.9, 0.95)) for p in model.parameters()}

    def hook(p):
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(hook)
    found = diagnosis(model, lambda: None)
    assert [each.kind for each in found.findings if each.wrong] == ["lost updates"], str(found)
    assert len(found.findings[0].names) == 4


def test_a_step_with_a_closure_is_judged_with_the_gradients_that_this_makes():
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, betas=(0.9, 0.95))

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        return loss

    with hmpx.doctor() as found:
        for _ in range(6):
            optimizer.step(closure)
    assert [each.kind for each in found.findings if each.wrong] == ["lost updates"], str(found)


def test_what_cannot_be_repeated_is_not_checked():
    model = mlp()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        return loss

    with hmpx.doctor() as found:
        for _ in range(4):
            optimizer.step(closure)
    assert found.status == 2 and "LBFGS: its step runs the model several times" in found.not_checked[0], str(found)
    assert str(found).splitlines()[-1].startswith("not everything was checked")


def test_state_in_too_few_bits_is_named_and_not_the_rounding_of_weights():
    """One column of each block has gradients ten times the others, whose updates are smaller for it in 4 bits.

    What is advised helps; where weights are rounded to nearest, that is the cause.
    """
    found = {}
    for weights, state_dtype in (("stochastic", "4bit"), ("stochastic", BF16), ("nearest", "4bit")):
        torch.manual_seed(0)
        layer = torch.nn.Linear(128, 64, bias=False).to(BF16)
        torch.nn.init.zeros_(layer.weight)
        optimizer = torch.optim.AdamW(layer.named_parameters(), lr=1e-2, weight_decay=0)
        hmpx.attach(optimizer, weights, state_dtype=state_dtype)
        with hmpx.doctor() as found[weights, state_dtype]:
            for _ in range(40):
                x = torch.randn(64, 128) * 0.3 + 1
                x[:, 1:] /= 10
                optimizer.zero_grad()
                layer(x.to(BF16)).float().mean().backward()
                optimizer.step()
    of_codes, advised, to_nearest = found.values()
    all_looks_were_made(advised)
    assert [each.kind for each in of_codes.findings] == ["lost updates"]
    assert "state_dtype=torch.bfloat16" in str(of_codes) and of_codes.recipe.state_dtype == "bfloat16"
    assert advised.findings == [] and "state_dtype" not in str(to_nearest)


def test_gradients_that_are_freed_in_backward_are_named():
    model = mlp()
    optimizer = torch.optim.AdamW(model.named_parameters())
    hmpx.attach(optimizer, release_gradients=True)
    said = str(trained(optimizer, model))
    assert "each gradient is freed in backward" in " ".join(said.split()) and "release_gradients" in said


def test_nothing_was_looked_at_is_no_all_clear():
    with hmpx.doctor() as found:
        assert "still open" in str(found)
    assert found.status == 2 and "nothing wrong was found" not in str(found)
    assert "no torch.optim.Optimizer has stepped" in str(found)


def test_a_step_aside_that_is_taken_back_is_no_update():
    """As of SAM: part of what is added may be lost, and the optimizer steps the weights."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)

    @torch.no_grad()
    def step():
        before = [p.clone() for p in model.parameters()]
        for p in model.parameters():
            p.add_(0.00012 * torch.randn_like(p))
        for p, old in zip(model.parameters(), before, strict=True):
            p.copy_(old)
        optimizer.step()

    assert not diagnosis(model, step).wrong


@pytest.mark.parametrize("decay, wrong, kept", [(0.999, [True], 0.0), (0.99, [False], 0.64), (0.95, [], 1.0)])
def test_an_average_that_stands_still_is_wrong_and_one_that_follows_late_is_a_note(decay, wrong, kept):
    """kept: how far it has come of the way of an FP32 average of the same weights."""
    model = mlp(FP32)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    start = [p.detach().to(BF16, copy=True) for p in model.parameters()]
    means, wide = [p.clone() for p in start], [p.float() for p in start]

    @torch.no_grad()
    def step():
        optimizer.step()
        for mean, exact, p in zip(means, wide, model.parameters(), strict=True):
            mean.lerp_(p.to(BF16), 1 - decay)
            exact.lerp_(p, 1 - decay)

    found = diagnosis(model, step).findings
    moved, ideal = (torch.cat([(m - p).flatten() for m, p in zip(of, start, strict=True)]) for of in (means, wide))
    assert float(moved.float() @ ideal / ideal.square().sum()) == pytest.approx(kept, abs=0.1)
    assert [each.wrong for each in found if each.kind == "average of weights"] == wrong == [e.wrong for e in found]


@pytest.mark.parametrize("momentum, norm_in, kinds", [(0.001, BF16, 1), (0.1, BF16, 0), (0.001, FP32, 0)])
def test_running_statistics_of_a_norm_that_stand_still(momentum, norm_in, kinds):
    model = mlp()
    model.insert(1, torch.nn.BatchNorm1d(64, momentum=momentum).to(norm_in))
    found = trained(torch.optim.SGD(model.parameters(), lr=1e-30), model)
    found = [each for each in found.findings if each.kind == "running statistics"]
    assert len(found) == kinds and all(each.wrong and each.names == ("1",) for each in found)
    assert all("norm.float()" in each.do for each in found)
    still = bool((model[1].running_var == 1).all())
    assert still == bool(kinds)


def test_sums_that_seed_a_derivative_are_no_loss():
    model = mlp()
    x = torch.randn(8, 64, dtype=BF16, requires_grad=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-30)
    with hmpx.doctor() as found:
        for _ in range(4):
            (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
            slope.float().square().mean().backward()
            optimizer.step()
    assert "loss" not in {each.kind for each in found.findings}
    all_looks_were_made(found)


def test_gradients_are_compared_before_they_are_clipped():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with hmpx.doctor() as found:
        for _ in range(4):
            optimizer.zero_grad()
            for _ in range(4):
                loss_of(model).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            optimizer.step()
    (sums,) = [each for each in found.findings if each.kind == "gradient accumulation"]
    assert not sums.wrong and "off by 0." in sums.said


BY_HAND = {
    "add_": lambda sums, grads: [total.add_(grad) for total, grad in zip(sums, grads, strict=True)] and sums,
    "foreach": lambda sums, grads: torch._foreach_add_(sums, grads) or sums,
    "add": lambda sums, grads: [total + grad for total, grad in zip(sums, grads, strict=True)],
    "shares": lambda sums, grads: [total.add_(grad / 4, alpha=0.5) for total, grad in zip(sums, grads, strict=True)],
    "newest first": lambda sums, grads: [
        g.add_(each) if each.any() else g for each, g in zip(sums, grads, strict=True)
    ],
}


@pytest.mark.parametrize("how", BY_HAND)
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_gradients_that_a_script_adds_up_are_compared_with_sums_in_fp32(how, dtype):
    """The gradient of each pass is 1, so a sum in BF16 stands at 256."""
    weight = torch.nn.Parameter(torch.ones(4, dtype=BF16))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    with hmpx.doctor() as found:
        for _ in range(3):
            sums = [torch.zeros_like(weight, dtype=dtype)]
            for _ in range(320):
                grads = torch.autograd.grad((weight * 1).sum(), [weight])
                sums = BY_HAND[how](sums, [each.to(dtype) for each in grads])
            weight.grad = sums[0].clone().to(BF16)
            torch.nn.utils.clip_grad_norm_([weight], 1e-2)
            optimizer.step()
    kinds = {each.kind: each for each in found.findings}
    if dtype is FP32:
        assert "gradient accumulation" not in kinds, str(found)
        return
    sums = kinds["gradient accumulation"]
    assert sums.wrong and "gradients of 320 backward passes are added up by hand in bfloat16" in sums.said, sums
    assert "off by 20.0 %" in sums.said and sums.where.endswith(tuple(f":{line}" for line in range(1, 999))), sums
    all_looks_were_made(found)


class Locked(torch.optim.SGD):
    """Cannot be copied."""

    def __init__(self, params, lr):
        super().__init__(params, lr)
        self.lock = threading.Lock()


@pytest.mark.parametrize("cls, status", [(torch.optim.SGD, 1), (torch.optim.Adam, 0), (Locked, 2)])
def test_gradients_that_are_clipped_while_scaled_are_wrong_where_a_step_is_known_to_be_shorter(cls, status):
    model, scaler = mlp(FP32), torch.amp.GradScaler("cpu", init_scale=2.0**14)
    optimizer = cls(model.parameters(), lr=1e-3)
    with hmpx.doctor() as found:
        for _ in range(8):
            optimizer.zero_grad()
            scaler.scale(loss_of(model)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
    assert [each.wrong for each in found.findings if each.kind == "clipping"] == [status == 1]
    assert found.status == status and any("how far" in each for each in found.not_checked) == (cls is Locked)


def test_a_graph_is_compiled_while_a_training_is_looked_at():
    model = mlp()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, betas=(0.9, 0.95))
    with hmpx.doctor() as found:
        for _ in range(6):
            optimizer.zero_grad()
            loss_of(compiled).backward()
            optimizer.step()
    torch._dynamo.reset()
    assert any("compiled" in each for each in found.not_checked) and found.status == 1, str(found)


@pytest.mark.parametrize("compiles", ["step", "training"])
def test_a_compiled_step_has_its_bits_and_is_seen(compiles):
    """The step closes and opens the mode that sees ops, and compiled code puts back what was open before."""

    def trained(region):
        model = mlp()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)

        def step():
            if compiles == "training":
                optimizer.zero_grad()
                loss_of(model).backward()
            optimizer.step()

        step = torch.compile(step, backend="eager")
        with region as found:
            for _ in range(12):
                if compiles == "step":
                    optimizer.zero_grad()
                    loss_of(model).backward()
                step()
        torch._dynamo.reset()
        return [*model.parameters()], found

    expected, _ = trained(contextlib.nullcontext())
    weights, found = trained(hmpx.doctor())
    assert all(map(torch.equal, weights, expected)) and any("lost" in each.kind for each in found.findings)
    assert found.not_checked == ["ops of compiled code: set TORCH_COMPILE_DISABLE=1 to have them looked at"]


@pytest.mark.parametrize("trains", [False, True])
def test_nested_tensors_of_an_evaluation_are_nothing_that_was_not_checked(trains):
    layer = torch.nn.TransformerEncoderLayer(16, 2, 16, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hmpx.doctor() as found:
        for _ in range(3):
            model.train()(torch.randn(2, 4, 16)).square().mean().backward()
            optimizer.step()
            with torch.set_grad_enabled(trains):
                padded = torch.tensor([[False, False, True, True], [False] * 4])
                model.eval()(torch.randn(2, 4, 16), src_key_padding_mask=padded)  # packs what is not padded
                if trains:
                    torch.nested.nested_tensor([*torch.randn(2, 4, 16)], layout=torch.strided).sin()
    said = [each.split(" (")[0] for each in found.not_checked]
    assert said == (["ops of nested tensors"] if trains else []) and not found.wrong, found.not_checked


@pytest.mark.parametrize("compiles", [False, True])
def test_modules_are_called_as_fast_as_without(compiles):
    """No hook of all modules is left when the model is made, and none comes or goes once Dynamo has seen one."""
    model = mlp()
    forward = torch.compile(lambda: loss_of(model), backend="eager") if compiles else partial(loss_of, model)
    optimizer, hooks, frames = torch.optim.SGD(model.parameters(), lr=0.1), set(), set()
    with hmpx.doctor():
        for _ in range(4):
            forward().backward()
            optimizer.step()
            hooks.add(len(torch.nn.modules.module._global_forward_pre_hooks))
            frames.add(torch._dynamo.utils.counters["frames"]["total"])
    torch._dynamo.reset()
    assert hooks == {int(compiles)} and len(frames) == 1, (hooks, frames)


def test_steps_draw_the_numbers_and_leave_the_bits_that_they_have_without():
    def end(looked_at):
        model = mlp()
        optimizer = Kahan(model.parameters(), lr=1e-2)
        for _ in range(3):
            diagnosis(model, optimizer.step, steps=4) if looked_at else None
            if not looked_at:
                for _ in range(4):
                    model.zero_grad()
                    loss_of(model).backward()
                    optimizer.step()
        return [p.detach().clone() for p in model.parameters()], torch.rand(1)

    (plain, drawn), (seen, again) = end(False), end(True)
    assert torch.equal(drawn, again) and all(map(torch.equal, plain, seen))


class Masters(torch.optim.Optimizer):
    """SGD on FP32 masters that it keeps in its state, flat there, or in an attribute."""

    def __init__(self, params, lr, how):
        super().__init__(params, {"lr": lr})
        self.how, self.own = how, {}
        for p in parameters(self):
            master = p.detach().clone().float()
            if how == "an attribute":
                self.own[p] = master
            else:
                self.state[p]["master"] = master.flatten() if how == "flat" else master

    @torch.no_grad()
    def step(self, closure=None):
        for p in parameters(self):
            master = self.own[p] if self.how == "an attribute" else self.state[p]["master"]
            master.add_(p.grad.float().view_as(master), alpha=-self.param_groups[0]["lr"])
            p.copy_(master.view_as(p))


@pytest.mark.parametrize("how", ["a shape", "flat", "an attribute"])
def test_masters_are_known_by_what_a_copy_makes_of_them(how):
    model = mlp()
    found = trained(Masters(model.parameters(), 0.003, how), model, steps=30)
    assert found.status == 0, str(found)


class Same(torch.optim.AdamW):
    pass


def test_an_empty_subclass_is_judged_as_the_class():
    kinds = []
    for cls in (torch.optim.AdamW, Same):
        model = mlp()
        found = trained(cls(model.parameters(), lr=4e-3, weight_decay=0.05), model, steps=30)
        kinds.append({each.kind for each in found.findings})
    assert kinds[0] == kinds[1] and "weight decay" in kinds[0]


def test_a_warm_up_is_no_harm():
    """1/100 of the rate for 20 steps: BF16 loses them, and they are a thousandth of the way."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    rates = iter([0.003] * 20 + [0.5] * 200)

    def step():
        optimizer.param_groups[0]["lr"] = next(rates)
        optimizer.step()

    assert not diagnosis(model, step, steps=100).wrong


def test_updates_that_no_copy_made_are_not_measured():
    model = mlp()
    found = trained(torch.optim.SGD(model.parameters(), lr=0.0), model)
    assert found.status == 2 and "moved too little to measure it" in found.not_checked[0], str(found)


@pytest.mark.parametrize("how", ["copy", "data", "data, gradients on", "foreach", "assign"])
def test_weights_that_are_copied_of_masters_are_covered(how):
    model = mlp()
    masters = [p.detach().float() for p in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=1e-4)

    @torch.no_grad()
    def step():
        for m, p in zip(masters, model.parameters(), strict=True):
            m.grad, p.grad = p.grad.float(), None
        optimizer.step()
        if how == "foreach":
            torch._foreach_copy_([*model.parameters()], masters)
        for m, p in zip(masters, model.parameters(), strict=True):
            if how == "copy":
                p.copy_(m)
            elif "data" in how:
                with torch.set_grad_enabled("on" in how):
                    p.data.copy_(m)
            elif how == "assign":
                p.data = m.bfloat16()

    assert diagnosis(model, step).status == 0


@pytest.mark.parametrize("words", _TRAINERS.values())
def test_what_a_user_of_a_trainer_is_told_to_write_makes_a_legal_recipe(words):
    for keys in ("", ", state_dtype=torch.bfloat16", ", use_fp32_grad_acc=True"):
        said = in_words(f"do this: hmpx.attach(optimizer{keys}), or that", words)
        assert said.startswith("do this: Trainer(") and said.endswith(", or that") and "hmpx.attach" not in said
        call = re.search(r"(HmpxCallback|HmpxPrecision)(\(.*?\))", said)[2]
        assert eval(f"recipe_of_trainer{call}", {"recipe_of_trainer": recipe_of_trainer}).weights == "stochastic"


def test_a_sum_of_gradients_that_is_off_by_less_than_batches_differ_is_a_note():
    """What is lost where batches are alike is planted in `many_micro_batches`."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with hmpx.doctor() as found:
        for _ in range(3):
            optimizer.zero_grad()
            for _ in range(192):
                out = model(torch.randn(1, 64, dtype=BF16)).float()
                (out - 30 * torch.randn(1, 16)).square().mean().backward()
            optimizer.step()
    (sums,) = [each for each in found.findings if each.kind == "gradient accumulation"]
    assert not sums.wrong and "of the noise between batches" in sums.said, sums
    assert float(sums.said.split("off by ")[1].split(" %")[0]) > 1, "it would be wrong by its size alone"


def test_what_is_noted_of_a_weight_ends_with_it():
    notes, identities = Notes(), set()
    for _ in range(100):
        weight = torch.zeros(2)
        assert not notes.weight(weight).is_filled
        notes.weight(weight).is_filled = True
        assert notes.weight(weight).is_filled
        identities.add(id(weight))
        del weight
    assert len(identities) < 100  # so that a later one had the identity of an earlier one


@pytest.mark.parametrize("cast", [BF16, torch.float16])
def test_weights_that_are_cast_after_the_last_step_are_judged_in_the_dtype_of_the_steps(cast):
    """An evaluation or a checkpoint in FP32 behind the loop changes nothing of what was found."""
    found, rows = [], []
    for after in (lambda model: None, lambda model: model.float()):
        model = mlp(cast)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-5, eps=1e-4, weight_decay=0.1)
        with hmpx.doctor() as one:
            for _ in range(12):
                model.zero_grad()
                loss_of(model).backward()
                optimizer.step()
            after(model)
            left = {name: p.detach().clone() for name, p in model.named_parameters()}
        all_looks_were_made(one)
        found.append([each.as_json() for each in one.findings])
        rows.append([vars(row) for row in one.precision.rows])
        assert all(p.dtype is left[name].dtype and p.equal(left[name]) for name, p in model.named_parameters())
    assert found[0] == found[1] and rows[0] == rows[1] and found[0]
