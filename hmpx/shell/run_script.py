"""``python -m hmpx run``: an unmodified script, or module, under a recipe.

The script is run as ``python script.py`` runs it: as ``__main__``, with its own folder first on the path, with its own
arguments. Processes that it spawns through `multiprocessing` go on under the recipe (`hmpx.shell.processes`).
"""

from __future__ import annotations

import argparse
import atexit
import builtins
import functools
import gc
import importlib.machinery
import importlib.util
import json
import os
import runpy
import shlex
import sys
import threading
import traceback
import types
import zipfile
from collections.abc import Callable
from dataclasses import asdict
from importlib.abc import InspectLoader
from pathlib import Path
from typing import Any, cast

import torch

from hmpx import conversion
from hmpx.base.changes import Attribute, Changes
from hmpx.base.compiling import never_compile
from hmpx.errors import HmpxError, did_you_mean
from hmpx.ops.computing.kernels import choose
from hmpx.recipes.activate import VARIABLE, activate
from hmpx.recipes.reading import as_recipe, recipe_names, recipe_of_environment
from hmpx.recipes.recipe import DEFAULT, Recipe, changed, noted
from hmpx.shell.main import Parser
from hmpx.shell.options import add_recipe_options, keys_asked, note_run, number_in, with_options
from hmpx.shell.processes import Running, hand_on, started_processes

_RUN = "HMPX_RUN"  # tells spawned processes what to run, under which recipe


def run(recipe: Recipe | None, script: str, arguments: list[str], *, as_module: bool = False) -> None:
    """Run a Python file, or a module by its name, in this process under `recipe`, which stays in force afterwards.

    Args:
        recipe: None for a script that converts itself.

    Raises:
        HmpxError: there is no such script or module, or the recipe is wrong. Whatever the script raises.
    """
    spec = spec_of(script, as_module)
    is_file = not as_module and not _is_archive(script)
    keys = None
    if recipe is not None:
        keys = asdict(activate(recipe).recipe), recipe._under_zero
    again = os.path.abspath(script) if is_file else "" if spec.name.endswith("__main__") else spec.name
    os.environ[_RUN] = json.dumps({"recipe": keys, "script": again, "as_module": as_module})
    sys.argv = [(as_module and spec.origin) or script, *arguments]
    folder = os.getcwd() if as_module else os.path.dirname(os.path.realpath(script))
    if not (is_file or as_module):
        sys.path[: not _is_safe_path()] = [os.path.abspath(script)]  # of which -P says nothing
    elif not _is_safe_path():
        sys.path[0] = folder
    loader = cast(InspectLoader, spec.loader)  # both ways to a spec see to it
    module = types.ModuleType("__main__")
    vars(module).update(__builtins__=builtins, __file__=spec.origin, __loader__=loader, __cached__=None)
    if is_file:  # Python keeps no code of it beside it
        module.__package__ = module.__spec__ = None
        code = cast(Any, loader).source_to_code(cast(Any, loader).get_data(spec.origin), script)
    else:
        module.__package__, module.__spec__ = spec.parent, spec
        vars(module).update(__cached__=spec.cached)
        code = cast(types.CodeType, loader.get_code(spec.name))
    sys.modules["__main__"] = module
    try:
        exec(code, vars(module))
    except ModuleNotFoundError as error:
        if error.name and error.name.partition(".")[0] == "habana_frameworks":
            said = f"{error.name} is not installed; for its hmp write: from hmpx import hmp"
            raise HmpxError(said).with_traceback(error.__traceback__) from error
        raise


