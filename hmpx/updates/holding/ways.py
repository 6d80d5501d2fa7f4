"""The way to hold one BF16 parameter between two steps, and rules that choose it by the parameter's name."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple

import torch

from hmpx.errors import HmpxError, did_you_mean

Weights = Literal["stochastic", "nearest", "master", "split", "split8"]


class Way(NamedTuple):
    """The settings that may differ from parameter to parameter; see `hmpx.attach`."""

    weights: Weights = "stochastic"
    state_dtype: torch.dtype | Literal["8bit"] = torch.float32


USUAL = Way()

Rules = tuple[tuple[str, Way], ...]  # a pattern of names, and what holds for the parameters that it fits


def read_rules(given: Any, usual: Way) -> Rules:
    """The rules in `given`, a mapping of patterns to mappings; what a rule leaves out is as in `usual`.

    Raises:
        HmpxError: it is no such mapping, with the nearest legal key. Values are not looked at.
    """
    try:
        pairs = dict(given).items()
    except (TypeError, ValueError):
        raise HmpxError(f"parameters is {given!r}, not a mapping of parameters' names to settings") from None
    found = []
    for pattern, rule in pairs:
        if not isinstance(pattern, str):
            raise HmpxError(f"parameters: {pattern!r} is no name of a parameter, nor a pattern of names")
        said = rule._asdict() if isinstance(rule, Way) else rule
        if not isinstance(said, Mapping):
            example = "{'weights': 'split'}"
            raise HmpxError(f"parameters: {pattern!r}: {rule!r} is no mapping of settings, such as {example}")
        for key in said:
            if key not in Way._fields:
                legal = ", ".join(Way._fields)
                hint = did_you_mean(str(key), Way._fields)
                raise HmpxError(f"parameters: {pattern!r}: {key!r} is none of {legal}{hint}")
        found.append((pattern, usual._replace(**said)))
    return tuple(found)


def fits_none(pattern: str, names: Collection[str]) -> str:
    """The problem with a pattern that fits no parameter's name, with the nearest name; "" if it fits one."""
    if any(fnmatchcase(name, pattern) for name in names):
        return ""
    inside = any(fnmatchcase(name, f"{pattern}.*") for name in names)
    what = "a module and not the name of a parameter" if inside else "the name of no parameter"
    hint = did_you_mean(pattern, names, meant=f"{pattern}.*" if inside else None)
    return f"parameters: {pattern!r} is {what}{hint}"


def way_of(name: str, rules: Rules, usual: Way) -> Way:
    """The way of a parameter: that of the last rule whose pattern fits its name, else the usual one."""
    return next((way for pattern, way in reversed(rules) if fnmatchcase(name, pattern)), usual)
