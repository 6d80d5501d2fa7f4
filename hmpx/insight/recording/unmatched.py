"""Names in lists that no call matched: in the conversion's own lists, module rules and regions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from hmpx import process_state
from hmpx.ops.overlays import Overlay
from hmpx.ops.policies.catalog import catalog
from hmpx.ops.policies.op_lists import SIDES, shipped
from hmpx.ops.policies.policy import Policy

_HIDDEN = "every op that was called in it was in a module or region with a rule of its own"


def unmatched(policy: Policy, used: Mapping[int, set[str]]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names in a user's lists, each with its line, and those in lists that come with hmpx.

    used: by place, the ops that were called there and the names that they follow.
    """
    everywhere = _with_followed(set().union(*used.values()))
    unused = [name for side in SIDES for name in getattr(policy, side) if name not in everywhere]
    origins = {name: policy.origins.get(name, "") for name in unused}
    own = [name for name, origin in origins.items() if origin and not origin.startswith(str(shipped()))]
    of_places = [line for overlay in _in_force() for line in _of_overlay(overlay, used)]
    return (
        tuple([*(f"{origins[name]}: {name}" for name in own), *of_places]),
        tuple(name for name in unused if name not in own),
    )


def _with_followed(names: set[str]) -> set[str]:
    ops = catalog()
    return names | {follows for name in names if name in ops and (follows := ops[name].follows)}


def _in_force() -> list[Overlay]:
    """The module rules that are in force now."""
    rules = {rule.overlay.number: rule.overlay for rule in list(process_state.module_rules)}
    return [rules[number] for number in sorted(rules)]


def _of_overlay(overlay: Overlay, used: Mapping[int, set[str]]) -> Iterator[str]:
    """The names that an overlay lists, or all of it, if it decided no call of one of them."""
    inside = [
        names for place, called in used.items() for number, names in _decided(place, called) if number == overlay.number
    ]
    if not inside:
        entered = any(overlay.number in _overlays_of(place) for place in used)
        yield f"{overlay.where}: {_HIDDEN if entered else 'no op was called in it'}"
        return
    called = set().union(*inside)
    yield from (f"{where}: {name}" for name, _, where in overlay.names if name not in called)


def _decided(place: int, called: set[str]) -> Iterator[tuple[int, set[str]]]:
    """Each overlay of a place that has a say, by number, and those of the names called there that are left to it."""
    left = _with_followed(called)
    for number in _overlays_of(place):
        yield number, left
        overlay = process_state.overlays[number]
        if overlay.whole:
            return
        left = left - {name for name, _, _ in overlay.names}


def _overlays_of(place: int) -> Iterator[int]:
    """The numbers of the overlays of a place, from the innermost outwards."""
    while place:
        place, overlay = process_state.scopes[place]
        yield overlay
