"""Which parts a program is divided into: list names, and those that one module spoils, module by module."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from hmpx.insight.comparing.calls import Compared
from hmpx.insight.tuning.charges import Scored
from hmpx.insight.tuning.problem import Chosen, Part, Problem
from hmpx.ops.catalog import catalog
from hmpx.ops.policy import Policy, Rule
from hmpx.ops.rules import TARGETS

Rules = dict[str, dict[str, list[str]]]  # by module: "bf16" and "fp32", and the names


class Division:
    """What part each site belongs to.

    split: list names whose sites are told apart by module. modules: the names of the modules that a rule can stand for.
    """

    def __init__(self, split: Collection[str] = (), modules: Collection[str] = ()) -> None:
        self._split, self._modules = frozenset(split), frozenset(modules)

    def part_of(self, site: Scored) -> Part:
        return self.part(site.site)

    def part(self, site: Compared) -> Part:
        """The part of a site; where it calls a split name outside of these modules, the rest of that name."""
        return Part(site.op, site.module if site.op in self._split and site.module in self._modules else "")


def spoiled(problem: Problem, chosen: Chosen, wished: Chosen, modules: Collection[str]) -> set[str]:
    """The names that are given up although BF16 brings something, and that several modules call."""
    given_up = {part.name for part in (wished | problem.pinned.keys()) - chosen}
    found = set()
    for part, sites in problem.sites.items():
        places = {site.site.module for site in sites}
        if part.name in given_up and len(places) > 1 and places & {*modules}:
            found.add(part.name)
    return found


def as_listed(problem: Problem, policy: Policy) -> Chosen:
    """What is in BF16 under lists that are known; a name that they leave to its inputs, where all of these are."""
    low: set[Part] = set()
    for part in problem.parts:  # in the order in which they are met
        rule = policy.rule(catalog()[part.name])
        sources = problem.sources(part) - {None}
        if part not in problem.pinned and (rule is Rule.BF16 or (rule not in TARGETS and sources and sources <= low)):
            low.add(part)
    return frozenset(low)


def lists_and_rules(parts: Iterable[Part], chosen: Chosen) -> tuple[set[str], set[str], Rules]:
    """The names for the bf16 list and for the fp32 list, and what rules of modules say beside them.

    Of a name that is told apart by module the list says what it has outside of them, else what most modules have.
    """
    low: set[str] = set()
    wide: set[str] = set()
    rules: Rules = {}
    by_name: dict[str, list[Part]] = {}
    for part in parts:
        by_name.setdefault(part.name, []).append(part)
    for name, those in sorted(by_name.items()):
        rest = Part(name)
        usual = rest in chosen if rest in those else 2 * sum(part in chosen for part in those) > len(those)
        (low if usual else wide).add(name)
        said = {"": usual}
        for part in sorted(those, key=lambda part: (part.module.count("."), part.module)):
            if not part.module:
                continue
            around = max((m for m in said if not m or part.module.startswith(f"{m}.")), key=len)
            if (part in chosen) is not said[around]:
                said[part.module] = part in chosen
                side = rules.setdefault(part.module, {}).setdefault("bf16" if part in chosen else "fp32", [])
                side.append(name)
    return low, wide, rules
