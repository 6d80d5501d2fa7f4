"""Checkpoints of attached optimizers: what is saved, what is loaded, what hooks of the user see, what is lost."""

import copy

import pytest
import torch
from torch import nn, optim
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_optimizer_state_dict

import hmpx
from hmpx.updates.stepping import transfers
from tests.support.same import same
from tests.support.training import (
    Net,
    masters_in,
    needs_grad_dtype,
    parameter,
    parameters,
    set_gradients,
    step_by,
    train,
    weights,
)

BF16 = torch.bfloat16


def _trained(way, steps, **options):
    """A BF16 model and its optimizer after some steps; `options` of the optimizer."""
    torch.manual_seed(0)
    named = list(Net().bfloat16().named_parameters())
    optimizer = options.pop("cls", optim.AdamW)(named, lr=1e-3, **options)
    hmpx.attach(optimizer, way)
    train(named, optimizer, 0, steps)
    return named, optimizer


@pytest.mark.parametrize("way, steps, copied", [("master", 0, True), ("master", 3, True), ("split", 3, False)])
def test_a_load_of_the_present_state_warns_of_nothing_and_loses_no_master(way, steps, copied, caplog):
    """As wrappers do when they are made (Accelerate's moves it to its device); the run goes on to the bit."""
    straight, optimizer = _trained(way, steps)
    train(straight, optimizer, steps, steps + 3)
    named, optimizer = _trained(way, steps)
    state = optimizer.state_dict()
    told = [record.message for record in caplog.records]
    assert len(told) == (steps > 0) and all("the checkpoint of AdamW holds no masters" in line for line in told)
    optimizer.load_state_dict(copy.deepcopy(state) if copied else state)
    optimizer.state_dict()
    assert [record.message for record in caplog.records] == told  # once for each optimizer, and nothing of the load
    train(named, optimizer, steps, steps + 3)
    assert same(weights(named), weights(straight))


@pytest.mark.parametrize("way", ["master", "split"])
def test_a_checkpoint_of_before_the_first_step_has_lost_no_master(way, caplog):
    fresh = _trained(way, 0)[1].state_dict()
    named, optimizer = _trained(way, 2)
    optimizer.load_state_dict(fresh)
    assert not caplog.text
    train(named, optimizer, 0, 2)  # from the BF16 weights, not from masters of another run
    _, reference = _trained(way, 0)
    start = [(name, nn.Parameter(w)) for name, w in zip(dict(named), weights(_trained(way, 2)[0]), strict=True)]
    reference = optim.AdamW(start, lr=1e-3)
    hmpx.attach(reference, way)
    train(start, reference, 0, 2)
    assert same(weights(named), weights(start))


@pytest.mark.parametrize("options", [{}, {"cls": optim.SGD}, {"cls": optim.SGD, "momentum": 0.9}])
def test_a_state_of_another_moment_without_masters_warns(options, caplog):
    _, later = _trained("master", 3, **options)
    _, optimizer = _trained("master", 2, **options)
    optimizer.load_state_dict(copy.deepcopy(later.state_dict()))
    assert caplog.text.count("the checkpoint has no masters") == 1
    optimizer.load_state_dict(optimizer.state_dict())
    assert caplog.text.count("the checkpoint has no masters") == 1


def test_masters_that_torch_leaves_out_of_a_flat_layout_are_told(caplog):
    """They are in the checkpoint; torch looks for the keys that the state has when it is loaded."""
    torch.manual_seed(0)
    model, flat = Net().bfloat16(), StateDictOptions(flatten_optimizer_state_dict=True)
    named = list(model.named_parameters())
    optimizer = optim.AdamW(named, lr=1e-3)
    hmpx.attach(optimizer, "master", use_master_weights_in_ckpt=True)
    train(named, optimizer, 0, 2)
    saved = get_state_dict(model, optimizer, options=flat)[1]
    assert any(key.endswith("hmpx_master") for key in saved)
    set_optimizer_state_dict(model, optimizer, copy.deepcopy(saved), options=flat)
    train(named, optimizer, 2, 3)
    caplog.clear()
    set_optimizer_state_dict(model, optimizer, saved, options=flat)
    assert caplog.text.count("loads it with flatten_optimizer_state_dict=True") == 1


