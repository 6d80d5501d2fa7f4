"""Optimizers of other libraries, in regions and attached: bit for bit what they do on an FP32 copy, then rounding.

bitsandbytes comes with the extra `large`; what is not installed is skipped.
"""

import contextlib
import random
from itertools import cycle

import pytest
import torch
from torch import nn, optim

import hmpx
from tests.support.optimizers import UnlistedAdamW
from tests.support.training import parameters, set_gradients

BF16 = torch.bfloat16
pytestmark = pytest.mark.filterwarnings("ignore")

NAMED = {
    "Lion": ("lion_pytorch", lambda m, ps: m.Lion(ps, lr=1e-3)),
    "AdamWScheduleFree": ("schedulefree", lambda m, ps: m.AdamWScheduleFree(ps, lr=1e-2)),
    "SGDScheduleFree": ("schedulefree", lambda m, ps: m.SGDScheduleFree(ps, lr=1e-2)),
    "RAdamScheduleFree": ("schedulefree", lambda m, ps: m.RAdamScheduleFree(ps, lr=1e-2)),
    "Prodigy": ("pytorch_optimizer", lambda m, ps: m.Prodigy(ps)),
    "SOAP": ("pytorch_optimizer", lambda m, ps: m.SOAP(ps)),
    "Shampoo": ("pytorch_optimizer", lambda m, ps: m.Shampoo(ps)),
    "Lookahead": ("pytorch_optimizer", lambda m, ps: m.Lookahead(optim.AdamW(ps, lr=1e-2), k=2)),
    "Lookahead pullback": (
        "pytorch_optimizer",
        lambda m, ps: m.Lookahead(optim.SGD(ps, lr=1e-2, momentum=0.9), k=2, pullback_momentum="pullback"),
    ),
    "optimi AdamW": ("optimi", lambda m, ps: m.AdamW(ps, lr=1e-3)),
    "optimi Kahan": ("optimi", lambda m, ps: m.AdamW(ps, lr=1e-3, kahan_sum=True)),
    "optimi Adan": ("optimi", lambda m, ps: m.Adan(ps, lr=1e-3)),
    "torchao AdamW8bit": ("torchao.optim", lambda m, ps: m.AdamW8bit(ps, lr=1e-3)),
    "torchao AdamW4bit": ("torchao.optim", lambda m, ps: m.AdamW4bit(ps, lr=1e-3)),
    "bitsandbytes AdamW8bit": ("bitsandbytes.optim", lambda m, ps: m.AdamW8bit(ps, lr=1e-3)),
    "bitsandbytes Lion8bit": ("bitsandbytes.optim", lambda m, ps: m.Lion8bit(ps, lr=1e-3)),
}


SIZES = ((32, 64), (5, 70), (300,))


def seed(number):
    """Some draw random numbers."""
    torch.manual_seed(number)
    random.seed(number)


def made(make, dtype):
    seed(0)
    params = [p for _, p in parameters(dtype, SIZES)]
    optimizer = make(params)
    if hasattr(optimizer, "train"):
        optimizer.train()
    return params, optimizer


@torch.no_grad()
def write_back(params, step):
    for i, p in enumerate(params):
        p.copy_(hmpx.stochastic_round(p, seed=0, step=step, name=str(i)))


def is_that_of_copies(make, attached):
    """Whether four steps come to the weights of the same optimizer on FP32 copies."""
    (params, optimizer), (copies, reference) = made(make, BF16), made(make, torch.float32)
    if attached:
        hmpx.attach(optimizer)
    for step in range(4):
        for each in (params, copies):
            set_gradients(list(enumerate(each)), step)
        seed(step)
        with contextlib.nullcontext() if attached else hmpx.disable_casts():
            optimizer.step()
        seed(step)
        reference.step()
        write_back(copies, step)
    return all(torch.equal(p.float(), q) for p, q in zip(params, copies, strict=True))


