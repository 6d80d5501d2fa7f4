"""`explain WHAT`: what an op, a list or a recipe does, and what is wrong in its file; without a word, what there is."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from hmpx.base.torch_private import FEATURES
from hmpx.errors import HmpxError
from hmpx.insight.check import check_files, features_table, side_of
from hmpx.insight.explain import explain_op, is_known, list_lines, ops_table, recipe_lines, recipes_table
from hmpx.insight.report import Field, table
from hmpx.ops.computing.kernels import choose
from hmpx.recipes.reading import as_recipe, recipe_names
from hmpx.recipes.recipe import MODES, Footprint, Recipe
from hmpx.shell.main import Parser
from hmpx.shell.options import add_recipe_options, keys_asked, recipe_asked, with_options

_CODE = re.compile(r"\.py$|\.\w+:\d+$")
_FILES = (".txt", ".json", ".yaml", ".yml")


def add_explain(command: Parser) -> None:
    command.describe(
        "Of an op: which rule it gets, where that is listed, and by which names of torch it is called.\n"
        "Of a recipe, or its file: what it does to weights, ops, gradients, state and checkpoints.\n"
        "Of a list: what the recipe or the default lists do with it in place of theirs.\n"
        "Of a file with an error: each problem of a list in text, and the first of other files, as FILE:LINE. The\n"
        "exit status is 1. Several files are held against one another, and only their problems are said: an op on\n"
        "both sides, where names of files say their sides, as bf16.txt and fp32.txt. Nothing is imported.\n"
        "Of any other text, or with --all: a table of the ops with this in their name. It has the rule of each, `-`\n"
        "where torch's own function runs, and the names that it is called by.\n"
        "Without a word: a table of the recipes that come with hmpx; with --recipe or lists, what these do.\n"
        "With --params: what a model of that size, which need not exist, takes on each rank under a recipe; without\n"
        "one, in every way to hold weights. A way to distribute that a recipe refuses has no row; a note says why.",
        "\nsoftmax\ncross_entropy --recipe hmp-o2\nnxd-standard\nnxd-standard --yaml > mine.yaml\nmine.yaml\n"
        "my_bf16.txt my_fp32.txt\npool --recipe autocast-cuda\nlean --params 7e9 --ranks 1,8,64",
    )
    command.add_argument(
        "what",
        nargs="*",
        metavar="OP|LIST|RECIPE|TEXT",
        help="an op, a list's file, a recipe's name or file, or a part of the names of ops",
    )
    command.add_argument("--all", action="store_true", help="a table of every op")
    command.add_argument("--yaml", action="store_true", help="the recipe as a file that is complete in itself")
    command.add_argument(
        "--torch", action="store_true", help="what of hmpx the installed torch switches off; status 1 if anything"
    )
    command.add_argument("--params", type=_size, metavar="N", help="bytes of a model with N parameters, 7e9 for one")
    command.add_argument(
        "--ranks", type=_counts, default=[1, 8, 64, 512], metavar="N,...", help="of --params, default 1,8,64,512"
    )
    words = "tensors the optimizer keeps, of --params, default 2"
    command.add_argument("--states", type=int, choices=range(9), default=2, help=words)
    add_recipe_options(command)
    command.set_defaults(run=_explain)


def _explain(options: argparse.Namespace) -> int:
    what = options.what
    if options.torch:
        print(features_table())
        return int(any(feature.missing for feature in FEATURES))
    if coded := next((each for each in what if _CODE.search(each)), ""):
        raise HmpxError(f"{coded}: explain reads no code; `record --recipe NAME SCRIPT` says what each line ran in")
    files = [each for each in what if Path(each).suffix in _FILES]
    if files:
        found = list(check_files(what))
        print(*found, sep="\n", end="\n" * bool(found))
        faults = sum(each.is_fault for each in found)
        if faults or len(what) > 1:
            plural = "" if faults == 1 else "s"
            print(f"{len(what)} checked, {faults} problem{plural}")
            return int(faults > 0)
    if len(what) > 1:
        more = _policy_and_more(options)
        print(*(explain_op(each, *more) for each in what), sep="\n")
        return 0
    return _explain_one(what[0] if what else "", options)


def _explain_one(what: str, options: argparse.Namespace) -> int:
    is_recipe = what in recipe_names() or Path(what).suffix in (".yaml", ".yml")
    if is_recipe and options.recipe:
        raise HmpxError(f"{what} is a recipe itself; --recipe goes with an op")
    if options.params or options.yaml:
        option = "--params counts the bytes of" if options.params else "--yaml prints"
        if what and not is_recipe:
            raise HmpxError(f"{option} a recipe, and {what} is none; see `explain`")
        name = what or options.recipe
        recipes = {name: with_options(as_recipe(name), options)} if name else {}
        if options.params:
            print(*memory_lines(recipes, options.params, options.ranks, options.states), sep="\n")
        else:
            print(recipes[name] if name else recipe_asked(options), end="")
        return 0
    if is_recipe:
        print(*recipe_lines(with_options(as_recipe(what), options)), sep="\n")
        return 0
    if Path(what).suffix in _FILES:
        side = side_of(what)
        if getattr(options, side):
            raise HmpxError(f"{what} is a {side} list, and --{side} {getattr(options, side)} is another")
        setattr(options, side, what)
        what = ""
    if not what and not options.all:
        if not (options.recipe or keys_asked(options)[0]):
            print(recipes_table())
            return 0
        recipe = recipe_asked(options)
        print(*recipe_lines(recipe), *list_lines(recipe.policy()), sep="\n")
        return 0
    policy, *more = _policy_and_more(options)
    several = "" if is_known(what, policy) else ops_table(policy, what)
    print(several or explain_op(what, policy, *more))
    return 0


def _policy_and_more(options: argparse.Namespace) -> tuple:
    """Return what `explain_op` takes behind a name."""
    recipe = recipe_asked(options)
    policy = recipe.policy()
    if policy is None:
        raise HmpxError(f"recipe {options.recipe} leaves torch's ops as they are (opt_level null)")
    return policy, choose(recipe.kernels), recipe_names(), recipe.overlays()


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


# `--params`: what a model of any size takes on each rank, computed; nothing is allocated

_WAYS = {
    "FP32 weights": Recipe(parameter_dtype="float32"),
    "stochastic or nearest": Recipe(),
    "stochastic, BF16 state": Recipe(state_dtype="bfloat16"),
    "stochastic, 8-bit state": Recipe(state_dtype="8bit"),
    "stochastic, 4-bit state": Recipe(state_dtype="4bit"),
    "split8, 8-bit state": Recipe(weights="split8", state_dtype="8bit"),
    "split": Recipe(weights="split"),
    "master": Recipe(weights="master"),
    "master, FP32 gradients": Recipe(weights="master", use_fp32_grad_acc=True),
}


def memory_lines(recipes: Mapping[str, Recipe], params: float, ranks: Sequence[int], states: int) -> Iterator[str]:
    """Yield two tables: bytes per parameter by what they are for, and GiB on each rank by how the model is distributed.

    recipes: by name; every way to hold weights where there is none. states: tensors that the optimizer keeps.
    """
    ways = recipes or _WAYS
    prints = {name: recipe.footprint(states) for name, recipe in ways.items()}
    yield f"bytes per parameter, {states} state tensors; MiB: what a step of all of it takes more, by device"
    yield from _table({name: _by_purpose(each, params) for name, each in prints.items()})
    yield ""
    yield f"GiB on each rank, {params:.3g} parameters, without activations; by number of ranks"
    yield from _table(
        {
            f"{name}, {mode}": {f"{n}": each.on_rank(params, n, mode) / 2**30 for n in ranks}
            for name, each in prints.items()
            for mode in MODES
            if mode == "fsdp2" or not ways[name].release_gradients  # see `_notes`
        }
    )
    yield from _notes(ways)
    for name in (name for name, each in prints.items() if each.copies):
        yield f"a step of {name} takes {prints[name].copies} bytes of each element of the largest parameter, or more"


def _table(figures: Mapping[str, Mapping[str, float]]) -> list[str]:
    def column(name: str) -> Field:
        return Field(f"{name:>12}", lambda row: f"{figures[row][name]:.2f}", right=True)

    columns = next(iter(figures.values()))
    return table([Field(""), *map(column, columns)], [*figures], sys.maxsize)


def _by_purpose(each: Footprint, params: float) -> dict[str, float]:
    held = {part: getattr(each, part) for part in ("weights", "gradients", "masters", "state")}
    steps = {f"{device}, MiB": each.transient(params, device) / 2**20 for device in ("cpu", "cuda")}
    return {**held, "sum": sum(held.values()), "ddp buckets": each.buckets, "FP8 codes": each.codes, **steps}


def _notes(ways: Mapping[str, Recipe]) -> Iterator[str]:
    """Say what is left out, and why: exceptions by name, and the rows of recipes that have not all of them."""
    for name, recipe in ways.items():
        if patterns := [*recipe.parameters]:
            yield (
                f"{name} is counted without its exceptions by name ({', '.join(map(repr, patterns))}), as there is no "
                "model; Recipe.bytes_per_parameter(name=...) counts them"
            )
    for name in (name for name, recipe in ways.items() if recipe.release_gradients):
        yield (
            f"{name} has no rows for {' and '.join(mode for mode in MODES if mode != 'fsdp2')}: release_gradients "
            "steps before DistributedDataParallel has reduced the gradients, so hmpx refuses the two together"
        )
