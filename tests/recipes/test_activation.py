"""`activate`: optimizers are attached as they are made, models cast before they are distributed."""

import contextlib
import copy
import gc
import os
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import hmpx
from hmpx.recipes.activate import activate_for
from hmpx.recipes.reading import as_recipe
from hmpx.updates.attach import attached
from tests.support import ranks
from tests.support.optimizers import Around, UnlistedSGD
from tests.support.sharded import digest
from tests.support.training import needs_grad_dtype

BF16 = torch.bfloat16
INITS = {cls: vars(cls).get("__init__") for cls in (optim.Optimizer, *optim.Optimizer.__subclasses__())}


def _net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4))


def _train(model, optimizer, steps=5):
    generator = torch.Generator().manual_seed(2)
    for _ in range(steps):
        x, y = torch.randn(6, 8, generator=generator), torch.randint(4, (6,), generator=generator)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


RECIPES = ["neuron-bf16-sr", "hmp-o2", "lean"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_an_unmodified_loop_is_a_prepared_one(recipe):
    model = _net()
    prepared = _train(*hmpx.prepare(model, optim.AdamW(model.parameters(), lr=1e-2), recipe))
    hmpx.restore()
    gc.collect()
    with hmpx.activate(recipe) as activation:
        assert activation.active and repr(activation).startswith("<hmpx.Activation, active")
        model = _net()
        active = _train(model, optim.AdamW(model.parameters(), lr=1e-2))
    assert all(torch.equal(p, q) and p.dtype is q.dtype for p, q in zip(prepared, active, strict=True))
    assert not activation.active and torch.zeros(2, 8).matmul(torch.zeros(8, 1)).dtype is torch.float32


def test_every_class_of_optimizer_is_seen_and_later_ones_too():
    with hmpx.activate("neuron-bf16-sr"):

        class Own(optim.SGD):
            def __init__(self, params, lr):
                super().__init__(params, lr=lr)
                self.inside = optim.Adam(self.param_groups[0]["params"])

        class Inherits(Own):
            pass

        for make in (optim.SGD, optim.Adagrad, optim.LBFGS, optim.Muon, Own, Inherits):
            model = nn.Linear(4, 4, bias=False)
            optimizer = make(model.parameters(), lr=1e-3)
            assert attached(optimizer) is not None and model.weight.dtype is BF16, make
            assert optimizer._hmpx_attachment._updates.names == {model.weight: "weight"}
            assert make not in (Own, Inherits) or attached(optimizer.inside) is None  # the outer one has its parameters
    model = nn.Linear(4, 4)
    assert attached(Own(model.parameters(), lr=1e-3)) is None and model.weight.dtype is torch.float32
    assert "__init_subclass__" not in vars(optim.Optimizer)
    assert all(vars(cls).get("__init__") is init for cls, init in INITS.items())


def test_an_optimizer_around_another_takes_its_place():
    with hmpx.activate("neuron-bf16-sr"):
        model = _net()
        base = optim.AdamW(model.parameters(), lr=1e-2)
        outer = Around(base)
        assert attached(outer) is not None and attached(base) is None
        inside = _train(model, outer)
        model = _net()
        alone = _train(model, optim.AdamW(model.parameters(), lr=1e-2))
    assert all(torch.equal(p, q) for p, q in zip(inside, alone, strict=True))


def _split(model):
    return [[p for p in model.parameters() if (p.dim() == 2) is matrices] for matrices in (True, False)]


class Inside(UnlistedSGD):
    """A combined optimizer, as a Muon that has an AdamW for what is no matrix."""

    def __init__(self, model, other=None):
        matrices, others = _split(model)
        super().__init__(matrices, lr=1e-2)
        self.other = optim.AdamW(others, lr=1e-2) if other is None else other

    def step(self, closure=None):
        super().step()
        self.other.step()


class Consists(optim.Optimizer):
    """It never runs `Optimizer.__init__`, and holds its parts in a list."""

    def __init__(self, model):
        matrices, others = _split(model)
        self.parts = [optim.SGD(matrices, lr=1e-2), optim.AdamW(others, lr=1e-2)]

    def step(self, closure=None):
        for each in self.parts:
            each.step()


class HandsOn:
    """As Lightning Fabric wraps an optimizer."""

    def __init__(self, model):
        self._own = optim.AdamW(model.parameters(), lr=1e-2)
        self.__class__ = type("HandsOn", (HandsOn, optim.AdamW), {})

    def step(self, closure=None):
        return self._own.step()

    def __getattr__(self, name):
        return getattr(self._own, name)


@pytest.mark.parametrize("how", ["activate", "prepare"])
def test_each_optimizer_that_steps_is_attached(how, caplog):
    """Which ones are, is told by the parameters, state and groups that they share, and by no module's name."""
    makers = {
        "inside": Inside,
        "made before": lambda model: Inside(model, optim.AdamW(_split(model)[1], lr=1e-2)),
        "parts": Consists,
        "wrapper": HandsOn,
    }
    for name, make in makers.items():
        model = _net()
        with hmpx.activate("bf16-sr") if how == "activate" else contextlib.nullcontext():
            optimizer = make(model)
            if how == "prepare":
                hmpx.prepare(model, optimizer, "bf16-sr")
            assert {p.dtype for p in model.parameters()} == {BF16}
            before = [p.detach().clone() for p in model.parameters()]
            model(torch.ones(2, 8)).float().square().sum().backward()
            optimizer.step()
        assert not any(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True)), name
        stepping = {"inside": ["other"], "made before": ["other"], "wrapper": ["_own"]}.get(name, [])
        inner = [getattr(optimizer, each) for each in stepping] or optimizer.parts
        assert all(map(attached, inner)) and (name == "parts" or attached(optimizer) is not None), name
        hmpx.restore(optimizer)
        assert not any(map(attached, inner)), name
    assert not caplog.text, "no step is rounded to nearest"
    if how == "prepare":
        with pytest.raises(hmpx.HmpxError, match=r"never ran Optimizer\.__init__"):
            hmpx.prepare(model, object.__new__(optim.AdamW), "bf16-sr")


