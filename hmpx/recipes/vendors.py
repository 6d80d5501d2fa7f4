"""Configurations of other systems in a recipe's keys: NxD's `mixed_precision_config` and Gaudi's ``gaudi_config.json``.

Sources: AWS Neuron documentation, NxD Training, "Standard Mixed Precision"; optimum-habana, `GaudiConfig`. Up to 1.7
its ``hmp_`` keys are the arguments of Habana's `hmp.convert`, and lists that are left out are those of BERT. Later its
``autocast_`` keys are lists in the place of Gaudi's own; Intel Gaudi documentation, "Mixed Precision Training with
PyTorch Autocast", has the ranks.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hmpx.base.yaml_files import composed, lines_inside, value_of
from hmpx.errors import Fault, HmpxError, Origin, did_you_mean, raise_faults
from hmpx.ops.policies.catalog import aten_only, canonical
from hmpx.ops.policies.op_facts import FOLLOWS
from hmpx.ops.policies.op_lists import SIDES, Listed, read_file, shipped

logger = logging.getLogger("hmpx")

NXD, NXD_MASTERS = "mixed_precision_config", "use_master_weights"
_NXD_KEYS = (NXD_MASTERS, "use_fp32_grad_acc", "use_master_weights_in_ckpt")

GAUDI = "gaudi-autocast"  # the recipe, and the folder of its lists
_HMP, _AUTOCAST = _SWITCHES = "use_habana_mixed_precision", "use_torch_autocast"
_HMP_LISTS = {"hmp_bf16_ops": "bf16", "hmp_fp32_ops": "fp32"}
_AUTOCAST_LISTS = {"autocast_bf16_ops": "bf16", "autocast_fp32_ops": "fp32"}
_LISTS = (*_HMP_LISTS, *_AUTOCAST_LISTS)
_DEFAULTS = {
    "bf16": tuple("add addmm bmm div dropout gelu iadd linear layer_norm matmul mm rsub softmax truediv".split()),
    "fp32": ("embedding", "nll_loss", "log_softmax"),
}
_KEYS = (*_SWITCHES, "hmp_opt_level", *_LISTS, "hmp_is_verbose")
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
        return any(key.value in _SWITCHES for key, _ in composed(Path(path), _KEYS).value)
    except HmpxError:
        return False


def gaudi_keys(path: Path) -> tuple[dict[str, Any], dict[tuple, Origin]]:
    """Return the keys of a recipe that a Gaudi configuration stands for, and where these keys and their names stand.

    Weights are FP32, as with HMP and autocast. Without mixed precision the ops are left alone too. Keys that say
    nothing of precision (fused optimizers) are named at INFO and left aside.

    Raises:
        HmpxError: with file and line: a value that does not fit, neither of the two switches, or both of them on.
    """
    values: dict[str, Any] = {}
    origins: dict[str, Origin] = {}
    names: dict[str, list[Listed]] = {}
    aside: list[str] = []
    faults: list[Fault] = []

    def wrong(name: str, text: str) -> None:
        faults.append(Fault(text, origins.get(name, Origin(str(path), 1))))

    for key, node in composed(path, _KEYS).value:
        name = str(key.value)
        values[name], origins[name] = value_of(path, node), Origin(str(path), key.start_mark.line + 1)
        if name in _LISTS and _is_list_of_names(values[name]):
            names[name] = [Listed(values[name][i], str(path), line) for (i,), line in lines_inside(node).items()]
        elif name in _LISTS and (values[name] is not None or name in _HMP_LISTS):
            wrong(name, f"{name} is {values[name]!r}, not a list of names")
        elif name in (*_SWITCHES, "hmp_is_verbose") and not isinstance(values[name], bool):
            wrong(name, f"{name} is {values[name]!r}, neither true nor false")
        elif name == "hmp_opt_level" and values[name] not in _LEVELS:
            wrong(name, f"hmp_opt_level is {values[name]!r}, none of O1, O2{did_you_mean(str(values[name]), _LEVELS)}")
        elif name.startswith(("hmp_", "autocast_")) and name not in _KEYS:
            wrong(name, f"{name!r} is no key of a Gaudi configuration{did_you_mean(name, _KEYS)}")
        elif name not in _KEYS and values[name] not in (False, None):
            aside.append(name)
    if not origins.keys() & set(_SWITCHES):
        hint = next(filter(None, (did_you_mean(name, _SWITCHES) for name in values)), "")
        wrong("", f"no Gaudi configuration, which says {' or '.join(_SWITCHES)}{hint}")
    elif values.get(_HMP) and values.get(_AUTOCAST):
        wrong(_AUTOCAST, f"{_AUTOCAST} and {_HMP} are both true: which of the two?")
    raise_faults(faults)
    if aside:
        logger.info("hmpx: %s: %s left aside, for a recipe says nothing of it", path, ", ".join(aside))
    if values.get(_AUTOCAST):
        keys, stands = gaudi_lists({side: names[name] for name, side in _AUTOCAST_LISTS.items() if name in names})
        return keys, {("extends",): origins[_AUTOCAST], **stands}
    switch = origins.get(_HMP) or origins[_AUTOCAST]
    stands = {("opt_level",): origins.get("hmp_opt_level", switch)}
    keys = {"opt_level": None, "parameter_dtype": "float32"}
    if values.get(_HMP):
        keys |= {"opt_level": values.get("hmp_opt_level", "O1"), "verbose": values.get("hmp_is_verbose", False)}
        keys["where"] = "everywhere"
        if keys["opt_level"] == "O1":
            for name, side in _HMP_LISTS.items():
                keys[side] = tuple(values.get(name, _DEFAULTS[side]))
                stands[side,] = origins.get(name, switch)
                stands |= {(side, i): each.origin for i, each in enumerate(names.get(name, ()))}
    return keys, stands


def gaudi_lists(given: Mapping[str, Sequence[Listed]]) -> tuple[dict[str, Any], dict[tuple, Origin]]:
    """Return the keys of ``gaudi-autocast`` with other lists, and where their names stand.

    As on Gaudi, the BF16 list outranks the FP32 list, and both outrank promotion: names of given lists that have no
    effect for this reason are said at WARNING. An operator that is no function of aten (`truediv`) follows its op.

    given: the lists by side, "bf16" and "fp32"; one that is absent is Gaudi's own.
    """
    if not given:
        return {"extends": GAUDI}, {}
    own = {side: read_file(shipped() / GAUDI / f"{side}.txt", side).side(side) or () for side in _DEFAULTS}
    lists: dict[str, Sequence[Listed]] = {**own, **given}
    low = {canonical(each.name) for each in lists["bf16"]}
    outranked = [each for each in lists["fp32"] if low & _means(canonical(each.name))]
    for each in outranked if "fp32" in given else ():
        logger.warning("hmpx: %s: %r is in the bf16 list too, which outranks this one on Gaudi", each.where, each.name)
    lists["fp32"] = [each for each in lists["fp32"] if each not in outranked]
    keys = {side: tuple(each.name for each in listed) for side, listed in lists.items()}
    return {"extends": GAUDI, **keys}, {(side, i): each.origin for side in keys for i, each in enumerate(lists[side])}


def _means(op: str) -> set[str]:
    return {op} if aten_only(op) else {op, FOLLOWS.get(op, op)}


def _is_list_of_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)
