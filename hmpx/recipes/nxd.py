"""NeuronX Distributed's `mixed_precision_config`, in a recipe's keys.

Source: AWS Neuron documentation, NxD Training, "Standard Mixed Precision".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hmpx.errors import HmpxError, did_you_mean

KEY = "mixed_precision_config"
BASE = "nxd-standard"  # the recipe that a configuration changes
MASTERS = "use_master_weights"
_KEYS = (MASTERS, "use_fp32_grad_acc", "use_master_weights_in_ckpt")


def recipe_keys(
    config: Mapping[str, Any] | None, with_zero: bool, where: Callable[[Any], str] = lambda key: ""
) -> dict[str, Any]:
    """What a configuration changes of the recipe `BASE`.

    Args:
        config: NxD's three keys, any of them, with true or false. Of those that are absent the first two are true
            exactly under ZeRO-1, the third is false.
        where: what an error about a key begins with; of None, about the whole configuration.

    Raises:
        HmpxError: another key, or a value that is neither true nor false; all of them.
    """
    if config is not None and not isinstance(config, Mapping):
        raise HmpxError(f"{where(None)}{KEY} is {config!r}, not a mapping of {', '.join(_KEYS)}")
    given = dict(config or {})
    wrong = []
    for key, value in given.items():
        if key not in _KEYS:
            wrong.append(f"{where(key)}{key!r} is no key of NxD's {KEY}{did_you_mean(str(key), _KEYS)}")
        elif not isinstance(value, bool):
            wrong.append(f"{where(key)}{KEY}, {key} is {value!r}, neither true nor false")
    if wrong:
        raise HmpxError("\n".join(wrong))
    keys = {MASTERS: with_zero, "use_fp32_grad_acc": with_zero, "use_master_weights_in_ckpt": False, **given}
    return {"weights": "master" if keys.pop(MASTERS) else "nearest", **keys}
