"""Grouped products in FP8: torchao's numbers where it has a CPU reference, and what does not fit."""

import pytest
import torch
import torch.nn.functional as F

import hmpx

pytestmark = pytest.mark.skipif(not hasattr(torch, "_grouped_mm"), reason="torch has no grouped products")
ENDS = torch.tensor([32, 32, 96, 160], dtype=torch.int32)  # an empty group, and rows that are in none


def operands(rows=160):
    torch.manual_seed(0)
    a = (torch.randn(rows, 64) * torch.logspace(-2, 2, 64)).bfloat16().requires_grad_()
    b = (torch.randn(4, 48 + 16, 64) / 8).bfloat16().requires_grad_()  # (E, N, K), whose transpose is column-major
    return a, b, torch.randn(rows, 64).bfloat16()


def three(y, a, b, g):
    return [y, *torch.autograd.grad(y, (a, b), g)]


def by_hmpx(form, a, b, g, offs=ENDS, **more):
    with hmpx.convert(fp8=["grouped_mm"], fp8_format=form, **more):
        return three(torch._grouped_mm(a, b.mT, offs=offs), a, b, g)


def test_the_numbers_of_torchao_in_mx():
    moe = pytest.importorskip("torchao.prototype.moe_training.mxfp8_grouped_mm")
    from torchao.quantization.quantize_.common import KernelPreference

    a, b, g = operands()
    emulated = {"kernel_preference": KernelPreference.EMULATED}
    wanted = three(moe._to_mxfp8_then_scaled_grouped_mm(a, b.mT, ENDS, **emulated), a, b, g)
    for found, its in zip(by_hmpx("mx", a, b, g), wanted, strict=True):
        assert torch.equal(found, its)


def test_the_numbers_of_torchao_with_scales_of_rows():
    """Its references of what is cast; the products of the decoded codes are summed in FP64, group by group."""
    scales = pytest.importorskip("torchao.float8.float8_utils")
    utils = pytest.importorskip("torchao.prototype.moe_training.utils")
    rowwise = pytest.importorskip("torchao.float8.config").ScalingGranularity.AXISWISE
    (a, b, g), e4m3 = operands(), torch.float8_e4m3fn
    ends = torch.tensor([32, 48, 96, 160], dtype=torch.int32)  # its references know no empty group

    def decoded(x, dim):
        scale = scales.tensor_to_scale(x, e4m3, scaling_granularity=rowwise, axiswise_dim=dim,
                                       round_scales_to_power_of_2=True)  # fmt: skip
        return scales.to_fp8_saturated(x.float() * scale, e4m3).double() / scale.double()

    def in_groups(x):
        codes, scale = utils.torch_to_float8_per_group_colwise(x, ends, e4m3, round_scales_to_power_of_2=True)
        starts, scale = [0, *ends[:-1].tolist()], scale.view(len(ends), -1)
        return [codes[i:j].double() / each.double() for i, j, each in zip(starts, ends.tolist(), scale, strict=True)]

    found = by_hmpx("rowwise", a, b, g, ends)
    with torch.no_grad():
        parts = [x.tensor_split(ends[:-1].tolist()) for x in (decoded(a, -1), decoded(g, -1))]
        wanted = [
            torch.cat([x @ w.t() for x, w in zip(parts[0], decoded(b, -1), strict=True)]),
            torch.cat([x @ w for x, w in zip(parts[1], decoded(b, -2), strict=True)]),
            torch.stack([y.t() @ x for y, x in zip(in_groups(g), in_groups(a), strict=True)]),
        ]
    for ours, its in zip(found, wanted, strict=True):
        assert ours.dtype is torch.bfloat16
        torch.testing.assert_close(ours.double(), its, rtol=2**-8, atol=2e-6 * its.abs().max().item())


def test_inf_and_nan_stay_visible_in_their_group():
    for odd in (float("inf"), float("nan")):
        a, b, g = operands()
        with torch.no_grad():
            a[40, 3] = odd
        _, _, of_b = by_hmpx("rowwise", a, b, g)
        assert of_b[2, :, 3].isnan().all() and not of_b[[0, 1, 3]].isnan().any()


def test_it_is_an_op_of_the_bf16_list():
    a, b, _ = operands()
    wanted = torch._grouped_mm(a, b.mT, offs=ENDS)
    with hmpx.convert(bf16=["grouped_mm"]):
        calls = [torch._grouped_mm(a.float(), b.mT, offs=ENDS)]
        calls += [F.grouped_mm(a.float(), b.mT, offs=ENDS)] if hasattr(F, "grouped_mm") else []
    assert all(torch.equal(each, wanted) for each in calls)


@pytest.mark.parametrize("form", ["tensorwise", "blockwise", "nvfp4", {"scaling": "rowwise"}])
def test_formats_without_grouped_products_stay_in_bf16_and_record_says_so(form):
    a, b, g = operands()
    wanted = three(torch._grouped_mm(a, b.mT, offs=ENDS), a, b, g)
    with hmpx.record() as log:
        found = by_hmpx(form, a, b, g)
    assert all(map(torch.equal, found, wanted))
    (site,) = (each for each in log.sites if each.op == "grouped_mm")
    assert site.in_low == {
        "a grouped product, which is in FP8 with mx scales, or with scales of rows that are powers of two": 1
    }
