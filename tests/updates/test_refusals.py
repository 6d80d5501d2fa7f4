"""What `attach` and `detach` do not take is refused, with the reason, and nothing is attached."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.testing._internal.two_tensor import TwoTensor

import hmpx
from hmpx.updates import step_hooks
from tests.support.same import same
from tests.support.training import parameter, parameters, step_by, train, weights

BF16 = torch.bfloat16


class OwnStateDict(optim.SGD):
    def state_dict(self):
        return {"state": {}, "param_groups": []}


NAMES, SPLIT = ["a.weight", "a.bias", "b"], {"weights": "split"}
WRONG = [
    ({"weights": "stochastik"}, "none of 'stochastic', .*did you mean 'stochastic'"),
    ({"weights": ["master"]}, "is none of 'stochastic'"),
    ({"weights": nn.Linear(2, 2)}, r"weights is a Linear, not one of .*; did you mean model=\?"),
    ({"seed": -1}, "seed -1 is out of range"),
    ({"seed": 2**64}, "out of range"),
    ({"state_dtype": torch.float16}, "state_dtype=torch.float16 is none of"),
    ({"state_dtype": "fp16"}, "state_dtype=torch.float16 is none of"),
    ({"state_dtype": "8bits"}, "state_dtype='8bits' is none of .*'8bit', 'fp8', '4bit'; did you mean '8bit'"),
    ({"use_master_weights_in_ckpt": True}, "'stochastic' has no masters"),
    ({"names": ["a", "b"]}, "2 names for 3 parameters"),
    ({"names": ["a", "b", "a"]}, "the name 'a' is given to parameters 0 and 2"),
    ({"names": ["a", "b", 3]}, "the name of parameter 2 is 3, not a string"),
    ({"names": 5}, "names is 5, not a list of strings"),
    ({"names": ["\ud800", "b", "c"]}, "cannot be printed"),
    ({"model": nn.Linear(2, 2)}, "parameter 0 of the optimizer is not in the model"),
    ({"model": nn.Linear(2, 2), "names": []}, "not from both"),
    ({"model": 5}, "model is an int, not a torch.nn.Module"),
    ({"fused": "yes"}, "fused='yes' is neither True nor False"),
    ({"parameters": {"a.bais": SPLIT}, "names": NAMES}, "parameters: 'a.bais' is the name of no .* mean 'a.bias'"),
    ({"parameters": {"a.*": SPLIT}}, "the optimizer knows them by position: give it named_parameters"),
    (
        {"parameters": {"a.*": {"weights": "masters"}}},
        "parameters: 'a.*': weights='masters' is none of.* mean 'master'",
    ),
    (
        {"parameters": {"a.*": {"state_dtype": "8bits"}}},
        "parameters: 'a.*': state_dtype='8bits' is none of.* mean '8bit'",
    ),
    ({"parameters": {"a.*": {"weight": "split"}}}, "'weight' is none of weights, state_dtype; did you mean 'weights'"),
    ({"parameters": {"a.*": "split"}}, "'split' is no mapping of settings"),
    ({"parameters": {3: {}}}, "3 is no name of a parameter"),
    ({"parameters": ["a.*"]}, "not a mapping of parameters' names to settings"),
]
OWN = ({"weights": "split", "use_master_weights_in_ckpt": True}, "OwnStateDict.state_dict runs no hooks")


def test_what_does_not_fit_is_refused_and_nothing_is_attached():
    for cls, (options, message) in [*((optim.SGD, each) for each in WRONG), (OwnStateDict, OWN)]:
        optimizer = cls([p for _, p in parameters()], lr=0.1)
        before = set(vars(optimizer))
        with pytest.raises(hmpx.HmpxError, match=message):
            hmpx.attach(optimizer, **options)
        assert set(vars(optimizer)) == before and not step_hooks._attached, options
        assert not optimizer._optimizer_load_state_dict_pre_hooks, options


def test_attaching_again():
    optimizer = optim.SGD(parameters(), lr=0.1)
    handle = hmpx.attach(optimizer, "split", seed=3)
    assert hmpx.attach(optimizer, "split", seed=3) is handle
    with pytest.raises(
        hmpx.HmpxError, match=r"SGD: weights='split', seed=3> is in force; hmpx.detach\(optimizer\) first"
    ):
        hmpx.attach(optimizer, "master")
    assert handle.active


def test_other_names_for_an_attached_optimizer_are_refused():
    optimizer = optim.SGD([parameter(4)], lr=0.1)
    handle = hmpx.attach(optimizer, names=["a"])
    assert hmpx.attach(optimizer, names=["a"]) is handle and hmpx.attach(optimizer) is handle
    with pytest.raises(hmpx.HmpxError, match="is in force"):
        hmpx.attach(optimizer, names=["b"])


def test_a_shell_around_tensors_is_refused_where_it_trains():
    """TwoTensor: torch's own class for testing wrappers. Frozen, it is passed over."""
    for dtype, recipe in ((BF16, "bf16-sr"), (torch.float32, "bf16-sr"), (BF16, "autocast-cuda")):
        model = nn.Linear(8, 8).to(dtype)
        model.weight = nn.Parameter(TwoTensor(torch.ones(8, 8, dtype=dtype), torch.ones(8, 8, dtype=dtype)))
        optimizer, before, linear = optim.SGD(model.parameters(), lr=0.1), dict(model.named_parameters()), F.linear
        with pytest.raises(hmpx.HmpxError, match=r"parameter 'weight' \(TwoTensor\) is a shell .*: freeze it"):
            hmpx.prepare(model, optimizer, recipe)
        assert dict(model.named_parameters()) == before and model.weight.a.dtype is model.weight.dtype is dtype
        assert model.bias.dtype is dtype and F.linear is linear
        if dtype is BF16:
            with pytest.raises(hmpx.HmpxError, match=r"'0' .* is a shell"):
                hmpx.attach(optimizer)
            sum(p.sum() for p in model.parameters()).backward()
            with pytest.raises(hmpx.HmpxError, match=r"'0' .* is a shell"), hmpx.disable_casts():
                optimizer.step()
        model.weight.requires_grad_(False)
        model.weight.grad = None
        hmpx.prepare(model, optimizer, recipe)
        model.bias.grad = torch.ones_like(model.bias)
        optimizer.step()
        assert model.weight.a.dtype is model.weight.dtype is dtype
        hmpx.restore(optimizer)
        other = "bfloat16" if dtype is torch.float32 else "float32"
        with pytest.raises(hmpx.HmpxError, match="give it no dtype"):
            hmpx.prepare(model, optimizer, {"parameters": {"weight": {"dtype": other}}})


