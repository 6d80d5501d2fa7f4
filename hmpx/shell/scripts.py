"""Commands that run a script: which one, and under which recipe."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections import Counter
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from typing import Any

from hmpx.ops.computing.kernels import choose
from hmpx.recipes.activate import VARIABLE
from hmpx.recipes.environment import recipe_of_environment
from hmpx.recipes.reading import as_recipe
from hmpx.recipes.recipe import DEFAULT, Recipe, changed
from hmpx.shell.options import add_recipe_options, lists_asked, says_a_policy, with_options


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
    elif says_a_policy(options):
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
    return os.environ.get("RANK", "0") == "0"


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
