"""Kept steps of classes that hmpx does not know, beside the same steps with new FP32 copies in each of them."""

import copy
import functools
import random
from itertools import cycle, islice

import pytest
import torch
from torch import nn, optim

import hmpx
from hmpx.updates.stepping import standing
from hmpx.updates.stepping import step as stepping

BF16 = torch.bfloat16


class Subclass(optim.AdamW):
    """A step around torch's."""

    def step(self, closure=None):
        return super().step(closure)


class Adam(optim.Optimizer):
    """Adam in loops, with a whole count. `odd` is called for each parameter after its update."""

    def __init__(self, params, odd=None):
        super().__init__(params, {"lr": 1e-2})
        self.odd = odd

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, group["lr"], self.state[p])
        return loss

    def update(self, p, rate, state):
        if not state:
            state.update(step=0, mean=torch.zeros_like(p), square=torch.zeros_like(p))
        state["step"] += 1
        state["mean"].lerp_(p.grad, 0.1)
        state["square"].mul_(0.9).addcmul_(p.grad, p.grad, value=0.1)
        p.addcdiv_(state["mean"], state["square"].sqrt().add_(1e-6), value=-rate)
        if self.odd is not None:
            self.odd(p, state)


class Factored(Adam):
    """Moments of rows and columns, and a number that is replaced in each step."""

    def update(self, p, rate, state):
        if not state:
            state.update(rms=torch.tensor(0.0), row=torch.zeros(p.shape[0]), column=torch.zeros(p.shape[1:]))
        state["rms"] = p.norm()
        state["row"].lerp_(p.grad.square().mean(tuple(range(1, p.dim()))), 0.1)
        state["column"].lerp_(p.grad.square().mean(0), 0.1)
        p.sub_(p.grad / (state["row"].mean() + state["column"].mean() + 1e-3).sqrt() * rate * state["rms"])


def replaces_state(p, state):
    state["mean"] = state["mean"] * 0.9


def swaps_state(p, state):
    state["mean"], state["square"] = state["square"].abs(), state["mean"].square()


def exchanges_state(p, state):
    state["mean"], state["square"] = state["square"], state["mean"].abs_()


def grows_state(p, state):
    if state["step"] == 4:
        state["third"] = torch.ones_like(p)


def keeps_gradient(p, state):
    state["last"] = p.grad


def keeps_view_of_gradient(p, state):
    state["last"] = p.grad.view(-1)


def raises_in_fifth(p, state):
    if state["step"] == 5:
        raise RuntimeError("in the middle")


ODD = {
    "replaces state": replaces_state,
    "swaps state": swaps_state,
    "exchanges state": exchanges_state,
    "grows state": grows_state,
    "keeps gradients": keeps_gradient,
    "keeps views of gradients": keeps_view_of_gradient,
    "state of lists": lambda p, state: state.setdefault("history", []).append(state["step"]),
    "drops gradients": lambda p, state: setattr(p, "grad", None),
    "writes gradients": lambda p, state: p.grad.mul_(0.5),
    "writes some gradients": lambda p, state: p.grad.mul_(0.5) if p.dim() == 2 else None,
    "writes gradients by data": lambda p, state: p.grad.data.mul_(0.5),
    "binds gradients anew": lambda p, state: setattr(p.grad, "data", p.grad.data * 2),
    "replaces gradients": lambda p, state: setattr(p, "grad", p.grad * 2),
    "binds weights anew": lambda p, state: setattr(p, "data", p.data * 1.01),
    "turns weights": lambda p, state: setattr(p, "data", p.data.t().contiguous().t()) if p.dim() == 2 else None,
    "marks": lambda p, state: setattr(p, "marks", [*getattr(p, "marks", ()), state["step"]]),
    "raises": raises_in_fifth,
}


def of_others(library, name):
    """Return what makes an optimizer of another library."""

    def make(params):
        optimizer = getattr(pytest.importorskip(library), name)(params, lr=1e-2)
        if library == "schedulefree":
            optimizer.train()
        return optimizer

    return make


CLASSES = {
    "subclass": lambda params: Subclass(params, lr=1e-2, foreach=True),
    "subclass, fused, amsgrad": lambda params: Subclass(params, lr=1e-2, fused=True, amsgrad=True),
    "loops": Adam,
    "factored": Factored,
    "schedule-free AdamW": of_others("schedulefree", "AdamWScheduleFree"),
    "ADOPT": of_others("pytorch_optimizer", "ADOPT"),
    "CAME": of_others("pytorch_optimizer", "CAME"),
    **{name: functools.partial(Adam, odd=odd) for name, odd in ODD.items()},
}


# What happens before a step: each gets the model's parameters, the optimizer, and what stays from action to action


def some_without_gradients(params, optimizer, kept):
    for p in params[::2]:
        p.grad = None


def none_has_a_gradient(params, optimizer, kept):
    for p in params:
        p.grad = None


