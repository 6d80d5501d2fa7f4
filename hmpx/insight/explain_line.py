"""One line of a file in words: what `explain FILE:LINE` prints. Nothing is imported or run.

In a Python file that is a call site, as `isVerbose` and `audit` write it; in an op list or a recipe, a line of that.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import torch

from hmpx.errors import HmpxError
from hmpx.insight.check import is_recipe
from hmpx.insight.explain import explain_op, recipe_lines
from hmpx.ops.computing.kernels import Kernels, choose
from hmpx.ops.policies.build_policy import build_policy, module_class, op_of
from hmpx.ops.policies.catalog import canonical, catalog
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
Operation = ast.Call | ast.BinOp | ast.AugAssign
Call = tuple[str | None, str]  # an op, or None where the source does not tell; and a note
_OPERATORS = {
    ast.MatMult: "matmul", ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "truediv", ast.Pow: "pow",
}  # fmt: skip


def explain_site(path: str, line: int, recipe: Recipe | None = None) -> str:
    """Return the ops or keys on a line of a file, and the precision of each.

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
        calls = calls_by_line("\n".join(lines), path)
        if line not in calls:
            others = [each for each, found in calls.items() if any(op for op, _ in found)]
            nearest = min(others, key=lambda each: (abs(each - line), each), default=None)
            said = f"; the nearest that calls one is line {nearest}" if nearest else ""
            raise HmpxError(f"{path}:{line}: no op is called on this line{said}")
        kernels = choose(recipe.kernels)
        return "\n\n".join([said, *(_call_in_words(op, note, policy, kernels) for op, note in calls[line])])
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
    if op is None:
        return note
    return "\n".join(filter(None, [explain_op(op, policy, kernels), note and f"  note  {note}"]))


def _listed_in_words(path: str, line: int, recipe: Recipe | None) -> Iterator[str]:
    """Yield the ops that a line of a list names, or the key of a recipe that stands there."""
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
    """Return the key of a recipe that a line belongs to."""
    before = [key.value for key, _ in composed(Path(path), _WORDS).value if key.start_mark.line < line]
    return before[-1] if before else None


def _nearest_name(names: list[Listed], line: int) -> str:
    nearest = min(names, key=lambda listed: abs(listed.line - line), default=None)
    return f"; the nearest is line {nearest.line}, {nearest.name!r}" if nearest else ""


def calls_by_line(source: str, path: str) -> dict[int, list[Call]]:
    """Return the ops that each line calls, in the order of the source; a line without calls is left out.

    Raises:
        HmpxError: the file is not Python.
    """
    try:
        tree = ast.parse(source, path)
    except SyntaxError as error:
        raise HmpxError(f"{path}:{error.lineno}: not Python: {error.msg}") from None
    names, found = _Names(tree), defaultdict[int, list[Call]](list)
    nodes = [node for node in ast.walk(tree) if isinstance(node, Operation)]
    for node in sorted(nodes, key=lambda node: (node.lineno, node.col_offset)):
        for each in names.calls(node):
            for line in _lines_of(node):
                if each not in found[line]:
                    found[line].append(each)
    return found


def _lines_of(node: Operation) -> set[int]:
    """Return the lines that a call or an operator is on; in a chain over several lines, each link has its own."""
    if isinstance(node, ast.Call):
        return {node.func.end_lineno or node.lineno}
    if isinstance(node, ast.BinOp):
        return {node.lineno, node.left.end_lineno or node.lineno, node.right.lineno}
    return {node.lineno}


class _Names:
    """Resolves names in one file: imports, and modules that were assigned."""

    def __init__(self, tree: ast.Module) -> None:
        self._imported: dict[str, str] = {}
        self._modules: dict[str, str] = {}  # "self.fc" -> "torch.nn.Linear"
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for each in node.names:
                    top = each.name.partition(".")[0]
                    self._imported[each.asname or top] = each.name if each.asname else top
            elif isinstance(node, ast.ImportFrom) and node.module:
                self._imported |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
                made = self._full_name(node.value.func)
                if made.startswith("torch.nn.") and module_class(made):
                    self._modules |= {ast.unparse(target): made for target in node.targets}

    def _full_name(self, function: ast.expr) -> str:
        """Return a dotted name with its import resolved; "" if the expression is no dotted name."""
        parts = []
        while isinstance(function, ast.Attribute):
            parts.append(function.attr)
            function = function.value
        if not isinstance(function, ast.Name):
            return ""
        return ".".join([self._imported.get(function.id, function.id), *reversed(parts)])

    def calls(self, node: Operation) -> Iterator[Call]:
        if isinstance(node, ast.Call):
            yield from self._call(node.func)
            return
        name = _OPERATORS.get(type(node.op))
        operands = (node.target, node.value) if isinstance(node, ast.AugAssign) else (node.left, node.right)
        if name and not any(isinstance(each, ast.Constant) and isinstance(each.value, str) for each in operands):
            in_place = f"__i{name}__" if isinstance(node, ast.AugAssign) else ""
            op = canonical(in_place) if in_place else name
            if op in catalog() and not all(isinstance(each, ast.Constant) for each in operands):
                yield op, f"`{ast.unparse(node)}`, if one of them is a tensor"

    def _call(self, function: ast.expr) -> Iterator[Call]:
        written, full = ast.unparse(function), self._full_name(function)
        if written in self._modules:
            made = self._modules[written]
            cls = module_class(made)
            op = op_of(cls) if cls else None
            yield op, f"`{written}` is a {made}" + ("" if op else ", which calls several ops; explain one by its name")
        elif full.startswith("torch."):
            op = canonical(full)
            if op in catalog():
                yield op, ""
        elif isinstance(function, ast.Attribute) and (method := canonical(function.attr)) in catalog():
            if any(entry.owner is torch.Tensor for entry in catalog()[method].entries):
                yield method, f"if `{ast.unparse(function.value)}` is a tensor"
        elif written.startswith("self.") or written in ("model", "net"):
            inside = "`audit` and isVerbose=True show the ops that run inside it"
            yield None, f"{written}(...): the source does not say what this calls; {inside}"
