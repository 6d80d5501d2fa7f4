"""Two models that are prepared by two recipes: one set of lists is in force, and that is said."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hmpx

OTHER = {"opt_level": "O1", "bf16": ["softmax"], "fp32": ["linear"], "promote": [], "parameter_dtype": "float32"}


@pytest.mark.parametrize(
    "second, said", [("autocast-cuda", 0), (OTHER, 1), ({"opt_level": None, "parameter_dtype": "float32"}, 1)]
)
def test_a_second_recipe_for_a_second_model_is_told(second, said, caplog):
    models = [nn.Linear(4, 4), nn.Linear(4, 4)]
    optimizers = [torch.optim.SGD(model.named_parameters(), lr=0.1) for model in models]
    hmpx.prepare(models[0], optimizers[0], "autocast-cuda")
    hmpx.prepare(models[1], optimizers[1], second)
    hmpx.restore(*optimizers)
    assert len([each for each in caplog.messages if "was prepared by another recipe" in each]) == said
