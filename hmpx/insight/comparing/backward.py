"""Finds where a backward pass first goes wrong: the op that turns finite gradients into inf or NaN."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from hmpx.insight.comparing.calls import Asked, Compared
from hmpx.insight.comparing.low_pass import is_recomputing
from hmpx.insight.comparing.sites import Pass
from hmpx.insight.tensors import Tensor, floating
from hmpx.ops.wrapping.observing import Seen, unobserved


class Backward:
    """A run of another pass that also checks the gradients into and out of each node of autograd's graph.

    A call's nodes are those between its results and its inputs. first: the site of the first node that was given
    finite gradients only, and handed on another.
    """

    def __init__(self, run: Pass) -> None:
        self._run = run
        self.first: Compared | None = None
        self._known: dict[Any, None] = {}  # nodes that have an owner; kept alive, so that none takes another's place

    def around(self, asked: Asked) -> Seen:
        seen = self._run.around(asked)
        if not is_recomputing():
            with unobserved():
                inputs = [tensor.grad_fn for tensor in floating((asked.args, asked.kwargs))]
                self._known |= dict.fromkeys(inputs)
                self._watch(asked.site, [result.grad_fn for result in floating((seen.result,))])
        return seen

    def _watch(self, site: Compared, nodes: list[Any]) -> None:
        while nodes:
            node = nodes.pop()
            if node is None or node in self._known or hasattr(node, "variable"):  # a leaf's
                continue
            self._known[node] = None
            node.register_hook(functools.partial(self._look, site))
            nodes += [following for following, _ in node.next_functions]

    def _look(self, site: Compared, into: Sequence[Tensor | None], out: Sequence[Tensor | None]) -> None:
        with unobserved():
            if self.first is None and _finite(out) and not _finite(into):
                self.first = site


def _finite(gradients: Sequence[Tensor | None]) -> bool:
    return all(bool(torch.isfinite(gradient).all()) for gradient in gradients if gradient is not None)
