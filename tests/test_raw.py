"""What hmpx reads of the functions that are running: their variables, which it must not keep."""

import sys
import weakref

import pytest
import torch
from torch import nn

import hmpx
from hmpx.base.raw import variables


class Batch:
    pass


def convert():
    with hmpx.convert():
        pass


def prepare():
    model = nn.Linear(2, 2)
    hmpx.restore(hmpx.prepare(model, torch.optim.SGD(model.parameters(), 0.1), "bf16-sr")[1])


def region_of_a_module():
    class Model(nn.Module):
        def forward(self, x):
            with torch.autocast("cpu", enabled=False):
                return x

    with hmpx.convert():
        Model()(torch.ones(2))


@pytest.mark.parametrize("asks", [convert, prepare, region_of_a_module])
def test_what_a_function_drops_goes_though_hmpx_looked_at_its_variables(asks):
    batch = Batch()
    gone = weakref.ref(batch)
    asks()
    del batch
    assert gone() is None


def test_variables_that_somebody_else_reads_stay():
    def ask():
        return variables(sys._getframe(1))

    one = 1
    mine = locals()
    assert ask()["one"] is one and mine["one"] is one
    namespace = {"variables": variables, "sys": sys}
    exec("found = variables(sys._getframe())\nnumber = 2", namespace)  # a module's are its globals
    assert namespace["number"] == 2 and "sys" in namespace["found"]

    class Body:
        inside = 3
        found = ask()

    assert Body.inside == 3 and Body.found["inside"] == 3


def test_a_debugger_that_asks_leaves_variables_as_they_are():
    """Before Python 3.13, what is missing from the dict when its prompt ends is unbound."""
    found = []

    def trace(frame, event, _):
        if frame.f_code is traced.__code__:
            found.append(variables(frame))
        return trace

    def traced():
        number = 1
        return number + 1

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        assert traced() == 2
    finally:
        sys.settrace(before)
    assert {"number": 1} in found
