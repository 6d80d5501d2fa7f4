"""The shapes that `bench step` takes, against the published sizes of the models."""

from __future__ import annotations

import math

import pytest

from hmpx.bench.models import LISTS
from hmpx.shell.main import main

# Tensors and elements, as torchvision's `resnet50` and transformers' `BertModel` and `GPT2Model` have them.
PUBLISHED = {
    "toy": (20, 10_560),
    "resnet50": (161, 25_557_032),
    "bert-base": (199, 109_482_240),
    "gpt2-small": (148, 124_439_808),
}


@pytest.mark.parametrize("model", PUBLISHED)
def test_a_list_has_the_published_number_of_tensors_and_parameters(model):
    shapes = list(LISTS[model]())
    assert (len(shapes), sum(map(math.prod, shapes))) == PUBLISHED[model]


def test_the_command_offers_every_list(capsys):
    with pytest.raises(SystemExit):
        main(["bench", "step", "--help"])
    said = capsys.readouterr().out
    assert all(model in said for model in LISTS)
