"""Runs that `record --hash` has saved, and the pairs of calls at which two of them part.

Calls of one line, op and module are compared one by one. Where the lines are not the same, as in compiled code, the
runs part at a call if all of its inputs occur in the other run and its results do not. In both cases the call counts
only if a loss or a gradient that differs depends on it, so another way to the same numbers is no difference. Where
gradients are inf or NaN, all such calls count, as nothing tells what depends on them.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from hmpx.errors import HmpxError
from hmpx.insight.recording.hashes import SCHEMA, HashedCall
from hmpx.insight.recording.recorded import paired

OPS = ("forward", "backward")


class CallPair(NamedTuple):
    """A call in two runs, None where one has no such call, and what else each ran at its line and module."""

    first: HashedCall | None
    second: HashedCall | None
    beside: tuple[Sequence[HashedCall], Sequence[HashedCall]] = ((), ())

    @property
    def both(self) -> tuple[HashedCall | None, HashedCall | None]:
        return self.first, self.second

    @property
    def places(self) -> set[tuple]:
        """The line, the module and the op in each run."""
        return {(*each.site, each.op) for each in self.both if each}

    @property
    def call(self) -> HashedCall:
        """The call of the first run, or else of the second."""
        found = self.first or self.second
        assert found is not None, "one run has the call"
        return found


@dataclass
class Run:
    """What the files of a run hold. losses: by iteration, the mean of its backward passes and ranks."""

    about: dict[str, str]
    losses: dict[int, float]
    calls: list[HashedCall]

    def of(self, iteration: int) -> Iteration:
        return Iteration([each for each in self.calls if each.iteration == iteration])


class Iteration:
    """The calls of one iteration of a run, sorted by `compare` into four kinds.

    Attributes:
        calls: all but gradients and weights. gradients: by name, those of ranks put together. weights: likewise, those
            that the step leaves.
        kinds: by the identity of a call, what it is: "apart", if the runs part at it; "agrees", if it has the results
            of the other run; "another way" to numbers that agree; "follows", if its results differ as its inputs do.
    """

    def __init__(self, calls: Sequence[HashedCall]) -> None:
        self.calls = [each for each in calls if each.stage not in ("gradient", "weight")]
        self.gradients, self.weights = (
            _whole(each for each in calls if each.stage == stage) for stage in ("gradient", "weight")
        )
        self._values = {value for each in self.calls for value in (*each.given, *each.hashes)}
        made = (each for each in self.calls if each.stage in OPS and not each.given and not each.is_random)
        self._constants = {value for each in made for value in each.hashes}
        self._keys = dict[int, tuple]()  # by identity: the line and op, and which call of it
        self._by_key = dict[tuple, HashedCall]()
        seen: Counter[tuple] = Counter()
        for each in self.calls:
            place = (*each.site, each.op)
            seen[place] += 1
            key = self._keys[id(each)] = (*place, seen[place])
            self._by_key[key] = each
        self.kinds: dict[int, str] = {}

    @property
    def ops(self) -> list[HashedCall]:
        return [each for each in self.calls if each.stage in OPS]

    def compare(self, other: Iteration) -> None:
        """Sort the calls, from the last to the first, by what differs from the other run."""
        differing = (
            each for name, each in self.gradients.items() if each.hashes != other.gradients.get(name, each).hashes
        )
        needed = {value for each in differing for value in each.given}  # what a gradient or loss that differs needs
        is_training = bool(self.gradients) or any(each.stage == "loss" for each in self.calls)
        is_training &= all(math.isfinite(each.results[0][1]) for each in self.gradients.values())  # all NaN are alike
        for call in reversed(self.calls):
            kind = self.kinds[id(call)] = self._kind(call, other, needed if is_training else None)
            if kind in ("apart", "follows") or (kind == "agrees" and call.stage in ("loss", "traffic")):
                needed.update(call.given)

    def of_kind(self, kind: str) -> list[HashedCall]:
        return [each for each in self.calls if self.kinds[id(each)] == kind]

    def number(self, kind: str) -> int:
        """Return how many ops are of a kind."""
        return sum(each.stage in OPS for each in self.of_kind(kind))

    def _kind(self, call: HashedCall, other: Iteration, needed: set[int] | None) -> str:
        """Return what a call is beside the other run. needed: numbers that matter; None: all matter."""
        twin, known = other._by_key.get(self._keys[id(call)]), other._values | self._constants
        is_same_call = twin is not None and (twin.given, twin.settings) == (call.given, call.settings)
        if twin is not None and is_same_call and twin.hashes != call.hashes:
            return "apart"
        if not (new := {*call.hashes} - known):
            return "agrees"
        if needed is not None and needed.isdisjoint(new):
            return "another way"
        return "apart" if known.issuperset(call.given) else "follows"

    def shared(self, other: Iteration) -> float:
        """Return the share of the calls that agree, or are of a line, module and op of the other run, too."""
        known = {key[:-1] for key in other._by_key}
        alike = sum(self.kinds[id(each)] == "agrees" or self._keys[id(each)][:-1] in known for each in self.ops)
        return alike / max(len(self.ops), 1)

    def parts(self, other: Iteration) -> list[CallPair]:
        """Pair the calls at which the runs part: those of one key, of one op and inputs, of one line, or of one op."""
        keys = self._keys | other._keys

        def of_ops(value: Callable[[HashedCall], Any]) -> Callable[[HashedCall], Any]:
            return lambda call: (call.stage, value(call) if call.stage in OPS else id(call))

        left, right = self.of_kind("apart"), other.of_kind("apart")
        exact = (
            lambda call: keys[id(call)],
            lambda call: (call.stage, call.op, *(call.given or call.site)),
            lambda call: call.site,
        )
        pairs, left, right = paired(left, right, exact)
        lines = {one.site for pair in pairs for one in pair}
        left = [each for each in left if each.site not in lines and self._is_alone(each, other)]
        right = [each for each in right if each.site not in lines and other._is_alone(each, self)]
        loose = (lambda call: call.op, lambda call: call.shapes.rpartition("->")[2], lambda call: None)
        more, left, right = paired(left, right, map(of_ops, loose))
        found: dict[int, HashedCall | None] = {id(a): b for a, b in pairs + more} | {id(a): None for a in left}
        both = [(each, found[id(each)]) for each in self.of_kind("apart") if id(each) in found]
        every = [*both, *((None, each) for each in right)]
        return [CallPair(a, b, (self._beside(a or b), other._beside(b or a))) for a, b in every]

    def _is_alone(self, call: HashedCall, other: Iteration) -> bool:
        """Return whether the runs part at a call that the other run has not, or at an input whose reader it has."""
        if call.stage != "input":
            twin = other._by_key.get(self._keys[id(call)])
            return twin is None or self._values.issuperset(twin.given)  # or else what differs is before that
        reader = next((each for each in self.ops if call.hashes[0] in each.given), None)
        return reader is not None and self._keys[id(reader)] in other._by_key

    def _beside(self, call: HashedCall | None) -> list[HashedCall]:
        return [each for each in self.ops if call and each.site == call.site]


def differing(first: dict[str, HashedCall], second: dict[str, HashedCall]) -> list[CallPair]:
    """Return what both runs have by name, and differs."""
    pairs = (CallPair(each, second.get(name)) for name, each in first.items())
    return [each for each in pairs if each.second and each.call.hashes != each.second.hashes]


def _whole(gradients: Iterable[HashedCall]) -> dict[str, HashedCall]:
    """Return gradients by name, each made of the parts that ranks hold."""
    parts: dict[str, dict[int, HashedCall]] = {}
    for each in gradients:
        parts.setdefault(each.op, {}).setdefault(each.offset, each)
    found = {}
    for name, by_offset in parts.items():
        held = [by_offset[offset] for offset in sorted(by_offset)]
        values, largest, *lists = zip(*(each.results[0] for each in held), strict=True)
        joined = ([*itertools.chain(*each)] for each in lists)
        whole = (sum(values) + 2**63) % 2**64 - 2**63, max(largest), *joined
        found[name] = replace(held[0], results=[whole], given=[value for each in held for value in each.given])
    return found


def is_hashes(path: str) -> bool:
    """Return whether a file, or those of ranks, hold what `record --hash` has saved."""
    try:
        return any(f'"{SCHEMA}"' in each.read_text(encoding="utf-8")[:200] for each in _files(path))
    except (OSError, UnicodeDecodeError):
        return False


def _files(path: str) -> list[Path]:
    """Return the file, or else those of the ranks: run.0.json for run.json."""
    whole = Path(path)
    ranks = {
        int(each.stem[len(whole.stem) + 1 :]): each
        for each in ([] if whole.exists() or not whole.parent.is_dir() else whole.parent.iterdir())
        if each.suffix == whole.suffix
        and each.stem.startswith(f"{whole.stem}.")
        and each.stem[len(whole.stem) + 1 :].isdecimal()
    }
    return [ranks[rank] for rank in sorted(ranks)] or [whole]


def read(path: str) -> Run:
    """Read the file of a run, or those of its ranks.

    Raises:
        HmpxError: one cannot be read, or holds something else.
    """
    about, losses, calls = dict[str, str](), dict[int, list[float]](), list[HashedCall]()
    files = _files(path)
    for each in files:
        try:
            found = json.loads(each.read_text(encoding="utf-8"))
            if found["schema"] != SCHEMA:
                raise ValueError(f"its schema is {found['schema']!r}, and not {SCHEMA!r}")
            for row in found["calls"]:
                results = [
                    (bits, _number(most), *([*map(_number, each)] for each in lists)) for bits, most, *lists in row[-1]
                ]
                calls.append(replace(HashedCall(*row), results=results))
            for i, loss in found["losses"]:
                losses.setdefault(i, []).append(_number(loss))
            about = {**found["about"], "ranks": str(len(files))}
        except OSError as error:
            do = f"; `python -m hmpx record --hash {path} train.py` writes one" if not each.exists() else ""
            raise HmpxError(f"{each}: {error.strerror or error}{do}") from None
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise HmpxError(f"{each}: no file of `record --hash`: {type(error).__name__}: {error}") from None
    calls.sort(key=lambda each: each.iteration)
    return Run(about, {i: math.fsum(each) / len(each) for i, each in sorted(losses.items())}, calls)


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)
