"""`doctor` finds each fault that was planted in a training, and is silent where it was not, or is mended as it says."""

import pytest
import torch

import hmpx
from hmpx.insight.looks.checks import CHECKS
from tests.support.planted_trainings import PLANTED

NOTES = {each.kind for each in CHECKS if not each.wrong}
NOTES |= {"log", "cumulative sum"}  # the planted ones are off by little
NOTES |= {"optimizer state", "rounded state", "learning rate", "upcast", "casts there and back", "autocast"}
NOTES |= {"matmul precision"}
HARMLESS = {"loss: cross_entropy_in_bf16", "loss: squared_error_in_bf16"}  # it is off by less than 1 %
BESIDE = {"fp16_weights": {"loss scaling"}, "bce_of_probabilities_that_were_bf16": {"casts there and back"}}
IN_FLOAT32 = "compute it in float32 (x.float())"
ADVICE = {  # a kind of fault, or one of them: words of what is advised, as its healthy twin does it
    **dict.fromkeys(("cumulative sum", "log", "loss", "norm statistics", "softmax"), IN_FLOAT32),
    **dict.fromkeys(("lost updates", "optimizer state", "weight decay"), "hmpx.attach(optimizer)"),
    "lost updates: fp16_weights": "keep the weights in float32",
    "BCE": "binary_cross_entropy_with_logits",
    "GradScaler": "look for the first op that makes them",
    "angles": "multiply positions and frequencies in float32, and cast the result of sin and cos",
    "autocast": "call them inside of torch.autocast, unless they are in float32 for a reason",
    "average of weights": "average = p.detach().float().clone(), then average.lerp_(p.float(), 1 - decay)",
    "average of weights: averaged_model": "hmpx.attach(optimizer), which rounds it stochastically",
    "casts there and back": "take both casts away",
    "clipping": "scaler.unscale_(optimizer) before the line that clips",
    "distances": "take the squares and the product in float32 (x.float()), outside of autocast",
    "dtype": "cast the parameter or buffer where it is used",
    "gradient accumulation": "hmpx.attach(optimizer, use_fp32_grad_acc=True) accumulates in float32",
    "indices": "draw and multiply them in float32 or as integers",
    "inf or NaN": "keep its input away from where it is not defined",
    "inf or NaN: step_nan": "look at its rate and its state",
    "integers": "keep positions in an integer dtype or float32, outside of autocast",
    "learning rate": "give the optimizer a float",
    "loss scaling": 'torch.amp.GradScaler("cpu")',
    "mask": "torch.finfo(x.dtype).min of the dtype that is masked",
    "matmul precision": 'torch.set_float32_matmul_precision("highest")',
    "rounded between steps": "copy, save and average weights in float32",
    "rounded data": "make and keep them in float32",
    "rounded state": "keep it in float32, as the weights are",
    "running statistics": "leave such a batch out before the model takes it",
    "running value": "in float32",
    "upcast": "module.float() after all other casts and before the optimizer is made",
    "upcast: head_in_fp32_under_autocast": 'leave autocast there: with torch.autocast("cpu", enabled=False)',
    "upcast: logits_in_fp32_without_an_assignment": "x = x.float()",
    "variance by difference": "x.float().var(correction=0)",
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found_with_a_cure_and_nothing_else(name):
    with hmpx.doctor() as found:
        PLANTED[name](True)
    kind, _, fault = name.partition(": ")
    assert sorted(each.kind for each in found.findings) == sorted({kind, *BESIDE.get(fault, ())}), str(found)
    assert found.wrong == (kind not in NOTES and name not in HARMLESS) and not found.not_checked, str(found)
    (advice,) = [each.do for each in found.findings if each.kind == kind]
    assert ADVICE.get(name, ADVICE[kind]) in advice
    assert ("no torch optimizer steps" in found.findings[0].said) == ("by_hand" in name and kind == "lost updates")


ANSWERED = {  # a planted fault: what the recipe says of it
    "loss: cross_entropy_in_bf16": {},
    "norm statistics: rms_norm_in_bf16": {},
    "variance by difference: moments_in_bf16": {},
    "cumulative sum: long_sum_in_bf16": {},
    "mask: mask_of_fp32_in_bf16": {},
    "lost updates: fp16_weights": {"parameter_dtype": "float32"},
    "lost updates: bf16_weights_under_adafactor": {"weights": "stochastic"},
    "gradient accumulation: many_micro_batches": {"use_fp32_grad_acc": True},
    "average of weights: averaged_model": {"weights": "stochastic"},
}


@pytest.mark.parametrize("name", ANSWERED)
def test_what_a_recipe_answers_is_gone_under_it(name):
    kind = name.partition(":")[0]
    with hmpx.doctor() as found:
        PLANTED[name](True)
    assert kind in {each.kind for each in found.findings if each.recipe and not each.edit}
    assert {key: getattr(found.recipe, key) for key in ANSWERED[name]} == ANSWERED[name]
    with hmpx.activate(found.recipe), hmpx.doctor() as again:
        PLANTED[name](True)
    assert kind not in {each.kind for each in again.findings}, str(again)


@pytest.mark.parametrize("name", PLANTED)
def test_its_healthy_twin_is_silent(name):
    with hmpx.doctor() as found:
        PLANTED[name](False)
    assert found.findings == [] and not found.wrong and not found.not_checked, str(found)


def test_fp32_kernels_of_a_recipe_are_no_casts_there_and_back():
    """A norm in FP32 before a product on the same line, and a product before a cast."""
    with hmpx.activate("bf16-sr", kernels="float32"), hmpx.doctor() as found:
        model = torch.nn.Sequential(torch.nn.LayerNorm(16), torch.nn.Linear(16, 16))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            model(torch.randn(4, 16)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert found.findings == [] and not found.not_checked, str(found)


def test_bytes_of_the_mend_stand_beside_those_of_today():
    """By hand: weight, gradient and two tensors of state; 2 bytes each today, and 4 for the state in FP32."""
    with hmpx.doctor() as found:
        next(train for name, train in PLANTED.items() if name.endswith("bf16_weights_under_fused_adamw"))(True)
    assert "12 bytes per parameter instead of 8" in found.findings[0].do


def norm(x):
    return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt()


class Normed(torch.nn.Module):
    def __init__(self, normed):
        super().__init__()
        self.linear, self.norm, self.normed = torch.nn.Linear(16, 16), Norm(), normed

    def forward(self, x):
        return self.norm(self.linear(x)) if self.normed else self.linear(x)


class Norm(torch.nn.Module):
    def forward(self, x):
        return norm(x)


@pytest.mark.parametrize(("normed", "names"), [([1, 1], ["*.norm"]), ([1, 0, 1], ["0.norm", "2.norm"])])
def test_layers_that_are_alike_have_one_rule(normed, names):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*map(Normed, normed))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hmpx.doctor() as found:
        for _ in range(3):
            with torch.autocast("cpu"):
                loss = model(torch.randn(4, 16)).float().square().mean()
            loss.backward()
            optimizer.step()
    assert dict(found.recipe.modules) == dict.fromkeys(names, "float32"), str(found)