def test_the_seed_of_a_region_is_a_number_of_64_bits():
    with pytest.raises(hmpx.HmpxError, match="seed -3 is out of range"):
        hmpx.disable_casts(seed=-3)


def test_no_optimizer_and_no_bf16(caplog):
    with pytest.raises(hmpx.HmpxError, match=r"needs a torch.optim.Optimizer, not Linear"):
        hmpx.attach(nn.Linear(2, 2))
    named, twin = parameters(torch.float32), parameters(torch.float32)
    optimizer, reference = optim.AdamW(named), optim.AdamW(twin)
    hmpx.attach(optimizer)
    assert "AdamW has no BF16 parameters" in caplog.text
    train(named, optimizer, 0, 2)
    train(twin, reference, 0, 2)
    assert same(weights(named), weights(twin))


class Wrapper(optim.Optimizer):
    """Never runs the constructor of its base, as some launchers' wrappers do not."""

    def __init__(self, inner):
        self.inner = inner

    param_groups = property(lambda self: self.inner.param_groups)
    state = property(lambda self: self.inner.state)

    def step(self, closure=None):
        return self.inner.step(closure)


def test_optimizers_that_cannot_be_stepped_in_fp32_are_refused():
    p = parameter(4)
    with pytest.raises(
        hmpx.HmpxError, match=r"Wrapper never ran Optimizer.__init__.*attach the optimizer that it holds"
    ):
        hmpx.attach(Wrapper(optim.SGD([p], lr=0.1)))
    with hmpx.disable_casts():
        wrapped = Wrapper(optim.SGD([p], lr=0.1))
        step_by(wrapped)
    assert wrapped.param_groups[0]["hmpx_step"] == 1


@pytest.mark.parametrize("thing", [None, nn.Linear(2, 2)])
def test_only_optimizers_are_detached(thing):
    with pytest.raises(hmpx.HmpxError, match=r"detach needs a torch.optim.Optimizer"):
        hmpx.detach(thing)


@pytest.mark.parametrize("how", ["attach", "region", "activate"])
def test_steps_that_are_to_be_differentiated_are_refused(how):
    """By the weights, the gradient or the rate. On leaves alone, `differentiable` takes the optimizer's own step."""
    for graph in ("weights", "gradient", "rate", None):
        weight = nn.Parameter(torch.ones(3, dtype=BF16))
        step = weight.clone() if graph == "weights" else weight
        rate = torch.tensor(0.1, requires_grad=graph == "rate")
        said = pytest.raises(hmpx.HmpxError, match=r"differentiable=True. has BF16 parameters or a rate with a graph")
        with hmpx.activate({"opt_level": None}) if how == "activate" else contextlib.nullcontext():
            with said if graph is not None else contextlib.nullcontext():
                optimizer = optim.SGD([step], lr=rate, differentiable=True)
                step.grad = (weight if graph == "gradient" else weight.detach()) * 1.0
                if how == "attach":
                    hmpx.attach(optimizer)
                with hmpx.disable_casts() if how == "region" else contextlib.nullcontext():
                    optimizer.step()
            assert graph is not None or weight[0].item() < 1
