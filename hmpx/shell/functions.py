"""Functions that a command line names."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hmpx.errors import HmpxError, did_you_mean
from hmpx.shell.run_script import check_is_there


def function_named(what: str) -> Callable[[], Any]:
    """Return the function that ``module:name`` or ``file.py:name`` stands for.

    Raises:
        HmpxError: no such module, file or function.
    """
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
    """Add the argument that `set_up` reads."""
    command.add_argument(
        "what",
        metavar="MODULE:FUNCTION",
        help="a module, or a Python file, and in it a function that takes no arguments",
    )


def set_up(what: str, lengths: tuple[int, ...], wanted: str) -> tuple:
    """Call the function, and return its result: a model and what goes with it; `wanted` says it in words.

    Raises:
        HmpxError: no such function, one that takes arguments, or one that returns something else.
    """
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
