"""What hmpx raises. Every message names the file and line (if there is one), the thing, and the nearest legal thing."""

from __future__ import annotations

import contextlib
import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple, ParamSpec, TypeVar


class Origin(NamedTuple):
    """A line of a file. With line 0, `path` is a whole file, or a place in words (``--set seed=1``)."""

    path: str
    line: int = 0

    def __str__(self) -> str:
        return f"{self.path}:{self.line}" if self.line else self.path


Places = Mapping[tuple, Origin]  # of keys: ("weights",), ("modules", "lm_head"), ("bf16", 0) for a first name


class HmpxError(Exception):
    """Base of every error that hmpx raises.

    Args:
        said: the message.
        place: the line of a file, or a place in words, that the message is about and begins with.
        key: the key of a recipe that the message is about; a recipe's file adds its line (`errors_at`).

    Example:
        >>> try:
        ...     hmpx.attach(optimizer, "masters")
        ... except hmpx.HmpxError as error:
        ...     print(error)
        weights='masters' is none of 'stochastic', 'nearest', 'master', 'split', 'split8'; did you mean 'master'?
    """

    def __init__(self, said: str = "", place: Origin | str = "", *, key: tuple = ()) -> None:
        self.said, self.place, self.key = said, place, key
        super().__init__(f"{place}: {said}" if place else said)


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


_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def with_hints(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Return `function`, whose TypeError for an argument that it has not names the one that is spelt alike."""
    legal = inspect.signature(function).parameters

    @functools.wraps(function)
    def hinting(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        for name in kwargs.keys() - legal.keys():
            said = f"hmpx.{function.__name__} has no argument {name!r}"
            raise TypeError(said + (did_you_mean(name, legal) or f" (legal: {', '.join(legal)})"))
        return function(*args, **kwargs)

    return hinting


FEW = 10  # names that a message says in full; it counts the others


@contextlib.contextmanager
def errors_at(places: Places, place: Origin | str = "", before: str = "", key: tuple = ()) -> Iterator[None]:
    """Let errors that are raised inside and have no place begin with that of their key in `places`, or with `place`.

    before: what goes before their text. key: what goes before their key.
    """
    try:
        yield
    except HmpxError as error:
        whole = (*key, *error.key)
        known = (places.get(whole[:length]) for length in range(len(whole), 0, -1))
        where = error.place or next(filter(None, known), place)
        if (where, before, key) == (error.place, "", ()):
            raise
        raise type(error)(f"{before}{error.said}", where, key=whole) from None


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