@pytest.mark.parametrize("way", ["master", "split"])
def test_weights_of_another_run_count_though_it_has_taken_as_many_steps(way, caplog):
    named, optimizer = _trained(way, 2)
    others, other = _trained(way, 0)
    train(others, other, 7, 9)
    optimizer.load_state_dict(copy.deepcopy(other.state_dict()))
    with torch.no_grad():
        for (_, p), (_, q) in zip(named, others, strict=True):
            p.copy_(q)
    train(named, optimizer, 2, 4)
    train(others, other, 2, 4)
    assert "has no masters" not in caplog.text
    for one, two in zip(weights(named), weights(others), strict=True):
        assert (one.float() - two.float()).abs().max() <= 0.01 * two.float().abs().max()


@pytest.mark.parametrize("model_last", [True, False])
@pytest.mark.parametrize("way", ["master", "split"])
def test_masters_are_those_of_the_weights_of_another_run_with_another_seed(way, model_last):
    """It has taken as many steps, and its weights round to what the masters of this one do."""
    named, optimizer = _trained(way, 2)
    others, other = _trained(way, 0)
    hmpx.detach(other)
    hmpx.attach(other, way, seed=1)
    train(others, other, 0, 2)
    assert same(weights(named), weights(others))
    with torch.no_grad():
        for (_, p), (_, q) in zip(named, others, strict=True):
            p.copy_(q) if not model_last else None
        optimizer.load_state_dict(copy.deepcopy(other.state_dict()))
        for (_, p), (_, q) in zip(named, others, strict=True):
            p.copy_(q) if model_last else None
    handle = optimizer._hmpx_attachment
    assert same([handle.masters_of(p) for _, p in named], [w.float() for w in weights(named)])


@pytest.mark.parametrize(
    "one, other, model_last", [("master", "split", True), ("split", "master", False), ("master", "split8", True)]
)
def test_a_checkpoint_moves_between_ways_to_hold_masters(one, other, model_last):
    def are_alike(masters, others):  # those of 24 bits are rounded
        near = [torch.allclose(a, b, rtol=6 * 2**-16, atol=0.6 * 2**-16) for a, b in zip(masters, others, strict=True)]
        return same(masters, others) if other != "split8" else all(near)

    named = parameters()
    optimizer = optim.AdamW(named, lr=1e-2)
    hmpx.attach(optimizer, one, use_master_weights_in_ckpt=True)
    train(named, optimizer, 0, 3)
    with torch.no_grad():  # a master between two BF16 numbers, which the two ways round differently
        masters = masters_in(optimizer)
        masters[0][0, 0] = 1 + 2**-8
        named[0][1][0, 0] = 1 if one == "master" else 1 + 2**-7
        optimizer._hmpx_attachment._updates.set_masters(optimizer, {named[0][1]: masters[0]})
    saved, before = copy.deepcopy(optimizer.state_dict()), weights(named)
    moved = parameters()
    loaded = optim.AdamW(moved, lr=1e-2)
    hmpx.attach(loaded, other, use_master_weights_in_ckpt=True)
    if model_last:
        loaded.load_state_dict(saved)
    with torch.no_grad():
        for (_, p), weight in zip(moved, before, strict=True):
            p.copy_(weight)
    if not model_last:
        loaded.load_state_dict(saved)
    again = masters_in(loaded)
    assert are_alike(again, masters) and again[0][0, 0] == 1 + 2**-8
    train(named, optimizer, 3, 5)
    train(moved, loaded, 3, 5)
    assert are_alike(masters_in(loaded), masters_in(optimizer))


