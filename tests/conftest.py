"""Every test starts with torch as it was made, and fails if it ends with anything else."""

import os
import re
import signal
import threading
from pathlib import Path

if "PYTEST_XDIST_WORKER" in os.environ:  # a worker has a core, and so have the processes that it starts
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

import hmpx
from tests.support import kernels, older_torch, out_of_sight, python  # noqa: F401
from tests.support.own_step import own_step as own_step_where_nobody_asks
from tests.support.untouched import Picture


def pytest_addoption(parser):
    parser.addoption("--update", action="store_true", help="write the reports that tests compare with, for a look")


def pytest_configure(config):
    """Ctrl-C is heard also where whoever started the tests ignores it, as a shell does in the background.

    Workers share the server of programs.
    """
    if config.getoption("numprocesses", None) and "PYTEST_XDIST_WORKER" not in os.environ:
        os.environ[python.SOCKET] = python.start()
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items):
    """Tests that look through every object come first: libraries that others import make millions of them.

    Next come those that share a process, and the long ones: a worker that is done takes tests from the end of the queue
    of another, so what stands there should be short, and no two workers should start that process.
    """
    early = {name: place for place, name in enumerate(("everything_is_looked_through", "raised"))}

    def place(item):
        used = [early[name] for name in getattr(item, "fixturenames", ()) if name in early]
        return min(used, default=len(early) + (item.path.parent != Path(__file__).parent))

    items.sort(key=place)
    older_torch.leave_out(items)


def pytest_collection_finish(session):
    out_of_sight.hide()


@pytest.fixture(autouse=True)
def untouched():
    """A test that leaves something changed fails, and the next one starts from a clean process all the same."""
    torch.manual_seed(0)
    before = Picture()
    yield before
    changed = before.changed()
    hmpx.restore()
    if changed:
        before.clean_up()
    out_of_sight.hide_what_has_come()
    if changed:
        pytest.fail("\n".join(["left behind:", *changed[:12], *["..."][: len(changed) > 12]]), pytrace=False)


@pytest.fixture
def own_step():
    """See `tests.support.own_step`; for whole modules, ``pytestmark = pytest.mark.usefixtures("own_step")``."""
    with own_step_where_nobody_asks():
        yield


@pytest.fixture(scope="module")
def everything_is_looked_through():
    """As in a user's process: for tests of names that modules captured when they were imported."""
    out_of_sight.show()
    yield
    out_of_sight.hide()


@pytest.fixture
def lists(tmp_path):
    """Write op list files and return the keyword arguments of `convert`; a side that is not given is empty."""

    def write(bf16="", fp32="", promote=""):
        arguments = {}
        for side, names in (("bf16", bf16), ("fp32", fp32), ("promote", promote)):
            path = tmp_path / f"{side}.txt"
            path.write_text("\n".join(names.split()))
            arguments[f"{side}_file_path"] = str(path)
        return arguments

    return write


@pytest.fixture
def stored(request):
    """Compare a report with the file that holds it; under `--update`, write the file. Paths of hmpx begin there.

    Without `figures`, its lines may come in any order, and with other figures.
    """

    def same(name, text, figures=True):
        path = Path(__file__).parent / "data" / "reports" / f"{name}.txt"
        text = text.replace(f"{Path(hmpx.__file__).parent}{os.sep}", "hmpx/").rstrip("\n") + "\n"
        if request.config.getoption("--update"):
            path.write_text(text, encoding="utf-8")
        shown = path.read_text(encoding="utf-8")
        if not figures:
            text, shown = (
                sorted(re.sub(r"[\d.]+(e-\d+)?|MORE|less| +", "#", each).splitlines()) for each in (text, shown)
            )
        assert text == shown, f"{path.name}: run with --update and look at the difference"

    return same
