"""The keys of a recipe: which values each may have, and what is wrong with a value."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from hmpx.dtype_names import dtype_name, dtype_named
from hmpx.errors import HmpxError, did_you_mean
from hmpx.ops.computing.kernels import KERNELS
from hmpx.ops.policies.build_policy import OPT_LEVELS
from hmpx.ops.policies.fp8_format import Format
from hmpx.ops.policies.op_lists import FP8_FORMAT, LOW_PRECISION, SIDES
from hmpx.ops.policies.policy import Policy
from hmpx.recipes import nxd
from hmpx.rounding.stochastic import check_seed
from hmpx.updates.holding.settings import SWITCHES
from hmpx.updates.holding.state_forms import STATE_FORMS, state_name
from hmpx.updates.holding.stores import WAYS

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
MAPPED = {"float32": torch.float32, "float64": torch.float64}  # what a `dtype_map` may map
MODULES, PARAMETERS = "modules", "parameters"
HEAD, NORMS = "<head>", "<norms>"  # patterns of `modules` that say what a module is for
EXTENDS = "extends"  # of files and dicts: the recipe that their other keys change
LISTS = tuple(f"{side}_file_path" for side in SIDES)
_LEGAL = {
    "opt_level": (*OPT_LEVELS, None),
    "parameter_dtype": tuple(DTYPES),
    "state_dtype": tuple(map(state_name, STATE_FORMS)),
    LOW_PRECISION: ("bfloat16", "float16", None),
    "kernels": KERNELS,
    "weights": tuple(WAYS),
    **dict.fromkeys((*SWITCHES, "verbose"), (True, False)),
}


_OF_PARAMETERS = {  # what a rule for parameters may say
    "dtype": _LEGAL["parameter_dtype"],
    "weights": _LEGAL["weights"],
    "state_dtype": _LEGAL["state_dtype"],
}


def spelled_out(key: Any, value: Any) -> Any:
    """The value of a key with dtypes by their names in torch, for ``bf16``, ``fp32`` and torch's own dtypes."""
    if key == PARAMETERS and isinstance(value, Mapping):
        rules = {pattern: rule if isinstance(rule, Mapping) else {"dtype": rule} for pattern, rule in value.items()}
        return {pattern: {k: _spelled_out(v) for k, v in rule.items()} for pattern, rule in rules.items()}
    if key == MODULES and isinstance(value, Mapping):
        return {pattern: _rule_spelled_out(rule) for pattern, rule in value.items()}
    if isinstance(value, Mapping):
        return {_spelled_out(k) if key == "dtype_map" else k: _spelled_out(v) for k, v in value.items()}
    if key in LISTS:
        return "" if value is None else os.fspath(value) if isinstance(value, os.PathLike) else value
    return _spelled_out(value) if key in ("parameter_dtype", "state_dtype", LOW_PRECISION) else value


def _rule_spelled_out(rule: Any) -> Any:
    """A rule for modules in words and lists alone, so that it can be written to a file."""
    if isinstance(rule, Policy):
        rule = {
            "opt_level": "O1",
            **{side: getattr(rule, side) for side in SIDES},
            LOW_PRECISION: rule.low_precision,
            **({FP8_FORMAT: rule.fp8_format.keys()} if rule.fp8 else {}),
        }
    if not isinstance(rule, Mapping):
        return _spelled_out(rule)
    return {
        key: list(names)
        if isinstance(names, Iterable) and not isinstance(names, str | Mapping)
        else _spelled_out(names)
        for key, names in rule.items()
    }


def _spelled_out(value: Any) -> Any:
    dtype = dtype_named(value)
    return dtype_name(dtype) if isinstance(dtype, torch.dtype) else value


