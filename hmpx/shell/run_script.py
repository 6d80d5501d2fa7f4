"""``python -m hmpx run``: an unmodified script, or module, under a recipe.

The script is run as ``python script.py`` runs it: as ``__main__``, with its own folder first on the path, with its own
arguments. Processes that it spawns through `multiprocessing` go on under the recipe: they import the parent's main
module by its name, and that name is `hmpx.shell.spawned`.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import functools
import importlib.machinery
import importlib.util
import json
import os
import runpy
import sys
import traceback
import types
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict
from importlib.abc import InspectLoader
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, cast

from hmpx import converting
from hmpx.errors import HmpxError, did_you_mean
from hmpx.ops.computing.kernels import choose
from hmpx.recipes.activate import VARIABLE, activate
from hmpx.recipes.reading import as_recipe, recipe_of_environment
from hmpx.recipes.recipe import DEFAULT, Recipe, changed, noted
from hmpx.shell.options import add_recipe_options, keys_asked, lists_asked, number_in, with_options

_RUN = "HMPX_RUN"  # tells spawned processes what to run, under which recipe


def run(recipe: Recipe | None, script: str, arguments: list[str], *, as_module: bool = False) -> None:
    """Run a Python file, or a module by its name, in this process under `recipe`, which stays in force afterwards.

    Args:
        recipe: None for a script that converts itself.

    Raises:
        HmpxError: there is no such script or module, or the recipe is wrong. Whatever the script raises.
    """
    if not as_module and Path(script).is_dir():
        script = str(Path(script) / "__main__.py")
    spec = spec_of(script, as_module)
    keys = None
    if recipe is not None:
        activate(recipe)
        keys = asdict(recipe), recipe._under_zero
    os.environ[_RUN] = json.dumps({"recipe": keys, "script": script, "as_module": as_module})
    sys.argv = [(as_module and spec.origin) or script, *arguments]
    sys.path[0] = os.getcwd() if as_module else str(Path(script).resolve().parent)
    module = types.ModuleType("__main__")
    module.__file__, module.__loader__ = spec.origin, spec.loader
    module.__package__ = spec.parent if as_module else None
    module.__spec__ = importlib.util.find_spec("hmpx.shell.spawned")
    sys.modules["__main__"] = module
    code = cast(InspectLoader, spec.loader).get_code(spec.name)  # both ways to a spec see to it
    try:
        exec(cast(types.CodeType, code), vars(module))
    except ModuleNotFoundError as error:
        if error.name and error.name.partition(".")[0] == "habana_frameworks":
            said = f"{error.name} is not installed; for its hmp write: from hmpx import hmp"
            raise HmpxError(said).with_traceback(error.__traceback__) from error
        raise


def run_to_the_end(options: argparse.Namespace, recipe: Recipe | None, *, restores: bool = False) -> None:
    """Do what `run` does, and then what the interpreter does at its end, so that a report can follow.

    That prints the traceback of what the script raises, and calls what it has registered with `atexit`.

    restores: end the conversion afterwards.

    Raises:
        HmpxError: there is no such script or module, or the recipe is wrong.
        SystemExit: the script exits; with the status 1, it has raised.
    """
    left: list[functools.partial[Any]] = []
    register, unregister = atexit.register, atexit.unregister

    def keep(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
        left.append(functools.partial(function, *args, **kwargs))
        return function

    def drop(function: Callable[..., Any]) -> None:
        left[:] = [each for each in left if each.func != function]
        unregister(function)

    atexit.register, atexit.unregister = keep, drop  # type: ignore[assignment]
    try:
        run(recipe, options.script, options.arguments, as_module=options.as_module)
    except HmpxError:
        raise
    except Exception as error:
        sys.excepthook(type(error), error, error.__traceback__)
        raise SystemExit(1) from None
    finally:
        try:
            while left:
                try:
                    left.pop()()
                except Exception:
                    traceback.print_exc()
        finally:
            atexit.register, atexit.unregister = register, unregister
            if restores:
                converting.restore()


def spec_of(script: str, as_module: bool) -> importlib.machinery.ModuleSpec:
    """Return how to load a script or a module.

    Raises:
        HmpxError: there is none.
    """
    if as_module:
        return _spec_of_module(script)
    path = Path(script) / "__main__.py" if Path(script).is_dir() else Path(script)
    check_is_there(path, "script")
    loader = importlib.machinery.SourceFileLoader("__main__", str(path))
    spec = importlib.util.spec_from_file_location("__main__", path, loader=loader)
    assert spec is not None, "a loader is given"
    return spec


def spawned(name: str) -> dict[str, Any]:
    """Return the main module's globals, under the name `name`, in a process that a script under `run` has spawned."""
    running = json.loads(os.environ[_RUN])
    if running["recipe"]:
        keys, under_zero = running["recipe"]
        activate(noted(as_recipe(keys), {}, under_zero))
    start = runpy.run_module if running["as_module"] else runpy.run_path
    return start(running["script"], run_name=name)


def check_is_there(path: Path, what: str) -> None:
    """Check that a Python file exists.

    Raises:
        HmpxError: it does not; with the name that was probably meant.
    """
    if not path.is_file():
        beside = [each.name for each in path.parent.glob("*.py")] if path.parent.is_dir() else []
        raise HmpxError(f"{path}: no such {what}{did_you_mean(path.name, beside)}")


def _spec_of_module(name: str) -> importlib.machinery.ModuleSpec:
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
        return None
    recipe = with_options(recipe, options)
    if options.verbose:
        recipe = changed(recipe, verbose=True)
    if is_first_rank():
        asked = [f"{side} list {path}" for side, path in lists_asked(options).items()]
        asked += [f"opt level {options.opt_level}"] if options.opt_level else []
        asked += [f"low precision {recipe.low_precision}"] if options.low_precision else []
        asked += options.set
        policy, kernels = recipe.policy(), choose(recipe.kernels)
        asked += [str(kernels)] if policy is not None and policy.low_precision in kernels.widened else []
        print(f"hmpx: {', '.join([said, *asked])}; runs {options.script}", file=sys.stderr)
    return recipe


def is_first_rank() -> bool:
    """Return whether this process speaks for all processes that torchrun has started."""
    return number_in("RANK", 0) == 0


@contextlib.contextmanager
def started_processes() -> Iterator[Counter[str]]:
    """Count the Python processes that a script starts inside, which nobody looks at: by their function or command."""
    found: Counter[str] = Counter()
    start, inside = BaseProcess.start, True

    def counted(process: BaseProcess) -> None:
        target = getattr(process, "_target", None)
        if not str(getattr(target, "__module__", "")).startswith("torch.utils.data."):  # DataLoader's own workers
            found[str(getattr(target, "__name__", type(process).__name__))] += 1
        start(process)

    def heard(event: str, values: tuple[Any, ...]) -> None:
        # The hook stays, as audit hooks do, until this process ends.
        if inside and event == "subprocess.Popen" and _is_python(values[0]):
            found[os.path.basename(os.fsdecode(values[0]))] += 1

    sys.addaudithook(heard)
    BaseProcess.start = counted  # type: ignore[method-assign, assignment]
    try:
        yield found
    finally:
        BaseProcess.start, inside = start, False  # type: ignore[method-assign]


def _is_python(command: Any) -> bool:
    name = os.path.basename(os.fsdecode(command)) if isinstance(command, str | bytes | os.PathLike) else ""
    return name.startswith(("python", "torchrun", "accelerate")) or command == sys.executable
