"""Regions as decorators, in compiled code and in listed functions; and HMP's own names."""

import inspect
import os

import pytest
import torch

import hmpx
from hmpx import hmp

X = torch.randn(4, 4)
CAST, UNCAST = torch.bfloat16, torch.float32


def product():
    return (X @ X).dtype


def test_a_with_wants_parentheses_as_every_class_does():
    with pytest.raises(TypeError, match="context manager protocol"), hmpx.disable_casts:
        pass


def test_a_region_that_makes_no_steps_has_no_seed():
    for region in (hmpx.enable_casts, hmpx.cached_weights):
        with pytest.raises(TypeError, match="seed"):
            region(seed=3)


def test_hmp_files_may_be_deleted_right_after_the_call(lists):
    arguments = lists(bf16="exp", fp32="log")
    del arguments["promote_file_path"]
    hmp.convert(opt_level="O1", **arguments, isVerbose=False)
    for path in arguments.values():
        os.remove(path)
    assert X.exp().dtype is CAST and product() is UNCAST
    hmp.convert()  # twice in a process
    assert product() is CAST and X.exp().dtype is UNCAST
    hmpx.restore()


@pytest.mark.parametrize("level", ["O2", "02"])
def test_hmps_o2_goes_on_beside_lists_and_says_so(level, tmp_path, caplog):
    """A script of a released example, and the plugin that writes a zero for the letter."""
    (tmp_path / "bf16.txt").write_text("softmax\n")
    paths = {"bf16_file_path": str(tmp_path / "bf16.txt"), "fp32_file_path": tmp_path / "nowhere.txt"}
    handle = hmp.convert(opt_level=level, **paths, isVerbose=False)
    assert handle.policy.opt_level == "O2"
    assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is torch.bfloat16
    assert torch.ones(2).bfloat16().softmax(0).dtype is torch.float32  # the list says otherwise, and is left aside
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert f"bf16_file_path={paths['bf16_file_path']!r} and fp32_file_path=" in told[-1] and "is ignored" in told[-1]
    assert (len(told) == 2) == (level == "02") and (level == "O2" or "'02', with a zero, is read as 'O2'" in told[0])
    hmpx.restore()
    with pytest.raises(hmpx.OptLevelError):
        hmpx.convert(opt_level=level, bf16_file_path=paths["bf16_file_path"])


def test_hmps_01_is_o1_with_the_lists(tmp_path, caplog):
    (tmp_path / "bf16.txt").write_text("softmax\n")
    with hmp.convert("01", tmp_path / "bf16.txt", None, False, promote_file_path=None, enabled=True) as handle:
        assert set(handle.policy.bf16) == {"softmax"} and "is read as 'O1'" in caplog.text
        assert torch.ones(2).softmax(0).dtype is torch.bfloat16
    caplog.clear()
    with hmp.convert("O2", "", None), hmp.convert():
        assert "WARNING" not in caplog.text  # nothing was given, so nothing is ignored
    for wrong in ("O3", "0", "1", 2, None):
        with pytest.raises(hmpx.OptLevelError, match="does not exist"):
            hmp.convert(wrong)
    with pytest.raises(hmpx.OptLevelError):
        hmpx.convert("01")
    with pytest.raises(TypeError, match="wrong"):
        hmp.convert(wrong=1)


def test_hmps_signature_is_hmps():
    *named, more = inspect.signature(hmp.convert).parameters.values()
    assert [(p.name, p.default) for p in named] == [
        ("opt_level", "O1"), ("bf16_file_path", ""), ("fp32_file_path", ""), ("isVerbose", False)
    ]  # fmt: skip
    assert more.kind is more.VAR_KEYWORD
