"""No false alarms: `hmpx.compare` and `hmpx.record` on models that train well in BF16."""

import pytest
import torch

import hmpx
from tests.support.autocast_lists import AUTOCAST_LISTS
from tests.support.small_models import MODELS
from tests.support.spanning import spanning


@pytest.mark.parametrize(("name", "lists"), spanning(MODELS, [None, "autocast-cpu"]))
def test_a_healthy_model_is_called_healthy(name, lists):
    torch.manual_seed(0)
    found = hmpx.compare(*MODELS[name](dropout=0.1), lists=lists)
    assert not found.is_broken and not found.broken, str(found)
    assert "healthy" in str(found) and found.gradient_error < 0.08
    assert found.names and not any(row.note for row in found.rows)
    # Each batch in FP32 and under the lists; the first in FP32 again before and after, to see that the model repeats.
    assert found.passes == 2 * len(MODELS[name](dropout=0.1)[1]) + 2


@pytest.mark.parametrize(("name", "lists"), spanning(MODELS, [AUTOCAST_LISTS, {}]))
def test_healthy_models_raise_no_alarm(name, lists):
    model, batches, loss_of = MODELS[name](dropout=0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hmpx.convert(**lists) as handle, hmpx.record() as log:
        for batch in batches[:2]:
            loss_of(model, *batch).backward()
            optimizer.step()
    assert not log.unchosen and log.first_nonfinite is None and log.escaped == handle.escaped
    assert not [trip for trip in log.round_trips if not trip.listed]
    assert not log.unmatched and log.unmatched_of_hmpx and log.steps == 2
    assert all(site.calls % 2 == 0 for site in log.sites)
