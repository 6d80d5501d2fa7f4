"""`hmpx.tune`: it finds what was planted, keeps the rest in BF16, and says what it will do."""

import pytest

import hmpx
from tests.support.planted import PLANTED, Model, batches, loss_of


def tuned(model, data, loss=loss_of, **options):
    return hmpx.tune(model, data, loss, **{"objective": "coverage", "progress": False, **options})


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_put_into_fp32_and_the_products_stay_in_bf16(name):
    fault = PLANTED[name]
    found = tuned(Model(fault.function), batches(8))
    assert found.met and found.gradient_error < 0.1 and found.share >= 0.9, str(found)
    assert fault.ops & {*found.policy.fp32}
    default = next(mark for mark in found.marks if mark.name == "default lists")
    assert default.gradient_error > 2 * found.gradient_error
