"""Parameters that come, go and are replaced: their names, their masters, and what is said."""

import copy
import weakref

import pytest
import torch
from torch import nn, optim

import hmpx
from hmpx.rounding import native
from tests.support.training import needs_grad_dtype, parameter, step_by

BF16 = torch.bfloat16
WITH_MASTERS = ["master", "split", "split8"]


def names_of(handle):
    return {segment.name: segment.way.weights for segment in handle._updates.segments(handle.optimizer)}


def test_a_new_group_without_the_prefix_renames_nobody():
    """With names of a wrapped model, and one without its prefix, patterns fit the parameters that they fitted."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).bfloat16()
    optimizer = optim.SGD([(f"module.{name}", p) for name, p in model.named_parameters()], lr=1e-5)
    handle = hmpx.attach(optimizer, parameters={"0.*": {"weights": "master"}})
    step_by(optimizer)
    before, masters = names_of(handle), handle._updates.stores.beside([model[0].weight])
    optimizer.add_param_group({"params": [("head", parameter(3))]})
    step_by(optimizer)
    assert names_of(handle) == {**before, "head": "stochastic"}
    assert handle._updates.stores.beside([model[0].weight])[0][0] is masters[0][0]


@pytest.mark.parametrize("how", ["append", "merge"])
def test_groups_that_are_changed_by_hand_are_stepped(how):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).bfloat16()
    named = list(model.named_parameters())
    optimizer = optim.SGD([{"params": named[:2]}, {"params": named[2:]}], lr=0.1)
    handle = hmpx.attach(optimizer)
    step_by(optimizer)
    before = list(names_of(handle))
    if how == "append":
        optimizer.param_groups[0]["params"].append(parameter(3))
    else:
        optimizer.param_groups[0]["params"].extend(optimizer.param_groups.pop()["params"])
    step_by(optimizer)
    after = list(names_of(handle))
    assert sorted(set(after) & set(before)) == sorted(before) and len(set(after)) == len(after)


@pytest.mark.parametrize("weights", WITH_MASTERS)
def test_a_longer_parameter_takes_over_masters(weights, caplog):
    """Updates of a thirtieth of a weight's last digit, beside those of FP32 weights that are replaced likewise."""
    moved = []
    for held in (None, weights):
        p = nn.Parameter(torch.linspace(1, 2, 30).reshape(10, 3).bfloat16().to(torch.float32 if held is None else BF16))
        start = p.detach().float().clone()
        optimizer = optim.SGD([{"params": [p], "name": "points"}], lr=2.0**-12)
        if held is not None:
            hmpx.attach(optimizer, held)
        for step in range(120):
            group = optimizer.param_groups[0]
            group["params"][0].grad = torch.ones_like(group["params"][0])
            optimizer.step()
            if step % 10 == 9:
                group["params"][0] = nn.Parameter(torch.cat([group["params"][0].detach(), p.detach()[:1]]))
        moved.append(optimizer.param_groups[0]["params"][0].detach().float()[:10] - start)
    assert (moved[0] - moved[1]).abs().max() <= 2.0**-8
    assert "takes over 30 of 30 masters" in caplog.text


def test_a_parameter_with_masters_that_leaves_is_said_and_its_masters_wait(caplog):
    one, two = parameter(4), parameter(4)
    optimizer = optim.SGD([("one", one), ("two", two)], lr=2.0**-12)
    hmpx.attach(optimizer, "master")
    step_by(optimizer)
    left = optimizer.param_groups[0]
    del left["params"][1], left["param_names"][1]
    step_by(optimizer)
    assert "'two', which has FP32 masters, has left SGD" in caplog.text
    optimizer.add_param_group({"params": [("two", two)]})
    step_by(optimizer)
    twin = nn.Parameter(parameter(4).detach().float())
    twin_optimizer = optim.SGD([twin], lr=2.0**-12)
    step_by(twin_optimizer), step_by(twin_optimizer)
    assert torch.equal(two.detach(), twin.detach().bfloat16())


@pytest.mark.parametrize("weights", WITH_MASTERS)
def test_masters_that_a_new_optimizer_does_not_have_are_said(weights, caplog):
    """Ten phases of small updates, each with its own optimizer: an FP32 twin moves, these weights cannot."""
    p, twin = parameter(4), nn.Parameter(parameter(4).detach().float())
    for _ in range(10):
        optimizer, of_twin = optim.SGD([p], lr=2.0**-12), optim.SGD([twin], lr=2.0**-12)
        hmpx.attach(optimizer, weights)
        step_by(optimizer), step_by(of_twin)
    assert (p == parameter(4)).all() and (twin.bfloat16() != parameter(4)).all()
    said = [each for each in caplog.messages if "the masters of 1 parameters are in another optimizer" in each]
    assert len(said) == 9
    optimizer.zero_grad()
    with_masters = {"weights": weights, "use_master_weights_in_ckpt": True}
    hmpx.detach(optimizer)
    hmpx.attach(optimizer, **with_masters)
    step_by(optimizer)
    caplog.clear()
    resumed = optim.SGD([p], lr=2.0**-12)
    hmpx.attach(resumed, **with_masters)
    resumed.load_state_dict(optimizer.state_dict())
    step_by(resumed)
    assert not caplog.messages


