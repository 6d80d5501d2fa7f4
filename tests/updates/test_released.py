"""Gradients that were released: whoever asks for them gets an error, and never a zero."""

import contextlib
import copy
import gc
import io
import pickle
import warnings
import weakref
from itertools import cycle

import pytest
import torch
from torch import nn, optim
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_, get_total_norm

import hmpx
from hmpx.updates import step_hooks
from hmpx.updates.stepping.released import Waiting
from tests.support import ranks
from tests.support.optimizers import Around
from tests.support.same import same
from tests.support.sharded import Small, shard
from tests.support.training import Net, parameters, weights

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def nothing_stays_installed():
    yield
    _collect()
    hmpx.restore()
    assert not step_hooks._is_installed


def _collect():
    gc.collect()
    with hmpx.disable_casts():  # what was collected is taken away on the next occasion
        pass


def _net(dtype=BF16):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)).to(dtype)


def _attached(model, **options):
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    hmpx.attach(optimizer, release_gradients=True, **options)
    return optimizer


def _backward(model, scale=1.0):
    (model(torch.ones(2, 4, dtype=next(model.parameters()).dtype)).float().square().sum() * scale).backward()


CLIPPING = {
    "norm": lambda ps: clip_grad_norm_(ps, 1.0),
    "norm, one by one": lambda ps: clip_grad_norm_(ps, 1.0, foreach=False),
    "norm, of one tensor": lambda ps: clip_grad_norm_(next(iter(ps)), 1.0),
    "with a norm": lambda ps: clip_grads_with_norm_(ps, 1.0, torch.tensor(2.0)),
    "value": lambda ps: clip_grad_value_(ps, 1.0),
    "total": lambda ps: get_total_norm([p.grad for p in ps if p.grad is not None]),
    "by hand": lambda ps: sum(p.grad.norm() for p in ps if p.grad is not None),
}


@pytest.mark.parametrize("how, converted", list(zip(CLIPPING, cycle([False, True]))))
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_clipping_what_was_released_raises_with_the_way_out(how, converted):
    """Under names that this module imported before anything was attached; then the step is finished, and goes on."""
    if converted:
        hmpx.convert()
    model = _net()
    optimizer = _attached(model)
    clip_grad_norm_(model.parameters(), 1.0)  # nothing is gone yet
    _backward(model)
    with pytest.raises(hmpx.HmpxError, match=r"AdamW is attached with release_gradients=True.*release_gradients=False"):
        CLIPPING[how](model.parameters())
    optimizer.step()
    assert clip_grad_norm_(model.parameters(), 1.0) == 0  # torch's own answer: there has been no backward since
    _backward(model)
    with pytest.raises(hmpx.HmpxError):
        CLIPPING[how](model.parameters())


def test_a_norm_is_an_error_before_any_gradient_is_scaled():
    """Half of the parameters belong to an optimizer that keeps their gradients."""
    model = _net()
    optimizer = optim.SGD(model[0].parameters(), lr=1e-2)
    hmpx.attach(optimizer, release_gradients=True)
    _backward(model)
    before = [p.grad.clone() for p in model[2].parameters()]
    for params in (model.parameters(), reversed(list(model.parameters()))):
        with pytest.raises(hmpx.HmpxError, match="SGD is attached with release_gradients=True"):
            clip_grad_norm_(params, 1e-6)
    assert all(torch.equal(p.grad, g) for p, g in zip(model[2].parameters(), before, strict=True))
    norm = clip_grad_norm_(model[2].parameters(), 1e-6)  # these are here
    assert torch.equal(norm, get_total_norm(before))


