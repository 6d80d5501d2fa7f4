"""NxD's `mixed_precision_config` in a recipe's keys.

Source: AWS Neuron documentation, NxD Training, "Standard Mixed Precision".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hmpx.errors import Fault, HmpxError, did_you_mean, raise_faults
from hmpx.ops.policies.op_lists import SIDES, shipped

NXD, NXD_MASTERS = "mixed_precision_config", "use_master_weights"
_NXD_KEYS = (NXD_MASTERS, "use_fp32_grad_acc", "use_master_weights_in_ckpt")


def nxd_keys(config: Mapping[str, Any] | None, with_zero: bool) -> dict[str, Any]:
    """Return the keys of the recipe that NxD's configuration means: those of ``nxd-standard``, with its changes.

    Args:
        config: NxD's three keys, any of them, with true or false. Of those that are absent the first two are true
            exactly under ZeRO-1, the third is false.

    Raises:
        HmpxError: another key, or a value that is neither true nor false; all of them.
    """
    if config is not None and not isinstance(config, Mapping):
        raise HmpxError(f"{NXD} is {config!r}, not a mapping of {', '.join(_NXD_KEYS)}", key=(NXD,))
    given = dict(config or {})
    wrong = []
    for key, value in given.items():
        if key not in _NXD_KEYS:
            hint = did_you_mean(str(key), _NXD_KEYS)
            wrong.append(Fault(f"{key!r} is no key of NxD's {NXD}{hint}", key=(NXD, key)))
        elif not isinstance(value, bool):
            wrong.append(Fault(f"{NXD}, {key} is {value!r}, neither true nor false", key=(NXD, key)))
    raise_faults(wrong)
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