def another_rate(params, optimizer, kept):
    optimizer.param_groups[0]["lr"] *= 0.5


def saved(params, optimizer, kept):
    kept["saved"] = copy.deepcopy(optimizer.state_dict())


def loaded(params, optimizer, kept):
    now = optimizer.state_dict()
    before = kept.get("saved", now)
    optimizer.load_state_dict(copy.deepcopy(before if len(before["param_groups"]) == len(now["param_groups"]) else now))


def weights_by_hand(params, optimizer, kept):
    with torch.no_grad():
        params[0].mul_(0.5)
        params[1].data.mul_(1.5)
        params[2].data = params[2].data * 2


def state_by_hand(params, optimizer, kept):
    for state in list(optimizer.state.values())[:2]:
        for key, value in list(state.items()):
            if isinstance(value, torch.Tensor) and value.dtype is torch.float32 and value.dim():
                value.mul_(0.5)
                state[key] = value.clone()
    optimizer.state.pop(params[2], None)


def marked(params, optimizer, kept):
    params[0].no_decay = len(vars(params[0]))
    params[1].flag = getattr(params[1], "flag", 0) + 1


def nan_in_gradients(params, optimizer, kept):
    if params[1].grad is not None:
        params[1].grad[0] = float("nan")
        params[1].grad[1], params[1].grad[2] = float("inf"), -0.0


def other_layouts(params, optimizer, kept):
    dtype = BF16 if params[0].grad is None else params[0].grad.dtype
    params[0].grad = torch.ones(1, dtype=dtype).expand(params[0].shape)
    params[1].grad = torch.linspace(-1, 1, 2 * params[1].numel()).to(dtype)[::2]


def frozen(params, optimizer, kept):
    params[0].requires_grad_(not params[0].requires_grad)


def group_added(params, optimizer, kept):
    if "added" not in kept:
        kept["added"] = nn.Parameter(torch.ones(5, 3, dtype=BF16))
        optimizer.add_param_group({"params": [kept["added"]]})
        params.append(kept["added"])


ACTIONS = (
    *(some_without_gradients, none_has_a_gradient, another_rate, saved, loaded, weights_by_hand, state_by_hand, marked),
    *(nan_in_gradients, other_layouts, frozen, group_added),
)
WAYS = (
    *({}, {"state_dtype": BF16}, {"state_dtype": "8bit"}, {"state_dtype": "fp8"}, {"weights": "master"}),
    *({"weights": "split", "state_dtype": "8bit"}, {"weights": "nearest"}, {"weights": "split8"}),
    *({"state_dtype": "4bit"}, {"use_fp32_grad_acc": True}),
)


def bits(value):
    if isinstance(value, torch.Tensor):
        flat = value.detach().contiguous().view(-1)
        if flat.is_floating_point():
            flat = flat.masked_fill(flat.isnan(), torch.nan)  # of which torch's casts change the bits
        return value.dtype, tuple(value.shape), flat.view(torch.uint8).numpy().tobytes()
    if isinstance(value, dict):
        return [(key, bits(each)) for key, each in value.items()]
    return value


def trained(make, way, actions, seed):
    """Return all that a step can change, after each step, and how many steps were kept."""
    numbers = torch.Generator().manual_seed(seed)
    wide = torch.float32 if "use_fp32_grad_acc" in way else BF16
    shapes = (16, 8), (300,), (8, 24), (3, 4, 5), (6, 128)
    params = [nn.Parameter(torch.randn(shape, generator=numbers).bfloat16()) for shape in shapes]
    params.insert(2, nn.Parameter(torch.randn(4, 4, generator=numbers)))  # FP32: it is stepped as it is
    optimizer, seen, kept = make(params), [], {}
    hmpx.attach(optimizer, **way)
    ours = [p for p in params if p.dtype is BF16]
    for action in actions:
        for p in params:
            p.grad = torch.randn(p.shape, generator=numbers).to(p.dtype if p.dtype is not BF16 else wide)

        def closure():
            optimizer.zero_grad()
            loss = sum((p.float() - 0.1).square().sum() for p in [*params, *ours[len(shapes) :]])
            loss.backward()
            return loss

        try:
            if callable(action):
                action(ours, optimizer, kept)
            said = optimizer.step(closure) if action == "closure" else optimizer.step()
        except (RuntimeError, hmpx.HmpxError) as error:
            said = str(error)
        every = [*params, *ours[len(shapes) :]]
        found = [(bits(p), bits(p.grad), {k: v for k, v in vars(p).items() if "hmpx" not in k}) for p in every]
        states = [bits(optimizer.state.get(p)) for p in every]
        seen.append((bits(said), found, states, [bits(g["lr"]) for g in optimizer.param_groups]))
    steps = optimizer._hmpx_attachment._updates.kept_steps
    hmpx.detach(optimizer)
    return seen, steps


