"""What of torch runs beside a model computes as it does without hmpx; the oracle is torch itself."""

import contextlib
import copy
import sys
import textwrap

import pytest
import torch
from torch.nn.utils import fusion, parametrizations, parametrize, prune
from torch.optim import lr_scheduler, swa_utils
from torch.utils.data import DataLoader

import hmpx
from hmpx.ops import outside_model
from tests.support import python

SCHEDULERS = {
    "LambdaLR": {"lr_lambda": lambda epoch: 0.99**epoch},
    "MultiplicativeLR": {"lr_lambda": lambda epoch: 0.99},
    "StepLR": {"step_size": 3, "gamma": 0.9},
    "MultiStepLR": {"milestones": [5, 20], "gamma": 0.7},
    "ConstantLR": {},
    "LinearLR": {"total_iters": 50},
    "ExponentialLR": {"gamma": 0.999},
    "PolynomialLR": {"total_iters": 100, "power": 1.5},
    "CosineAnnealingLR": {"T_max": 30},
    "CosineAnnealingWarmRestarts": {"T_0": 10},
    "CyclicLR": {"base_lr": 1e-4, "max_lr": 1e-2, "step_size_up": 7, "cycle_momentum": False},
    "OneCycleLR": {"max_lr": 0.1, "total_steps": 100},
    "ReduceLROnPlateau": {"patience": 1, "factor": 0.9},
    "SequentialLR": {"milestones": [10]},
    "ChainedScheduler": {},
    "SWALR": {"swa_lr": 0.01},
}


def learning_rates(name, lr):
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(3))], lr=lr)
    parts = [lr_scheduler.ExponentialLR(optimizer, 0.99), lr_scheduler.LinearLR(optimizer)]
    if name == "ChainedScheduler":
        scheduler = lr_scheduler.ChainedScheduler(parts)
    elif name == "SequentialLR":
        scheduler = lr_scheduler.SequentialLR(optimizer, parts, **SCHEDULERS[name])
    else:
        module = swa_utils if name == "SWALR" else lr_scheduler
        scheduler = getattr(module, name)(optimizer, **SCHEDULERS[name])
    found = []
    for _ in range(40):
        optimizer.step()
        scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
        found.append(float(optimizer.param_groups[0]["lr"]))
    return found


def test_every_scheduler_of_torch_is_in_the_table():
    found = {
        name
        for module in (lr_scheduler, swa_utils)
        for name, cls in vars(module).items()
        if isinstance(cls, type) and issubclass(cls, lr_scheduler.LRScheduler)
    }
    assert found - {"LRScheduler", "_LRScheduler"} == SCHEDULERS.keys()


def test_a_scheduler_with_a_learning_rate_in_a_tensor():
    """Also under a map of dtypes: the tensor is made in BF16, as XLA_USE_BF16 made it; what follows from it is FP32."""
    expected = {name: learning_rates(name, torch.tensor(1e-3)) for name in SCHEDULERS}
    with hmpx.convert():
        assert {name: learning_rates(name, torch.tensor(1e-3)) for name in SCHEDULERS} == expected
    expected = {name: learning_rates(name, torch.tensor(1e-3).bfloat16().float()) for name in SCHEDULERS}
    with hmpx.activate("xla-use-bf16"):
        assert {name: learning_rates(name, torch.tensor(1e-3)) for name in SCHEDULERS} == expected


def pruned():
    layer = torch.nn.Linear(8, 8)
    prune.l1_unstructured(layer, "weight", 0.5)
    layer(torch.ones(2, 8))
    return prune.remove(layer, "weight").weight


def fused():
    norm = torch.nn.BatchNorm2d(4).eval()
    torch.nn.init.uniform_(norm.running_var, 0.5, 2)
    return fusion.fuse_conv_bn_eval(torch.nn.Conv2d(3, 4, 3).eval(), norm).weight


def normed():
    layer = parametrizations.weight_norm(torch.nn.Linear(4, 4))
    return parametrize.remove_parametrizations(layer, "weight").weight


def observed():
    observer = torch.ao.quantization.observer.HistogramObserver()
    observer(torch.linspace(-1, 3, 100))
    return observer.calculate_qparams()[0]


def flattened():
    return torch.nn.utils.parameters_to_vector(torch.nn.Linear(4, 4).parameters())


def test_what_changes_or_observes_a_module():
    made = []
    for level in (None, "O1"):
        with hmpx.convert(level) if level else contextlib.nullcontext():
            for make in (pruned, fused, normed, observed, flattened):
                torch.manual_seed(0)
                made.append((make, make()))
    for (make, expected), (_, found) in zip(made[:5], made[5:], strict=True):
        assert found.dtype is torch.float32 and torch.equal(found, expected), make


def test_pruning_is_cast_in_the_forward_and_weight_norm_is_in_fp32(lists):
    """The hook of pruning is part of the model; torch's own parametrizations are in FP32 whatever lists say."""
    pruned = torch.nn.utils.prune.l1_unstructured(torch.nn.Linear(4, 4), "weight", 0.5)
    normed = parametrizations.weight_norm(torch.nn.Linear(4, 4))
    with hmpx.convert(**lists(bf16="_weight_norm mul linear")):
        pruned(torch.ones(1, 4))
        assert pruned.weight.dtype is torch.bfloat16 and normed.weight.dtype is torch.float32


LAYERS = (torch.nn.Linear(4, 4), torch.nn.LayerNorm(4), torch.nn.LSTM(4, 4), torch.nn.Conv1d(2, 2, 1))


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: type(layer).__name__)
def test_a_data_set_may_call_a_model_with_weights_in_low_precision(layer):
    """Mined negatives, rollouts of a policy: in FP32, with the rounded weights, where torch would raise."""
    layer, x = copy.deepcopy(layer), torch.randn(2, 4)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    hmpx.prepare(layer, optimizer, "bf16-sr")
    with torch.no_grad():
        found = next(iter(DataLoader([x], batch_size=None, collate_fn=layer)))
    hmpx.restore(optimizer)
    expected = layer.float()(x)
    torch.testing.assert_close(found, expected)


def test_a_module_that_is_imported_later_is_patched_then():
    code = """
        import sys, torch, hmpx
        with hmpx.convert() as handle:
            assert "torch.nn.utils.prune" not in sys.modules
            import torch.nn.utils.prune as prune
            assert "torch.nn.utils.prune.remove" in {patch.label for patch in handle.patched}
            layer = torch.nn.Linear(8, 8)
            prune.l1_unstructured(layer, "weight", 0.5)
            assert prune.remove(layer, "weight").weight.dtype is torch.float32
        assert not hasattr(prune.remove, "__hmpx_original__")
    """
    done = python.run("-c", textwrap.dedent(code))
    assert done.returncode == 0, done.stderr


def test_every_place_of_the_table_exists():
    places = outside_model.places()
    for module, names in places.items():
        if not module.startswith("torch."):
            continue  # tests/downstream has it
        __import__(module)
        for name in names:
            assert list(outside_model.functions_in(module, places)), (module, name)
            found = sys.modules[module]
            for part in name.split(".") if name else ():
                found = getattr(found, part)
