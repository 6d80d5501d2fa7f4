"""Reads from source which ops a line of Python calls; nothing is imported or run."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import torch

from hmpx.errors import HmpxError
from hmpx.ops.policies.build_policy import module_class, op_of
from hmpx.ops.policies.catalog import canonical, catalog

Operation = ast.Call | ast.BinOp | ast.AugAssign
Call = tuple[str | None, str]  # an op, or None where the source does not tell; and a note
_OPERATORS = {
    ast.MatMult: "matmul", ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "truediv", ast.Pow: "pow",
}  # fmt: skip


def calls_on_line(source: str, path: str, line: int) -> list[Call]:
    """The ops that a line calls, in the order of the source.

    Raises:
        HmpxError: the file is not Python.
    """
    try:
        tree = ast.parse(source, path)
    except SyntaxError as error:
        raise HmpxError(f"{path}:{error.lineno}: not Python: {error.msg}") from None
    names = _Names(tree)
    on_line = [node for node in ast.walk(tree) if isinstance(node, Operation) and _stands_on(node, line)]
    on_line.sort(key=lambda node: (node.lineno, node.col_offset))
    return list(dict.fromkeys(call for node in on_line for call in names.calls(node)))


def _stands_on(node: Operation, line: int) -> bool:
    """Whether a call or an operator is on a line; in a chain over several lines, each link counts on its own line."""
    if isinstance(node, ast.Call):
        return (node.func.end_lineno or node.lineno) == line
    if isinstance(node, ast.BinOp):
        return line in (node.lineno, node.left.end_lineno, node.right.lineno)
    return node.lineno == line


class _Names:
    """The meaning of names in one file: imports, and modules that were assigned."""

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
        """The full name of a dotted name, with its import resolved; empty if the expression is no dotted name."""
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
