"""Where each key of a recipe is said, so that an error that is found later still names the file and line of its key."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from hmpx.errors import Fault, HmpxError, Origin
from hmpx.ops.policies.op_lists import OpLists


@dataclass(frozen=True)
class Origins:
    """What a recipe knows of the files that it was read from. A recipe that is made in Python knows nothing.

    Attributes:
        by_key: the origin of each key: ``("weights",)``, ``("module_dtypes", "lm_head")``, ``("bf16", 0)`` for a first
            name. They are in the order of their lines; those of a file follow those of the file that it extends.
        lists: the content of each list file, by its key.
        under_zero: the keys that have other values for optimizers under ZeRO-1, which NxD's configuration leaves to a
            default.
    """

    by_key: Mapping[tuple, Origin] = field(default_factory=dict)
    lists: Mapping[str, OpLists] = field(default_factory=dict)
    under_zero: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of_file(cls, path: object, lines: Mapping[tuple, int]) -> Origins:
        """Make the origins of one file from the lines of its keys."""
        return cls({key: Origin(str(path), line) for key, line in lines.items()})

    def where(self, *key: str | int) -> str:
        """Return ``"mine.yaml:3"``; an empty string where no origin is known."""
        return str(self.by_key[key]) if key in self.by_key else ""

    def without(self, keys: Collection[str]) -> Origins:
        """Return the origins without some keys, for a recipe that says something else about these."""
        origins = {key: origin for key, origin in self.by_key.items() if key[0] not in keys}
        lists, zero = ({key: its[key] for key in its if key not in keys} for its in (self.lists, self.under_zero))
        return Origins(origins, lists, zero)

    def under(self, nearer: Origins) -> Origins:
        """Return both origins as one; where both have a key, the origin in `nearer` counts."""
        around = {key: origin for key, origin in self.by_key.items() if key not in nearer.by_key}
        zero = {**self.under_zero, **nearer.under_zero}
        return Origins({**around, **nearer.by_key}, {**self.lists, **nearer.lists}, zero)

    @contextlib.contextmanager
    def named(self, lists: Mapping[str, str]) -> Iterator[None]:
        """Give the faults of each error that is raised inside the origin of their key.

        Args:
            lists: the path of each list file, by its key.
        """
        try:
            yield
        except HmpxError as error:
            faults = [self.located(fault, lists) for fault in error.faults]
            if faults == error.faults:
                raise
            raise type(error)(faults) from None  # the cause may show what the message does not

    def located(self, fault: Fault, lists: Mapping[str, str]) -> Fault:
        """Return a fault with the origin of its key; one in a list file, with that of the key that names the file."""
        if fault.origin is None:
            origins = (self.by_key.get(fault.key[:length]) for length in range(len(fault.key), 0, -1))
            return fault._replace(origin=next(filter(None, origins), None))
        for key, path in lists.items():
            origin = self.by_key.get((key,))
            if origin is not None and origin.line and path == fault.origin.path:
                return Fault(f"{key}: {fault}", origin, (key,), fault.kind)
        return fault
