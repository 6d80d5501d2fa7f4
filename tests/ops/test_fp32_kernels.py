"""Ops that run in BF16 or FP16, computed by FP32 kernels: held against FP64 and against native kernels."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad

import hmpx
from hmpx.errors import HmpxError
from hmpx.ops.computing import kernels as choice
from hmpx.ops.wrapping import weight_cache
from tests.support import python
from tests.support.recorded import escaped

LOW = (torch.bfloat16, torch.float16)


def converted(kernels, low=torch.bfloat16):
    return hmpx.convert(kernels=kernels, low_precision=low)


def results(cases, low=torch.bfloat16):
    """By name: results and gradients by FP32 kernels, by native ones, and of the rounded inputs in FP64 without hmpx.

    cases: name -> op and tensors.
    """
    found = {name: [] for name in cases}
    for kernels in ("float32", "native", None):
        with converted(kernels, low) if kernels else contextlib.nullcontext():
            for name, (op, tensors) in cases.items():
                given = [t.to(low).to(low if kernels else torch.float64).requires_grad_() for t in tensors]
                out = op(*given)
                torch.manual_seed(1)
                gradient = torch.randint(-4, 5, out.shape).to(out.dtype)
                found[name].append([out.detach(), *torch.autograd.grad(out, given, gradient)])
    return found


def distance(result, exact):
    return torch.linalg.vector_norm(result.double() - exact).item()


def integers(*shape):
    return torch.randint(-4, 5, shape).float()


OPS = {
    "linear": (F.linear, [(9, 40), (7, 40), (7,)]),
    "linear without bias, 3 dimensions": (F.linear, [(2, 5, 33), (4, 33)]),
    "mm": (torch.mm, [(17, 65), (65, 3)]),
    "x @ y": (lambda x, y: x @ y, [(3, 17, 65), (65, 9)]),
    "transposed": (lambda x, y: x.t() @ y.t(), [(64, 5), (6, 64)]),
    "bmm": (torch.bmm, [(3, 8, 64), (3, 64, 8)]),
    "addmm": (torch.addmm, [(6,), (5, 31), (31, 6)]),
    "baddbmm": (torch.baddbmm, [(2, 4, 6), (2, 4, 50), (2, 50, 6)]),
    "einsum": (lambda x, y: torch.einsum("bij,kj->bki", x, y), [(2, 5, 40), (4, 40)]),
    "conv1d": (F.conv1d, [(2, 3, 20), (5, 3, 4), (5,)]),
    "conv2d": (lambda x, w, b: F.conv2d(x, w, b, stride=2, padding=1), [(2, 8, 9, 9), (6, 8, 3, 3), (6,)]),
    "conv2d in groups": (lambda x, w: F.conv2d(x, w, groups=4, dilation=2), [(2, 8, 9, 9), (8, 2, 3, 3)]),
    "conv3d": (F.conv3d, [(1, 2, 5, 6, 7), (3, 2, 3, 3, 3)]),
    "conv_transpose2d": (F.conv_transpose2d, [(2, 4, 5, 5), (4, 3, 3, 3)]),
    "bilinear": (F.bilinear, [(5, 12), (5, 13), (4, 12, 13)]),
    "one element": (torch.matmul, [(1, 1), (1, 1)]),
    "empty": (torch.mm, [(0, 4), (4, 3)]),
    "empty inside": (torch.mm, [(2, 0), (0, 3)]),
}


@pytest.mark.parametrize("low", LOW, ids=str)
def test_products_of_small_integers_have_the_native_bits(low):
    """FP32 holds every partial sum, so both kernels round the exact result, and the exact gradients."""
    cases = {name: (op, [integers(*shape) for shape in shapes]) for name, (op, shapes) in OPS.items()}
    for name, found in results(cases, low).items():
        for ours, native, exact in zip(*found, strict=True):
            assert ours.dtype is native.dtype is low, name
            assert torch.equal(ours, exact.to(low)) and torch.equal(ours, native), name


def test_no_gradient_is_further_from_the_exact_one_than_natively():
    cases = {name: (op, [torch.randn(shape) for shape in shapes]) for name, (op, shapes) in OPS.items()}
    q = [torch.randn(2, 3, 16, 8) for _ in range(3)]
    cases["attention"] = (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), q)
    for name, found in results(cases).items():
        for ours, native, exact in zip(*found, strict=True):
            once = distance(exact.to(torch.bfloat16), exact)
            assert distance(ours, exact) <= max(1.02 * distance(native, exact), 1.01 * once), name


@pytest.mark.parametrize("low", LOW, ids=str)
def test_infinity_overflow_nan_and_subnormals_come_out_as_natively(low):
    huge, tiny = torch.finfo(low).max, torch.finfo(low).smallest_normal
    x = torch.tensor([[huge, huge], [float("inf"), 1], [float("nan"), 1], [-huge, -huge], [0, float("inf")], [tiny, 0]])
    ((out, *_), (native, *_), _) = results({"": (torch.mm, [x, torch.tensor([[1.0, 0.25], [1, 0.25]])])}, low)[""]
    assert torch.equal(out.float().nan_to_num(7.0, 8.0, 9.0), native.float().nan_to_num(7.0, 8.0, 9.0))
    assert out.isinf().any() and out.isnan().any() and (out[-1] != 0).all()


def forward_gradient(x, w):
    """The input requires a gradient as well."""
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(torch.mm(forward_ad.make_dual(x.clone(), torch.ones_like(x)), w.t()))


def test_other_ways_to_differentiate_and_traces_agree_with_native_kernels():
    x, w = integers(5, 8).requires_grad_(), integers(3, 8).requires_grad_()

    def second():
        first = torch.autograd.grad(F.linear(x, w).float().square().sum(), x, create_graph=True)[0]
        return torch.autograd.grad(first.float().square().sum(), x)[0]

    def loss(v):
        return F.linear(v, w.detach()).float().square().sum()

    results, v, weight = [], x.detach(), w.detach()
    for kernels in ("float32", "native"):
        with converted(kernels):
            results.append(
                [
                    second(),
                    torch.func.grad(loss)(v),
                    torch.func.hessian(loss)(v[0]),
                    torch.func.vmap(lambda row: F.linear(row, w))(v),
                    torch.func.jvp(lambda t: F.linear(t, weight), (v,), (torch.ones_like(v),))[1],
                    torch.jit.trace(lambda t: F.linear(t, weight), v)(2 * v),
                    *forward_gradient(x, weight),
                ]
            )
    for mine, theirs in zip(*results, strict=True):
        assert mine.dtype is theirs.dtype and torch.equal(mine, theirs)


@pytest.mark.slow
def test_compiled_code_has_the_bits_of_eager_code():
    """A compiler drops two casts in a row, and with them the rounding, where it can see them."""
    model = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 8))
    x = torch.randn(4, 16)

    def run(function):
        model.zero_grad()
        out = function(x)
        out.float().square().sum().backward()
        return [out.detach(), *(p.grad.clone() for p in model.parameters())]

    with converted("float32"):
        eager, compiled = run(model), run(torch.compile(model, fullgraph=True))
    assert all(a.dtype is b.dtype and torch.equal(a, b) for a, b in zip(eager, compiled, strict=True))


def computed_in(function):
    """The dtypes that aten's matrix products see."""
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func._schema.name in ("aten::mm", "aten::addmm", "aten::addmm_"):
                seen.append(args[-1].dtype)
            return func(*args, **(kwargs or {}))

    with Watch():
        function()
    return seen