def test_a_load_before_the_attachment_keeps_fp32_state_where_no_op_is_converted():
    """A trainer loads a checkpoint into an optimizer that is attached afterwards."""
    recipe = as_recipe({"extends": "neuron-bf16-sr", "opt_level": None})
    model = _net()
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    _train(*hmpx.prepare(model, optimizer, "neuron-bf16-sr"))
    saved = optimizer.state_dict()
    del optimizer
    hmpx.restore()
    gc.collect()
    with contextlib.ExitStack() as undo:
        activate_for("a trainer", recipe, undo)
        resumed = optim.AdamW(model.parameters(), lr=1e-2)
        resumed.load_state_dict(saved)
        assert {state["exp_avg"].dtype for state in resumed.state.values()} == {torch.float32}


def test_models_and_names():
    """Two models under one optimizer, one model in another, tied weights, names that the script gave itself."""
    with hmpx.activate({"parameters": {"*head.*": "float32"}}):
        generator, critic = nn.ModuleDict({"head": nn.Linear(4, 4)}), nn.Linear(4, 4)
        optimizer = optim.SGD([*generator.parameters(), *critic.parameters()], lr=1e-2)
        assert generator["head"].weight.dtype is torch.float32 and critic.weight.dtype is BF16
        assert optimizer._hmpx_attachment._updates.names == {}  # positions: no one model has them all
        outer = nn.ModuleDict({"body": nn.Linear(4, 4), "head": nn.Linear(4, 4)})
        outer["head"].weight = outer["body"].weight
        optimizer = optim.SGD(outer["body"].parameters(), lr=1e-2)
        assert outer["head"].weight.dtype is BF16 and outer["head"].bias.dtype is torch.float32
        assert optimizer._hmpx_attachment._updates.names[outer["body"].bias] == "body.bias"
        optimizer = optim.SGD([("own.head", outer["body"].bias)], lr=1e-2)
        assert optimizer._hmpx_attachment._updates.names == {}  # the names that the optimizer was given
        with pytest.raises(hmpx.HmpxError, match=r"parameters: '\*head\.\*' "):
            optim.SGD(critic.parameters(), lr=1e-2)


