"""What stays when a script is ended or killed: the terminal as it was, and processes that see to an end."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, TextIO

_GRACE = 10  # seconds in which the threads of a script may end by themselves
_PATIENCE = 60  # seconds in which its `finally` blocks may
_WAITING = ("threading.py", "queue.py", "selectors.py", "subprocess.py", "_base.py", "connection.py", "popen_fork.py")
_WATCHER = """
import os, select, sys
parent, text = os.getppid(), b""
while os.getppid() == parent:
    if select.select([0], [], [], 1)[0]:
        more = os.read(0, 65536)
        if not more:
            break
        text += more
        if text.endswith(b"\\0\\0"):
            break
told = text.split(b"\\0")[-2:-1]
if told and told[0]:
    sys.stderr.write("\\nhmpx: the script was killed; by then doctor had found:\\n" + told[0].decode() + "\\n")
"""


def terminal() -> TextIO:
    """Return standard error as it is now, whatever the script makes of `sys.stderr` and of its descriptor."""
    try:
        return open(os.dup(sys.stderr.fileno()), "w", encoding="utf-8", errors="backslashreplace")
    except (OSError, ValueError, AttributeError):
        return sys.stderr


def put_bars_away() -> None:
    """End the progress bars of tqdm, which would be drawn beneath what is printed now."""
    bars = getattr(getattr(sys.modules.get("tqdm.std"), "tqdm", None), "_instances", ())
    for bar in [*bars]:
        with contextlib.suppress(Exception):
            bar.close()
    for name in ("stdout", "stderr"):
        try:
            getattr(sys, name).flush()
        except Exception:  # the interpreter would end with a status of its own
            setattr(sys, name, None)


class Watcher:
    """A process that prints the last text it was given, unless this process ends with `done`."""

    def __init__(self, to: TextIO) -> None:
        self._process: Any = None
        with contextlib.suppress(OSError, ValueError):
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _WATCHER],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=to,
                start_new_session=True,
            )

    def give(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError, AttributeError):
            self._process.stdin.write(text.encode() + b"\0")
            self._process.stdin.flush()

    def done(self) -> None:
        self.give("")
        with contextlib.suppress(OSError, ValueError, AttributeError, subprocess.TimeoutExpired):
            self._process.stdin.close()
            self._process.wait(5)


def end_in_time(report: Callable[[], int], is_reported: Callable[[], bool], to: TextIO) -> None:
    """See to it, from a thread, that this process ends: a thread or a process that waits would keep it for ever.

    report: prints, once, and returns the exit status.
    """
    threading.Thread(target=_end, args=(report, is_reported, to), daemon=True).start()


def _end(report: Callable[[], int], is_reported: Callable[[], bool], to: TextIO) -> None:
    until, main = time.monotonic() + _PATIENCE, threading.main_thread().ident
    while not is_reported():
        time.sleep(1)
        frame = sys._current_frames().get(main or 0)
        if time.monotonic() > until and frame is not None and frame.f_code.co_filename.endswith(_WAITING):
            break
    status = report()
    time.sleep(_GRACE)
    threads = [each.name for each in threading.enumerate() if not each.daemon and each.ident != main]
    children = multiprocessing.active_children()
    names = ", ".join([*threads, *(each.name for each in children)])
    print(f"hmpx: doctor ends the process, which would wait: {names or 'it has not ended'}", file=to, flush=True)
    for each in children:
        each.terminate()
    os._exit(status)
