"""What the kernels in Triton are held against, in a process with ``TRITON_INTERPRET=1``; test_triton.py starts it.

A check is a function here whose name begins with `check_`. The process prints, in JSON, what each has raised.
"""

import contextlib
import math
from unittest import mock

import torch

import hmpx
from hmpx.rounding import native, stochastic, table, triton
from hmpx.rounding.native import BF16, FP32, MASTER, NEAREST, SPLIT, SPLIT8, StepArguments, StoredTensor
from hmpx.rounding.shared import Span, derive_key, key_of, name_id, step_key
from hmpx.rounding.state_codes import EIGHT_BITS, STATE_CODES
from hmpx.rounding.stochastic import random_numbers
from hmpx.rounding.table import Table
from hmpx.updates.stepping import transfers
from tests.support.fresh_python import print_checks
from tests.support.kernel_steps import (
    ADAM,
    KEY,
    KINDS,
    STATES,
    STEPS,
    made,
    same,
    shard_of,
    stepped,
    tensors,
    with_special_values,
)
from tests.support.numbers import special_values, spread
from tests.support.state_codes import beside_the_finest_steps


@contextlib.contextmanager
def kernels(name):
    """What has kernels for CPUs: "C", "Triton", or nothing ("eager")."""

    def follows(*tensors):
        return all(native.is_plain(each) and each.shape == tensors[0].shape for each in tensors)

    with contextlib.ExitStack() as patches:
        if name != "C":
            patches.enter_context(mock.patch.object(native, "can_read", lambda *tensors: False))
        if name == "Triton":
            patches.enter_context(mock.patch.object(triton, "can_read", follows))
        yield


def check_a_list_of_tensors():
    """Of all sizes around a block, in rows too, past 2^32 elements, and where memory is aligned or not."""
    pieces = [(size, f"p{i}", 7 * i, size, 0) for i, size in enumerate((1, 127, 128, 129, 2100, 0, 1024, 1025))]
    pieces += [(1500, "rows", 2**31 + 5, 60, 101), (1500, "long rows", 3 * 2**32 + 2**31 + 5, 300, 1001)]
    roundings = []
    for size, name, *span in pieces:
        x, out = torch.randn(size + 1)[1:], torch.empty(size, dtype=torch.bfloat16)
        x[: min(size, 25)] = special_values()[: min(size, 25)]
        roundings.append((out, x, derive_key(5, 9, name, span[0] >> 32), span[0] % 2**32, *span[1:]))
    roundings += [(torch.empty_like(out), x.clone(), *more) for out, x, *more in roundings]
    table.launch_once(triton, [table.row_of_rounding(*each) for each in roundings])
    for out, x, key, offset, width, stride in roundings:
        alone = torch.empty_like(out)
        if x.numel():
            stochastic.round_(alone, x, key, offset, width, stride)
        assert same(out, alone), (x.numel(), offset, width)


def stored(codes, scales, row, code="8bit"):
    return StoredTensor(codes, STATE_CODES[code].kind, beside=scales, row=row)


