"""On a GPU: the kernels' bits, a training's bits, several GPUs, streams and graphs. `bench gpu` runs these."""

import copy
import dataclasses

import pytest
import torch
from torch import nn

import hmpx
from hmpx.ops.computing import matrix_products
from hmpx.recipes.reading import read_recipe
from hmpx.rounding import eager, table, triton
from hmpx.rounding.native import StepArguments
from hmpx.updates.holding.state_forms import STATE_FORMS
from hmpx.updates.holding.stores import WAYS
from tests.support.kernel_steps import STEPS, stepped
from tests.support.numbers import special_values
from tests.support.recipe_memory import RECIPES, assert_memory_of

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")]
BF16 = torch.bfloat16
GPUS = [f"cuda:{i}" for i in range(torch.cuda.device_count())]


def trained(device, **options):
    """Weights and state after three steps of SGD, whose arithmetic is the same on every device."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"a": (9, 40), "b": (3, 256), "c": (), "d": (1700, 256)}
    params = {
        name: nn.Parameter(torch.randn(shape, generator=generator).bfloat16().to(device))
        for name, shape in shapes.items()
    }
    optimizer = torch.optim.SGD([*params.items()], lr=0.125, momentum=0.5, foreach=True)
    hmpx.attach(optimizer, **options)
    for _ in range(3):
        for p in params.values():
            p.grad = torch.randn(p.shape, generator=generator).bfloat16().to(device)
        optimizer.step()
    states = [value for p in params.values() for value in optimizer.state[p].values()]
    return [each.detach().cpu() for each in [*params.values(), *states]]


def same(one, other):
    return len(one) == len(other) and all(torch.equal(a.view(-1), b.view(-1)) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("gpu", GPUS)
def test_rounding_has_the_bits_of_a_cpu(gpu):
    x = torch.cat([torch.randn(100_003), special_values()])
    found = [hmpx.stochastic_round(each, seed=1, step=2, name="x", offset=3).cpu() for each in (x, x.to(gpu))]
    assert torch.equal(*(each.view(torch.int16) for each in found))


@pytest.mark.parametrize("fused", [False, None])
@pytest.mark.parametrize("state_dtype", STATE_FORMS, ids=str)
@pytest.mark.parametrize("weights", WAYS)
def test_a_training_has_the_bits_of_a_cpu(weights, state_dtype, fused):
    options = {"weights": weights, "state_dtype": state_dtype, "fused": fused}
    expected = trained("cpu", **options)
    for gpu in GPUS:
        assert same(trained(gpu, **options), expected), gpu


@pytest.mark.parametrize("kernel, scalars", [(kernel, each) for kernel in STEPS for each in STEPS[kernel]], ids=str)
@torch.no_grad()
def test_the_twin_of_the_kernels_has_their_bits(kernel, scalars):
    """torch's operators round each number as the kernels do, on a GPU too."""
    on_gpu = [stepped(kernel, scalars, *(torch.float32,) * 3) for _ in range(2)]
    for i, each in enumerate(on_gpu):
        on_gpu[i] = [
            StepArguments(*(_on_gpu(held) for held in (one.weight, one.grad)), tuple(map(_on_gpu, one.states)), scalars)
            for one in each
        ]
    by_kernel, by_torch = on_gpu
    table.step_list(triton, kernel, by_kernel, 7)
    columns = zip(*(one.states for one in by_torch), strict=True)
    states = [None if column[0] is None else [held.tensor for held in column] for column in columns]
    weights, grads = [one.weight.tensor for one in by_torch], [one.grad.tensor for one in by_torch]
    eager.step_list(kernel, weights, grads, states, [scalars] * len(by_torch))
    for one, other in zip(by_kernel, by_torch, strict=True):
        for a, b in zip((one.weight, *one.states), (other.weight, *other.states), strict=True):
            assert a is None or torch.equal(a.tensor, b.tensor)


def _on_gpu(held):
    return None if held is None else held._replace(tensor=held.tensor.cuda())


def test_a_step_on_another_stream_and_without_triton_has_the_same_bits(monkeypatch):
    expected = trained("cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        found = trained("cuda")
    stream.synchronize()
    monkeypatch.setattr(triton, "can_read", lambda *tensors: False)
    assert same(found, expected) and same(trained("cuda"), expected)


@pytest.mark.parametrize(
    "how",
    [{}, {"fused": False}, *({"weights": "split8", "state_dtype": "8bit", "fused": fused} for fused in (None, False))],
    ids=str,
)
def test_a_step_waits_for_nothing(how):
    p = nn.Parameter(torch.randn(512, 512, device="cuda").bfloat16())
    optimizer = torch.optim.AdamW([p], lr=1e-3, foreach=True)
    hmpx.attach(optimizer, names=["p"], **how)
    for step in range(4):
        p.grad = torch.randn_like(p)
        torch.cuda.set_sync_debug_mode("error" if step > 1 else "default")
        try:
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_a_step_in_a_graph_is_an_error_with_the_way_out():
    p = nn.Parameter(torch.ones(64, device="cuda", dtype=BF16))
    p.grad = torch.ones_like(p)
    optimizer = torch.optim.SGD([p], lr=0.5)
    hmpx.attach(optimizer, names=["p"])
    with pytest.raises(hmpx.HmpxError, match="make_graphed_callables"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        optimizer.step()
    assert p.eq(1).all()


@pytest.mark.parametrize("shape", [(130, 256), (1, 16), (300, 4096)], ids=str)
def test_kernels_cast_to_fp8_as_aten_does(shape):
    """Codes and scales on the device, twice: what is compiled is launched directly then."""
    checks = pytest.importorskip("tests.support.fp8_checks")
    if not matrix_products._has_scaled_mm(torch.device("cuda", 0)):
        pytest.skip("no FP8 tensor cores")
    for form in checks.FORMS.values():
        for name in ("e4m3", "e5m2"):
            for _ in range(2):
                checks.assert_cast(checks.numbers(*shape).cuda(), form, name, square=form.scaling == "blockwise")


@pytest.mark.parametrize("form", ["tensorwise", "rowwise", "blockwise"])
def test_a_layer_in_fp8_is_near_that_of_a_cpu(form):
    """Fast accumulation keeps about 14 bits of a sum; a wrong layout of codes or scales would be off by far more."""
    torch.manual_seed(0)
    layer, x, g = nn.Linear(512, 1024), torch.randn(256, 512), torch.randn(256, 1024)
    found = []
    for device in ("cpu", "cuda"):
        own, given = copy.deepcopy(layer).to(device), x.to(device, copy=True).requires_grad_()
        with hmpx.convert(fp8=["linear"], fp8_format=form):
            y = own(given)
            y.backward(g.to(y))
        found.append([each.detach().cpu().float() for each in (y, given.grad, own.weight.grad, own.bias.grad)])
    for cpu, cuda in zip(*found, strict=True):
        assert (cpu - cuda).norm() < 5e-3 * cpu.norm()


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_holds_and_takes_what_its_footprint_says(name):
    """Stepped by hmpx's kernels: what torch's own code takes for temporaries is for it to say."""
    recipe = read_recipe(name)
    narrow = recipe.parameter_dtype == "bfloat16"
    assert_memory_of(dataclasses.replace(recipe, fused=True) if narrow else recipe, torch.device("cuda"))
