"""The scopes of op lists, by number, and the policies of a conversion by scope.

Each nesting of overlays is a scope; 0 is outside of all overlays. The state of a thread holds the number of a scope,
and compiled code is guarded by it. Numbers hold for the process; which policy a scope has depends on the conversion in
force, which is around all of them.

The lists of a prepared model are an overlay too, which lies below all others: it takes the place of the conversion's
own lists, and what regions and rules lay over those lies over it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from hmpx.base import process_state as state
from hmpx.base.compiling import ask_once
from hmpx.ops.policies.policy import Policy


class Policies(dict[int, Policy]):
    """The policies of one conversion by the scope in which they hold, as far as they are known."""

    def at(self, scope: int) -> Policy:
        """Return the policy of any scope, known or not."""
        if scope in self:
            return self[scope]
        around, overlay = state.scopes[scope]
        return state.overlays[overlay].over(self.at(around))

    def __str__(self) -> str:
        return "".join(f"{scope}: {policy}" for scope, policy in self.items())


def scope_inside(scope: int, overlay: int) -> int:
    """Return the scope of an overlay (by its number) inside another scope; a conversion builds wrappers for it."""
    found = number_inside(scope, overlay)
    if found not in state.known_scopes and state.learn is not None:
        state.learn((found,))
    return found


# torch.compile calls it, and takes the number for a constant: it depends on nothing but the arguments.
ask_once(scope_inside)


def number_inside(scope: int, overlay: int) -> int:
    """Return the same scope, whether the conversion in force has wrappers for it or not."""
    found = state.scope_numbers.get((scope, overlay))
    return _new(scope, overlay) if found is None else found


def _new(scope: int, overlay: int) -> int:
    with state.lock:
        key = scope, overlay
        if key not in state.scope_numbers:
            if scope and state.overlays[overlay].of_model:
                state.scope_numbers[key] = _above(scope, overlay)
            elif state.scopes[scope][1] == overlay:
                state.scope_numbers[key] = scope  # once more the same
            else:
                state.scope_numbers[key] = len(state.scopes)
                state.scopes.append(key)
        return state.scope_numbers[key]


def _above(scope: int, lists: int) -> int:
    """Return the scope of a model's lists: with the overlays of `scope` over them, or alone inside of another model."""
    before = lists_of(scope)
    if before == lists:
        return scope
    found = number_inside(0, lists)
    for overlay in () if before else [*_overlays_of(scope)][::-1]:
        found = number_inside(found, overlay)
    return found


def _overlays_of(scope: int) -> Iterator[int]:
    """Yield the numbers of the overlays of a scope, the innermost first."""
    while scope:
        scope, overlay = state.scopes[scope]
        yield overlay


def lists_of(scope: int) -> int:
    """Return the overlay (its number) of the model whose lists hold in a scope; 0 if they are those of no model."""
    return next((overlay for overlay in _overlays_of(scope) if state.overlays[overlay].of_model), 0)


ask_once(lists_of)


def made_of(overlays: Collection[int]) -> set[int]:
    """Return the known scopes that consist of these overlays alone."""
    found = {0}
    for scope, (around, overlay) in enumerate(state.scopes):  # the scope around has a smaller number
        if around in found and overlay in overlays:
            found.add(scope)
    return found
