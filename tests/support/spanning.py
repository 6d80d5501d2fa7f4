"""Combinations of which the quick tests run few."""

import itertools

import pytest


def spanning(*lists):
    """Return all combinations as parameters; quick are so few that each value of each list is in one of them."""
    lists = [[*each] for each in lists]
    quick = {tuple(i % len(each) for each in lists) for i in range(max(map(len, lists)))}
    return [
        pytest.param(
            *(each[i] for each, i in zip(lists, at, strict=True)), marks=[pytest.mark.slow] * (at not in quick)
        )
        for at in itertools.product(*map(range, map(len, lists)))
    ]