def test_other_models_are_clipped_as_by_torch():
    model, other, untouched = _net(), _net(torch.float32), _net(torch.float32)
    optimizer = _attached(model)
    _backward(other)
    grads = [p.grad.clone() for p in other.parameters()]
    _backward(model)
    expected = torch.linalg.vector_norm(torch.cat([g.flatten() for g in grads]))
    assert torch.allclose(get_total_norm(p.grad for p in other.parameters()), expected)
    assert torch.allclose(clip_grad_norm_(other.parameters(), 0.5), expected)
    assert all(torch.allclose(p.grad, g * 0.5 / expected) for p, g in zip(other.parameters(), grads, strict=True))
    clip_grad_value_((p for p in other.parameters()), 1e-3)
    assert max(p.grad.abs().max() for p in other.parameters()) <= 1e-3
    assert clip_grad_norm_(untouched.parameters(), 1.0) == 0  # it has none, and none were released
    with pytest.raises(TypeError, match="parameters"):
        clip_grad_norm_(max_norm=1.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        clip_grad_norm_((p for p in ()), 1.0)
    assert "empty generator" in str(caught[0].message)
    optimizer.step()


@pytest.mark.parametrize("cls, ask", [(optim.SGD, "unscale_"), (optim.AdamW, "step")])
def test_gradscaler_raises_too(cls, ask):
    model = _net()
    optimizer = cls(model.parameters(), lr=1e-2, fused=True)  # which GradScaler asks in another place
    hmpx.attach(optimizer, release_gradients=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))  # and the loss goes backward without it
    model(torch.ones(2, 4, dtype=BF16)).float().sum().backward()
    with pytest.raises(hmpx.HmpxError, match=r"this gradient is gone"):
        getattr(scaler, ask)(optimizer)
    other = _net(torch.float32)
    plain = optim.SGD(other.parameters(), lr=1e-2)
    scaler.scale(other(torch.ones(2, 4)).sum()).backward()
    expected = [p.grad / 4 for p in other.parameters()]
    scaler.unscale_(plain)
    assert all(torch.equal(p.grad, g) for p, g in zip(other.parameters(), expected, strict=True))
    off = torch.amp.GradScaler("cpu", enabled=False)
    off.step(optimizer)
    assert optimizer.param_groups[0]["hmpx_step"] == 1


