"""The minimum cut beside that of networkx, which torch requires."""

import random

import pytest

from hmpx.insight.tuning.mincut import Network

networkx = pytest.importorskip("networkx")


@pytest.mark.parametrize("seed", range(20))
def test_the_cut_costs_what_the_least_one_costs(seed):
    draw = random.Random(seed)
    nodes = draw.randint(1, 12)
    low, wide = ([draw.choice([0.0, draw.random(), 3 * draw.random()]) for _ in range(nodes)] for _ in range(2))
    arcs = {(a, b): draw.random() for a in range(nodes) for b in range(nodes) if a != b and draw.random() < 0.4}
    graph = networkx.DiGraph()
    graph.add_nodes_from(["source", "sink"])
    for node in range(nodes):
        graph.add_edge(node, "sink", capacity=low[node])
        graph.add_edge("source", node, capacity=wide[node])
    for (a, b), cost in arcs.items():
        graph.add_edge(a, b, capacity=cost)
    least, _ = networkx.minimum_cut(graph, "source", "sink")
    side = Network(low, wide, arcs, scale=20.0).source_side()
    cost = sum(low[node] if node in side else wide[node] for node in range(nodes))
    cost += sum(each for (a, b), each in arcs.items() if a in side and b not in side)
    assert cost == pytest.approx(least, abs=1e-9)


def test_of_divisions_that_cost_the_same_the_fewest_are_on_the_side_of_the_source():
    assert Network([1.0, 1.0, 0.0], [1.0, 1.0, 1.0], {}, scale=4.0).source_side() == {2}
