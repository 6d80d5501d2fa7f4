"""torch's own parametrizations are computed in FP32, wherever the weight is read, and give the dtype of the weight."""

import pytest
import torch

import hmpx
from tests.support.parametrized import KINDS, parametrized

RECIPES = ("bf16-sr", "lean8", "flash", "nxd-standard", "xla-use-bf16", "hmp-o1", "autocast-cpu")


def read(layer):
    layer(torch.ones(2, 8))  # the older ones compute it in a hook
    return layer.weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_weight_is_that_of_fp32_rounded_once(dtype):
    """The reference is the parametrization in FP32, of the same numbers, without hmpx."""
    layers, wides = ({kind: parametrized(kind, each) for kind in KINDS} for each in (dtype, torch.float32))
    for kind, wide in wides.items():
        wide.load_state_dict(layers[kind].state_dict())
    for _ in range(2):
        with hmpx.convert():
            found = {kind: read(layer) for kind, layer in layers.items()}
            for each in found.values():
                each.float().square().sum().backward()
        for kind, wide in wides.items():
            exact = read(wide)
            exact.to(dtype).float().square().sum().backward()
            assert found[kind].dtype is dtype and torch.equal(found[kind], exact.to(dtype)), kind
            wide.load_state_dict(layers[kind].state_dict())  # what spectral_norm iterates is rounded after each
    for kind, wide in wides.items():
        for p, q in zip(layers[kind].parameters(), wide.parameters(), strict=True):
            if q.grad is not None:
                assert p.grad is not None and torch.allclose(p.grad.float(), q.grad, rtol=0.02, atol=0.02), kind


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("make", [torch.nn.utils.parametrizations.weight_norm, torch.nn.utils.weight_norm])
def test_a_norm_over_the_whole_weight_is_that_of_fp32(make):
    """torch alone has two in three of these weights wrong in BF16."""
    layer, wide = (make(torch.nn.Linear(2048, 16), dim=None).to(dtype) for dtype in (torch.bfloat16, torch.float32))
    wide.load_state_dict(layer.state_dict())
    x = torch.ones(1, 2048)
    wide(x)
    with hmpx.convert():
        layer(x)
        assert torch.equal(layer.weight, wide.weight.bfloat16())


def test_outside_of_the_forward_and_in_disable_casts_it_is_the_same():
    with hmpx.convert():
        for kind in KINDS:
            layer = parametrized(kind, torch.bfloat16).eval()
            with torch.no_grad():
                found = read(layer)
            with hmpx.disable_casts(), torch.no_grad():
                layer(torch.ones(2, 8).bfloat16())
                assert torch.equal(layer.weight, found), kind


def losses(recipe):
    """One for each kind, of layers that train beside each other."""
    models = torch.nn.ModuleDict({kind: torch.nn.Sequential(parametrized(kind)) for kind in KINDS})
    optimizer = torch.optim.SGD(models.parameters(), lr=0.05)
    inputs, targets = torch.randn(32, 8), torch.randn(32, 6)
    if recipe is not None:
        hmpx.prepare(models, optimizer, recipe)
    for _ in range(5):
        optimizer.zero_grad()
        found = {kind: (model(inputs).float() - targets).square().mean() for kind, model in models.items()}
        sum(found.values()).backward()
        optimizer.step()
    hmpx.restore(optimizer)
    return {kind: loss.item() for kind, loss in found.items()}


@pytest.mark.parametrize("recipe", RECIPES)
def test_they_train_under_every_kind_of_recipe(recipe):
    assert losses(recipe) == pytest.approx(losses(None), abs=0.02)


def test_an_assigned_weight_is_kept():
    layer = parametrized("householder", torch.bfloat16)
    wanted = torch.eye(8)[:6].bfloat16()
    with hmpx.convert():
        layer.weight = wanted
        assert torch.allclose(layer.weight.float(), wanted.float(), atol=0.01)


def test_what_a_program_registers_itself_is_a_part_of_the_model():
    class Symmetric(torch.nn.Module):
        def forward(self, weight):
            return weight.matmul(weight.mT)

    layer = torch.nn.Linear(4, 4)
    torch.nn.utils.parametrize.register_parametrization(layer, "weight", Symmetric())
    with hmpx.convert():
        assert layer.weight.dtype is torch.bfloat16
