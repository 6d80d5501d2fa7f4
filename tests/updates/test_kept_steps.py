"""A step by the plan of the one before: what it holds, what it raises, and changes that no random program makes.

`test_programs.py` has steps of each way and optimizer after every other change, beside FP32 copies.
"""

import collections
import functools

import pytest
import torch
import torch.distributed as dist
from lion_pytorch import Lion
from torch import nn, optim
from torch.distributed.tensor import DTensor, Shard

import hmpx
from hmpx.errors import HmpxError
from hmpx.rounding import native
from hmpx.updates.stepping import optimizer_classes, transfers
from tests.support.bench import memory
from tests.support.numbers import nearly_equal
from tests.support.same import same

pytestmark = pytest.mark.skipif(native.library() is None, reason="no C compiler here, so no step is remembered")

BF16 = torch.bfloat16
SIZES = ((40, 9), (201,), (5,), (64, 64), (10, 300))
ADAM = (optim.AdamW, {"fused": True})


def made(cls=optim.AdamW, options=None, more=(), **settings):
    """Return parameters of several shapes in two groups, those in `more` the last, their optimizer and its attachment.

    Steps are the optimizer's own, in chunks, unless `fused` is given.
    """
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(size, generator=generator).bfloat16()) for size in SIZES]
    params += [nn.Parameter(tensor) for tensor in more]
    named = [(f"p{i}", p) for i, p in enumerate(params)]
    groups = [{"params": named[:3]}, {"params": named[3:], "lr": 2e-2}]
    optimizer = cls(groups, lr=1e-2, **(options or {}))
    return params, optimizer, hmpx.attach(optimizer, **{"fused": False, **settings})


def give_gradients(optimizer, turn):
    generator = torch.Generator().manual_seed(10 + turn)
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


def everything(params, optimizer, handle):
    """Weights, gradients, state and masters, of parameters that were added or taken out, too."""
    parameters = [*params, *(p for group in optimizer.param_groups for p in group["params"])]
    state = [value for p in parameters for value in optimizer.state.get(p, {}).values()]
    found = [*(p.detach() for p in parameters), *(p.grad for p in params), *state, *map(handle.masters_of, parameters)]
    return [each for each in found if isinstance(each, torch.Tensor)]


def test_a_step_is_remembered_on_the_cpu_whatever_the_default_device_is():
    params, optimizer, _ = made(*ADAM)
    for turn in range(4):
        give_gradients(optimizer, turn)
        with torch.device("cpu" if turn == 0 else "meta"):  # the first step makes the count of steps there
            optimizer.step()
    assert optimizer.state[params[0]]["step"] == 4


def test_between_two_steps_what_is_kept_has_no_memory():
    _, optimizer, handle = made(*ADAM)
    for turn in range(4):
        give_gradients(optimizer, turn)
        peak, stays = memory(optimizer.step, torch.device("cpu"))
    assert handle._updates.kept_steps == 2 and stays == 0 < peak


@pytest.mark.parametrize("turns, fused", [(0, False), (1, True), (4, False), (4, True)])
def test_a_gradient_without_memory_is_an_error(fused, turns):
    params, optimizer, _ = made(*ADAM, fused=fused)
    for turn in range(turns + 1):
        give_gradients(optimizer, turn)
        if turn < turns:
            optimizer.step()
    params[1].grad.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="not allocated"):
        optimizer.step()


