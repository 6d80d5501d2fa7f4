"""Each region in each situation: nested, in threads, tasks, generators, decorators, compiled code, converted anew."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import hmpx
from hmpx.ops.wrapping import weight_cache

BF16, FP32 = torch.bfloat16, torch.float32
X = torch.randn(4, 4)
LAYER = nn.Linear(4, 4).requires_grad_(False)


def dtype():
    return (X @ X).dtype


def dtype_and_rounding():
    """How products are computed, and whether a step keeps what rounding to nearest would lose."""
    p = nn.Parameter(torch.ones(500, dtype=BF16))
    optimizer = torch.optim.SGD([p], lr=1e-3)
    p.grad = torch.ones_like(p)
    optimizer.step()
    return dtype(), len(p.unique()) > 1


def kept():
    """How many casts the cache holds after two calls; None without one."""
    LAYER(X), LAYER(X)
    cache = weight_cache.current()
    return cache and len(cache.casts)


class Case(NamedTuple):
    """A region, what is looked at, and what is seen inside and outside.

    enabled: `convert`'s. of_thread: the region is open for every task of its thread.
    """

    region: Any
    look: Callable[[], object]
    inside: object
    outside: object
    enabled: bool = True
    of_thread: bool = False

    def bare(self):
        """The region as a decorator is written without parentheses, where it may be."""
        return self.region if isinstance(self.region, type) else self.region()


CASES = {
    "disable_casts": Case(hmpx.disable_casts, dtype_and_rounding, (FP32, True), (BF16, False)),
    "enable_casts": Case(hmpx.enable_casts, dtype, BF16, FP32, enabled=False),
    "casts": Case(functools.partial(hmpx.casts, fp32=["matmul"]), dtype, FP32, BF16),
    "cached_weights": Case(hmpx.cached_weights, kept, 2, None, of_thread=True),
}


@pytest.fixture(params=CASES)
def case(request):
    found = CASES[request.param]
    with hmpx.convert(enabled=found.enabled):
        assert found.look() == found.outside
        yield found
        assert found.look() == found.outside
    hmpx.restore()  # what a test has put in its place


def test_nested_entered_again_and_left_in_another_order(case):
    with case.region():
        with case.region(), case.region() as entered:
            assert case.look() == case.inside and type(entered) is type(case.region())
        assert case.look() == case.inside
        with pytest.raises(KeyError), case.region():
            raise KeyError
        assert case.look() == case.inside
    region = case.region()
    with region, region:
        assert case.look() == case.inside
    assert case.look() == case.outside
    with region:
        assert case.look() == case.inside
    first, second = case.region(), case.region()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert case.look() == case.inside
    second.__exit__(None, None, None)


@pytest.mark.parametrize("first_to_leave", [0, 1])
def test_in_two_threads(case, first_to_leave):
    entered, leave, seen = threading.Barrier(3, timeout=20), [threading.Event(), threading.Event()], {}
    left = [threading.Event(), threading.Event()]

    def inside(i):
        with case.region():
            entered.wait()
            leave[i].wait(20)
            seen[i, "inside"] = case.look()
        seen[i, "outside"] = case.look()
        left[i].set()

    threads = [threading.Thread(target=inside, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    entered.wait()
    seen["beside"] = case.look()  # while both are open
    for i in (first_to_leave, 1 - first_to_leave):
        leave[i].set()
        left[i].wait(20)
    for thread in threads:
        thread.join()
    expected = {(i, where): getattr(case, where) for i in range(2) for where in ("inside", "outside")}
    assert seen == {**expected, "beside": case.outside}


@pytest.mark.parametrize("first_to_leave", [0, 1])
def test_in_two_tasks(case, first_to_leave):
    seen = {}

    async def look():
        return case.look()

    async def inside(i, entered, leave):
        with case.region():
            entered.set()
            await leave.wait()
            seen[i, "inside"] = case.look()
            assert await asyncio.create_task(look()) == case.inside  # in the tasks that it starts, too
        seen[i, "outside"] = case.look()

    async def both():
        entered, leave = ([asyncio.Event(), asyncio.Event()] for _ in range(2))
        tasks = [asyncio.create_task(inside(i, entered[i], leave[i])) for i in range(2)]
        for each in entered:
            await each.wait()
        seen["beside"] = case.look()
        for i in (first_to_leave, 1 - first_to_leave):
            leave[i].set()
            await tasks[i]

    asyncio.run(both())
    others = case.inside if case.of_thread else case.outside  # a cache is open as long as anybody in the thread has it
    assert seen.pop((first_to_leave, "outside")) == others and seen.pop("beside") == others
    last = 1 - first_to_leave
    with case.region():  # around the loop: everybody's
        assert asyncio.run(look()) == case.inside
    assert seen == {(0, "inside"): case.inside, (1, "inside"): case.inside, (last, "outside"): case.outside}


def test_in_a_generator(case):
    def generator():
        with case.region():
            yield case.look()
            yield case.look()

    for ends in ("exhausted", "closed", "collected"):
        made = generator()
        assert next(made) == case.inside == case.look()  # it stays open while it is suspended, as torch.no_grad() does
        assert next(made) == case.inside
        if ends == "exhausted":
            assert next(made, None) is None
        elif ends == "closed":
            made.close()
        else:
            del made


@pytest.mark.parametrize("parentheses", [True, False])
def test_as_a_decorator(case, parentheses):
    class Holder:
        @(case.region() if parentheses else case.bare())
        def look(self, depth=1, *, error=None):
            """Its own text."""
            if error is not None:
                raise error
            return [case.look(), *(self.look(depth - 1) if depth else ())]

    holder = Holder()
    assert holder.look(2) == [case.inside] * 3 and case.look() == case.outside
    with pytest.raises(KeyError):
        holder.look(error=KeyError())
    assert case.look() == case.outside and holder.look.__doc__ == "Its own text."
    assert holder.look.__name__ == "look"
    with case.region():
        assert holder.look(0) == [case.inside] and case.look() == case.inside


def test_converted_twice_inside(case):
    with case.region():
        with hmpx.convert(enabled=case.enabled):
            assert case.look() == case.inside
            with hmpx.convert("O2", enabled=case.enabled):
                assert case.look() == case.inside
            assert case.look() == case.inside
        assert case.look() == case.inside


def test_restored_and_converted_again_inside(case):
    with case.region():
        hmpx.restore()
        assert dtype() is FP32
        hmpx.convert(enabled=case.enabled)
        assert case.look() == case.inside
    assert case.look() == case.outside
    hmpx.restore()
    hmpx.convert(enabled=case.enabled)
    assert case.look() == case.outside
    with case.region():
        assert case.look() == case.inside


def test_a_region_that_is_entered_before_a_conversion_holds_in_it():
    for name, case in CASES.items():
        with case.region(), hmpx.convert(enabled=case.enabled):
            assert case.look() == case.inside, name
