"""Tests that are left out with an older torch: which version they want, and for what."""

from __future__ import annotations

import pytest
import torch

# By the version of torch that they want, and for what.
WANTED = {
    "2.13": {
        "regions in compiled bodies of checkpoints, and clipping in a whole graph": (
            "test_compiled_regions.py::test_a_region_in_a_checkpointed_body_has_the_bits_of_eager[",
            "test_where_casts_are.py::test_one_graph[",
            "test_released.py::test_clipping_compiles_in_a_whole_graph_beside_an_attached_optimizer",
        ),
        "_scaled_mm on a CPU with a scale a row, and functional.scaled_mm there": (
            "test_fp8.py::test_the_numbers_of_scaled_mm[",
            "test_fp8.py::test_layers_are_one_graph_whose_casts_a_compiler_sees[rowwise]",
            "test_fp8_gpu.py::test_in_the_interpreter[check_products_are_those_of_aten]",
            "test_fp8_gpu.py::test_in_the_interpreter[check_cached_weights_keep_codes",
        ),
        "its Triton's interpreter, of 3.6 and before, does not count with NumPy 2.4's numbers": (
            "test_fp8_gpu.py::test_in_the_interpreter[check_codes_and_scales_are_those_of_aten]",
            "test_fp8_gpu.py::test_in_the_interpreter[check_numbers_at_the_ends_of_bf16]",
            "test_fp8_gpu.py::test_in_the_interpreter[check_views]",
            "test_fp8_gpu.py::test_in_the_interpreter[check_a_layer_takes_them]",
        ),
        "steps of torch's own optimizers on the meta device": (
            "test_dataless.py::test_a_step_without_data_leaves_the_state_of_one_with_data[",
        ),
        "the table of ops that torch has no kernel for": (
            "test_refusals.py::test_every_op_without_a_kernel_is_known[",
        ),
    },
    "2.11": {
        "Tensor.grad_dtype, for use_fp32_grad_acc": (
            "test_conversion.py::test_restore_of_an_optimizer_undoes_all_that_prepare_did",
            "test_parametrizations.py::test_they_train_under_every_kind_of_recipe[nxd-standard]",
            "test_readme.py::test_every_other_command_runs",
            "test_readme.py::test_every_python_snippet_runs_and_prints_what_it_says[oplists/README.md]",
            "test_keys_arrive.py::test_a_key_arrives_where_it_acts[attached-use_fp32_grad_acc]",
            "test_checks.py::test_the_package_and_a_users_code_are_type_checked",
        ),
        "autocast of CUDA in BF16 where there is no CUDA, which is an error before": (
            "test_islands.py::test_tasks_and_replicas_are_answered_for_regions_of_their_own[everywhere]",
        ),
    },
    "2.10": {
        "torchao 0.18": (
            "test_readme.py::test_coming_from[",
            "test_fp8.py::test_the_numbers_of_torchao[",
            "test_fp8_grouped.py::test_the_numbers_of_torchao_",
            "test_fp4.py::test_the_numbers_of_torchaos_quantizers[",
            "test_state_codes.py::test_torchao_reads_the_same_numbers_from_the_same_codes_and_scales[",
            "test_command.py::test_bench_says_what_torch_cannot_compile_here",
        ),
        "functional.scaled_mm": ("test_fp8_gpu.py::test_in_the_interpreter[check_launches_of_a_layer]",),
    },
}


def leave_out(items: list[pytest.Item]) -> None:
    """Mark the tests of the table as skipped where torch is older, with the version and what they want of it."""
    for version, wanted in WANTED.items():
        for what, names in wanted.items() if torch.__version__ < version else ():
            for item in items:
                if any(name in item.nodeid for name in names):
                    item.add_marker(pytest.mark.skip(reason=f"torch {version} or later: {what}"))
