"""What a record holds: plain values, which every view of it is made from."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any

from hmpx.insight.recording.site import RoundTrip, Site

SCHEMA = 1


@dataclass
class Recorded:
    """The values of a `Log`, which says what they are."""

    sites: list[Site] = field(default_factory=list)
    round_trips: list[RoundTrip] = field(default_factory=list)
    unmatched: tuple[str, ...] = ()
    unmatched_of_hmpx: tuple[str, ...] = ()
    escaped: tuple[str, ...] = ()
    steps: int = 0
    updates: list[dict[str, Any]] = field(default_factory=list)
    policy: str = ""
    about: dict[str, str] = field(default_factory=dict)

    @property
    def unchosen(self) -> list[Site]:
        """The sites that ran in a dtype nobody chose; `Site.unchosen` says why."""
        return [site for site in self.sites if site.unchosen]

    @property
    def first_nonfinite(self) -> Site | None:
        """The site of the first call of all whose result was not finite."""
        return min(
            (site for site in self.sites if site.nonfinite_at), key=lambda site: site.nonfinite_at or 0, default=None
        )

    @property
    def totals(self) -> dict[str, Any]:
        """Sums over the sites: calls, casts, casts_avoided, bytes_cast, cast_seconds, op_seconds, and cast_share."""
        names = ("calls", "casts", "casts_avoided", "bytes_cast", "cast_seconds", "op_seconds")
        sums = {name: sum(getattr(site, name) for site in self.sites) for name in names}
        seconds = sums["cast_seconds"] + sums["op_seconds"]
        return {**sums, "cast_share": sums["cast_seconds"] / seconds if seconds else 0.0}

    def as_json(self) -> dict[str, Any]:
        """Everything as numbers, strings, lists and dicts, by the names of the attributes; see `json`."""
        values = {each.name: getattr(self, each.name) for each in fields(Recorded)}
        for name in ("sites", "round_trips"):
            values[name] = [asdict(each) for each in values[name]]
        return {"schema": SCHEMA, **values, "totals": self.totals}