X, Y = torch.ones(4, 4), torch.ones(4, 4)


def test_listed_ops_and_those_that_follow_their_first_input_use_fp32_kernels(lists):
    with hmpx.convert(**lists("mm"), kernels="float32"):
        assert computed_in(lambda: torch.mm(X, Y)) == [torch.float32]
        assert torch.mm(X, Y).dtype is torch.bfloat16
    with hmpx.convert(**lists(), kernels="float32"):
        assert computed_in(lambda: torch.mm(X.bfloat16(), Y)) == [torch.float32]
        assert torch.mm(X.bfloat16(), Y).dtype is torch.bfloat16
        assert torch.mm(X.half(), Y.half()).dtype is torch.float16
        assert torch.mm(X, Y.bfloat16()).dtype is torch.float32


def test_out_in_place_and_disabled_casts_are_native():
    x, y = X.bfloat16(), Y.bfloat16()
    with converted("float32"):
        assert computed_in(lambda: torch.mm(x, y, out=torch.empty_like(x))) == [torch.bfloat16]
        assert computed_in(lambda: x.clone().addmm_(x, y)) == [torch.bfloat16]
        with hmpx.disable_casts():
            assert computed_in(lambda: torch.mm(x, y)) == [torch.bfloat16]
    assert computed_in(lambda: torch.mm(x, y)) == [torch.bfloat16]


