"""Models that are prepared by different recipes: each computes what it computes alone.

The oracle is the same training by itself: gradients and outputs are equal to the bit.
"""

from __future__ import annotations

import copy
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hmpx
from hmpx.base import process_state
from tests.support.spanning import spanning

AUTOCAST, FP8 = "autocast-cuda", "torchao-float8-rowwise"
FP32 = {"parameter_dtype": "float32"}
O2 = FP32 | {"opt_level": "O2"}
OTHER = FP32 | {"opt_level": "O1", "bf16": ["softmax", "mse_loss"], "fp32": ["linear"], "promote": []}
NONE = FP32 | {"opt_level": None}
PAIRS = {
    "other lists": (AUTOCAST, OTHER),
    "products": (AUTOCAST, O2),
    "no lists": (NONE, AUTOCAST),
    "fp8": (FP8, OTHER),
}


class Product(torch.autograd.Function):
    """A product whose backward calls ops itself."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return torch.matmul(grad, weight), torch.matmul(grad.t(), x)


class Net(nn.Module):
    def __init__(self, seed: int, custom: bool = True):
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second, self.norm = nn.Linear(16, 16), nn.Linear(16, 16), nn.LayerNorm(16)
        self.custom = custom

    def forward(self, x):
        hidden = F.softmax(self.first(x), -1)
        hidden = self.second(hidden)
        return self.norm(Product.apply(hidden, self.first.weight) if self.custom else hidden)


@pytest.fixture(autouse=True)
def undone(untouched):
    yield
    hmpx.restore()


def drawn(seed):
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(seed))


def trained(net, optimizer, steps=2, forward=lambda net, x: net(x)):
    """Everything that a training sees in a model: outputs, gradients, and what its parts give in evaluation."""
    x, y, seen = drawn(5), drawn(6), []
    for _ in range(steps):
        out = forward(net, x)
        out.backward(y.to(out.dtype))
        seen += [out.detach(), *(p.grad.clone() for p in net.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        return [*seen, net(x), net.first(x), net.norm(x)]


def prepared(seed, recipe, **how):
    net = Net(seed, **how)
    return hmpx.prepare(net, torch.optim.SGD(net.named_parameters(), lr=0.1), recipe)


def alone(seed, recipe, how=None, **training):
    net, optimizer = prepared(seed, recipe, **(how or {}))
    seen = trained(net, optimizer, **training)
    hmpx.restore(optimizer)
    return seen


def assert_same(found, wanted):
    assert [each.dtype for each in found] == [each.dtype for each in wanted]
    assert [i for i, (a, b) in enumerate(zip(found, wanted, strict=True)) if not torch.equal(a, b)] == []


@pytest.mark.parametrize(("pair", "swapped"), spanning(PAIRS, (False, True)))
def test_each_model_computes_what_it_computes_alone(pair, swapped, caplog):
    recipes = PAIRS[pair][::-1] if swapped else PAIRS[pair]
    wanted = [alone(seed, recipe) for seed, recipe in enumerate(recipes)]
    both = [prepared(seed, recipe) for seed, recipe in enumerate(recipes)]
    for each, want in zip(both, wanted, strict=True):
        assert_same(trained(*each), want)
    hmpx.restore(*(optimizer for _, optimizer in both))
    assert not process_state.in_use()
    assert ["ops outside of all models, such as losses, follow those of" in each for each in caplog.messages] == [True]


@pytest.mark.parametrize(("pair", "ended"), spanning(["other lists", "products"], [0, 1]))
def test_the_undo_of_one_leaves_the_other(pair, ended):
    wanted = [alone(seed, recipe) for seed, recipe in enumerate(PAIRS[pair])]
    both = [prepared(seed, recipe) for seed, recipe in enumerate(PAIRS[pair])]
    (gone, of_gone), (left, of_left) = both[ended], both[1 - ended]
    hmpx.restore(of_gone)
    x = drawn(5)
    uncast = gone(x)
    assert_same(trained(left, of_left), wanted[1 - ended])
    hmpx.restore(of_left)
    assert torch.equal(uncast, gone(x)) and not process_state.in_use()


def test_equal_lists_are_one_and_the_undo_of_one_model_still_leaves_the_other(caplog):
    want = alone(0, AUTOCAST)
    (net, optimizer), (other, of_other) = prepared(0, AUTOCAST), prepared(1, AUTOCAST)
    assert not caplog.messages
    hmpx.restore(of_other)
    assert other(drawn(5)).dtype is torch.float32 and other.first(drawn(5)).dtype is torch.float32
    assert_same(trained(net, optimizer), want)


def test_threads_that_prepare_train_and_restore_side_by_side():
    wanted = [[alone(seed, recipe)] for seed, recipe in enumerate(PAIRS["other lists"])]
    found: list[list] = [[], []]
    nets = [[Net(seed) for _ in range(3)] for seed in (0, 1)]  # made here: threads share torch's generator
    together = threading.Barrier(2)

    def work(seed):
        together.wait()
        for net in nets[seed]:
            optimizer = torch.optim.SGD(net.named_parameters(), lr=0.1)
            hmpx.prepare(net, optimizer, PAIRS["other lists"][seed])
            found[seed].append(trained(net, optimizer))
        hmpx.restore(optimizer)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in (0, 1)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    for each, (want,) in zip(found, wanted, strict=True):
        for one in each:
            assert_same(one, want)


@pytest.mark.parametrize("custom", [False, True], ids=["in one graph", "in several"])
def test_compiled_models_compute_what_they_compute_alone(custom):
    def training():
        return {"steps": 1, "forward": torch.compile(lambda net, x: net(x), backend="aot_eager")}

    wanted = []
    for seed, recipe in enumerate(PAIRS["other lists"]):
        wanted.append(alone(seed, recipe, {"custom": custom}, **training()))
        torch._dynamo.reset()
    both = [prepared(seed, recipe, custom=custom) for seed, recipe in enumerate(PAIRS["other lists"])]
    how = training()
    for each, want in zip(both, wanted, strict=True):
        assert_same(trained(*each, **how), want)


def test_a_copy_and_a_wrapper_are_the_model():
    want = alone(0, AUTOCAST)[-3]
    (net, optimizer), _ = prepared(0, AUTOCAST), prepared(1, OTHER)
    trained(net, optimizer)
    for model in (copy.deepcopy(net), nn.Sequential(net)):
        with torch.no_grad():
            assert torch.equal(model(drawn(5)), want)


def test_a_module_that_two_models_share_follows_the_one_that_calls_it():
    encoder, seen = nn.Linear(16, 16), []
    encoder.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    actor, critic = nn.Sequential(encoder, nn.ReLU()), nn.Sequential(encoder, nn.Tanh())
    for model, recipe in ((actor, AUTOCAST), (critic, OTHER)):
        hmpx.prepare(model, torch.optim.SGD(model.named_parameters(), lr=0.1), recipe)
    for model in (actor, critic, actor):
        model(drawn(5))
    assert seen == [torch.bfloat16, torch.float32, torch.bfloat16]


def test_a_region_around_a_model_lies_over_its_lists():
    (net, _), (other, _) = prepared(0, AUTOCAST), prepared(1, OTHER)
    with hmpx.casts(fp32=["linear"]):
        assert net.first(drawn(5)).dtype is torch.float32
    with hmpx.casts(bf16=["linear"]):
        assert other.first(drawn(5)).dtype is torch.bfloat16
    with hmpx.disable_casts():
        assert net.first(drawn(5)).dtype is torch.float32


def test_a_loss_follows_the_lists_of_the_first_model():
    (net, _), (other, _) = prepared(0, AUTOCAST), prepared(1, OTHER)
    assert F.mse_loss(net(drawn(5)), drawn(6)).dtype is torch.float32
    assert F.mse_loss(other(drawn(5)), drawn(6)).dtype is torch.float32
    with hmpx.casts(bf16=["mse_loss"]):
        assert F.mse_loss(other(drawn(5)), drawn(6)).dtype is torch.bfloat16


def test_a_region_of_autocast_around_a_model_without_lists_is_told(caplog):
    (net, _), (other, _) = prepared(0, AUTOCAST), prepared(1, {"opt_level": None, "parameter_dtype": "float32"})
    for _ in range(2):
        with torch.autocast("cpu"):
            assert net.first(drawn(5)).dtype is torch.bfloat16 and other.first(drawn(5)).dtype is torch.float32
    assert [each for each in caplog.messages if "recipe has no op lists" in each] == caplog.messages[1:2] != []


def test_settings_of_the_process_that_differ_are_told(caplog):
    _models = prepared(0, AUTOCAST), prepared(1, OTHER | {"kernels": "float32"})
    assert any("differ in `kernels`" in each for each in caplog.messages)


def test_convert_replaces_the_lists_of_all_models_and_gives_them_back():
    (net, _), (other, _) = prepared(0, AUTOCAST), prepared(1, OTHER)
    x = drawn(5)
    before = [net.first(x), other.first(x)]
    with hmpx.convert(bf16=[], fp32=["linear"], promote=[]):
        assert net.first(x).dtype is other.first(x).dtype is torch.float32
    assert_same([net.first(x), other.first(x)], before)
