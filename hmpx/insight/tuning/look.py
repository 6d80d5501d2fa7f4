"""The run in FP32 that finds the sites which lists can decide about, and measures what BF16 saves at each."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from hmpx.insight import generators
from hmpx.insight.comparing.calls import Asked, Compared
from hmpx.insight.reasons import in_a_line
from hmpx.insight.tensors import Tensor, floating
from hmpx.insight.tuning.passes import Drawn, Exact
from hmpx.insight.tuning.worth import Objective, Worth, rounding_of, worth_of
from hmpx.ops.catalog import catalog
from hmpx.ops.observing import Seen, unobserved


class Place(NamedTuple):
    """A list name in one module: the least that a rule can decide about.

    module: "" for what is called outside of every module that a rule can name.
    """

    name: str
    module: str = ""


@dataclass(eq=False)
class Site:
    """A call site that lists can put into BF16 or FP32.

    low, wide, flops: see `Worth`; sums over the calls of one batch. rounding: of the result of its first call, relative
    to that. sources: how many tensors come from another site, None for any that is FP32 whatever lists say, and their
    elements together. pinned: why it cannot be in BF16, in words.
    """

    site: Compared
    place: Place
    batch: int
    low: float = 0.0
    wide: float = 0.0
    flops: float = 0.0
    rounding: float = 0.0
    calls: int = 0
    pinned: str = ""
    sources: dict[Site | None, tuple[int, int]] = field(default_factory=dict)

    def add(self, worth: Worth | str) -> None:
        """One more call, and what it costs either way or why it does not run in BF16."""
        self.calls += 1
        if isinstance(worth, str):
            self.pinned = worth
            return
        self.low += worth.low
        self.wide += worth.wide
        self.flops += worth.flops


@functools.cache
def decidable() -> frozenset[str]:
    """The names that tune puts into a list: of ops that make new values."""
    return frozenset(name for name, op in catalog().items() if op.computes and not op.view and name[0] != "_")


class Looked:
    """The sites of all batches. Calls that are alike are measured once."""

    def __init__(self, objective: Objective, place_of: Callable[[Compared], Place]) -> None:
        self._objective, self._place_of = objective, place_of
        self._known: dict[tuple, Worth | str | None] = {}
        self.sites: dict[Compared, Site] = {}
        self.batch = -1

    def begin(self, drawn: Drawn) -> Look:
        """The run of the next batch."""
        self.batch += 1
        return Look(drawn, self)

    def site(self, asked: Asked) -> Site | None:
        """The site of a call, with what BF16 saves there; None where lists decide about nothing."""
        if asked.site in self.sites and self.sites[asked.site].batch != self.batch:
            return self.sites[asked.site]  # counted in the batch that met it first
        worth = self._worth(asked)
        if worth is None:
            return None
        found = self.sites.get(asked.site)
        if found is None:
            found = self.sites[asked.site] = Site(asked.site, self._place_of(asked.site), self.batch)
            if isinstance(worth, Worth):
                found.rounding = self._drawing_nothing(rounding_of, asked)
        found.add(worth)
        return found

    def _worth(self, asked: Asked) -> Worth | str | None:
        """What BF16 saves, or why it does not run."""
        tensors = floating((asked.args, asked.kwargs))
        rest = [each for each in (*asked.args, *asked.kwargs.values()) if not isinstance(each, Tensor)]
        shapes = tuple((t.shape, t.stride(), t.dtype, t.requires_grad) for t in tensors)
        alike = repr(rest) if not any(isinstance(each, list) for each in rest) else ""
        key = asked.point.label, shapes, alike, torch.is_grad_enabled()
        if key not in self._known:
            try:
                self._known[key] = self._drawing_nothing(worth_of, asked, self._objective)
            except Exception as error:
                self._known[key] = f"it does not run in BF16: {in_a_line(error)}"
        return self._known[key]

    def _drawing_nothing(self, measure: Callable[..., Any], *args: Any) -> Any:
        """The result, with the random numbers that were drawn for it drawn again afterwards."""
        before = generators.get_state()
        try:
            return measure(*args)
        finally:
            generators.set_state(before)


class Look(Exact):
    """One run in FP32 that looks at each call."""

    def __init__(self, drawn: Drawn, looked: Looked) -> None:
        super().__init__(drawn)
        self._looked = looked
        self._made: dict[int, Site | None] = {}  # by memory, the site that made what is in it
        self._alive: list[Tensor] = []  # so that no memory becomes another tensor's

    def _called(self, asked: Asked, number: tuple[Compared, int]) -> Seen:
        transformed = torch._C._functorch.peek_interpreter_stack() is not None
        decided = asked.point.op in decidable() and not asked.point.in_place and not transformed
        with unobserved():
            site = self._looked.site(asked) if decided else None
            if site is not None and site.batch == self._looked.batch:
                self._note_sources(site, asked)
        seen = super()._called(asked, number)
        for tensor in floating((seen.result,)):
            memory = tensor.untyped_storage().data_ptr()
            if decided or memory not in self._made:  # a view has the memory of what it looks at
                self._made[memory] = site
                self._alive.append(tensor.detach())
        return seen

    def _note_sources(self, site: Site, asked: Asked) -> None:
        found: Counter[Site | None] = Counter()
        elements: Counter[Site | None] = Counter()
        for tensor in floating((asked.args, asked.kwargs)):
            source = self._made.get(tensor.untyped_storage().data_ptr())
            found[source] += 1
            elements[source] += tensor.numel()
        for source, casts in found.items():
            before = site.sources.get(source, (0, 0))
            site.sources[source] = before[0] + casts, before[1] + elements[source]
