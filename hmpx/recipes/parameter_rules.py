"""What a recipe says of parameters by their names: `parameters`, and `module_dtypes` around it."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch

from hmpx.recipes.keys import DTYPES, PARAMETERS, spelled_out


def dtype_of(name: str, parameters: Mapping[str, Any], module_dtypes: Mapping[str, str]) -> torch.dtype | None:
    """The dtype of the parameter with a name; None where neither of the two says one."""
    found: str | None = None
    parts = name.rpartition(".")[0].split(".")
    within = [".".join(parts[: i + 1]) for i in range(len(parts))]
    for pattern, dtype in module_dtypes.items():
        if any(fnmatchcase(module, pattern) for module in within):
            found = dtype
    rules = spelled_out(PARAMETERS, parameters).items() if parameters else ()
    own = [rule for pattern, rule in rules if fnmatchcase(name, pattern)]
    if own and "dtype" in own[-1]:
        found = own[-1]["dtype"]
    return DTYPES[found] if found is not None else None


def ways_in(parameters: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """What `hmpx.attach` is told of parameters: all but their dtypes. Nothing where that is all there is."""
    rules = spelled_out(PARAMETERS, parameters).items()
    ways = {pattern: {key: rule[key] for key in rule if key != "dtype"} for pattern, rule in rules}
    return ways if any(ways.values()) else {}
