"""The kernels in Triton: in its interpreter, on the CPU, and compiled for a GPU that is not there."""

import importlib.util
import re

import pytest

from hmpx.rounding import native
from tests.support.fresh_python import ROOT, asked_for, checks_of, run

SLOW_IN_C = {"check_a_shard_of_other_rows", "check_steps_of_fp32_weights_are_those_in_c"}
SLOW_IN_C |= {"check_optimizers_attached_otherwise"}
SLOW = {"check_more_codes_of_special_values", "check_codes_of_shards_in_other_rows", "check_a_list_of_all_ways_at_once"}
SLOW |= {"check_codes_and_scales_from_other_elements_on", "check_weights_and_states_held_in_all_ways_of_other_sizes"}
CHECKS = checks_of(ROOT / "tests/support/triton_checks.py", SLOW | SLOW_IN_C)
IN_C = {"check_steps_are_those_in_c", "check_attached_optimizers", "check_a_shard_takes_the_numbers_of_its_elements"}
IN_C |= {"check_special_values_in_each_place_are_those_in_c"}
IN_C |= SLOW_IN_C
pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


@pytest.fixture(scope="module")
def raised(request):
    return run("tests.support.triton_checks", *asked_for(request), TRITON_INTERPRET="1")


@pytest.mark.parametrize("check", CHECKS)
def test_in_the_interpreter(check, raised):
    """Each is a function of `tests.support.triton_checks`, which says what it looks at."""
    if check in IN_C and native.library() is None:
        pytest.skip("no C compiler here")
    assert not raised[check], raised[check]


@pytest.mark.slow
def test_compiled_for_gpus(tmp_path):
    """What the interpreter does not find: types, instructions that round in another way, narrow loads, spills."""
    found = run("tests.support.triton_compiled", TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))
    for name, told in found.items():
        instructions = told.get("instructions", [])
        rounding = [each for each in instructions if re.fullmatch(r"(add|sub|mul|div|sqrt|fma)\..*f32", each)]
        assert set(rounding) <= {f"{each}.rn.f32" for each in ("add", "sub", "mul", "div", "sqrt")}, name
        assert told["spilled"] == 0 and told["registers"] <= 255, name
        assert told["widest"] >= 8 or not name.endswith(", aligned") or "gfx942, decode" in name, name
    assert "sqrt.rn.f32" in found["sm_90, AdamW in 8 bits, aligned"]["instructions"]
    assert {name.split(",")[0] for name in found} == {"sm_80", "sm_90", "sm_100", "gfx942"}
