"""Casts of ops that are no model's, under a conversion that casts everywhere: where `disable_casts()` belongs."""

from __future__ import annotations

import types
from collections import Counter
from collections.abc import Iterator

from hmpx.conversion import installed
from hmpx.insight.doctor.diagnosis import Problem
from hmpx.ops.wrapping.callers import users_line
from hmpx.ops.wrapping.observing import Point, Run, Seen
from hmpx.ops.wrapping.rules import eligible_dtypes
from hmpx.ops.wrapping.switch import is_outside

_DO = "put `with hmpx.disable_casts():` around the line, or say `where: model` in the recipe"


class OutsideCasts:
    """Observes the ops that have a rule, and counts the lines that cast one outside of any model."""

    everything = False

    def __init__(self) -> None:
        self._seen: Counter[tuple[str, str]] = Counter()  # by line and op

    def leaves(self, caller: types.CodeType) -> bool:
        """Return whether the conversion in force casts the ops of models alone."""
        conversion = installed()
        return conversion is None or conversion.where != "everywhere"

    def __call__(self, point: Point, run: Run, frame: types.FrameType, args: tuple, kwargs: dict) -> Seen:
        seen = run(*args, **kwargs)
        cast = seen.casting and eligible_dtypes(args) != eligible_dtypes(seen.args)
        if cast and is_outside(point.op, args, kwargs, frame):
            self._seen[users_line(frame), point.op] += 1
        return seen

    def problems(self) -> Iterator[Problem]:
        """Yield a note for each line."""
        for (line, op), calls in self._seen.items():
            said = f"{op} was cast here {calls} times, outside of any model"
            yield Problem("cast outside of the model", False, said, _DO, line, ops=(op,), weight=0.3)
