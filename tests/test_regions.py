"""disable_casts and enable_casts: nested, per thread, exception-safe, decorators; and HMP's own names."""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn

import hmpx
from hmpx import hmp, scope

X = torch.randn(4, 4)
CAST, UNCAST = torch.bfloat16, torch.float32


def product():
    return (X @ X).dtype


def test_regions_nest_and_the_innermost_decides():
    with hmpx.convert():
        with hmpx.disable_casts():
            assert product() is UNCAST
            with hmpx.enable_casts():
                assert product() is CAST
                with hmpx.disable_casts(), hmpx.disable_casts():
                    assert product() is UNCAST
                assert product() is CAST
            assert product() is UNCAST
        assert product() is CAST
    assert not scope.off_somewhere


def test_an_exception_or_a_return_leaves_nothing_behind():
    def returns():
        with hmpx.disable_casts():
            return product()

    with hmpx.convert():
        assert returns() is UNCAST and product() is CAST
        with pytest.raises(KeyError), hmpx.disable_casts():
            raise KeyError
        assert product() is CAST


def test_regions_are_decorators_and_reusable():
    @hmpx.disable_casts()
    def uncast():
        return product()

    region = hmpx.disable_casts()
    with hmpx.convert():
        assert uncast() is UNCAST and uncast() is UNCAST and product() is CAST
        with region, region:
            assert product() is UNCAST
        assert product() is CAST


def test_inside_a_listed_python_function_the_callers_region_is_back_afterwards(lists):
    with hmpx.convert(**lists(bf16="interpolate matmul")), hmpx.enable_casts():
        nn.functional.interpolate(torch.randn(1, 1, 2, 2), scale_factor=2)
        assert product() is CAST


@pytest.mark.parametrize("value", ["", None])
@pytest.mark.parametrize("by_keyword", [True, False])
def test_hmp_convert_by_keyword_and_by_position(value, by_keyword):
    if by_keyword:
        hmp.convert(opt_level="O1", bf16_file_path=value, fp32_file_path=value, isVerbose=False)
    else:
        hmp.convert("O1", value, value, False)
    assert product() is CAST


def test_hmp_files_may_be_deleted_right_after_the_call(lists):
    arguments = lists(bf16="exp", fp32="log")
    del arguments["promote_file_path"]
    hmp.convert(opt_level="O1", **arguments, isVerbose=False)
    for path in arguments.values():
        os.remove(path)
    assert X.exp().dtype is CAST and product() is UNCAST
    hmp.convert()  # twice in a process
    assert product() is CAST and X.exp().dtype is UNCAST


class Model(nn.Module):
    """As HMP's clients have it: the module kept on an object, the callable kept and called in a forward."""

    def __init__(self, backend, disable_casts):
        super().__init__()
        self.backend, self.disable_casts = backend, disable_casts
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        with self.disable_casts():
            early = self.layer(x)
        with self.backend.disable_casts():
            return early.dtype, self.layer(x).dtype, product()


def test_hmp_disable_casts_kept_as_a_callable_without_and_with_convert():
    model = Model(hmp, hmp.disable_casts)
    assert model(X) == (UNCAST, UNCAST, UNCAST)
    with hmp.convert():
        assert model(X) == (UNCAST, UNCAST, UNCAST) and model.layer(X).dtype is CAST


def test_an_old_script_with_one_line_changed(tmp_path):
    """The shape of Habana's own MNIST example, its loss going down."""
    (tmp_path / "bf16.txt").write_text("linear\nrelu\n")
    (tmp_path / "fp32.txt").write_text("cross_entropy\n")
    hmp.convert(
        opt_level="O1", bf16_file_path=tmp_path / "bf16.txt", fp32_file_path=tmp_path / "fp32.txt", isVerbose=False
    )
    model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    inputs = torch.randn(256, 20)
    targets = inputs[:, :3].argmax(1)
    losses = []
    for _ in range(60):
        optimizer.zero_grad(set_to_none=True)
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        with hmp.disable_casts():
            optimizer.step()
        losses.append(loss.item())
    assert loss.dtype is torch.float32 and losses[-1] < losses[0] / 4
    assert all(p.dtype is torch.float32 for p in model.parameters())
