"""What is to be chosen: parts of a program that are in BF16 or in FP32, what each brings and what it does.

A part is a list name, everywhere or in one module. All of its sites are in BF16 or none is.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from hmpx.insight.comparing import noise
from hmpx.insight.tuning.charges import Charge, Scored, total
from hmpx.insight.tuning.mincut import Network


class Part(NamedTuple):
    """A list name; in one module, or where no other part of this name is (`module` is "")."""

    name: str
    module: str = ""

    def __str__(self) -> str:
        return f"{self.name} in {self.module}" if self.module else self.name


Chosen = frozenset[Part]  # those in BF16
_LARGEST = 100.0  # of a square in units of the noise; beyond, an error is as bad as any


@dataclass(frozen=True)
class Effect:
    """What lists do to a training.

    gradient_error: root mean square over batches, in units of the noise between them. gradient_bias: the part of it
    that is the same in every batch, in the same units. loss_change: root mean square over batches; loss_error: that in
    units of the noise between the losses of batches. raised: what the program has raised; all of it is infinite then.
    """

    gradient_error: float
    gradient_bias: float
    loss_change: float
    loss_error: float
    raised: str = ""

    @property
    def size(self) -> float:
        """As one number, that a tolerance bounds: the bias may be half of it."""
        found = max(self.gradient_error, 2 * self.gradient_bias, self.loss_error)
        return found if math.isfinite(self.gradient_error + self.loss_change) else math.inf

    def meets(self, tolerance: float) -> bool:
        """Whether it is within a tolerance."""
        return self.size <= tolerance


@dataclass(frozen=True)
class Scale:
    """The units of charges: see `noise`.

    batches, directions, h: of the runs that were scored. noise: of gradients; loss_noise: of losses, between batches.
    """

    batches: int
    directions: int
    h: float
    noise: float
    loss_noise: float

    def effect(self, charge: Charge) -> Effect:
        # Where FP32 itself is not finite at shifted weights, as at a kink, that shift says nothing.
        changes = _finite(charge.changes(self.batches))
        projected = [*map(_finite, charge.projected(self.batches, self.directions, self.h))]
        error = noise.mean_square([each for direction in projected for each in direction])
        bias = min(noise.shared_square(projected), error)
        change = math.sqrt(noise.mean_square(changes))
        return Effect(math.sqrt(error) / self.noise, math.sqrt(bias) / self.noise, change, change / self.loss_noise)


def _finite(values: list[float]) -> list[float]:
    return [value for value in values if math.isfinite(value)]


@dataclass
class Link:
    """All edges from one part to another."""

    down: Charge = field(default_factory=Charge)
    up: Charge = field(default_factory=Charge)
    cost: float = 0.0


class Problem:
    """Parts, and the links between them.

    Args:
        sites: what was scored.
        part_of: the part that a site belongs to.
        costs: what a site costs in BF16 and in FP32.
        cast: what the casts of an edge cost, by their number and how many elements they have.
    """

    def __init__(
        self,
        sites: Iterable[Scored],
        part_of: Callable[[Scored], Part],
        costs: Callable[[Scored], tuple[float, float]],
        cast: Callable[[int, int], float],
        scale: Scale,
    ) -> None:
        self.scale = scale
        self.parts: list[Part] = []
        self.pinned: dict[Part, str] = {}
        self.unseen: set[Part] = set()  # of which not all is known
        self.sites: defaultdict[Part, list[Scored]] = defaultdict(list)
        self._own: defaultdict[Part, Charge] = defaultdict(Charge)
        self._low: defaultdict[Part, float] = defaultdict(float)
        self._wide: defaultdict[Part, float] = defaultdict(float)
        self._links: defaultdict[tuple[Part | None, Part], Link] = defaultdict(Link)
        for site in sites:
            part = part_of(site)
            if part not in self._own:
                self.parts.append(part)
            self.sites[part].append(site)
            self._own[part].add(site.charge)
            low, wide = costs(site)
            self._low[part] += low
            self._wide[part] += wide
            if site.pinned:
                self.pinned.setdefault(part, site.pinned)
            if not site.scored:
                self.unseen.add(part)
            for maker, edge in site.edges.items():
                source = None if maker is None else part_of(maker)
                if source != part:
                    link = self._links[source, part]
                    link.down.add(edge.down)
                    link.up.add(edge.up)
                    link.cost += cast(edge.casts, edge.elements)
        self._squares = {part: self._square(charge) for part, charge in self._own.items()}
        self._arcs = {
            pair: (self._square(link.down), self._square(link.up), link.cost) for pair, link in self._links.items()
        }

    def _square(self, charge: Charge) -> float:
        effect = self.scale.effect(charge)
        square = max(effect.gradient_error, 2 * effect.gradient_bias) ** 2 + effect.loss_error**2
        return min(square, _LARGEST) if math.isfinite(square) else _LARGEST

    def predicted(self, chosen: Chosen) -> Effect:
        """What it does when these parts are in BF16 and the others in FP32."""
        return self.scale.effect(total(self._charges(chosen)))

    def _charges(self, chosen: Chosen) -> Iterable[Charge]:
        yield from (charge for part, charge in self._own.items() if part in chosen)
        for (source, part), link in self._links.items():
            if part in chosen and source not in chosen:
                yield link.down
            elif part not in chosen and source in chosen:
                yield link.up

    def cost(self, chosen: Collection[Part]) -> float:
        """Of these parts in BF16 and the others in FP32, casts included."""
        own = sum(self._low[part] if part in chosen else self._wide[part] for part in self.parts)
        return own + sum(
            cost for (source, part), (_, _, cost) in self._arcs.items() if (part in chosen) is not (source in chosen)
        )

    def sources(self, part: Part) -> set[Part | None]:
        """The parts that a part's inputs come from; None for what is FP32 whatever lists say."""
        return {source for source, other in self._links if other == part}

    def alone(self, parts: Collection[Part], chosen: Chosen) -> tuple[Effect, float]:
        """What parts do in BF16 while the others are as chosen, and what that saves."""
        others, those = chosen - {*parts}, {*parts}
        charges = [self._own[part] for part in parts]
        for (source, part), link in self._links.items():
            if part in those and source not in those and source not in others:
                charges.append(link.down)
            elif source in those and part not in those and part not in others:
                charges.append(link.up)
        return self.scale.effect(total(charges)), self.cost(others) - self.cost(others | those)

    def harm(self, part: Part, chosen: Chosen) -> float:
        """What is known to be gone, as a square, if a part of those chosen goes to FP32."""
        found = self._squares[part]
        for (source, other), (down, _, _) in self._arcs.items():
            if other == part and source not in chosen:
                found += down
        return found

    def cheapest(self, weight: float) -> Chosen:
        """The parts in BF16 for which cost + weight * error^2 is least, errors taken to be independent."""
        number = {part: i for i, part in enumerate(self.parts)}
        everything = (
            sum(self._low.values()) + sum(self._wide.values()) + sum(cost for _, _, cost in self._arcs.values())
        )
        everything += weight * (sum(self._squares.values()) + sum(down + up for down, up, _ in self._arcs.values()))
        forbidden = max(everything, 1e-30)
        in_bf16 = [
            forbidden if part in self.pinned else self._low[part] + weight * self._squares[part] for part in self.parts
        ]
        in_fp32 = [self._wide[part] for part in self.parts]
        arcs: defaultdict[tuple[int, int], float] = defaultdict(float)
        for (source, part), (down, up, cost) in self._arcs.items():
            if source is None:
                in_bf16[number[part]] += cost + weight * down
            else:
                arcs[number[part], number[source]] += cost + weight * down
                arcs[number[source], number[part]] += cost + weight * up
        low = Network(in_bf16, in_fp32, arcs, forbidden).source_side()
        return frozenset(self.parts[i] for i in low)
