"""Features of hmpx that rest on names which torch does not document.

Torch promises nothing about these names. Each is listed in `torch_private`, with the feature that it belongs to, and
asked for here alone. Where the installed torch lacks one, its stand-in serves; a name without a stand-in switches its
feature off, and one sentence says so when the feature is first needed.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
import logging
import operator
import pkgutil
import re
import types
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from hmpx.errors import HmpxError

logger = logging.getLogger("hmpx")
_NOTHING: Any = object()


class Name(NamedTuple):
    """A name of torch.

    path: where it stands. `Optimizer()._hooks` is an attribute of the objects of a class; ``module:word`` is a word
    that the source of a module knows, such as a mark on somebody else's object; ``[add|mul]_`` are two names, add_ and
    mul_. what: hmpx does with it. stand_in: serves in its place; the feature stays on. off: what code gets, without the
    name and without the feature.
    """

    path: str
    what: str
    stand_in: Any = _NOTHING
    off: Any = _NOTHING

    def paths(self) -> list[str]:
        """The names, one by one."""
        head, _, rest = self.path.partition("[")
        ways, _, tail = rest.partition("]")
        return [f"{head}{way}{tail}" for way in ways.split("|")]


class Feature:
    """Something that hmpx does with such names. without: what holds where one of them is missing.

    >>> feature = Feature("kept casts", "every weight is cast anew", Name("torch._C._no_such_name", "counts"))
    >>> feature.sentence()  # doctest: +ELLIPSIS
    'kept casts: torch ... has no torch._C._no_such_name, so every weight is cast anew'
    """

    def __init__(self, title: str, without: str, *names: Name) -> None:
        self.title, self._without = title, without
        self.names = {path: name for name in names for path in name.paths()}
        self._said = False

    @functools.cached_property
    def missing(self) -> list[str]:
        """The names that the installed torch lacks, and that nothing stands in for."""
        return [path for path, name in self.names.items() if name.stand_in is _NOTHING and not exists(path)]

    def is_on(self) -> bool:
        """Return whether torch has what this needs; the first time that it has not, a warning says so."""
        if self.missing and not self._said:
            self._said = True
            logger.warning("hmpx: %s", self.sentence())
        return not self.missing

    def require(self) -> None:
        """Raise unless torch has what this needs.

        Raises:
            HmpxError: it has not.
        """
        if self.missing:
            raise HmpxError(self.sentence())

    def sentence(self) -> str:
        """Say which names are missing, and what holds without them."""
        return f"{self.title}: torch {torch.__version__} has no {' and no '.join(self.missing)}, so {self._without}"

    def get(self, path: str) -> Any:
        """Return what torch has under a name, or what serves in its place; else what raises as soon as it is used."""
        name, found = self.names[path], find(path)
        if found is not _NOTHING:
            return found
        instead = name.off if name.stand_in is _NOTHING else name.stand_in
        return _Absent(self) if instead is _NOTHING else instead


class _Absent:
    """Stands for a name that torch lacks, where nothing else can. A call, or a look for an attribute, raises."""

    def __init__(self, feature: Feature) -> None:
        self._feature = feature

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise HmpxError(self._feature.sentence())

    def __getattr__(self, name: str) -> Any:
        raise HmpxError(self._feature.sentence())


def find(path: str) -> Any:
    """Return what torch has under a dotted name."""
    with contextlib.suppress(AttributeError):
        return operator.attrgetter(path.removeprefix("torch."))(torch)
    try:
        return pkgutil.resolve_name(path)  # a module that is not imported yet
    except (ImportError, AttributeError):
        return _NOTHING


def exists(path: str) -> bool:
    """Return whether torch has a name."""
    module, mentioned, word = path.partition(":")
    owner, of_object, attribute = path.partition("().")
    if not (mentioned or of_object):
        return find(path) is not _NOTHING
    holder = find(module if mentioned else owner)
    if holder is _NOTHING:
        return False
    if mentioned:
        return re.search(rf"\b{word}\b", inspect.getsource(holder)) is not None
    return attribute in dir(holder) or any(_shows(base, attribute) for base in holder.__mro__)


def _shows(cls: type, attribute: str) -> bool:
    """Return whether a class shows that its objects have an attribute: an annotation, a string, or `self.X`."""
    codes = [each.__code__ for each in vars(cls).values() if isinstance(each, types.FunctionType)]
    if attribute in inspect.get_annotations(cls) or any(attribute in code.co_consts for code in codes):
        return True
    for code in (each for each in codes if attribute in each.co_names):
        for first, then in pairwise(dis.get_instructions(code)):
            if then.argval == attribute and first.argrepr.rpartition(" ")[2] == code.co_varnames[0]:
                return True
    return False


# What serves in the place of names that the installed torch lacks


class ByName(type):
    """Makes classes whose instances are those of a class of torch with the same name, wherever it stands."""

    def __instancecheck__(cls, value: object) -> bool:
        return any(each.__name__ == cls.__name__ for each in type(value).__mro__)


def schemas(qualified: str) -> list[Any]:
    packet = getattr(torch.ops.aten, qualified.removeprefix("aten::"), None)
    return [] if packet is None else [getattr(packet, each)._schema for each in packet.overloads()]


def on_each(name: str) -> Callable:
    """An operation on each tensor of a list, with one other for all of them, or with one for each."""
    operate = getattr(torch.Tensor, name)

    def operate_each(many: list[torch.Tensor], *others: Any, **kwargs: Any) -> list[torch.Tensor]:
        columns = [other if isinstance(other, list | tuple) else [other] * len(many) for other in others]
        return [operate(*row, **kwargs) for row in zip(many, *columns, strict=True)]

    return operate_each


def hooked(step: Callable) -> Any:
    made: Any = type("Made", (torch.optim.Optimizer,), {"step": step})
    made([torch.zeros(1)], {})
    return made.step


def has_avx512() -> bool:
    return torch.backends.cpu.get_cpu_capability().startswith(("AVX512", "AMX"))
