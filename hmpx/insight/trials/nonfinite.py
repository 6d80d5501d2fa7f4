"""The search for the first op that makes inf or NaN in a run."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from hmpx.insight.tensors import Tensor, floating, is_masked
from hmpx.insight.trials.calls import Asked, CallSite, Compute, is_recomputing, is_transformed
from hmpx.ops.wrapping.observing import Seen, unobserved


class FirstNonfinite:
    """Computes calls as another function does, and finds the first site that makes inf or NaN of finite numbers.

    forward: the first site that does so in the forward pass, not counting the -inf of a mask. backward: the site of the
    first node of autograd's graph that turns finite gradients into inf or NaN. The nodes of a call are those between
    its results and its inputs.
    """

    def __init__(self, compute: Compute) -> None:
        self._compute = compute
        self.forward: CallSite | None = None
        self.backward: CallSite | None = None
        self._known: dict[Any, None] = {}  # nodes that have an owner; kept alive, so that none takes another's place

    def __call__(self, asked: Asked) -> Seen:
        if is_recomputing() or is_transformed():
            return self._compute(asked)
        with unobserved():
            inputs = floating((asked.args, asked.kwargs))
            nodes, looks = [tensor.grad_fn for tensor in inputs], self.forward is None and all_finite(inputs)
        seen = self._compute(asked)
        with unobserved():
            results = floating((seen.result,))
            odd = next((each for each in results if not all_finite([each])), None) if looks else None
            if odd is not None and not is_masked(asked.point.op, inputs, odd):
                self.forward = asked.site
            self._known |= dict.fromkeys(nodes)
            self._watch(asked.site, [result.grad_fn for result in results])
        return seen

    def _watch(self, site: CallSite, nodes: list[Any]) -> None:
        while nodes:
            node = nodes.pop()
            if node is None or node in self._known or hasattr(node, "variable"):  # a leaf's
                continue
            self._known[node] = None
            node.register_hook(functools.partial(self._look, site))
            nodes += [following for following, _ in node.next_functions]

    def _look(self, site: CallSite, into: Sequence[Tensor | None], out: Sequence[Tensor | None]) -> None:
        with unobserved():
            if self.backward is None and all_finite(out) and not all_finite(into):
                self.backward = site


def all_finite(tensors: Sequence[Tensor | None]) -> bool:
    """Whether all elements of all tensors are finite."""
    return all(bool(torch.isfinite(tensor.detach()).all()) for tensor in tensors if tensor is not None)
