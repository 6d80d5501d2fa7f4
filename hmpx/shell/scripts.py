"""Commands that run a script: which one, and under which recipe."""

from __future__ import annotations

import argparse
import os
import sys

from hmpx.ops.fp32_kernels import choose
from hmpx.recipes import environment
from hmpx.recipes.recipe import Recipe, changed, with_and_without_zero
from hmpx.shell.options import (
    add_recipe_options,
    lists_asked,
    name_from_environment,
    recipe_asked,
    says_a_policy,
    with_options,
)


def add_script(command: argparse.ArgumentParser, default: str) -> None:
    """The options of a recipe, and the script with its own arguments. default: what is done without --recipe."""
    add_recipe_options(command, default)
    command.add_argument("--verbose", action="store_true", help="log each decision about an op once, with its line")
    command.add_argument("-m", dest="as_module", action="store_true", help="SCRIPT is the name of a module")
    command.add_argument(
        "script", metavar="SCRIPT", help="a Python file, a folder with a __main__.py, or a module's name"
    )
    # What follows the script is the script's own, and may be nothing.
    own = command.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="its own arguments")
    own.required = False


def recipes_asked(options: argparse.Namespace, lists_alone: bool = False) -> tuple[Recipe, Recipe] | None:
    """The recipe to run a script under, and the one for optimizers under ZeRO-1, which is announced.

    None where neither the options nor the environment name one. lists_alone: lists without a recipe are the default
    one with these lists.
    """
    of_environment = environment.recipe_of(os.environ)
    named = options.recipe or name_from_environment()
    if named:
        aside = " (which goes before the variables of Neuron and XLA)" if of_environment else ""
        under_zero, recipe = with_and_without_zero(named)
        said = f"recipe {named}{aside}"
    elif of_environment is not None:
        recipe, said = of_environment
        under_zero = recipe
    elif lists_alone and says_a_policy(options):
        recipe = under_zero = recipe_asked(options)
        said = "weights as they are"
    else:
        return None
    environment.take_over(os.environ)
    recipe, under_zero = (with_options(each, options) for each in (recipe, under_zero))
    if options.verbose:
        recipe, under_zero = (changed(each, verbose=True) for each in (recipe, under_zero))
    if is_first_rank():
        asked = [f"{side} list {path}" for side, path in lists_asked(options).items()]
        asked += [f"opt level {options.opt_level}"] if options.opt_level else []
        asked += [f"low precision {recipe.low_precision}"] if options.low_precision else []
        policy, kernels = recipe.policy(), choose(recipe.kernels)
        asked += [str(kernels)] if policy is not None and policy.low_precision in kernels.widened else []
        print(f"hmpx: {', '.join([said, *asked])}; runs {options.script}", file=sys.stderr)
    return recipe, under_zero


def is_first_rank() -> bool:
    """Whether this is the process that speaks for all, of those that torchrun has started."""
    return os.environ.get("RANK", "0") == "0"