def run_to_the_end(
    options: argparse.Namespace,
    recipe: Recipe | None,
    *,
    restores: bool = False,
    waits: Callable[[], bool] = lambda: True,
    leaves: Callable[[int], int] = lambda status: status,
) -> None:
    """Do what `run` does, and then what the interpreter does at its end, so that a report can follow.

    That prints the traceback of what the script raises, waits for its threads, and calls what it has registered with
    `atexit`.

    restores: end the conversion afterwards. waits: whether threads are waited for. leaves: what is done before
    ``os._exit``, with its status; it returns the status.

    Raises:
        HmpxError: there is no such script or module, or the recipe is wrong.
        SystemExit: the script exits; with the status 1, it has raised.
    """
    left: list[functools.partial[Any]] = []
    register, unregister, leave, here = atexit.register, atexit.unregister, os._exit, os.getpid()

    def keep(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
        left.append(functools.partial(function, *args, **kwargs))
        return function

    def drop(function: Callable[..., Any]) -> None:
        left[:] = [each for each in left if each.func != function]
        unregister(function)

    def exit_at_once(status: int) -> None:  # without `finally` blocks, and without an end of this function
        leave(leaves(status) if os.getpid() == here else status)

    atexit.register, atexit.unregister = keep, drop  # type: ignore[assignment]
    os._exit = exit_at_once  # type: ignore[assignment]
    try:
        run(recipe, options.script, options.arguments, as_module=options.as_module)
    except HmpxError:
        raise
    except Exception as error:
        sys.excepthook(type(error), error, error.__traceback__)
        raise SystemExit(1) from None
    finally:
        try:
            if waits():
                _wait_for_threads()
            while left:
                try:
                    left.pop()()
                except SystemExit:
                    pass
                except Exception:
                    traceback.print_exc()
        finally:
            atexit.register, atexit.unregister, os._exit = register, unregister, leave
            if restores:
                conversion.restore()


def _wait_for_threads() -> None:
    """Wait for the threads that Python waits for, which the threads of a pool learn from `threading` itself."""
    while others := [each for each in threading.enumerate() if not (each.daemon or each is threading.current_thread())]:
        for tell in reversed(getattr(threading, "_threading_atexits", ())):
            tell()
        for each in others:
            each.join()


def running(options: argparse.Namespace) -> Running:
    """Return what a command runs, and the words that have started it in this process."""
    number, spec = len(options.arguments), spec_of(options.script, options.as_module)
    words = sys.orig_argv[: len(sys.orig_argv) - number]
    known = words[-1:] == [options.script] and sys.orig_argv[len(words) :] == options.arguments
    modules = (options.script, spec.name) if options.as_module else ()
    file = "" if options.as_module else os.path.abspath(options.script)
    return Running(words if known else (), file, modules, os.path.realpath(os.getcwd()))


def spec_of(script: str, as_module: bool) -> importlib.machinery.ModuleSpec:
    if as_module:
        return _spec_of_module(script)
    path = Path(script)
    check_is_there(path / "__main__.py" if path.is_dir() else path, "script")
    if _is_archive(script):
        found = importlib.machinery.PathFinder.find_spec("__main__", [os.path.abspath(script)])
        if found is None:
            raise HmpxError(f"{script}: has no __main__")
        return found
    loader = importlib.machinery.SourceFileLoader("__main__", str(path.absolute()))  # a script may leave this folder
    spec = importlib.util.spec_from_file_location("__main__", path, loader=loader)
    assert spec is not None, "a loader is given"
    return spec


def spawned(name: str) -> dict[str, Any]:
    """Return the main module's globals, under the name `name`, in a process that a script under `run` has spawned."""
    known = json.loads(os.environ[_RUN])
    hand_on()
    if known["recipe"]:
        keys, under_zero = known["recipe"]
        activate(noted(as_recipe(keys), {}, under_zero))
    if not known["script"]:  # a package's `__main__`, which a child does not run again
        return {}
    if known["as_module"]:
        return runpy.run_module(known["script"], run_name=name, alter_sys=True)
    return runpy.run_path(known["script"], run_name=name)


def check_is_there(path: Path, what: str) -> None:
    """Check that a Python file exists, or raise an HmpxError with the name that was probably meant."""
    if not path.is_file():
        beside = [each.name for each in path.parent.glob("*.py")] if path.parent.is_dir() else []
        raise HmpxError(f"{path}: no such {what}{did_you_mean(path.name, beside)}")


def _is_archive(script: str) -> bool:
    """Return whether Python looks for a `__main__` in it."""
    return os.path.isdir(script) or zipfile.is_zipfile(script)


def _is_safe_path() -> bool:
    """Return whether Python has put no folder of a script before its path (``-P``, ``-I``, PYTHONSAFEPATH)."""
    return bool(getattr(sys.flags, "safe_path", sys.flags.isolated))


def _spec_of_module(name: str) -> importlib.machinery.ModuleSpec:
    if not _is_safe_path():
        sys.path[0] = os.getcwd()
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except (ImportError, ValueError):
        spec = None
    if spec is None or not hasattr(spec.loader, "get_code"):
        raise HmpxError(f"-m {name}: no such module")
    return spec


# The commands that run a script: which one, and under which recipe


def add_run(command: Parser) -> None:
    command.describe(
        "Run a script as `python SCRIPT ARGUMENTS` does, with its ops, its models and its optimizers under a recipe.\n"
        "Without --recipe, HMPX_RECIPE names it, or else the variables of Neuron and PyTorch/XLA.\n"
        "Lists alone lie over the default ones, with FP32 weights.",
        "--recipe neuron-bf16-sr train.py --steps 500\n--recipe lean --set seed=3 --bf16 mine.txt -m package.train\n"
        "--list mine.txt train.py",
    )
    add_script(command, "the one that the environment names")
    command.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    recipe = recipe_to_run(options)
    if recipe is None:
        names = ", ".join(recipe_names())
        lists = "or lists (--list FILE --fp32 FILE)"
        raise HmpxError(f"run needs --recipe NAME or FILE, {lists}, before {options.script}; there are {names}")
    told = set[str]()

    def tell(said: str) -> None:
        if said not in told:
            told.add(said)
            print(f"hmpx: {said}", file=sys.stderr, flush=True)

    def started(words: str) -> None:
        tell(f"the recipe does not hold in a process that the script starts: {words}")

    def replaced(words: str) -> None:
        if words:
            tell(f"the recipe ends here, since the script goes on as another program: {words}")

    with started_processes(running(options), started, replaced), Changes() as changes:
        if recipe.parameter_dtype == "bfloat16" and is_first_rank():
            _tell_without_optimizer(tell, changes)
        run(recipe, options.script, options.arguments, as_module=options.as_module)
    return 0


def _tell_without_optimizer(tell: Callable[[str], object], changes: Changes) -> None:
    """Say in the first backward pass that there is no optimizer of torch: with Keras, or where weights move by hand."""
    backward = torch.autograd.backward

    @never_compile
    @functools.wraps(backward)
    def first(*args: Any, **kwargs: Any) -> None:
        if torch.autograd.backward is first:
            changes.close()
            if not any(issubclass(type(each), torch.optim.Optimizer) for each in gc.get_objects()):
                tell(
                    "the recipe holds for ops alone: its weights and steps are those of a torch.optim.Optimizer, and "
                    "there is none in the first backward pass"
                )
        backward(*args, **kwargs)

    changes.put(Attribute(torch.autograd, "backward", "torch.autograd.backward"), first)


def add_script(command: argparse.ArgumentParser, default: str) -> argparse.Action:
    """Add the options of a recipe, and the script, which is returned, with its own arguments.

    default: what is done without --recipe.
    """
    add_recipe_options(command, default)
    command.add_argument("--verbose", action="store_true", help="log each decision about an op once, with its line")
    command.add_argument("-m", dest="as_module", action="store_true", help="SCRIPT is the name of a module")
    script = command.add_argument(
        "script", metavar="SCRIPT", help="a Python file, a folder with a __main__.py, or a module's name"
    )
    # What follows the script is the script's own, and may be nothing.
    own = command.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="its own arguments")
    own.required = False
    return script


