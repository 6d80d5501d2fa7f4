"""Compiled code under regions: operators alone, asyncio tasks, checkpointed bodies, threads; and how many graphs."""

import asyncio
import threading

import pytest
import torch
import torch._dynamo.testing
from torch import nn
from torch.utils.checkpoint import checkpoint

import hmpx
from tests.support.compiling import nothing_compiled, recent  # noqa: F401

BF16, FP32 = torch.bfloat16, torch.float32
X = torch.randn(4, 4)


@pytest.fixture
def graphs():
    return torch._dynamo.testing.CompileCounterWithBackend("aot_eager")


def test_compiled_code_in_interleaved_tasks_follows_its_own_task():
    compiled = torch.compile(lambda x: (x @ x, torch.mm(x, x)), backend="aot_eager", fullgraph=True)

    async def one(region, found, entered, other):
        with region():
            entered.set()
            await other.wait()
            for _ in range(2):
                found.append({each.dtype for each in compiled(X)})
                await asyncio.sleep(0)

    async def both():
        (off, on), found = (asyncio.Event(), asyncio.Event()), ([], [])
        tasks = one(hmpx.disable_casts, found[0], off, on), one(hmpx.enable_casts, found[1], on, off)
        await asyncio.gather(*tasks)
        return found

    with hmpx.convert():
        assert asyncio.run(both()) == ([{FP32}] * 2, [{BF16}] * 2)


def test_new_lists_compile_once_each_and_old_ones_not_again(graphs):
    """A region makes no number of a scope that another graph would be guarded by."""
    compiled = torch.compile(lambda x: torch.mm(x, x) @ x, backend=graphs, fullgraph=True)
    with hmpx.convert():
        regions = [hmpx.casts(fp32=[name]) for name in ("exp", "log", "mm", "matmul")]
        for region in regions:
            with region:
                compiled(X)
        made = graphs.frame_count
        for region in regions:
            with region:
                compiled(X)
        with hmpx.casts(fp32=["tanh"]):
            assert compiled(X).dtype is BF16
        assert made == 4 and graphs.frame_count == 5


def test_threads_in_disable_casts_compile_nothing_anew(graphs):
    """Nor does compiled code depend on how many there are."""
    compiled = torch.compile(lambda x: torch.mm(x, x), backend=graphs, fullgraph=True)
    done, threads = threading.Event(), []

    def waiting(entered):
        with hmpx.disable_casts():
            entered.set()
            done.wait(20)

    with hmpx.convert():
        counts = []
        for _ in range(4):
            assert compiled(X).dtype is BF16
            counts.append(graphs.frame_count)
            entered = threading.Event()
            threads.append(threading.Thread(target=waiting, args=(entered,)))
            threads[-1].start()
            assert entered.wait(20)
        done.set()
        for each in threads:
            each.join()
    assert counts[0] == 1 and counts[-1] <= 2


@recent
@pytest.mark.parametrize(
    "where, reentrant, backend",
    [
        ("model", True, "eager"),
        pytest.param("everywhere", False, "aot_eager", marks=pytest.mark.slow),
        pytest.param("everywhere", True, "aot_eager", marks=pytest.mark.slow),
        pytest.param("model", False, "eager", marks=pytest.mark.slow),
    ],
)
def test_a_region_in_a_checkpointed_body_has_the_bits_of_eager(where, reentrant, backend):
    weight = torch.randn(4, 4, requires_grad=True)

    def body(x):
        with hmpx.disable_casts():
            uncast = x @ weight
        with hmpx.casts(fp32=["mm"]):
            listed = torch.mm(x, weight)
        with torch.autocast("cpu", enabled=False):
            island = x @ weight
        return uncast + listed.float() + island + (x @ weight).float()

    def whole(x):
        return checkpoint(body, x, use_reentrant=reentrant).square().sum()

    found = []
    with hmpx.convert(where=where):
        for run in (whole, torch.compile(whole, backend=backend, fullgraph=True)):
            x = X.clone().requires_grad_()
            y = run(x)
            y.backward()
            found.append((y.detach(), x.grad, weight.grad))
            weight.grad = None
    assert all(map(torch.equal, *found))


@recent
def test_a_region_that_compiled_code_leaves_open_holds_afterwards_and_in_this_thread_alone():
    def opening(x):
        region = hmpx.disable_casts()
        region.__enter__()
        return region, x @ x

    with hmpx.convert():
        region, product = torch.compile(opening, backend="aot_eager")(X)
        found = []
        thread = threading.Thread(target=lambda: found.append((X @ X).dtype))
        thread.start()
        thread.join()
        assert product.dtype is (X @ X).dtype is FP32 and found == [BF16]
        region.__exit__(None, None, None)
        assert (X @ X).dtype is BF16


def test_a_function_is_compiled_at_most_once_for_inside_and_once_for_outside_of_a_forward(graphs):
    weight = torch.randn(4, 4, requires_grad=True)
    compiled = torch.compile(lambda x: torch.mm(x, weight) @ weight, backend=graphs, fullgraph=True)

    class Calling(torch.nn.Module):
        def forward(self, x):
            return compiled(x)

    with hmpx.convert(where="model"):
        for _ in range(3):
            assert compiled(X).dtype is BF16 and Calling()(X).dtype is BF16
    assert graphs.frame_count <= 2


@recent
@pytest.mark.parametrize("where", ["everywhere", "model"])
def test_code_that_asks_for_a_dtype_in_a_region_goes_on_as_in_eager(where):
    """Dynamo tries each op as it traces: what the code decides by the result must be what it decides in eager."""

    def function(x):
        with hmpx.disable_casts():
            uncast = (x @ x).dtype
            with hmpx.casts(bf16=["matmul"]):
                cast = (x @ x).dtype
        with hmpx.casts(fp32=["matmul"]):
            listed = (x @ x).dtype
        return x + (uncast is BF16), cast is BF16, listed is FP32

    with hmpx.convert(where=where):
        for run in (function, torch.compile(function, backend="eager", fullgraph=True)):
            x, *decided = run(X)
            assert torch.equal(x, X) and decided == [True, True]


class Island(nn.Module):
    """A graph breaks in its `torch.autocast`, which is a model's."""

    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            y = torch.mm(x, x)
            torch._dynamo.graph_break()
            return y, x @ x


def region(x):
    with hmpx.disable_casts():
        y = x @ x
        torch._dynamo.graph_break()
        return y, x @ x


@recent
@pytest.mark.parametrize("function", [region, Island()], ids=["region", "island"])
def test_a_region_around_a_graph_break_holds_on_both_sides_and_is_left(function):
    with hmpx.convert():
        found = torch.compile(function, backend="aot_eager")(X)
        assert [each.dtype for each in found] == [FP32] * 2 and (X @ X).dtype is BF16
        with pytest.raises(torch._dynamo.exc.Unsupported):
            torch.compile(lambda x: function(x), backend="aot_eager", fullgraph=True)(X)
        assert (X @ X).dtype is BF16
