"""The keys of a recipe: their legal values, the faults of a value, and which rules a parameter gets."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch

from hmpx.base.dtype_names import dtype_name, dtype_named
from hmpx.errors import Fault, HmpxError, did_you_mean
from hmpx.ops.computing.kernels import KERNELS
from hmpx.ops.policies.build_policy import OPT_LEVELS
from hmpx.ops.policies.fp8_format import Format
from hmpx.ops.policies.op_lists import FP8_FORMAT, LOW_PRECISION, SIDES
from hmpx.ops.policies.policy import WHERE
from hmpx.recipes.vendors import NXD, NXD_MASTERS
from hmpx.rounding.state_codes import STATE_CODES
from hmpx.rounding.stochastic import check_seed
from hmpx.updates.holding.settings import SWITCHES
from hmpx.updates.holding.state_forms import STATE_FORMS, state_name
from hmpx.updates.holding.stores import WAYS

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
MAPPED = {"float32": torch.float32, "float64": torch.float64}  # what a `dtype_map` may map
MODULES, PARAMETERS = "modules", "parameters"
HEAD, NORMS = "<head>", "<norms>"  # patterns of `modules` that say what a module is for
LAST = re.compile(r"<last ([1-9]\d?) ?%>")  # the same, of the blocks of a model
EXTENDS = "extends"  # of files and dicts: the recipe that their other keys change
LISTS = tuple(f"{side}_file_path" for side in SIDES)
OF_OPS = frozenset((*SIDES, *LISTS, "opt_level", FP8_FORMAT, LOW_PRECISION, MODULES, "kernels", "where", "verbose"))
_LEGAL = {
    "opt_level": (*OPT_LEVELS, None),
    "parameter_dtype": (*DTYPES, None),
    "state_dtype": tuple(map(state_name, STATE_FORMS)),
    LOW_PRECISION: ("bfloat16", "float16", None),
    "kernels": KERNELS,
    "where": WHERE,
    "weights": tuple(WAYS),
    **dict.fromkeys((*SWITCHES, "verbose"), (True, False)),
}
_OF_PARAMETERS = {  # what a rule for parameters may say
    "dtype": tuple(DTYPES),
    "weights": _LEGAL["weights"],
    "state_dtype": _LEGAL["state_dtype"],
}
MAPPINGS = {  # keys whose values are mappings, and what these map
    MODULES: "modules' names to dtypes or lists of ops",
    PARAMETERS: "parameters' names to dtypes or settings",
    "module_dtypes": "modules' names to dtypes",
    "dtype_map": "dtypes to dtypes",
}


def spelled_out(key: Any, value: Any) -> Any:
    """Return the value of a key with dtypes by their names in torch, for ``bf16``, ``fp32`` and torch's own objects."""
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
    """Return a rule for modules in words and lists alone, so that it can be written to a file."""
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


def faults(key: Any, value: Any, keys: Sequence[str]) -> Iterator[Fault]:
    """Yield each fault of one key and its value.

    Args:
        keys: the names of every key that a recipe has.
    """
    if key in MAPPINGS and isinstance(value, Mapping) and all(isinstance(each, str) for each in value):
        for inside, of_it in value.items():
            yield from (Fault(text, key=(key, inside)) for text in _wrong_inside(key, inside, of_it))
    else:
        yield from (Fault(text, key=(key,)) for text in _wrong_with(key, value, keys))


def _wrong_with(key: Any, value: Any, keys: Sequence[str]) -> Iterator[str]:
    if key in (NXD, NXD_MASTERS):
        yield (
            f"{key!r} is NxD's, and no key beside a recipe's own: NxD's keys stand in {NXD} alone "
            f"({{{NXD!r}: {{{NXD_MASTERS!r}: True}}}}); in a recipe's own terms it is weights: master"
        )
    elif key == EXTENDS:
        if not isinstance(value, str | os.PathLike) or not os.fspath(value):
            yield f"{key} is {value!r}, neither the name of a recipe nor the path of a file"
    elif key not in keys:
        yield f"{key!r} is no key of a recipe{did_you_mean(str(key), (*keys, EXTENDS))}"
    elif key in _LEGAL:
        yield from _wrong(key, value, _LEGAL[key])
    elif key == "seed" and value is not None:
        try:
            check_seed(value)
        except HmpxError as error:
            yield str(error)
    elif key == FP8_FORMAT:
        try:
            Format.of(value)
        except HmpxError as error:
            yield from (f"{key}: {fault.text}" for fault in error.faults)
    elif key in LISTS and not isinstance(value, str):
        yield f"{key} is {value!r}, not the path of a list"
    elif key in SIDES and value is not None:
        if not isinstance(value, Sequence) or isinstance(value, str) or not all(isinstance(v, str) for v in value):
            yield f"{key} is {value!r}, not a list of names; a file goes to {key}_file_path"
    elif key in MAPPINGS:
        yield f"{key} is {value!r}, not a mapping of {MAPPINGS[key]}{_quotes(value)}"


def _wrong_inside(key: str, inside: str, value: Any) -> Iterator[str]:
    """Yield what is wrong with one entry of a mapping."""
    if key == MODULES:
        if inside.startswith("<") and inside not in (HEAD, NORMS) and not LAST.fullmatch(inside):
            hint = did_you_mean(inside, (HEAD, NORMS, "<last 15%>"))
            yield f"{key}: {inside!r} is none of {HEAD}, {NORMS} and <last 15%>, nor the name of a module{hint}"
        return
    if key == PARAMETERS:
        yield from (f"{key}: {inside!r}: {problem}" for problem in _wrong_of_parameters(value))
        return
    if key == "dtype_map":
        yield from _wrong(key, inside, tuple(MAPPED))
    yield from _wrong(f"{key}, {inside!r}", value, tuple(DTYPES))


def _wrong_of_parameters(rule: Mapping[str, Any]) -> Iterator[str]:
    for key, value in rule.items():
        if key == "dtype" and value in (*WAYS, *STATE_CODES):
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
    """Say what to write for a name that YAML takes for a number."""
    numbers = [key for key in value if type(key) in (int, float)] if isinstance(value, Mapping) else []
    return f'; names are strings: write "{numbers[0]}" for {numbers[0]}' if numbers else ""


def _wrong(what: str, value: Any, legal: tuple) -> Iterator[str]:
    if not any(type(value) is type(each) and value == each for each in legal):
        words = ["null" if each is None else str(each).lower() if isinstance(each, bool) else each for each in legal]
        yield f"{what} is {value!r}, none of {', '.join(words)}{did_you_mean(str(value), words)}"


def dtype_of(name: str, parameters: Mapping[str, Any], module_dtypes: Mapping[str, str]) -> torch.dtype | None:
    """Return the dtype that a recipe's two keys give to the parameter with a name; None where neither says one."""
    found: str | None = None
    parts = name.rpartition(".")[0].split(".")
    within = [".".join(parts[: i + 1]) for i in range(len(parts))]
    for pattern, dtype in module_dtypes.items():
        if any(fnmatchcase(module, pattern) for module in within):
            found = dtype
    own = [rule for pattern, rule in parameters.items() if fnmatchcase(name, pattern)]
    if own:
        found = own[-1] if isinstance(own[-1], str) else own[-1].get("dtype", found)
    return DTYPES[found] if found is not None else None
