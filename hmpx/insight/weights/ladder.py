"""The ways in which a parameter can be held, and the bytes that each takes.

What a way does to the training comes from two parts, which add up: how far the weights that the forward pass sees are
from FP32's, and how far the state is. A `Rung` is one of each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from hmpx.updates.holding.state_forms import STATE_FORMS, StateDtype, state_name
from hmpx.updates.holding.state_tensors import StateBlocks
from hmpx.updates.holding.stores import WAYS

FP32 = "float32"  # for `weights`: the parameter itself is FP32
WEIGHTS = ("stochastic", "split8", "split", FP32)
STATES: tuple[StateDtype, ...] = ("8bit", torch.bfloat16, torch.float32)
_CHECKED_ALONE = 4096  # elements up to which halves of masters have a check of 2 bytes each (`checksums.py`)


class Rung(NamedTuple):
    """How a parameter is held: `weights` of `hmpx.attach`, or `FP32`, and a `state_dtype`."""

    weights: str
    state: StateDtype

    def __str__(self) -> str:
        return self.weights if self.weights == FP32 else f"{self.weights}, {state_name(self.state)} state"


def rungs(states: int) -> list[Rung]:
    """Every way, for an optimizer that keeps so many tensors of a parameter's size."""
    narrow = STATES if states else (torch.float32,)
    return [*(Rung(w, s) for w in WEIGHTS if w != FP32 for s in narrow), Rung(FP32, torch.float32)]


def bytes_of(shapes: Sequence[torch.Size], rung: Rung, states: int) -> float:
    """What parameters of these shapes take, with gradients, masters and so many tensors of state."""
    return sum(_bytes(torch.empty(shape, device="meta"), rung, states) for shape in shapes)


def _bytes(like: torch.Tensor, rung: Rung, states: int) -> float:
    elements = like.numel()
    if rung.weights == FP32:
        return elements * 4.0 * (2 + states)
    beside = WAYS[rung.weights].bytes_beside
    if elements <= _CHECKED_ALONE and beside != math.floor(beside):
        beside = math.floor(beside) + 2
    each = STATE_FORMS[rung.state].bytes_each * elements
    if not like.dim():  # what has no dimension stays FP32
        each = 4.0
    elif rung.state == "8bit":
        each = elements + torch.bfloat16.itemsize * math.prod(StateBlocks.of(like).shape)
    return elements * (2 + 2 + beside) + states * each
