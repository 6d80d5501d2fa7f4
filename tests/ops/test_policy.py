"""Policies: which rule an op gets, and that a policy is its own text."""

from __future__ import annotations

import itertools

import pytest
import torch

import hmpx
from hmpx.insight.explain import explain_op
from hmpx.ops.policies.catalog import catalog
from hmpx.ops.policies.fp8_format import FORMATS
from hmpx.ops.policies.lists import read_lists
from hmpx.ops.policies.policy import Policy, Rule, build_policy


def read_back(policy: Policy, tmp_path) -> Policy:
    path = tmp_path / "policy.yaml"
    path.write_text(str(policy))
    return build_policy(lists=read_lists(path))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_policy_prints_as_a_list_file_that_reads_back_to_it(tmp_path, level):
    policy = build_policy(level)
    assert read_back(policy, tmp_path) == policy
    assert policy.bf16 and policy.fp32


def test_an_empty_and_a_dotted_policy_read_back(tmp_path, lists):
    for arguments in (lists(), lists(bf16="mm somewhere.else.f", fp32="log", promote="stack")):
        policy = build_policy(lists=read_lists(**arguments))
        assert read_back(policy, tmp_path) == policy
    assert policy.user_functions() == {"somewhere.else.f": Rule.BF16}
    policy = Policy(bf16=("matmul",), fp8=("linear",), fp8_format=FORMATS["mx"])
    assert read_back(policy, tmp_path) == policy


def test_listed_names_leave_the_promote_list(lists):
    policy = build_policy(lists=read_lists(**lists(bf16="bilinear", fp32="lerp", promote="bilinear lerp dot")))
    assert policy.promote == ("dot",)


def test_aten_overloads_and_internal_names_map_to_their_python_op(lists):
    policy = build_policy(
        lists=read_lists(
            **lists(
                bf16="conv_transpose2d.input _convolution.deprecated torch.nn.functional.linear torch.linalg.multi_dot",
                fp32="pow.Tensor_Scalar pow.Scalar frobenius_norm.dim nll_loss2d cross_entropy_loss torch.Tensor.exp",
            )
        )
    )
    assert set(policy.bf16) == {"conv_transpose2d", "_convolution", "linear", "linalg_multi_dot"}
    assert set(policy.fp32) == {"pow", "frobenius_norm", "nll_loss", "cross_entropy", "exp"}


def test_another_name_of_an_op_follows_it_unless_listed_itself(lists):
    ops = catalog()
    policy = build_policy(lists=read_lists(**lists(bf16="mul", fp32="divide softmax")))
    assert policy.rule(ops["multiply"]) is Rule.BF16
    assert policy.rule(ops["div"]) is None and policy.rule(ops["divide"]) is Rule.FP32
    assert policy.rule(ops["special_softmax"]) is Rule.FP32


def test_an_opt_level_that_does_not_fit_is_an_error_that_says_what_does(lists):
    for level, more, said in (
        *((level, {}, r"legal: O1, O2") for level in ("O0", "O3", "o1", "", None)),
        ("lean", {}, r"'lean' is a recipe: hmpx.prepare\(model, optimizer, 'lean'\)"),
        ("mine.txt", {}, "a list file goes to bf16_file_path="),
        ("O2", lists(bf16="mm"), "O2 decides by itself"),
    ):
        with pytest.raises(hmpx.OptLevelError, match=said):
            hmpx.convert(level, **more)


def test_a_flag_that_is_a_word_is_an_error():
    for flag in ("enabled", "isVerbose"):
        with pytest.raises(hmpx.HmpxError, match=f"{flag}='False' is neither True nor False"):
            hmpx.convert(**{flag: "False"})
        with hmpx.convert(**{flag: 1}) as handle:  # as old scripts have it
            assert handle.active


def test_unknown_warn_skips_the_name_and_says_so(lists, caplog):
    hmpx.convert(**lists(bf16="mm nosuch"), unknown="warn")
    assert "bf16.txt:2: unknown op 'nosuch'" in caplog.text
    hmpx.restore()


def test_a_list_may_name_what_torch_has_removed(lists):
    """Lists outlive functions: torch 2.14 removed `qr` and `cholesky`, which autocast's lists name."""
    with pytest.raises(RuntimeError, match="removed"):
        torch.symeig(torch.eye(2))
    with hmpx.convert(**lists(bf16="mm symeig", fp32="torch.matrix_rank")) as handle:
        assert handle.policy.bf16 == ("mm",) and handle.policy.fp32 == ()
    with pytest.raises(hmpx.UnknownOpError, match="has removed 'symeig': here the line does nothing"):
        explain_op("symeig", handle.policy)


def test_a_dtype_may_be_given_by_name():
    """To attach as well, where recipes take names."""
    for name in ("fp16", "float16", "torch.float16"):
        assert hmpx.convert(low_precision=name).policy.low_precision is torch.float16
    hmpx.restore()
    for dtype, refused in itertools.product(("fp32", torch.float8_e5m2, torch.int16, False), (hmpx.convert, Policy)):
        with pytest.raises(hmpx.HmpxError, match=r"is neither torch.bfloat16 nor torch.float16"):
            refused(low_precision=dtype)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))])
    assert hmpx.attach(optimizer, state_dtype="bf16").settings.state_dtype is torch.bfloat16


def test_a_policy_is_refused_as_a_file_of_its_names_is():
    for sides, said in (
        ({"bf16": ("lineer",)}, r"bf16: unknown op 'lineer'; did you mean 'linear'\?$"),
        ({"fp8": ("softmax",)}, r"fp8: 'softmax' has no FP8 product \(legal: linear, "),
        ({"bf16": ("linear",), "fp32": ("linear",)}, "bf16 and fp32: 'linear' is on both sides"),
    ):
        with pytest.raises(hmpx.OpListError, match=f"^hmpx.Policy, {said}"):
            hmpx.Policy(**sides)
    assert hmpx.Policy(bf16=("linear", "mine.function"), fp32=("divide",)).bf16 == ("linear", "mine.function")
