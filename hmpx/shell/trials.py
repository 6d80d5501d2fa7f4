"""`compare MODULE:FUNCTION` and `tune MODULE:FUNCTION`: `hmpx.compare` and `hmpx.tune` from the shell."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import inspect
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hmpx.errors import HmpxError, did_you_mean
from hmpx.insight.trials.compare import compare
from hmpx.insight.trials.search import LOWS
from hmpx.insight.trials.tune import tune
from hmpx.ops.policies.lists import SIDES
from hmpx.shell.main import Parser
from hmpx.shell.options import add_force, add_recipe_options, check_outputs, note_run, outputs_asked, recipe_asked
from hmpx.shell.run_script import check_is_there


def add_compare(command: Parser) -> None:
    command.describe(
        "Call a function without arguments that returns (model, batches, loss), as hmpx.compare\n"
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


def add_tune(command: Parser) -> None:
    command.describe(
        "Call a function without arguments that returns (model, batches, loss), or (model, batches, loss, held_out),\n"
        "as hmpx.tune takes them, and write bf16.txt, fp32.txt, promote.txt and recipe.yaml, with what was measured\n"
        "in tuned.json and tuned.html. The exit status is 1 if the tolerance is not met.",
        "train.py:setup --out tuned\npackage.train:setup --tolerance 0.05",
    )
    add_function(command)
    command.add_argument("--out", default="tuned", metavar="FOLDER", help="where the files go, default tuned")
    command.add_argument("--low", choices=LOWS, default="bf16", help="what is chosen, beside FP32 or beside BF16")
    command.add_argument(
        "--tolerance", type=float, default=0.1, help="gradient error in units of the noise between batches, default 0.1"
    )
    add_force(command)
    command.add_argument("--quiet", action="store_true", help="show no progress")
    add_recipe_options(command)
    command.set_defaults(run=_tune)


def _compare(options: argparse.Namespace) -> int:
    outputs = outputs_asked(options, "json", "html")
    recipe = recipe_asked(options)
    note_run(options, options.what, options.recipe or "the default lists")
    found = compare(*set_up(options.what, (3,), "(model, batches, loss)"), lists=recipe, scores=options.scores)
    print(found)
    for kind, path in outputs.items():
        getattr(found, kind)(path)
    return 1 if found.is_broken else 2 * math.isnan(found.gradient_error)  # 2: not measured


def _tune(options: argparse.Namespace) -> int:
    folder = Path(options.out)
    if folder.exists() and not folder.is_dir():
        raise HmpxError(f"--out {options.out} is no folder")
    if folder.is_dir():
        names = *(f"{side}.txt" for side in SIDES), "tuned.json", "tuned.html", "recipe.yaml"
        check_outputs(options, {f"out {name}": folder / name for name in names})
    recipe = recipe_asked(options)
    note_run(options, options.what, options.recipe or "the default lists")
    model, batches, loss, *held_out = set_up(options.what, (3, 4), "(model, batches, loss), or these and held_out")
    asked: dict[str, Any] = {key: getattr(options, key) for key in ("low", "tolerance")}
    folder.mkdir(parents=True, exist_ok=True)
    try:
        held = held_out[0] if held_out else None
        tuned = tune(model, batches, loss, held_out=held, lists=recipe, progress=not options.quiet, **asked)
    except KeyboardInterrupt:
        print("hmpx: interrupted; nothing was written, and a later call begins anew", file=sys.stderr)
        return 130
    print(tuned)
    tuned.save(folder)
    print(f"hmpx: wrote {folder}: {', '.join(sorted(path.name for path in folder.iterdir()))}")
    print(f"next: python -m hmpx run --recipe {folder / 'recipe.yaml'} train.py")
    return 0 if tuned.met else 1


# The function that a command line names


def function_named(what: str) -> Callable[[], Any]:
    """Return the function that ``module:name`` or ``file.py:name`` stands for."""
    module_name, colon, name = what.rpartition(":")
    if not colon or not name.isidentifier():
        raise HmpxError(
            f"{what!r} names no function: write FILE.py:FUNCTION or MODULE:FUNCTION; the function makes what is needed "
            "and returns it (--help says what), so a script that trains when it is imported is to be split"
        )
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
    check_is_there(path, "file")
    sys.path.insert(0, str(path.resolve().parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise HmpxError(f"{file}: no Python file; its name ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    own, sys.argv = sys.argv, [file]  # of this command line nothing is the file's
    try:
        spec.loader.exec_module(module)
    finally:
        sys.argv = own
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


def add_function(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "what",
        metavar="MODULE:FUNCTION",
        help="a module, or a Python file, and in it a function that takes no arguments",
    )


def set_up(what: str, lengths: tuple[int, ...], wanted: str) -> tuple:
    """Call the function, and return its result: a model and what goes with it; `wanted` says it in words."""
    function = function_named(what)
    if isinstance(function, torch.nn.Module):
        raise HmpxError(
            f"{what} is a model, a {type(function).__name__}; name a function without arguments that returns it and "
            "what goes with it"
        )
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise HmpxError(f"{what} is called without arguments, and wants some: {error}") from None
    except ValueError:  # it has no signature to look at
        pass
    given = function()
    if isinstance(given, tuple) and len(given) in lengths and isinstance(given[0], torch.nn.Module):
        return given
    kinds = [type(each).__name__ for each in given] if isinstance(given, tuple) else []
    found = f"({', '.join(kinds)})" if kinds else f"a {type(given).__name__}"
    raise HmpxError(f"{what} must return {wanted}, not {found}")