@pytest.mark.parametrize("fused", [False, True])
def test_a_gradient_whose_sign_is_turned_by_a_flag(fused):
    results = []
    for negative in (torch.neg, torch._neg_view):
        params, optimizer, _ = made(*ADAM, fused=fused)
        for turn in range(5):
            give_gradients(optimizer, turn)
            for p in params:
                p.grad = negative(p.grad)
            optimizer.step()
        results.append([p.detach() for p in params])
    assert all(torch.allclose(a, b, atol=1e-2, rtol=2**-7) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("weights", ["master", "split"])
def test_masters_of_an_optimizer_that_writes_to_them_unseen_and_raises(weights):
    """Lion decays ``p.data`` first, which has no version."""
    params, optimizer, handle = made(Lion, {"weight_decay": 0.5}, weights=weights)
    for turn in range(4):
        give_gradients(optimizer, turn)
        optimizer.step()
    before = [handle.masters_of(p) for p in params]
    optimizer.param_groups[0]["betas"] = ("fast", 0.99)
    with pytest.raises(TypeError):
        optimizer.step()
    assert handle._updates.kept_steps == 3 and same([handle.masters_of(p) for p in params], before)


@pytest.mark.parametrize("turns, momentum", [(1, 0.9), (4, 0.0), (4, 0.9)])
def test_an_error_after_a_fused_kernel_that_raises_no_versions(momentum, turns):
    params, optimizer, handle = made(optim.SGD, {"momentum": momentum, "fused": True}, weights="master")
    for turn in range(turns):
        give_gradients(optimizer, turn)
        optimizer.step()
    before = [handle.masters_of(p) for p in params]
    optimizer.param_groups[1]["lr"] = "fast"
    with pytest.raises(TypeError):
        optimizer.step()
    optimizer.param_groups[1]["lr"] = 1e-2
    if momentum:
        with pytest.raises(HmpxError, match="was interrupted by TypeError in the middle"):
            optimizer.step()
    else:
        assert same(before, [handle.masters_of(p) for p in params])
        optimizer.step()


class Odd(optim.SGD):
    """Does something after its steps, once it is told what."""

    act = None

    def step(self, closure=None):
        super().step(closure)
        for p in (p for group in self.param_groups for p in group["params"]):
            if self.act is not None:
                self.act(p, self.state[p])


ACTS = {
    "new tensors": lambda p, state: state.update(momentum_buffer=state["momentum_buffer"] + 1),
    "more tensors": lambda p, state: state.update(more=p.detach() * 2, count=state.get("count", torch.zeros(())) + 1),
    "written gradients": lambda p, state: p.grad.mul_(0.5),
    "new gradients": lambda p, state: setattr(p, "grad", p.grad * 0.25),
    "no gradients": lambda p, state: setattr(p, "grad", None),
}


def masters_given(params, optimizer, handle):
    if handle.settings.weights in ("master", "split", "split8"):
        handle._updates.set_masters(optimizer, {p: p.detach().float() + 2**-12 for p in params})


def unscaled_by_a_scaler(params, optimizer, handle):
    """As GradScaler tells a fused optimizer; for one step."""
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(64.0), torch.tensor(0.0)
    optimizer.register_step_post_hook(lambda *_: [vars(optimizer).pop(k, 0) for k in ("grad_scale", "found_inf")])


def moments_exchanged(params, optimizer, handle):
    state = optimizer.state[params[0]]
    state["exp_avg"], state["exp_avg_sq"] = state["exp_avg_sq"], state["exp_avg"].abs_()


def keys_exchanged(params, optimizer, handle):
    """The same tensors follow one another, in a dict whose keys are the same but for their order."""
    for p in params:
        state = optimizer.state[p]
        items = [({"exp_avg": "exp_avg_sq", "exp_avg_sq": "exp_avg"}.get(k, k), v) for k, v in state.items()]
        state.clear()
        state.update(items)
        state["exp_avg_sq"].abs_()


def in_the_next_group(groups, place):
    groups[1]["params"].insert(0, groups[0]["params"].pop(place))


def memory_exchanged(*tensors):
    for each in tensors:
        each.data = each.data.clone()


CHANGES = {
    "nothing": lambda ps, o, h: None,
    "lr": lambda ps, o, h: o.param_groups[0].update(lr=0.5),
    "maximize": lambda ps, o, h: o.param_groups[0].update(maximize=True),
    "an option of the optimizer's own step": lambda ps, o, h: o.param_groups[0].update(differentiable=True),
    "another seed": lambda ps, o, h: [group.update(hmpx_seed=5) for group in o.param_groups],
    "masters given": masters_given,
    "moments exchanged": moments_exchanged,
    "keys of moments exchanged": keys_exchanged,
    "state begun anew": lambda ps, o, h: setattr(o, "state", collections.defaultdict(dict)),
    "copied state": lambda ps, o, h: o.state.update({ps[1]: {k: v.clone() for k, v in o.state[ps[1]].items()}}),
    "state of another parameter": lambda ps, o, h: o.state.update({nn.Parameter(ps[4]): o.state.pop(ps[4])}),
    "a parameter in the next group": lambda ps, o, h: in_the_next_group(o.param_groups, 2),
    "a parameter elsewhere in memory": lambda ps, o, h: memory_exchanged(ps[0]),
    "state elsewhere in memory": lambda ps, o, h: memory_exchanged(*o.state[ps[2]].values()),
    "one more tensor of state": lambda ps, o, h: o.state[ps[1]].update(extra=torch.ones(201)),
    "gradients still scaled": unscaled_by_a_scaler,
    "weights written": lambda ps, o, h: ps[0].detach().mul_(2),
    "weights written unseen": lambda ps, o, h: ps[3].data.fill_(3.0),
    "strided gradients": lambda ps, o, h: setattr(ps[0], "grad", ps[0].grad.t().contiguous().t()),
}
WAYS = {
    "stochastic, in chunks": {"floor": 1024},
    "nearest, 8-bit state": {"weights": "nearest", "state_dtype": "8bit"},
    "split, BF16 state": {"weights": "split", "state_dtype": BF16},
    "rules": {"parameters": {"p1": {"weights": "split"}, "p4": {"state_dtype": BF16}}},
    "split8, fused": {"weights": "split8", "fused": True, "floor": 1024},
    "BF16 state, fused": {"state_dtype": BF16, "fused": True},
    "master, 8-bit state, fused": {"weights": "master", "state_dtype": "8bit", "fused": True},
}


def kept_beside_a_twin(make, act, turns=6, said=None):
    """Step beside a twin that looks at everything in each step, and compare them.

    act: called in each turn, for both, with the turn, the parameters, the optimizer and its attachment.
    Returns: what is left, and the number of kept steps after each turn, first without and then with the looks.
    """
    results, kept = [], []
    for forget in (False, True):
        params, optimizer, handle = make()
        for turn in range(turns):
            give_gradients(optimizer, turn)
            act(turn, params, optimizer, handle)
            if forget:
                handle._updates.look_again()
            versions = [(p, p._version) for p in params if p.grad is not None]
            optimizer.step()
            assert all(p._version > version for p, version in versions), said  # by which autograd knows of the write
            kept.append(handle._updates.kept_steps)
        results.append(everything(params, optimizer, handle))
    assert same(*results), said
    return results[0], kept


@pytest.mark.parametrize("way", WAYS)
def test_a_change_between_two_steps_is_seen(way, monkeypatch):
    settings = WAYS[way].copy()
    monkeypatch.setattr(transfers, "_FLOOR", settings.pop("floor", 1 << 17))
    for change, act in CHANGES.items():
        if "moments exchanged" in change and settings.get("state_dtype") == "8bit":
            continue  # which have other keys
        left, kept = kept_beside_a_twin(
            functools.partial(made, optim.AdamW, {"fused": "scaled" in change}, **settings),
            lambda turn, *given, act=act: turn == 3 and act(*given),
            said=change,
        )
        assert not any(x.isnan().any() for x in left), change
        assert kept[2] >= 1 and kept[6:] == [0] * 6 and (kept[5] >= 2 or change != "nothing"), change


@pytest.mark.parametrize("number, what", list(enumerate(ACTS)), ids=str)
@pytest.mark.parametrize("floor", [64, 1 << 17])
def test_what_an_optimizer_does_for_the_first_time_is_seen(number, what, floor, monkeypatch):
    monkeypatch.setattr(transfers, "_FLOOR", floor)
    monkeypatch.setitem(optimizer_classes.SCOPES, Odd, "element")
    state_dtype = BF16 if (floor == 64) == number % 2 else torch.float32

    def act(turn, params, optimizer, handle):
        optimizer.act = ACTS[what] if turn > 2 else None

    make = functools.partial(made, Odd, {"momentum": 0.9}, state_dtype=state_dtype)
    assert kept_beside_a_twin(make, act)[1][5] >= 2


@pytest.mark.parametrize("fused", [False, True])
def test_a_parameter_without_a_gradient_gets_one(fused):
    def act(turn, params, *_):
        params[2].grad = params[2].grad if turn > 3 else None

    assert kept_beside_a_twin(lambda: made(*ADAM, fused=fused), act)[1][5] >= 2


def test_momentum_that_is_switched_on_is_seen():
    def act(turn, params, optimizer, handle):
        optimizer.param_groups[1]["momentum"] = 0.9 if turn > 2 else 0.0

    assert kept_beside_a_twin(lambda: made(optim.SGD, fused=True), act)[1][5] >= 2


@pytest.mark.parametrize("keys", [("momentum_buffer",), ()])
def test_state_that_is_gone_from_its_key_is_seen(keys):
    """Both begin with another buffer."""

    def act(turn, params, optimizer, handle):
        if turn == 3:
            state = optimizer.state[params[4]]
            state.update({f"former {key}": state[key] for key in keys})
            del state["momentum_buffer"]

    kept_beside_a_twin(lambda: made(optim.SGD, {"momentum": 0.9}, fused=True), act, turns=5)


def test_factored_moments_in_bf16_are_pieces_of_a_kept_plan():
    made_so = functools.partial(made, optim.Adafactor, state_dtype=BF16)
    assert kept_beside_a_twin(made_so, lambda *_: None)[1][5] >= 4


def transposed(tensor):
    tensor.data = tensor.data.t()


def transposed_in_place(tensor):
    with torch.no_grad():
        tensor.t_()


@pytest.mark.parametrize(
    "which, lay, state_dtype, fused",
    [
        ("a parameter", transposed, torch.float32, True),
        ("a parameter", transposed_in_place, BF16, False),
        ("its gradient", transposed, BF16, True),
        ("its gradient", transposed_in_place, torch.float32, False),
        ("exp_avg", transposed, torch.float32, False),
        ("exp_avg", transposed_in_place, BF16, True),
    ],
)
def test_a_tensor_that_lies_otherwise_at_the_same_address_is_seen(which, lay, state_dtype, fused):
    """Beside a twin whose elements are never laid otherwise but copied."""
    results = []
    for copies in (False, True):
        params, optimizer, _ = made(fused=fused and not copies, state_dtype=state_dtype)
        square = params[3]
        for turn in range(6):
            give_gradients(optimizer, turn)
            if turn == 3:
                held = {"a parameter": square, "its gradient": square.grad}
                tensor = held[which] if which in held else optimizer.state[square][which]
                if copies:
                    tensor.data.copy_(tensor.data.t().clone())
                else:
                    lay(tensor)
                    assert not tensor.is_contiguous()
            optimizer.step()
        results.append([square.detach(), *optimizer.state[square].values()])
    (weight, *state), (copied, *copied_state) = results
    assert nearly_equal(weight, copied, 1 + weight.numel() // 100)
    for one, other in zip(state, copied_state, strict=True):
        assert (one - other).abs().max() <= 2**-6 * other.abs().max()  # BF16 state rounds either way


@pytest.fixture
def mesh():
    """That of a job of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield dist.init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


SHARDED = [{"fused": True}, {"fused": True, "state_dtype": "8bit"}, {"fused": False}]


@pytest.mark.parametrize("settings", SHARDED, ids=str)
def test_steps_of_shards_are_kept_until_one_is_exchanged(settings, mesh):
    """The memory of a shard is exchanged, as whoever moves it away and back does, and its gradients lie elsewhere."""
    found, kept = [], []
    for as_held in (lambda x: x, lambda x: DTensor.from_local(x, mesh, [Shard(0)], run_check=False)):
        generator = torch.Generator().manual_seed(0)
        whole = [torch.randn(size, generator=generator).bfloat16() for size in ((40, 9), (64, 64), (7,))]
        params = [nn.Parameter(as_held(each)) for each in whole]
        optimizer = optim.AdamW([(f"p{i}", p) for i, p in enumerate(params)], lr=1e-2)
        handle = hmpx.attach(optimizer, **settings)
        for step in range(8):
            for p in params:
                p.grad = as_held(torch.randn(p.shape, generator=generator).bfloat16())
            held = getattr(params[1], "_local_tensor", params[1])
            if step == 5 and held is not params[1]:
                params[1]._local_tensor = held.clone()
            elif step in (4, 5):
                held.data = held.data.clone()
            optimizer.step()
        found.append([getattr(p, "_local_tensor", p).detach() for p in params])
        kept.append(handle._updates.kept_steps)
    of_all = 8 - 1 if settings["fused"] else 8 - 2  # without an exchange
    assert same(*found) and kept == [of_all - 2] * 2
