"""`doctor SCRIPT`: what is wrong with the precision of an unmodified script, from the shell."""

from __future__ import annotations

import argparse
import contextlib
import inspect
import multiprocessing
import os
import shlex
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any, TextIO

from hmpx.base import process_state
from hmpx.errors import HmpxError
from hmpx.insight.doctor import Diagnosis, Examination, examined
from hmpx.insight.fix import Base
from hmpx.insight.precision import read_table
from hmpx.recipes.activate import VARIABLE
from hmpx.shell import run_script
from hmpx.shell.main import Parser
from hmpx.shell.options import add_force, keys_asked, outputs_asked, save
from hmpx.shell.processes import started_processes
from hmpx.shell.run_script import add_script, is_first_rank, recipe_to_run, running

_STEPS = 50


def add_doctor(command: Parser) -> None:
    command.describe(
        "Run the first steps of a script as it is, without a recipe and with the bits that it has without this, and\n"
        "print what is wrong with its precision to standard error, the worst first: the evidence, the line or the\n"
        "parameter, and the one thing to do. The script ends after --steps steps of an optimizer; its `finally`\n"
        "blocks run, and may save a checkpoint. The exit status is 0 if nothing is wrong, 1 if something is, and 2\n"
        "if nothing is in what could be looked at, but something could not. Of many ranks, the first prints.\n\n"
        "With --files no script runs: two checkpoints tell whether the training between them has lost updates, and\n"
        "one tells of inf, NaN, norms and dtypes. What is found goes to standard output.",
        "train.py\n--steps 200 -m package.train --lr 0.1\n--fix recipe.yaml train.py\n--recipe recipe.yaml train.py\n"
        "--files base.safetensors tuned.safetensors\n--files base/ tuned/ --lr 1e-5 --trained-steps 1000",
    )
    command.add_argument(
        "--steps", type=int, default=_STEPS, metavar="N", help=f"of an optimizer, {_STEPS} without this; 0: all"
    )
    command.add_argument(
        "--at", type=int, action="append", default=[], metavar="N", help="look at every op of this step, too"
    )
    command.add_argument(
        "--expect", metavar="FILE", help="the --json of an earlier run: what is in another dtype now is wrong"
    )
    command.add_argument("--all-rows", action="store_true", help="print all rows of the table, not ten")
    files = command.add_argument_group("what is saved")
    files.add_argument("--fix", metavar="FILE", help="the smallest recipe that answers what is found, with its reasons")
    files.add_argument("--html", metavar="FILE", help="one page that holds everything, and needs no network")
    files.add_argument("--json", metavar="FILE", help="what was found, for programs")
    add_force(files)
    stored = command.add_argument_group("in place of a script: checkpoints")
    script = add_script(command, "none: the script runs as it is")
    stored.add_argument(
        "--files", action=_Files, nargs="+", metavar="FILE", default=None, script=script,
        help="one, or two: before and after a training; .safetensors, .pt, .bin, an index, or a folder of these or of "
        "torch.distributed.checkpoint",
    )  # fmt: skip
    stored.add_argument("--lr", type=float, default=0.0, metavar="RATE", help="the learning rate between the two")
    stored.add_argument("--trained-steps", type=int, default=0, metavar="N", help="how many steps are between the two")
    command.set_defaults(run=_doctor)


class _Files(argparse.Action):
    """Takes checkpoints; no script is needed then."""

    def __init__(self, *args: Any, script: argparse.Action, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._script = script

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option: str | None = None) -> None:
        namespace.files, self._script.required = values, False


def _of_files(options: argparse.Namespace) -> int:
    from hmpx.insight.checkpoints.files import checkup  # which loads torch.distributed.checkpoint

    if len(options.files) > 2 or options.script:
        raise HmpxError("--files takes one or two checkpoints, and no script runs")
    if options.fix:
        raise HmpxError("--fix needs a script: doctor --fix recipe.yaml train.py")
    if options.lr < 0 or options.trained_steps < 0:
        raise HmpxError("--lr and --trained-steps take no negative numbers")
    outputs = outputs_asked(options, "html", "json")
    before, after = [*options.files, None][:2]
    process_state.run.update(script=shlex.join(options.files))
    found = checkup(before, after, options.lr, options.trained_steps)
    written, are_all = save(found, outputs)
    print(*written, found, sep="\n")
    return found.status or 2 * (not are_all)


def _doctor(options: argparse.Namespace) -> int:
    if options.files:
        return _of_files(options)
    if options.lr or options.trained_steps:
        raise HmpxError("--lr and --trained-steps go with --files; a script's own options stand behind its name")
    if options.steps < 0 or min(options.at, default=1) < 1:
        raise HmpxError("--steps N takes 0, for all, or more; --at N takes a step, which are counted from 1")
    outputs = outputs_asked(options, "html", "json", "fix", of_all="fix")  # which the first rank writes
    run_script.spec_of(options.script, options.as_module)  # or else nothing is to be shown
    recipe = recipe_to_run(options)
    named, base = options.recipe or os.environ.get(VARIABLE), None
    if recipe and named:
        is_file, folder = os.path.splitext(named)[1], os.path.dirname(options.fix or "") or "."
        base = Base(os.path.relpath(named, folder) if is_file else named, keys_asked(options)[0], recipe)
    process_state.script[:] = [*(["-m"] if options.as_module else []), options.script, *options.arguments]
    report = _Report(outputs, options.all_rows)
    expected = read_table(options.expect) if options.expect else None
    status = 0
    try:
        with (
            started_processes(running(options), replaced=report.replaced) as report.started,
            examined(options.steps or None, options.at, base, report.heard, expected) as report.found,
        ):
            # The recipe's patches stand upon the doctor's.
            run_script.run_to_the_end(
                options, recipe, restores=True, waits=lambda: not report.is_ending, leaves=report.leaves
            )
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            print(end.code, file=sys.stderr)
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    finally:
        status = report(status)
    return status


