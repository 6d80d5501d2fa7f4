"""Choosing: the least cost at which the error that is predicted is within a tolerance."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hmpx.insight.tuning.problem import Chosen, Effect, Problem

_STEPS = 40  # of a bisection over the weight of errors
_RANGE = 1e9  # how far it reaches, to both sides of cost over error
SLACK = 0.02  # of what BF16 brings, that is given for a smaller error


@dataclass(frozen=True)
class Point:
    """A choice: what it costs, and what it does."""

    chosen: Chosen
    cost: float
    effect: Effect


def choose(problem: Problem, tolerance: float) -> tuple[Point, list[Point]]:
    """The choice, and the choices along the way from the cheapest to all in FP32.

    The weight of errors is the least with which the prediction is within the tolerance; then the largest that takes no
    more than a small part of what BF16 brings, for speed that does not matter is no reason for an error.
    """
    points: dict[Chosen, Point] = {}

    def at(weight: float) -> Point:
        chosen = problem.cheapest(weight)
        if chosen not in points:
            points[chosen] = Point(chosen, problem.cost(chosen), problem.predicted(chosen))
        return points[chosen]

    wide = problem.cost(())
    fastest, unit = at(0.0), max(wide, 1e-30)
    least = (
        _bisected(lambda weight: at(weight).effect.meets(tolerance), unit)
        if not fastest.effect.meets(tolerance)
        else 0.0
    )
    bound = at(least).cost + SLACK * max(wide - at(least).cost, 0.0)
    for exponent in range(-12, 13):
        at(unit * 10.0 ** (exponent / 2))
    within = [point for point in points.values() if point.cost <= bound and point.effect.meets(tolerance)]
    best = min(within or [at(least)], key=lambda point: (point.effect.size, point.cost))
    return best, sorted(points.values(), key=lambda point: point.cost)


def _bisected(is_enough: Callable[[float], bool], unit: float) -> float:
    """The least weight that is enough, to a small factor."""
    low, high = unit / _RANGE, unit * _RANGE
    for _ in range(_STEPS):
        middle = (low * high) ** 0.5
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high
