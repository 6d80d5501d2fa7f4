"""`tune MODULE:FUNCTION`: `hmpx.tune` from the shell."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hmpx.errors import HmpxError
from hmpx.insight.tuning.tune import tune
from hmpx.insight.tuning.worth import LOWS
from hmpx.ops.policies.lists import SIDES
from hmpx.shell.functions import add_function, set_up
from hmpx.shell.options import add_recipe_options, recipe_asked
from hmpx.shell.outputs import add_force, check_outputs


def add(add_command: Callable[..., argparse.ArgumentParser]) -> None:
    command = add_command(
        "tune",
        "find the op lists of a model, and write them",
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


def _tune(options: argparse.Namespace) -> int:
    folder = Path(options.out)
    if folder.exists() and not folder.is_dir():
        raise HmpxError(f"--out {options.out} is no folder")
    if folder.is_dir():
        names = *(f"{side}.txt" for side in SIDES), "tuned.json", "tuned.html", "recipe.yaml"
        check_outputs(options, {f"out {name}": folder / name for name in names})
    recipe = recipe_asked(options)
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
