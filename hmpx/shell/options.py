"""Options that several commands share: the recipe, its lists, and `--set` for any key."""

from __future__ import annotations

import argparse
import os
from typing import Any

from hmpx.base.yaml_files import root_of, value_of
from hmpx.errors import HmpxError, Origin, Places, errors_at
from hmpx.ops.computing.kernels import KERNELS
from hmpx.ops.policies.build_policy import OPT_LEVELS
from hmpx.ops.policies.lists import LOW_DTYPES, SIDES
from hmpx.recipes.keys import EXTENDS, LISTS
from hmpx.recipes.reading import as_recipe, checked, laid_over
from hmpx.recipes.recipe import Recipe

_LOW_PRECISIONS = [*LOW_DTYPES]


def add_recipe_options(command: argparse.ArgumentParser, default: str = "the default lists") -> None:
    """Add `--recipe`, the lists, how the bf16 list runs, and `--set` for every other key."""
    group = command.add_argument_group("which precision")
    group.add_argument(
        "--recipe", metavar="NAME", help=f"a recipe's name, see `recipes`, or its YAML file; without it {default}"
    )
    for side in SIDES:
        flags = ("--bf16", "--list") if side == "bf16" else (f"--{side}",)
        more = ", or a YAML or JSON file with several lists" if side == "bf16" else ""
        group.add_argument(*flags, metavar="FILE", help=f"the {side} list in place of the recipe's, as text{more}")
    group.add_argument("--opt-level", choices=OPT_LEVELS, help="O1: the lists decide; O2: matrix products in BF16")
    group.add_argument(
        "--low-precision", choices=_LOW_PRECISIONS, metavar="DTYPE", help="what the bf16 list runs in: bf16 or fp16"
    )
    group.add_argument("--kernels", choices=KERNELS, help="what computes those ops on a CPU, see hmpx.convert")
    group.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="any key of a recipe, the value as in its file: --set weights=split; as often as needed",
    )


def recipe_asked(options: argparse.Namespace) -> Recipe:
    """Return the recipe that the options of a command name, or the default lists with FP32 weights."""
    return with_options(as_recipe(options.recipe or None), options)


def with_options(recipe: Recipe, options: argparse.Namespace) -> Recipe:
    """Lay the options over a recipe, and return the result.

    Raises:
        HmpxError: what `--set` says is no key of a recipe, or no value that the key may have.
    """
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
            given |= checked({key: os.path.abspath(value) if key in LISTS and isinstance(value, str) else value})
        said[key,] = Origin(what)
    return given, said


def lists_asked(options: argparse.Namespace) -> dict[str, str]:
    """Return the list files that the options name, by side; absolute, since a script may change its folder."""
    return {side: os.path.abspath(path) for side in SIDES if (path := getattr(options, side)) is not None}


def says_a_policy(options: argparse.Namespace) -> bool:
    """Return whether the options say how ops are cast."""
    own = (options.opt_level, options.low_precision, options.kernels, options.set)
    return bool(options.recipe or lists_asked(options) or any(own))
