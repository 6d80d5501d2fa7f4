"""What a choice costs: its ops, and the casts where a tensor goes from one precision to the other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence

import torch

from hmpx.insight.tuning.look import Place, Site
from hmpx.insight.tuning.worth import Objective, cast_seconds

Unit = frozenset[Place]  # what is decided about at once: a name everywhere, or in some modules
Chosen = frozenset[Place]  # what is in BF16
SLACK = 0.02  # of what BF16 saves in all: less than that is no reason for an error, nor for a rule


class Costs:
    """Prices choices.

    sites: by place. flops: of all of them. free: the places that can be in BF16; pinned: the others, with the reason.
    """

    def __init__(self, sites: Collection[Site], objective: Objective, device: torch.device) -> None:
        self.sites: defaultdict[Place, list[Site]] = defaultdict(list)
        for site in sites:
            self.sites[site.place].append(site)
        self.pinned = {site.place: site.pinned for site in reversed([*sites]) if site.pinned}
        self.flops = sum(site.flops for site in sites)
        self.free = frozenset(self.sites.keys() - self.pinned.keys())
        self._cast, self._element = cast_seconds(device) if objective == "speed" else (0.0, 0.0)

    def of(self, chosen: Chosen) -> float:
        """With these places in BF16."""
        return self.of_sites(lambda site: site.place in chosen)

    def of_sites(self, is_low: Callable[[Site], bool]) -> float:
        """With these sites in BF16."""
        total = 0.0
        for sites in self.sites.values():
            for site in sites:
                low = is_low(site)
                total += site.low if low else site.wide
                for source, (casts, elements) in site.sources.items():
                    if low is not (source is not None and is_low(source)):
                        total += self._cast * casts + self._element * elements
        return total

    def gain(self, unit: Unit, beside: Chosen) -> float:
        """What a unit saves in BF16, while the other places are as chosen."""
        return self.of(beside - unit) - self.of(beside | unit)

    def share(self, is_low: Callable[[Site], bool]) -> float:
        """Of the FLOPs of matrix products, what is in BF16."""
        sites = [site for each in self.sites.values() for site in each]
        return sum(site.flops for site in sites if is_low(site)) / (self.flops or 1.0)

    def cheapest(self, units: Sequence[Unit]) -> Chosen:
        """The choice that costs least, as far as changes of single units lead: from all in BF16, and from none."""

        def from_here(chosen: Chosen) -> Chosen:
            for _ in range(len(units)):
                before = chosen
                for unit in units:
                    chosen = chosen | unit if self.gain(unit, chosen) > 0 else chosen - unit
                if chosen == before:
                    break
            return chosen

        every: Chosen = frozenset().union(*units)
        return min(map(from_here, (every, frozenset())), key=lambda chosen: (self.of(chosen), len(chosen)))


def usually_low(places: Iterable[Place], chosen: Chosen) -> dict[str, bool]:
    """For each name whether the lists have it in BF16: as outside of modules, else as in most modules."""
    by_name: defaultdict[str, list[Place]] = defaultdict(list)
    for place in places:
        by_name[place.name].append(place)
    return {
        name: Place(name) in chosen
        if Place(name) in those
        else 2 * sum(place in chosen for place in those) > len(those)
        for name, those in by_name.items()
    }
