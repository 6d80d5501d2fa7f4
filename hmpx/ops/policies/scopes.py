"""Scopes: each nesting of overlays has a number; 0 is outside of all overlays.

A number is what the state of a thread holds, and what compiled code is guarded by. Numbers hold for the process; which
policy a scope has depends on the conversion in force, which is around all of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

from hmpx import process_state as state
from hmpx.autocast_state import SCOPES
from hmpx.errors import HmpxError
from hmpx.ops.policies.policy import Policy


def number_inside(scope: int, overlay: int) -> int:
    """The scope of an overlay (by its number) inside another scope."""
    found = state.scope_numbers.get((scope, overlay))
    return _new(scope, overlay) if found is None else found


def _new(scope: int, overlay: int) -> int:
    with state.lock:
        key = scope, overlay
        if key not in state.scope_numbers:
            if state.scopes[scope][1] == overlay:
                state.scope_numbers[key] = scope  # once more the same
            elif scope and state.overlays[overlay].policy is not None:
                state.scope_numbers[key] = number_inside(0, overlay)  # whatever is around
            elif len(state.scopes) < SCOPES:
                state.scope_numbers[key] = len(state.scopes)
                state.scopes.append(key)
            else:
                where = state.overlays[overlay].where
                raise HmpxError(f"{where}: more than {SCOPES} nestings of lists in one process")
        return state.scope_numbers[key]


def made_of(overlays: Collection[int]) -> set[int]:
    """The known scopes that consist of these overlays alone."""
    found = {0}
    for scope, (around, overlay) in enumerate(state.scopes):  # what is around has a smaller number
        if around in found and overlay in overlays:
            found.add(scope)
    return found


def scope_inside(scope: int, overlay: int) -> int:
    """The same; the conversion in force builds wrappers for it."""
    found = number_inside(scope, overlay)
    if found not in state.known_scopes and state.learn is not None:
        state.learn((found,))
    return found


# torch.compile calls it, and takes the number for a constant: it depends on nothing but the arguments.
vars(scope_inside)["_dynamo_marked_constant"] = True


class Policies(Mapping[int, Policy]):
    """The policies of one conversion by the scope in which they hold, as far as they are known."""

    def __init__(self, policy: Policy) -> None:
        self._known = {0: policy}

    def __getitem__(self, scope: int) -> Policy:
        return self._known[scope]

    def at(self, scope: int) -> Policy:
        """The policy of any scope, known or not."""
        if scope in self._known:
            return self._known[scope]
        around, overlay = state.scopes[scope]
        return state.overlays[overlay].over(self.at(around))

    def __iter__(self) -> Iterator[int]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)

    def know(self, scopes: Iterable[int]) -> bool:
        """Add scopes; whether some were new."""
        before = len(self._known)
        for scope in scopes:
            self._known[scope] = self.at(scope)
        return len(self._known) > before

    def __str__(self) -> str:
        return "".join(f"{scope}: {policy}" for scope, policy in self._known.items())
