"""What doctor, record, compare and tune print of two models, stored whole: one with a fault, one without."""

import runpy
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import hmpx
from tests.support import out_of_sight, small_models

FIRST_HOUR = str(Path(__file__).parents[2] / "examples" / "first_hour.py")


def first_hour():
    return runpy.run_path(FIRST_HOUR)["setup"]()


def transformer():
    return small_models.character_transformer(0.0)


def doctor(model, batches, loss):
    with hmpx.doctor() as found, hmpx.activate("autocast-cpu"):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for batch in batches:
            optimizer.zero_grad()
            loss(model, *batch).backward()
            optimizer.step()
    return found


def record(model, batches, loss):
    with hmpx.activate("autocast-cpu"), hmpx.record() as log:
        for batch in batches:
            loss(model, *batch).backward()
    return log


def compare(model, batches, loss):
    return hmpx.compare(model, batches, loss, lists="autocast-cpu", progress=False)


def tune(model, batches, loss):
    found = hmpx.tune(model, batches, loss, progress=False)
    return replace(found, step_spread=0.0)  # as on a machine that is idle


@pytest.fixture
def no_other_tests():
    """A record tells of all ops that the process holds where nothing reaches them, as modules of other tests do.

    And as torchao does, in a table of what to do for an op.
    """
    with out_of_sight.hidden("tests", "torchao"):
        yield


@pytest.mark.parametrize("command", [doctor, record, compare, tune])
@pytest.mark.parametrize("made", [first_hour, transformer])
def test_what_it_prints(made, command, monkeypatch, stored, no_other_tests):
    monkeypatch.setenv("COLUMNS", "160")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        said = str(command(*made()))
    stored(f"{command.__name__}-{made.__name__}", said, figures=False)
