"""What tables are made of: memory, measured of allocations of known size, and the published shapes of models."""

import math

import pytest
import torch

from tests.support.bench import main, memory, models

CPU = torch.device("cpu")


def test_the_peak_and_what_stays_of_allocations_of_known_size():
    kept = []

    def work():
        large = torch.empty(50_000)  # 200 kB, gone before the next
        del large
        kept.append(torch.empty(10_000))
        both = torch.empty(20_000), torch.empty(10_000, dtype=torch.float64)
        del both

    peak, stays = memory(work, CPU)
    assert abs(stays - 40_000) < 1000 and abs(peak - 200_000) < 1000
    kept.clear()


# Tensors and elements, as torchvision's `resnet50` and transformers' `BertModel` and `GPT2Model` have them.
PUBLISHED = {
    "toy": (20, 10_560),
    "resnet50": (161, 25_557_032),
    "bert-base": (199, 109_482_240),
    "gpt2-small": (148, 124_439_808),
}


@pytest.mark.parametrize("model", PUBLISHED)
def test_a_list_has_the_published_number_of_tensors_and_parameters(model):
    shapes = list(models.LISTS[model]())
    assert (len(shapes), sum(map(math.prod, shapes))) == PUBLISHED[model]


def test_the_command_offers_every_list(capsys):
    with pytest.raises(SystemExit):
        main(["step", "--help"])
    said = capsys.readouterr().out
    assert all(model in said for model in models.LISTS)
