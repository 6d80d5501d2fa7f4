"""The parser of every command, and what a wrong command line says."""

from __future__ import annotations

import argparse
import os
import re
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

from hmpx.errors import HmpxError, did_you_mean
from hmpx.ops.wrapping.callers import users_frame
from hmpx.recipes.reading import recipe_names
from hmpx.shell import bench, commands
from hmpx.version import __version__

_DESCRIPTION = """\
Mixed precision for PyTorch that you can read, edit and undo. These commands show which precision each op and each
weight update has, check lists and recipes, and run a training script under one."""
_MORE = """\
exit status:
  0    done: nothing is wrong
  1    doctor, check, compare, report --diff: something was found; tune, bench gpu, bench host: the aim was missed
  2    an error, which is said; doctor: nothing is wrong in what it could look at, but some of it it could not
  run, record and doctor hand on the status of a script that ends with another one

examples:
  {prog} doctor train.py                             what is wrong with the precision of a training
  {prog} run --recipe bf16-sr train.py               run your script under a recipe
  {prog} recipes                                     which recipes there are
  {prog} explain bf16-sr                             what one of them does
  {prog} record --recipe autocast-cuda train.py      which op ran in which precision, and where
  {prog} explain softmax --recipe bf16-sr            which precision an op has there, and why
  {prog} COMMAND --help                              more of a command"""

_PYTHON = os.path.dirname(os.__file__) + os.sep  # the folder of its library


class Parser(argparse.ArgumentParser):
    """Keeps the lines of descriptions and examples, and says what a mistyped word may mean."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **kwargs)

    def error(self, message: str):
        if found := re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message):
            name, legal = found[1], re.findall(r"[\w-]+", found[2])
            hint = did_you_mean(name, legal)
            if not hint and name in recipe_names():
                hint = f"; {name!r} is a recipe: explain {name}, or run --recipe {name} SCRIPT"
            message += hint
        super().error(message)


def main(arguments: list[str] | None = None) -> int:
    """Run one command, and return its exit status, as `--help` says it."""
    as_script = Path(sys.argv[0]).stem == "hmpx"
    prog = "hmpx" if as_script else "python -m hmpx"
    parser = Parser(prog=prog, description=_DESCRIPTION, epilog=_MORE.format(prog=prog))
    parser.add_argument("--version", action="version", version=f"hmpx {__version__}, torch {torch.__version__}")
    subparsers = parser.add_subparsers(metavar="COMMAND", title="commands")
    commands.add_all(subparsers, prog)
    bench.add(subparsers, prog)
    options = parser.parse_args(arguments)
    if not hasattr(options, "run"):
        parser.print_help()
        return 0
    try:
        return options.run(options)
    except HmpxError as error:
        print(f"hmpx: {error}", file=sys.stderr)
        if line := _line_of_script(error):
            print(f"  raised at {line}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        sys.stderr.close()
        return 0


def _line_of_script(error: HmpxError) -> str:
    """Return the innermost line of the script's own code that the error went through, "" if it went through none."""
    own = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        if users_frame(frame) is frame and not file.startswith(("<", _PYTHON)) and "site-packages" not in file:
            own = f"{file}:{line}"
    return own