@pytest.mark.parametrize(
    "name, attached",
    [
        pytest.param(name, attached, marks=pytest.mark.slow if name.startswith("torchao") else ())  # they compile
        for name, attached in zip(NAMED, cycle([False, True, True]))
    ],
)
def test_bit_for_bit(name, attached):
    module, make = NAMED[name]
    library = pytest.importorskip(module, exc_type=ImportError)
    assert is_that_of_copies(lambda params: make(library, params), attached)


# What the sweep below cannot make or compare: constructors that want a model or more, steps that want a closure or a
# second backward, and two classes that are refused, since they look parameters up in dicts of their own.
LEFT_OUT = {
    *("magma", "sara"),
    *("adahessian", "adalomo", "adammini", "alig", "bsam", "demo", "lbfgs", "lomo", "lorarite", "ranger21", "sophiah"),
    *("adago", "adamuon", "distributedmuon", "muon", "muonclip", "normuon", "spectralsphere"),
}


DIFFERENTIATES, LOOKS_UP = "differentiates gradients inside step", r"knows parameters by _\w+, a dict"


@pytest.mark.parametrize(
    "name, why", [("adahessian", DIFFERENTIATES), ("sophiah", DIFFERENTIATES), ("magma", LOOKS_UP), ("sara", LOOKS_UP)]
)
def test_an_optimizer_that_cannot_step_copies_is_refused_by_its_first_step_and_the_next(name, why):
    library = pytest.importorskip("pytorch_optimizer")
    model = nn.Linear(8, 8).bfloat16()
    optimizer = library.load_optimizer(name)(model.parameters(), lr=1e-2)
    hmpx.attach(optimizer)
    before = model.weight.detach().clone()
    model(torch.ones(2, 8, dtype=BF16)).float().square().mean().backward(create_graph=why is DIFFERENTIATES)
    for _ in range(2):
        with pytest.raises(hmpx.HmpxError, match=why):
            optimizer.step()
    assert torch.equal(model.weight, before) and optimizer.param_groups[0]["params"][0] is model.weight


@pytest.mark.slow
def test_every_class_of_pytorch_optimizer():
    library = pytest.importorskip("pytorch_optimizer")
    names = sorted(set(library.get_supported_optimizers()) - LEFT_OUT)
    different = []
    for name in names:
        if name.startswith(("bnb", "torchao", "schedulefree")):
            continue  # other libraries' classes by another name

        def make(params, name=name):
            return library.load_optimizer(name)(params, lr=1e-3)

        if not is_that_of_copies(make, attached=True):
            different.append(name)
    assert not different and len(names) > 100


@pytest.mark.parametrize("cls", ["AdamWScheduleFree", "SGDScheduleFree"])
def test_schedule_free_moves_between_its_two_points(cls):
    """eval() and train() rewrite the weights; each is one rounded write-back."""
    library = pytest.importorskip("schedulefree")
    (params, optimizer), (copies, reference) = (
        made(lambda ps: getattr(library, cls)(ps, lr=1e-2), dtype) for dtype in (BF16, torch.float32)
    )
    hmpx.attach(optimizer)
    for number, act in enumerate(("step", "step", "eval", "train", "step")):
        for each in (params, copies):
            set_gradients(list(enumerate(each)), number)
        for each in (optimizer, reference):
            getattr(each, act)()
        write_back(copies, number)
    assert all(torch.equal(p.float(), q) for p, q in zip(params, copies, strict=True))


def test_a_fused_kernel_of_a_class_that_hmpx_does_not_know_gets_one_layout():
    """Such a class steps on whole copies, and its kernel walks all of them as flat arrays all the same."""

    torch.manual_seed(0)
    weight, gradient = torch.randn(6, 4, 5, 3).bfloat16(), torch.randn(6, 4, 5, 3).bfloat16()
    p = nn.Parameter(weight.to(memory_format=torch.channels_last))
    q = nn.Parameter(weight.float())
    optimizer, reference = (UnlistedAdamW([("w", each)], lr=0.1, fused=True) for each in (p, q))
    p.grad, q.grad = gradient, gradient.float()
    with hmpx.disable_casts():
        optimizer.step()
    reference.step()
    assert torch.equal(p, hmpx.stochastic_round(q.detach(), seed=0, step=0, name="w"))
