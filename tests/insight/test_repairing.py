"""Repairing a choice spends as few verifications as it can."""

from __future__ import annotations

from types import SimpleNamespace

from hmpx.insight.tuning.repairing import Budget, Repair


class Problem:
    """Parts by name: what each saves, and what it does; a choice holds where that is 1 at most."""

    def __init__(self, saved, harms):
        self._saved, self._harms = saved, harms
        self.pinned, self.unseen = {}, ()

    def cost(self, chosen):
        return 10.0 - sum(self._saved[part] for part in chosen)

    def cheapest(self, _):
        return frozenset(self._saved)

    def harm(self, part, _):
        return self._harms[part]

    def predicted(self, chosen):
        return self.verified(chosen)

    def verified(self, chosen):
        size = sum(self._harms[part] for part in chosen)
        return SimpleNamespace(size=size, meets=lambda tolerance: size <= tolerance)


def test_what_saves_nothing_or_is_hopeless_is_not_verified():
    problem, verified = Problem({"a": 4.0, "b": 0.0, "c": 3.0}, {"a": 0.5, "b": 0.2, "c": 2.0}), []

    def verify(chosen):
        verified.append("".join(sorted(chosen)))
        return problem.verified(chosen)

    repair = Repair(problem, verify, 1.0, Budget(3))
    assert repair.more(frozenset(), frozenset("abc")) == {"a"}
    assert "b" not in verified and "ab" not in verified and verified == ["abc", "ac", "a"]
    verified.clear()
    assert repair.less(frozenset("abc")) == {"a", "b"} and verified == ["ab"]
    assert Repair(problem, verify, 0.1, Budget(3)).more(frozenset(), frozenset("c")) == frozenset() and verified == [
        "ab"
    ]
