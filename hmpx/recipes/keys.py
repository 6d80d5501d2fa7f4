"""The keys of a recipe: their legal values, which rules a parameter gets, and NxD's keys in their terms.

Source of NxD's: AWS Neuron documentation, NxD Training, "Standard Mixed Precision".
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
import yaml

from hmpx.base.tensors import dtype_name, dtype_named
from hmpx.errors import HmpxError, did_you_mean, errors_at
from hmpx.ops.policies.lists import LIST_KEYS, LOW_PRECISION, MORE, SIDES, shipped
from hmpx.rounding.state_codes import STATE_CODES
from hmpx.rounding.stochastic import check_seed
from hmpx.updates.holding.state_forms import STATE_FORMS, state_name
from hmpx.updates.holding.stores import WAYS, is_one_of

NXD, NXD_MASTERS = "mixed_precision_config", "use_master_weights"
_NXD_KEYS = (NXD_MASTERS, "use_fp32_grad_acc", "use_master_weights_in_ckpt")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
STATE_DTYPES = {state_name(each): each for each in STATE_FORMS}
MAPPED = {"float32": torch.float32, "float64": torch.float64}  # what a `dtype_map` may map
MODULES, PARAMETERS = "modules", "parameters"
# Patterns of `modules` that say what a module is for. One that ends in "?" may fit no module of a model.
HEAD, NORMS, ROUTERS = "<head>", "<norms>", "<routers>"
LAST = re.compile(r"<last ([1-9]\d?) ?%>")  # the same, of the blocks of a model
EXTENDS = "extends"  # of files and dicts: the recipe that their other keys change
LISTS = tuple(f"{side}_file_path" for side in SIDES)
OF_OPS = frozenset((*LIST_KEYS, *LISTS, "opt_level", MODULES, "kernels", "where", "verbose"))
OF_DTYPES = {"parameter_dtype": (*DTYPES, None), "state_dtype": tuple(STATE_DTYPES)}  # names that are legal values
# What a rule for parameters may say.
_OF_PARAMETERS = {"dtype": tuple(DTYPES), "weights": tuple(WAYS), "state_dtype": OF_DTYPES["state_dtype"]}
MAPPINGS = {  # keys whose values are mappings, and what these map
    MODULES: "modules' names to dtypes or lists of ops",
    PARAMETERS: "parameters' names to dtypes or settings",
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
        pairs = [(_spelled_out(k) if key == "dtype_map" else k, _spelled_out(v)) for k, v in value.items()]
        if len(dict(pairs)) < len(pairs):
            raise HmpxError(f"{key}: {', '.join(map(str, value))}: a dtype is named twice", key=(key,))
        return dict(pairs)
    if key in SIDES and isinstance(value, list | tuple):
        return type(value)(MORE if name is ... else name for name in value)
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


def check(key: Any, value: Any, keys: Sequence[str], legal: Mapping[str, tuple]) -> None:
    """Check one key and its value, as `spelled_out` returns it. The six keys of op lists are `OpLists.of`'s to check.

    Args:
        keys: the names of every key that a recipe has.
        legal: the legal values of those that have a few.

    Raises:
        HmpxError: there is no such key, or it cannot have the value; with the nearest legal one.
    """
    with errors_at({}, key=(key,)):
        if key in (NXD, NXD_MASTERS):
            raise HmpxError(
                f"{key!r} is NxD's, and no key beside a recipe's own: NxD's keys stand in {NXD} alone "
                f"({{{NXD!r}: {{{NXD_MASTERS!r}: True}}}}); in a recipe's own terms it is weights: master"
            )
        if key == EXTENDS:
            if not isinstance(value, str | os.PathLike) or not os.fspath(value):
                raise HmpxError(f"{key} is {value!r}, neither the name of a recipe nor the path of a file")
        elif key == "module_dtypes":
            first = next(iter(value), "lm_head") if isinstance(value, Mapping) else "lm_head"
            raise HmpxError(f"{key} is {PARAMETERS} now, by the names of parameters: {{{f'{first}.*'!r}: float32}}")
        elif key not in keys:
            raise HmpxError(f"{key!r} is no key of a recipe{did_you_mean(str(key), (*keys, EXTENDS))}")
        elif key in legal:
            _check(key, value, legal[key])
        elif key == "seed" and value is not None:
            check_seed(value)
        elif key in LISTS and not isinstance(value, str):
            raise HmpxError(f"{key} is {value!r}, not the path of a list")
        elif key in MAPPINGS:
            if not isinstance(value, Mapping) or not all(isinstance(each, str) for each in value):
                raise HmpxError(f"{key} is {value!r}, not a mapping of {MAPPINGS[key]}{_quotes(value)}")
            for inside, of_it in value.items():
                with errors_at({}, key=(inside,)):
                    _check_inside(key, inside, of_it)


def _check_inside(key: str, inside: str, value: Any) -> None:
    if key == MODULES:
        role = inside.removesuffix("?")
        if role.startswith("<") and role not in (HEAD, NORMS, ROUTERS) and not LAST.fullmatch(role):
            hint = did_you_mean(role, (HEAD, NORMS, ROUTERS, "<last 15%>"))
            legal = f"{HEAD}, {NORMS}, {ROUTERS} and <last 15%>"
            raise HmpxError(f"{key}: {inside!r} is none of {legal}, nor the name of a module{hint}")
    elif key == PARAMETERS:
        with errors_at({}, before=f"{key}: {inside!r}: "):
            _check_rule(value)
    else:
        if key == "dtype_map":
            _check(key, inside, tuple(MAPPED))
        _check(f"{key}, {inside!r}", value, tuple(DTYPES))


def _check_rule(rule: Mapping[str, Any]) -> None:
    for key, value in rule.items():
        if key == "dtype" and value in (*WAYS, *STATE_CODES):
            meant = f"{{{'weights' if value in WAYS else 'state_dtype'}: {value}}}"
            raise HmpxError(f"dtype is {value!r}, none of {', '.join(DTYPES)}; did you mean {meant}?")
        if key not in _OF_PARAMETERS:
            raise HmpxError(f"{key!r} is none of {', '.join(_OF_PARAMETERS)}{did_you_mean(str(key), _OF_PARAMETERS)}")
        _check(key, value, _OF_PARAMETERS[key])
    if rule.get("dtype") == "float32" and len(rule) > 1:
        others = " and ".join(key for key in rule if key != "dtype")
        raise HmpxError(f"{others} would do nothing: a float32 parameter gets plain steps")


def _quotes(value: Any) -> str:
    """Say what to write for a name that YAML takes for a number."""
    numbers = [key for key in value if type(key) in (int, float)] if isinstance(value, Mapping) else []
    return f'; names are strings: write "{numbers[0]}" for {numbers[0]}' if numbers else ""


def _check(what: str, value: Any, legal: tuple) -> None:
    if not is_one_of(legal, value):
        words = ["null" if each is None else str(each).lower() if isinstance(each, bool) else each for each in legal]
        raise HmpxError(f"{what} is {value!r}, none of {', '.join(words)}{did_you_mean(str(value), words)}")


def dtypes_in_yaml(names: Iterable[str], dtype: str = "float32", key: str = PARAMETERS) -> str:
    """Return the line of a recipe that gives modules a dtype, as ``parameters: {0.*: float32}``, or `modules`."""
    patterns = [f"{name}.*" if key == PARAMETERS and name not in ("", "*") else name or "*" for name in names]
    rules = yaml.safe_dump(dict.fromkeys(patterns, dtype), default_flow_style=True, sort_keys=False, width=10_000)
    return f"`{key}: {rules.strip()}`"


def dtype_of(name: str, parameters: Mapping[str, Any]) -> torch.dtype | None:
    """Return the dtype that the last fitting rule gives to the parameter with a name; None where it says none."""
    own = [rule for pattern, rule in parameters.items() if fnmatchcase(name, pattern)]
    if not own:
        return None
    found = own[-1] if isinstance(own[-1], str) else own[-1].get("dtype")
    return None if found is None else DTYPES[found]


def nxd_keys(config: Mapping[str, Any] | None, with_zero: bool) -> dict[str, Any]:
    """Return the keys of the recipe that NxD's configuration means: those of ``nxd-standard``, with its changes.

    Args:
        config: NxD's three keys, any of them, with true or false. Of those that are absent the first two are true
            exactly under ZeRO-1, the third is false.

    Raises:
        HmpxError: another key, or a value that is neither true nor false.
    """
    if config is not None and not isinstance(config, Mapping):
        raise HmpxError(f"{NXD} is {config!r}, not a mapping of {', '.join(_NXD_KEYS)}", key=(NXD,))
    given = dict(config or {})
    for key, value in given.items():
        if key not in _NXD_KEYS:
            hint = did_you_mean(str(key), _NXD_KEYS)
            raise HmpxError(f"{key!r} is no key of NxD's {NXD}{hint}", key=(NXD, key))
        if not isinstance(value, bool):
            raise HmpxError(f"{NXD}, {key} is {value!r}, neither true nor false", key=(NXD, key))
    keys = {NXD_MASTERS: with_zero, "use_fp32_grad_acc": with_zero, "use_master_weights_in_ckpt": False, **given}
    lists = shipped() / "autocast-cuda"
    return {
        **{f"{side}_file_path": str(lists / f"{side}.txt") for side in SIDES if side != "fp8"},
        "weights": "master" if keys.pop(NXD_MASTERS) else "nearest",
        **keys,
    }


def nxd_under_zero(config: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the keys that have other values for optimizers under ZeRO-1."""
    without = nxd_keys(config, False)
    return {key: value for key, value in nxd_keys(config, True).items() if value != without[key]}
