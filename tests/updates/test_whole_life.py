"""The whole life of an attached optimizer beside FP32 copies: steps in slices, saved, loaded, more steps, detached."""

from __future__ import annotations

import copy
import io
from itertools import cycle, product

import pytest
import torch
from torch import nn, optim

import hmpx
from hmpx.updates.holding.stores import WAYS
from hmpx.updates.stepping import batching
from tests.support.optimizers import UnlistedSGD
from tests.support.oracle import away_from_zero, to_24_bits
from tests.support.state_codes import PREFIXES, held_as, in_code, read
from tests.support.training import masters_in

pytestmark = pytest.mark.usefixtures("own_step")
BF16, FP32 = torch.bfloat16, torch.float32
SEED, SAVED, END = 7, 3, 6
SHAPES = {"large": (40, 9), "long": (201,), "small": (5,), "late": (130,)}  # slices have 64 elements
LATE = 4  # the step in which the last one gets its first gradient: it is saved without state


def drawn(number, scale=1.0):
    generator = torch.Generator().manual_seed(number)
    return {name: (torch.randn(shape, generator=generator) * scale).bfloat16() for name, shape in SHAPES.items()}


class Copies:
    """FP32 parameters under torch's own optimizer, rounded after each step as the way says."""

    def __init__(self, cls, options, way, state_dtype):
        self.way, self.state_dtype = way, state_dtype
        self.params = {name: nn.Parameter(weight.float()) for name, weight in drawn(0).items()}
        self.optimizer = cls([*self.params.items()], **options)

    def step(self, number):
        for name, gradient in drawn(100 + number, 0.1).items():
            self.params[name].grad = None if name == "late" and number < LATE else gradient.float()
        self.optimizer.step()
        with torch.no_grad():
            for name, q in self.params.items():
                key = {"seed": SEED, "step": number}
                for part, value in self.optimizer.state[q].items() if q.grad is not None else ():
                    if value.dim() and self.state_dtype is BF16:
                        value.copy_(hmpx.stochastic_round(value, **key, name=f"{name}.{part}"))
                    elif value.dim() and self.state_dtype in PREFIXES:
                        own = held_as(self.state_dtype, value.shape)
                        value.copy_(in_code(value, own, **key, name=f"{name}.{part}")[0])
                if q.grad is not None and self.way == "stochastic":
                    q.copy_(hmpx.stochastic_round(q, **key, name=name))
                elif self.way == "nearest":
                    q.copy_(q.bfloat16())
                elif q.grad is not None and self.way == "split8":
                    q.copy_(to_24_bits(q, **key, name=name))

    def weights(self):
        rounded = away_from_zero if self.way in ("split", "split8") else torch.Tensor.bfloat16
        return {name: rounded(q.detach()) for name, q in self.params.items()}


def made(cls, options, way, state_dtype, seed, start):
    params = {name: nn.Parameter(weight) for name, weight in start.items()}
    optimizer = cls([*params.items()], **options)
    masters = WAYS[way].has_masters
    hmpx.attach(optimizer, way, seed=seed, state_dtype=state_dtype, use_master_weights_in_ckpt=masters)
    return params, optimizer


def stepped(params, optimizer, number):
    for name, gradient in drawn(100 + number, 0.1).items():
        params[name].grad = None if name == "late" and number < LATE else gradient
    optimizer.step()


@torch.no_grad()
def load_weights(params, saved):
    for name, p in params.items():
        p.copy_(saved[name])


def assert_same(params, optimizer, copies):
    for name, weight in copies.weights().items():
        assert torch.equal(params[name], weight), name
        state = optimizer.state.get(params[name], {})
        for part, value in copies.optimizer.state[copies.params[name]].items():
            assert torch.equal(read(state, part, value.shape).float(), value), (name, part)
            is_coded = copies.state_dtype in PREFIXES
            prefix = PREFIXES[held_as(copies.state_dtype, value.shape)] if is_coded and value.dim() else ""
            held = state[prefix + part]
            dtype = torch.uint8 if is_coded else copies.state_dtype
            assert not value.dim() or held.dtype is dtype, (name, part)


