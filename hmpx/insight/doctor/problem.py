"""`Problem`: one thing that the doctor has found, with its evidence and what to do."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from hmpx.insight.text_table import short_places


@dataclass(frozen=True)
class Problem:
    """One finding.

    Attributes:
        kind: what it is, in a word or two: "lost updates", "loss", "mask".
        wrong: whether it harms the training; what is only worth knowing is a note.
        said: what was found, with the number that shows it.
        where: the line of your code, as file:line; "" where it belongs to none. names: of parameters, buffers or
            modules that it is about, the worst first. ops: names in op lists.
        do: the one thing to do about it.
        weight: from 0 to 1, how much of the training it touches: what the findings are sorted by.

    It prints as a sentence; `as_json()` is a dict of its attributes.

    Example:
        >>> with hmpx.doctor() as found:
        ...     torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=torch.tensor(0.1, dtype=torch.bfloat16)).step()
        >>> found.findings[0].kind, found.findings[0].wrong
        ('learning rate', True)
    """

    kind: str
    wrong: bool
    said: str
    do: str
    where: str = ""
    names: tuple[str, ...] = ()
    ops: tuple[str, ...] = ()
    weight: float = 0.0

    def __str__(self) -> str:
        place = f"{short_places(self.where)}: " if self.where else ""
        return f"{'WRONG' if self.wrong else 'note'}  {self.kind}: {place}{self.said}"

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def percent(share: float) -> str:
    """ "93.1 %"; "100 %" and "0 %" only where it is all or nothing."""
    if share in (0, 1):
        return f"{100 * share:.0f} %"
    return f"{min(max(100 * share, 0.1), 99.9):.1f} %"


def some(names: tuple[str, ...], most: int = 3) -> str:
    """The first few of some names, and how many there are beside these."""
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")
