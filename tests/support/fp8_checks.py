"""What the kernels that cast to FP8 are held against, in a process with ``TRITON_INTERPRET=1``; test_fp8_gpu.py starts
it. A check is a function here whose name begins with `check_`. The process prints, in JSON, what each has raised.

Triton's interpreter rounds to FP8 in its own way. In its place stands torch's cast, to the nearest and of two to the
even one, which is what the instruction of a GPU does (PTX: cvt.rn.satfinite).
"""

import collections
import contextlib
import itertools
import math
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
import triton.language as tl
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import interpreter

import hmpx
from hmpx.ops.computing import fp8_gpu, matrix_products
from hmpx.ops.computing.fp8_product import How, product
from hmpx.ops.policies.fp8_format import FORMATS, Format
from hmpx.ops.wrapping.weight_cache import cast_weight
from tests.support.fresh_python import print_checks
from tests.support.numbers import quantize

HELD = {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}
GW_HP = Format("rowwise", backward="e4m3", power_of_two=True, products=("output", "input_gradient"),
               weight_tensorwise=True)  # fmt: skip
FORMS = {
    "tensorwise": Format(), "powers": Format(power_of_two=True), "rowwise": FORMATS["rowwise"],
    "rowwise, no powers": Format("rowwise"), "blockwise": FORMATS["blockwise"],
}  # fmt: skip


def convert(x, kind, to, mode, original=interpreter._convert_float):
    if to not in HELD:
        return original(x, kind, to, mode)
    return torch.from_numpy(np.ascontiguousarray(x).view(np.float32).copy()).to(HELD[to]).view(torch.uint8).numpy()


def alike(found, wanted):
    """Of the same bits; NaNs may have another sign, as a GPU's has none."""
    a, b = found.float(), wanted.float()
    same = torch.eq(a, b) & (a.signbit() == b.signbit()) | a.isnan() & b.isnan()
    return found.shape == wanted.shape and bool(same.all())


def assert_cast(x, form, name="e4m3", square=False):
    last, first = fp8_gpu.cast_both(x, form, last=True, first=True, square=square, name=name)
    for lines, dim in ((last, -1), (first, -2)):
        codes, scale = quantize(x, name, form, dim, form.scaling, square)
        if dim == -2:
            codes, scale = codes.t(), scale.t() if scale.dim() else scale
        rows, columns = codes.shape
        assert lines.codes.is_contiguous() and not lines.codes.view(torch.uint8)[:, columns:].any()
        assert alike(lines.codes[:, :columns], codes), (x.shape, form, name, square, dim)
        spread = lines.scale
        if form.scaling == "rowwise":
            spread = spread[:, None]
        if form.scaling == "blockwise":
            spread = spread.repeat_interleave(128, 1)[:, :columns]
            spread = spread.repeat_interleave(128, 0)[:rows] if square else spread
        assert alike(spread, scale), (x.shape, form, name, square, dim)


def numbers(*shape):
    return (torch.randn(shape) * torch.logspace(-3, 2, shape[1])).bfloat16()


def check_codes_and_scales_are_those_of_aten():
    for shape in ((128, 48), (130, 256), (1, 16), (33, 144)):
        for form in FORMS.values():
            for name in ("e4m3", "e5m2"):
                assert_cast(numbers(*shape), form, name)
            if form.scaling == "blockwise":
                assert_cast(numbers(*shape), form, square=True)


def check_the_largest_number_in_each_tile_of_a_program():
    """Two programs look through six tiles each, where a GPU's have so many in a matrix of more than 4096 x 4096."""
    assert_largest_of_tiles(0, 6, 11)


def check_the_largest_number_in_the_other_tiles():
    assert_largest_of_tiles(1, 2, 3, 4, 5, 7, 8, 9, 10)


