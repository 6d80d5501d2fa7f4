"""`hmpx.tune(..., low="fp8")`: which modules may multiply in FP8."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hmpx
from tests.support import planted


class Planted(nn.Module):
    """`wide` is given a column of 2,000,000, which its weights do not look at: one scale for all crushes the others."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inside, self.wide, self.odd = nn.Linear(32, 64), nn.Linear(64, 64), nn.Linear(64, 10)
        self.wide.weight.requires_grad_(False)[:, 0] = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.gelu(self.inside(x))
        return self.odd(h + 8 * self.wide(torch.cat([torch.full_like(h[:, :1], 2e6), h[:, 1:]], 1)))


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x).float(), y)


def test_what_one_scale_ruins_stays_in_bf16(tmp_path):
    model = Planted()
    batches = [(torch.randn(64, 32), torch.randint(10, (64,))) for _ in range(6)]
    tuned = planted.tuned(model, batches, loss_of, low="fp8", tolerance=0.2)
    choices = {(each.name, each.module): each for each in tuned.choices}
    dtypes = {
        module: choices.get(("linear", module), choices["linear", ""]).dtype for module in ("inside", "wide", "odd")
    }
    assert dtypes == {"inside": "float8", "wide": "bfloat16", "odd": "bfloat16"}
    assert any("64 x 10 are no multiples of 16" in each.why for each in tuned.choices)
    flops = {"inside": 32 * 64, "wide": 64 * 64, "odd": 64 * 10}
    assert tuned.met and tuned.share == pytest.approx(flops["inside"] / sum(flops.values()))
    errors = [hmpx.compare(model, batches, loss_of, lists=lists).gradient_error for lists in ({"fp8": ["linear"]}, {})]
    assert errors[0] > 0.2 > tuned.gradient_error > errors[1] > 0
    with hmpx.convert(), hmpx.record() as log:  # the recipe does as it says
        hmpx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), tuned.recipe)
        loss_of(model, *batches[0])
    hmpx.restore()
    rules = {site.module: site.rule for site in log.sites if site.op == "linear"}
    assert rules == {"inside": "fp8", "wide": "bf16", "odd": "bf16"}
    tuned.save(tmp_path)
    assert "float8" in str(tuned) and (tmp_path / "recipe.yaml").exists()


class Beside(nn.Module):
    """A convolution and attention, which have no product in FP8, beside a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.linear = nn.Conv1d(16, 16, 3, padding=1), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.conv(x.view(-1, 16, 2)).transpose(1, 2)
        return self.linear(F.scaled_dot_product_attention(h, h, h)).flatten(1)[:, :10]


def test_the_share_in_fp8_is_of_the_flops_of_all_products():
    batches = [(torch.randn(64, 32), torch.randint(10, (64,))) for _ in range(6)]
    tuned = planted.tuned(Beside(), batches, loss_of, low="fp8", tolerance=1.0)
    linear, conv, attention = 16 * 16, 16 * 16 * 3, 2 * 16 * 2  # of one of two positions, in multiplications
    assert tuned.share == pytest.approx(linear / (linear + conv + attention)), str(tuned)


def test_where_nothing_may_be_in_fp8_the_recipe_takes_it_from_the_lists_that_it_began_with():
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 16))
    batches = [(torch.randn(64, 32), torch.randint(16, (64,))) for _ in range(6)]
    tuned = planted.tuned(model, batches, loss_of, low="fp8", tolerance=0.03, lists={"fp8": ["linear"]})
    assert tuned.met and tuned.share == 0 and tuned.policy.fp8 == ()
    assert tuned.recipe.policy().fp8 == () and "linear" in tuned.recipe.policy().bf16
    assert "fp8" not in str(tuned.recipe)


def test_a_list_of_a_file_gives_way_to_what_was_found(tmp_path):
    (tmp_path / "fp8.txt").write_text("linear\n")
    lists = hmpx.Recipe(fp8_file_path=str(tmp_path / "fp8.txt"))
    assert lists.policy().fp8 == ("linear",)
    batches = [(torch.randn(64, 32), torch.randint(16, (64,))) for _ in range(6)]
    tuned = planted.tuned(nn.Linear(32, 16), batches, loss_of, lists=lists)
    assert "linear" in tuned.recipe.policy().bf16 and not tuned.recipe.policy().fp8, str(tuned.recipe)


def test_another_precision_is_refused():
    with pytest.raises(hmpx.HmpxError, match=r"low 'fp4' does not exist \(legal: bf16, fp8, tensorwise, .*nvfp4\)"):
        hmpx.tune(nn.Linear(2, 2), [], loss_of, low="fp4")