def test_nothing_escapes_in_fp32_kernels(lists):
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    with converted("float32"):
        assert not escaped(model, torch.randn(2, 8))
        assert not escaped(lambda q: F.scaled_dot_product_attention(q, q, q), torch.randn(1, 2, 4, 4))
    with hmpx.convert(**lists("mul"), kernels="float32"):  # nor in what torch composes an op of
        assert not escaped(F.bilinear, *(torch.randn(shape).bfloat16() for shape in ((4, 5), (4, 6), (3, 5, 6))))


def test_auto_asks_for_fp32_kernels_where_the_cpu_has_no_instructions(monkeypatch):
    monkeypatch.delenv("HMPX_KERNELS", raising=False)
    for has in ((), LOW, (torch.bfloat16,)):
        monkeypatch.setattr(choice, "has_instructions", lambda dtype, has=has: dtype in has)
        assert choice.choose("auto").widened == set(LOW) - set(has)
    assert choice.choose("native").widened == frozenset()
    assert choice.choose("float32").widened == set(LOW)


def test_the_environment_says_what_auto_means_and_nothing_else(monkeypatch):
    monkeypatch.setenv("HMPX_KERNELS", "float32")
    assert choice.choose("auto").widened == set(LOW)
    assert choice.choose("native").widened == frozenset()
    monkeypatch.setenv("HMPX_KERNELS", "nativ")
    with pytest.raises(HmpxError, match=r"HMPX_KERNELS=nativ does not exist; did you mean 'native'"):
        hmpx.convert()


def test_cached_weights_keep_the_rounded_weight_in_fp32_and_count_it():
    model, x = nn.Linear(16, 32, bias=False).requires_grad_(False), torch.randn(4, 16)
    with converted("float32"):
        expected = model(x)
        with hmpx.cached_weights() as cache:
            assert torch.equal(model(x), expected)
            assert torch.equal(model(x), expected)
            (kept,) = weight_cache.current().casts
            assert torch.equal(kept, model.weight.bfloat16())
            assert weight_cache.current().nbytes == 4 * 16 * 32
            assert "1 casts, 0.0 MiB" in repr(cache)
            model.weight.data.mul_(2)
            assert torch.equal(model(x), expected * 2)
            assert weight_cache.current().nbytes == 4 * 16 * 32
        half = nn.Linear(16, 32, bias=False).requires_grad_(False).bfloat16()
        expected = half(x)
        with hmpx.cached_weights():
            assert torch.equal(half(x), expected) and torch.equal(half(x), expected)
            half.weight.mul_(2)
            assert torch.equal(half(x), expected * 2)


def test_an_unknown_word_is_an_error_and_changes_nothing():
    with pytest.raises(HmpxError, match=r"kernels='fp32' does not exist.*legal: auto, native, float32, scaled_mm"):
        hmpx.convert(kernels="fp32")
    with pytest.raises(HmpxError, match="kernels"):
        hmpx.prepare(nn.Linear(2, 2), torch.optim.SGD([nn.Parameter(torch.ones(1))]), {"kernels": "float16"})


def test_the_handle_and_explain_say_what_was_decided(capsys):
    with converted("float32") as handle:
        assert "FP32 kernels for BF16 and FP16 on CPU" in repr(handle)
    with converted("native") as handle:
        assert "native kernels" in repr(handle)
    hmpx.explain({"kernels": "float32"})
    assert "FP32 kernels for BF16 and FP16 on CPU" in capsys.readouterr().out


def test_an_exported_program_loads_without_hmpx(tmp_path):
    layer, x = nn.Linear(4, 3), torch.randn(5, 4)
    with converted("float32"):
        for strict in (True, False):
            torch.export.save(torch.export.export(layer, (x,), strict=strict), tmp_path / f"{strict}.pt2")
        torch.save((x, layer(x)), tmp_path / "expected.pt")
    code = "import sys, torch; x, expected = torch.load('expected.pt')\n"
    code += "found = [torch.export.load(f'{strict}.pt2').module()(x) for strict in (True, False)]\n"
    code += "assert all(torch.equal(each, expected) and each.dtype is torch.bfloat16 for each in found)\n"
    code += "assert 'hmpx' not in sys.modules"
    done = python.run("-c", code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
