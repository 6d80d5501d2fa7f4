"""What roundings are charged with, by numbers worked by hand."""

from __future__ import annotations

import pytest

from hmpx.insight.comparing.calls import Compared
from hmpx.insight.tuning.charges import Charge, Scored, total
from hmpx.insight.tuning.dividing import Division, spoiled
from hmpx.insight.tuning.problem import Part, Problem, Scale


def test_charges_add_up_and_are_projected_on_each_direction():
    """By batch and run; run 0 is at the weights. Two batches, three directions."""
    one, other = Charge(), Charge()
    one.forward.update({(0, 0): 1.0, (0, 1): 1.5, (0, 2): 0.5, (0, 3): 1.0, (1, 0): 2.0, (1, 3): 6.0})
    other.forward.update({(0, 0): -0.5, (1, 1): 1.0})
    other.backward.update({(0, 1): 0.25, (1, 0): 1.0})
    both = total([one, other])
    assert both.changes(2) == [0.5, 2.0]
    assert both.projected(2, 3, 0.5) == [
        [(1.5 + 0.25 - 0.5) / 0.5, (1.0 - 3.0) / 0.5],
        [(0.5 - 0.5) / 0.5, (0.0 - 3.0) / 0.5],
        [(1.0 - 0.5) / 0.5, (6.0 - 3.0) / 0.5],
    ]


def charged(number):
    """A charge that changes the loss of the one batch by `number`, and no gradient."""
    found = Charge()
    found.forward.update({(0, 0): number, (0, 1): number})
    return found


A, B, C = (Part(name, "") for name in "abc")


@pytest.fixture
def chain():
    """From outside to a, b and c; each charge is another power of two, so that a sum tells what is in it."""
    sites = [Scored(part, charged(own), scored=True) for part, own in ((A, 1.0), (B, 2.0), (C, 4.0))]
    for number, (maker, site) in enumerate(zip([None, *sites], sites, strict=False)):
        edge = site.edges[maker]  # a new one, on which no cast is counted yet
        edge.down, edge.up = charged(8.0 * 4**number), charged(16.0 * 4**number)
        edge.casts += 1
    scale = Scale(batches=1, directions=1, h=1.0, noise=1.0, loss_noise=1.0)
    return Problem(sites, lambda scored: scored.site, lambda _: (1.0, 3.0), lambda casts, _: 0.25 * casts, scale)


NOTHING, ALL = frozenset(), frozenset((A, B, C))


@pytest.mark.parametrize(
    ("parts", "chosen", "charges", "saved"),
    [
        ([B], NOTHING, 2 + 32 + 256, 2 - 0.5),  # rounded on the way in, and its gradient on the way back
        *(([B], chosen, 2 + 256, 2) for chosen in (frozenset([A]), frozenset([A, B]))),
        *(([B], chosen, 2 + 32, 2) for chosen in (frozenset([C]), frozenset([B, C]))),
        *(([B], chosen, 2, 2 + 0.5) for chosen in (ALL, ALL - {B})),
        ([A, B], NOTHING, 1 + 2 + 8 + 256, 4 - 0.5),
        ([A, C], frozenset([B]), 1 + 4 + 8, 4 + 0.25),
        ([A], ALL, 1 + 8, 2),
    ],
)
def test_what_parts_do_alone_are_their_own_charges_and_those_of_the_edges_that_they_make(
    chain, parts, chosen, charges, saved
):
    effect, gain = chain.alone(parts, chosen)
    assert (effect.loss_change, effect.gradient_error, gain) == (charges, 0.0, saved)


@pytest.mark.parametrize(
    ("chosen", "charges", "cost"),
    [
        (NOTHING, 0, 9),
        (frozenset([A]), 1 + 8 + 64, 7 + 0.5),
        (frozenset([B]), 2 + 32 + 256, 7 + 0.5),
        (frozenset([A, C]), 1 + 8 + 64 + 4 + 128, 5 + 0.75),
        (ALL, 1 + 2 + 4 + 8, 3 + 0.25),
    ],
)
def test_what_a_choice_does_and_costs(chain, chosen, charges, cost):
    assert (chain.predicted(chosen).loss_change, chain.cost(chosen)) == (charges, cost)


def test_a_name_is_divided_where_a_module_calls_it_and_another_place_does_too():
    """Given up in all places: one module alone, two modules, a module and what is outside, two places outside."""
    places = {"cumsum": ["a", "a"], "softmax": ["a", "b"], "exp": ["a", ""], "log": ["", "a.inner"], "sum": ["a", "b"]}
    sites = [
        Scored(Compared(name, f"model.py:{line}", module), scored=True)
        for name, modules in places.items()
        for line, module in enumerate(modules)
    ]
    scale = Scale(batches=1, directions=1, h=1.0, noise=1.0, loss_noise=1.0)
    problem = Problem(sites, Division().part_of, lambda _: (1.0, 3.0), lambda casts, _: 0.0, scale)
    wished = frozenset(problem.parts)
    assert spoiled(problem, frozenset([Part("sum")]), wished, {"a", "b"}) == {"softmax", "exp"}
