"""One line of Python in words: what `explain FILE:LINE` prints. Nothing is imported or run.

`isVerbose`, and `record` write call sites in that form.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import torch

from hmpx.errors import HmpxError
from hmpx.insight.explain import explain_op
from hmpx.ops.computing.kernels import choose
from hmpx.ops.policies.build_policy import module_class, op_of
from hmpx.ops.policies.catalog import canonical, catalog
from hmpx.recipes.recipe import DEFAULT, Recipe

Operation = ast.Call | ast.BinOp | ast.AugAssign
Call = tuple[str | None, str]  # an op, or None where the source does not tell; and a note
_OPERATORS = {
    ast.MatMult: "matmul", ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "truediv", ast.Pow: "pow",
}  # fmt: skip


def explain_site(path: str, line: int, recipe: Recipe | None = None) -> str:
    """Return the ops that a line of a Python file calls, and the precision of each.

    Args:
        path: a Python file.
        line: counted from 1.
        recipe: decides; None: the default lists.

    Raises:
        HmpxError: there is no such line, or no op on it; with the nearest line that calls one.
    """
    if Path(path).suffix.lower() != ".py":
        raise HmpxError(
            f"{path}:{line}: a call site is a line of a .py file. Of an op in a list: explain OP --list {path}; of a "
            f"recipe: explain {path}"
        )
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise HmpxError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if not 1 <= line <= len(lines):
        raise HmpxError(f"{path}:{line}: the file has {len(lines)} lines")
    recipe = recipe or DEFAULT
    policy, kernels = recipe.policy(), choose(recipe.kernels)
    if policy is None:
        raise HmpxError("under this recipe torch's ops run as they are (opt_level null)")
    calls = calls_by_line("\n".join(lines), path)
    if line not in calls:
        others = [each for each, found in calls.items() if any(op for op, _ in found)]
        nearest = min(others, key=lambda each: (abs(each - line), each), default=None)
        said = f"; the nearest that calls one is line {nearest}" if nearest else ""
        raise HmpxError(f"{path}:{line}: no op is called on this line{said}")
    parts = [f"{path}:{line}: {lines[line - 1].strip()}"]
    for op, note in calls[line]:
        words = [note] if op is None else [explain_op(op, policy, kernels), note and f"  note  {note}"]
        parts.append("\n".join(filter(None, words)))
    return "\n\n".join(parts)


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
            inside = "`record` and isVerbose=True show the ops that run inside it"
            yield None, f"{written}(...): the source does not say what this calls; {inside}"
