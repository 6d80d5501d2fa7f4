"""`Patch`: one attribute of torch, its original, and the wrapper that replaces it."""

from __future__ import annotations

import enum
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import wrapt

from hmpx.changes import Attribute
from hmpx.ops.policies.catalog import Entry
from hmpx.ops.policies.policy import Rule


class Patching(enum.Enum):
    """The effect of a patch on calls of an entry point."""

    CAST = "cast"  # the arguments are cast as its rule says
    UNCAST = "uncast"  # no casts inside: not the model's forward
    CHECK = "check"  # a layer's check of its input's dtype accepts what will be cast
    CARRYING = "carrying"  # a function that it keeps, to call it later, runs in the region of now
    EXPLAINED = "explained"  # nothing but that an error of torch's says why
    OBSERVED = "observed"  # nothing but that an observer sees them
    DTYPE_MAP = "dtype map"  # a dtype that is asked for becomes another

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Patch:
    """One attribute, before and after.

    how: what the patch does. rule: of one that casts, what the policy says (where that depends on the arguments of a
    call, or on the scope, the first of its cases); else None. before: what it takes the place of: the original, or an
    older wrapper of ours.
    """

    op: str
    how: Patching
    rule: Rule | None
    label: str
    owner: Any
    attribute: str
    original: Any
    wrapper: Any
    inherited: bool
    before: Any

    def __str__(self) -> str:
        return f"{self.label:45} {self.rule or self.how}"

    @property
    def place(self) -> Attribute:
        return Attribute(self.owner, self.attribute, self.label)


def made_patch(
    op: str,
    how: Patching,
    rule: Rule | None,
    entry: Entry,
    original: Any,
    wrapper: Any,
    inherited: bool,
    before: Any = None,
) -> Patch:
    """The patch of an entry point; `before`: the value that stands there now, if it is not the original."""
    before = original if before is None else before
    return Patch(op, how, rule, entry.label, entry.owner, entry.attribute, original, wrapper, inherited, before)


def read_attribute(owner: Any, attribute: str) -> tuple[Any, bool]:
    """The attribute as it stands in the namespace, or along a class's MRO; and whether it is inherited."""
    _, _, original = wrapt.resolve_path(owner, attribute)
    return original, attribute not in vars(owner)


def patch_at(path: str, how: Patching, build: Callable[[Any], Any]) -> Patch:
    """A patch of one dotted name in torch that casts nothing. `build` makes the new value from the old one."""
    owner, attribute, original = wrapt.resolve_path(*split_path(path))
    inherited = attribute not in vars(owner)
    return Patch(attribute, how, None, path, owner, attribute, original, build(original), inherited, original)


def split_path(path: str) -> tuple[Any, str]:
    """Owner and attribute of a dotted name in torch."""
    name, _, attribute = path.rpartition(".")
    return pkgutil.resolve_name(name), attribute
