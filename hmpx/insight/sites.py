"""One line of a file in words: what `explain FILE:LINE` prints.

In a Python file that is a call site, as `isVerbose` and `audit` write it; in an op list or a recipe, a line of that.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from hmpx.errors import HmpxError
from hmpx.insight.call_sites import calls_on_line
from hmpx.insight.check import is_recipe
from hmpx.insight.explain import explain_op
from hmpx.insight.recipe_words import recipe_lines
from hmpx.ops.computing.kernels import Kernels, choose
from hmpx.ops.policies.build_policy import build_policy
from hmpx.ops.policies.op_lists import SIDES, Listed, read_file
from hmpx.ops.policies.policy import Policy
from hmpx.recipes.keys import EXTENDS, LISTS, MODULES, PARAMETERS, SWITCHES
from hmpx.recipes.recipe import DEFAULT, Recipe
from hmpx.recipes.stated import read_recipe
from hmpx.yaml_files import composed, text_of

_LISTS = (".txt", ".yaml", ".yml", ".json")
# Which line of a recipe in words says what a key does.
_WORDS = {
    **dict.fromkeys(("opt_level", "low_precision", "fp8_format", *LISTS, *SIDES), "ops"),
    **dict.fromkeys(("parameter_dtype", "module_dtypes"), "weights"),
    MODULES: MODULES,
    PARAMETERS: PARAMETERS,
    **dict.fromkeys(("weights", "seed", *SWITCHES), "updates"),
    **dict.fromkeys(("use_fp32_grad_acc", "release_gradients"), "gradients"),
    "use_master_weights_in_ckpt": "checkpoints",
    "state_dtype": "state",
    "kernels": "kernels",
    "dtype_map": "dtypes",
    EXTENDS: "",  # all of them
}


def explain_site(path: str, line: int, recipe: Recipe | None = None) -> str:
    """The ops or keys on a line of a file, and the precision of each.

    Args:
        path: a Python file, an op list or a recipe.
        line: counted from 1.
        recipe: what decides. None: the default lists; for a line of a list or a recipe, that file.

    Raises:
        HmpxError: there is no such line, or nothing on it that has a precision; with the nearest line that has.
    """
    lines = _lines(path)
    if not 1 <= line <= len(lines):
        raise HmpxError(f"{path}:{line}: the file has {len(lines)} lines")
    suffix = Path(path).suffix.lower()
    said = f"{path}:{line}: {lines[line - 1].strip()}"
    if suffix == ".py":
        recipe = recipe or DEFAULT
        policy = recipe.policy()
        if policy is None:
            raise HmpxError("under this recipe torch's ops run as they are (opt_level null)")
        calls = calls_on_line("\n".join(lines), path, line)
        if not calls:
            raise HmpxError(f"{path}:{line}: no op is called on this line{_nearest_call(lines, path, line)}")
        return "\n\n".join([said, *(_call_in_words(op, note, policy, choose(recipe.kernels)) for op, note in calls)])
    if suffix not in _LISTS:
        raise HmpxError(f"{path}: a call site is a line of a .py file, the line of a list one of {', '.join(_LISTS)}")
    return "\n\n".join([said, *_listed_in_words(path, line, recipe)])


def _lines(path: str) -> list[str]:
    try:
        text = Path(path).read_text(encoding="utf-8-sig") if path.endswith(".py") else text_of(path)
        return text.splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise HmpxError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None


def _call_in_words(op: str | None, note: str, policy: Policy, kernels: Kernels) -> str:
    return (
        note if op is None else "\n".join(filter(None, [explain_op(op, policy, kernels), note and f"  note  {note}"]))
    )


def _nearest_call(lines: list[str], path: str, line: int) -> str:
    for distance in range(1, len(lines)):
        for other in (line - distance, line + distance):
            if 1 <= other <= len(lines) and (calls := calls_on_line("\n".join(lines), path, other)):
                return f"; the nearest that calls one is line {other}" if any(op for op, _ in calls) else ""
    return ""


def _listed_in_words(path: str, line: int, recipe: Recipe | None) -> Iterator[str]:
    """The ops that a line of a list names, or the key of a recipe that stands there."""
    if is_recipe(path):
        own = read_recipe(path)
        names = [listed for side in SIDES if getattr(own, side) is not None for listed in own.listed(side)]
        policy, key = (recipe or own).policy(), _key_at(path, line)
    else:
        side = next((side for side in SIDES if side in Path(path).name), "bf16")
        lists = read_file(path, side)
        names = [listed for each in SIDES for listed in lists.side(each) or ()]
        policy, key = (recipe.policy() if recipe else build_policy(lists=lists)), None
    on_line = [listed for listed in names if listed.line == line]
    if on_line and policy is not None:
        yield from (explain_op(listed.name, policy) for listed in on_line)
    elif key:
        about = _WORDS[key]
        yield "\n".join(text for text in recipe_lines(own) if not about or text.startswith(f"{about} "))
    else:
        raise HmpxError(f"{path}:{line}: nothing is listed on this line{_nearest_name(names, line)}")


def _key_at(path: str, line: int) -> str | None:
    """The key of a recipe that a line belongs to."""
    before = [key.value for key, _ in composed(Path(path), _WORDS).value if key.start_mark.line < line]
    return before[-1] if before else None


def _nearest_name(names: list[Listed], line: int) -> str:
    nearest = min(names, key=lambda listed: abs(listed.line - line), default=None)
    return f"; the nearest is line {nearest.line}, {nearest.name!r}" if nearest else ""
