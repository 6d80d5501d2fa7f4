"""Configurations of other systems in a recipe's keys: NxD's `mixed_precision_config` and Gaudi's ``gaudi_config.json``.

Sources: AWS Neuron documentation, NxD Training, "Standard Mixed Precision"; optimum-habana up to 1.7, `GaudiConfig`,
whose `hmp_` keys are the arguments of Habana's `hmp.convert`, and whose lists, where left out, are those of BERT.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hmpx.base.yaml_files import composed, lines_inside, value_of
from hmpx.errors import Fault, HmpxError, Origin, did_you_mean, raise_faults
from hmpx.ops.policies.op_lists import SIDES, shipped

logger = logging.getLogger("hmpx")

NXD, NXD_MASTERS = "mixed_precision_config", "use_master_weights"
_NXD_KEYS = (NXD_MASTERS, "use_fp32_grad_acc", "use_master_weights_in_ckpt")

_SWITCH = "use_habana_mixed_precision"
_LISTS = {"hmp_bf16_ops": "bf16", "hmp_fp32_ops": "fp32"}
_DEFAULTS = {
    "bf16": tuple("add addmm bmm div dropout gelu iadd linear layer_norm matmul mm rsub softmax truediv".split()),
    "fp32": ("embedding", "nll_loss", "log_softmax"),
}
_KEYS = (_SWITCH, "hmp_opt_level", *_LISTS, "hmp_is_verbose")
_LEVELS = ("O1", "O2")


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


def is_gaudi(path: str | os.PathLike[str]) -> bool:
    """Return whether a JSON file is a Gaudi configuration, and not an op list with HMP's two keys alone."""
    if Path(path).suffix.lower() != ".json":
        return False
    try:
        return any(key.value == _SWITCH for key, _ in composed(Path(path), _KEYS).value)
    except HmpxError:
        return False


def gaudi_keys(path: Path) -> tuple[dict[str, Any], dict[tuple, int]]:
    """Return the keys of a recipe that a Gaudi configuration stands for, and the lines of these keys and their names.

    Weights are FP32, as with HMP. Without mixed precision the ops are left alone too. Keys that say nothing of
    precision (fused optimizers) are named at INFO and left aside.

    Raises:
        HmpxError: with file and line: a value that does not fit, no `use_habana_mixed_precision`, or torch.autocast.
    """
    values: dict[str, Any] = {}
    lines: dict[str, int] = {}
    where_names: dict[tuple, int] = {}
    aside: list[str] = []
    faults: list[Fault] = []

    def wrong(line: int, text: str) -> None:
        faults.append(Fault(text, Origin(str(path), line)))

    for key, node in composed(path, _KEYS).value:
        name, line = str(key.value), key.start_mark.line + 1
        values[name], lines[name] = value_of(path, node), line
        if name in _LISTS:
            where_names |= {(_LISTS[name], i): at for (_, i), at in lines_inside(node, name).items()}
        if name in (_SWITCH, "hmp_is_verbose", "use_torch_autocast") and not isinstance(values[name], bool):
            wrong(line, f"{name} is {values[name]!r}, neither true nor false")
        elif name == "use_torch_autocast" and values[name]:
            wrong(line, "use_torch_autocast asks for torch.autocast; a recipe is made of the hmp_ keys")
        elif name == "hmp_opt_level" and values[name] not in _LEVELS:
            wrong(line, f"hmp_opt_level is {values[name]!r}, none of O1, O2{did_you_mean(str(values[name]), _LEVELS)}")
        elif name in _LISTS and not _is_list_of_names(values[name]):
            wrong(line, f"{name} is {values[name]!r}, not a list of names")
        elif name.startswith("hmp_") and name not in _KEYS:
            wrong(line, f"{name!r} is no key of a Gaudi configuration{did_you_mean(name, _KEYS)}")
        elif name not in _KEYS and values[name] not in (False, None):
            aside.append(name)
    if _SWITCH not in values:
        hint = next(filter(None, (did_you_mean(name, [_SWITCH]) for name in values)), "")
        wrong(1, f"no Gaudi configuration, which says {_SWITCH}{hint}")
    raise_faults(faults)
    if aside:
        logger.info("hmpx: %s: %s left aside, for a recipe says nothing of it", path, ", ".join(aside))
    keys: dict[str, Any] = {"opt_level": None, "parameter_dtype": "float32"}
    stands: dict[tuple, int] = {("opt_level",): lines.get("hmp_opt_level", lines[_SWITCH])}
    if values[_SWITCH]:
        keys |= {"opt_level": values.get("hmp_opt_level", "O1"), "verbose": values.get("hmp_is_verbose", False)}
        keys["where"] = "everywhere"
        if keys["opt_level"] == "O1":
            for name, side in _LISTS.items():
                keys[side] = tuple(values.get(name, _DEFAULTS[side]))
                stands[side,] = lines.get(name, lines[_SWITCH])
            stands |= where_names
    return keys, stands


def _is_list_of_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)
