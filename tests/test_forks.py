"""A child that is forked while another thread is at work in hmpx finds no lock held."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest

import hmpx
from hmpx.base import process_state
from hmpx.insight.recording import record  # noqa: F401, which has a lock too

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="a system without fork")


def in_a_child(function):
    """Whether `function()` is true in a forked child; False also if it hangs there."""
    child = os.fork()
    if not child:
        try:
            os._exit(0 if function() else 1)
        finally:
            os._exit(2)
    for _ in range(200):
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status == 0
        time.sleep(0.1)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


@pytest.fixture
def beside():
    """Runs a function in another thread, and returns when it calls what it is given; goes on half a second later."""
    threads = []

    def start(function):
        begun = threading.Event()

        def pause():
            begun.set()
            time.sleep(0.5)

        threads.append(threading.Thread(target=function, args=(pause,)))
        threads[-1].start()
        assert begun.wait(30)

    yield start
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("make", [process_state.new_lock, lambda: process_state.over_forks(threading.Lock())])
def test_a_lock_that_another_thread_holds_is_free_in_a_child(make, beside):
    lock = make()

    def hold(pause):
        with lock:
            pause()

    beside(hold)
    assert in_a_child(lambda: lock.acquire(timeout=5) and not lock.release())
    assert lock.acquire(timeout=5)  # the parent's, once that thread has ended its work
    lock.release()


def test_no_file_makes_a_lock_that_forks_do_not_wait_for():
    made = {
        path.name: line.strip()
        for path in Path(hmpx.__file__).parent.rglob("*.py")
        for line in path.read_text().splitlines()
        if "Lock()" in line and "over_forks(" not in line and path.name != "process_state.py"
    }
    assert not made
