"""The shell commands: ``python -m hmpx run|ops|check|explain|bench``."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path

import torch

from hmpx import __version__
from hmpx.casts.fp32_kernels import KERNELS, choose
from hmpx.casts.op_lists import LOW_DTYPES, SIDES, read_lists
from hmpx.casts.policy import OPT_LEVELS, Policy, build_policy
from hmpx.errors import HmpxError
from hmpx.insight.explain import check_files, explain_op, ops_table, recipe_in_words
from hmpx.recipes import environment, run_script
from hmpx.recipes.activate import VARIABLE
from hmpx.recipes.recipe import Recipe, read_recipe, recipe_names, with_and_without_zero


def _policy_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--list", "--bf16", metavar="FILE", help="the BF16 list as text, or YAML or JSON with several")
    command.add_argument("--fp32", metavar="FILE", help="the FP32 list as text")
    command.add_argument("--promote", metavar="FILE", help="the promote list as text")
    command.add_argument("--opt-level", choices=OPT_LEVELS, default="O1")
    _low_precision_option(command)


def _low_precision_option(command: argparse.ArgumentParser) -> None:
    command.add_argument("--low-precision", choices=LOW_DTYPES, help="what the bf16 list runs in, default bfloat16")
    command.add_argument("--kernels", choices=KERNELS, help="what computes that on a CPU, default as the recipe says")


def _policy(options: argparse.Namespace) -> Policy:
    lists = read_lists(options.list, options.fp32, options.promote)
    return build_policy(options.opt_level, lists, low_precision=LOW_DTYPES.get(options.low_precision))


def _as_asked(recipe: Recipe, options: argparse.Namespace) -> Recipe:
    """The recipe with what `--low-precision` and `--kernels` say in the place of its own."""
    if options.kernels:
        recipe = replace(recipe, kernels=options.kernels)
    asked = LOW_DTYPES.get(options.low_precision)
    return recipe if asked is None else replace(recipe, low_precision=str(asked).removeprefix("torch."))


def _ops(options: argparse.Namespace) -> int:
    print(ops_table(_policy(options), options.containing))
    return 0


def _explain(options: argparse.Namespace) -> int:
    is_recipe = options.what in recipe_names() or Path(options.what).suffix in (".yaml", ".yml")
    if is_recipe:
        print(recipe_in_words(_as_asked(read_recipe(options.what), options)))
    else:
        print(explain_op(options.what, _policy(options), choose(options.kernels or "auto")))
    return 0


def _run(options: argparse.Namespace) -> int:
    recipes, said = _recipes(options)
    environment.take_over(os.environ)
    own = {side: os.path.abspath(path) for side in SIDES if (path := getattr(options, side)) is not None}
    for side, path in own.items():
        recipes = tuple(replace(recipe, **{side: None, f"{side}_file_path": path}) for recipe in recipes)
    recipe, under_zero = (_as_asked(recipe, options) for recipe in recipes)
    if os.environ.get("RANK", "0") == "0":
        lists = "".join(f", {side} list {path}" for side, path in own.items())
        low = f", low precision {recipe.low_precision}" if options.low_precision else ""
        kernels = choose(recipe.kernels)
        low += f", {kernels}" if recipe.opt_level and kernels.widened else ""
        print(f"hmpx: {said}{lists}{low}; runs {options.script}", file=sys.stderr)
    run_script.run(recipe, options.script, options.arguments, as_module=options.as_module, under_zero=under_zero)
    return 0


def _recipes(options: argparse.Namespace) -> tuple[tuple[Recipe, Recipe], str]:
    """The one that is named, as it is and under ZeRO-1, and how it is named."""
    of_environment = environment.recipe_of(os.environ)
    named = options.recipe or os.environ.get(VARIABLE)
    if named:
        aside = " (which goes before the variables of Neuron and XLA)" if of_environment else ""
        under_zero, recipe = with_and_without_zero(named)
        return (recipe, under_zero), f"recipe {named}{aside}"
    if of_environment is None:
        raise HmpxError(f"run needs --recipe NAME or FILE; there are {', '.join(recipe_names())}")
    recipe, said = of_environment
    return (recipe, recipe), said


def _check(options: argparse.Namespace) -> int:
    problems = list(check_files(options.files))
    for problem in problems:
        print(problem)
    plural = "" if len(problems) == 1 else "s"
    print(f"{len(options.files)} checked, {len(problems)} problem{plural}")
    return 1 if problems else 0


def _device(name: str) -> torch.device:
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise HmpxError(f"device {name!r}: {str(error).splitlines()[0]}") from None


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is no count")
    return number


def _bench(options: argparse.Namespace) -> int:
    # Here, so that the other commands do not pay for torch's profiler.
    from hmpx.bench import casts, measure, rounding, step, train

    device = _device(options.device)
    if options.threads:
        torch.set_num_threads(options.threads)
    benches = {
        "rounding": lambda: rounding.run(options.elements, options.repeat, device),
        "step": lambda: step.run(options.elements, options.repeat, device),
        "casts": lambda: casts.run(options.repeat, device),
        "train": lambda: train.run(options.repeat, device, options.models, not options.eager),
    }
    bench = benches[options.what]()
    print(bench)
    if options.json:
        measure.save([bench], options.json)
    return 0


def _memory(options: argparse.Namespace) -> int:
    from hmpx.bench import measure, memory

    tables = memory.run(options.params, options.ranks, options.recipe, options.states)
    print(*tables, sep="\n\n")
    if options.json:
        measure.save(tables, options.json)
    return 0


def _check_json(path: Path | None) -> None:
    if path and not path.parent.is_dir():
        raise HmpxError(f"--json {path}: there is no folder {path.parent}")


def _counts(text: str) -> list[int]:
    return [_count(part) for part in text.split(",")]


def _size(text: str) -> float:
    number = float(text)
    if not 1 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is no number of parameters")
    return number


def _add_bench(commands: argparse._SubParsersAction) -> None:
    bench = commands.add_parser("bench", help="time and memory, side by side with the peers that are installed")
    what = bench.add_subparsers(required=True, metavar="WHAT", dest="what")

    def add(name: str, words: str) -> argparse.ArgumentParser:
        command = what.add_parser(name, help=words)
        command.add_argument("--repeat", type=_count, default=15, metavar="N", help="timed rounds, default 15")
        command.add_argument("--threads", type=_count, metavar="N", help="of torch, default as it comes")
        command.add_argument("--device", default="cpu")
        command.add_argument("--json", type=Path, metavar="FILE", help="the table as JSON too")
        command.set_defaults(run=_bench)
        return command

    for name, elements, words in (
        ("rounding", 8_400_000, "FP32 to BF16 by stochastic rounding"),
        ("step", 25_000_000, "an AdamW step in every way of holding weights"),
    ):
        command = add(name, words)
        command.add_argument("--elements", type=_count, default=elements, metavar="N", help=f"default {elements}")
    add("casts", "single ops, beside torch.autocast with the same lists")
    command = add("train", "whole models, beside torch.autocast with the same lists")
    models = ("mlp", "convnet", "transformer")
    command.add_argument("--models", nargs="+", choices=models, default=models, help="default all")
    command.add_argument("--eager", action="store_true", help="without compiled models, which take minutes")

    command = what.add_parser("memory", help="what a model takes on each rank, computed for every way to hold weights")
    command.add_argument("--params", type=_size, default=7e9, metavar="N", help="of the model, default 7e9")
    command.add_argument("--ranks", type=_counts, default=[1, 8, 64, 512], metavar="N,...", help="default 1,8,64,512")
    command.add_argument("--recipe", nargs="+", default=[], metavar="NAME", help="default: every way to hold weights")
    command.add_argument(
        "--states", type=int, choices=range(9), default=2, help="tensors the optimizer keeps, default 2"
    )
    command.add_argument("--json", type=Path, metavar="FILE", help="the tables as JSON too")
    command.set_defaults(run=_memory)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m hmpx", description="Read, check and apply precision.")
    parser.add_argument("--version", action="version", version=f"hmpx {__version__}, torch {torch.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND")

    run = commands.add_parser("run", help="run an unmodified training script under a recipe")
    run.add_argument(
        "--recipe", metavar="NAME", help=f"or a YAML file; default ${VARIABLE} or what Neuron's are set to"
    )
    for side in SIDES:
        run.add_argument(f"--{side}", metavar="FILE", help=f"the {side} list, in place of the recipe's")
    _low_precision_option(run)
    run.add_argument("-m", dest="as_module", action="store_true", help="the script is the name of a module")
    run.add_argument("script")
    run.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="the script's own")
    run.set_defaults(run=_run)

    ops = commands.add_parser("ops", help="each op that hmpx knows, its rule and its entry points")
    ops.add_argument("containing", nargs="?", default="", help="only ops with this in their name")
    _policy_options(ops)
    ops.set_defaults(run=_ops)

    check = commands.add_parser("check", help="lint op list files")
    check.add_argument("files", nargs="+", metavar="FILE")
    check.set_defaults(run=_check)

    explain = commands.add_parser(
        "explain", help="which entry points an op has, which rule, and why; what a recipe does"
    )
    explain.add_argument("what", metavar="OP|RECIPE")
    _policy_options(explain)
    explain.set_defaults(run=_explain)

    _add_bench(commands)

    options = parser.parse_args(arguments)
    if not hasattr(options, "run"):
        parser.print_help()
        return 0
    try:
        _check_json(getattr(options, "json", None))
        return options.run(options)
    except HmpxError as error:
        print(f"hmpx: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        sys.stderr.close()
        return 0


if __name__ == "__main__":
    sys.exit(main())
