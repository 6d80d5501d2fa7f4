"""`audit MODULE:FUNCTION`: `hmpx.audit` of a model, or of a whole function, from the shell."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hmpx.errors import HmpxError, did_you_mean
from hmpx.insight.audit import Audit, audit
from hmpx.recipes.activate import activate
from hmpx.recipes.prepare import cast_model, check_names
from hmpx.recipes.recipe import Recipe
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
    function = _function(options.what)
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
                cast_model(model, recipe, undo)
                undo.pop_all()
            return audit(model, inputs)
        case torch.nn.Module() as model:
            name = type(model).__name__
            raise HmpxError(f"the function returned a {name} alone: return (model, inputs), or call the model in it")
    return found


def _function(what: str) -> Callable[[], Any]:
    """The function that ``module:name`` or ``file.py:name`` stands for.

    Raises:
        HmpxError: no such module, file or function.
    """
    module_name, colon, name = what.rpartition(":")
    if not colon or not name.isidentifier():
        raise HmpxError(f"audit takes MODULE:FUNCTION, as in train.py:one_step or package.models:build, not {what!r}")
    sys.path.insert(0, os.getcwd())
    module = _from_file(module_name) if module_name.endswith(".py") else _by_name(module_name)
    function = getattr(module, name, None)
    if function is None:
        own = [each for each, value in vars(module).items() if callable(value) and not each.startswith("_")]
        raise HmpxError(f"{module_name} has no {name!r}{did_you_mean(name, own)}")
    if not callable(function):
        raise HmpxError(f"{what} is no function but a {type(function).__name__}")
    return function


def _from_file(file: str) -> Any:
    path = Path(file)
    if not path.is_file():
        beside = [each.name for each in path.parent.glob("*.py")] if path.parent.is_dir() else []
        raise HmpxError(f"{file}: no such file{did_you_mean(path.name, beside)}")
    sys.path.insert(0, str(path.resolve().parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise HmpxError(f"{file}: no Python file; its name ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _by_name(name: str) -> Any:
    try:
        found = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        found = None
    if found is None:
        hint = f"; for a file, write {name}.py" if Path(f"{name}.py").is_file() else ""
        raise HmpxError(f"there is no module {name!r} to import{hint}")
    return importlib.import_module(name)
