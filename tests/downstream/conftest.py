"""The libraries that people use, offline and silent."""

import gc
import os
import sys

os.environ["HF_HUB_OFFLINE"] = os.environ["HF_HUB_DISABLE_TELEMETRY"] = os.environ["DO_NOT_TRACK"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"

import pytest
import torch

import hmpx
from hmpx.base import process_state
from tests.downstream import torchvision_ops  # noqa: F401  timm and others import torchvision
from tests.support import out_of_sight
from tests.support.untouched import attributes_of_torch


@pytest.fixture(autouse=True)
def untouched():
    """After `restore`, no op of torch is changed and nothing is in force.

    It looks at less than the fixture of this name elsewhere: frameworks set signals and variables themselves, a trainer
    holds its attached optimizer in circles, and a recipe that `prepare` or a callback has set up is meant to stay.
    """
    torch.manual_seed(0)
    before = attributes_of_torch()
    yield
    hmpx.restore()
    if "accelerate.state" in sys.modules:
        states = sys.modules["accelerate.state"]
        states.AcceleratorState._reset_state(True)
        states.GradientState._reset_state()
    gc.collect()
    changed = [label for label, value in attributes_of_torch().items() if before[label] != value]
    assert not changed and not process_state.in_use().keys() - {"awaited"}  # by an optimizer that is attached still
    if len(gc.get_objects()) > 50_000:  # a library was imported
        out_of_sight.hide()
