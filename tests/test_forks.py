"""A child that is forked while another thread is at work in hmpx finds everything whole, and no lock held."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import hmpx
from hmpx.base import forks
from hmpx.base.changes import Changes
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


def test_a_child_has_a_whole_conversion_of_another_thread_and_can_end_it(beside, monkeypatch):
    plain, probe, x = id(nn.functional.linear), nn.Linear(4, 4), torch.ones(2, 4)  # names of functions are rebound
    put, calls = Changes.put, []

    def convert_slowly(pause):
        def in_the_middle(self, *args):
            calls.append(None)
            if len(calls) == 50:
                pause()
            return put(self, *args)

        monkeypatch.setattr(Changes, "put", in_the_middle)
        hmpx.convert()

    def whole():
        was = probe(x).dtype
        hmpx.restore()
        with hmpx.convert():
            return was is probe(x).dtype is torch.bfloat16 and id(nn.functional.linear) != plain

    beside(convert_slowly)
    found = in_a_child(lambda: whole() and id(nn.functional.linear) == plain and probe(x).dtype is torch.float32)
    hmpx.restore()
    assert len(calls) > 50 and found


@pytest.mark.parametrize("number", range(len(forks._locks)))
def test_a_fork_waits_for_each_lock(number, beside):
    done, lock = [], forks._locks[number]

    def hold(pause):
        with lock:
            pause()
            done.append(None)

    beside(hold)
    assert in_a_child(lambda: bool(done) and lock.acquire(timeout=5))
    assert lock.acquire(timeout=5)  # the parent's is free as well
    lock.release()


def test_threads_that_take_two_locks_in_different_orders_do_not_hang_a_fork(beside):
    first, second = forks._locks[:2]

    def hold(pause):
        with second:
            pause()
            with first:
                pass

    beside(hold)
    assert in_a_child(lambda: True)


def test_no_file_makes_a_lock_that_forks_do_not_wait_for():
    made = {
        path.name: line.strip()
        for path in Path(hmpx.__file__).parent.rglob("*.py")
        for line in path.read_text().splitlines()
        if "Lock()" in line and "over_forks(" not in line and path.name != "forks.py"
    }
    assert not made


def test_two_threads_that_fork_at_once_both_go_on_and_leave_every_lock_free():
    """While a third takes and releases one of the locks. In a child, since a lock that stays locked hangs everybody."""

    def both_end():
        def fork():
            for _ in range(20):
                child = os.fork()
                if not child:
                    os._exit(0)
                os.waitpid(child, 0)

        def take():
            while any(each.is_alive() for each in forking):
                with lock:
                    time.sleep(0.01)

        lock, errors = forks.lock(), []
        sys.unraisablehook = errors.append  # what raises as a process forks is told to nobody else
        forking = [threading.Thread(target=fork, daemon=True) for _ in range(2)]
        taking = threading.Thread(target=take, daemon=True)
        for each in (*forking, taking):
            each.start()
        for each in (*forking, taking):
            each.join(15)
        ended = not any(each.is_alive() for each in (*forking, taking))
        return ended and not errors and all(each.acquire(timeout=1) for each in forks._locks)

    assert in_a_child(both_end)
