"""Random training programs: hmpx beside the same program on FP32 copies, compared after each action.

A program is data: a `Setup` and a list of actions, each the name of a rule and its arguments. Arguments are taken
modulo what is there, and an action that does not fit where it stands is passed over, so every part of a program is a
program. One that fails is cut down to the shortest that still fails in the same way, and printed as Python that runs by
itself.

    python -m tests.support.programs --seed 17            one program
    python -m tests.support.programs --seconds 3600       as many as fit, from --seed on; a summary at the end

What no program tries stands in `models.OFF` with its reason.

The shape is that of `hypothesis.stateful`. Hypothesis itself is not used: here a seed means the same program with every
version of every library, on every worker and from a shell, and what it would save is the sixty lines of `shortest`.
"""

from __future__ import annotations

import argparse
import gc
import logging
import random
import re
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch

from hmpx.updates import step_hooks
from hmpx.updates.stepping import transfers
from hmpx.updates.stepping.released import Waiting
from tests.support.models import OFF, Setup, random_setup
from tests.support.oracle import TorchRefuses
from tests.support.own_step import own_step
from tests.support.rules import RULES, NotNow
from tests.support.world import Different, World

Action = tuple[str, dict[str, Any]]
_profile_hook_step = torch.optim.Optimizer.profile_hook_step


@dataclass(frozen=True)
class Failure:
    """Where a program went wrong, and how."""

    at: int
    action: Action | None
    error: Exception

    @property
    def kind(self) -> tuple:
        """What a shorter program must have in common with a longer one to be about the same fault."""
        text = str(self.error)
        what = text.split()[0] if isinstance(self.error, Different) else re.sub(r"\d+", "0", text.split(":")[0][:60])
        return type(self.error).__name__, what, self.action and self.action[0]

    def __str__(self) -> str:
        return f"action {self.at}, {self.action}: {type(self.error).__name__}: {self.error}"


@dataclass(frozen=True)
class Program:
    """A setup, and what is done with it."""

    setup: Setup
    actions: list[Action]

    def failure(self, done: list[Action] | None = None) -> Failure | None:
        """Run; None if both sides agree after each action. What was not passed over is added to `done`."""
        at, action = -1, None
        floor = mock.patch.object(transfers, "_FLOOR", self.setup.floor)
        waits = mock.patch.object(Waiting, "ELEMENTS", self.setup.waits)
        with floor, waits, own_step(), warnings.catch_warnings():  # programs that ask for `fused` say so
            warnings.simplefilter("ignore")
            try:
                world = World(self.setup)
                world.check()
                for at, action in enumerate(self.actions):  # noqa: B007
                    try:
                        RULES[action[0]][0](world, **action[1])
                    except NotNow:
                        continue
                    except TorchRefuses:
                        return None
                    world.check()
                    if done is not None:
                        done.append(action)
            except Exception as error:
                return Failure(at, action, error)
        return None

    def done(self) -> list[Action]:
        """The actions that fit where they stand, of a program that does not fail."""
        done: list[Action] = []
        self.failure(done)
        return done

    def __str__(self) -> str:
        lines = "".join(f"    {action!r},\n" for action in self.actions)
        return (
            "import torch\n\n"
            "from tests.support.models import Setup, Spec\n"
            "from tests.support.programs import Program\n\n"
            f"setup = {self.setup!r}\nactions = [\n{lines}]\nprint(Program(setup, actions).failure())\n"
        )


def program(seed: int) -> Program:
    """That of a seed. It uses a part of the rules, so that some come often."""
    draw = random.Random(seed)
    setup = random_setup(draw)
    names = [name for name in RULES if draw.random() < 0.6 or name in ("step", "backward")]
    weights = [RULES[name][1] for name in names]
    actions = []
    for _ in range(draw.randint(6, 24)):
        name = draw.choices(names, weights)[0]
        actions.append((name, {key: drawn(draw) for key, drawn in RULES[name][2].items()}))
    return Program(setup, actions)


