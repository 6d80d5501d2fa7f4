"""`record SCRIPT` and `report FILE`: `hmpx.record` of an unmodified script, and what it saved, from the shell."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections import Counter
from pathlib import Path

from hmpx.base import process_state
from hmpx.errors import HmpxError
from hmpx.insight.capture import Capture
from hmpx.insight.recording.hashed_runs import is_hashes
from hmpx.insight.recording.hashes import Hashes
from hmpx.insight.recording.log import Log
from hmpx.insight.recording.parting import parting
from hmpx.insight.recording.record import record
from hmpx.recipes.recipe import Recipe
from hmpx.shell import run_script
from hmpx.shell.main import Parser
from hmpx.shell.options import add_force, outputs_asked, save
from hmpx.shell.processes import started_processes
from hmpx.shell.run_script import add_script, is_first_rank, recipe_to_run, running


def add_record(command: Parser) -> None:
    command.describe(
        "Run a script as `run` does, and print a table to standard error at its end, also when it raises or is\n"
        "interrupted: every op by line and module, its dtypes, its rule, its casts and their time. Without a recipe\n"
        "or lists, the script is one that converts itself. Of many ranks, each writes files of its own, and the first\n"
        "prints. What processes do that the script itself starts is not recorded; it is said that there were some.",
        "--recipe autocast-cpu train.py --steps 20\n--html log.html --json log.json train.py\n"
        "--list mine.txt -m package.train",
    )
    files = command.add_argument_group("what is saved")
    files.add_argument("--html", metavar="FILE", help="one page that holds everything, and needs no network")
    files.add_argument("--json", metavar="FILE", help="the record, for `report` and programs")
    files.add_argument("--hash", metavar="FILE", help="in its place: hashes of what ops take and give, for two runs")
    files.add_argument(
        "--at", type=int, action="append", default=[], metavar="N", help="iterations that are hashed; without this 1, 2"
    )
    add_force(files)
    add_script(command, "the one that the environment names, or none: the script converts itself")
    command.set_defaults(run=_record)


def add_report(command: Parser) -> None:
    command.describe(
        "Print the table of a record that `record --json` or log.json() has saved. With --diff, of two files of\n"
        "`record --hash`, say where the two runs part: the first call of an op whose inputs agree to the bit and\n"
        "whose results do not. Of two files of `record --json`: sites that are new or gone, other rules and dtypes.\n"
        "The exit status is 1 then if there is a difference. Of many ranks, name the file without a rank's number.",
        "log.json --html log.html\nrun1.json --diff run2.json --again run1-again.json",
    )
    command.add_argument("file", metavar="FILE", help="JSON")
    command.add_argument("--html", metavar="FILE", help="write it as a page, too")
    add_force(command)
    command.add_argument("--diff", metavar="OTHER", help="the file of another run")
    command.add_argument("--again", metavar="FILE", help="hashes of a second run of FILE: what differs is not blamed")
    command.set_defaults(run=_report)


def _record(options: argparse.Namespace) -> int:
    outputs = outputs_asked(options, "html", "json", "hash")
    if (options.hash and len(outputs) > 1) or (options.at and not options.hash):
        raise HmpxError("--hash goes without --html and --json" if options.hash else "--at N goes with --hash FILE")
    if min(options.at, default=1) < 1:
        raise HmpxError(f"--at {min(options.at)}: iterations are counted from 1")
    run_script.spec_of(options.script, options.as_module)  # or else nothing is to be shown
    recipe = recipe_to_run(options)
    if options.hash:
        return _hash(options, recipe, outputs["hash"])
    log, are_all, has_left = Log(), True, False
    with contextlib.ExitStack() as at_end:

        def show() -> None:
            nonlocal are_all
            if not log.about:  # no record was opened
                return
            if not has_left:  # what ``os._exit`` loses of the script's output stays lost
                with contextlib.suppress(OSError, ValueError, AttributeError):  # Python says so at its end
                    sys.stdout.flush()
            by_recipe = _UNCONVERTED.format(options.recipe) if recipe and recipe.opt_level is None else ""
            are_all = _show(log, outputs, started, "" if log.policy else by_recipe)

        started = at_end.enter_context(_started(options, at_end))
        at_end.callback(show)
        log = at_end.enter_context(record())

        def leaves(status: int) -> int:
            nonlocal has_left
            has_left = True
            at_end.close()
            return status

        run_script.run_to_the_end(options, recipe, leaves=leaves)
    return 0 if are_all else 2


def _started(options: argparse.Namespace, at_end: contextlib.ExitStack) -> contextlib.AbstractContextManager:
    """`started_processes`; what is to be done at the end is done before another program takes the place of this one."""
    return started_processes(running(options), replaced=lambda program: at_end.close() if program else None)


def _hash(options: argparse.Namespace, recipe: Recipe | None, path: Path) -> int:
    """Run the script, and save hashes of what its ops take and give."""
    at = options.at or (1, 2)
    hashes = Hashes(at)
    capture, started, are_all = Capture([hashes], at, only_at=True), Counter[str](), True

    def show() -> None:
        nonlocal are_all
        capture.close()
        hashes.named(capture.names, capture.compiles)
        lines, are_all = save(hashes, {"json": path})
        unseen = [*capture.trouble, *capture.elsewhere, *capture.notes.unseen, *(f"process {each}" for each in started)]
        print(*lines, *(f"hmpx: not hashed: {each}" for each in unseen), sep="\n", file=sys.stderr)

    with contextlib.ExitStack() as at_end:
        started = at_end.enter_context(_started(options, at_end))
        at_end.callback(show)
        at_end.enter_context(capture.hooks())

        def leaves(status: int) -> int:
            at_end.close()
            return status

        # The recipe's patches stand upon the capture's.
        run_script.run_to_the_end(options, recipe, restores=True, leaves=leaves)
    return 0 if are_all else 2


_UNCONVERTED = (
    "The recipe {0} leaves torch's ops as they are (opt_level null), so that they were not seen. With --opt-level O1\n"
    "it converts them; `doctor --recipe {0}` looks at a run in which nothing is converted."
)


def _show(log: Log, outputs: dict[str, Path], started: Counter[str], instead: str) -> bool:
    """Write the files and print the table beneath the script's own output; return whether all files were written."""
    written, are_all = save(log, outputs)
    if is_first_rank():
        if started:
            names = ", ".join(f"{name} ({number})" for name, number in started.items())
            written.append(f"hmpx: the script started processes, which are not in this record: {names}")
        print("", instead or log, *written, sep="\n", file=sys.stderr)
    return are_all


def _report(options: argparse.Namespace) -> int:
    outputs_asked(options, "html")
    process_state.run.update(script=" beside ".join(filter(None, (options.file, options.diff))))
    if is_hashes(options.file):
        if not options.diff:
            raise HmpxError(f"{options.file}: hashes of a run: compare them with those of another, by --diff OTHER")
        parted = parting(options.file, options.diff, options.again)
        if options.html:
            parted.html(options.html)
        print(parted)
        return 1 if parted else 0
    if options.again or (options.diff and is_hashes(options.diff)):
        raise HmpxError(f"{options.file}: has no hashes; `record --hash NAME train.py` writes a file with them")
    log = Log.load(options.file)
    if options.html:
        log.html(options.html)
    if options.diff:
        found = log.diff(Log.load(options.diff))
        print(found, "Where their numbers part: record both with --hash FILE, and --diff those", sep="\n")
        return 1 if found else 0
    print(log)
    return 0