WIDE = pytest.param({"use_fp32_grad_acc": True}, marks=needs_grad_dtype)  # an optimizer is shown them as they are


@pytest.mark.parametrize("options", [{}, {"weights": "split"}, {"state_dtype": "8bit"}, WIDE], ids=str)
@pytest.mark.parametrize("fused", [False, True])
def test_no_gradient_is_alive_after_zero_grad(options, fused):
    params = [parameter(64) for _ in range(3)]
    optimizer = optim.AdamW(params, lr=1e-3)
    hmpx.attach(optimizer, fused=fused, **options)
    for _ in range(4):
        sum(p.sum() for p in params).backward()
        optimizer.step()
        gradients = [weakref.ref(p.grad) for p in params]
        optimizer.zero_grad()
        assert not any(each() is not None for each in gradients)
    assert optimizer._hmpx_attachment._updates.kept_steps >= 2 or native.library() is None


@pytest.mark.parametrize("how", ["model", "named"])
def test_phases_of_a_training_leave_each_parameter_its_name_its_rule_and_its_masters(how):
    """The list of a group is replaced by other parameters of the model, and back: nobody inherits by its place."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).bfloat16()
    phases = [list(part.named_parameters(f"{i}.".rstrip("."))) for i, part in enumerate(model)]
    optimizer = optim.SGD(phases[0] if how == "named" else [p for _, p in phases[0]], lr=1e-5)
    rules = {"0.weight": {"weights": "master"}} | ({"1.bias": {"weights": "split"}} if how == "model" else {})
    handle = hmpx.attach(optimizer, model=model if how == "model" else None, parameters=rules)
    step_by(optimizer)
    before, masters = names_of(handle), handle.masters_of(model[0].weight).clone()
    for phase in (phases[1], phases[0]):
        optimizer.param_groups[0]["params"] = [p for _, p in phase]
        if how == "named":
            optimizer.param_groups[0]["param_names"] = [name for name, _ in phase]
        handle.sync_parameters()
        assert list(names_of(handle)) == [name for name, _ in phase]
        if how == "model" and phase is phases[1]:
            assert names_of(handle) == {"1.weight": "stochastic", "1.bias": "split"}
    assert names_of(handle) == before and torch.equal(handle.masters_of(model[0].weight), masters)


@pytest.mark.skipif(not hasattr(optim, "swap_in_optimizer_params_and_state"), reason="this torch swaps none in")
@pytest.mark.parametrize("weights", ["stochastic", *WITH_MASTERS])
def test_parameters_that_are_swapped_in_for_a_step_take_nothing_over(weights):
    """`torch.optim.swap_in_optimizer_params_and_state` shows an optimizer copies of its parameters and state."""
    results = []
    for is_swapped in (False, True):
        p = nn.Parameter(torch.linspace(1, 2, 300).bfloat16())
        optimizer = optim.AdamW([p], lr=1e-2)
        hmpx.attach(optimizer, weights=weights)
        for number in range(4):
            step_by(optimizer)
            if is_swapped and number == 1:
                other, state = nn.Parameter(p.detach().clone()), copy.deepcopy(optimizer.state_dict())
                before = p.detach().clone()
                with optim.swap_in_optimizer_params_and_state(optimizer, {"p": other}, state):
                    step_by(optimizer, 1.0)
                assert torch.equal(p, before) and not torch.equal(other, before)
        masters = optimizer._hmpx_attachment.masters_of(p)
        results.append([p.detach(), *optimizer.state[p].values(), p.detach() if masters is None else masters])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("weights", WITH_MASTERS)
def test_after_a_load_the_next_in_place_takes_over_masters(weights, caplog):
    """A load replaces the optimizer's state as a swap does, and nobody comes back."""
    p = parameter(30)
    optimizer = optim.SGD([p], lr=2.0**-12, momentum=0.5)
    hmpx.attach(optimizer, weights=weights, use_master_weights_in_ckpt=True)
    step_by(optimizer)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    optimizer.param_groups[0]["params"][0] = nn.Parameter(p.detach().clone())
    step_by(optimizer)
    assert "takes over 30 of 30 masters" in caplog.text
