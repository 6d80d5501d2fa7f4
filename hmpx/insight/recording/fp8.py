"""What `record` shows of casts to FP8: how far numbers reach, and how many of them the format does not hold."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from threading import get_ident

import torch

from hmpx.insight.recording.alike import alike
from hmpx.insight.recording.site import Site
from hmpx.insight.recording.words import at, times
from hmpx.ops.computing.fp8_product import SPILLS
from hmpx.process_state import fp8_watchers

Tensor = torch.Tensor
aten = torch.ops.aten
_FIGURES = ("largest", "elements", "underflowed", "saturated")


class Fp8Casts:
    """The casts of one call, which go on in its backward pass, or of a site: figures on the device until the end."""

    def __init__(self) -> None:
        self._totals: dict[str, Tensor] = {}
        self.in_low: Counter[str] = Counter()
        self._rest: Fp8Casts | None = None  # of the site, once it is known

    def note(self, why_not: str) -> None:
        """A call that is listed for FP8 is computed in FP8, or in low precision for this reason."""
        if why_not:
            self.in_low[why_not] += 1

    def seen(self, role: str, x: Tensor, codes: Tensor, scale: Tensor, name: str) -> None:
        """An operand, what it was cast to, and the scale that decodes it."""
        if not role:
            return
        size = aten.abs(aten.to.dtype(x.detach(), torch.float32))
        size = aten.where(aten.isfinite(size), size, 0.0)
        zero = aten.bitwise_and(aten.eq(aten.to.dtype(codes, torch.float32), 0), aten.gt(size, 0))
        beyond = aten.gt(aten.div(size, scale), SPILLS[name])
        counts = [aten.to.dtype(aten.sum(each), torch.float64) for each in (aten.ones_like(zero), zero, beyond)]
        found = aten.stack([aten.to.dtype(aten.amax(size), torch.float64), *counts])
        (self._rest or self)._add(role, found)

    def _add(self, role: str, found: Tensor) -> None:
        before = self._totals.get(role)
        if before is not None:
            found = aten.cat([aten.maximum(found[:1], before[:1]), aten.add(found[1:], before[1:])])
        self._totals[role] = found

    def into(self, site: Site) -> None:
        """Write down what has been seen, which waits for the device."""
        site.in_low = dict(self.in_low)
        site.fp8 = {role: dict(zip(_FIGURES, each.tolist(), strict=True)) for role, each in self._totals.items()}

    def take(self, casts: Fp8Casts) -> None:
        """Take over what a call's own have seen, and will see."""
        self.in_low.update(casts.in_low)
        for role, found in casts._totals.items():
            self._add(role, found)
        casts._rest = self


@contextlib.contextmanager
def watched(casts: Fp8Casts) -> Iterator[None]:
    """A region in which this thread's casts to FP8 are seen; and those of its gradients, whenever they come."""
    fp8_watchers[get_ident()] = casts
    try:
        yield
    finally:
        del fp8_watchers[get_ident()]


def reached(sites: Iterable[Site]) -> Iterator[str]:
    """Of each site in FP8, how far its numbers reach and what the format does not hold; the worst first."""
    groups = [site for site in alike(sites) if site.fp8]
    for site in sorted(groups, key=_lost, reverse=True):
        parts = [_of_role(role, figures) for role, figures in site.fp8.items()]
        yield f"{at(site)}: {'; '.join(parts)}"


def _lost(site: Site) -> float:
    return max((each["underflowed"] + each["saturated"]) / each["elements"] for each in site.fp8.values())


def _of_role(role: str, figures: Mapping[str, float]) -> str:
    shares = {f"{how}": figures[how] / figures["elements"] for how in ("underflowed", "saturated")}
    said = [f"{100 * share:.2g} % {how}" for how, share in shares.items() if share]
    return ", ".join([f"{role} up to {figures['largest']:.2g}", *said])


def in_low(sites: Iterable[Site]) -> Iterator[str]:
    """Why calls that are listed for FP8 are computed in low precision."""
    for site in alike(sites):
        for why, calls in site.in_low.items():
            yield f"{at(site)}: {why} ({times(calls)})"