def shortest(failing: Program, patience: float = 60) -> Program:
    """The shortest part of a program, with the plainest setup, that fails in the same way."""
    kind, end = failing.failure().kind, time.monotonic() + patience
    improved = True
    while improved and time.monotonic() < end:
        improved = False
        for smaller in _smaller(failing):
            failure = smaller.failure()
            if failure is not None and failure.kind == kind:
                failing, improved = smaller, True
                break
            if time.monotonic() > end:
                break
    return failing


def _smaller(whole: Program) -> Iterator[Program]:
    """Programs with less in them, the boldest first."""
    actions, setup = whole.actions, whole.setup
    size = len(actions)
    while size:
        for start in range(0, len(actions), size):
            yield Program(setup, actions[:start] + actions[start + size :])
        size //= 2
    for i in range(len(setup.params) if len(setup.params) > 1 else 0):
        yield Program(replace(setup, params=setup.params[:i] + setup.params[i + 1 :]), actions)
    for key in setup.options:
        yield Program(replace(setup, options={k: v for k, v in setup.options.items() if k != key}), actions)
    for key in setup.attach or ():
        yield Program(replace(setup, attach={k: v for k, v in setup.attach.items() if k != key}), actions)
    plain = {"groups": 1, "floor": 1 << 17, "waits": 1 << 20, "default_device": "cpu", "names": "named_parameters"}
    for key, value in plain.items():
        if getattr(setup, key) != value:
            yield Program(replace(setup, **{key: value}), actions)
    for i, spec in enumerate(setup.params):
        for other in (replace(spec, layout="contiguous"), replace(spec, frozen=False), replace(spec, shape=(7,))):
            if other != spec and (other.shape == spec.shape or spec.layout == "contiguous"):
                yield Program(replace(setup, params=(*setup.params[:i], other, *setup.params[i + 1 :])), actions)


def report(seed: int, patience: float = 60) -> str | None:
    """Run the program of a seed; if it fails, what to read: the failure, the seed, and the shortest program as code."""
    failing = program(seed)
    if failing.failure() is None:
        return None
    short = shortest(failing, patience)
    return f"seed {seed}: {short.failure()}\n    python -m tests.support.programs --seed {seed}\n\n{short}"


def uninstalled() -> bool:
    """Whether nothing of hmpx is left in torch when every program is gone."""
    gc.collect()
    step_hooks.uninstall()
    return not step_hooks._is_installed and torch.optim.Optimizer.profile_hook_step is _profile_hook_step


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.support.programs", description=__doc__.split("\n\n")[0])
    parser.add_argument("--seed", type=int, default=0, help="of the program, or of the first one")
    parser.add_argument("--seconds", type=float, help="run programs of one seed after the other for so long")
    parser.add_argument("--all", action="store_true", help="shorten every failure, not the first of its kind alone")
    given = parser.parse_args(arguments)
    logging.getLogger("hmpx").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    kinds: dict[tuple, list[int]] = {}
    end, seed, ran = time.monotonic() + (given.seconds or 0), given.seed, 0
    while not ran or time.monotonic() < end:
        failure = program(seed).failure()
        ran += 1
        if failure is not None:
            seeds = kinds.setdefault(failure.kind, [])
            if not seeds or given.all:
                print(report(seed), flush=True)
                print("-" * 100, flush=True)
            seeds.append(seed)
        seed += 1
    print(f"{ran} programs, {sum(map(len, kinds.values()))} failed")
    for kind, seeds in sorted(kinds.items(), key=lambda each: -len(each[1])):
        print(f"    {len(seeds)} times {kind}: seeds {seeds[:8]}")
    for what, why in OFF.items():
        print(f"    off: {what}: {why}")
    return bool(kinds)


if __name__ == "__main__":
    sys.exit(main())