WAYS, UNDER = ("ddp", "zero", "fsdp2"), ("neuron-bf16-sr", "nxd-standard")


def _distributed(rank):
    return [_script(how, recipe) for recipe in UNDER for how in WAYS]


def _script(how, recipe):
    """It knows nothing of precision; under each way to distribute."""
    with hmpx.activate(recipe):
        model = _net()
        if how == "fsdp2":
            fully_shard(model[0])
            fully_shard(model)
        elif how != "alone":
            model = DistributedDataParallel(model)
        make = {"zero": lambda p: ZeroRedundancyOptimizer(p, optimizer_class=optim.AdamW, lr=1e-2)}
        optimizer = make.get(how, lambda p: optim.AdamW(p, lr=1e-2))(model.parameters())
        assert attached(optimizer) is not None
        for step in range(4):
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(step)
            model(torch.randn(4, 8, generator=generator)).float().square().sum().backward()
            optimizer.step()
        assert {p.dtype for p in model.parameters()} == {BF16}
    torchs = os.path.dirname(torch.__file__) + os.sep
    assert DistributedDataParallel.__init__.__code__.co_filename.startswith(torchs)
    return digest({str(i): p for i, p in enumerate(model.parameters())})


@needs_grad_dtype
def test_ranks():
    alone = [_script("alone", recipe) for recipe in UNDER]
    assert ranks.run(2, _distributed) == [[bits for bits in alone for _ in WAYS]] * 2


def _nxd(rank):
    with hmpx.activate({"mixed_precision_config": {"use_fp32_grad_acc": False}}):
        models = _net(), _net()  # held, or their parameters would be in no module
        plain = optim.SGD(models[0].parameters(), lr=1e-2)
        zero = ZeroRedundancyOptimizer(models[1].parameters(), optimizer_class=optim.SGD, lr=1e-2)
        return [attached(optimizer).settings.weights for optimizer in (plain, zero)]


def test_nxds_defaults_are_each_optimizers_own():
    """Masters exactly under ZeRO-1, though no optimizer was there when the recipe was read."""
    assert ranks.run(1, _nxd) == [["nearest", "master"]]


def test_parameters_of_no_module_keep_their_dtype_and_the_log_says_so(caplog):
    with hmpx.activate("neuron-bf16-sr"):
        p = nn.Parameter(torch.ones(3))
        optim.SGD([p], lr=1e-2)
        assert p.dtype is torch.float32 and "1 parameters are in no module" in caplog.text


class Groups(nn.Linear):
    def parameters(self, recurse=True):
        return [{"params": [self.weight], "lr": 1e-3}]


class Remote(nn.Linear):  # as torch.distributed.nn.RemoteModule
    def _refuse(self, *args, **kwargs):
        raise ValueError("not supported")

    parameters = named_parameters = children = modules = named_modules = _refuse


class Gamma(nn.Linear):
    def __init__(self, *args):
        super().__init__(*args)
        self.parameters = self.children = {"gamma": 2.0}


@pytest.mark.parametrize("cls", [Groups, Remote, Gamma])
def test_no_method_of_a_module_is_called_that_has_nothing_to_do_with_the_optimizer(cls):
    """Where the optimizer is made, and where the module is called; one that has parameters of its own is cast."""
    other, x = cls(4, 4), torch.ones(1, 4)
    with hmpx.activate("bf16-sr"):
        model = nn.Linear(4, 4)
        optim.SGD(model.parameters(), lr=1e-2)
        assert model.weight.dtype is BF16 and other.weight.dtype is torch.float32
        assert other(x).dtype is BF16 and model(x).dtype is BF16
    with hmpx.activate("bf16-sr"):
        own = Groups(4, 4)
        assert attached(optim.SGD(own.parameters(), lr=1e-2)) and own.weight.dtype is own.bias.dtype is BF16


