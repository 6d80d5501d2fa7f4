""" "bf16-to-fp32": products that take BF16 and hand on FP32, beside FP64 products of the same BF16 numbers."""

from __future__ import annotations

import copy
import pickle

import torch
import torch.nn.functional as F
from torch import nn, optim

import hmpx

BF16, FP32 = torch.bfloat16, torch.float32


def a_and_b(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape) for shape in shapes]


CALLS = {
    "linear": (lambda *inputs: F.linear(*inputs), a_and_b((3, 5, 40), (7, 40), (7,))),
    "matmul": (lambda *inputs: torch.matmul(*inputs), a_and_b((2, 1, 5, 40), (3, 40, 7))),
    "@": (lambda a, b: a @ b, a_and_b((5, 40), (40, 7))),
    "a vector": (lambda *inputs: torch.matmul(*inputs), a_and_b((5, 40), (40,))),
    "mm": (lambda *inputs: torch.mm(*inputs), a_and_b((5, 40), (40, 7))),
    "bmm": (lambda *inputs: torch.bmm(*inputs), a_and_b((2, 5, 40), (2, 40, 7))),
    "addmm": (lambda c, a, b: torch.addmm(c, a, b, beta=0.5, alpha=2), a_and_b((7,), (5, 40), (40, 7))),
    "baddbmm": (lambda *inputs: torch.baddbmm(*inputs), a_and_b((2, 5, 7), (2, 5, 40), (2, 40, 7))),
    "einsum": (lambda a, b: torch.einsum("bik,jk->bij", a, b), a_and_b((2, 5, 40), (7, 40))),
    "einsum of three": (lambda a, b, c: torch.einsum("ik,kj,j->i", a, b, c), a_and_b((5, 40), (40, 7), (7,))),
}


def test_products_of_bf16_numbers_are_not_rounded():
    with hmpx.convert(), hmpx.casts("bf16-to-fp32"):
        results = {name: call(*inputs) for name, (call, inputs) in CALLS.items()}
    for name, (call, inputs) in CALLS.items():
        found, exact = results[name], call(*[value.bfloat16().double() for value in inputs])
        assert found.dtype is FP32, name
        assert float((found - exact).norm() / exact.norm()) < 1e-6, name
        assert float((found.bfloat16() - exact).norm() / exact.norm()) > 1e-4, name


def test_gradients_are_those_of_a_bf16_product_that_is_cast_up():
    gradients = []
    for products in (True, False):
        with hmpx.convert(bf16=[], fp32=[], promote=[]), hmpx.casts("bf16-to-fp32" if products else {"bf16": []}):
            for call, inputs in (CALLS[name] for name in ("linear", "matmul", "einsum")):
                low = [value.bfloat16().requires_grad_() for value in inputs]
                found = call(*low)
                weight = torch.linspace(-1, 1, found.numel()).reshape(found.shape)
                gradients += torch.autograd.grad((found.float() * weight).sum(), low)
    half = len(gradients) // 2
    for found, wanted in zip(gradients[:half], gradients[half:], strict=True):
        assert found.dtype is BF16
        assert float((found.double() - wanted.double()).norm() / wanted.double().norm()) < 1e-2  # a bias sums FP32


def test_what_is_no_product_is_in_fp32():
    x = torch.randn(4, 8).bfloat16()
    with hmpx.convert(bf16=["softmax", "conv1d", "chain_matmul"]), hmpx.casts("bf16-to-fp32"):
        assert torch.softmax(x, -1).dtype is FP32
        assert torch.equal(torch.chain_matmul(x, x.t(), x), torch.chain_matmul(x.float(), x.t().float(), x.float()))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mid, self.lm_head = nn.Linear(16, 16), nn.Linear(16, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lm_head(F.gelu(self.mid(x)))


def by_hand(model: Model, x: torch.Tensor) -> torch.Tensor:
    low, head = copy.deepcopy(model).bfloat16(), model.lm_head
    hidden = F.gelu(low.mid(x.bfloat16()))
    return hidden.float() @ head.weight.bfloat16().float().t() + head.bias.bfloat16()


def test_a_head_by_a_rule_a_recipe_and_in_a_copy():
    model, x = Model(), torch.randn(4, 16)
    wanted = by_hand(model, x)
    rule = hmpx.policy_for(model.lm_head, "bf16-to-fp32")
    copies = [model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    with hmpx.convert(bf16=["linear", "gelu"]):
        assert all(torch.equal(each(x), wanted) for each in copies)
        with hmpx.record() as log:
            model(x)
        rules = {site.module: site.rule for site in log.sites if site.op == "linear"}
        assert rules == {"mid": "bf16", "lm_head": "bf16-to-fp32"} and not log.round_trips
        rule.remove()
        assert model(x).dtype is BF16
    optimizer = optim.SGD(model.parameters())
    recipe = {"bf16": ["linear", "gelu"], "modules": {"<head>": "bf16-to-fp32"}, "parameter_dtype": "float32"}
    hmpx.prepare(model, optimizer, recipe)
    found = model(x)
    hmpx.restore()
    assert torch.equal(found, wanted)
