"""`compare MODULE:FUNCTION`: `hmpx.compare` from the shell."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from hmpx.insight.comparing.compare import compare
from hmpx.shell.functions import add_function, set_up
from hmpx.shell.options import add_recipe_options, recipe_asked
from hmpx.shell.outputs import add_force, check_outputs


def add(add_command: Callable[..., argparse.ArgumentParser]) -> None:
    command = add_command(
        "compare",
        "compare the training under op lists with FP32 and say which ops are to blame",
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


def _compare(options: argparse.Namespace) -> int:
    outputs = {kind: Path(path) for kind in ("json", "html") if (path := getattr(options, kind))}
    check_outputs(options, outputs)
    recipe = recipe_asked(options)
    given = set_up(options.what, (3,), "(model, batches, loss)")
    found = compare(*given, lists=recipe, scores=options.scores)
    print(found)
    for kind, path in outputs.items():
        getattr(found, kind)(path)
    return 1 if found.is_broken else 0
