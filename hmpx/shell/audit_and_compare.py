"""`audit MODULE:FUNCTION` and `compare MODULE:FUNCTION`: `hmpx.audit` and `hmpx.compare` from the shell."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hmpx.conversion import installed
from hmpx.errors import HmpxError
from hmpx.insight.audit import Audit, audit
from hmpx.insight.comparing.compare import compare
from hmpx.recipes.activate import activate
from hmpx.recipes.module_patterns import check_names, rules_for
from hmpx.recipes.prepare import cast_model
from hmpx.recipes.recipe import Recipe
from hmpx.shell.functions import add_function, function_named, set_up
from hmpx.shell.options import add_recipe_options, recipe_asked
from hmpx.shell.outputs import add_force, check_outputs


def add_audit(add_command: Callable[..., argparse.ArgumentParser]) -> None:
    command = add_command(
        "audit",
        "run a function once and say which listed ops ran in another precision",
        "Call a function without arguments and say which listed ops ran in another dtype than their list says, each\n"
        "with the line of your code. What counts is what the function does, a training step say; where it returns a\n"
        "model and its inputs, the model is run on these. The exit status is 1 if something is found.",
        "train.py:one_step --recipe neuron-bf16-sr\npackage.models:small_model --list mine.txt",
    )
    add_function(command)
    add_recipe_options(command)
    command.set_defaults(run=_audit)


def add_compare(add_command: Callable[..., argparse.ArgumentParser]) -> None:
    command = add_command(
        "compare",
        "compare the training under op lists with FP32 and say which ops are to blame",
        "Call a function without arguments that returns (model, batches, loss), or (model, batches), as hmpx.compare\n"
        "takes them: batches is a list of tuples, loss(model, *batch) a scalar, or that and log-probs. Each batch\n"
        "runs in FP32 and under the lists. Where these break the training, the least is found that must be in FP32.\n"
        "The exit status is 1 if the lists change the training, or make something inf or NaN.",
        "train.py:setup --recipe neuron-bf16-sr\ntrain.py:setup --list mine.txt --html found.html",
    )
    add_function(command)
    command.add_argument("--scores", action="store_true", help="run each list name alone, of healthy lists too")
    command.add_argument("--json", metavar="FILE", help="save everything as JSON, too")
    command.add_argument("--html", metavar="FILE", help="save a page, too")
    add_force(command)
    add_recipe_options(command)
    command.set_defaults(run=_compare)


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


def _compare(options: argparse.Namespace) -> int:
    outputs = {kind: Path(path) for kind in ("json", "html") if (path := getattr(options, kind))}
    check_outputs(options, outputs)
    recipe = recipe_asked(options)
    given = set_up(options.what, (2, 3), "(model, batches, loss) or (model, batches)")
    found = compare(*given, lists=recipe, scores=options.scores)
    print(found)
    for kind, path in outputs.items():
        getattr(found, kind)(path)
    return 1 if found.is_broken else 0
