"""Runs observers of op calls, under the conversion in force or under one of their own."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence

import torch

from hmpx import rounding, updates
from hmpx.base.process_state import lock, observers
from hmpx.conversion import Conversion, install, installed
from hmpx.ops.computing.kernels import KernelsAsked
from hmpx.ops.module_rules import ModuleRule
from hmpx.ops.policies.policy import Policy
from hmpx.ops.wrapping.observing import Observer

# The folders of the code that computes an optimizer's step.
OF_STEPS = tuple(os.path.dirname(str(package.__file__)) + os.sep for package in (torch.optim, updates, rounding))


@contextlib.contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Let an observer see the calls of ops, under the conversion that is in force and those to come."""
    try:
        with lock:
            observers.append(observer)
            _put_in_force_again()
        yield
    finally:
        with lock:
            observers.remove(observer)
            _put_in_force_again()


@contextlib.contextmanager
def observed(
    policy: Policy, kernels: KernelsAsked, observer: Observer, rules: Sequence[ModuleRule] = ()
) -> Iterator[Conversion]:
    """Put a conversion with one observer in force, and the previous one again at the end."""
    with lock:
        others = observers[:]
        observers[:] = [observer]
        try:
            conversion = install(Conversion(policy, kernels=kernels, rules=rules))
        finally:
            observers[:] = others
    with conversion:
        yield conversion


def _put_in_force_again() -> None:
    conversion = installed()
    if conversion is not None:
        conversion.put_in_force_again()
