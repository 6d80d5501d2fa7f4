"""The table of the commands, and what a wrong command line says. Only the command that is asked for is loaded."""

from __future__ import annotations

import argparse
import os
import re
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from hmpx.errors import HmpxError, did_you_mean
from hmpx.ops.wrapping.callers import users_frame
from hmpx.version import __version__

# By name: the module of `hmpx.shell` whose ``add_NAME(parser)`` adds the options, and what the command does.
_COMMANDS = {
    "doctor": ("doctor", "run an unmodified script and say what is wrong with its precision"),
    "run": ("run_script", "run an unmodified training script under a recipe"),
    "explain": (
        "explain",
        "what an op, a list or a recipe does, and what is wrong in a file; alone: the recipes there are",
    ),
    "record": (
        "record",
        "run an unmodified script and say which op ran in which precision, where, and at what price",
    ),
    "report": ("record", "show what `record` has saved, or compare two of these files"),
    "compare": ("trials", "compare the training under op lists with FP32 and say which ops are to blame"),
    "tune": ("trials", "find the op lists of a model, and write them"),
}
_ABOUT = """\
Mixed precision for PyTorch that you can read, edit and undo. These commands show which precision each op and each
weight update has, explain lists and recipes, and run a training script under one."""
_MORE = """\
exit status:
  0    done: nothing is wrong
  1    doctor, compare, report --diff, explain of a file: something was found; tune: the aim was missed
  2    an error, which is said; doctor: nothing is wrong in what it could look at, but some of it it could not
  run, record and doctor hand on the status of a script that ends with another one

examples:
  {prog} doctor train.py                             what is wrong with the precision of a training
  {prog} run --recipe bf16-sr train.py               run your script under a recipe
  {prog} explain                                     which recipes there are
  {prog} explain bf16-sr                             what one of them does
  {prog} explain my_bf16.txt mine.yaml               what is wrong in lists and recipes
  {prog} record --recipe autocast-cuda train.py      which op ran in which precision, and where
  {prog} explain softmax --recipe bf16-sr            which precision an op has there, and why
  {prog} COMMAND --help                              more of a command"""

_GONE = {
    "check": "write `explain FILE`, or `explain --torch`",
    "recipes": "write `explain`, or `explain NAME --yaml`",
    "bench": "it is `python examples/bench` in a checkout, or `explain NAME --params 7e9`",
}
_PYTHON = os.path.dirname(os.__file__) + os.sep  # the folder of its library
_HMPX = os.path.dirname(os.path.dirname(__file__)) + os.sep


class Parser(argparse.ArgumentParser):
    """Keeps the lines of descriptions and examples, and says what a mistyped word may mean."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **kwargs)

    def describe(self, about: str, examples: str) -> None:
        """Say what the command does, and show its name before each line of `examples`."""
        lines = [f"  {self.prog} {line}".rstrip() for line in examples.splitlines()]
        self.description, self.epilog = about, "\n".join(["examples:", *lines])

    def error(self, message: str):
        if found := re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message):
            from hmpx.recipes.reading import recipe_names

            name, legal = found[1], re.findall(r"[\w-]+", found[2])
            hint = f"; {_GONE[name]}" if name in _GONE else did_you_mean(name, legal)
            if not hint and name in recipe_names():
                hint = f"; {name!r} is a recipe: explain {name}, or run --recipe {name} SCRIPT"
            message += hint
        super().error(message)


def main(arguments: list[str] | None = None) -> int:
    """Run one command, and return its exit status, as `--help` says it."""
    prog = "hmpx" if Path(sys.argv[0]).stem == "hmpx" else "python -m hmpx"
    parser = Parser(prog=prog, description=_ABOUT, epilog=_MORE.format(prog=prog))
    parser.add_argument("--version", action="version", version=f"hmpx {__version__}, torch {torch.__version__}")
    subparsers = parser.add_subparsers(metavar="COMMAND", title="commands")
    words = sys.argv[1:] if arguments is None else arguments
    for name, (module, what) in _COMMANDS.items():
        command = subparsers.add_parser(name, help=what)
        if words[:1] == [name]:
            getattr(import_module(f"hmpx.shell.{module}"), f"add_{name}")(command)
    number = _own_words(subparsers.choices.get(words[0]), words) if words else 0
    options = parser.parse_args(words[:number])
    if hasattr(options, "arguments"):
        options.arguments = [*words[number:]]
    if not hasattr(options, "run"):
        parser.print_help()
        return 0
    try:
        status = options.run(options)
        if not hasattr(options, "arguments"):
            sys.stdout.flush()
        return status
    except HmpxError as error:
        print(f"hmpx: {error}", file=sys.stderr)
        if line := _line_of_script(error):
            print(f"  raised at {line}", file=sys.stderr)
        return 2
    except BrokenPipeError as error:
        files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
        if not all(file.startswith(_HMPX) for file in files):
            raise  # the script's
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python says so at its end
        return 0


def _line_of_script(error: HmpxError) -> str:
    """Return the innermost line of the script's own code that the error went through, "" if it went through none."""
    own = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        if users_frame(frame) is frame and not file.startswith(("<", _PYTHON)) and "site-packages" not in file:
            own = f"{file}:{line}"
    return own


def _own_words(command: argparse.ArgumentParser | None, words: Sequence[str]) -> int:
    """Return how many words of a command line are hmpx's: up to a script, behind which `argparse` would drop ``--``."""
    actions = command._actions if command else []
    if not any(action.dest == "arguments" for action in actions):
        return len(words)
    i = 1
    while i < len(words) and words[i].startswith("-") and words[i] not in ("-", "--"):
        named = [each for each in actions for option in each.option_strings if option.startswith(words[i])]
        if any(each.nargs == "+" for each in named):  # `doctor --files`, without a script
            return len(words)
        i += 2 if any(each.nargs != 0 for each in named) else 1
    return i + 2 if words[i : i + 1] == ["--"] else i + 1
