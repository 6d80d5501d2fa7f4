"""Weight updates where something unusual stands in the way."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn, optim

import hmpx
from hmpx.bench.measure import memory
from hmpx.updates import sliced_step

BF16 = torch.bfloat16


def parameter(*shape, value=1.0, dtype=BF16):
    return nn.Parameter(torch.full(shape, value, dtype=dtype))


def step(optimizer, gradient=1.0):
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        p.grad = torch.full_like(p, gradient)
    optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float64, BF16])
@pytest.mark.parametrize("fused", [False, True])
def test_another_default_dtype(dtype, fused):
    p, q = parameter(1000), parameter(1000)
    optimizers = optim.Adam([p], lr=0.01), optim.Adam([q], lr=0.01)
    for optimizer in optimizers:
        hmpx.attach(optimizer, fused=fused)
    step(optimizers[0])
    torch.set_default_dtype(dtype)
    try:
        step(optimizers[1])
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(p, q) and optimizers[1].state[q]["step"].dtype is not BF16


@pytest.mark.parametrize("how", [{"weights": "split"}, {"weights": "master"}, {"weights": "stochastic"}])
@pytest.mark.parametrize("size", [10, 300_000])
def test_a_parameter_that_changes_its_size(how, size):
    p = parameter(1000)
    optimizer = optim.SGD([p], lr=0.5)
    hmpx.attach(optimizer, **how)
    step(optimizer)
    p.grad = None
    p.data = torch.ones(size, dtype=BF16)
    step(optimizer)
    assert (p == 0.5).all()


@pytest.mark.parametrize("fused", [False, True])
def test_state_of_another_size_is_torchs_error(fused):
    p, small = parameter(1000), parameter(10)
    optimizer, other = optim.Adam([p]), optim.Adam([small])
    step(other)
    hmpx.attach(optimizer, fused=fused)
    optimizer.load_state_dict(other.state_dict())
    with pytest.raises(RuntimeError, match="size of tensor"):
        step(optimizer)
    assert (p == 1).all()


def test_state_of_another_size_in_a_later_slice_moves_nothing(monkeypatch):
    monkeypatch.setattr(sliced_step, "_FLOOR", 64)
    p, q = parameter(300), parameter(400)
    optimizer = optim.Adam([p, q], lr=0.1)
    hmpx.attach(optimizer)
    step(optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][1]["exp_avg"] = torch.zeros(401)
    optimizer.load_state_dict(saved)
    before = p.detach().clone()
    with pytest.raises(RuntimeError):
        step(optimizer)
    assert torch.equal(p, before)


@pytest.mark.parametrize("way", ["master", "split"])
def test_masters_loaded_before_attach_are_taken_over_or_told_of(way, caplog):
    p = parameter(10)
    optimizer = optim.SGD([p], lr=1e-4, momentum=0.9)
    hmpx.attach(optimizer, way, use_master_weights_in_ckpt=True)
    for _ in range(3):
        step(optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    hmpx.detach(optimizer)
    master = saved["state"][0]["hmpx_master"]
    for region, kept in ((True, True), (False, False)):
        loaded = optim.SGD([p], lr=1e-4, momentum=0.9)
        if region:
            with hmpx.disable_casts():
                loaded.load_state_dict(copy.deepcopy(saved))
        else:
            loaded.load_state_dict(copy.deepcopy(saved))
        handle = hmpx.attach(loaded, way, use_master_weights_in_ckpt=True)
        now = loaded.state_dict()["state"][0]["hmpx_master"]
        assert torch.equal(now, master if kept else p.detach().float()) and "hmpx_master" not in loaded.state[p]
        assert ("the load cast them to BF16" in caplog.text) == (not kept)
        handle.detach()


def test_masters_that_the_weights_have_left_behind_do_not_come_back():
    p = parameter(10)
    optimizer = optim.SGD([p], lr=0.01, momentum=0.9)
    hmpx.attach(optimizer, "master", use_master_weights_in_ckpt=True)
    step(optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    plain = optim.SGD([p], lr=0.01, momentum=0.9)
    plain.load_state_dict(saved)
    for _ in range(20):
        step(plain)
    weight = p.detach().clone()
    again = optim.SGD([p], lr=0.0)
    hmpx.attach(again, "master")
    again.load_state_dict(copy.deepcopy(plain.state_dict()))
    again.param_groups[0]["lr"] = 0.0
    step(again)
    assert torch.equal(p, weight)


@pytest.mark.parametrize("way", ["master", "split"])
def test_weights_written_by_hand_have_no_old_low_bits(way):
    p = parameter(10)
    optimizer = optim.SGD([p], lr=0.001)
    hmpx.attach(optimizer, way, use_master_weights_in_ckpt=True)
    step(optimizer)
    with torch.no_grad():
        p.fill_(4.0)
    step(optimizer, 0.0)
    saved = optimizer.state_dict()["state"].get(0, {}).get("hmpx_master", p.detach().float())
    assert (saved == 4).all()


def test_fp32_state_of_a_plain_checkpoint_stays_fp32():
    single, p = parameter(10, dtype=torch.float32), parameter(10)
    plain, optimizer = optim.AdamW([single]), optim.AdamW([p])
    step(plain)
    hmpx.attach(optimizer)
    optimizer.load_state_dict(plain.state_dict())
    assert optimizer.state[p]["exp_avg"].dtype is torch.float32


@pytest.mark.parametrize("how", ["release_gradients", "use_fp32_grad_acc"])
def test_a_forgotten_optimizer_leaves_its_parameters_alone(how):
    if how == "use_fp32_grad_acc" and not hasattr(torch.Tensor, "grad_dtype"):
        pytest.skip("torch before 2.13 has no grad_dtype")
    model = nn.Linear(4, 4).bfloat16()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    hmpx.attach(optimizer, **{how: True})
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 4, dtype=BF16)).sum().backward()
    assert model.weight.grad.dtype is BF16
    optimizer.step()


def test_a_grad_dtype_of_the_users_own_comes_back():
    if not hasattr(torch.Tensor, "grad_dtype"):
        pytest.skip("torch before 2.13 has no grad_dtype")
    p = parameter(4)
    p.grad_dtype = None
    handle = hmpx.attach(optim.SGD([p], lr=0.1), use_fp32_grad_acc=True)
    assert p.grad_dtype is torch.float32 or handle.optimizer is None
    handle.detach()
    assert p.grad_dtype is None


class Wrapper(optim.Optimizer):
    """Never runs the constructor of its base, as some launchers' wrappers do not."""

    def __init__(self, inner):
        self.inner = inner

    param_groups = property(lambda self: self.inner.param_groups)
    state = property(lambda self: self.inner.state)

    def step(self, closure=None):
        return self.inner.step(closure)


