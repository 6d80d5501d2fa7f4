"""Casts to FP8 by kernels: in Triton's interpreter, on the CPU, and compiled for a GPU that is not there."""

import importlib.util
import logging
import re

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import hmpx
from hmpx.ops.computing import matrix_products
from tests.support.fresh_python import ROOT, asked_for, checks_of, run

SLOW = {"check_the_largest_number_in_the_other_tiles", "check_cached_weights_keep_codes_of_other_forms"}
SLOW |= {"check_every_magnitude_of_bf16_as_the_largest", "check_products_of_the_other_matrices_are_those_of_aten"}
CHECKS = checks_of(ROOT / "tests/support/fp8_checks.py", SLOW)
wants_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


@pytest.fixture(scope="module")
def raised(request):
    return run("tests.support.fp8_checks", *asked_for(request), TRITON_INTERPRET="1")


@wants_triton
@pytest.mark.parametrize("check", CHECKS)
def test_in_the_interpreter(check, raised):
    """Each is a function of `tests.support.fp8_checks`, which says what it looks at."""
    assert not raised[check], raised[check]


@wants_triton
@pytest.mark.slow
def test_compiled_for_gpus(tmp_path):
    """Nothing spills, memory is read and written 16 bytes at a time, and the casts are the GPU's own instructions."""
    found = run("tests.support.fp8_compiled", TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))
    assert {name.split(",")[0] for name in found} == {"sm_90", "sm_100"}
    for name, told in found.items():
        instructions = told["instructions"]
        assert told["spilled"] == 0 and told["registers"] <= 255 and told["widest"] == 16, name
        rounding = [each for each in instructions if re.fullmatch(r"(add|sub|mul|div|sqrt|fma)\..*f32", each)]
        assert set(rounding) <= {"mul.f32", "div.rn.f32", "mul.rn.f32"}, (name, rounding)
        if "encode" in name:
            assert any(re.fullmatch(r"cvt\.rn\.satfinite\.e[45]m[32]x2\.f32", each) for each in instructions), name
            assert {"st.global.v4.b32"} <= set(instructions), name


@pytest.mark.parametrize("form", ["tensorwise", "rowwise"])
def test_compiled_for_a_gpu_the_casts_are_ops_that_a_compiler_sees(form, monkeypatch):
    """With tensors that say that they are on a GPU, and have no numbers."""
    monkeypatch.setattr(matrix_products, "_has_scaled_mm", lambda device: True)
    mode, graphs = FakeTensorMode(), []
    x, w = (
        FakeTensor(mode, torch.empty(*shape, dtype=torch.bfloat16, device="meta"), torch.device("cuda", 0))
        for shape in ((32, 64), (48, 64))
    )

    def backend(graph, inputs):
        graphs.append(graph)
        return lambda *args: (args[0],)

    with hmpx.convert(fp8=["linear"], fp8_format=form), torch.no_grad(), mode:
        torch.compile(lambda x, w: F.linear(x, w), backend=backend, fullgraph=True)(x, w)
    (graph,) = graphs
    names = [str(each.target) for each in graph.graph.nodes]
    assert names.count("aten._scaled_mm") == 1 and names.count("aten.amax") == 2


def test_an_older_gpu_says_once_that_codes_are_multiplied_in_bf16(monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    caplog.set_level(logging.INFO, "hmpx")
    matrix_products._asked_scaled_mm.cache_clear()
    assert not any([matrix_products._has_scaled_mm(torch.device("cuda", 0)) for _ in range(3)])
    assert [each.getMessage() for each in caplog.records if "A100" in each.getMessage()] == [
        "hmpx: cuda:0 (A100) has no FP8 tensor cores that torch uses: FP8 codes are multiplied in BF16, which is "
        "slower than BF16 alone"
    ]
    matrix_products._asked_scaled_mm.cache_clear()
