"""Decisions: results that are read off numbers and are no numbers themselves, such as an index, an order or a mask.

**The problem.** A small error changes no decision, and a larger one changes it at once: the router of a mixture of
experts sends a token to another expert. An estimate to first order knows nothing of that. Worse, an estimate that
shifts the weights a little shifts a decision too, and charges the jump to whatever is computed behind it.

**The way out.** The run at shifted weights takes the decisions of the run in FP32. Where the run under the lists has
decided otherwise, that is counted, and what comes before it is measured.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from hmpx.insight.tensors import Tensor, differentiable, floating

_STEPS = frozenset("round floor ceil trunc sign heaviside floor_divide bernoulli".split())  # decisions as floats
_equal, _gather = torch.equal, torch.gather


class Taken(NamedTuple):
    """The decisions of one call. dim: along which its first result is what they pick from its input; or None."""

    values: list[Tensor]
    dim: int | None


def decisions_in(op: str, args: tuple, kwargs: dict, result: Any) -> list[Tensor]:
    """The results of a call that are decisions, copied; none where no floating tensor came in."""
    if "out" in kwargs or not floating((args, kwargs)):
        return []
    found = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
    return [leaf.detach().clone() for leaf in found if op in _STEPS or not differentiable(leaf.dtype)]


def taken(op: str, args: tuple, kwargs: dict, result: Any) -> Taken | None:
    """The decisions of one call, so that `taken_again` can take them again; None where it makes none."""
    values = decisions_in(op, args, kwargs, result)
    if not values:
        return None
    dim = None
    if isinstance(result, tuple) and len(result) == 2 and args and isinstance(args[0], Tensor):
        dims = reversed(range(args[0].dim()))
        dim = next((d for d in dims if _is_equal(_picked(args[0], values[-1], d), result[0])), None)
    return Taken(values, dim)


def taken_again(args: tuple, result: Any, before: Taken | None) -> Any:
    """A result with earlier decisions in the place of its own, as far as they fit."""
    if before is None:
        return result
    if isinstance(result, Tensor):
        return before.values[0]
    if before.dim is None:
        return result
    picked = _picked(args[0], before.values[-1], before.dim)
    return result if picked is None else type(result)((picked, before.values[-1]))


def otherwise(before: list[Tensor], after: list[Tensor]) -> int:
    """How many decisions differ; all of them if their number differs."""
    pairs = zip(before, after, strict=False)
    return sum(int((a != b).sum()) if a.shape == b.shape else max(a.numel(), b.numel()) for a, b in pairs)


def _picked(values: Tensor, indices: Tensor, dim: int) -> Tensor | None:
    """What indices along a dimension pick, by which that dimension may have gone; None where they do not fit."""
    reduced = indices.dim() == values.dim() - 1
    whole = indices.unsqueeze(dim) if reduced else indices
    if whole.dtype is not torch.int64 or whole.dim() != values.dim():
        return None
    if any(whole.shape[i] != values.shape[i] for i in range(values.dim()) if i != dim):
        return None
    picked = _gather(values, dim, whole)
    return picked.squeeze(dim) if reduced else picked


def _is_equal(picked: Tensor | None, values: Any) -> bool:
    return picked is not None and isinstance(values, Tensor) and _equal(picked.detach(), values.detach())
