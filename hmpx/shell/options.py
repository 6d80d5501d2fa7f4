"""Options that several commands share: the recipe, and what stands in the place of its lists."""

from __future__ import annotations

import argparse
import os

from hmpx.dtype_names import dtype_name
from hmpx.ops.build_policy import OPT_LEVELS
from hmpx.ops.fp32_kernels import KERNELS
from hmpx.ops.op_lists import LOW_DTYPES, SIDES
from hmpx.recipes.activate import VARIABLE
from hmpx.recipes.recipe import Recipe, changed, read_recipe

_LOW_PRECISIONS = [*LOW_DTYPES]
# What `hmpx.convert()` does without arguments: the default lists, weights as they are.
_DEFAULT = Recipe(parameter_dtype="float32")


def add_recipe_options(command: argparse.ArgumentParser, default: str = "the default lists") -> None:
    """`--recipe`, the lists, and how the bf16 list runs."""
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


def recipe_asked(options: argparse.Namespace) -> Recipe:
    """The recipe that the options of a command name, or the default lists."""
    return with_options(read_recipe(options.recipe) if options.recipe else _DEFAULT, options)


def with_options(recipe: Recipe, options: argparse.Namespace) -> Recipe:
    """A recipe with what the options say in the place of its own."""
    own = {key: getattr(options, key) for key in ("opt_level", "kernels") if getattr(options, key)}
    for side, path in lists_asked(options).items():
        own |= {side: None, f"{side}_file_path": path}
    if options.low_precision:
        own["low_precision"] = dtype_name(LOW_DTYPES[options.low_precision])
    return changed(recipe, **own)


def lists_asked(options: argparse.Namespace) -> dict[str, str]:
    """The list files that the options name, by side; absolute, since a script may change its folder."""
    return {side: os.path.abspath(path) for side in SIDES if (path := getattr(options, side)) is not None}


def says_a_policy(options: argparse.Namespace) -> bool:
    """Whether the options say anything of how ops are cast."""
    return bool(options.recipe or lists_asked(options) or options.opt_level or options.low_precision)


def name_from_environment() -> str | None:
    """The recipe that HMPX_RECIPE names."""
    return os.environ.get(VARIABLE)
