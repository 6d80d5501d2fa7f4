"""Options that several commands share: the recipe, its lists, `--set` for any key, and the files that they write."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hmpx.base import process_state
from hmpx.base.files import WriteError, path_from, root_of, value_of
from hmpx.errors import HmpxError, Origin, Places, errors_at
from hmpx.ops.computing.kernels import KERNELS
from hmpx.ops.policies.lists import LOW_DTYPES, SIDES
from hmpx.ops.policies.policy import OPT_LEVELS
from hmpx.recipes.keys import EXTENDS, LISTS
from hmpx.recipes.reading import as_recipe, checked, laid_over
from hmpx.recipes.recipe import Recipe


def add_recipe_options(command: argparse.ArgumentParser, default: str = "the default lists") -> None:
    """Add `--recipe`, the lists, how the bf16 list runs, and `--set` for every other key."""
    group = command.add_argument_group("which precision")
    group.add_argument(
        "--recipe", metavar="NAME", help=f"a recipe's name, see `explain`, or its YAML file; without it {default}"
    )
    for side in SIDES:
        flags = ("--bf16", "--list") if side == "bf16" else (f"--{side}",)
        more = ", or a YAML or JSON file with several lists" if side == "bf16" else ""
        group.add_argument(*flags, metavar="FILE", help=f"the {side} list in place of the recipe's, as text{more}")
    group.add_argument("--opt-level", choices=OPT_LEVELS, help="O1: the lists decide; O2: matrix products in BF16")
    group.add_argument(
        "--low-precision", choices=[*LOW_DTYPES], metavar="DTYPE", help="what the bf16 list runs in: bf16 or fp16"
    )
    group.add_argument("--kernels", choices=KERNELS, help="what computes those ops on a CPU, see hmpx.convert")
    group.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="any key of a recipe, the value as in its file: --set weights=split; once for each key",
    )


def recipe_asked(options: argparse.Namespace) -> Recipe:
    """Return the recipe that the options of a command name, or the default lists with FP32 weights."""
    return with_options(as_recipe(options.recipe or None), options)


def with_options(recipe: Recipe, options: argparse.Namespace) -> Recipe:
    given, said = keys_asked(options)
    with errors_at(said):
        return laid_over(recipe, checked(given), said)


def keys_asked(options: argparse.Namespace) -> tuple[dict[str, Any], Places]:
    """Return the keys of a recipe that the options give, and where each stands."""
    own = ("opt_level", "kernels", "low_precision")
    given: dict[str, Any] = {key: getattr(options, key) for key in own if getattr(options, key)}
    said: dict[tuple, Origin] = {(key,): Origin(f"--{key.replace('_', '-')}") for key in given}
    for side, path in lists_asked(options).items():
        given[f"{side}_file_path"] = path
        said[f"{side}_file_path",] = Origin(f"--{side}")
    for setting in options.set:
        what = f"--set {setting}"
        key, equals, text = setting.partition("=")
        with errors_at({}, Origin(what)):
            if not equals:
                raise HmpxError("write --set KEY=VALUE, as in --set weights=split")
            if key == EXTENDS:
                raise HmpxError("--recipe says which recipe it is")
            node = root_of(what, text)
            value = value_of(what, node) if node else None
            if isinstance(value, list | dict) and (key,) in said:
                raise HmpxError(f"{key} was given before ({said[key,]}): say all of it at once")
            given |= checked({key: path_from(os.getcwd(), value) if key in LISTS and isinstance(value, str) else value})
        said[key,] = Origin(what)
    return given, said


def note_run(options: argparse.Namespace, script: str, said: str, low_precision: str | None = None) -> list[str]:
    """Keep what the heads of pages say of this command line; return what it asks for beside a recipe, in words."""
    asked = [f"{side} list {path}" for side, path in lists_asked(options).items()]
    asked += [f"opt level {options.opt_level}"] if options.opt_level else []
    asked += [f"low precision {low_precision or options.low_precision}"] if options.low_precision else []
    asked += options.set
    process_state.run.update(script=script, recipe=", ".join([said.removeprefix("recipe "), *asked]))
    return asked


def lists_asked(options: argparse.Namespace) -> dict[str, str]:
    """Return the list files that the options name, by side; absolute, since a script may change its folder."""
    return {side: path_from(os.getcwd(), path) for side in SIDES if (path := getattr(options, side)) is not None}


def add_force(command: Any) -> None:
    """Add, to a command or to a group of its options, the one that lets `check_outputs` pass."""
    command.add_argument("--force", action="store_true", help="write over files that are there")


def outputs_asked(options: argparse.Namespace, *kinds: str, of_all: str = "") -> dict[str, Path]:
    """Return the absolute paths of the files that these options name, by option.

    Of many ranks, each has a path of its own, ``log.3.json`` for rank 3. of_all: the option whose file they share.

    Raises:
        HmpxError: as `check_outputs`.
    """
    outputs = {kind: Path(path_from(os.getcwd(), path)) for kind in kinds if (path := getattr(options, kind))}
    if number_in("WORLD_SIZE", 1) > 1:
        rank = number_in("RANK", 0)
        own = {kind: path.with_name(f"{path.stem}.{rank}{path.suffix}") for kind, path in outputs.items()}
        outputs = {kind: outputs[kind] if kind == of_all else path for kind, path in own.items()}
    check_outputs(options, outputs)
    return outputs


def number_in(variable: str, usual: int) -> int:
    """Return the number in a variable of the environment; `usual` if there is none: containers may have it empty."""
    value = os.environ.get(variable, "")
    return int(value) if value.isdecimal() else usual


def save(found: Any, outputs: Mapping[str, Path]) -> tuple[list[str], bool]:
    """Write files by the methods of their names; return a line for each, and whether all were written.

    Whoever has run a script gets what was found, even if the disk is full.
    """
    lines, are_all = [], True
    for kind, path in outputs.items():
        try:
            getattr(found, kind)(path)
            use = f"; next: python -m hmpx run --recipe {path} SCRIPT" if kind == "fix" else ""
            lines.append(f"hmpx: wrote {path}{use}")
        except WriteError as error:
            lines.append(f"hmpx: {error}")
            are_all = False
    return lines, are_all


def check_outputs(options: argparse.Namespace, outputs: Mapping[str, Path]) -> None:
    """Check that the files of some options can be written, and that they replace no file, unless `--force` is given.

    Raises:
        HmpxError: there is no such folder; the file is there already, and not empty; or two options name one file.
    """
    for number, (kind, path) in enumerate(outputs.items()):
        if not path.parent.is_dir():
            raise HmpxError(f"--{kind} {path}: there is no folder {path.parent}")
        if path.is_dir():
            raise HmpxError(f"--{kind} {path}: is a folder, not a file")
        if path in [*outputs.values()][:number]:
            raise HmpxError(f"--{kind} {path}: another option names this file, too")
        if path.is_file() and path.stat().st_size and not options.force:
            raise HmpxError(f"--{kind} {path}: is there already; name another file, or write over it with --force")
