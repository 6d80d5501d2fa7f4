"""`tune MODULE:FUNCTION`: `hmpx.tune` from the shell, and with `--weights` `hmpx.tune_weights`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from hmpx.errors import HmpxError
from hmpx.insight.tuning.tune import tune
from hmpx.insight.tuning.worth import UNITS, WIDE
from hmpx.insight.weights.tune_weights import tune_weights
from hmpx.shell.functions import add_function, set_up
from hmpx.shell.options import add_recipe_options, recipe_asked


def add(add_command: Callable[..., argparse.ArgumentParser]) -> None:
    command = add_command(
        "tune",
        "find the op lists of a model, and write them",
        "Call a function without arguments that returns (model, batches, loss), or (model, batches, loss, held_out),\n"
        "as hmpx.tune takes them, and write bf16.txt, fp32.txt, promote.txt and recipe.yaml, with what was measured\n"
        "in tuned.json, tuned.html and tuned.svg. With --weights, the function returns (model, optimizer, batches,\n"
        "loss), as hmpx.tune_weights takes them, and recipe.yaml and weights.json say how weights and optimizer state\n"
        "are to be held. The exit status is 1 if the tolerance is not met.",
        "train.py:setup --out tuned\npackage.train:setup --objective coverage --tolerance 0.05\n"
        "train.py:with_optimizer --weights --steps 200 --recipe tuned/recipe.yaml --out weights",
    )
    add_function(command)
    command.add_argument("--out", default="tuned", metavar="FOLDER", help="where the files go, default tuned")
    command.add_argument("--objective", choices=UNITS, default="speed", help="what BF16 is to bring, default speed")
    command.add_argument("--low", choices=WIDE, default="bf16", help="what is chosen, beside FP32 or beside BF16")
    command.add_argument("--weights", action="store_true", help="tune how weights and state are held, by training")
    command.add_argument("--steps", type=int, help="of a training run of --weights, default 100")
    command.add_argument(
        "--tolerance",
        type=float,
        help="gradient error in units of the noise between batches, default 0.1; with --weights, distance from FP32 in "
        "units of that between two orders of the batches, default 0.25",
    )
    command.add_argument("--seed", type=int, default=0, help="default 0")
    command.add_argument(
        "--confirm", type=int, metavar="N", help="train N steps under the lists, beside FP32 in two orders of batches"
    )
    command.add_argument("--quiet", action="store_true", help="show no progress")
    add_recipe_options(command)
    command.set_defaults(run=_tune)


def _tune(options: argparse.Namespace) -> int:
    if options.weights:
        return _tune_weights(options)
    if options.steps is not None:
        raise HmpxError("--steps goes with --weights")
    recipe = recipe_asked(options)
    given = set_up(options.what, (3, 4), "(model, batches, loss), or these and held_out")
    folder = _folder(options.out)
    try:
        tuned = tune(
            *given[:3],
            held_out=given[3] if len(given) == 4 else None,
            objective=options.objective,
            low=options.low,
            tolerance=0.1 if options.tolerance is None else options.tolerance,
            lists=recipe,
            seed=options.seed,
            progress=not options.quiet,
            confirm=options.confirm,
        )
    except KeyboardInterrupt:
        return _interrupted()
    print(tuned)
    tuned.save(folder)
    print(f"hmpx: wrote {folder}: {', '.join(sorted(path.name for path in folder.iterdir()))}")
    return 0 if tuned.met else 1


def _tune_weights(options: argparse.Namespace) -> int:
    for option, usual in (("objective", "speed"), ("low", "bf16"), ("confirm", None)):
        if getattr(options, option) != usual:
            raise HmpxError(f"--{option} does not go with --weights")
    recipe = recipe_asked(options)
    given = set_up(options.what, (4,), "(model, optimizer, batches, loss)")
    folder = _folder(options.out)
    asked = {"steps": options.steps, "tolerance": options.tolerance}
    asked = {key: value for key, value in asked.items() if value is not None}
    try:
        tuned = tune_weights(*given, recipe=recipe, seed=options.seed, progress=not options.quiet, **asked)
    except KeyboardInterrupt:
        return _interrupted()
    print(tuned)
    tuned.save(folder / "recipe.yaml")
    tuned.json(folder / "weights.json")
    print(f"hmpx: wrote {folder}: recipe.yaml, weights.json")
    return 0 if tuned.met else 1


def _folder(out: str) -> Path:
    folder = Path(out)
    if folder.exists() and not folder.is_dir():
        raise HmpxError(f"--out {out} is no folder")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _interrupted() -> int:
    print("hmpx: interrupted; nothing was written, and a later call begins anew", file=sys.stderr)
    return 130
