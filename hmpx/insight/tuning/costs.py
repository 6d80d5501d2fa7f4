"""What a choice of precisions costs: what each place takes in BF16 and in FP32, and casts between the two."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from hmpx.insight import run_state as generators
from hmpx.insight.comparing.calls import Asked, Compared
from hmpx.insight.reasons import in_a_line
from hmpx.insight.recording.device import Fp8Casts, watched
from hmpx.insight.tensors import Tensor, floating
from hmpx.insight.tuning.level import LEVELS, Level, decidable
from hmpx.insight.tuning.runs import Drawn, Exact
from hmpx.insight.tuning.worth import Objective, Worth, cast_seconds, worth_of
from hmpx.ops.wrapping.observing import Seen, unobserved

SLACK = 0.02  # of what BF16 saves in all: less than that is no reason for an error


class NameInModule(NamedTuple):
    """A list name in one module: the least that a rule can decide about.

    module: "" for what is called outside of every module that a rule can name.
    """

    name: str
    module: str = ""


Unit = frozenset[NameInModule]  # what is decided about at once: a name everywhere, or in some modules
Chosen = frozenset[NameInModule]  # what is in BF16


@dataclass
class Cost:
    """Of a place: sums over the calls of one batch.

    low, wide, flops: see `Worth`. lines: that call it. pinned: why it cannot be in BF16, in words. sources: by the
    place that made it, or None where lists do not decide about that, how many tensors come in, and their elements.
    """

    low: float = 0.0
    wide: float = 0.0
    flops: float = 0.0
    calls: int = 0
    lines: dict[str, None] = field(default_factory=dict)
    pinned: str = ""
    sources: dict[NameInModule | None, tuple[int, int]] = field(default_factory=dict)

    def add(self, worth: Worth | str, where: str) -> None:
        """One more call, and what it costs either way or why it does not run in BF16."""
        self.calls += 1
        self.lines[where] = None
        if isinstance(worth, str):
            self.pinned = worth
        else:
            self.low, self.wide, self.flops = self.low + worth.low, self.wide + worth.wide, self.flops + worth.flops
            self.pinned = self.pinned or worth.pinned


class Costs:
    """Prices choices. of_place: what each place takes; `Look` fills it."""

    def __init__(
        self,
        objective: Objective,
        device: torch.device,
        place_of: Callable[[Compared], NameInModule],
        level: Level = LEVELS["bf16"],
    ) -> None:
        self.of_place: dict[NameInModule, Cost] = {}
        self.place_of, self._objective, self.level = place_of, objective, level
        self._known: dict[tuple, Worth | str | None] = {}  # of calls that are alike
        self._batches: dict[Compared, int] = {}  # the batch in which a site is counted, the first that met it
        self._cast, self._element = cast_seconds(device) if objective == "speed" else (0.0, 0.0)

    @property
    def free(self) -> Chosen:
        """The places that can be in BF16."""
        return frozenset(place for place, cost in self.of_place.items() if not cost.pinned)

    def of(self, chosen: Chosen) -> float:
        """With these places in BF16."""
        total = 0.0
        for place, cost in self.of_place.items():
            total += cost.low if place in chosen else cost.wide
            for source, (casts, elements) in cost.sources.items():
                if (place in chosen) is not (source in chosen):
                    total += self._cast * casts + self._element * elements
        return total

    def gain(self, unit: Unit, beside: Chosen) -> float:
        """What a unit saves in BF16, while the other places are as chosen."""
        return self.of(beside - unit) - self.of(beside | unit)

    def share(self, chosen: Chosen) -> float:
        """Of the FLOPs of matrix products, what is in BF16."""
        whole = sum(cost.flops for cost in self.of_place.values())
        return sum(cost.flops for place, cost in self.of_place.items() if place in chosen) / (whole or 1.0)

    def cheapest(self, units: Sequence[Unit]) -> Chosen:
        """The choice that costs least, as far as changes of single units lead: from all in BF16, and from none."""

        def from_here(chosen: Chosen) -> Chosen:
            for _ in range(len(units)):
                before = chosen
                for unit in units:
                    chosen = chosen | unit if self.gain(unit, chosen) > 0 else chosen - unit
                if chosen == before:
                    break
            return chosen

        every: Chosen = frozenset().union(*units)
        return min(map(from_here, (every, frozenset())), key=lambda chosen: (self.of(chosen), len(chosen)))

    def look(self, asked: Asked, batch: int) -> tuple[NameInModule, Cost] | None:
        """The place of a call, and its costs where this call counts; None where lists decide about nothing."""
        if self._batches.get(asked.site, batch) != batch:
            return self.place_of(asked.site), Cost()
        worth = self._worth(asked)
        if worth is None:
            return None
        self._batches[asked.site] = batch
        place = self.place_of(asked.site)
        cost = self.of_place.setdefault(place, Cost())
        cost.add(worth, asked.site.where)
        return place, cost

    def _worth(self, asked: Asked) -> Worth | str | None:
        """What BF16 saves, or why it does not run. Random numbers that it draws are drawn again afterwards."""
        tensors = floating((asked.args, asked.kwargs))
        rest = [each for each in (*asked.args, *asked.kwargs.values()) if not isinstance(each, Tensor)]
        shapes = tuple((t.shape, t.stride(), t.dtype, t.requires_grad) for t in tensors)
        alike = repr(rest) if not any(isinstance(each, list) for each in rest) else ""
        key = asked.point.label, shapes, alike, torch.is_grad_enabled()
        if key not in self._known:
            before = generators.get_state()
            casts = Fp8Casts()
            try:
                with watched(casts):
                    worth = worth_of(asked, self._objective)
                if worth is not None and casts.in_low:
                    worth = worth._replace(low=worth.wide, pinned=f"it stays in BF16: {next(iter(casts.in_low))}")
                self._known[key] = worth
            except Exception as error:
                self._known[key] = f"it does not run in {self.level.words}: {in_a_line(error)}"
            finally:
                generators.set_state(before)
        return self._known[key]


class Look(Exact):
    """A pass in FP32 that notes beside each call what it costs, and where its inputs come from."""

    def __init__(self, drawn: Drawn, costs: Costs, batch: int) -> None:
        super().__init__(drawn)
        self._costs, self._batch = costs, batch
        self._made: dict[int, NameInModule | None] = {}  # by memory, the place that made what is in it
        self._alive: list[Tensor] = []  # so that no memory becomes another tensor's

    def numbered(self, asked: Asked, number: tuple[Compared, int]) -> Seen:
        transformed = torch._C._functorch.peek_interpreter_stack() is not None
        decided = asked.point.op in decidable(self._costs.level) and not asked.point.in_place and not transformed
        with unobserved():
            found = self._costs.look(asked, self._batch) if decided else None
            if found is not None:
                self._note_sources(found[1], asked)
        seen = super().numbered(asked, number)
        for tensor in floating((seen.result,)):
            memory = tensor.untyped_storage().data_ptr()
            if decided or memory not in self._made:  # a view has the memory of what it looks at
                self._made[memory] = found and found[0]
                self._alive.append(tensor.detach())
        return seen

    def _note_sources(self, cost: Cost, asked: Asked) -> None:
        for tensor in floating((asked.args, asked.kwargs)):
            source = self._made.get(tensor.untyped_storage().data_ptr())
            casts, elements = cost.sources.get(source, (0, 0))
            cost.sources[source] = casts + 1, elements + tensor.numel()
