"""Steps as people call them: after others in a region, and with arguments that are no closure."""

import contextlib
import copy
import traceback

import pytest
import torch
from torch import nn, optim

import hmpx
from hmpx.rounding import native
from hmpx.updates.stepping import transfers
from hmpx.updates.stepping.shadow import ShownState
from tests.support.optimizers import UnlistedAdamW
from tests.support.same import same
from tests.support.training import parameters, set_gradients, weights

BF16 = torch.bfloat16


@pytest.mark.parametrize(
    "cls, foreach", [(optim.AdamW, False), (optim.Adagrad, True), (optim.NAdam, True), (UnlistedAdamW, False)]
)
def test_a_plain_step_after_steps_in_a_region_is_refused_and_changes_nothing(cls, foreach):
    named = parameters()
    optimizer = cls(named, lr=1e-2, foreach=foreach)
    set_gradients(named, 0)
    with hmpx.disable_casts():
        optimizer.step()
    before = copy.deepcopy((weights(named), optimizer.state_dict()["state"]))
    with pytest.raises(hmpx.HmpxError, match=r"has stepped in hmpx.disable_casts\(\), .* its state is FP32.*attach"):
        optimizer.step()
    assert same(weights(named), before[0]) and same(optimizer.state_dict()["state"], before[1])
    with hmpx.disable_casts():
        optimizer.step()
    hmpx.attach(optimizer)
    optimizer.step()


def test_detach_brings_the_state_of_steps_in_a_region_to_bf16():
    named, twin = parameters(), parameters()
    optimizer, reference = optim.AdamW(named, lr=1e-2), optim.AdamW(twin, lr=1e-2)
    set_gradients(named, 0)
    with hmpx.disable_casts():
        optimizer.step()
    hmpx.detach(optimizer)
    assert not optimizer._optimizer_step_pre_hooks
    reference.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    with torch.no_grad():
        for (_, p), (_, q) in zip(named, twin, strict=True):
            q.copy_(p)
    for each, its in ((optimizer, named), (reference, twin)):
        set_gradients(its, 1)
        each.step()
    assert same(weights(named), weights(twin))


def test_plain_steps_of_optimizers_without_state_go_on():
    named = parameters()
    optimizer = optim.SGD(named, lr=0.5)
    set_gradients(named, 0)
    with hmpx.disable_casts():
        optimizer.step()
    before = named[0][1].detach().clone()
    optimizer.step()
    assert torch.equal(named[0][1], before - 0.5 * named[0][1].grad)


@pytest.mark.parametrize("cls", [optim.ASGD, optim.RMSprop, optim.AdamW])
def test_a_step_in_a_region_is_torchs_own_where_parameters_are_fp32_and_their_state_is_bf16(cls):
    """Somebody has made the state BF16 after a step in a region, and then the model FP32."""
    named = parameters()
    optimizer = cls(named, lr=1e-2)
    set_gradients(named, 0)
    with hmpx.disable_casts():
        optimizer.step()
    for _, p in named:
        state = optimizer.state[p]
        state.update({key: value.bfloat16() for key, value in state.items() if value.dim()})
        p.grad, p.data = None, p.data.float()
    twin = copy.deepcopy(named)
    reference = cls(twin, lr=1e-2)
    for (_, p), (_, q) in zip(named, twin, strict=True):
        reference.state[q] = copy.deepcopy(optimizer.state[p])
    told = []
    for each, its, region in ((optimizer, named, hmpx.disable_casts()), (reference, twin, contextlib.nullcontext())):
        set_gradients(its, 1)
        try:
            with region:
                each.step()
        except RuntimeError as error:  # AdamW's: `lerp_` takes one dtype
            told.append(str(error))
    assert not told or (cls is optim.AdamW and len(told) == 2 and told[0] == told[1])
    assert same(weights(named), weights(twin))
    assert all(same(optimizer.state[p], reference.state[q]) for (_, p), (_, q) in zip(named, twin, strict=True))


class OfAModel(optim.SGD):
    """Takes the model, looks something up in it and calls it; or takes functions by other names than closure."""

    def step(self, model, loss=None):
        self.seen = model
        assert isinstance(model, nn.Module) and hasattr(model, "weight")
        self.value = None if loss is None else loss(model, scale=2)
        super().step()


@pytest.mark.parametrize("where", ["region", "attached", "converted"])
def test_a_model_is_handed_on_and_functions_keep_their_arguments(where, lists):
    model = nn.Linear(4, 4).bfloat16()
    optimizer = OfAModel(model.parameters(), lr=0.5)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    before = [p.detach().clone() for p in model.parameters()]

    def loss(given, scale):
        assert all(p.dtype is BF16 and p is q for p, q in zip(given.parameters(), model.parameters(), strict=True))
        assert [p for group in optimizer.param_groups for p in group["params"]] == list(model.parameters())
        return scale * given(torch.ones(1, 4, dtype=BF16)).float().sum().item()

    value = loss(model, 2)
    if where == "attached":
        hmpx.attach(optimizer, "nearest")
        optimizer.step(model, loss=loss)
        hmpx.detach(optimizer)
    elif where == "region":
        with hmpx.disable_casts():
            optimizer.step(model, loss)
    else:
        with hmpx.convert(**lists(bf16="linear")):
            optimizer.step(model, loss)
    assert optimizer.seen is model and optimizer.value == value
    assert all((p - b).abs().max() > 0.4 for p, b in zip(model.parameters(), before, strict=True))


def test_a_module_as_the_closure_of_a_torch_optimizer_is_called_as_torch_calls_it():
    class Loss(nn.Module):
        def forward(self):
            p.grad = None
            loss = p.sum()
            loss.backward()
            return loss

    p = nn.Parameter(torch.ones(3, dtype=BF16))
    with hmpx.disable_casts():
        assert optim.SGD([p], lr=0.5).step(Loss()) == 3
    assert (p == 0.5).all()


@pytest.mark.skipif(native.library() is None, reason="no C compiler here, so no step is remembered")
def test_a_remembered_step_takes_no_state_back_that_the_optimizer_left_in_its_place(monkeypatch):
    """Which would take memory and time, chunk by chunk."""
    monkeypatch.setattr(transfers, "_FLOOR", 64)
    named = parameters(sizes=((40, 9), (130,)))
    optimizer = optim.AdamW(named)
    handle = hmpx.attach(optimizer, fused=False)
    for step in range(4):
        if step == 2:
            monkeypatch.setattr(ShownState, "take", None)
        set_gradients(named, step)
        optimizer.step()
    assert handle._updates.kept_steps == 2 and all(state["step"] == 4 for state in optimizer.state.values())


def test_the_tensors_in_the_traceback_of_a_step_that_failed_can_be_shown():
    """By pytest, a debugger, or whatever else prints local variables: torch reads memory that is gone, and crashes."""
    named = parameters()
    optimizer = optim.AdamW(named, foreach=False)
    hmpx.attach(optimizer, fused=False)
    for step in range(4):  # the last one is a remembered one
        set_gradients(named, step)
        optimizer.step()
    optimizer.param_groups[0]["betas"] = (0.9, "0.99")
    with pytest.raises((TypeError, ValueError)) as error:
        optimizer.step()
    values = [value for frame, _ in traceback.walk_tb(error.tb) for value in frame.f_locals.values()]
    tensors = [each for value in values if isinstance(value, list) for each in value if isinstance(each, torch.Tensor)]
    have_memory = [each.untyped_storage().nbytes() >= each.nbytes for each in tensors]
    assert len(have_memory) >= 2 * len(named) and all(have_memory)
