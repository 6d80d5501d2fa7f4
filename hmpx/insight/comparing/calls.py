"""The records of `compare`: one of each call site, and one of each call until it is compared."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from hmpx.insight.comparing.decisions import Taken
from hmpx.insight.comparing.difference import Distance
from hmpx.insight.tensors import LOW, Tensor
from hmpx.ops.wrapping.observing import Point, Run, Seen

Number = tuple[int, int]  # the batch, and which call of its site it is in there


@dataclass
class Call:
    """One call in the run under the lists.

    given, dtypes: of its floating inputs, as they came and as the op saw them. casting: whether a rule had looked at
    them. follows: whether no list names the op, so that it ran in low precision because its inputs were. drawn: the
    state of torch's generator before, if the op drew numbers. results: its floating results. order: among all calls.
    decisions: of the results those that are indices, orders, masks.
    """

    given: tuple[torch.dtype, ...]
    dtypes: tuple[torch.dtype, ...]
    casting: bool
    follows: bool
    drawn: Tensor | None
    results: list[Tensor]
    order: int
    decisions: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        low = any(result.dtype in LOW for result in self.results)
        # What torch promotes, and a cast by hand to FP32, gets inputs in low precision and computes in FP32.
        self.is_low = low or (not self.follows and any(dtype in LOW for dtype in self.dtypes))


@dataclass(eq=False)
class Compared:
    """One call site: an op, a line, a module.

    calls: under the lists. deltas: of the batch at hand, the errors of the op alone. alone, accumulated: these errors,
    and those of the run under the lists. loss_change, shifted: by batch, the first-order change of the loss by the
    errors of the op alone; the same at weights that are shifted a little. differentiable: whether autograd sees its
    results. first_wrong: batch and order of the first call with a result that is not finite and should be; largest:
    what FP32 has there, by magnitude. decisions: of the batch at hand, those of FP32. decided, otherwise: how many
    there were, and how many the lists changed; changed_at: batch and order of the calls in which they did. raised: the
    error that the op raises under the lists, in a line; FP32 is used there then.
    """

    op: str
    where: str
    module: str
    rule: str = ""
    reason: str = ""
    dtypes: str = ""
    calls: dict[Number, Call] = field(default_factory=dict)
    deltas: dict[Number, list[Tensor | None]] = field(default_factory=dict)
    alone: Distance = field(default_factory=Distance)
    accumulated: Distance = field(default_factory=Distance)
    loss_change: list[float] = field(default_factory=list)
    shifted: list[float] = field(default_factory=list)
    differentiable: bool = True
    not_compared: str = ""
    first_wrong: tuple[int, int] | None = None
    largest: float = 0.0
    decisions: dict[Number, Taken] = field(default_factory=dict)
    decided: int = 0
    otherwise: int = 0
    changed_at: list[tuple[int, int]] = field(default_factory=list)
    raised: str = ""

    def begin_batch(self, batches: int) -> None:
        """Make room for the scores of so many batches; of those in which it was not called they are 0."""
        for scores in (self.loss_change, self.shifted):
            scores.extend([0.0] * (batches - len(scores)))


class Asked(NamedTuple):
    """One call that a pass is asked for."""

    site: Compared
    point: Point
    run: Run
    args: tuple
    kwargs: dict

    def plainly(self) -> Seen:
        """Run the call as the lists say."""
        return self.run(*self.args, **self.kwargs)

    def answer(self, result: Any) -> Seen:
        """Answer the call with another result."""
        return Seen(self.args, self.kwargs, result, False, 0.0, 0.0)

    def with_arguments(self, args: tuple, kwargs: dict) -> Asked:
        return self._replace(args=args, kwargs=kwargs)
