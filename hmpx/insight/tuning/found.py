"""The sites that were scored, and what a run leaves of them for one that goes on from it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from hmpx.insight.comparing.calls import Compared
from hmpx.insight.tuning.charges import Charge, Edge, Scored

Identity = tuple[str, str, str]  # op, line, module


class Found:
    """Scored sites by call site. What an earlier run has left is taken up by the first site that is the same."""

    def __init__(self, left: Any = ()) -> None:
        self._by_site: dict[Compared, Scored] = {}
        self._left: defaultdict[Identity, list[Scored]] = defaultdict(list)
        self._all: list[Scored] = [Scored(Compared(*each["identity"])) for each in left]
        for site, each in zip(self._all, left, strict=True):
            self._left[_identity(site.site)].append(site)
            site.charge = _charge(each["charge"])
            site.calls, site.pinned, site.scored, site.worth = (
                each[key] for key in ("calls", "pinned", "scored", "worth")
            )
            for maker, down, up, casts, elements in each["edges"]:
                source = None if maker is None else self._all[maker]
                site.edges[source] = Edge(_charge(down), _charge(up), casts, elements)

    def __iter__(self) -> Iterator[Scored]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    def at(self, site: Compared) -> Scored | None:
        """The scored site of a call site, if it is one."""
        if site not in self._by_site and self._left[_identity(site)]:
            self._by_site[site] = self._left[_identity(site)].pop(0)
        return self._by_site.get(site)

    def made(self, site: Compared) -> Scored:
        """The scored site of a call site, a new one if there is none."""
        found = self.at(site)
        if found is None:
            found = self._by_site[site] = Scored(site)
            self._all.append(found)
        return found

    def as_plain(self, batches: int) -> list[dict[str, Any]]:
        """What `Found` takes, of plain objects; of so many batches, for one may have been interrupted."""
        if not batches:
            return []
        number = {site: i for i, site in enumerate(self._all)}
        return [
            {
                "identity": _identity(site.site),
                "charge": _plain(site.charge, batches),
                "calls": site.calls,
                "pinned": site.pinned,
                "scored": site.scored,
                "worth": site.worth,
                "edges": [
                    (
                        None if maker is None else number[maker],
                        *(_plain(charge, batches) for charge in (edge.down, edge.up)),
                        edge.casts,
                        edge.elements,
                    )
                    for maker, edge in site.edges.items()
                ],
            }
            for site in self._all
        ]


def _identity(site: Compared) -> Identity:
    return site.op, site.where, site.module


def _plain(charge: Charge, batches: int) -> list[dict[tuple[int, int], float]]:
    return [
        {key: value for key, value in sums.items() if key[0] < batches} for sums in (charge.forward, charge.backward)
    ]


def _charge(plain: list[dict[tuple[int, int], float]]) -> Charge:
    found = Charge()
    found.forward.update(plain[0])
    found.backward.update(plain[1])
    return found
