"""FP8 products: the numbers of torchao, of torch's scaled_mm, of a cast that is written another way."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._functorch.aot_autograd import aot_module_simplified
from torch.distributed.fsdp import fully_shard

import hmpx
from hmpx.ops.computing.fp8_product import Cast, How, coded, product
from hmpx.ops.computing.fp8_product import multiply as multiply_codes
from hmpx.ops.policies.fp8_format import FORMATS, PRODUCTS, Format
from tests.support import ranks
from tests.support.numbers import quantize
from tests.support.spanning import spanning

GW_HP = Format("rowwise", backward="e4m3", power_of_two=True, products=("output", "input_gradient"),
               weight_tensorwise=True)  # fmt: skip
OPS = ("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum")


def multiply(a, b, of_a, of_b, how, dtype):
    return multiply_codes(coded(a, of_a, -1, how), coded(b, of_b, -2, how), how, dtype)


def distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.detach().double() - wanted.detach().double()).norm() / wanted.detach().double().norm())


# ---------------------------------------------------------------------------------------------------------------------
# The cast, by a table of all numbers of a format


def numbers_of(mantissa: int, bias: int, count: int) -> np.ndarray:
    """The numbers of the codes 0, 1, 2 ... of a format, spelt out from its definition."""
    found = []
    for code in range(count):
        exponent, fraction = code >> mantissa, (code & (1 << mantissa) - 1) / 2**mantissa
        found.append((fraction if exponent == 0 else 1 + fraction) * 2.0 ** (max(exponent, 1) - bias))
    return np.array(found)


NUMBERS = {"e4m3": numbers_of(3, 7, 127), "e5m2": numbers_of(2, 15, 124), "e2m1": numbers_of(1, 1, 8)}


def nearest(x: np.ndarray, name: str) -> np.ndarray:
    """The number of the format that is nearest, of two the one with the even code; beyond the largest that."""
    numbers = NUMBERS[name]
    distances = np.abs(np.abs(x)[..., None] - numbers)
    tied = distances == distances.min(-1, keepdims=True)
    even = tied & (np.arange(len(numbers)) % 2 == 0)
    chosen = np.where(tied.sum(-1) > 1, even.argmax(-1), tied.argmax(-1))
    return np.copysign(numbers[chosen], x)


def groups(form: Format, shape: tuple[int, int], dim: int, weight: bool) -> np.ndarray:
    """A number for each element that says whom it shares its scale with."""
    row, column = np.indices(shape)
    along, across = (column, row) if dim == -1 else (row, column)
    size = {"tensorwise": 10**6, "rowwise": 10**6, "blockwise": 128, "mx": 32, "nvfp4": 16}[form.scaling]
    if form.scaling == "tensorwise":
        across = across * 0
    elif weight and (form.scaling == "blockwise" or form.squares):
        across = across // size
    return along // size * 10**6 + across


@pytest.mark.parametrize("dim", [-1, -2])
@pytest.mark.parametrize("form", [*FORMATS.values(), Format(power_of_two=True)], ids=str)
def test_a_cast_is_that_of_a_table_of_all_numbers(form, dim):
    name = "e2m1" if form.bits == "FP4" else "e4m3" if dim == -1 else "e5m2"
    torch.manual_seed(0)
    x = (torch.randn(150, 70) * torch.logspace(-6, 3, 70)).bfloat16()
    codes, scale = quantize(x, name, form, dim, form.scaling, weight=True)
    assert codes.dtype is (torch.float8_e5m2 if name == "e5m2" else torch.float8_e4m3fn)
    exact, largest = x.double().numpy(), NUMBERS[name][-1]
    shared = groups(form, tuple(x.shape), dim, weight=True)
    wanted, scales = np.empty_like(exact), np.empty_like(exact)
    of_tensor = np.float32(np.abs(exact).max() / (448 * largest))
    for group in np.unique(shared):
        members = shared == group
        amax = np.abs(exact[members]).max()
        if form.scaling == "mx":
            by_floor = math.floor(math.log2(amax)) - math.floor(math.log2(largest))
            factor = 2.0 ** -(math.ceil(math.log2(amax / largest)) if form.rceil else by_floor)
        elif form.scaling == "nvfp4":
            scale_of_block = nearest(np.clip(np.float32(amax / largest) / of_tensor, 2.0**-6, 448), "e4m3")
            factor = float(np.float32(1 / of_tensor) / np.float32(scale_of_block))
        else:
            factor = float(np.float32(1 / (amax / largest)))
            if form.power_of_two:
                factor = 2.0 ** math.floor(math.log2(factor))
        scaled = (exact[members].astype(np.float32) * np.float32(factor)).astype(np.float64)
        wanted[members], scales[members] = nearest(scaled, name), 1 / factor
    assert np.array_equal(codes.double().numpy(), wanted)
    np.testing.assert_allclose(scale.double().expand(x.shape).numpy(), scales, rtol=1e-7)


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_inf_and_nan_stay_visible(form):
    with hmpx.convert(fp8=["linear"], fp8_format=form):
        for odd in (math.inf, -math.inf, math.nan):
            x = torch.ones(4, 64)
            x[1, 3] = odd
            codes, _ = quantize(x, form.forward, form, -1, form.scaling)
            assert codes[1, 3].isnan() and F.linear(x, torch.eye(64))[1, 3].isnan(), odd


def test_what_does_not_saturate_overflows():
    form = Format("mx", rceil=False, saturating=False)
    x = torch.tensor([[440.0, 464.0, 470.0, -480.0] + 28 * [0.0]])  # 464 lies in the middle, and 448 has the even code
    codes, scale = quantize(x, "e4m3", form, -1, "mx")
    assert torch.equal((codes.float() * scale)[0, :2], torch.tensor([448.0, 448.0]))
    assert codes[0, 2:4].isnan().all()
    assert not quantize(x, "e4m3", FORMATS["mx-floor"], -1, "mx")[0].isnan().any()
    assert quantize(x * 2.0**7, "e5m2", form, -1, "mx")[0][0, 3] == -math.inf


# ---------------------------------------------------------------------------------------------------------------------
# Other libraries


SHAPES = [((40, 64), 48), ((3, 5, 32), 96), ((16, 16), 16), ((128, 256), 64), ((2, 3, 4, 64), 32)]


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_the_numbers_of_torchao(recipe):
    """Row scales to the bit; a tensor's in FP32 to what the order of factors changes, and in BF16 far within the one
    rounding of theirs, which is 1.7e-3 away from the exact product (where one more would be 2.8e-3 away from theirs).
    """
    config = pytest.importorskip("torchao.float8.config").Float8LinearConfig
    module = pytest.importorskip("torchao.float8.float8_linear").Float8Linear
    form = {**FORMATS, "rowwise_with_gw_hp": GW_HP}[recipe]
    kinds = [("float32", torch.float32), ("float32", torch.bfloat16), ("bfloat16", torch.bfloat16)]
    for (shape, columns), (by, dtype) in itertools.product(SHAPES, kinds):
        how = How(form, by, weight=True)
        torch.manual_seed(0)
        linear = nn.Linear(shape[-1], columns, bias=False, dtype=dtype)
        theirs = module.from_float(linear, dataclasses.replace(config.from_recipe_name(recipe), emulate=True))
        x = torch.randn(shape, dtype=dtype, requires_grad=True)
        wanted = theirs(x)
        gradient = torch.randn_like(wanted) * 1e-3
        wanted = (wanted, *torch.autograd.grad(wanted, (x, theirs.weight), gradient))
        found = product(x.reshape(-1, shape[-1]), linear.weight.t(), how).reshape(*shape[:-1], columns)
        found = (found, *torch.autograd.grad(found, (x, linear.weight), gradient))
        for ours, its in zip(found, wanted, strict=True):
            assert ours.dtype is its.dtype
            if recipe == "tensorwise":
                assert distance(ours, its) < (3e-7 if dtype is torch.float32 else 6e-4), (shape, by, dtype)
            else:
                assert torch.equal(ours, its), (shape, by, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("scaling", "names"),
    [("tensorwise", ("e4m3", "e4m3")), ("rowwise", ("e5m2", "e4m3")), ("rowwise", ("e4m3", "e5m2"))],
)
def test_the_numbers_of_scaled_mm(scaling, names, dtype):
    """Codes and scales that are handed to torch: its call has these bits, its public function may have another kernel.

    Transposed operands and a sum of 24 too.
    """
    form = Format(scaling)
    kinds = {"tensorwise": F.ScalingType.TensorWise, "rowwise": F.ScalingType.RowWise}
    for transposed in (False, True):
        torch.manual_seed(0)
        a, b = torch.randn(32, 48), torch.randn(48, 64)
        if transposed:
            a, b = torch.randn(48, 32).t(), torch.randn(64, 48).t()
        ours = [Cast(name, scaling) for name in names]
        found = multiply(a, b, *ours, How(form, "scaled_mm", False), dtype)
        (qa, sa), (qb, sb) = (quantize(x, n, form, d, scaling) for x, n, d in ((a, names[0], -1), (b, names[1], -2)))
        columns = qb.t().contiguous().t()
        assert torch.equal(found, torch._scaled_mm(qa.contiguous(), columns, sa, sb, out_dtype=dtype))
        wanted = F.scaled_mm(qa.contiguous(), columns, sa, kinds[scaling], sb, kinds[scaling], output_dtype=dtype)
        for by in ("scaled_mm", "float32", "bfloat16"):
            limit = 5e-3 if "bfloat16" in (by, str(dtype).removeprefix("torch.")) else 3e-7
            assert distance(multiply(a, b, *ours, How(form, by, False), dtype), wanted) < limit
    a, b = torch.randn(8, 24), torch.randn(24, 16)  # a batch of 24 in the gradient of a weight
    exact = multiply(a, b, *ours, How(form, "float32", False), torch.float32)
    assert distance(multiply(a, b, *ours, How(form, "scaled_mm", False), torch.float32), exact) < 3e-7


FORMS = [
    *({}, {"scaling": "rowwise"}, {"scaling": "rowwise", "weight_tensorwise": True}, {"power_of_two": True}),
    *("rowwise", "blockwise", "mx", "mxfp4"),
    {**FORMATS["nvfp4"].keys(), "stochastic": False, "hadamard": False},
]


@pytest.mark.parametrize(("form", "kernels"), spanning(FORMS, ("native", "float32")), ids=str)
def test_a_product_is_rounded_once(form, kernels):
    """Each element lies within half a last place of the FP64 product of the codes: output and both gradients."""
    torch.manual_seed(0)
    form = Format.of(form)
    for batch, op in (((), lambda x, w: F.linear(x, w)), ((3,), lambda x, w: torch.bmm(x, w.mT))):
        x, w, g = (torch.randn(*batch, *size).bfloat16() for size in ((48, 256), (128, 256), (48, 128)))
        of_weight = form.weight_tensorwise and "tensorwise"

        def decoded(t, name, dim, form=form, scaling=None, weight=not batch):
            codes, scale = quantize(t, name, form, dim, scaling or form.scaling, weight)
            return codes.double() * scale.double()

        pairs = [
            (decoded(x, form.forward, -1, weight=False), decoded(w.mT, form.forward, -2)),
            (decoded(g, form.backward, -1, weight=False), decoded(w, form.forward, -2, scaling=of_weight)),
            (decoded(g.mT, form.backward, -1, weight=False), decoded(x, form.forward, -2, weight=False)),
        ]
        x.requires_grad_(), w.requires_grad_()
        with hmpx.convert(fp8=["linear", "bmm"], fp8_format=form, kernels=kernels):
            y = op(x, w)
            found = [y, *torch.autograd.grad(y, (x, w), g)]
        for product_name, ours, (a, b) in zip(PRODUCTS, found, pairs, strict=True):
            exact = a @ b
            half_a_place = torch.exp2(exact.abs().log2().floor() - 8)
            of_sums = 1e-6 * (a.abs() @ b.abs())
            assert ((ours.double() - exact).abs() <= half_a_place + of_sums).all(), (product_name, batch)


# ---------------------------------------------------------------------------------------------------------------------
# The list


def calls() -> dict[str, tuple]:
    """Each op with an FP8 product: a call, and the two operands it multiplies with what becomes of their product."""
    a, b, bias = torch.randn(2, 32, 48), torch.randn(2, 48, 64), torch.randn(64)
    w = torch.randn(64, 48)
    return {
        "linear": (lambda: F.linear(a, w, bias), a.reshape(-1, 48), w.t(), lambda y: y.view(2, 32, 64) + bias),
        "matmul": (lambda: a @ b, a, b, None),
        "matmul of a stack and a matrix": (lambda: torch.matmul(a, other=b[0]), a.reshape(-1, 48), b[0],
                                           lambda y: y.view(2, 32, 64)),
        "matmul, broadcast": (lambda: a[:, None] @ b[None], a[:, None].expand(2, 2, 32, 48).reshape(4, 32, 48),
                              b[None].expand(2, 2, 48, 64).reshape(4, 48, 64), lambda y: y.view(2, 2, 32, 64)),
        "mm": (lambda: a[0].mm(b[0]), a[0], b[0], None),
        "bmm": (lambda: torch.bmm(a, b), a, b, None),
        "addmm": (lambda: torch.addmm(bias, a[0], b[0], beta=2, alpha=0.5), a[0], b[0], lambda y: 2 * bias + 0.5 * y),
        "baddbmm": (lambda: torch.baddbmm(bias, a, b), a, b, lambda y: y + bias),
        "einsum": (lambda: torch.einsum("bik,bkj->jbi", a, b), a, b, lambda y: y.permute(2, 0, 1)),
        "einsum without a result": (lambda: torch.einsum("ik,jk", a[0], w), a[0], w.t(), None),
    }  # fmt: skip


def test_each_op_multiplies_codes():
    torch.manual_seed(0)
    made = calls()
    with hmpx.convert(fp8=OPS, fp8_format="rowwise", kernels="float32") as handle:
        found = {name: call() for name, (call, *_) in made.items()}
    assert set(handle.policy.fp8) == set(OPS)
    for name, (_, a, b, finish) in made.items():
        decoded = []
        for operand, dim in ((a, -1), (b, -2)):
            codes, scale = quantize(operand.bfloat16(), "e4m3", FORMATS["rowwise"], dim, "rowwise")
            decoded.append(codes.double() * scale.double())
        wanted = decoded[0] @ decoded[1]
        assert found[name].dtype is torch.bfloat16
        assert distance(found[name], wanted if finish is None else finish(wanted)) < 4e-3, name


@pytest.mark.parametrize(
    ("form", "sizes"),  # columns and rows of a weight, and whether it is in FP8
    [
        ({}, [(64, 64, True), (64, 40, False), (40, 64, False)]),
        ({"scaling": "mx"}, [(48, 64, False)]),
        ({"scaling": "blockwise"}, [(48, 64, True)]),
        ({"auto_filter": True}, [(64, 1024, False), (64, 1040, True)]),
        ({"scaling": "rowwise", "auto_filter": True}, [(1040, 2064, False), (2064, 2064, True)]),
    ],
    ids=str,
)
def test_sizes_that_fp8_does_not_take_stay_in_bf16(form, sizes):
    with hmpx.convert(fp8=["linear"], fp8_format=form):
        for columns, rows, in_fp8 in sizes:
            x, w = torch.randn(2, columns).bfloat16(), torch.randn(rows, columns).bfloat16()
            found = F.linear(x, w)
            with hmpx.disable_casts():
                assert torch.equal(found, F.linear(x, w)) is not in_fp8, (columns, rows)


class KnowsLinear(torch.Tensor):
    """A quantized weight that knows `linear`, and how to be made BF16; not, say, how to be transposed."""

    @staticmethod
    def __new__(cls, numbers):
        return torch.Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=numbers.dtype)

    def __init__(self, numbers):
        self.numbers = numbers

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._to_copy.default:
            return cls(args[0].numbers.to(**kwargs))
        raise NotImplementedError(func)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is F.linear:
            return F.linear(args[0], args[1].numbers, *args[2:])  # by its name, which leads to the wrapper
        return super().__torch_function__(func, types, args, kwargs or {})


def test_a_tensor_subclass_stays_in_bf16_and_record_says_so():
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        x, w = torch.randn(16, 64), torch.randn(64, 64, dtype=dtype)
        with hmpx.convert(fp8=["linear"]):
            with hmpx.record() as log:
                found = F.linear(x, KnowsLinear(w))
            assert not torch.equal(F.linear(x, w), found)
        assert torch.equal(found, F.linear(x.bfloat16(), w.bfloat16())), dtype
        (site,) = (site for site in log.sites if site.op == "linear")
        assert (site.in_low, site.fp8) == ({"a tensor subclass, sparse or nested": 1}, {})


# ---------------------------------------------------------------------------------------------------------------------
# In a training


def small() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)), torch.randn(8, 32)


def trained(model: nn.Module, run, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    run(x).float().square().sum().backward()
    return [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("form", ["tensorwise", "rowwise"])
def test_layers_are_one_graph_whose_casts_a_compiler_sees(form):
    graphs, model = [], nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))

    def backend(graph, inputs):
        return aot_module_simplified(graph, inputs, lambda forward, _: graphs.append(forward) or forward.forward)

    with hmpx.convert(fp8=["linear"], fp8_format=form, kernels="scaled_mm"):
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        with torch.no_grad():
            for _ in range(2):
                compiled(torch.randn(16, 32))
    (graph,) = graphs
    names = [
        str(each.target) for each in graph.graph.nodes if each.op == "call_function" and "getitem" not in each.name
    ]
    assert names.count("aten._scaled_mm.default") == 4 and all(name.startswith("aten.") for name in names)


def test_each_product_may_be_the_only_one_in_fp8():
    torch.manual_seed(0)
    x, w, g = torch.randn(8, 32, requires_grad=True), torch.randn(64, 32, requires_grad=True), torch.randn(8, 64)

    def three(**lists):
        with hmpx.convert(**lists):
            y = F.linear(x, w)
            return [y, *torch.autograd.grad(y, (x, w), g.bfloat16())]

    in_bf16, in_fp8 = three(), three(fp8=["linear"])
    for only in PRODUCTS:
        mixed = three(fp8=["linear"], fp8_format={"products": [only]})
        for name, found, low, wide in zip(PRODUCTS, mixed, in_fp8, in_bf16, strict=True):
            assert not torch.equal(low, wide) and torch.equal(found, low if name == only else wide), (only, name)


def test_differentiated_twice_is_an_error():
    model, x = small()
    with hmpx.convert(fp8=["linear"]):
        gradient = torch.autograd.grad(model(x).float().sum(), model[0].weight, create_graph=True)[0]
        with pytest.raises(RuntimeError, match="differentiate twice"):
            gradient.sum().backward()


# ---------------------------------------------------------------------------------------------------------------------
# What is seen


FIGURES = ("largest", "elements", "underflowed", "saturated")


def test_record_counts_what_fp8_does_not_hold(tmp_path):
    x = torch.zeros(16, 32)
    x[:, 0], x[0, 1], x[1, :3] = 100.0, 1e-4, 470.0  # 1e-4 is beneath half of the least number; 470 saturates by floor
    model = nn.Sequential(nn.Linear(32, 32, bias=False), nn.Linear(32, 10))
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(32))
    for form, inputs in (
        ("tensorwise", [470.0, 1024.0, 2.0, 0.0, 2.0, 0.0, 0.0]),
        ("mx-floor", [470.0, 1024.0, 2.0, 6.0, 32.0, 0.0, 2.0]),
    ):
        with hmpx.convert(fp8=["linear"], fp8_format=form), hmpx.record() as log:
            for _ in range(2):
                model[0](x).backward(torch.full((16, 32), 3.0, dtype=torch.bfloat16))
            model[1](x)
        first, last = (site for site in log.sites if site.op == "linear")
        assert first.rule == "fp8" and "fp8: listed at" in first.reason
        assert list(first.fp8["inputs"].values()) == inputs
        assert [first.fp8["weights"][key] for key in FIGURES] == [1.0, 2048.0, 0.0, 0.0]
        assert first.fp8["gradients"]["largest"] == 3.0 and first.fp8["gradients"]["elements"] == 1024.0
        reason = f"32 x 10 are no multiples of {32 if form == 'mx-floor' else 16}, which hardware wants"
        assert (last.fp8, last.in_low) == ({}, {reason: 1})
        assert f"{reason} (once)" in str(log) and "inputs up to 4.7e+02, 0.2 % underflowed" in str(log)
        log.json(tmp_path / "log.json")
        assert hmpx.Log.load(tmp_path / "log.json").sites == log.sites
    assert not first.in_low


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(3)).requires_grad_(False)

    def forward(self, *sizes):
        for block, size in zip(self.blocks, sizes, strict=True):
            block(torch.full((16, 32), size))


def test_the_largest_number_of_a_site_is_that_of_all_its_calls_and_of_equal_blocks():
    """It came neither first nor last; of elements, the sum is told."""
    with hmpx.convert(fp8=["linear"]), hmpx.record() as log:
        model = Blocks()
        for sizes in ((3.0, 5.0, 2.0), (20.0, 400.0, 8.0), (1.0, 7.0, 6.0)):
            model(*sizes)
    figures = [site.fp8["inputs"] for site in log.sites if site.op == "linear"]
    assert [(each["largest"], each["elements"]) for each in figures] == [(20, 1536), (400, 1536), (8, 1536)]
    assert "inputs up to 4e+02" in str(log) and "blocks.*" in str(log)


# ---------------------------------------------------------------------------------------------------------------------
# On several ranks


def _on_ranks(rank: int) -> list[list]:
    """The gradients of a rank's half of the batch, summed up over ranks: replicated, sharded, and without either."""
    (model, x), (sharded, _) = small(), small()
    half = x.chunk(2)[rank]
    with hmpx.convert(fp8=["linear"], fp8_format="mx"):
        own = trained(model, model, half)
        for gradient in own:
            dist.all_reduce(gradient)
        replicated = trained(model, nn.parallel.DistributedDataParallel(model), half)
        fully_shard(sharded[0])
        fully_shard(sharded)
        whole = [gradient.full_tensor() for gradient in trained(sharded, sharded, half)]
    return [[each.tolist() for each in found] for found in (replicated, whole, [gradient / 2 for gradient in own])]


def test_replicated_and_sharded_models_have_the_gradients_of_their_parts():
    for replicated, sharded, wanted in ranks.run(2, _on_ranks):
        assert replicated == wanted and sharded == wanted
