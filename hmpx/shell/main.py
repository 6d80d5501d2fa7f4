"""The parser of every command, what a wrong command line says, and `run`."""

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
from hmpx.shell import doctor, explain, record, run_script, trials
from hmpx.shell.processes import started_processes
from hmpx.shell.run_script import add_script, own_words, recipe_to_run, running
from hmpx.version import __version__

_DESCRIPTION = """\
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

    def error(self, message: str):
        if found := re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message):
            name, legal = found[1], re.findall(r"[\w-]+", found[2])
            hint = f"; {_GONE[name]}" if name in _GONE else did_you_mean(name, legal)
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
    _add_all(subparsers, prog)
    words = sys.argv[1:] if arguments is None else arguments
    number = own_words(subparsers.choices.get(words[0]), words) if words else 0
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


def _add_all(subparsers: argparse._SubParsersAction, prog: str) -> None:
    def add(name: str, words: str, description: str, examples: str) -> argparse.ArgumentParser:
        lines = "\n".join(f"  {prog} {name} {line}".rstrip() for line in examples.splitlines())
        return subparsers.add_parser(name, help=words, description=description, epilog=f"examples:\n{lines}")

    doctor.add(add)
    run = add(
        "run",
        "run an unmodified training script under a recipe",
        "Run a script as `python SCRIPT ARGUMENTS` does, with its ops, its models and its optimizers under a recipe.\n"
        "Without --recipe, HMPX_RECIPE names it, or else the variables of Neuron and PyTorch/XLA.\n"
        "Lists alone lie over the default ones, with FP32 weights.",
        "--recipe neuron-bf16-sr train.py --steps 500\n--recipe lean --set seed=3 --bf16 mine.txt -m package.train\n"
        "--list mine.txt train.py",
    )
    add_script(run, "the one that the environment names")
    run.set_defaults(run=_run)

    explain.add(add)
    record.add(add)
    trials.add(add)


def _run(options: argparse.Namespace) -> int:
    recipe = recipe_to_run(options)
    if recipe is None:
        names = ", ".join(recipe_names())
        lists = "or lists (--list FILE --fp32 FILE)"
        raise HmpxError(f"run needs --recipe NAME or FILE, {lists}, before {options.script}; there are {names}")
    told = set[str]()

    def tell(said: str) -> None:
        if said not in told:
            told.add(said)
            print(f"hmpx: {said}", file=sys.stderr, flush=True)

    def started(words: str) -> None:
        tell(f"the recipe does not hold in a process that the script starts: {words}")

    def replaced(words: str) -> None:
        if words:
            tell(f"the recipe ends here, since the script goes on as another program: {words}")

    with started_processes(running(options), started, replaced):
        run_script.run(recipe, options.script, options.arguments, as_module=options.as_module)
    return 0
