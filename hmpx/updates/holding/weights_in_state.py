"""Weights that an optimizer keeps in its state: SAM before its ascent, Lookahead's slow ones, schedule-free's z.

A code of 8 or 4 bits is for moments. Weights in it would lose their digits between two steps, and stochastic rounding
to BF16 those of masters. So such tensors are held as the step leaves them.

Nobody says what a tensor of state is. It is weights if it is near the parameters' when the optimizer first keeps it,
over all of them: no farther than half of their norm, or than half of that of a multiple of them, such as a sum, a
quarter of them or more. A moment is farther away than the norm itself, and points elsewhere.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Set
from weakref import WeakKeyDictionary

import torch
from torch import optim
from torch.optim import Optimizer

from hmpx.rounding.devices import shows_values
from hmpx.updates.holding.sharding import full, is_sharded

Tensor = torch.Tensor
_OF_TORCH = frozenset(cls for cls in vars(optim).values() if isinstance(cls, type))
_NEAR = 0.25  # of the squared norm of the weights, or of a multiple of them
_LEAST = 0.25  # of all multiples: what is smaller is taken for a moment
_FEW = 32  # elements: any direction may be near that of fewer weights
_keys: WeakKeyDictionary[Optimizer, set[str]] = WeakKeyDictionary()


def weight_keys(optimizer: Optimizer) -> Set[str]:
    """Return the keys of state that are known to be weights; the same set in every call. torch's classes have none."""
    return frozenset() if type(optimizer) in _OF_TORCH else _keys.setdefault(optimizer, set())


def find_weights(keys: Set[str], found: Iterable[tuple[str, Tensor, Tensor]]) -> None:
    """Add to `keys` those of `found` that are weights: keys, state tensors, and the weights of their parameters."""
    sums, counts = dict[str, Tensor](), Counter[str]()
    if not isinstance(keys, set):
        return
    for key, value, weights in found:
        if shows_values(value) and is_sharded(value) == is_sharded(weights):
            w, v = weights.detach().float(), value.detach().float()
            pairs = (v - w, v - w), (w, w), (v, w), (v, v)
            of_one = torch.stack([full((a * b).sum()) for a, b in pairs]).double().cpu()
            sums[key] = sums[key] + of_one if key in sums else of_one
            counts[key] += v.numel()
    for key, of_all in sums.items():
        far, norm, along, own = of_all.tolist()
        if not norm or not math.isfinite(far + own):
            continue
        along /= norm  # the multiple of the weights that is nearest, and how far the state is from it
        is_multiple = abs(along) >= _LEAST and own - along**2 * norm <= _NEAR * along**2 * norm and counts[key] >= _FEW
        if far <= _NEAR * norm or is_multiple:
            keys.add(key)


def find_again(optimizer: Optimizer, keys: Iterable[str]) -> None:
    """Take over the keys of weights that the original of a copy has."""
    _keys[optimizer] = set(keys)