def test_masters_are_in_the_file_only_when_asked_for(caplog):
    named = parameters()
    optimizer = optim.AdamW(named, lr=1e-2)
    hmpx.attach(optimizer, "master")
    train(named, optimizer, 0, 2)
    saved = optimizer.state_dict()
    assert set(saved["state"][0]) == {"step", "exp_avg", "exp_avg_sq"}
    train(named, optimizer, 2, 3)  # what is saved is not what is here any more
    optimizer.load_state_dict(saved)
    assert "has no masters (it was saved without use_master_weights_in_ckpt, or" in caplog.text
    before = weights(named)
    optimizer.param_groups[0].update(lr=0.0, weight_decay=0.0)
    train(named, optimizer, 2, 3)
    assert same(weights(named), before)  # the masters start from the BF16 weights again


def test_a_plain_optimizer_reads_what_is_its_own(caplog):
    named = parameters()
    optimizer = optim.AdamW(named, lr=1e-2)
    hmpx.attach(optimizer, "master", use_master_weights_in_ckpt=True)
    train(named[:2], optimizer, 0, 2)  # the third parameter has no gradient, so no state
    saved = optimizer.state_dict()
    assert 2 not in saved["state"]
    plain = optim.AdamW(parameters(torch.float32), lr=1e-2)
    plain.load_state_dict(saved)
    twin = [(n, p) for n, p in zip("abc", plain.param_groups[0]["params"], strict=True)]
    train(twin, plain, 2, 4)
    stochastic = optim.AdamW(parameters(), lr=1e-2)
    hmpx.attach(stochastic)
    stochastic.load_state_dict(saved)
    assert "masters of 2 parameters are dropped" in caplog.text
    assert "hmpx_master" not in stochastic.state[stochastic.param_groups[0]["params"][0]]


def test_a_checkpoint_of_another_layout_changes_nothing():
    named, others = parameters(), parameters(sizes=((6, 8), (5, 7), (11,)))
    optimizer, other = optim.AdamW(named, lr=1e-2), optim.AdamW(others, lr=1e-2)
    for each, its in ((optimizer, named), (other, others)):
        hmpx.attach(each, "split", use_master_weights_in_ckpt=True)
        train(its, each, 0, 2)
    before = copy.deepcopy((weights(named), optimizer.state_dict()))
    with pytest.raises(hmpx.HmpxError, match=r"masters of parameter 0 have the shape \(6, 8\), the parameter \(8, 6\)"):
        optimizer.load_state_dict(other.state_dict())
    shorter = optimizer.state_dict()
    shorter["param_groups"][0]["params"] = [0, 1]
    with pytest.raises(ValueError, match="doesn't match the size"):
        optimizer.load_state_dict(shorter)
    after = optimizer.state_dict()
    assert same(weights(named), before[0])
    assert all(same(after["state"][i].values(), before[1]["state"][i].values()) for i in range(3))


UNFIT = {  # of which parameter the state is changed, how, and what torch says
    "of another size": (0, lambda state: state.update(exp_avg=torch.zeros(10)), RuntimeError, "size of tensor"),
    "of another size, in a later slice": (1, lambda state: state.update(exp_avg=torch.zeros(401)), RuntimeError, ""),
    "missing beside a count": (0, lambda state: state.pop("exp_avg"), KeyError, "exp_avg"),
}
UNFIT_BY = [(each, fused) for each in UNFIT for fused in ((None,) if "slice" in each else (False, True))]


@pytest.mark.parametrize("what, fused", UNFIT_BY)
def test_state_that_does_not_fit_is_torchs_error_and_moves_nothing(what, fused, monkeypatch):
    monkeypatch.setattr(transfers, "_FLOOR", 64)
    which, change, error, said = UNFIT[what]
    params = [parameter(300), parameter(400)]
    optimizer = optim.AdamW(params, lr=0.1)
    hmpx.attach(optimizer, fused=fused)
    step_by(optimizer)
    saved, before = copy.deepcopy(optimizer.state_dict()), [p.detach().clone() for p in params]
    change(saved["state"][which])
    optimizer.load_state_dict(saved)
    with pytest.raises(error, match=said):
        step_by(optimizer)
    assert all(map(torch.equal, params, before))


