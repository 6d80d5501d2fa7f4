"""Policies and lists in words: what the shell commands `ops`, `check` and `explain` print."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from hmpx.catalog import Op, aten_only, canonical, catalog, legal_names
from hmpx.errors import OpListError, UnknownOpError, nearest
from hmpx.oplist import SIDES, Listed, read_file
from hmpx.policy import Policy, Rule


def entry_points(op: Op) -> list[str]:
    """The labels of an op's entry points, each once."""
    return list(dict.fromkeys(entry.label for entry in op.entries))


def ops_table(policy: Policy, containing: str = "") -> str:
    """One line an op: name, rule, entry points. Internal ops (`_softmax`) only if `containing` begins like them."""
    lines = [f"{'op':34} {'rule':12} entry points"]
    for op in catalog().values():
        if containing in op.name and (containing.startswith("_") or not op.name.startswith("_")):
            rule = policy.rule(op) or ("promote" if policy.listed(op.name) is Rule.PROMOTE else "-")
            lines.append(f"{op.name:34} {rule!s:12} {', '.join(entry_points(op))}")
    return "\n".join(lines)


def explain_op(name: str, policy: Policy) -> str:
    """Which entry points an op has, which rule it gets under `policy`, and why."""
    op = catalog().get(canonical(name))
    if op is None:
        if aten_only(name):
            return f"{name}: an aten op with no Python entry point; hmpx cannot reach it"
        raise UnknownOpError(f"unknown op {name!r}{nearest(name, legal_names())}")
    title = op.name if op.name == name else f"{name} is {op.name}"
    lines = [title, f"  rule          {_reason(op, policy)}"]
    for in_place, heading in ((False, "entry points"), (True, "in place")):
        labels = list(dict.fromkeys(entry.label for entry in op.entries if entry.in_place is in_place))
        if labels:
            lines.append(f"  {heading:13} {', '.join(labels)}")
    if any(entry.in_place for entry in op.entries):
        how = "the others are cast to the first" if op.refuses_mixed else "left to torch, which converts the others"
        lines.append(f"  {'':13} keeps the first tensor's storage and dtype; {how}")
    return "\n".join(lines)


def _reason(op: Op, policy: Policy) -> str:
    origin = policy.origins.get(op.name)
    listed = policy.listed(op.name)
    where = f"listed at {origin}" if origin else f"decided by opt_level {policy.opt_level}"
    if listed is None and op.follows and policy.listed(op.follows):
        listed = policy.listed(op.follows)
        where = f"as {op.follows}, {policy.origins.get(op.follows, where)}"
    if listed is Rule.PROMOTE and not op.refuses_mixed:
        return f"promote: {where}; torch already takes the widest dtype, so nothing is patched"
    if listed is not None:
        return f"{listed}: {where}"
    if op.refuses_mixed:
        return "first input: in no list, and torch refuses mixed dtypes, so the others follow the first"
    return "none: in no list; torch's own function, untouched"


def check_files(paths: Iterable[str]) -> Iterator[str]:
    """Every problem in some op list files, as `file:line: problem`.

    A YAML or JSON file says which side a name is on; a text file stands for one side, beside those in its folder.
    """
    folders: dict[str, dict[str, tuple[str, Listed]]] = {}
    for path in paths:
        try:
            lists = read_file(path, "bf16")
        except OpListError as error:
            yield str(error)
            continue
        is_text = Path(path).suffix.lower() not in (".yaml", ".yml", ".json")
        text_side = "promote" if "promote" in Path(path).stem else path
        seen = folders.setdefault(str(Path(path).parent), {}) if is_text else {}
        for side in SIDES:
            for listed in lists.side(side) or ():
                yield from _check_name(listed, text_side if is_text else side, seen)


def _check_name(listed: Listed, side: str, seen: dict[str, tuple[str, Listed]]) -> Iterator[str]:
    name = canonical(listed.name)
    if name not in catalog():
        if aten_only(name):
            yield f"{listed.where}: {listed.name!r} has no Python entry point; it will not be reached"
        elif "." not in name or name.startswith("torch."):
            yield f"{listed.where}: unknown op {listed.name!r}{nearest(listed.name, legal_names())}"
            return
    if name not in seen:
        seen[name] = side, listed
        return
    first_side, first = seen[name]
    if first_side == side:
        yield f"{listed.where}: {listed.name!r} is a duplicate of {first.name!r} at {first.where}"
    elif "promote" not in (first_side, side):
        yield f"{listed.where}: {listed.name!r} is on both sides; the other has it at {first.where}"
