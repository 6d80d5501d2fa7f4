"""One implementation a backend, the same bits from each."""

from __future__ import annotations

import os
import subprocess
import textwrap

import pytest
import torch

from hmpx.rounding import eager, halves, native
from hmpx.rounding.stochastic import derive_key
from tests.support import python
from tests.support.numbers import special_values

KEY = derive_key(2**64 - 1, 3, "w")
OFFSETS = (0, 1, 2, 255, 2**31 - 3, 2**32 - 300_100)
needs_compiler = pytest.mark.skipif(native.library() is None, reason="no C compiler here")


def said_by(code, **environment):
    done = python.run("-c", textwrap.dedent(code), env={**os.environ, **environment}, check=True)
    return done.stdout + done.stderr


def numbers(count):
    return torch.cat([torch.randn(count), special_values(), torch.randn(3)])


def rounded(kernel, x, offset):
    out = torch.empty(x.shape, dtype=torch.bfloat16)
    kernel.round_(out, x, KEY, offset)
    return out.view(torch.int16)


@needs_compiler
@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize("count", [1, 2, 300, 300_000])
@pytest.mark.parametrize("threads", [1, 2])
def test_c_and_eager_give_the_same_bits(offset, count, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        x = numbers(count)[: None if count > 2 else count]
        assert torch.equal(rounded(native, x, offset), rounded(eager, x, offset))
    finally:
        torch.set_num_threads(before)


def test_triton_gives_the_same_bits_in_its_interpreter():
    pytest.importorskip("triton", reason="Triton is not installed")
    said_by(
        """
        from tests.rounding.test_kernels import OFFSETS, eager, numbers, rounded
        from hmpx.rounding import triton
        import torch
        x = numbers(3000)
        for offset in (*OFFSETS[:-1], 2**32 - 3100):
            assert torch.equal(rounded(triton, x, offset), rounded(eager, x, offset)), offset
        """,
        TRITON_INTERPRET="1",
    )


def test_the_triton_steps_agree_with_the_c_ones_in_its_interpreter():
    pytest.importorskip("triton", reason="Triton is not installed")
    said_by(
        """
        import torch
        from hmpx.rounding import native, triton
        from tests.support.numbers import nearly_equal
        assert native.library() is not None
        bf16 = torch.bfloat16
        def tensors(state_dtype, grad_dtype):
            generator = torch.Generator().manual_seed(0)
            random = [torch.randn(2501, generator=generator) for _ in range(4)]
            p, g, m, v = random[0].bfloat16(), random[1].to(grad_dtype), random[2].to(state_dtype), random[3].square()
            return p, g, m, v.to(state_dtype)
        adam = (-1.0, 0.99, 0.1, 0.9, 0.1, 0.999, 0.001, 1e-2, 1e-8)
        sgds = [(1.0, 0.1, 0.9, 0.9, 1.0, nesterov, 1e-2) for nesterov in (True, False)]
        sgds.append((1.0, 0.0, -1.0, 0, 0, False, 0.1))
        for dtypes in ((torch.float32, bf16), (bf16, torch.float32)):
            for name, numbers in (("adam", adam), *(("sgd", each) for each in sgds)):
                results = []
                for kernels in (native, triton):
                    p, g, m, v = tensors(*dtypes)
                    held = [(p, 2**64 - 3), (g, 0), (m, 77), (v, 2**63)]
                    if name == "sgd":
                        held = held[:2] + [(m, 77) if numbers[2] >= 0 else (None, 0)]
                    getattr(kernels, name)(*held, *numbers)
                    results.append((p, m, v))
                for one, other in zip(*results):
                    near = nearly_equal(one, other, 3) if one.dtype is bf16 else torch.allclose(one, other, rtol=1e-6)
                    assert near, (name, dtypes)
                assert not torch.equal(results[0][0], tensors(*dtypes)[0])
        """,
        TRITON_INTERPRET="1",
    )


def test_a_triton_step_of_fp32_weights_is_what_one_of_bf16_weights_rounds():
    """Of the C kernels, `tests/updates/test_update_counts.py` says so."""
    pytest.importorskip("triton", reason="Triton is not installed")
    python(
        """
        import torch
        from hmpx.rounding import triton
        adam = (-1.0, 0.99, 0.1, 0.9, 0.1, 0.999, 0.001, 1e-2, 1e-8)
        for name, numbers in (("adam", adam), ("sgd", (1.0, 0.1, 0.9, 0.9, 1.0, False, 1e-2))):
            results = {}
            for dtype in (torch.bfloat16, torch.float32):
                generator = torch.Generator().manual_seed(0)
                p, g, m, v = (torch.randn(2501, generator=generator).bfloat16() for _ in range(4))
                p = results[dtype] = p.to(dtype)
                held = [(p, 2**64 - 3), (g, 0), (m, 77), (v.abs(), 2**63)]
                getattr(triton, name)(*held[: 4 if name == "adam" else 3], *numbers)
            rounded = torch.empty_like(results[torch.bfloat16])
            triton.round_(rounded, results[torch.float32], 2**64 - 3, 0)
            assert torch.equal(rounded, results[torch.bfloat16])
            assert not torch.equal(rounded.float(), results[torch.float32])
        """,
        TRITON_INTERPRET="1",
    )


@needs_compiler
def test_two_processes_may_build_at_once(tmp_path):
    code = """
        from hmpx.rounding import native
        assert native.library() is not None
        print(native.library()._name)
        """
    command = [f"{python.folder()}/python", "-c", textwrap.dedent(code)]
    environment = {**python.environment(), "HMPX_CACHE_DIR": str(tmp_path / "new")}
    running = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    names = [process.communicate(timeout=300)[0] for process in running]
    assert [process.returncode for process in running] == [0] * 4 and all(names)
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


@needs_compiler
def test_a_cache_that_cannot_be_written_is_no_obstacle(tmp_path):
    (tmp_path / "file").write_text("")
    code = "from hmpx.rounding import native; print(native.library() is not None)"
    assert said_by(code, HMPX_CACHE_DIR=str(tmp_path / "file" / "below")).strip() == "True"


def every_32_bits(start, stop, size=1 << 22):
    for first in range(start, stop, size):
        yield torch.arange(first, min(first + size, stop), dtype=torch.int64).to(torch.int32).view(torch.float32)


def assert_exact(x):
    upper, lower, back = torch.empty_like(x, dtype=torch.bfloat16), torch.empty_like(x, dtype=torch.int16), x.clone()
    halves.split(x, upper, lower)
    halves.join(upper, lower, back)
    nan = x.isnan()
    assert torch.equal(upper.isnan(), nan) and torch.equal(back.isnan(), nan)
    assert torch.equal(back.view(torch.int32)[~nan], x.view(torch.int32)[~nan])
    nearest = x.to(torch.bfloat16)
    tie = (x.view(torch.int32) & 0xFFFF) == 0x8000
    assert torch.equal(upper[~nan & ~tie], nearest[~nan & ~tie])


@pytest.mark.parametrize("compiled", [True, False])
def test_halves_are_exact_on_a_sample_of_all_bit_patterns(compiled, monkeypatch):
    if not compiled:
        monkeypatch.setattr(native, "can_read", lambda *tensors: False)
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
            halves.split(x, upper, lower)
            halves.join(upper, lower, back)
            assert torch.equal(back.view(torch.int32), bits)
        bits += size
    assert bits[0] == -(2**31)  # all of them, and round again


@needs_compiler
def test_reading_masters_is_the_same_in_c_and_torch(monkeypatch):
    masters = numbers(5000)
    weights = masters.to(torch.bfloat16)
    weights[::7] = 0.25
    lower = torch.empty_like(weights, dtype=torch.int16)
    halves.split(masters[:100], weights[:100], lower[:100])
    results = []
    for compiled in (True, False):
        if not compiled:
            monkeypatch.setattr(native, "can_read", lambda *tensors: False)
        results.append(torch.empty_like(masters))
        halves.read_masters(masters, weights, results[-1])
    assert torch.equal(results[0].nan_to_num(7.0), results[1].nan_to_num(7.0))
    kept = (weights == masters.to(torch.bfloat16)) & ~masters.isnan()
    assert torch.equal(results[0][kept], masters[kept]) and (results[0][105::7][:100] == 0.25).all()
