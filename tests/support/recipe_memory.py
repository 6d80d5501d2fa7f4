"""What a training under a recipe holds and takes, measured, beside its footprint; for any device."""

import pytest
import torch
from torch import nn

import hmpx
from hmpx.recipes.reading import read_recipe
from tests.support.bench import memory
from tests.support.fresh_python import ROOT
from tests.support.training import needs_grad_dtype

WIDTH, LAYERS = 512, 8
_NAMES = sorted(path.stem for path in (ROOT / "oplists/recipes").glob("*.yaml"))
RECIPES = [pytest.param(name, marks=needs_grad_dtype if read_recipe(name).use_fp32_grad_acc else ()) for name in _NAMES]


class Net(nn.Module):
    """Has what recipes name: a norm, and a head that is not tied."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
        self.norm, self.lm_head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16, bias=False)

    def forward(self, x):
        return self.lm_head(self.norm(self.layers(x)))


def assert_memory_of(recipe, device):
    """Bytes that are held between two steps, and those at the peak of a step, gradients included, within 2 %.

    torch's own step of FP32 weights has no temporaries where it is fused; the footprint of others counts two.
    """
    made = []
    warm = nn.Linear(8, 8, bias=False, device=device)  # the first product on a GPU allocates a workspace, which stays
    warm(torch.ones(8, 8, device=device)).sum().backward()

    def gradients():
        for p in made[0].parameters() if not recipe.release_gradients else ():
            p.grad = torch.ones_like(p, dtype=getattr(p, "grad_dtype", None))

    def step():
        if recipe.release_gradients:
            made[0](torch.ones(1, WIDTH, device=device, dtype=made[0].norm.weight.dtype)).sum().backward()
        made[1].step()

    def begin():
        with device:
            model = Net()
        is_plain = recipe.parameter_dtype in (None, "float32")
        optimizer = torch.optim.AdamW(model.named_parameters(), fused=is_plain, foreach=False)
        made.extend(hmpx.prepare(model, optimizer, recipe))
        gradients()
        step()
        optimizer.zero_grad()

    try:
        _, held = memory(begin, device)
        gradients()
        step()
        peak, left = memory(step, device)
        sizes = {name: p.numel() for name, p in made[0].named_parameters()}
        each = {name: recipe.bytes_per_parameter(name=name) for name in sizes}
        gradient = sum([each[name]["gradients"] * size for name, size in sizes.items()])
        expected = sum([sum(each[name].values()) * size for name, size in sizes.items()]) - gradient
        assert held == pytest.approx(expected, rel=0.02)
        transient = recipe.footprint().transient(sum(sizes.values()), device.type)
        assert held + gradient + peak - left == pytest.approx(expected + gradient + transient, rel=0.02)
    finally:
        if made:
            hmpx.restore(made[1])