@pytest.mark.parametrize("way", ["master", "split"])
def test_masters_loaded_before_attach_are_taken_over_or_told_of(way, caplog):
    p = parameter(10)
    optimizer = optim.SGD([p], lr=1e-4, momentum=0.9)
    hmpx.attach(optimizer, way, use_master_weights_in_ckpt=True)
    for _ in range(3):
        step_by(optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    hmpx.detach(optimizer)
    master = saved["state"][0]["hmpx_master"]
    for region, kept in ((True, True), (False, False)):
        loaded = optim.SGD([p], lr=1e-4, momentum=0.9)
        if region:
            with hmpx.disable_casts():
                loaded.load_state_dict(copy.deepcopy(saved))
        else:
            hmpx.restore()  # torch loads by itself
            loaded.load_state_dict(copy.deepcopy(saved))
        handle = hmpx.attach(loaded, way, use_master_weights_in_ckpt=True)
        now = loaded.state_dict()["state"][0]["hmpx_master"]
        assert torch.equal(now, master if kept else p.detach().float()) and "hmpx_master" not in loaded.state[p]
        assert ("the load cast them to BF16" in caplog.text) == (not kept)
        handle.detach()


def test_a_complete_checkpoint_without_a_master_is_no_loss(caplog):
    optimizer = optim.SGD([parameter(4)], lr=0.1)
    hmpx.attach(optimizer, "split", use_master_weights_in_ckpt=True)
    optimizer.load_state_dict(optimizer.state_dict())
    assert not caplog.text and "hmpx_masters" not in optimizer.param_groups[0]


def by_names(optimizer, state_dict):
    """torch's documented recipe: a checkpoint whose parameters stand in another order, brought into this one's."""
    own = copy.deepcopy(optimizer.state_dict())
    theirs = {
        name: state_dict["state"].get(i)
        for group in state_dict["param_groups"]
        for name, i in zip(group["param_names"], group["params"], strict=True)
    }
    for group in own["param_groups"]:
        for name, i in zip(group["param_names"], group["params"], strict=True):
            own["state"].pop(i, None)
            if theirs[name] is not None:
                own["state"][i] = theirs[name]
    for key in ("hmpx_step", "hmpx_seed", "hmpx_masters"):
        own["param_groups"][0][key] = state_dict["param_groups"][0][key]
    return own


@pytest.mark.parametrize(
    "way, prepend, registered",
    [("master", False, "before"), ("split", True, "before"), ("split", False, "after"), ("master", True, "after")],
)
def test_masters_are_taken_from_what_hooks_of_the_user_make_of_a_checkpoint(way, prepend, registered):
    named = parameters()
    optimizer = optim.AdamW(named, lr=1e-2)
    hmpx.attach(optimizer, way, use_master_weights_in_ckpt=True)
    train(named, optimizer, 0, 3)
    saved = copy.deepcopy(optimizer.state_dict())
    turned = parameters()[::-1]
    loaded = optim.AdamW(turned, lr=1e-2)
    if registered == "before":
        loaded.register_load_state_dict_pre_hook(by_names, prepend=prepend)
    hmpx.attach(loaded, way, use_master_weights_in_ckpt=True)
    if registered == "after":
        loaded.register_load_state_dict_pre_hook(by_names, prepend=prepend)
    with torch.no_grad():
        for (_, p), (_, q) in zip(reversed(turned), named, strict=True):
            p.copy_(q)
    loaded.load_state_dict(saved)
    for number in range(3, 6):
        set_gradients(named, number)
        optimizer.step()
        for (_, p), (_, q) in zip(reversed(turned), named, strict=True):
            p.grad = q.grad.clone()
        loaded.step()
    assert same(weights(named), weights(turned[::-1]))
    assert same(masters_in(optimizer), masters_in(loaded)[::-1])


@pytest.mark.parametrize("prepend", [False, True])
def test_hooks_of_the_user_see_the_masters_that_are_saved(prepend):
    named = parameters()
    optimizer = optim.AdamW(named, lr=1e-2)
    seen = []

    def look(_, state_dict):
        seen.append("hmpx_master" in state_dict["state"][0])

    hmpx.attach(optimizer, "master", use_master_weights_in_ckpt=True)
    train(named, optimizer, 0, 1)
    optimizer.register_state_dict_post_hook(look, prepend=prepend)
    optimizer.state_dict()
    assert seen == [True]


@needs_grad_dtype
@pytest.mark.parametrize("early", [True, False])
def test_torchs_state_dict_of_an_optimizer_whose_gradients_are_fp32(early):
    """In one process: torch makes state by a step with gradients of zeros, in BF16."""
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    def made():
        torch.manual_seed(0)
        model = nn.Linear(8, 8).bfloat16()
        optimizer = optim.AdamW(model.named_parameters(), lr=1e-2)
        hmpx.attach(optimizer, "master", use_fp32_grad_acc=True, use_master_weights_in_ckpt=True)
        return model, optimizer

    def step(model, optimizer):
        optimizer.zero_grad()
        model(torch.ones(2, 8, dtype=BF16)).float().square().mean().backward()
        optimizer.step()

    model, optimizer = made()
    for _ in range(2):
        step(model, optimizer)
    weights, state = copy.deepcopy(get_state_dict(model, optimizer))
    step(model, optimizer)
    resumed, other = made()
    if early:
        get_state_dict(resumed, other)
    set_state_dict(resumed, other, model_state_dict=weights, optim_state_dict=state)
    step(resumed, other)
    assert torch.equal(resumed.weight, model.weight)
    assert resumed.weight.grad.dtype is torch.float32 and resumed.weight.grad_dtype is torch.float32


def test_a_checkpoint_of_an_earlier_version_says_what_has_changed(caplog):
    optimizer = optim.SGD([parameter(4)], lr=0.1)
    hmpx.attach(optimizer, "split", use_master_weights_in_ckpt=True)
    step_by(optimizer)
    saved = optimizer.state_dict()
    assert saved["param_groups"][0]["hmpx_version"] == hmpx.__version__
    optimizer.load_state_dict(saved)
    step_by(optimizer)
    assert caplog.text == ""
    del saved["param_groups"][0]["hmpx_version"]
    optimizer.load_state_dict(saved)
    assert "SGD: this checkpoint is of hmpx 0.2 or before" in caplog.text


class GoesOver(optim.SGD):
    """Goes over the checkpoint after torch's load, as the optimizers of pytorch_optimizer 4.1 do."""

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        for p, i in zip(self.param_groups[0]["params"], state_dict["param_groups"][0]["params"], strict=True):
            for key in state_dict["state"].get(i, {}):
                self.state[p][key] = self.state[p][key]


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("way", ["master", "split", "split8"])
def test_a_class_that_goes_over_its_state_after_a_load_resumes_with_masters(way, momentum):
    """With and without other state; a load that is refused before it begins leaves the masters that are there."""

    def fresh():
        named = parameters()
        optimizer = GoesOver(named, lr=1e-4, momentum=momentum)
        hmpx.attach(optimizer, way, use_master_weights_in_ckpt=True)
        return named, optimizer

    named, optimizer = fresh()
    train(named, optimizer, 0, 3)
    held, saved = [p.detach().clone() for _, p in named], copy.deepcopy(optimizer.state_dict())
    again, loaded = fresh()
    train(again, loaded, 7, 9)
    with torch.no_grad():
        for (_, p), weight in zip(again, held, strict=True):
            p.copy_(weight)
    loaded.load_state_dict(copy.deepcopy(saved))
    assert not any("hmpx_master" in state for state in loaded.state.values())
    wrong = copy.deepcopy(saved)
    wrong["param_groups"][0]["hmpx_step"] = -1
    with pytest.raises(hmpx.HmpxError):
        loaded.load_state_dict(wrong)
    for one, other in ((named, optimizer), (again, loaded)):
        train(one, other, 3, 6)
    assert same(weights(named), weights(again))
