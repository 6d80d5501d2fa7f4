"""Where an op is called from, as a number: each nesting of overlays is a *place*, and 0 is outside of all.

A number is what the state of a thread holds, and what compiled code is guarded by. Numbers hold for the process; which
policy a place has depends on the conversion in force, which is around all of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

from hmpx import process_state as state
from hmpx.autocast_state import PLACES
from hmpx.casts.policy import Policy
from hmpx.errors import HmpxError


def number_inside(place: int, overlay: int) -> int:
    """The place that an overlay, by its number, makes of another place."""
    found = state.place_numbers.get((place, overlay))
    return _new(place, overlay) if found is None else found


def _new(place: int, overlay: int) -> int:
    with state.lock:
        key = place, overlay
        if key not in state.place_numbers:
            if state.places[place][1] == overlay:
                state.place_numbers[key] = place  # once more the same
            elif place and state.overlays[overlay].policy is not None:
                state.place_numbers[key] = number_inside(0, overlay)  # whatever is around
            elif len(state.places) < PLACES:
                state.place_numbers[key] = len(state.places)
                state.places.append(key)
            else:
                where = state.overlays[overlay].where
                raise HmpxError(f"{where}: more than {PLACES} nestings of lists in one process")
        return state.place_numbers[key]


def made_of(overlays: Collection[int]) -> set[int]:
    """The places that are known, of these overlays alone."""
    found = {0}
    for place, (around, overlay) in enumerate(state.places):  # what is around has a smaller number
        if around in found and overlay in overlays:
            found.add(place)
    return found


def place_inside(place: int, overlay: int) -> int:
    """The same, and the conversion in force has wrappers for it from then on."""
    found = number_inside(place, overlay)
    if found not in state.known_places and state.learn is not None:
        state.learn((found,))
    return found


# torch.compile calls it, and takes the number for a constant: it depends on nothing but the arguments.
vars(place_inside)["_dynamo_marked_constant"] = True


class Policies(Mapping[int, Policy]):
    """The policies of one conversion by the place in which they hold, as far as they are known."""

    def __init__(self, policy: Policy) -> None:
        self._known = {0: policy}

    def __getitem__(self, place: int) -> Policy:
        return self._known[place]

    def at(self, place: int) -> Policy:
        """The policy of any place, known or not."""
        if place in self._known:
            return self._known[place]
        around, overlay = state.places[place]
        return state.overlays[overlay].over(self.at(around))

    def __iter__(self) -> Iterator[int]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)

    def know(self, places: Iterable[int]) -> bool:
        """Know these too; whether some were not known before."""
        before = len(self._known)
        for place in places:
            self._known[place] = self.at(place)
        return len(self._known) > before

    def __str__(self) -> str:
        return "".join(f"{place}: {policy}" for place, policy in self._known.items())
