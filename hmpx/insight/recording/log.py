"""`Log`: what was recorded, to be printed, or saved."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from hmpx.errors import HmpxError
from hmpx.insight.pages import Report
from hmpx.insight.reasons import in_a_line
from hmpx.insight.recording.recorded import SUMS, RoundTrip, Site
from hmpx.insight.recording.table import as_page, as_text
from hmpx.insight.text_table import terminal_width

SCHEMA = 1  # of the JSON


@dataclass
class Log(Report):
    """What `record` saw. It prints as a table, the dearest sites first, with what calls for attention beneath it.

    Attributes:
        sites: a `Site` for each op, line, module and set of dtypes. round_trips: tensors that were cast there and back.
        unmatched: names in op lists of yours that no call matched. unmatched_of_hmpx: the same of the lists that come
            with hmpx, which serve many models. escaped: listed ops that ran in another dtype than their list says,
            since no patch in Python reaches them, one sentence each. steps: of optimizers, meanwhile.
            updates: what `Attachment.updates()` has counted of these, where it was asked for, by its `as_json()`.
        unchosen: the sites that ran in a dtype nobody chose. first_nonfinite: the site of the first call of all with a
            result that was not finite; None if there is none. totals: sums over the sites, and the casts' share of
            the time.
        policy: the op lists, as a list file; "" where nothing was converted. about: versions of hmpx, torch and Python;
            what this CPU has.

    `html(path)` writes a page. `json(path)` saves it, and `load(path)` reads that; `as_json()` is the same as objects,
    with the names of the attributes. "schema" in it is 1; it grows when a name changes its meaning or goes away.

    Example:
        >>> with hmpx.convert(), hmpx.record() as log:
        ...     y = inputs.matmul(inputs.t())
        >>> site = log.sites[0]
        >>> site.op, site.rule, site.dtypes, site.shapes, site.casts
        ('matmul', 'bf16', 'float32 -> bfloat16', ['2x4, 4x2'], 2)
    """

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
        """Return the sites that ran in a dtype nobody chose; `Site.unchosen` says why."""
        return [site for site in self.sites if site.unchosen]

    @property
    def first_nonfinite(self) -> Site | None:
        """Return the site of the first call of all whose result was not finite."""
        wrong = (site for site in self.sites if site.nonfinite_at)
        return min(wrong, key=lambda site: site.nonfinite_at or 0, default=None)

    @property
    def totals(self) -> dict[str, Any]:
        """Return the sums over the sites, by the names of their attributes, and `cast_share`."""
        sums = {name: sum(getattr(site, name) for site in self.sites) for name in SUMS}
        seconds = sums["cast_seconds"] + sums["op_seconds"]
        return {**sums, "cast_share": sums["cast_seconds"] / seconds if seconds else 0.0}

    def as_json(self) -> dict[str, Any]:
        """Return everything as numbers, strings, lists and dicts, by the names of the attributes; see `json`."""
        return {"schema": SCHEMA, **asdict(self), "totals": self.totals}

    def __str__(self) -> str:
        return as_text(self, terminal_width())

    def _page(self) -> str:
        return as_page(self)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Log:
        """Read what `json` has saved, here or elsewhere. Characters that a terminal would obey are left out.

        Raises:
            HmpxError: it cannot be read, is no JSON, or no record of which this version can show everything.
        """
        try:
            found = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise HmpxError(f"{path}: cannot be read: {error.strerror or error}") from None
        except (ValueError, RecursionError) as error:
            raise HmpxError(f"{path}: no JSON: {error}") from None
        if not isinstance(found, dict) or found.get("schema") != SCHEMA:
            raise HmpxError(f"{path}: no record of schema {SCHEMA}, as hmpx.record and `python -m hmpx record` save it")
        try:
            values = _values(cls, _printable(found))
            values["sites"] = [Site(**_values(Site, row)) for row in values["sites"]]
            values["round_trips"] = [RoundTrip(**_values(RoundTrip, row)) for row in values["round_trips"]]
            values["policy"] = "\n".join(map(_printable, found["policy"].split("\n")))
            log = cls(**values)
            as_page(log)  # which needs values of the right types
        except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            raise HmpxError(f"{path}: a record that is not whole: {in_a_line(error)}") from None
        return log


def _values(cls: Any, row: dict[str, Any]) -> dict[str, Any]:
    """Return the values in an object of JSON that a class has, lists as its tuples. Later versions may add others."""
    types = {each.name: each.type for each in fields(cls) if each.name in row}  # as they are written
    return {name: tuple(row[name]) if kind.startswith("tuple") else row[name] for name, kind in types.items()}


def _printable(value: Any) -> Any:
    """Return a value of JSON without the characters that a terminal would obey."""
    if isinstance(value, str):
        return "".join(filter(str.isprintable, value))
    if isinstance(value, list):
        return [_printable(each) for each in value]
    if isinstance(value, dict):
        return {_printable(key): _printable(each) for key, each in value.items()}
    return value
