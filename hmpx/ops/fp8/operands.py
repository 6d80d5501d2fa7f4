"""What each op that is a matrix product multiplies, and what is done with the product: ``finish(a @ b)`` is the op."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch._subclasses import FakeTensor

from hmpx.ops.wrapping.overriding import PLAIN

Tensor = torch.Tensor
aten = torch.ops.aten


class Operands(NamedTuple):
    """a: (..., M, K). b: (K, N), which is then the weight, or (..., K, N). finish: makes the op's result of a @ b."""

    a: Tensor
    b: Tensor
    finish: Callable[[Tensor], Tensor] | None = None


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Operands:
    if bias is None:
        return Operands(input, weight.t())
    return Operands(input, weight.t(), lambda product: aten.add(product, bias))


def _matmul(input: Tensor, other: Tensor) -> Operands:
    return Operands(input, other)


def _mm(input: Tensor, mat2: Tensor) -> Operands:
    return Operands(input, mat2)


def _addmm(input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Operands:
    if beta == 0:  # what is in `input` then does not count, NaN neither
        return Operands(mat1, mat2, lambda product: aten.mul(product, alpha))
    scaled = input if beta == 1 else aten.mul(input, beta)
    return Operands(mat1, mat2, lambda product: aten.add(scaled, product, alpha=alpha))


def _baddbmm(input: Tensor, batch1: Tensor, batch2: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Operands:
    return _addmm(input, batch1, batch2, beta=beta, alpha=alpha)


def _einsum(equation: str, operands: Any, *, path: Any = None) -> Operands | str:
    """Of two operands: labels of both and the result are a batch, labels of both alone are summed over."""
    if len(operands) != 2:
        return f"einsum of {len(operands)} operands"
    left, right = operands
    terms, arrow, result = equation.replace(" ", "").partition("->")
    of_left, of_right = terms.split(",")
    if "." in terms or any(len(set(term)) < len(term) for term in (of_left, of_right)):
        return "einsum with ... or a diagonal"
    if not arrow:
        result = "".join(sorted(label for label in {*of_left, *of_right} if (of_left + of_right).count(label) == 1))
    shared = [label for label in of_left if label in of_right]
    batch, summed = ([each for each in shared if (each in result) is kept] for kept in (True, False))
    rows, columns = ([each for each in term if each not in shared] for term in (of_left, of_right))
    sizes = dict(zip(of_left, left.shape, strict=True))
    for label, size in zip(of_right, right.shape, strict=True):
        if sizes.setdefault(label, size) != size:
            return "einsum that broadcasts"
    if any(label not in result for label in (*rows, *columns)):
        return "einsum that sums one operand"

    def number(labels: list[str]) -> int:
        return math.prod(sizes[label] for label in labels)

    a = left.permute([of_left.index(label) for label in (*batch, *rows, *summed)])
    b = right.permute([of_right.index(label) for label in (*batch, *summed, *columns)])
    stacks = [number(batch)] if batch else []
    made = [*batch, *rows, *columns]

    def finish(product: Tensor) -> Tensor:
        spread = product.reshape([sizes[label] for label in made])
        return spread.permute([made.index(label) for label in result])

    return Operands(
        a.reshape([*stacks, number(rows), number(summed)]),
        b.reshape([*stacks, number(summed), number(columns)]),
        finish,
    )


OPERANDS: dict[str, Callable[..., Operands | str]] = {
    "linear": _linear, "matmul": _matmul, "linalg_matmul": _matmul, "mm": _mm, "bmm": _mm, "addmm": _addmm,
    "baddbmm": _baddbmm, "einsum": _einsum,
}  # fmt: skip


def is_dense(value: Any) -> bool:
    """Whether `value` is an ordinary or a fake dense tensor."""
    return type(value) in (*PLAIN, FakeTensor) and value.layout is torch.strided and not value.is_nested


def multiplied(a: Tensor, b: Tensor, product: Callable[..., Tensor], *how: Any) -> Tensor:
    """``a @ b`` by a `product` of two matrices, or of two stacks of them, that is called with `how` too."""
    if b.dim() == 2:
        rows = product(a.reshape(-1, a.shape[-1]), b, *how)
        return rows.reshape(*a.shape[:-1], b.shape[-1])
    stacks = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    flat = [each.expand(*stacks, *each.shape[-2:]).reshape(-1, *each.shape[-2:]) for each in (a, b)]
    return product(*flat, *how).reshape(*stacks, a.shape[-2], b.shape[-1])
