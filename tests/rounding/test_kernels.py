"""One implementation a backend, the same bits from each."""

import itertools
import os
import subprocess
import textwrap
import warnings
from array import array

import pytest
import torch

import hmpx
from hmpx.rounding import native, stochastic, table
from hmpx.rounding.shared import Span, derive_key, key_of, name_id, step_key
from hmpx.rounding.table import Table, run_all
from tests.support import python
from tests.support.kernel_steps import STEPS, stepped
from tests.support.numbers import special_values

STEP, NAME = (2**64 - 1, 3), "w"
KEY = derive_key(*STEP, NAME)
OFFSETS = (0, 1, 2, 255, 2**31 - 3, 2**32 - 300_100)
needs_compiler = pytest.mark.skipif(native.library() is None, reason="no C compiler here")


def said_by(code, **environment):
    done = python.run("-c", textwrap.dedent(code), env={**os.environ, **environment}, check=True)
    return done.stdout + done.stderr


def numbers(count):
    return torch.cat([torch.randn(count), special_values(), torch.randn(3)])


def rounded(kernel, x, *place):
    out = torch.empty(x.shape, dtype=torch.bfloat16)
    if kernel is native:
        table.launch_once(native, [table.row_of_rounding(out, x, KEY, *place)])
    else:
        kernel.round_(out, x, KEY, *place)
    return out.view(torch.int16)


@pytest.fixture(params=[1, 3])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@needs_compiler
def test_c_and_eager_give_the_same_bits(threads):
    for offset, count in itertools.product(OFFSETS, [1, 2, 300, 300_000]):
        x = numbers(count)[: None if count > 2 else count]
        assert torch.equal(rounded(native, x, offset), rounded(stochastic, x, offset)), (offset, count)


