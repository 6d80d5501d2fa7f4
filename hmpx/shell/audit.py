"""`audit MODULE:FUNCTION`: `hmpx.audit` of a model, or of a whole function, from the shell."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable
from typing import Any

import torch

from hmpx.conversion import installed
from hmpx.errors import HmpxError
from hmpx.insight.audit import Audit, audit
from hmpx.recipes.activate import activate
from hmpx.recipes.module_patterns import check_names, rules_for
from hmpx.recipes.prepare import cast_model
from hmpx.recipes.recipe import Recipe
from hmpx.shell.functions import function_named
from hmpx.shell.options import add_recipe_options, recipe_asked


def add(add_command: Callable[..., argparse.ArgumentParser]) -> None:
    command = add_command(
        "audit",
        "run a function once and say which listed ops ran in another precision",
        "Call a function without arguments and say which listed ops ran in another dtype than their list says, each\n"
        "with the line of your code. What counts is what the function does, a training step say; where it returns a\n"
        "model and its inputs, the model is run on these. The exit status is 1 if something is found.",
        "train.py:one_step --recipe neuron-bf16-sr\npackage.models:small_model --list mine.txt",
    )
    command.add_argument(
        "what",
        metavar="MODULE:FUNCTION",
        help="a module, or a Python file, and in it a function that takes no arguments",
    )
    add_recipe_options(command)
    command.set_defaults(run=_audit)


def _audit(options: argparse.Namespace) -> int:
    function = function_named(options.what)
    recipe = recipe_asked(options)
    if recipe.opt_level is None:
        raise HmpxError(f"recipe {options.recipe} leaves torch's ops as they are (opt_level null)")
    with activate(recipe):
        found = _found(function, recipe)
    print(found)
    return 1 if found else 0


def _found(function: Callable[[], Any], recipe: Recipe) -> Audit:
    held: list[Any] = []
    found = audit(lambda: held.append(function()))
    match held[0]:
        case (torch.nn.Module() as model, inputs):
            with recipe.naming_lines(), contextlib.ExitStack() as undo:
                check_names([model], recipe)
                rules = rules_for([model], recipe)
                cast_model(model, recipe, undo)
                undo.pop_all()
            conversion = installed()
            if conversion is not None:
                conversion.add_rules(rules)
            return audit(model, inputs)
        case torch.nn.Module() as model:
            name = type(model).__name__
            raise HmpxError(f"the function returned a {name} alone: return (model, inputs), or call the model in it")
    return found
