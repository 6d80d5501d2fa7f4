"""`tune MODULE:FUNCTION`: `hmpx.tune` from the shell, and with `--weights` `hmpx.tune_weights`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hmpx.errors import HmpxError
from hmpx.insight.tuning.tune import tune
from hmpx.insight.tuning.tuned import Tuned
from hmpx.insight.tuning.worth import UNITS, WIDE
from hmpx.insight.weights.tune_weights import tune_weights
from hmpx.insight.weights.tuned_weights import TunedWeights
from hmpx.ops.policies.op_lists import SIDES
from hmpx.shell.functions import add_function, set_up
from hmpx.shell.options import add_recipe_options, recipe_asked
from hmpx.shell.outputs import add_force, check_outputs


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
    add_force(command)
    command.add_argument("--quiet", action="store_true", help="show no progress")
    add_recipe_options(command)
    command.set_defaults(run=_tune)


def _tune(options: argparse.Namespace) -> int:
    asked: dict[str, Any] = {"seed": options.seed, "progress": not options.quiet}
    asked |= {key: value for key in ("steps", "tolerance") if (value := getattr(options, key)) is not None}
    if options.weights:
        for option, usual in (("objective", "speed"), ("low", "bf16"), ("confirm", None)):
            if getattr(options, option) != usual:
                raise HmpxError(f"--{option} does not go with --weights")
    elif options.steps is not None:
        raise HmpxError("--steps goes with --weights")
    folder = Path(options.out)
    if folder.exists() and not folder.is_dir():
        raise HmpxError(f"--out {options.out} is no folder")
    of_lists = *(f"{side}.txt" for side in SIDES), *(f"tuned.{kind}" for kind in ("json", "html", "svg"))
    names = "recipe.yaml", *(("weights.json",) if options.weights else of_lists)
    if folder.is_dir():
        check_outputs(options, {f"out {name}": folder / name for name in names})
    recipe = recipe_asked(options)
    if options.weights:
        given = set_up(options.what, (4,), "(model, optimizer, batches, loss)")
    else:
        given = set_up(options.what, (3, 4), "(model, batches, loss), or these and held_out")
    folder.mkdir(parents=True, exist_ok=True)
    tuned: Tuned | TunedWeights
    try:
        if options.weights:
            tuned = tune_weights(*given, recipe=recipe, **asked)
        else:
            for key in ("objective", "low", "confirm"):
                asked[key] = getattr(options, key)
            tuned = tune(*given[:3], held_out=given[3] if len(given) == 4 else None, lists=recipe, **asked)
    except KeyboardInterrupt:
        print("hmpx: interrupted; nothing was written, and a later call begins anew", file=sys.stderr)
        return 130
    print(tuned)
    if isinstance(tuned, Tuned):
        tuned.save(folder)
        written = sorted(path.name for path in folder.iterdir())
    else:
        tuned.save(folder / "recipe.yaml")
        tuned.json(folder / "weights.json")
        written = ["recipe.yaml", "weights.json"]
    print(f"hmpx: wrote {folder}: {', '.join(written)}")
    return 0 if tuned.met else 1
