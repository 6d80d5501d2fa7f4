"""The picture that every test is held against: it sees what is left behind, wherever that is, and nothing else."""

import logging
import os

import torch

import hmpx
from tests.support.training import parameters
from tests.support.untouched import Picture


def set_of(owner, name, value):
    before = vars(owner)[name]
    return lambda: setattr(owner, name, value), lambda: setattr(owner, name, before)


def cell_of(function, value):
    cell = function.__closure__[0]
    before = cell.cell_contents
    return lambda: setattr(cell, "cell_contents", value), lambda: setattr(cell, "cell_contents", before)


def set_by(setter, value, before):
    return lambda: setter(value), lambda: setter(before)


REGION = hmpx.disable_casts()
OPTIMIZER = torch.optim.SGD(parameters(), lr=0.1)
LEFT = [  # what is said of something that is left behind, what leaves it, and what takes it away
    ("torch.sin", *set_of(torch, "sin", torch.cos)),
    ("torch.nn.modules.module.Module._apply", *set_of(torch.nn.Module, "_apply", lambda self, fn: self)),
    ("torch.nn.init.ones_", *set_of(torch.nn.init, "ones_", torch.nn.init.zeros_)),
    ("clip_grad_norm_", *cell_of(torch.nn.utils.clip_grad_norm_, print)),
    ("default dtype", *set_by(torch.set_default_dtype, torch.float64, torch.float32)),
    ("fast path", *set_by(torch.backends.mha.set_fastpath_enabled, False, True)),
    ("logger", *set_by(logging.getLogger("hmpx").setLevel, logging.ERROR, logging.NOTSET)),
    ("HMPX_LEFT", lambda: os.environ.update(HMPX_LEFT="1"), lambda: os.environ.pop("HMPX_LEFT")),
    ("process_state.installed", hmpx.convert, hmpx.restore),
    ("regions of this thread", REGION.__enter__, lambda: REGION.__exit__(None, None, None)),
    ("attached optimizers", lambda: hmpx.attach(OPTIMIZER), lambda: hmpx.detach(OPTIMIZER)),
]


def test_what_is_left_behind_is_seen_until_it_is_taken_away():
    picture = Picture()
    for said, do, undo in LEFT:
        assert picture.changed() == []
        do()
        try:
            assert any(said in line for line in picture.changed()), said
        finally:
            undo()
        assert picture.changed() == [], said