def differ(make, way, actions, seed, monkeypatch):
    found, kept = trained(make, way, actions, seed)
    with monkeypatch.context() as off:
        off.setattr(stepping, "standing_or_none", lambda *_: None)
        expected, none_kept = trained(make, way, actions, seed)
    assert none_kept == 0
    return [i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b], kept


@pytest.mark.parametrize("number, name", enumerate(CLASSES))
def test_a_kept_step_has_the_bits_of_one_that_is_not(number, name, monkeypatch):
    """Each class is held in every second way, its neighbour in the others."""
    for seed, way in list(enumerate(WAYS))[number % 2 :: 2]:
        numbers = random.Random(f"{name} {seed}")
        actions = [numbers.choice((None, None, None, "closure", *ACTIONS)) for _ in range(12)]
        wrong, _ = differ(CLASSES[name], way, actions, seed, monkeypatch)
        assert not wrong, (way, wrong, actions)


STABLE = [way for way in WAYS if way.get("state_dtype") != "4bit"]
BEFORE = (None, "closure", some_without_gradients, another_rate, marked)
KEPT = (
    *("subclass", "subclass, fused, amsgrad", "loops", "factored", "schedule-free AdamW", "ADOPT", "CAME", "marks"),
    "writes some gradients",
)


@pytest.mark.parametrize("name", KEPT)
def test_every_step_but_the_first_is_kept(name, monkeypatch):
    before = islice(cycle(BEFORE), KEPT.index(name) * len(STABLE), None)
    for way, action in zip(STABLE, before, strict=False):
        if action is some_without_gradients and "use_fp32_grad_acc" in way:
            action = None  # nothing says which dtype a missing gradient would have
        wrong, kept = differ(CLASSES[name], way, [None, *[action] * 4], 0, monkeypatch)
        assert (wrong, kept) == ([], 4), (way, action)


@pytest.mark.parametrize("name", ["keeps gradients", "keeps views of gradients"])
def test_memory_that_an_optimizer_keeps_is_not_released(name, monkeypatch):
    wrong, kept = differ(CLASSES[name], {}, [None] * 8, 0, monkeypatch)
    assert (wrong, kept) == ([], 0)


def test_only_the_gradients_that_a_kept_step_writes_have_a_new_version():
    params = [nn.Parameter(torch.ones(shape, dtype=BF16)) for shape in ((16, 8), (300,))]
    optimizer = CLASSES["writes some gradients"](params)
    handle = hmpx.attach(optimizer)
    for kept in range(4):
        for p in params:
            p.grad = torch.full_like(p, 0.25)
        before = [p.grad._version for p in params]
        optimizer.step()
        assert [p.grad._version - was for p, was in zip(params, before, strict=True)] == [1, 0]
        assert [float(p.grad.view(-1)[0]) for p in params] == [0.125, 0.25]
        assert handle._updates.kept_steps == kept


@pytest.mark.parametrize("name", ["loops", "schedule-free AdamW", "writes some gradients", "writes gradients by data"])
def test_torchs_operators_see_what_the_functions_in_c_see(name, monkeypatch):
    """On a GPU, they look for changes. So they do here, where the table of the kernels stays that in C."""
    for way in ({}, {"state_dtype": "8bit"}, {"use_fp32_grad_acc": True}):
        with monkeypatch.context() as by_torch:
            by_torch.setattr(standing, "native", None)
            found, kept = trained(CLASSES[name], way, [None, "closure", None, another_rate, None], 0)
        expected, kept_in_c = trained(CLASSES[name], way, [None, "closure", None, another_rate, None], 0)
        assert found == expected and kept == kept_in_c == 4


@pytest.mark.parametrize("is_native", [True, False])
def test_a_step_that_bypasses_its_copies_is_refused_while_it_is_kept(is_native, monkeypatch):
    if not is_native:
        monkeypatch.setattr(standing, "native", None)
    p, hidden = nn.Parameter(torch.ones(300, dtype=BF16)), []
    optimizer = Adam([p], odd=lambda *_: [each.data.mul_(2) for each in hidden])
    handle = hmpx.attach(optimizer)
    for _ in range(3):
        p.grad = torch.ones_like(p)
        optimizer.step()
    assert handle._updates.kept_steps == 2
    before, p.grad = p.detach().clone(), torch.ones_like(p)
    hidden.append(p)
    with pytest.raises(hmpx.HmpxError, match="wrote to parameter"):
        optimizer.step()
    assert torch.equal(p, before)


def test_why_a_step_is_planned_anew_is_logged(caplog):
    weights = nn.Parameter(torch.randn(4, 6).to(BF16)), nn.Parameter(torch.randn(6, 4).to(BF16).t())
    optimizer = Adam(weights)
    with caplog.at_level("DEBUG", logger="hmpx"):
        hmpx.attach(optimizer)
        for weight in weights:
            weight.grad = torch.randn(4, 6).to(BF16)
        optimizer.step()
        hmpx.detach(optimizer)
    assert "Adam: the next step is planned anew, as a parameter is on another device, or not contiguous" in caplog.text
