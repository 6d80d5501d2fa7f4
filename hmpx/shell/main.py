"""The parser of every command, what a wrong command line says, and the commands that read lists and recipes."""

from __future__ import annotations

import argparse
import os
import re
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

from hmpx.base.torch_private import FEATURES
from hmpx.errors import HmpxError, did_you_mean
from hmpx.insight.check import check_files, features_table
from hmpx.insight.explain import explain_op, is_known, list_lines, ops_table, recipe_lines, recipes_table
from hmpx.insight.memory import memory_lines
from hmpx.ops.computing.kernels import choose
from hmpx.ops.wrapping.callers import users_frame
from hmpx.recipes.reading import as_recipe, read_recipe, recipe_names
from hmpx.shell import doctor, record, run_script, trials
from hmpx.shell.options import add_recipe_options, recipe_asked, with_options
from hmpx.shell.processes import started_processes
from hmpx.shell.run_script import add_script, own_words, recipe_to_run, running
from hmpx.version import __version__

_DESCRIPTION = """\
Mixed precision for PyTorch that you can read, edit and undo. These commands show which precision each op and each
weight update has, check lists and recipes, and run a training script under one."""
_MORE = """\
exit status:
  0    done: nothing is wrong
  1    doctor, check, compare, report --diff: something was found; tune: the aim was missed
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
_HMPX = os.path.dirname(os.path.dirname(__file__)) + os.sep


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


# The commands

_LINE = re.compile(r"\.py$|\.\w+:\d+$")


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

    recipes = add(
        "recipes",
        "the recipes that come with hmpx, as a table; one of them as a file",
        "Without a name: a table of the recipes that come with hmpx. With one: that recipe as a YAML file that is\n"
        "complete in itself, to be saved anywhere and edited.",
        "\nnxd-standard > mine.yaml",
    )
    recipes.add_argument("name", nargs="?", metavar="NAME", help="a recipe's name, or its YAML file")
    recipes.set_defaults(run=_recipes)

    explain = add(
        "explain",
        "every op with its rule; why one has the precision that it has; what a recipe does",
        "Of an op: which rule it gets, where that is listed, and by which names of torch it is called.\n"
        "Of a recipe: what it does to weights, ops, gradients, state and checkpoints.\n"
        "Of any other text, or with --all: a table of the ops with this in their name. It has the rule of each, `-`\n"
        "where torch's own function runs, and the names that it is called by.\n"
        "Without a word: what the recipe or the lists do, and the names in each list.\n"
        "With --params: what a model of that size, which need not exist, takes on each rank under a recipe; without\n"
        "one, in every way to hold weights. A way to distribute that a recipe refuses has no row; a note says why.",
        "softmax\ncross_entropy --recipe hmp-o2\nnxd-standard\npool --recipe autocast-cuda\n--list mine.txt\n"
        "lean --params 7e9 --ranks 1,8,64",
    )
    explain.add_argument(
        "what",
        nargs="?",
        default="",
        metavar="OP|RECIPE|TEXT",
        help="an op's name, a recipe's name or file, or a part of the names of ops",
    )
    explain.add_argument("--all", action="store_true", help="a table of every op")
    explain.add_argument("--params", type=_size, metavar="N", help="bytes of a model with N parameters, 7e9 for one")
    explain.add_argument(
        "--ranks", type=_counts, default=[1, 8, 64, 512], metavar="N,...", help="of --params, default 1,8,64,512"
    )
    words = "tensors the optimizer keeps, of --params, default 2"
    explain.add_argument("--states", type=int, choices=range(9), default=2, help=words)
    add_recipe_options(explain)
    explain.set_defaults(run=_explain)

    check = add(
        "check",
        "find what is wrong in op lists and recipes",
        "Say each problem of lists in text, and the first of recipes and other files, as FILE:LINE: names that are no\n"
        "op, keys that do not exist, values that do not fit, files that are not there, and ops on both sides (of text\n"
        "files whose names say their sides, as bf16.txt and fp32.txt). The exit status is 1 if there is any.\n"
        "Nothing is imported: of a dotted name (`torchvision.ops.nms`) whose module is not, this says so.\n"
        "With --torch: a table of what hmpx does with names that torch does not document, whether the installed torch\n"
        "has them, and what holds without. The exit status is 1 if something is off.",
        "my_bf16.txt my_fp32.txt\nmine.yaml\nnxd-standard\n--torch",
    )
    check.add_argument("files", nargs="*", metavar="FILE", help="an op list (text, YAML, JSON), or a recipe")
    check.add_argument("--torch", action="store_true", help="what of hmpx the installed torch switches off")
    check.set_defaults(run=_check)

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


def _recipes(options: argparse.Namespace) -> int:
    print(read_recipe(options.name) if options.name else recipes_table(), end="" if options.name else "\n")
    return 0


def _explain(options: argparse.Namespace) -> int:
    what = options.what
    is_recipe = what in recipe_names() or Path(what).suffix in (".yaml", ".yml")
    if is_recipe and options.recipe:
        raise HmpxError(f"{what} is a recipe itself; --recipe goes with an op")
    if options.params:
        if what and not is_recipe:
            raise HmpxError(f"--params counts the bytes of a recipe, and {what} is none; see `recipes`")
        name = what or options.recipe
        recipes = {name: with_options(as_recipe(name), options)} if name else {}
        print(*memory_lines(recipes, options.params, options.ranks, options.states), sep="\n")
        return 0
    if is_recipe:
        print(*recipe_lines(with_options(as_recipe(what), options)), sep="\n")
        return 0
    if Path(what).suffix in (".txt", ".json"):
        of_list = f"its ops: explain --list {what}"
        raise HmpxError(f"{what} is an op list. What is wrong with it: check {what}; {of_list}")
    if _LINE.search(what):
        raise HmpxError(f"{what}: explain reads no code; `record --recipe NAME SCRIPT` says what each line ran in")
    recipe = recipe_asked(options)
    policy = recipe.policy()
    if not what and not options.all:
        print(*recipe_lines(recipe), *list_lines(policy), sep="\n")
        return 0
    if policy is None:
        raise HmpxError(f"recipe {options.recipe} leaves torch's ops as they are (opt_level null)")
    several = "" if is_known(what, policy) else ops_table(policy, what)
    print(several or explain_op(what, policy, choose(recipe.kernels), recipe_names(), recipe.overlays()))
    return 0


def _size(text: str) -> float:
    number = float(text)
    if not 1 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is no number of parameters")
    return number


def _counts(text: str) -> list[int]:
    counts = [int(part) for part in text.split(",")]
    if min(counts) < 1:
        raise argparse.ArgumentTypeError(f"{min(counts)} is no count")
    return counts


def _check(options: argparse.Namespace) -> int:
    if not (options.files or options.torch):
        raise HmpxError("check needs a FILE, or --torch")
    if options.torch:
        print(features_table())
        if not options.files:
            return int(any(feature.missing for feature in FEATURES))
    found = list(check_files(options.files))
    print(*found, sep="\n", end="\n" * bool(found))
    faults = [each for each in found if each.is_fault]
    plural = "" if len(faults) == 1 else "s"
    print(f"{len(options.files)} checked, {len(faults)} problem{plural}")
    return 1 if faults else 0