def problems(key: Any, value: Any, keys: Sequence[str]) -> Iterator[tuple[Any, str]]:
    """Each problem of one key and its value, with what it is about: the key, or a key of the mapping in `value`.

    Args:
        keys: the names of every key that a recipe has.
    """
    if key in (nxd.KEY, nxd.MASTERS):
        yield (
            None,
            f"{key!r} is NxD's, and no key beside a recipe's own: NxD's keys stand in {nxd.KEY} alone "
            f"({{{nxd.KEY!r}: {{{nxd.MASTERS!r}: True}}}}); in a recipe's own terms it is weights: master",
        )
    elif key == EXTENDS:
        if not isinstance(value, str | os.PathLike) or not os.fspath(value):
            yield None, f"{key} is {value!r}, neither the name of a recipe nor the path of a file"
    elif key not in keys:
        yield None, f"{key!r} is no key of a recipe{did_you_mean(str(key), (*keys, EXTENDS))}"
    elif key in _LEGAL:
        yield from ((None, problem) for problem in _wrong(key, value, _LEGAL[key]))
    elif key == "seed" and value is not None:
        try:
            check_seed(value)
        except HmpxError as error:
            yield None, str(error)
    elif key == FP8_FORMAT:
        try:
            Format.of(value)
        except HmpxError as error:
            yield from ((None, f"{key}: {line}") for line in str(error).splitlines())
    elif key in LISTS and not isinstance(value, str):
        yield None, f"{key} is {value!r}, not the path of a list"
    elif key in SIDES and value is not None:
        if not isinstance(value, Sequence) or isinstance(value, str) or not all(isinstance(v, str) for v in value):
            yield None, f"{key} is {value!r}, not a list of names; a file goes to {key}_file_path"
    elif key == MODULES:
        if not isinstance(value, Mapping) or not all(isinstance(each, str) for each in value):
            yield None, f"{key} is {value!r}, not a mapping of modules' names to dtypes or lists of ops{_quotes(value)}"
            return
        for pattern in value:
            if pattern.startswith("<") and pattern not in (HEAD, NORMS):
                hint = did_you_mean(pattern, (HEAD, NORMS))
                yield pattern, f"{key}: {pattern!r} is neither {HEAD} nor {NORMS}, nor the name of a module{hint}"
    elif key == PARAMETERS:
        if not isinstance(value, Mapping) or not all(isinstance(each, str) for each in value):
            yield None, f"{key} is {value!r}, not a mapping of parameters' names to dtypes or settings{_quotes(value)}"
            return
        for pattern, rule in value.items():
            yield from ((pattern, f"{key}: {pattern!r}: {problem}") for problem in _wrong_of_parameters(rule))
    elif key in ("module_dtypes", "dtype_map"):
        what = "modules' names" if key == "module_dtypes" else "dtypes"
        if not isinstance(value, Mapping) or not all(isinstance(each, str) for each in value):
            yield None, f"{key} is {value!r}, not a mapping of {what} to dtypes{_quotes(value)}"
            return
        for old, new in value.items():
            wrong = [*_wrong(key, old, tuple(MAPPED))] if key == "dtype_map" else []
            yield from ((old, problem) for problem in (*wrong, *_wrong(f"{key}, {old!r}", new, tuple(DTYPES))))


def _wrong_of_parameters(rule: Mapping[str, Any]) -> Iterator[str]:
    for key, value in rule.items():
        if key == "dtype" and value in (*WAYS, "8bit"):
            meant = f"{{{'weights' if value in WAYS else 'state_dtype'}: {value}}}"
            yield f"dtype is {value!r}, none of {', '.join(DTYPES)}; did you mean {meant}?"
        elif key in _OF_PARAMETERS:
            yield from _wrong(key, value, _OF_PARAMETERS[key])
        else:
            yield f"{key!r} is none of {', '.join(_OF_PARAMETERS)}{did_you_mean(str(key), _OF_PARAMETERS)}"
    if rule.get("dtype") == "float32" and len(rule) > 1:
        others = " and ".join(key for key in rule if key != "dtype")
        yield f"{others} would do nothing: a float32 parameter gets plain steps"


def _quotes(value: Any) -> str:
    """What to write for a name that YAML takes for a number."""
    numbers = [key for key in value if type(key) in (int, float)] if isinstance(value, Mapping) else []
    return f'; names are strings: write "{numbers[0]}" for {numbers[0]}' if numbers else ""


def _wrong(what: str, value: Any, legal: tuple) -> Iterator[str]:
    if not any(type(value) is type(each) and value == each for each in legal):
        words = ["null" if each is None else str(each).lower() if isinstance(each, bool) else each for each in legal]
        yield f"{what} is {value!r}, none of {', '.join(words)}{did_you_mean(str(value), words)}"
