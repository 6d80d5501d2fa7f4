"""A minimum cut, by the method of Dinic.

Each node is put on one of two sides. `Network.to_sink` is what it costs a node to be on the side of the source,
`from_source` what it costs it to be on the other, and an arc what it costs that its tail is on the side of the source
and its head is not. The cheapest division is the minimum cut of this network (Ford and Fulkerson, 1956), which a
maximum flow finds, in phases of blocking flows along shortest ways (Dinic, 1970).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

_RESOLUTION = 1 << 40  # costs as integers, so that sums are exact and a division does not depend on their order


class Network:
    """Costs of being on one side or the other, of nodes that are numbered from 0."""

    def __init__(
        self, to_sink: list[float], from_source: list[float], arcs: Mapping[tuple[int, int], float], scale: float
    ) -> None:
        self._source, self._sink = len(to_sink), len(to_sink) + 1
        self._heads: list[int] = []  # of arcs; each is followed by its reverse
        self._left: list[int] = []  # what an arc can carry yet
        self._out: list[list[int]] = [[] for _ in range(len(to_sink) + 2)]
        unit = _RESOLUTION / scale
        for node, (sink, source) in enumerate(zip(to_sink, from_source, strict=True)):
            self._add(node, self._sink, round(sink * unit))
            self._add(self._source, node, round(source * unit))
        for (tail, head), cost in arcs.items():
            self._add(tail, head, round(cost * unit))

    def _add(self, tail: int, head: int, capacity: int) -> None:
        if capacity:
            for start, end, carries in ((tail, head, capacity), (head, tail, 0)):
                self._out[start].append(len(self._heads))
                self._heads.append(end)
                self._left.append(carries)

    def source_side(self) -> set[int]:
        """The nodes on the side of the source; of several cheapest divisions the one with the fewest."""
        while self._sink in (levels := self._levels()):
            following = [0] * len(self._out)
            while self._push(levels, following):
                pass
        return levels.keys() - {self._source}

    def _levels(self) -> dict[int, int]:
        """How many arcs that can carry more lead to each node from the source, where any do."""
        levels, queue = {self._source: 0}, deque([self._source])
        while queue:
            node = queue.popleft()
            for arc in self._out[node]:
                head = self._heads[arc]
                if self._left[arc] and head not in levels:
                    levels[head] = levels[node] + 1
                    queue.append(head)
        return levels

    def _push(self, levels: dict[int, int], following: list[int]) -> int:
        """Send as much as goes along one shortest way to the sink."""
        way: list[int] = []
        node = self._source
        while node != self._sink:
            out = self._out[node]
            while following[node] < len(out):
                arc = out[following[node]]
                if self._left[arc] and levels.get(self._heads[arc]) == levels[node] + 1:
                    break
                following[node] += 1
            else:
                if not way:
                    return 0
                node = self._heads[way.pop() ^ 1]
                following[node] += 1
                continue
            way.append(arc)
            node = self._heads[arc]
        flow = min(self._left[arc] for arc in way)
        for arc in way:
            self._left[arc] -= flow
            self._left[arc ^ 1] += flow
        return flow
