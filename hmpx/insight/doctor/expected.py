"""What is in another dtype than in an earlier run: two tables of what everything is in are compared."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from hmpx.errors import HmpxError
from hmpx.insight.finding import Finding, some
from hmpx.insight.places import numberless
from hmpx.insight.report import number, short_dtypes

_UNKNOWN = {"?", "none", "not used"}  # of a cell that shows what a few steps did
_DTYPE = re.compile(r"\bb?float\w+")
_KEPT = 0.8  # what moves less beside FP32 is near a half now and then
_DO = "see what has changed: a config, a checkpoint, a wrapper, a library; if it is meant, save a new --json"


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the table in the JSON of an earlier run.

    Raises:
        HmpxError: the file cannot be read, or has none or an empty one.
    """
    try:
        with open(path, encoding="utf-8") as file:
            held: dict[str, Any] = json.load(file)["precision"]
        if not [[each[cell] for cell in ("name", "stored", "state", "summed")] for each in held["rows"]]:
            raise ValueError("its table has no rows, since no optimizer stepped")
        return held
    except (OSError, ValueError, KeyError, TypeError) as error:
        said = f"{path}: {type(error).__name__}: {error}"
        raise HmpxError(f"--expect takes what doctor --json of an earlier run has written: {said}") from None


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Finding]:
    """Say what is in another dtype, gone or new. What was not seen in one of the runs is not compared.

    Parameters whose first cell differs alike are one finding, which names the cells that follow from it.
    """
    old, new = ({each["name"]: each for each in run["rows"]} for run in (before, now))
    if not old or not new:
        return
    for said, some_of, others in (("gone", old, new), ("new", new, old)):
        if left := [each for each in some_of if each not in others]:
            yield _finding(f"{said}: ", left)
    found: dict[tuple[str, str, str], list[str]] = {}
    more: dict[tuple[str, str, str], dict[str, None]] = {}
    for name in (each for each in new if each in old):
        if cells := [*_cells(old[name], new[name], before, now)]:
            found.setdefault(cells[0], []).append(name)
            more.setdefault(cells[0], {}).update(dict.fromkeys(f"{cell} {is_now}" for cell, _, is_now in cells[1:]))
    for first, names in found.items():
        cell, was, is_now = map(short_dtypes, first)
        then = f"; so is {some(tuple(map(short_dtypes, more[first])), 6)}" if more[first] else ""
        yield _finding(f"{cell} {is_now} now, {was} before{then}: ", names)
    for key in before["beside"].keys() & now["beside"].keys() - {"GradScaler"}:
        dtypes = [{*_DTYPE.findall(each["beside"][key])} for each in (now, before)]
        if dtypes[0] != dtypes[1] and "?" not in (before["beside"][key], now["beside"][key]):
            told = [short_dtypes(" and ".join(sorted(each)) or "none") for each in dtypes]
            yield _finding(f"{key} {told[0]} now, {told[1]} before", [])


def _cells(
    old: Mapping[str, Any], new: Mapping[str, Any], before: Mapping[str, Any], now: Mapping[str, Any]
) -> Iterator[tuple[str, str, str]]:
    """Yield the cells of one parameter that differ, the earliest first: its name, before, now."""
    pairs: list[tuple[str, str, str]] = [(cell, old[cell], new[cell]) for cell in ("stored", "computed", "gradient")]
    for by in dict.fromkeys((*old["summed"], *new["summed"])):
        is_seen = by in old["summed"] and by in new["summed"]
        if by != "policy" and (is_seen or (by != "add" and min(before["ranks"], now["ranks"]) > 1)):
            told = [each["summed"].get(by, "in nothing") for each in (old, new)]
            pairs.append((f"{by} of gradients", told[0], told[1]))
    for key in dict.fromkeys((*old["state"], *new["state"])) if old["state"] and new["state"] else ():
        pairs.append((f"state {key}", old["state"].get(key, "not there"), new["state"].get(key, "not there")))
    if bool(old["state"]) != bool(new["state"]) and "none" not in (old["gradient"], new["gradient"]):
        told = [" and ".join(each["state"].values()) or "not there" for each in (old, new)]
        pairs.append(("state", told[0], told[1]))
    are_alike = before["iterations"] == now["iterations"]
    for cell, was, is_now in pairs:
        sets = [{*each.split(" and ")} for each in (was, is_now)]
        differ = sets[0] != sets[1] if are_alike else sets[0].isdisjoint(sets[1])
        if differ and not _UNKNOWN & (sets[0] | sets[1]):
            yield cell, was, is_now
    if old["master"] != new["master"]:
        yield "master", old["master"], new["master"]
    moved = old["kept"] >= _KEPT if old["kept"] is not None else old["moved"]
    if moved and (new["lost"] or (new["kept"] is None and new["moved"] is False)):
        yield "moves", "as far as float32 weights", "less than half as far"


def _finding(said: str, names: list[str]) -> Finding:
    alike = tuple(dict.fromkeys(map(numberless, names)))
    which = f"{number(len(names), 'parameter')} ({some(alike)})" if names else ""
    return Finding("expected", True, said + which, _DO, names=tuple(names), weight=0.9)