def words_of(options: argparse.Namespace) -> str:
    """Return the script, or the module, with its arguments, as a command line has them."""
    return shlex.join([*(["-m"] if options.as_module else []), options.script, *options.arguments])


def recipe_to_run(options: argparse.Namespace) -> Recipe | None:
    """Return the recipe to run a script under, and announce it.

    Lists without a recipe lie over the default lists, with FP32 weights. None where neither the options nor the
    environment say anything.
    """
    of_environment = recipe_of_environment()
    named = options.recipe or os.environ.get(VARIABLE)
    if named:
        aside = " (which goes before the variables of Neuron and XLA)" if of_environment else ""
        recipe, said = as_recipe(named), f"recipe {named}{aside}"
    elif of_environment is not None:
        recipe, said = of_environment
    elif keys_asked(options)[0]:
        recipe, said = DEFAULT, "the default lists, FP32 weights"
    else:
        note_run(options, words_of(options), "none")
        return None
    recipe = with_options(recipe, options)
    if options.verbose:
        recipe = changed(recipe, verbose=True)
    asked = note_run(options, words_of(options), said, recipe.low_precision)
    if is_first_rank():
        policy, kernels = recipe.policy(), choose(recipe.kernels)
        asked += [str(kernels)] if policy is not None and policy.low_precision in kernels.widened else []
        print(f"hmpx: {', '.join([said, *asked])}; runs {options.script}", file=sys.stderr)
    return recipe


def is_first_rank() -> bool:
    """Return whether this process speaks for all processes that torchrun has started."""
    return number_in("RANK", 0) == 0