def coded(by, x, row, spans, code="8bit"):
    with kernels(by):
        codes = torch.full((x.numel() // STATE_CODES[code].per_byte,), 77, dtype=torch.uint8)
        scales = torch.full((x.numel() // row * -(-row // 128),), -4.0, dtype=torch.bfloat16)
        held, back = stored(codes, scales, row, code), torch.empty_like(x)
        STATE_CODES[code].encode(held, x, spans, (3, 4, "w"))
        STATE_CODES[code].decode(back, held)
        return codes, scales, back


def assert_codes_of(x, row, spans=None):
    """Of every code; of 4 bits where rows are even, since two elements share a byte."""
    spans = spans or [Span(0, x.numel(), 0, x.numel(), 0)]
    for code in [code for code in STATE_CODES if row % STATE_CODES[code].per_byte == 0]:
        one, other = (coded(by, x, row, spans, code) for by in ("eager", "Triton"))
        assert same(one[0], other[0]) and same(one[1], other[1]), (code, row, spans)
        assert same(one[2].nan_to_num(7.0), other[2].nan_to_num(7.0)), (code, row, spans)
        assert torch.equal(one[2].isnan(), other[2].isnan())


def check_codes_and_scales():
    """Half of them from an odd element on; one begins a block with each row."""
    assert_codes_and_scales(1)


def check_codes_and_scales_from_other_elements_on():
    assert_codes_and_scales(0)


def assert_codes_and_scales(odd):
    rows = ((300, 3), (300, 3), (128, 3), (128, 3), (41, 5), (1100, 1), (700, 1), (1, 9))
    for seed, (row, count) in enumerate(rows):
        size, offset = row * count, 7 * (seed % 2 == odd)
        assert_codes_of(spread(size, seed), row, [Span(0, size, offset, size, 0)])


def check_codes_of_special_values():
    """In one block, each in a block of its own with half of it, and numbers around the ends of the scales' range."""
    values = special_values()
    own = torch.zeros(len(values), 128)
    own[:, 3], own[:, 5] = values, values * 0.5
    assert_codes_of(own.view(-1), 128)
    ends = [0.0, -0.0, math.inf, math.nan, -math.inf, 1.8125, 1.8126, -1.8125, 3.4e38, -3.4e38, 1e-45, -1e-45]
    ends += [1e-38, 1.8125 * 2**126, 1.82 * 2**126, 1.8125 * 2**-126, 1.82 * 2**-126]
    assert_codes_of(torch.tensor(ends).repeat_interleave(130), 130)


def check_more_codes_of_special_values():
    values = special_values()
    own = torch.zeros(len(values), 128)
    own[:, 3], own[:, 5] = values.abs(), values.abs() * 0.5
    for x in (own, -own):
        assert_codes_of(x.view(-1), 128)
    assert_codes_of(values.repeat(9), 9 * len(values))
    for tiny in (torch.randn(1000) * 1e-40, torch.randn(1000).abs() * 1e-40):
        assert_codes_of(tiny, 1000)


def check_ties_below_the_least_exponent():
    spans = [Span(0, 128, 0, 128, 0)]
    for signed in (False, True):
        x, expected = beside_the_finest_steps(signed, random_numbers(torch.empty(128), spans, (3, 4, "w")))
        codes = coded("Triton", x, 128, spans)[0]
        assert torch.equal(codes[1:], expected[1:])
        assert_codes_of(x, 128, spans)


def check_codes_of_shards():
    """Rows that lie apart in the parameter, in one span and in two."""
    assert_codes_of_shards(100)


def check_codes_of_shards_in_other_rows():
    assert_codes_of_shards(256, 300, 77)


def assert_codes_of_shards(*rows):
    for row in rows:
        x = spread(10 * row)
        assert_codes_of(x, row, [Span(0, 10 * row, 11, 2 * row, 1000)])
        spans = [Span(0, 4 * row, 10, row, 1000), Span(4 * row, 10 * row, 2**31 + 12, 2 * row, 1200)]
        assert_codes_of(x, row, spans)


def check_steps_are_those_in_c():
    """To the bit: no step has fused multiply-adds, and roots and quotients are rounded to nearest."""
    assert_steps_are_those_in_c(torch.bfloat16, torch.float32, torch.bfloat16)


def check_steps_of_fp32_weights_are_those_in_c():
    assert_steps_are_those_in_c(torch.float32, torch.bfloat16, torch.float32)


def check_special_values_in_each_place_are_those_in_c():
    """Zeros of both signs, numbers below the normal ones, the largest, inf and NaN; each with each as the gradient."""
    for kernel, given in STEPS.items():
        for scalars in given:
            for place in range(1 + STATES[kernel]):
                both = [with_special_values(kernel, scalars, place) for _ in range(2)]
                for module, step in zip((native, triton), both, strict=True):
                    table.step_list(module, kernel, step, 7)
                ((one,), (other,)) = both
                for a, b in zip((one.weight, *one.states), (other.weight, *other.states), strict=True):
                    assert a is None or same(a.tensor, b.tensor), (kernel, scalars, place)


def assert_steps_are_those_in_c(weight, state, grad):
    for kernel in STEPS:
        for scalars in STEPS[kernel]:
            results = []
            for module in (native, triton):
                results.append(stepped(kernel, scalars, weight, state, grad))
                table.step_list(module, kernel, results[-1], 2**63 + 5)
            for one, other, before in zip(*results, stepped(kernel, scalars, weight, state, grad), strict=True):
                for a, b in zip((one.weight, *one.states), (other.weight, *other.states), strict=True):
                    assert a is None or same(a.tensor, b.tensor), (kernel, scalars, weight, state)
                p = one.weight.tensor
                assert p.numel() == 1 or not torch.equal(p, before.weight.tensor)


def read_by_the_specification(held):
    """In FP32, as the docstring of `stochastic.py` has it."""
    if held.kind in (BF16, NEAREST, FP32):
        return held.tensor.float().clone()
    out, beside = torch.empty_like(held.tensor, dtype=torch.float32), held.beside.clone()
    if held.kind == MASTER:
        stochastic.read_masters(beside, held.tensor, out)
    else:
        stochastic.join(held.tensor, beside, out)
    return out


def written_by_the_specification(x, held):
    """What holds `x` in the same way: weights, what is beside them."""
    out, size = torch.empty_like(x, dtype=torch.bfloat16), x.numel()
    if held.kind == FP32:
        return [x]
    if held.kind == BF16:
        stochastic.round_(out, x, key_of(step_key(*KEY), held.name), 0)
        return [out]
    if held.kind in (NEAREST, MASTER):
        return [x.to(torch.bfloat16), *([x] if held.kind == MASTER else [])]
    lower = torch.empty_like(held.beside)
    if held.kind == SPLIT:
        stochastic.split(x, out, lower)
    else:
        stochastic.split(x, out, lower, [Span(0, size, 0, size, 0)], (*KEY, "w"))
    return [out, lower]


def check_weights_and_states_held_in_all_ways():
    """A step in FP32 with the numbers that the specification reads, written back by the specification."""
    assert_as_specified(0)


def check_weights_and_states_held_in_all_ways_of_other_sizes():
    assert_as_specified(1)


def assert_as_specified(first):
    sizes = ((1280, 128), (1100, 1100), (450, 150), (1, 1))
    for number, kind in enumerate(KINDS):
        for size, row in sizes[(number + first) % 2 :: 2]:
            step_as_specified(size, row, kind)


def step_as_specified(size, row, kind):
    one = made(size, row, kind)
    held = one.weight
    with kernels("eager"):
        x, states = read_by_the_specification(held), []
        for each in one.states:
            states.append(torch.empty(size))
            EIGHT_BITS.decode(states[-1], each)
    wide = StepArguments(StoredTensor.of(x), one.grad, tuple(map(StoredTensor.of, states)), ADAM)
    for each in (wide, one):
        table.step_list(triton, "adam", [each], step_key(*KEY))
    with kernels("eager"):
        expected = written_by_the_specification(x, held)
        for state, name in zip(states, ("w.m", "w.v"), strict=True):
            codes, scales = torch.empty(size, dtype=torch.uint8), torch.empty_like(one.states[0].beside)
            EIGHT_BITS.encode(stored(codes, scales, row), state, [Span(0, size, 0, size, 0)], (*KEY, name))
            expected += [codes, scales]
    for number, (a, b) in enumerate(zip(tensors(one), expected, strict=True)):
        assert same(a, b), (kind, size, row, number)


def check_a_shard_takes_the_numbers_of_its_elements():
    """Held in all ways, from even and odd elements on: the bits of C, and of the whole parameter."""
    assert_steps_of_shards(75)


def check_a_shard_of_other_rows():
    assert_steps_of_shards(128, 300)


def assert_steps_of_shards(*rows):
    for kind in KINDS:
        for row in rows:
            whole = made(6 * row, row, kind)
            parts = [[shard_of(whole, row * a, row * b) for a, b in ((0, 1), (1, 3), (3, 6), (6, 6))] for _ in range(2)]
            table.step_list(native, "adam", [whole], 7)
            for module, of_it in zip((native, triton), parts, strict=True):
                table.step_list(module, "adam", of_it, 7)
                for number, expected in enumerate(tensors(whole)):
                    found = torch.cat([tensors(part)[number] for part in of_it])
                    assert same(found, expected), (module.__name__, kind, row, number)


def check_the_largest_numbers_of_24_bits():
    """Past 0x7F7FFF00, the largest one, nothing is rounded up to inf."""
    weights, lower = torch.full((256,), math.inf, dtype=torch.bfloat16), torch.full((256,), -1, dtype=torch.int8)
    held = StoredTensor(weights, SPLIT8, name_id("w"), lower)
    grads = StoredTensor.of(torch.arange(256) * -(2.0**104))  # in units of the last place
    table.step_list(triton, "sgd", [StepArguments(held, grads, (), (1.0, 0.0, 1.0, -1.0))], step_key(*KEY))
    x = torch.arange(0x7F7FFF00, 0x7F800000, dtype=torch.int32).view(torch.float32)
    with kernels("eager"):
        assert all(map(same, (weights, lower), written_by_the_specification(x, held)))


def check_a_list_of_all_ways_at_once():
    """Launched together, they are what they are alone."""
    lists = []
    for together in (False, True):
        lists.append([made(size, row, kind) for kind in KINDS for size, row in ((384, 128), (90, 30))])
        for each in [lists[-1]] if together else [[one] for one in lists[-1]]:
            table.step_list(triton, "adam", each, 7)
    for one, other in zip(*lists, strict=True):
        assert all(map(same, tensors(one), tensors(other)))


def check_a_read_of_codes():
    for size, row in ((1280, 128), (900, 300)):
        held = made(size, row, BF16).states[0]
        with kernels("eager"):
            out = torch.empty(size)
            EIGHT_BITS.decode(out, held)
        found = torch.empty(size)
        table.launch_once(triton, [table.row_of_move(held, found, is_read=True)])
        assert same(found, out)


def check_a_part_is_written_with_the_numbers_of_its_elements():
    """This rank holds elements 500 ... 1999 of a parameter."""
    x, held = torch.randn(2000), torch.zeros(1500, dtype=torch.bfloat16)
    stored, part = StoredTensor(held, BF16, name_id("w")), x[500:].clone()
    written = Table(held.device, triton)
    launches = written.add("move_list", [table.row_of_move(stored, part, 500, is_read=False)])
    written.send(step_key(5, 9))
    for launch in launches:
        launch.run()
    alone = torch.empty(2000, dtype=torch.bfloat16)
    stochastic.round_(alone, x, derive_key(5, 9, "w"), 0, 2000, 0)
    assert same(held, alone[500:])


def trained(by, options):
    """Weights, and the state of what an optimizer has stepped twice; somebody writes to weights in between."""
    with kernels(by):
        generator = torch.Generator().manual_seed(0)
        shapes = {"a": (9, 40), "b": (3, 256), "c": (), "d": (5, 256)}
        params = {
            name: torch.nn.Parameter(torch.randn(shape, generator=generator).bfloat16())
            for name, shape in shapes.items()
        }
        optimizer = torch.optim.AdamW([*params.items()], lr=1e-2)
        hmpx.attach(optimizer, **options)
        for step in range(2):
            for p in params.values():
                p.grad = torch.randn(p.shape, generator=generator).bfloat16()
            if step:
                with torch.no_grad():
                    params["a"][3] += 1
            optimizer.step()
        states = [value for p in params.values() for value in optimizer.state[p].values()]
        return [p.detach() for p in params.values()] + states


EVERY_WAY = {
    "weights": "split8",
    "parameters": {"a": {"weights": "master"}, "b": {"weights": "nearest"}, "c": {"weights": "split"}},
}


def check_attached_optimizers():
    """The library by the kernels in Triton alone, as it is on CUDA: what the C kernels make, or the eager ones."""
    assert_attached_alike({"state_dtype": "8bit", **EVERY_WAY}, {"fused": False, "state_dtype": "4bit", **EVERY_WAY})


def check_optimizers_attached_otherwise():
    own = {"fused": False}
    assert_attached_alike(
        {"state_dtype": "4bit", **EVERY_WAY},
        {"state_dtype": torch.bfloat16},
        *({**own, "state_dtype": each} for each in ("8bit", "4bit")),
        *({**own, "state_dtype": each, **EVERY_WAY} for each in ("fp8", "8bit", torch.bfloat16)),
        {**own, **EVERY_WAY},
    )


def assert_attached_alike(*ways):
    launched, start = [], triton.start

    def started(kernel, *args):
        launched.append(kernel)
        start(kernel, *args)

    for options in ways:
        launched.clear()
        with (
            mock.patch.object(triton, "start", started),
            mock.patch.object(transfers, "_FLOOR", 1024),  # the largest parameter comes alone
        ):
            one, other = (trained(by, options) for by in ("C", "Triton"))
        assert len(one) == len(other), options
        for number, (a, b) in enumerate(zip(one, other, strict=True)):
            assert same(a, b), (options, number)
        assert set(launched) == {"move_list" if "fused" in options else "step_list"}, (options, launched)


if __name__ == "__main__":
    print_checks(globals(), lambda name: contextlib.nullcontext() if "attached" in name else torch.no_grad())
