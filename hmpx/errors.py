"""What hmpx raises. Every message names the file and line (if there is one), the thing, and the nearest legal thing."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import NamedTuple


class Origin(NamedTuple):
    """A line of a file. With line 0, `path` is a whole file, or a place in words (``--set seed=1``)."""

    path: str
    line: int = 0

    def __str__(self) -> str:
        return f"{self.path}:{self.line}" if self.line else self.path


class Fault(NamedTuple):
    """One thing that is wrong with a user's input.

    text: what is wrong, without the place.
    origin: the place; None where it is not known.
    key: the key of a recipe that is wrong: ``("weights",)``, ``("modules", "lm_head")``.
    kind: the class of an error that has only such faults.
    """

    text: str
    origin: Origin | None = None
    key: tuple = ()
    kind: type[HmpxError] | None = None

    def __str__(self) -> str:
        return f"{self.origin}: {self.text}" if self.origin else self.text


class HmpxError(Exception):
    """Base of every error that hmpx raises.

    Args:
        said: the message; or faults, each of which is a line of it.
        key: the key of a recipe that the message is about; a recipe's file adds its line.

    Example:
        >>> try:
        ...     hmpx.attach(optimizer, "masters")
        ... except hmpx.HmpxError as error:
        ...     print(error)
        weights='masters' is none of 'stochastic', 'nearest', 'master', 'split', 'split8'; did you mean 'master'?
    """

    def __init__(self, said: str | Iterable[Fault] = "", *, key: tuple = ()) -> None:
        self.faults = [Fault(said, key=key, kind=type(self))] if isinstance(said, str) else list(said)
        lines = list(dict.fromkeys(map(str, self.faults)))
        more = [f"and {len(lines) - FEW} more"] if len(lines) > FEW else []
        super().__init__("\n".join([*lines[:FEW], *more]))


class OpListError(HmpxError, ValueError):
    """An op list file that cannot be read, or that contradicts itself.

    Example:
        >>> hmpx.convert(bf16_file_path="nowhere.txt")
        Traceback (most recent call last):
        hmpx.OpListError: nowhere.txt: no such op list file
    """


class UnknownOpError(OpListError):
    """A name in an op list that torch has no function for.

    Example:
        >>> with open("mine.txt", "w") as file:
        ...     _ = file.write("linear\\nsofmax\\n")
        >>> hmpx.convert(bf16_file_path="mine.txt")
        Traceback (most recent call last):
        hmpx.UnknownOpError: mine.txt:2: unknown op 'sofmax'; did you mean 'softmax'?
    """


class OptLevelError(HmpxError, ValueError):
    """An unknown opt_level, or arguments that an opt_level does not allow.

    Example:
        >>> hmpx.convert("O3")
        Traceback (most recent call last):
        hmpx.OptLevelError: opt_level 'O3' does not exist (legal: O1, O2)
    """


# A user meets these as hmpx.X, so that is how a traceback spells them.
for _error in (HmpxError, OpListError, UnknownOpError, OptLevelError):
    _error.__module__ = "hmpx"


FEW = 10  # faults that a message says in full; it counts the others


def raise_faults(faults: Iterable[Fault]) -> None:
    """Raise one error for some faults, of the class that they share; nothing happens if there are none."""
    found = list(faults)
    if found:
        kinds = [each.kind or HmpxError for each in found]
        raise next(kind for kind in kinds[0].__mro__ if all(issubclass(each, kind) for each in kinds))(found)


def there_are(names: Iterable[str]) -> str:
    """``" (there are 0, 1, 2)"``: the first of some names, where none is like the one that was asked for."""
    all_of_them = [*names]
    more = f" and {len(all_of_them) - FEW} more" if len(all_of_them) > FEW else ""
    return f" (there are {', '.join(all_of_them[:FEW])}{more})" if all_of_them else ""


def kind_of(thing: object) -> str:
    """``"an AdamW"``: the class of a thing, with its article."""
    name = type(thing).__name__
    return f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"


def did_you_mean(name: str, legal: Iterable[str], cutoff: float = 0.6, meant: str | None = None) -> str:
    """``"; did you mean 'conv2d'?"``, or an empty string: the one wording of every suggestion.

    Args:
        legal: names of the kind that was asked for; the one spelt most like `name` is suggested.
        cutoff: how alike they must be, from 0 to 1.
        meant: what the name stands for, where that is known. It goes before what is only spelt alike.
    """
    if meant is None:
        by_lowercase = {candidate.lower(): candidate for candidate in legal}
        close = difflib.get_close_matches(name.lower(), by_lowercase, n=1, cutoff=cutoff)
        meant = by_lowercase[close[0]] if close else None
    return f"; did you mean {meant!r}?" if meant else ""
