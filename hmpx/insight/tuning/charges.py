"""What roundings are charged with, and where: at an op, or at the edge where a tensor changes its precision.

**Nodes and edges.** An op in BF16 rounds inside and rounds its result: that is its own charge. A tensor that comes from
an op in FP32 and goes into one in BF16 is rounded on the way: that is the charge of this edge. So a rounding is counted
once, whatever ops are in BF16 around it: between two of them there is none but that of the first one's result.

**Backward** it is the same the other way round: an op's own backward pass rounds, and a gradient is rounded where it
goes from an op in FP32 back to one in BF16.

**In which units.** Of the forward roundings, the loss changes by <gradient, rounding> to first order. Taken at the
weights w and at w + h v, the difference over h is v . e, with e what the rounding does to the gradients of the
parameters (see `noise`). A rounding r of the gradient at a tensor x changes them by (dx/dw)^T r, and v . e is the
difference over h of <x, r>. Both kinds are a sum of numbers at w and one at each w + h v: a `Charge`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from hmpx.insight.comparing.calls import Compared


@dataclass
class Charge:
    """What roundings do, by batch and run; run 0 is at the weights, run i at the weights shifted along direction i.

    forward: the first-order change of the loss. backward: <x, r> of roundings of gradients.
    """

    forward: defaultdict[tuple[int, int], float] = field(default_factory=lambda: defaultdict(float))
    backward: defaultdict[tuple[int, int], float] = field(default_factory=lambda: defaultdict(float))

    def add(self, other: Charge) -> None:
        for own, values in ((self.forward, other.forward), (self.backward, other.backward)):
            for key, value in values.items():
                own[key] += value

    def changes(self, batches: int) -> list[float]:
        """Of the loss, by batch."""
        return [self.forward[batch, 0] for batch in range(batches)]

    def projected(self, batches: int, directions: int, h: float) -> list[list[float]]:
        """v . e_b, by direction and batch."""

        def at(batch: int, run: int) -> float:
            return self.forward[batch, run] + self.backward[batch, run]

        return [
            [(at(batch, direction) - at(batch, 0)) / h for batch in range(batches)]
            for direction in range(1, directions + 1)
        ]


@dataclass(eq=False)
class Edge:
    """Tensors that go from one site, or from outside, into another.

    down, up: charges where the first is in FP32 and the second in BF16, and the other way round. casts, elements: in
    one batch.
    """

    down: Charge = field(default_factory=Charge)
    up: Charge = field(default_factory=Charge)
    casts: int = 0
    elements: int = 0


@dataclass(eq=False)
class Scored:
    """A call site that lists can put into BF16 or FP32.

    charge: of its own. edges: by the site that a tensor comes from, None for what is FP32 whatever lists say. calls: in
    one batch. pinned: why it stays in FP32, in words. scored: whether autograd sees it, so that anything is known.
    worth: what BF16 brings, see `worth`.
    """

    site: Compared
    charge: Charge = field(default_factory=Charge)
    edges: defaultdict[Scored | None, Edge] = field(default_factory=lambda: defaultdict(Edge))
    calls: int = 0
    pinned: str = ""
    scored: bool = False
    worth: dict[str, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.site.op


def total(charges: Iterable[Charge]) -> Charge:
    """Charges together, with their signs."""
    found = Charge()
    for charge in charges:
        found.add(charge)
    return found