def assert_largest_of_tiles(*tiles):
    with mock.patch.object(fp8_gpu, "_MATRIX", 2):
        for tile in tiles:
            x = numbers(300, 512)
            x[128 * (tile // 4) + 5, 128 * (tile % 4) + 7] = 3000
            assert_cast(x, FORMS["tensorwise"])


def check_numbers_at_the_ends_of_bf16():
    """inf and NaN, numbers whose scale would be inf, subnormal ones, zeros; some of each exponent as the largest."""
    for form in FORMS.values():
        for odd in (math.inf, -math.inf, math.nan, 3e38, 1e-37, 0.0):
            x = numbers(20, 32) * (odd if abs(odd) < 1 else 1)
            x[3, 5] = odd
            assert_cast(x, form, "e5m2" if odd == 3e38 else "e4m3", square=odd == math.inf)
    assert_largest(12)


def check_every_magnitude_of_bf16_as_the_largest():
    assert_largest(1)


def assert_largest(step):
    """Of one in `step` of the magnitudes, each in one way."""
    every = torch.arange(0, 0x7F81, step, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    ways = [*itertools.product((FORMS["rowwise"], FORMS["rowwise, no powers"]), ("e4m3", "e5m2"))]
    for way, largest in zip(ways, every[torch.randperm(len(every))].chunk(len(ways)), strict=True):
        assert_cast(largest[:, None].expand(-1, 16).contiguous(), *way)


def check_views():
    x = numbers(48, 64)
    views = {
        "transposed": x.t(), "transposed odd": x[:33].t().contiguous().t(), "rows": x[5:40], "columns": x[:, 16:48],
        "odd column": torch.cat([x[:, :3], x], 1)[:, 3:], "strided": x[::2, ::2], "expanded": x[:1].expand(48, 64),
        "one number": x[:1, :1].expand(48, 64),
    }  # fmt: skip
    for view in views.values():
        for form in FORMS.values():
            assert_cast(view, form)


def scaled_mm(a, b, scale_a, kind_a, scale_b, kind_b, output_dtype):
    """The product of blocks, which torch has on a GPU alone; with the layouts that it asks for."""
    assert a.is_contiguous() and b.t().is_contiguous()
    blocks, squares = F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128
    assert kind_a is blocks and scale_a.shape == (a.shape[0], a.shape[1] // 128) and scale_a.stride(0) == 1
    b, n = b.t(), b.shape[1]
    if kind_b is squares:
        assert scale_b.shape == (b.shape[1] // 128, n // 128) and scale_b.stride() == (1, b.shape[1] // 128)
        scale_b = scale_b.t().repeat_interleave(128, 0)
    else:
        assert kind_b is blocks and scale_b.shape == (n, b.shape[1] // 128) and scale_b.stride(0) == 1
    a, b = (x.float() * scale.repeat_interleave(128, 1) for x, scale in ((a, scale_a), (b, scale_b)))
    return (a @ b.t()).to(output_dtype)


def close(found, wanted):
    """Within a last place of BF16, or the rounding of sums in FP32."""
    assert found.dtype is wanted.dtype and found.shape == wanted.shape
    limit = wanted.float().abs() * 2**-7 + 1e-5 * wanted.float().abs().max()
    return bool(((found.float() - wanted.float()).abs() <= limit).all())


@contextlib.contextmanager
def as_on_a_gpu():
    with contextlib.ExitStack() as patches:
        for owner, name, value in (
            (fp8_gpu, "can_cast", lambda *matrices: all(x.dim() == 2 for x in matrices)),
            (fp8_gpu, "multiplies_blocks", lambda device: True), (F, "scaled_mm", scaled_mm),
        ):  # fmt: skip
            patches.enter_context(mock.patch.object(owner, name, value))
        yield


def check_products_are_those_of_aten():
    """Output and both gradients, of a weight or of another matrix; asked for one by one too."""
    assert_products(lambda number, form, turned: form.scaling == "blockwise" or turned == (number % 2 == 0))


def check_products_of_the_other_matrices_are_those_of_aten():
    assert_products(lambda number, form, turned: form.scaling != "blockwise" and turned == (number % 2 == 1))


def assert_products(are_asked):
    only = {f"only {each}": Format(products=(each,)) for each in ("output", "input_gradient", "weight_gradient")}
    forms = enumerate((FORMS | only | {"gw_hp": GW_HP}).values())
    for number, form, turned in ((*each, turned) for each in forms for turned in (True, False)):
        if are_asked(number, form, turned):
            m, k, n = (128, 512, 512) if form.scaling == "blockwise" else (40, 64, 48)
            x, w, g = torch.randn(m, k).bfloat16(), torch.randn(n, k).bfloat16() / 8, torch.randn(m, n).bfloat16()
            given = [x.requires_grad_(), w.requires_grad_() if turned else w.t().contiguous().requires_grad_()]
            b = given[1].t() if turned else given[1]
            with as_on_a_gpu():
                assert fp8_gpu.fits(x, b, form)
                found = fp8_gpu.product_of_both(x, b, form, weight=turned)
                found = [found, *torch.autograd.grad(found, given, g)]
            wanted = product(x, b, How(form, "float32", turned))
            wanted = [wanted, *torch.autograd.grad(wanted, given, g)]
            assert all(map(close, found, wanted)), (form, turned)
            for each in given:
                for other in given:
                    other.requires_grad_(other is each)
                with as_on_a_gpu():
                    y = fp8_gpu.product_of_both(x, given[1].t() if turned else given[1], form, weight=turned)
                    assert torch.equal(torch.autograd.grad(y, each, g)[0], found[1 if each is x else 2])


class Calls(TorchDispatchMode):
    """Counts what a GPU would launch: calls of operators that compute, and kernels."""

    def __init__(self):
        super().__init__()
        self.counts = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.split("::")[1]
        if not func.is_view and name not in ("empty", "detach", "_unsafe_view", "view"):
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def check_launches_of_a_layer():
    """Two launches an operand with one scale, three with scales of rows, one with blocks; three products; no copies."""
    expected = {"tensorwise": (6, 0), "rowwise": (6, 3), "blockwise": (3, 0)}
    for name, (kernels, fills) in expected.items():
        x, w = torch.randn(128, 512).bfloat16().requires_grad_(), torch.nn.Parameter(torch.randn(512, 512).bfloat16())
        g, launched = torch.randn(128, 512).bfloat16(), []
        with contextlib.ExitStack() as stack:
            stack.enter_context(as_on_a_gpu())
            for owner, what, stub in (
                (fp8_gpu, "_launch", lambda kernel, *rest, launched=launched: launched.append(kernel)),
                (fp8_gpu, "times", lambda a, b, dtype, fast=False: torch.empty(len(a[0]), len(b[0]), dtype=dtype)),
            ):  # fmt: skip
                stack.enter_context(mock.patch.object(owner, what, stub))
            calls = stack.enter_context(Calls())
            fp8_gpu.product_of_both(x, w.t(), FORMATS[name], weight=True).backward(g)
        assert w.grad.is_contiguous() and len(launched) == kernels, (name, launched)
        assert calls.counts == ({"zeros": fills} if fills else {}), (name, calls.counts)


def check_cached_weights_keep_codes():
    """Of BF16 weights and of casts of FP32 ones: cast once, and again when somebody has written."""
    assert_codes_are_kept((torch.bfloat16, "rowwise"), (torch.float32, "tensorwise"))


def check_cached_weights_keep_codes_of_other_forms():
    assert_codes_are_kept(
        *((torch.bfloat16, name) for name in ("tensorwise", "blockwise")),
        *((torch.float32, name) for name in ("rowwise", "blockwise")),
    )


def assert_codes_are_kept(*cases):
    for dtype, name in cases:
        m, k, n = (128, 512, 512) if name == "blockwise" else (20, 64, 48)
        w, x = torch.nn.Parameter(torch.randn(n, k, dtype=dtype)), torch.randn(m, k).bfloat16()
        cast, casts = fp8_gpu.cast_both, []

        def counted(x, form, *, cast=cast, casts=casts, **asked):
            casts.append(x.shape)
            return cast(x, form, **asked)

        def product(low, x=x, form=FORMATS[name]):
            return fp8_gpu.product_of_both(x, low.t(), form, True)

        def kept(w=w):
            return w if w.dtype is torch.bfloat16 else cast_weight(w, torch.bfloat16, torch.Tensor.bfloat16)

        with as_on_a_gpu(), mock.patch.object(fp8_gpu, "cast_both", counted), torch.no_grad(), hmpx.cached_weights():
            found = [product(kept()) for _ in range(3)]
            assert len(casts) == 4, (dtype, name, casts)
            assert torch.equal(found[0], found[2]) and torch.equal(found[0], product(w.to(torch.bfloat16, copy=True)))
            w.mul_(2)
            anew = product(kept())
            assert torch.equal(anew, product(w.to(torch.bfloat16, copy=True))) and not torch.equal(anew, found[0])


def check_a_layer_takes_them():
    """F.linear under an fp8 list, in the place of a GPU; a matrix that no kernel casts is multiplied as before."""
    x, w = torch.randn(2, 20, 64).bfloat16(), torch.randn(48, 64).bfloat16()
    with hmpx.convert(fp8=["linear"], kernels="float32"):
        wanted = F.linear(x, w)
    product, taken = matrix_products.fp8_gpu.product_of_both, []

    def seen(*args):
        taken.append(args[0].shape)
        return product(*args)

    cuda = mock.PropertyMock(return_value=True)
    with contextlib.ExitStack() as stack:
        stack.enter_context(as_on_a_gpu())
        for owner, what, stub in (
            (matrix_products, "_has_scaled_mm", lambda device: True),
            (torch.Tensor, "is_cuda", cuda), (fp8_gpu, "product_of_both", seen),
        ):  # fmt: skip
            stack.enter_context(mock.patch.object(owner, what, stub))
        stack.enter_context(hmpx.convert(fp8=["linear"]))
        found = F.linear(x, w)
    assert taken == [(40, 64)] and close(found, wanted)


if __name__ == "__main__":
    print_checks(globals(), lambda name: mock.patch.object(interpreter, "_convert_float", convert))
