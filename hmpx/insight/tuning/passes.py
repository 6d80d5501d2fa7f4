"""The runs of a model that tune compares: every op in FP32, chosen ops in BF16, or everything as lists say.

Each decides, for every call of an op, in which precision it is computed. All of them draw the same random numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch

from hmpx.insight import generators
from hmpx.insight.comparing.calls import Asked, Compared
from hmpx.insight.comparing.computing import in_fp32
from hmpx.insight.comparing.passes import is_recomputing
from hmpx.insight.tensors import LOW, Tensor, floating
from hmpx.ops.observing import Seen, unobserved
from hmpx.ops.overriding import call

Drawn = dict[tuple[Compared, int], Tensor]  # the state of torch's generator before each call that draws numbers


class Numbered:
    """A run that numbers the calls of each site, and draws for each call what the run in FP32 drew.

    by_hand: the lines where the program itself casts to low precision.
    """

    def __init__(self, drawn: Drawn) -> None:
        self._drawn = drawn
        self._numbers: Counter[Compared] = Counter()
        self.by_hand: list[str] = []

    def around(self, asked: Asked) -> Seen:
        if is_recomputing():  # a checkpoint repeats a call that has its number already
            return self._seen(asked)
        self._numbers[asked.site] += 1
        seen = self._called(asked, (asked.site, self._numbers[asked.site]))
        if asked.point.op == "to" and _dtypes(seen.result) & LOW - _dtypes(asked.args):
            self.by_hand.append(asked.site.where)
        return seen

    def _called(self, asked: Asked, number: tuple[Compared, int]) -> Seen:
        if number in self._drawn:
            generators.set_state(self._drawn[number])
        return self._seen(asked)

    def _seen(self, asked: Asked) -> Seen:
        raise NotImplementedError


class Exact(Numbered):
    """Every op in FP32. It notes the state of the generator before each call that draws."""

    def _called(self, asked: Asked, number: tuple[Compared, int]) -> Seen:
        before = generators.get_state()
        seen = self._seen(asked)
        if not torch.equal(before, generators.get_state()):
            self._drawn[number] = before
        return seen

    def _seen(self, asked: Asked) -> Seen:
        with unobserved():
            return asked.answer(in_fp32(asked))


class Mixed(Numbered):
    """Some sites in BF16, the others in FP32.

    is_low: says which; None for a site that tune does not decide about: it runs in the dtype of its inputs.
    """

    def __init__(self, drawn: Drawn, is_low: Callable[[Compared], bool | None]) -> None:
        super().__init__(drawn)
        self._is_low = is_low

    def _seen(self, asked: Asked) -> Seen:
        low = self._is_low(asked.site)
        if asked.point.in_place or low:
            return asked.plainly()
        with unobserved():
            if low is None:
                return asked.answer(call(asked.point.original, asked.args, asked.kwargs))
            return asked.answer(in_fp32(asked))


class Listed(Numbered):
    """As the lists in force say. low: takes of each site whether its inputs were in low precision."""

    def __init__(self, drawn: Drawn, low: dict[Compared, bool]) -> None:
        super().__init__(drawn)
        self._low = low

    def _seen(self, asked: Asked) -> Seen:
        seen = asked.plainly()
        dtypes = _dtypes((seen.args, seen.kwargs))
        self._low[asked.site] = bool(dtypes) and dtypes <= LOW
        return seen


def _dtypes(value: object) -> set[torch.dtype]:
    return {tensor.dtype for tensor in floating((value,))}