class _Report:
    """What is printed at the end, once: of a script that ends, is ended, leaves by ``os._exit``, waits or is killed."""

    def __init__(self, outputs: dict[str, Path], all_rows: bool) -> None:
        self._all_rows = all_rows
        self._outputs, self._terminal = outputs, terminal()
        self._watcher = Watcher(self._terminal) if is_first_rank() else None
        self._lock = process_state.over_forks(threading.Lock())
        self._status: int | None = None
        self.found, self.started = Diagnosis(), Counter[str]()
        self.examination: Examination | None = None

    def heard(self, examination: Examination) -> None:
        """Keep what was found so far, in case that the script is killed."""
        self.examination = examination
        if self._watcher is not None:
            self._watcher.give(str(examination.so_far()))
        if examination.is_ending:
            threading.Thread(target=self._end_in_time, daemon=True).start()

    @property
    def is_ending(self) -> bool:
        return self.examination is not None and self.examination.is_ending

    def leaves(self, status: int) -> int:
        """Print what was found before the process leaves at once."""
        if self.examination is None:
            return status
        self.examination.finish()
        return self(status)

    def replaced(self, program: str) -> None:
        """Do the same before another program takes the place of this process; "" is this command again."""
        if program:
            self.found.not_checked.append(f"the script goes on as another program: {program}")
            self.leaves(0)
        if self._watcher is not None:
            self._watcher.done()

    def _end_in_time(self) -> None:
        """End this process, from a thread: a thread or a process of the script that waits would keep it for ever."""
        until, main = time.monotonic() + _PATIENCE, threading.main_thread().ident
        while self._status is None:
            time.sleep(1)
            frame = sys._current_frames().get(main or 0)
            if time.monotonic() > until and frame is not None and frame.f_code.co_filename.endswith(_WAITING):
                break
        if self._status is None and self.examination is not None:
            self.examination.finish()
        status = self(0)
        time.sleep(_GRACE)
        threads = [each.name for each in threading.enumerate() if not each.daemon and each.ident != main]
        children = multiprocessing.active_children()
        names = ", ".join([*threads, *(each.name for each in children)]) or "it has not ended"
        print(f"hmpx: doctor ends the process, which would wait: {names}", file=self._terminal, flush=True)
        for each in children:
            each.terminate()
        os._exit(status)

    def __call__(self, status: int) -> int:
        """Write the files, print what was found beneath all that the script has printed, and return the exit status."""
        with self._lock:
            if self._status is None:
                are_all = self._print()
                self._status = status or (self.found.status if is_first_rank() else 0) or 2 * (not are_all)
            return self._status

    def _print(self) -> bool:
        """Return whether all files were written."""
        if self.started:
            names = ", ".join(f"{name} ({number})" for name, number in self.started.items())
            self.found.not_checked.append(f"processes that the script started: {names}")
        first = is_first_rank()
        self.found.all_rows = self._all_rows
        own = {kind: path for kind, path in self._outputs.items() if kind != "fix" or (self.found.recipe and first)}
        written, are_all = save(self.found, own)
        if "fix" in self._outputs and self.found.recipe is None:
            written.append(f"hmpx: {self.found.unfixed}, so no recipe was written")
        if first:
            put_bars_away()
            print("", *written, self.found, sep="\n", file=self._terminal, flush=True)
        if self._watcher is not None:
            self._watcher.done()
        return are_all


# What stays when a script is ended or killed: the terminal as it was, and a process that tells what was found

_GRACE = 10  # seconds in which the threads of a script may end by themselves
_PATIENCE = 60  # seconds in which its `finally` blocks may
_WAITING = ("threading.py", "queue.py", "selectors.py", "subprocess.py", "_base.py", "connection.py", "popen_fork.py")


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


def _watch() -> None:
    """Print the last text that came through standard input, if this process's parent ends before "\\0\\0" came.

    It runs alone, in an interpreter without hmpx, torch and `site`, so it imports what it needs.
    """
    import os
    import select
    import sys

    parent, text = os.getppid(), b""
    while os.getppid() == parent:
        if select.select([0], [], [], 1)[0]:
            more = os.read(0, 65536)
            if not more:
                break
            text += more
            if text.endswith(b"\0\0"):
                break
    told = text.split(b"\0")[-2:-1]
    if told and told[0]:
        sys.stderr.write("\nhmpx: the script was killed; by then doctor had found:\n" + told[0].decode() + "\n")


class Watcher:
    """A process that prints the last text it was given, unless this process ends with `done`."""

    def __init__(self, to: TextIO) -> None:
        self._process: Any = None
        with contextlib.suppress(OSError, ValueError):
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", f"{inspect.getsource(_watch)}\n_watch()"],
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
