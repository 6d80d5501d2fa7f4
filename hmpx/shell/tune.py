"""`tune MODULE:FUNCTION`: `hmpx.tune` from the shell."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from hmpx.errors import HmpxError
from hmpx.insight.tuning.tune import tune
from hmpx.insight.tuning.worth import OBJECTIVES
from hmpx.shell.functions import add_function, set_up
from hmpx.shell.options import add_recipe_options, recipe_asked

_MEASURED = "measured.pt"  # what a later call goes on from


def add(add_command: Callable[..., argparse.ArgumentParser]) -> None:
    command = add_command(
        "tune",
        "find the op lists of a model, and write them",
        "Call a function without arguments that returns (model, batches, loss), or (model, batches, loss, held_out),\n"
        "as hmpx.tune takes them, and write bf16.txt, fp32.txt, promote.txt and recipe.yaml, with what was measured\n"
        "in tuned.json, tuned.html and tuned.svg. Interrupted, it goes on from measured.pt the next time. The exit\n"
        "status is 1 if the tolerance is not met.",
        "train.py:setup --out tuned\npackage.train:setup --objective coverage --tolerance 0.05",
    )
    add_function(command)
    command.add_argument("--out", default="tuned", metavar="FOLDER", help="where the files go, default tuned")
    command.add_argument(
        "--objective", choices=OBJECTIVES, default="speed", help="what BF16 is to bring, default speed"
    )
    command.add_argument(
        "--tolerance", type=float, default=0.1, help="gradient error in units of the noise between batches, default 0.1"
    )
    command.add_argument("--seed", type=int, default=0, help="default 0")
    command.add_argument("--afresh", action="store_true", help="measure again what measured.pt has")
    command.add_argument("--quiet", action="store_true", help="show no progress")
    add_recipe_options(command)
    command.set_defaults(run=_tune)


def _tune(options: argparse.Namespace) -> int:
    recipe = recipe_asked(options)
    given = set_up(options.what, (3, 4), "(model, batches, loss), or these and held_out")
    folder = Path(options.out)
    if folder.exists() and not folder.is_dir():
        raise HmpxError(f"--out {options.out} is no folder")
    folder.mkdir(parents=True, exist_ok=True)
    measured = folder / _MEASURED
    if options.afresh:
        measured.unlink(missing_ok=True)
    try:
        tuned = tune(
            *given[:3],
            held_out=given[3] if len(given) == 4 else None,
            objective=options.objective,
            tolerance=options.tolerance,
            lists=recipe,
            seed=options.seed,
            resume=measured,
            progress=not options.quiet,
        )
    except KeyboardInterrupt:  # tune has said where it goes on
        return 130
    print(tuned)
    tuned.save(folder)
    print(f"hmpx: wrote {folder}: {', '.join(sorted(path.name for path in folder.iterdir()))}")
    return 0 if tuned.met else 1