@pytest.mark.parametrize("several, converted", [(False, True), (True, False)])
def test_a_scaled_loss_is_refused_before_a_weight_changes(several, converted):
    model = _net()
    if converted:  # `GradScaler.scale` is one of the functions that run uncast then
        hmpx.convert()
    optimizer = _attached(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before = [p.detach().clone() for p in model.parameters()]
    loss = model(torch.ones(2, 4, dtype=BF16)).float().sum()
    with pytest.raises(hmpx.HmpxError, match=r"GradScaler: this loss is scaled.*no weight has been changed"):
        (scaler.scale([loss])[0] if several else scaler.scale(loss)).backward()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    model.zero_grad()
    model(torch.ones(2, 4, dtype=BF16)).float().sum().backward()  # a loss that is not scaled goes on as ever
    optimizer.step()
    assert not any(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    off = torch.amp.GradScaler("cpu", enabled=False)
    off.scale(model(torch.ones(2, 4, dtype=BF16)).float().sum()).backward()
    off.step(optimizer)


DROPPED = {
    "by the optimizer": lambda model, optimizer: optimizer.zero_grad(),
    "by a part, to zeros": lambda model, optimizer: model[0].zero_grad(set_to_none=False),
    "to zeros": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "by another optimizer": lambda model, optimizer: optim.SGD(model.parameters()).zero_grad(),
    "by the step of another optimizer": lambda model, optimizer: optim.SGD(model[0].parameters(), lr=1e-2).step(),
}


@pytest.mark.parametrize("how", DROPPED)
def test_gradients_that_are_in_the_weights_cannot_be_dropped(how):
    """A guard that skips a step, or a backward for something else, would have moved the weights in silence."""
    model = _net()
    optimizer = _attached(model)
    _backward(model)
    for _ in range(2):
        with pytest.raises(hmpx.HmpxError, match=r"this gradient is gone: AdamW .*bf16-sr"):
            DROPPED[how](model, optimizer)
    optimizer.step()
    DROPPED[how](model, optimizer)
    assert optimizer.param_groups[0]["hmpx_step"] == 1


def test_a_backward_after_gradients_were_dropped_unseen_is_refused():
    model = _net()
    optimizer = _attached(model)
    _backward(model)
    model.zero_grad()
    with pytest.raises(hmpx.HmpxError, match=r"a second gradient before optimizer.step\(\)"):
        _backward(model)
    optimizer.step()
    _backward(model)


def test_programs_that_drop_nothing_go_on():
    """They call zero_grad before, after and between, with FP32 weights and the same bits."""
    found = []
    for release in (False, True):
        model, critic = _net(), _net()
        own = [optim.SGD(each.parameters(), lr=1e-2) for each in (model, critic)]
        for optimizer in own:
            hmpx.attach(optimizer, release_gradients=release)
        x = torch.ones(2, 4, dtype=BF16, requires_grad=True)
        first, second = own
        for step in range(3):
            first.zero_grad()
            first.zero_grad(set_to_none=False)
            if step == 1:  # in an order of its own: both at once
                (model(x).float().square().sum() + critic(x).float().sum()).backward()
                first.step()
                first.zero_grad()  # the other one's gradients are still to be used
                second.step()
            else:
                torch.autograd.grad(critic(x).float().sum(), x)
                model(x).float().sum().backward(inputs=[x])
                critic.zero_grad()
                _backward(critic)
                second.step()
                critic.requires_grad_(False)
                critic(model(x)).float().square().sum().backward()
                critic.requires_grad_(True)
                second.zero_grad()
                first.step()

        first.step(lambda optimizer=first, model=model: (optimizer.zero_grad(), _backward(model)))
        model.zero_grad()
        critic.zero_grad()
        found.append([p.detach().clone() for p in (*model.parameters(), *critic.parameters())])
        for optimizer in own:
            hmpx.detach(optimizer)
    assert all(map(torch.equal, *found))


def test_a_step_of_the_generator_that_goes_through_the_critic_is_not_the_critics():
    generator, critic = _net(), _net()
    optimizers = [_attached(generator), _attached(critic)]
    critic(generator(torch.ones(2, 4, dtype=BF16))).float().sum().backward()
    optimizers[0].step()
    with pytest.raises(hmpx.HmpxError, match=r"zero_grad: this gradient is gone: AdamW"):
        optimizers[1].zero_grad()


def test_an_optimizer_around_one_that_releases_is_no_other_one():
    model = _net()
    outer = Around(_attached(model))
    for _ in range(2):
        outer.zero_grad()
        _backward(model)
        outer.step()
    assert outer.inner.param_groups[0]["hmpx_step"] == 2


def test_the_end_of_training_after_a_backward_without_a_step_is_said(caplog):
    model = _net()
    optimizer = _attached(model)
    _backward(model)
    optimizer.step()
    hmpx.detach(optimizer)
    assert not caplog.records
    optimizer = _attached(model)
    _backward(model)
    hmpx.detach(optimizer)
    assert "4 parameters have stepped in a backward() that no optimizer.step() followed" in caplog.text


SAVES = {
    "state_dict": lambda optimizer: optimizer.state_dict(),
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "torch.save": lambda optimizer: torch.save(optimizer, io.BytesIO()),
}


@pytest.mark.parametrize("save", SAVES.values(), ids=SAVES)
def test_what_is_saved_of_an_open_step_is_refused(save):
    model = _net()
    optimizer = _attached(model)
    _backward(model)
    with pytest.raises(hmpx.HmpxError, match="no checkpoint can hold this: save it after"):
        save(optimizer)
    optimizer.step()
    save(optimizer)


def test_only_a_load_that_succeeds_ends_an_open_step():
    model = _net()
    optimizer = _attached(model)
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    _backward(model)
    with pytest.raises(ValueError, match="different number of parameter groups"):
        optimizer.load_state_dict(before[1] | {"param_groups": before[1]["param_groups"] * 2})
    with pytest.raises(hmpx.HmpxError, match="this gradient is gone"):
        optimizer.zero_grad()
    model.load_state_dict(before[0])
    optimizer.load_state_dict(before[1])
    optimizer.zero_grad()
    _backward(model)
    optimizer.step()
    assert optimizer.param_groups[0]["hmpx_step"] == 1


def test_detach_and_an_optimizer_that_is_gone_end_it():
    model = _net()
    optimizer = _attached(model)
    _backward(model)
    hmpx.detach(optimizer)
    assert clip_grad_norm_(model.parameters(), 1.0) == 0
    optimizer = _attached(model)
    _backward(model)
    with pytest.raises(hmpx.HmpxError):
        clip_grad_norm_(model.parameters(), 1.0)
    del optimizer
    _collect()
    assert clip_grad_norm_(model.parameters(), 1.0) == 0


def test_a_parameter_that_leaves_the_optimizer_can_have_gradients_again():
    model = _net()
    optimizer = _attached(model)
    _backward(model)
    gone = optimizer.param_groups[0]["params"].pop()
    optimizer.step()
    optimizer.zero_grad()
    assert gone.grad is None
    _backward(model)
    assert clip_grad_norm_([gone], 1.0) > 0


def test_clipping_compiles_in_a_whole_graph_beside_an_attached_optimizer():
    optimizer = optim.SGD(_net().parameters(), lr=1e-2)
    hmpx.attach(optimizer)

    @torch.compile(fullgraph=True, backend="eager")
    def clip(parameters):
        return clip_grad_norm_(parameters, 1.0)

    params = [nn.Parameter(torch.ones(4))]
    params[0].grad = torch.full((4,), 3.0)
    assert clip(params) == 6.0 and torch.allclose(params[0].grad, torch.full((4,), 0.5))
    hmpx.detach(optimizer)


def _sharded(rank):
    model = shard(Small(), "plain")
    optimizer = _attached(model)
    model(torch.ones(4, 6, dtype=BF16)).square().sum().backward()
    with pytest.raises(hmpx.HmpxError) as error:
        clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    clip_grad_norm_(model.parameters(), 1.0)
    model(torch.ones(4, 6, dtype=BF16)).sum().backward()
    with pytest.raises(hmpx.HmpxError, match="this gradient is gone"):
        model(torch.ones(4, 6, dtype=BF16)).sum().backward()
    return str(error.value)


def test_sharded_parameters():
    assert all("this gradient is gone" in message for message in ranks.run(2, _sharded))


def test_released_gradients_refuse_to_accumulate_and_optimizers_that_look_across():
    model = Net().bfloat16()
    x = torch.randn(4, 6).bfloat16()
    with pytest.raises(
        hmpx.HmpxError, match=r"updates each parameter by itself \(Adadelta.*and torch.optim.lbfgs.LBFGS may look"
    ):
        hmpx.attach(optim.LBFGS(model.parameters()), release_gradients=True)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    handle = hmpx.attach(optimizer, release_gradients=True)
    model(x).sum().backward()
    with pytest.raises(hmpx.HmpxError, match=r"this gradient is gone"):
        model(x).sum().backward()
    handle.detach()
    model(x).sum().backward()
    assert model.up.weight.grad is not None


@pytest.mark.parametrize("elements, parts", [(1, 4), (40, 2), (1 << 20, 1)], ids=["alone", "some", "all at the end"])
def test_parameters_wait_until_there_are_enough_and_step_together(elements, parts, monkeypatch):
    """With the bits of a step of all; each part is kept for the next step."""
    monkeypatch.setattr(Waiting, "ELEMENTS", elements)
    for settings in ({}, {"state_dtype": "8bit"}, {"weights": "split", "fused": True}):
        found = []
        for release in (False, True):
            model = _net()
            optimizer = optim.AdamW(model.named_parameters(), lr=1e-2)
            handle = hmpx.attach(optimizer, release_gradients=release, **settings)
            for _ in range(5):
                _backward(model)
                optimizer.step()
                optimizer.zero_grad()
            state = [value for p in model.parameters() for value in optimizer.state[p].values()]
            found.append([*weights(model.named_parameters()), *state])
        assert same(*found) and len(handle._updates._parts) == parts, settings


def test_an_optimizer_dies_in_the_middle_of_a_released_step():
    """Without a step after the last backward, its hooks would go on stepping beside those of its successor."""
    named = parameters()
    for _ in range(2):
        optimizer = optim.SGD(named, lr=0.25)
        hmpx.attach(optimizer, "nearest", release_gradients=True)
        before = weights(named)
        sum(p.sum() for _, p in named).backward()
        assert same(weights(named), [(w.float() - 0.25).bfloat16() for w in before])
        died = weakref.ref(optimizer)
        del optimizer
        gc.collect()
        assert died() is None


def test_options_that_are_set_between_backward_and_step_are_refused():
    """By a loop, a step pre-hook or a closure, a tensor too; what is set before backward, or back again, counts."""
    for where in ("before", "loop", "tensor", "pre-hook", "closure", "scheduler", "other key", "removed", "put back"):
        model = _net()
        optimizer = optim.AdamW(model.parameters(), lr=torch.tensor(1e-2) if where == "tensor" else 1e-2)
        group = optimizer.param_groups[0]
        hmpx.attach(optimizer, release_gradients=True)
        if where == "scheduler":
            optim.lr_scheduler.StepLR(optimizer, 1)

        def backward(model=model, where=where, group=group):
            _backward(model)
            if where == "closure":
                group["betas"] = (0.5, 0.999)

        def set_rate(*_, group=group):
            group["lr"] = 0.5

        if where == "pre-hook":
            optimizer.register_step_pre_hook(set_rate)
        if where == "before":
            set_rate()
        if where != "closure":
            backward()
        if where == "loop":
            set_rate()
        if where == "tensor":
            group["lr"].fill_(0.5)
        if where == "other key":
            group["notes"] = 3
        if where in ("removed", "put back"):
            value = group.pop("lr")
        if where == "put back":
            group["lr"] = value
        refused = where in ("loop", "tensor", "pre-hook", "closure", "removed")
        key = "betas" if where == "closure" else "lr"
        error = pytest.raises(hmpx.HmpxError, match=f"'{key}' of param_groups.0. was .* in backward")
        with error if refused else contextlib.nullcontext():
            optimizer.step(*((backward,) if where == "closure" else ()))
        if where == "loop":
            group["lr"] = 1e-2
            optimizer.step()
        elif where in ("tensor", "pre-hook", "closure"):
            hmpx.detach(optimizer)