class OwnList(optim.Optimizer):
    """Steps on a list of its own."""

    def __init__(self, params):
        super().__init__(params, {})
        self.own = [p for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.own:
            p.sub_(p.grad)


def test_optimizers_that_cannot_be_stepped_in_fp32_are_refused():
    p = parameter(4)
    with pytest.raises(
        hmpx.HmpxError, match=r"Wrapper never ran Optimizer.__init__.*attach the optimizer that it holds"
    ):
        hmpx.attach(Wrapper(optim.SGD([p], lr=0.1)))
    with hmpx.disable_casts():
        wrapped = Wrapper(optim.SGD([p], lr=0.1))
        step(wrapped)
    assert wrapped.param_groups[0]["hmpx_step"] == 1
    with pytest.raises(hmpx.HmpxError, match="OwnList wrote to parameter '0' itself"), hmpx.disable_casts():
        step(OwnList([p]))


class Copying(optim.SGD):
    def __deepcopy__(self, memo):
        twin = self.__class__.__new__(self.__class__)
        memo[id(self)] = twin
        twin.__dict__.update(copy.deepcopy({k: v for k, v in self.__dict__.items() if "hook" not in k}, memo))
        for key in (k for k in self.__dict__ if "hook" in k):
            setattr(twin, key, type(getattr(self, key))())
        return twin


class WholeState(optim.SGD):
    def __getstate__(self):
        return self.__dict__


def test_copies_that_take_every_attribute_along_step_themselves():
    p = parameter(4)
    optimizer = Copying([p], lr=0.5)
    hmpx.attach(optimizer)
    twin = copy.deepcopy(optimizer)
    step(twin)
    assert (p == 1).all() and (twin.param_groups[0]["params"][0] == 0.5).all()
    whole = WholeState([p], lr=0.5)
    hmpx.attach(whole)
    again = pickle.loads(pickle.dumps(whole))
    step(again)
    assert (again.param_groups[0]["params"][0] == 0.5).all()


@pytest.mark.parametrize("cls", [optim.Adam, optim.SGD])
def test_channels_last_parameters_are_sliced_too(cls, monkeypatch):
    monkeypatch.setattr(sliced_step, "_FLOOR", 1 << 12)
    torch.manual_seed(1)
    weight = torch.randn(64, 32, 3, 3).bfloat16()
    layouts = (weight.clone(memory_format=torch.channels_last), weight.clone())
    params = [nn.Parameter(w) for w in layouts]
    optimizers = [cls([p], lr=0.1) for p in params]
    for optimizer, p in zip(optimizers, params, strict=True):
        hmpx.attach(optimizer)
        p.grad = torch.ones_like(p)
        optimizer.step()
        peak, stays = memory(optimizer.step, torch.device("cpu"))
        assert (peak - stays) / p.numel() <= 4  # 4096 elements at a time of 18432; whole shadows would take 8 and more
    assert torch.equal(*params) and not params[0].is_contiguous()


def test_masters_take_the_layout_of_the_parameter(monkeypatch):
    monkeypatch.setattr(sliced_step, "_FLOOR", 64)
    saved = None
    for layout in (torch.channels_last, torch.contiguous_format):
        p = nn.Parameter(torch.ones(8, 4, 3, 3, dtype=BF16).to(memory_format=layout))
        optimizer = optim.SGD([p], lr=1e-4)
        hmpx.attach(optimizer, "master", use_master_weights_in_ckpt=True)
        if saved:
            optimizer.load_state_dict(saved)
        step(optimizer)
        saved = copy.deepcopy(optimizer.state_dict())
    assert torch.allclose(saved["state"][0]["hmpx_master"], torch.tensor(1 - 2e-4), rtol=0, atol=1e-6)


def test_state_that_is_none(monkeypatch):
    monkeypatch.setattr(sliced_step, "_FLOOR", 64)
    p = parameter(1000)
    optimizer = optim.SGD([p], lr=0.5, momentum=0.9)
    optimizer.state[p] = {"momentum_buffer": None}
    with hmpx.disable_casts():
        step(optimizer)
    assert (p == 0.5).all() and optimizer.state[p]["momentum_buffer"].shape == p.shape


def test_lbfgs_attached_and_detached_in_the_middle():
    p = parameter(6)
    optimizer = optim.LBFGS([p], lr=0.1, max_iter=3)

    def closure():
        optimizer.zero_grad()
        loss = (p.float() ** 2).sum()
        loss.backward()
        return loss

    before = closure().item()
    for _ in range(2):
        optimizer.step(closure)
        hmpx.attach(optimizer)
        optimizer.step(closure)
        hmpx.detach(optimizer)
    assert closure().item() < before


def test_a_subclass_of_adagrad_starts_from_the_exact_value():
    class Mine(optim.Adagrad):
        pass

    p = parameter(4)
    optimizer = Mine([p], lr=0.0, initial_accumulator_value=0.1)
    hmpx.attach(optimizer)
    step(optimizer, 0.0)
    assert (optimizer.state[p]["sum"] == torch.tensor(0.1)).all()


def test_sparse_state_stays_as_it_is():
    table = nn.Embedding(10, 4, sparse=True).bfloat16()
    optimizer = optim.SGD(table.parameters(), lr=0.1, momentum=0.9)
    hmpx.attach(optimizer, state_dtype=BF16)
    for _ in range(2):
        optimizer.zero_grad()
        table(torch.tensor([1, 3])).sum().backward()
        optimizer.step()


def test_no_two_parameters_share_their_random_numbers():
    one, two = parameter(500), parameter(500)
    optimizer = optim.SGD([one], lr=1e-3)
    hmpx.attach(optimizer, names=["1"])
    optimizer.add_param_group({"params": [two], "lr": 1e-3})
    step(optimizer)
    assert not torch.equal(one, two)
    groups = [{"params": [("w", parameter(500))]}, {"params": [("w", parameter(500))]}]
    region = optim.SGD(groups, lr=1e-3)
    with hmpx.disable_casts():
        step(region)
    assert not torch.equal(*(group["params"][0] for group in region.param_groups))


def test_an_empty_name_is_a_name():
    p = parameter(500)
    optimizer = optim.SGD([p], lr=1e-3)
    hmpx.attach(optimizer, names=[""])
    step(optimizer)
    assert torch.equal(p, hmpx.stochastic_round(torch.full((500,), 1 - 1e-3), seed=0, step=0, name=""))


def test_other_names_for_an_attached_optimizer_are_refused():
    optimizer = optim.SGD([parameter(4)], lr=0.1)
    handle = hmpx.attach(optimizer, names=["a"])
    assert hmpx.attach(optimizer, names=["a"]) is handle and hmpx.attach(optimizer) is handle
    with pytest.raises(hmpx.HmpxError, match="is in force"):
        hmpx.attach(optimizer, names=["b"])


def test_a_complete_checkpoint_without_a_master_is_no_loss(caplog):
    optimizer = optim.SGD([parameter(4)], lr=0.1)
    hmpx.attach(optimizer, "split", use_master_weights_in_ckpt=True)
    optimizer.load_state_dict(optimizer.state_dict())
    assert not caplog.text and "hmpx_masters" not in optimizer.param_groups[0]


def test_the_layout_of_a_gradient_is_kept():
    torch.manual_seed(0)
    weight, gradient = torch.randn(30, 40).bfloat16(), torch.randn(40, 30).bfloat16().t()
    p, q = nn.Parameter(weight.clone()), nn.Parameter(weight.float())
    optimizer, reference = optim.Adafactor([p]), optim.Adafactor([q])
    p.grad, q.grad = gradient, gradient.float()
    with hmpx.disable_casts():
        optimizer.step()
    reference.step()
    assert torch.equal(optimizer.state[p]["row_var"], reference.state[q]["row_var"])


def test_the_seed_is_in_a_checkpoint_from_the_start():
    optimizer = optim.SGD([parameter(4)], lr=0.1)
    hmpx.attach(optimizer, seed=7)
    assert optimizer.state_dict()["param_groups"][0]["hmpx_seed"] == 7


def test_parameters_that_share_memory_are_stepped_one_after_the_other():
    base = torch.ones(4, dtype=BF16)
    p, q = nn.Parameter(base), nn.Parameter(base)
    with hmpx.disable_casts():
        step(optim.SGD([p, q], lr=0.25))
    assert (p == 0.5).all()


class OwnStateDict(optim.SGD):
    def state_dict(self):
        return {"state": {}, "param_groups": []}


@pytest.mark.parametrize(
    "optimizer, options, message",
    [
        (
            OwnStateDict,
            {"weights": "split", "use_master_weights_in_ckpt": True},
            "OwnStateDict.state_dict runs no hooks",
        ),
        (optim.SGD, {"weights": ["master"]}, "is none of 'stochastic'"),
        (optim.SGD, {"weights": nn.Linear(2, 2)}, r"weights is a Linear, not one of .*; did you mean model=\?"),
        (optim.SGD, {"names": 5}, "names is 5, not a list of strings"),
        (optim.SGD, {"names": ["\ud800"]}, "cannot be printed"),
        (optim.SGD, {"model": 5}, "model is a int, not a torch.nn.Module"),
        (optim.SGD, {"fused": "yes"}, "fused='yes' is neither True nor False"),
    ],
)
def test_wrong_arguments_leave_nothing_attached(optimizer, options, message):
    optimizer = optimizer([parameter(4)], lr=0.1)
    before = set(vars(optimizer))
    with pytest.raises(hmpx.HmpxError, match=message):
        hmpx.attach(optimizer, **options)
    assert set(vars(optimizer)) == before and not optimizer._optimizer_load_state_dict_pre_hooks


@pytest.mark.parametrize("thing", [None, nn.Linear(2, 2)])
def test_only_optimizers_are_detached(thing):
    with pytest.raises(hmpx.HmpxError, match=r"detach needs a torch.optim.Optimizer"):
        hmpx.detach(thing)