def test_an_accelerator_is_told_the_same_rounding_in_a_few_calls(monkeypatch):
    """There no value is looked at, and all is rounded at once; also of numbers with any bits."""
    any_bits = torch.randint(-(2**31), 2**31, (3000,)).to(torch.int32).view(torch.float32)
    whole = torch.cat([numbers(1100), any_bits])
    for offset, (width, stride) in itertools.product([0, 1, 2**31 - 3, 2**32 - 5000], [(0, 0), (7, 11), (100, 101)]):
        x = whole[: whole.numel() // (width or 1) * (width or 1)]
        found = []
        for is_on_host in (True, False):
            monkeypatch.setattr(stochastic, "is_on_host", lambda tensor, answer=is_on_host: answer)
            found.append(rounded(stochastic, x, offset, width, stride))
        assert torch.equal(*found), (offset, width)


@needs_compiler
def test_a_list_of_tensors_gets_the_bits_that_each_gets_alone(threads):
    """Tensors of all sizes around a block, in rows too; their shares for threads end in the middle of some."""
    sizes = (1, 255, 256, 257, 70_001, 3, 512, 40_000, 0)
    pieces = [(numbers(size)[:size], f"p{i}", 7 * i, size, 0) for i, size in enumerate(sizes)]
    pieces.append((numbers(6000)[:6000], "rows", 2**31 + 5, 60, 101))
    outs = [torch.empty_like(x, dtype=torch.bfloat16) for x, *_ in pieces]
    pairs = zip(outs, pieces, strict=True)
    rows = [table.row_of_rounding(out, x, derive_key(5, 9, name), *place) for out, (x, name, *place) in pairs]
    table.launch_once(native, rows)
    for (x, name, *place), out in zip(pieces, outs, strict=True):
        alone = torch.empty_like(x, dtype=torch.bfloat16)
        if x.numel():
            stochastic.round_(alone, x, derive_key(5, 9, name), *place)
        assert torch.equal(out.view(torch.int16), alone.view(torch.int16)), name


def of_dtypes(steps, weight, state, grad):
    """The same numbers in these dtypes, in tensors of their own."""

    def of(held, dtype):
        return None if held is None else native.StoredTensor.of(held.tensor.to(dtype, copy=True), held.name)

    return [
        each._replace(
            weight=of(each.weight, weight), grad=of(each.grad, grad), states=tuple(of(s, state) for s in each.states)
        )
        for each in steps
    ]


@needs_compiler
@pytest.mark.parametrize("kernel", STEPS)
def test_a_list_of_steps_rounds_by_the_numbers_of_the_specification(threads, kernel):
    """What a kernel computes of FP32 tensors is what it rounds for BF16 ones, whichever of them are BF16."""
    bf16, fp32 = torch.bfloat16, torch.float32
    for scalars in STEPS[kernel]:
        drawn = stepped(kernel, scalars, bf16, bf16, bf16, (1, 300, 70_001 if kernel == "adam" else 513, 2, 256))
        exact = of_dtypes(drawn, fp32, fp32, fp32)
        table.step_list(native, kernel, exact, step_key(5, 9))
        for dtypes in itertools.product((bf16, fp32), repeat=3):
            steps = of_dtypes(drawn, *dtypes)
            table.step_list(native, kernel, steps, step_key(5, 9))
            for step, want, old in zip(steps, exact, drawn, strict=True):
                assert not torch.equal(want.weight.tensor, old.weight.tensor.float())
                for got, expected in zip((step.weight, *step.states), (want.weight, *want.states), strict=True):
                    if got is not None:
                        number, rounded = expected.tensor, torch.empty_like(expected.tensor, dtype=bf16)
                        stochastic.round_(rounded, number, key_of(step_key(5, 9), got.name), 0)
                        equal = rounded if got.tensor.dtype == bf16 else number
                        assert torch.equal(got.tensor, equal), (scalars, dtypes, got.name)


@pytest.mark.parametrize("kernel", ["CPU", "accelerator", pytest.param(native, marks=needs_compiler)])
@pytest.mark.parametrize("offset", [7, 2**32 - 600])
def test_rows_get_the_bits_that_they_get_in_the_whole(kernel, offset, monkeypatch):
    """Five rows of 60 elements, 101 apart, of a parameter that is rounded whole; eager in both ways, and in C."""
    whole = torch.randn(5 * 101)
    rows = whole.view(5, 101)[:, :60].reshape(-1)
    out = torch.empty(300, dtype=torch.bfloat16)
    expected = rounded(stochastic, whole, offset).view(5, 101)[:, :60].reshape(-1)
    numbers_of_whole = torch.empty(505, dtype=torch.int32)
    stochastic.numbers_(numbers_of_whole, KEY, offset)
    if kernel == "accelerator":
        monkeypatch.setattr(stochastic, "is_on_host", lambda tensor: False)
    with torch.device("meta"):  # where whatever is made without a device would lie
        if kernel is native:
            table.launch_once(native, [table.row_of_rounding(out, rows, KEY, offset, 60, 101)])
        else:
            stochastic.round_(out, rows, KEY, offset, 60, 101)
    assert torch.equal(out.view(torch.int16), expected)
    if kernel is not native:
        found = torch.empty(300, dtype=torch.int32)
        stochastic.numbers_(found, KEY, offset, 60, 101)
        assert torch.equal(found, numbers_of_whole.view(5, 101)[:, :60].reshape(-1))


@needs_compiler
@pytest.mark.slow
def test_two_processes_may_build_at_once(tmp_path):
    code = """
        from hmpx.rounding import native
        assert native.library() is not None
        print(native.library()._name)
        """
    command = [f"{python.folder()}/python", "-c", textwrap.dedent(code)]
    environment = {**python.environment(), "HMPX_CACHE_DIR": str(tmp_path / "new")}
    running = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    names = [process.communicate(timeout=300)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0] and all(names)
    kept = os.listdir(tmp_path / "new")
    assert len(kept) == 1 and kept[0].endswith(".so")
    assert said_by(code, HMPX_CACHE_DIR=str(tmp_path / "new")).strip() == str(tmp_path / "new" / kept[0])


@pytest.mark.parametrize(
    "environment, reason",
    [
        ({"HMPX_NATIVE": "0"}, "HMPX_NATIVE=0"),
        ({"PATH": "/nowhere", "CC": ""}, "no C compiler found"),
        ({"CC": "/bin/false", "HMPX_CACHE_DIR": "fresh"}, "/bin/false failed"),
    ],
)
def test_without_a_compiler_eager_torch_rounds_and_the_log_says_why(environment, reason, tmp_path):
    if "HMPX_CACHE_DIR" in environment:
        environment = {**environment, "HMPX_CACHE_DIR": str(tmp_path)}
    said = said_by(
        """
        import logging, torch, hmpx
        logging.basicConfig(level="INFO")
        print(hmpx.stochastic_round(torch.tensor([1.5]), seed=0, step=0, name="w").item())
        """,
        **environment,
    )
    assert f"no C kernels: {reason}" in said and said.startswith("1.5") and said.count("no C kernels") == 1


@pytest.mark.parametrize("environment, times", [("1", 1), ("0", 0)])
def test_without_kernels_the_first_large_step_warns_once_and_names_the_cure(environment, times, monkeypatch):
    monkeypatch.setattr(native, "library", lambda: None)
    monkeypatch.setenv("HMPX_NATIVE", environment)
    native._warn_of_slow_steps.cache_clear()
    for size, warned in ((1_000_000, 0), (1_000_001, times), (1_000_001, 0)):
        weight = torch.nn.Parameter(torch.ones(size, dtype=torch.bfloat16))
        optimizer, weight.grad = torch.optim.SGD([weight], lr=0.1), torch.ones_like(weight)
        with warnings.catch_warnings(record=True) as said, hmpx.disable_casts():
            warnings.simplefilter("always")
            optimizer.step()
        hmpx.restore()
        assert sum("no C kernels here" in str(each.message) for each in said) == warned, size
        assert all("Install a C compiler (`apt-get install gcc" in str(each.message) for each in said), size
    native._warn_of_slow_steps.cache_clear()


def every_32_bits(start, stop, size=1 << 22):
    for first in range(start, stop, size):
        yield torch.arange(first, min(first + size, stop), dtype=torch.int64).to(torch.int32).view(torch.float32)


def assert_exact(x):
    upper, lower, back = torch.empty_like(x, dtype=torch.bfloat16), torch.empty_like(x, dtype=torch.int16), x.clone()
    stochastic.split(x, upper, lower)
    stochastic.join(upper, lower, back)
    nan = x.isnan()
    assert torch.equal(upper.isnan(), nan) and torch.equal(back.isnan(), nan)
    assert torch.equal(back.view(torch.int32)[~nan], x.view(torch.int32)[~nan])
    nearest = x.to(torch.bfloat16)
    tie = (x.view(torch.int32) & 0xFFFF) == 0x8000
    assert torch.equal(upper[~nan & ~tie], nearest[~nan & ~tie])


def test_halves_are_exact_on_a_sample_of_all_bit_patterns():
    edges = [0, 2**31 - 2**17, 2**31 - 2**17 - 2**23, 2**31, 2**32 - 2**17, 0x3F800000, 0x7F7F0000, 0xFF7F0000]
    for edge in edges:
        for x in every_32_bits(edge, edge + 2**17):
            assert_exact(x)
    assert_exact(torch.randint(-(2**31), 2**31, (1 << 20,)).to(torch.int32).view(torch.float32))


@pytest.mark.slow
def test_halves_are_exact_on_all_bit_patterns():
    size = 1 << 20
    bits = torch.arange(-(2**31), -(2**31) + size, dtype=torch.int64).to(torch.int32)
    back = torch.empty(size)
    upper, lower = torch.empty(size, dtype=torch.bfloat16), torch.empty(size, dtype=torch.int16)
    for start in range(0, 2**32, size):
        x = bits.view(torch.float32)
        if start & 0x7F800000 == 0x7F800000:  # inf and the NaNs
            assert_exact(x)
        else:
            stochastic.split(x, upper, lower)
            stochastic.join(upper, lower, back)
            assert torch.equal(back.view(torch.int32), bits)
        bits += size
    assert bits[0] == -(2**31)  # all of them, and round again


def read(held):
    out = torch.empty_like(held.tensor, dtype=torch.float32)
    table.launch_once(native, [table.row_of_move(held, out, is_read=True)])
    return out


def written_in_c(x, held):
    """Write `x` to a tensor that is held in this way, and return what C reads from there."""
    words = Table(x.device, native)
    launches = words.add("move_list", [table.row_of_move(held, x, is_read=False)])
    words.send(step_key(*STEP))
    run_all(launches)
    return read(held)


@needs_compiler
@pytest.mark.parametrize("kind", [native.NEAREST, native.MASTER])
def test_what_c_rounds_to_nearest_is_what_torch_does(kind):
    """In blocks of one number each, and in one of all."""
    x = torch.cat([special_values().repeat_interleave(256), special_values()])
    out, masters = torch.zeros(len(x), dtype=torch.bfloat16), torch.zeros(len(x))
    written_in_c(x, native.StoredTensor(out, kind, beside=masters))
    number = ~x.isnan()
    assert torch.equal(out.isnan(), x.isnan()) and torch.equal(out[number], x.bfloat16()[number])
    assert kind != native.MASTER or torch.equal(masters.view(torch.int32), x.view(torch.int32))


@needs_compiler
@pytest.mark.parametrize("kind", [native.SPLIT, native.SPLIT8])
def test_halves_in_c_have_the_bits_of_those_in_torch(kind):
    """In blocks of one number each, in one of all, and among others."""
    x = torch.cat([special_values().repeat_interleave(256), special_values(), torch.randn(5000)])
    lower_dtype = torch.int16 if kind == native.SPLIT else torch.int8
    (upper, lower), (in_c, lower_in_c) = (
        (torch.empty(len(x), dtype=torch.bfloat16), torch.empty(len(x), dtype=lower_dtype)) for _ in range(2)
    )
    back = torch.empty(len(x))
    found = written_in_c(x, native.StoredTensor(in_c, kind, name_id(NAME), lower_in_c))
    if kind == native.SPLIT:
        stochastic.split(x, upper, lower)
        stochastic.join(upper, lower, back)
    else:
        stochastic.split(x, upper, lower, [Span(0, len(x), 0, len(x), 0)], (*STEP, NAME))
        stochastic.join(upper, lower, back)
    assert torch.equal(lower, lower_in_c) and torch.equal(upper.view(torch.int16), in_c.view(torch.int16))
    assert torch.equal(found.view(torch.int32), back.view(torch.int32))


@needs_compiler
def test_reading_masters_is_the_same_in_c_and_torch():
    masters = numbers(5000)
    weights = masters.to(torch.bfloat16)
    weights[::7] = 0.25
    lower = torch.empty_like(weights, dtype=torch.int16)
    stochastic.split(masters[:100], weights[:100], lower[:100])
    masters[204:208] = torch.tensor([0.0, -0.0, 1e-42, -1e-42])
    weights[204:208] = torch.tensor([-0.0, 0.0, -0.0, 0.0])
    found, in_c = torch.empty_like(masters), read(native.StoredTensor(weights, native.MASTER, beside=masters))
    stochastic.read_masters(masters, weights, found)
    assert torch.equal(found.nan_to_num(7.0), in_c.nan_to_num(7.0))
    kept = (weights == masters.to(torch.bfloat16)) & ~masters.isnan()
    assert kept[204:208].all() and torch.equal(found[kept].view(torch.int32), masters[kept].view(torch.int32))
    assert (found[105::7][:100] == 0.25).all()


@needs_compiler
def test_places_tell_which_tensors_have_other_bits_than_they_had(threads):
    """NaN is equal to itself, and -0.0 is not 0.0: bits are compared. So are BF16 numbers with FP32 copies of them."""
    held = [torch.randn(n).bfloat16() for n in (1, 300, 80_000)] + [torch.tensor([0.0, float("nan")]).bfloat16()]
    for dtype, widened in ((torch.bfloat16, False), (torch.float32, True)):
        ends = list(itertools.accumulate(each.numel() * dtype.itemsize for each in held))
        places = native.Spans(array("Q", [0, *ends[:-1]]), array("Q", [each.nbytes for each in held]))
        room, at = torch.empty(ends[-1], dtype=torch.uint8), array("Q", [each.data_ptr() for each in held])
        if widened:
            room.view(dtype).copy_(torch.cat(held))
            room.view(torch.int32)[-1] = int(held[3].view(torch.int16)[1]) << 16  # casts give NaN other bits
        else:
            places.fill(room.data_ptr(), at)
        assert places.differing(room.data_ptr(), at, widened=widened) == []
        before = [held[2][-1].clone(), held[3][0].clone()]
        held[2][-1] += 1
        held[3][0] = -0.0
        assert places.differing(room.data_ptr(), at, widened=widened) == [2, 3]
        held[2][-1], held[3][0] = before
