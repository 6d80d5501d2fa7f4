"""The settings of one optimizer: how weights, state and gradients are held and updated.

A setting is a field here, which has its default, an argument of `hmpx.attach`, which documents it, and a key of a
recipe. A test holds the three names against one another.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from typing import Any, cast

import torch

from hmpx.base.tensors import dtype_named
from hmpx.errors import HmpxError, did_you_mean
from hmpx.rounding.stochastic import check_seed
from hmpx.updates.holding.held import Way, Weights
from hmpx.updates.holding.state_forms import STATE_FORMS, StateDtype
from hmpx.updates.holding.stores import WAYS

Rules = tuple[tuple[str, Way], ...]  # a pattern of names, and the way of the parameters that it fits


@dataclass(frozen=True)
class Settings:
    """The arguments of `hmpx.attach` that say how an optimizer updates weights; see there.

    The defaults are what a `disable_casts()` region does. A dtype may be given by its name (``"bf16"``). `parameters`
    becomes a tuple of patterns, each with its `Way`.

    Raises:
        HmpxError: a value that is not legal, or masters in a checkpoint without a store that has them.
    """

    weights: Weights = "stochastic"
    seed: int | None = None
    state_dtype: StateDtype = torch.float32
    parameters: Rules | Mapping[str, Mapping[str, Any]] = ()
    use_fp32_grad_acc: bool = False
    use_master_weights_in_ckpt: bool = False
    release_gradients: bool = False
    fused: bool | None = None

    def __post_init__(self) -> None:
        usual = _checked(Way(self.weights, self.state_dtype))
        object.__setattr__(self, "state_dtype", usual.state_dtype)
        object.__setattr__(self, "parameters", _read_rules(self.parameters, usual))
        if self.seed is not None:
            check_seed(self.seed)
        for name in SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise HmpxError(f"{name}={getattr(self, name)!r} is neither True nor False", key=(name,))
        if self.fused is not None and not isinstance(self.fused, bool):
            raise HmpxError(f"fused={self.fused!r} is neither True nor False nor None", key=("fused",))
        if self.use_master_weights_in_ckpt and not self.has_masters:
            raise HmpxError(
                f"weights={self.weights!r} has no masters; use_master_weights_in_ckpt needs master, split or split8",
                key=("use_master_weights_in_ckpt",),
            )

    @property
    def has_masters(self) -> bool:
        return any(WAYS[way.weights].has_masters for way in self.ways)

    @property
    def ways(self) -> list[Way]:
        """The usual way, and the ways of all rules."""
        return list(dict.fromkeys([self._usual, *(way for _, way in self.rules)]))

    def way(self, name: str) -> Way:
        """Return how the parameter with this name is held: the last rule that fits decides, else the usual way."""
        return next((way for pattern, way in reversed(self.rules) if fnmatchcase(name, pattern)), self._usual)

    @property
    def _usual(self) -> Way:
        return Way(self.weights, self.state_dtype)

    @property
    def rules(self) -> Rules:
        """Patterns of parameters' names, each with the way of the parameters that it fits."""
        return cast(Rules, self.parameters)  # since `__post_init__`

    def check_patterns(self, names: Collection[str]) -> None:
        """Check that each pattern fits one of the names that parameters have.

        Raises:
            HmpxError: one does not; with the nearest name.
        """
        for pattern, _ in self.rules:
            if wrong := fits_none(pattern, names):
                if names and all(name.isdecimal() for name in names):
                    hint = "; the optimizer knows them by position: give it named_parameters(), or attach model="
                    wrong = f"parameters: {pattern!r} is the name of no parameter{hint}"
                raise HmpxError(wrong, key=("parameters", pattern))


SWITCHES = tuple(each.name for each in fields(Settings) if each.type == "bool")


def _read_rules(given: Any, usual: Way) -> Rules:
    """Read a mapping of patterns to mappings of settings. A key that a rule lacks has the value of `usual`."""
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
        found.append((pattern, _checked(usual._replace(**said), f"parameters: {pattern!r}: ")))
    return tuple(found)


def _checked(way: Way, where: str = "") -> Way:
    """Check the values, and replace names of dtypes by dtypes. An error begins with `where`."""
    weights, state_dtype = way.weights, dtype_named(way.state_dtype)
    if not isinstance(weights, str) or weights not in WAYS:
        legal = ", ".join(repr(way) for way in WAYS)
        if isinstance(weights, torch.nn.Module):
            raise HmpxError(f"weights is a {type(weights).__name__}, not one of {legal}; did you mean model=?")
        raise HmpxError(f"{where}weights={weights!r} is none of {legal}{did_you_mean(str(weights), WAYS)}")
    if not any(type(state_dtype) is type(each) and state_dtype == each for each in STATE_FORMS):
        legal, words = ", ".join(map(repr, STATE_FORMS)), [each for each in STATE_FORMS if isinstance(each, str)]
        hint = did_you_mean(str(state_dtype), words)
        raise HmpxError(f"{where}state_dtype={state_dtype!r} is none of {legal}{hint}")
    return Way(weights, state_dtype)


def fits_none(pattern: str, names: Collection[str]) -> str:
    """Describe the problem with a pattern that fits no parameter's name; return "" if it fits one."""
    if any(fnmatchcase(name, pattern) for name in names):
        return ""
    inside = any(fnmatchcase(name, f"{pattern}.*") for name in names)
    what = "a module and not the name of a parameter" if inside else "the name of no parameter"
    hint = did_you_mean(pattern, names, meant=f"{pattern}.*" if inside else None)
    return f"parameters: {pattern!r} is {what}{hint}"
