"""`Log`: what was recorded, to be printed, saved, compared with another, or handed on."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hmpx.errors import HmpxError
from hmpx.insight.recording.site import RoundTrip, Site

SCHEMA = 1
Rows = Callable[[list[dict[str, Any]]], object]  # a function of the rows of a log


@dataclass
class Log:
    """What `record` saw. It prints as a table, the dearest sites first.

    Attributes:
        sites: a `Site` for each op, line, module and set of dtypes. round_trips: tensors that were cast there and back.
        unmatched: names in the op lists that no call matched. escaped: listed ops that ran in another dtype than their
            list says, since no patch in Python reaches them, one sentence each. steps: of optimizers, meanwhile.
        unchosen: the sites that ran in a dtype nobody chose. first_nonfinite: the first of `sites`, which stand in the
            order in which they were met, with a result that was not finite; None if there is none.
        policy: the op lists, as a list file. about: versions of hmpx, torch and Python; what this CPU has.

    `json(path)` saves it, and `load(path)` reads that; `as_json()` is the same as objects. `every(n, callback)` hands
    the rows on while it records.

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
    escaped: tuple[str, ...] = ()
    steps: int = 0
    policy: str = ""
    about: dict[str, str] = field(default_factory=dict)
    _callbacks: list[tuple[int, Callable[[list[dict]], object]]] = field(
        default_factory=list, repr=False, compare=False
    )

    @property
    def unchosen(self) -> list[Site]:
        """The sites that ran in a dtype nobody chose; `Site.unchosen` says why."""
        return [site for site in self.sites if site.unchosen]

    @property
    def first_nonfinite(self) -> Site | None:
        """The first site, in the order in which they were met, with a result that was not finite."""
        return next((site for site in self.sites if site.nonfinite is not None), None)

    def every(self, n: int, callback: Rows) -> None:
        """While this records, hand the rows of `sites` to `callback` after every n steps of optimizers.

        The rows are dicts with the names and values of `Site`, summed up since the beginning. See `steps`.

        Raises:
            HmpxError: n is no positive integer, or `callback` cannot be called.
        """
        if not isinstance(n, int) or n < 1:
            raise HmpxError(f"every takes a number of steps from 1 on, not {n!r}")
        if not callable(callback):
            raise HmpxError(f"every takes a function of one argument, the rows, not {callback!r}")
        self._callbacks.append((n, callback))

    def _stepped(self) -> None:
        """An optimizer has stepped while this recorded."""
        self.steps += 1
        for n, callback in self._callbacks:
            if self.steps % n == 0:
                callback([site.as_json() for site in self.sites])

    def as_json(self) -> dict[str, Any]:
        """Everything as numbers, strings, lists and dicts, by the names of the attributes; see `json`."""
        found = asdict(self)
        del found["_callbacks"]
        return {"schema": SCHEMA, **found}

    def json(self, path: str | os.PathLike[str]) -> None:
        """Save as JSON: an object with the attributes of `Log`, whose `sites` have those of `Site`.

        "schema" is 1; it grows when a name changes its meaning or goes away. Lists stand for tuples, null for None.
        """
        Path(path).write_text(json.dumps(self.as_json(), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Log:
        """Read what `json` has saved.

        Raises:
            HmpxError: it cannot be read, is no JSON, or no record that this version knows.
        """
        try:
            found = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise HmpxError(f"{path}: cannot be read: {error.strerror or error}") from None
        except ValueError as error:
            raise HmpxError(f"{path}: no JSON: {error}") from None
        if not isinstance(found, dict) or found.get("schema") != SCHEMA or "sites" not in found:
            raise HmpxError(f"{path}: no record of schema {SCHEMA}, as hmpx.record and `python -m hmpx record` save it")
        return cls(
            [Site.from_json(row) for row in found["sites"]],
            [RoundTrip.from_json(row) for row in found["round_trips"]],
            tuple(found["unmatched"]),
            tuple(found["escaped"]),
            found["steps"],
            found["policy"],
            found["about"],
        )