def test_a_part_that_gets_its_optimizer_later_is_cast_as_the_first(caplog):
    """Actor and critic, an ensemble: BF16 that the recipe made is none that came so, in a copy of a part neither."""
    makers = {
        "actor, critic": [nn.Linear, nn.Linear],
        "an ensemble": [nn.Linear] * 3,
        "a copy": [nn.Linear, lambda *_: copy.deepcopy(model[-1]), nn.Linear],
        "a pickle": [nn.Linear, lambda *_: pickle.loads(pickle.dumps(model[-1])), nn.Linear],
    }
    for name, parts in makers.items():
        with hmpx.activate("bf16-sr"):
            model, held = nn.Sequential(), []
            for make in parts:
                model.append(make(4, 4))
                held.append(optim.SGD(model[-1].parameters(), lr=1e-2))
        assert {p.dtype for p in model.parameters()} == {BF16} and all(map(attached, held)), name
    assert "float32" not in caplog.text
    with hmpx.activate("bf16-sr"):
        model = nn.Sequential(nn.Linear(4, 4).bfloat16(), nn.Linear(4, 4))
        optim.SGD(model[0].parameters(), lr=1e-2)
        assert model[1].weight.dtype is torch.float32 and "stay in float32, in which they came" in caplog.text


def test_weights_that_are_tied_by_their_memory_stay_tied(caplog):
    """A slice of another too, and in two models of one optimizer; an optimizer of both is refused, as by `attach`."""

    def tied(how):
        model = nn.ModuleDict({"embedding": nn.Embedding(6, 4), "head": nn.Linear(4, 6, bias=False)})
        how(model["embedding"], model["head"])
        return model

    def sliced(embedding, head):
        head.weight.data = embedding.weight.data[2:5]

    hows = [
        lambda embedding, head: setattr(head, "weight", nn.Parameter(embedding.weight)),
        lambda embedding, head: setattr(head.weight, "data", embedding.weight.data),
        sliced,
    ]
    for how in hows:
        with hmpx.activate("bf16-sr"):
            model = tied(how)
            optim.SGD(model["embedding"].parameters(), lr=1e-2)
            (_, first), (_, second) = model.named_parameters()
            assert first.dtype is second.dtype is BF16
            first.data.zero_()
            assert not second.any() and first.untyped_storage()._cdata == second.untyped_storage()._cdata
            model = tied(how)
            with pytest.raises(hmpx.HmpxError, match=r"'embedding.weight' and 'head.weight' share memory"):
                optim.SGD(model.parameters(), lr=1e-2)
            assert {p.dtype for p in model.parameters()} == {torch.float32}
        model, wide = tied(how), {"extends": "bf16-sr", "parameters": {"head.*": "float32"}}
        with (
            hmpx.activate(wide),
            pytest.raises(hmpx.HmpxError, match="share memory, and have two dtypes by the recipe"),
        ):
            optim.SGD(model["embedding"].parameters(), lr=1e-2)
    with hmpx.activate("bf16-sr"):
        teacher, student = nn.Linear(4, 4), nn.Linear(4, 4)
        teacher.weight.data = student.weight.data
        optim.SGD([student.weight, teacher.bias], lr=1e-2)
        assert teacher.weight.data_ptr() == student.weight.data_ptr() and teacher.weight.dtype is BF16
    assert not caplog.text


def test_what_a_cast_would_cut_loose(caplog):
    with hmpx.activate("neuron-bf16-sr"):
        shared = nn.Linear(4, 4).share_memory()
        with pytest.raises(hmpx.HmpxError, match=r"'weight' is torch\.float32 in memory that processes share"):
            optim.SGD(shared.parameters(), lr=1e-2)
        with pytest.raises(hmpx.HmpxError, match=r"'weight' of a lazy module has no shape yet"):
            optim.SGD(nn.Sequential(nn.LazyLinear(4)).parameters(), lr=1e-2)
        flat, model = torch.randn(20), nn.Linear(4, 4)
        model.weight.data, model.bias.data = flat[:16].view(4, 4), flat[16:]
        model(torch.ones(1, 4)).sum().backward()
        grad = model.weight.grad.clone()
        optim.SGD(model.parameters(), lr=1e-2)
        assert "'weight' and 1 more were parts of larger storages" in caplog.text
        assert torch.equal(model.weight.grad, grad.bfloat16())  # what was there already is there still
    assert all(p.dtype is torch.float32 for p in shared.parameters())
