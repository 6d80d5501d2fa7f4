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


def function_named(what: str) -> Callable[[], Any]:
    """The function that ``module:name`` or ``file.py:name`` stands for.

    Raises:
        HmpxError: no such module, file or function.
    """
    module_name, colon, name = what.rpartition(":")
    if not colon or not name.isidentifier():
        raise HmpxError(
            f"a function is given as MODULE:FUNCTION, train.py:one_step or package.models:build, not {what!r}"
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


def _result_of(what: str) -> Any:
    """What the function that ``module:name`` stands for returns, called without arguments.

    Raises:
        HmpxError: no such function, or one that takes arguments.
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
    return function()


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


def add_function(command: argparse.ArgumentParser) -> None:
    """The argument that `set_up` reads."""
    command.add_argument(
        "what",
        metavar="MODULE:FUNCTION",
        help="a module, or a Python file, and in it a function that takes no arguments",
    )


def set_up(what: str, lengths: tuple[int, ...], wanted: str) -> tuple:
    """What the function returns, which is a model and what goes with it; `wanted` says it in words.

    Raises:
        HmpxError: it returns something else.
    """
    given = _result_of(what)
    if not isinstance(given, tuple) or len(given) not in lengths or not isinstance(given[0], torch.nn.Module):
        raise HmpxError(f"{what} must return {wanted}, not {_kind(given)}")
    return given


def _kind(given: object) -> str:
    kinds = [type(each).__name__ for each in given] if isinstance(given, tuple) else []
    return f"({', '.join(kinds)})" if kinds else f"a {type(given).__name__}"
