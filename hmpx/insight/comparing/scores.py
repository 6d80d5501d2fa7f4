"""What errors of results do to the loss, to first order: asked of autograd in the backward pass of one run."""

from __future__ import annotations

import functools
from typing import Any

from hmpx.insight.comparing.calls import Asked
from hmpx.insight.comparing.difference import product
from hmpx.insight.tensors import Tensor


def score_in_backward(
    scores: list[float], asked: Asked, results: list[Tensor], deltas: list[Tensor | None]
) -> list[Tensor]:
    """Let the backward pass add up what errors in the results of a call do to the loss, to first order.

    Returns the results that have a gradient.
    """
    found = []
    for result, delta in zip(results, deltas, strict=False):
        handed_on = not asked.point.in_place and any(result is arg for arg in asked.args)
        if delta is not None and result.requires_grad and not handed_on and delta.shape == result.shape:
            result.register_hook(functools.partial(_score, scores, delta))
            found.append(result)
    return found


def _score(scores: list[float], delta: Tensor, gradient: Tensor) -> None:
    scores[-1] += product(gradient, delta)


def furthest(results: list[Tensor]) -> list[Tensor]:
    """Those of some results from which autograd comes to no other of them: on the way to these it passes all.

    Their gradients alone need be asked for; autograd keeps in memory what it is asked for.
    """
    owners = {result.grad_fn: result for result in results}
    passes: dict[Any, bool] = {}  # whether autograd comes from a node to one of the results
    nodes: list[Any] = list(owners)
    while nodes:
        following = [node for node, _ in nodes[-1].next_functions if node is not None]
        unknown = [node for node in following if node not in passes]
        if not unknown:
            passes[nodes.pop()] = any(node in owners or passes[node] for node in following)
        nodes += unknown
    return [result for node, result in owners.items() if not passes[node]]
