"""Random training programs agree with the same programs on FP32 copies, after each action.

`tests/support/programs.py` says what a program is and how to run more of them; `oracle.py` what it is held against.
"""

import logging

import pytest
import torch

from hmpx.rounding import coding, devices, eager, native, stochastic
from tests.support import oracle, programs
from tests.support.models import Setup, Spec
from tests.support.programs import Program

SEEDS = range(640)
PARTS = 16  # for as many workers as there are


@pytest.fixture(autouse=True)
def quiet(caplog):
    """Warnings of what a random program loses are not what is tested here."""
    caplog.set_level(logging.ERROR, "hmpx")


@pytest.mark.parametrize("part", range(PARTS))
def test_programs_agree_with_fp32_copies_after_each_action(part):
    for seed in SEEDS[part::PARTS]:
        if programs.program(seed).failure() is not None:
            pytest.fail(programs.report(seed), pytrace=False)
    assert programs.uninstalled()


def test_programs_agree_where_nothing_may_be_asked_for(monkeypatch):
    """Steps without kernels that look at no value, as on an accelerator where there is no Triton."""
    monkeypatch.setattr(native, "can_read", lambda *tensors: False)
    for module in (devices, eager, coding, stochastic):
        monkeypatch.setattr(module, "is_on_host", lambda tensor: False)
    for seed in SEEDS[::32]:
        if programs.program(seed).failure() is not None:
            pytest.fail(programs.report(seed), pytrace=False)


def test_a_program_does_something():
    """Most actions of a program fit where they stand, and every rule and every optimizer comes up."""
    tried, done, optimizers = set(), 0, set()
    for seed in SEEDS:
        program = programs.program(seed)
        tried |= {name for name, _ in program.actions}
        optimizers.add(program.setup.optimizer)
    assert tried == set(programs.RULES)
    for seed in SEEDS[:20]:
        program = programs.program(seed)
        done += len(program.done()) / len(program.actions) / 20
    assert done > 0.6
    assert {"Adadelta", "Adafactor", "LBFGS", "Muon", "SparseAdam", "KeepsLists"} <= optimizers


@pytest.mark.parametrize("optimizer", ["KeepsLists", "LBFGS"])
@pytest.mark.parametrize("way", ["master", "split"])
def test_a_load_of_the_present_state_leaves_the_masters_where_state_has_lists(optimizer, way):
    """The same as where state is tensors alone; the step after it would show masters that were dropped."""
    first, second = (("backward_and_step", {"seed": seed}) for seed in (871, 693))
    load = ("load", {"which": 0, "into": "same", "what": "model first"})
    setup = Setup((Spec((3, 50)),), optimizer, attach={"weights": way})
    program = Program(setup, [first, ("save", {"serialised": True}), load, second])
    assert program.failure() is None and len(program.done()) == 4


def test_the_oracle_rounds_ties_away_from_zero():
    """By hand: half of the last place of 1 is 2^-8."""
    x = torch.tensor([1 + 2**-8, 1 + 2**-8 - 2**-20, -1 - 2**-8, 1 + 2**-7 + 2**-8, 0.0, float("inf"), 2.0**-140])
    assert oracle.away_from_zero(x).tolist() == [1 + 2**-7, 1.0, -1 - 2**-7, 1 + 2**-6, 0.0, float("inf"), 0.0]
