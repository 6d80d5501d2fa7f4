"""What people do with models, under `convert()`: copy, pickle, save, recompute, generate."""

import copy
import io
import pickle

import pytest
import torch

import hmpx
from tests.downstream.comparing import differences, made, run, under_autocast, under_its_lists

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("name", ["gpt2", "diffusers conditional unet"])
def test_copies_of_a_converted_model_are_the_model(name):
    """deepcopy, pickle and state_dict under a conversion; used under it, and after it with the plain bits."""
    model, inputs = made(name)
    plain = run(model, inputs)
    with under_its_lists():
        converted = run(model, inputs)
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        assert not any(differences(converted, run(each, inputs)) for each in copies)
    fresh, _ = made(name)
    for p in fresh.parameters():
        p.data.zero_()
    file.seek(0)
    fresh.load_state_dict(torch.load(file))
    assert not any(differences(plain, run(each, inputs)) for each in [*copies, fresh])


def test_generate_gives_autocasts_tokens_and_scores():
    model, inputs = made("t5")
    model.eval()
    ways = {"max_new_tokens": 6, "do_sample": False, "output_scores": True, "return_dict_in_generate": True}
    results = []
    for around in (under_autocast, under_its_lists):
        with around(), torch.no_grad():
            results.append(model.generate(inputs["input_ids"], **ways))
    expected, got = results
    assert torch.equal(expected.sequences, got.sequences) and len(got.scores) == 6
    assert all(torch.equal(a, b) for a, b in zip(expected.scores, got.scores, strict=True))
    with hmpx.convert(), hmpx.cached_weights(), torch.no_grad():
        kept = model.generate(inputs["input_ids"], **ways)
    with hmpx.convert(), torch.no_grad():
        assert torch.equal(kept.scores[-1], model.generate(inputs["input_ids"], **ways).scores[-1])