OPTIMIZERS = [
    (optim.AdamW, {"lr": 1e-2, "foreach": False}, "fresh"),
    (optim.SGD, {"lr": 1e-2, "momentum": 0.9, "nesterov": True}, "used"),
    (optim.AdamW, {"lr": 1e-2, "foreach": False}, "used"),
    (optim.SGD, {"lr": 1e-2, "momentum": 0.9, "nesterov": True}, "fresh"),
]


@pytest.mark.parametrize(
    "way, state_dtype, cls, options, into",
    [(*held, *of) for held, of in zip(product(WAYS, [FP32, BF16, *PREFIXES]), cycle(OPTIMIZERS))],
)
def test_an_optimizer_lives_as_its_fp32_copies(cls, options, way, state_dtype, into, monkeypatch):
    monkeypatch.setattr(batching, "_FLOOR", 64)
    copies = Copies(cls, options, way, state_dtype)
    params, optimizer = made(cls, options, way, state_dtype, SEED, drawn(0))
    for number in range(SAVED):
        copies.step(number)
        stepped(params, optimizer, number)
        assert_same(params, optimizer, copies)
    if WAYS[way].has_masters:
        exact = [q for name, q in copies.params.items() if name != "late"]  # which has no state yet
        assert all(torch.equal(*each) for each in zip(masters_in(optimizer), exact, strict=True))

    file = io.BytesIO()
    torch.save({"weights": {name: p.detach() for name, p in params.items()}, "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file)
    params, optimizer = made(cls, options, way, state_dtype, None, drawn(1))
    if into == "used":
        for number in range(LATE, LATE + 2):  # so that each parameter has state, and masters of another run
            stepped(params, optimizer, number)
    loads = [lambda: load_weights(params, saved["weights"]), lambda: optimizer.load_state_dict(saved["optimizer"])]
    for load in loads if into == "fresh" else reversed(loads):
        load()
    assert_same(params, optimizer, copies)
    for number in range(SAVED, END):
        copies.step(number)
        stepped(params, optimizer, number)
        assert_same(params, optimizer, copies)

    hmpx.detach(optimizer)
    plain = {name: nn.Parameter(p.detach().clone()) for name, p in params.items()}
    reference = cls([*plain.items()], **options)
    reference.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for name, p in params.items():
        for part, value in copies.optimizer.state[copies.params[name]].items():
            held = optimizer.state[p][part]
            assert torch.equal(held, value.bfloat16() if value.dim() else value), (name, part)
    assert not [key for group in optimizer.param_groups for key in group if key.startswith("hmpx")]
    stepped(params, optimizer, END)
    stepped(plain, reference, END)
    assert all(torch.equal(params[name], plain[name]) for name in plain)


@pytest.mark.parametrize("cls, state_dtype", [(optim.SGD, FP32), (optim.SGD, "8bit"), (UnlistedSGD, BF16)])
def test_whatever_the_default_device_is_the_parameters_decide(cls, state_dtype):
    """Where the default is the meta device, whatever is made without a device holds no numbers."""

    def lived(way):
        params = {name: nn.Parameter(weight) for name, weight in numbers[0].items()}
        optimizer = cls([*params.items()], lr=0.1, momentum=0.9)
        in_file = way in ("master", "split", "split8")
        hmpx.attach(optimizer, way, state_dtype=state_dtype, seed=SEED, use_master_weights_in_ckpt=in_file)
        for gradients in numbers[1:]:
            for name, p in params.items():
                p.grad = gradients[name].clone()
            optimizer.step()
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        hmpx.detach(optimizer)
        return [p.detach() for p in params.values()]

    for way in WAYS:
        numbers = [drawn(i) for i in range(3)]
        expected = lived(way)
        numbers = [drawn(i) for i in range(3)]
        with torch.device("meta"):
            found = lived(way)
        assert all(map(torch.equal, found, expected)), way
