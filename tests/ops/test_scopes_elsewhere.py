"""Module rules and `casts` regions beside the rest of torch: compiled, scripted, replicated, sharded."""

import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import hmpx
from tests.support import ranks
from tests.support.blocks import transformer
from tests.support.compiling import nothing_compiled, recent  # noqa: F401
from tests.support.same import same

BF16, FP32 = torch.bfloat16, torch.float32
X = torch.randn(4, 4)


def rules(model):
    return [
        hmpx.policy_for(model[1], "fp32"),
        hmpx.policy_for(model[1].mlp, bf16=["linear"]),
        hmpx.policy_for(model[2].attn, fp32=["matmul"], bf16=["softmax"]),
    ]


def compiled(function):
    """Compile as one graph, whose bits are those of eager."""
    return torch.compile(function, fullgraph=True, backend="aot_eager")


@recent
def test_lists_that_are_new_while_it_is_traced():
    """The wrappers that they need are put in place, and what was traced before is traced again."""

    @hmpx.casts(bf16=["tanh"])
    def decorated(x):
        return x.tanh()

    def function(x):
        before = x.sigmoid(), torch.exp(x)
        with hmpx.casts(bf16=["sigmoid", "exp"]):
            return (*before, x.sigmoid(), torch.exp(x), decorated(x))

    with hmpx.convert():
        assert [each.dtype for each in compiled(function)(X)] == [FP32, FP32, BF16, BF16, BF16]
        assert [each.dtype for each in function(X)] == [FP32, FP32, BF16, BF16, BF16]


class Activated(nn.Module):
    def forward(self, x):
        return F.gelu(x)


class Inherits(Activated):
    pass


@pytest.mark.parametrize("make", [Activated, Inherits, lambda: nn.Sequential(Activated(), nn.ReLU())])
def test_a_module_with_a_rule_is_scripted_as_it_is_without(make):
    """TorchScript reads the source of a forward, and not that of its wrapper."""
    model, other, expected = make(), make(), torch.jit.script(make())(X)
    for each in (other, *other.children()):  # a forward of the module's own, as Accelerate puts it there
        each.forward = each.forward
    with hmpx.convert():
        for each in (model, other):
            hmpx.policy_for(each, bf16=["gelu"])
            hmpx.policy_for(next(each.children(), each), bf16=["gelu"])
            assert torch.equal(torch.jit.script(each)(X), expected) and each(X).dtype is BF16


def test_lists_that_another_thread_brings_leave_no_moment_without_casts():
    """Ops keep their wrappers while those of new places are put over them."""
    stop, seen = threading.Event(), []

    def computing():
        while not stop.is_set():
            seen.append(torch.matmul(X, X).dtype)

    with hmpx.convert():
        thread = threading.Thread(target=computing)
        thread.start()
        for name in ("exp", "matmul", "sigmoid"):
            with hmpx.casts(fp32=[name]):
                assert torch.exp(X).dtype is FP32
        stop.set()
        thread.join()
    assert set(seen) == {BF16} and len(seen) > 10


def test_a_rule_is_no_bar_to_scripting():
    module = nn.Linear(4, 4)
    rule = hmpx.policy_for(module, "fp32")
    with hmpx.convert():
        assert torch.jit.script(module)(X).dtype is FP32
        assert torch.jit.trace(module, X)(X).dtype is FP32 and module(X.bfloat16()).dtype is FP32
        assert torch.export.export(module, (X,)).module()(X).dtype is FP32
        assert torch.fx.symbolic_trace(nn.Sequential(module))(X).dtype is FP32
        traced = torch.fx.symbolic_trace(module)  # goes through its forward, without its rule
        assert traced(X).dtype is BF16
        given = hmpx.policy_for(traced, "fp32")
        assert traced(X).dtype is FP32
        given.remove()
    rule.remove()


def _gradients_of(model, rank):
    """Of one rank's batch."""
    torch.manual_seed(10 + rank)
    model.zero_grad()
    model(torch.randn(2, 3, 8)).float().square().sum().backward()
    return [p.grad for p in model.parameters()]


def _distributed(rank, how, after):
    """Gradients on this rank, and what they are by hand."""
    model = transformer()
    given = rules(model)
    with hmpx.convert():
        expected = [sum(each) / 2 for each in zip(*(_gradients_of(model, r) for r in (0, 1)), strict=True)]
        for rule in given:
            rule.remove()
        plain = [sum(each) / 2 for each in zip(*(_gradients_of(model, r) for r in (0, 1)), strict=True)]
        if not after:
            rules(model)
        wrapped = model
        if how == "ddp":
            wrapped = nn.parallel.DistributedDataParallel(model)
        else:
            mesh = init_device_mesh("cpu", (2,))
            for layer in (*model[1].children(), *model, model):
                fully_shard(layer, mesh=mesh)
        if after:
            rules(model)
        found = [g.full_tensor() if hasattr(g, "full_tensor") else g for g in _gradients_of(wrapped, rank)]
    return same(found, expected), same(found, plain)


@pytest.mark.parametrize(("how", "after"), [("ddp", False), ("fsdp2", True)])
def test_replicated_and_sharded_models_keep_their_rules(how, after):
    """Given before or after the model was wrapped: the gradients are the mean of what each batch has by itself."""
    assert ranks.run(2, _distributed, how, after) == [(True, False)] * 2
