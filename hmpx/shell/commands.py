"""The commands that read lists and recipes, and those that run code under them."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from hmpx.base.torch_private import FEATURES
from hmpx.errors import HmpxError
from hmpx.insight.check import check_files, features_table
from hmpx.insight.explain import explain_op, is_known, list_lines, ops_table, recipe_lines, recipes_table
from hmpx.ops.computing.kernels import choose
from hmpx.recipes.reading import as_recipe, read_recipe, recipe_names
from hmpx.shell import compare, doctor, record, run_script, tune
from hmpx.shell.options import add_recipe_options, recipe_asked, with_options
from hmpx.shell.scripts import add_script, recipe_to_run

_LINE = re.compile(r"\.py$|\.\w+:\d+$")


def add_all(subparsers: argparse._SubParsersAction, prog: str) -> None:
    """Add every command except `bench`."""

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
        "Without a word: what the recipe or the lists do, and the names in each list.",
        "softmax\ncross_entropy --recipe hmp-o2\nnxd-standard\npool --recipe autocast-cuda\n--list mine.txt",
    )
    explain.add_argument(
        "what",
        nargs="?",
        default="",
        metavar="OP|RECIPE|TEXT",
        help="an op's name, a recipe's name or file, or a part of the names of ops",
    )
    explain.add_argument("--all", action="store_true", help="a table of every op")
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
    compare.add(add)
    tune.add(add)


def _run(options: argparse.Namespace) -> int:
    recipe = recipe_to_run(options)
    if recipe is None:
        names = ", ".join(recipe_names())
        lists = "or lists (--list FILE --fp32 FILE)"
        raise HmpxError(f"run needs --recipe NAME or FILE, {lists}, before {options.script}; there are {names}")
    run_script.run(recipe, options.script, options.arguments, as_module=options.as_module)
    return 0


def _recipes(options: argparse.Namespace) -> int:
    print(read_recipe(options.name) if options.name else recipes_table(), end="" if options.name else "\n")
    return 0


def _explain(options: argparse.Namespace) -> int:
    what = options.what
    if what in recipe_names() or Path(what).suffix in (".yaml", ".yml"):
        if options.recipe:
            raise HmpxError(f"{what} is a recipe itself; --recipe goes with an op")
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
