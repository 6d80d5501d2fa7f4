"""What was measured so far, in a file, so that a tuning that was interrupted goes on from it."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Collection, Iterator
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

import torch

from hmpx.errors import HmpxError
from hmpx.insight.comparing.noise import Noise
from hmpx.insight.tuning.found import Found
from hmpx.insight.tuning.problem import Chosen, Effect, Part
from hmpx.insight.tuning.raising import said

_SCHEMA = 3
FINGERPRINTS = "the model", "the batches", "held_out", "the loss", "the lists"  # keys of `about` whose values are such
Divided = frozenset[tuple[str, str, bool]]  # of each part its name and module, and whether it is in BF16


@dataclass
class Measured:
    """Scores of the batches so far, and the choices that were verified.

    about: what it was measured of; only a tuning of the same goes on from it. losses: of the scored batches, in FP32.
    noise: of their gradients. verified: effects on the held-out batches.
    """

    about: dict[str, Any]
    found: Found = field(default_factory=Found)
    noise: Noise = field(default_factory=Noise)
    losses: list[float] = field(default_factory=list)
    verified: dict[Divided, Effect] = field(default_factory=dict)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it, in one piece or not at all."""
        state = {
            "schema": _SCHEMA,
            "about": self.about,
            "found": self.found.as_plain(len(self.losses)),
            "noise": self.noise.state(),
            "losses": self.losses,
            "verified": [([*divided], astuple(effect)) for divided, effect in self.verified.items()],
        }
        beside = Path(f"{os.fspath(path)}.writing")
        torch.save(state, beside)
        os.replace(beside, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str], about: dict[str, Any]) -> Measured:
        """What a file holds; nothing yet where there is none.

        Raises:
            HmpxError: it is another file, or of another tuning.
        """
        if not Path(path).exists():
            return cls(about)
        try:
            state = torch.load(path, weights_only=True)
        except Exception as error:
            raise HmpxError(f"resume: {os.fspath(path)} is no file of hmpx.tune: {said(error)}") from None
        if not isinstance(state, dict) or state.get("schema") != _SCHEMA:
            raise HmpxError(f"resume: {os.fspath(path)} is no file of hmpx.tune, or of another version")
        try:
            measured = cls._of(state, about)
        except Exception as error:
            raise HmpxError(f"resume: {os.fspath(path)} is no whole file of hmpx.tune: {said(error)}") from None
        for key, value in about.items():
            if key in FINGERPRINTS and state["about"].get(key) != value:
                raise HmpxError(
                    f"resume: {os.fspath(path)} is of another tuning: {key} had other values when it was measured; "
                    "give another file"
                )
            if state["about"].get(key) != value:
                raise HmpxError(
                    f"resume: {os.fspath(path)} was measured with {key} {_short(state['about'].get(key))}, and this is "
                    f"{_short(value)}; give another file"
                )
        return measured

    @classmethod
    def _of(cls, state: dict[str, Any], about: dict[str, Any]) -> Measured:
        state["about"].keys()
        verified = {frozenset(map(tuple, parts)): Effect(*effect) for parts, effect in state["verified"]}
        return cls(about, Found(state["found"]), Noise.of(state["noise"]), state["losses"], verified)

    def tried(self, parts: Collection[Part]) -> dict[Chosen, Effect]:
        """The choices of these parts that were verified; of a part in a module also those of its name as a whole."""
        found = {}
        for divided, effect in self.verified.items():
            low = {(name, module): is_low for name, module, is_low in divided}
            known = {part: low.get(part, low.get((part.name, ""))) for part in parts}
            if None not in known.values():
                found[frozenset(part for part, is_low in known.items() if is_low)] = effect
        return found

    @contextlib.contextmanager
    def kept_when_interrupted(self, path: str | os.PathLike[str] | None) -> Iterator[None]:
        """Let Ctrl-C say which file goes on from here; without a path, write one."""
        try:
            yield
        except KeyboardInterrupt:
            if path is None:
                number, path = tempfile.mkstemp(prefix="hmpx-tune-", suffix=".pt")
                os.close(number)
                self.save(path)
            elif not Path(path).exists():  # in the first batch
                self.save(path)
            print(f"\ntune: what was measured is in {path}; go on with resume={os.fspath(path)!r}", file=sys.stderr)
            raise


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) < 80 else f"{text[:77]}..."
