"""On a real XLA device: casts, the bits of stochastic rounding, masters, the map of dtypes, one graph a step.

Run by the command in the README's developer part, in an environment of its own: PJRT_DEVICE=CPU, lazy tensors.
"""

import os
import subprocess
import sys
from collections import OrderedDict

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

import hmpx
from hmpx.ops.policies.lists import shipped
from hmpx.recipes.reading import read_recipe, recipe_names

torch_xla = pytest.importorskip("torch_xla", reason="torch_xla is not installed")
metrics = pytest.importorskip("torch_xla.debug.metrics")
pytestmark = [pytest.mark.xla, pytest.mark.skipif("PJRT_DEVICE" not in os.environ, reason="PJRT_DEVICE is not set")]
BF16, FP32 = torch.bfloat16, torch.float32
needs_grad_dtype = "nxd-standard"  # its gradients accumulate in FP32, which torch has since 2.11


@pytest.fixture
def xla():
    return torch_xla.device()


def compiled():
    found = metrics.metric_data("CompileTime")
    return found[0] if found else 0


def fallbacks():
    """Ops that XLA does not have, and that ran on the host in the middle of a graph."""
    return {name for name in metrics.counter_names() if name.startswith("aten::")}


def same_bits(a, b):
    return torch.equal(a.detach().cpu().view(torch.int16), b.detach().cpu().view(torch.int16))


def _numbers(count):
    x = torch.randn(count) * torch.randn(count).exp()
    special = [float("inf"), -float("inf"), 3.39e38, -3.4e38, 0.0, -0.0, 1.0]
    x[: len(special)] = torch.tensor(special)[:count]
    if count > 20:
        x.view(torch.int32)[9:12] = torch.tensor([0x7F800001, -1, 0x7FC01234], dtype=torch.int32)  # NaNs
    return x


@pytest.mark.parametrize("count, offset", [(1, 0), (7, 3), (1000, 0), (100_003, 5), (100_003, 2**32 - 50_000)])
def test_rounding_has_the_bits_of_the_cpu(count, offset, xla):
    x = _numbers(count)
    here = hmpx.stochastic_round(x, seed=3, step=7, name="w", offset=offset)
    before = fallbacks()
    there = hmpx.stochastic_round(x.to(xla), seed=3, step=7, name="w", offset=offset)
    assert there.device.type == "xla" and fallbacks() == before
    assert torch.equal(there.cpu().isnan(), x.isnan()) and same_bits(here[~x.isnan()], there.cpu()[~x.isnan()])


SGD, MOMENTUM = (optim.SGD, {"lr": 2**-6}), (optim.SGD, {"lr": 2**-6, "momentum": 0.5})


@pytest.mark.parametrize("make, options", [SGD, MOMENTUM], ids=["SGD", "momentum"])
@pytest.mark.parametrize("weights", ["stochastic", "nearest", "master", "split"])
def test_steps_on_given_gradients_have_the_bits_of_the_cpu(weights, make, options, xla):
    """Products with powers of two are exact, so that the order of operations, XLA's own, does not show."""
    results = []
    for device in ("cpu", xla):
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(shape).bfloat16().to(device)) for shape in ((33, 7), (501,), ())]
        optimizer = make(params, **options)
        hmpx.attach(optimizer, weights, names=["a", "b", "c"])
        for step in range(5):
            generator = torch.Generator().manual_seed(step)
            for p in params:
                p.grad = torch.randn(p.shape, generator=generator).bfloat16().to(device)
            optimizer.step()
            torch_xla.sync()
        results.append(params)
    assert all(same_bits(p, q) for p, q in zip(*results, strict=True))


def test_masters_in_a_checkpoint(xla):
    p = nn.Parameter(torch.ones(64, dtype=BF16, device=xla))
    optimizer = optim.SGD([p], lr=2**-10)
    hmpx.attach(optimizer, "split", use_master_weights_in_ckpt=True)
    for _ in range(3):
        p.grad = torch.ones_like(p)
        optimizer.step()
        torch_xla.sync()
    masters = optimizer.state_dict()["state"][0]["hmpx_master"].cpu()
    assert torch.equal(masters, torch.full((64,), 1 - 3 * 2**-10))


def net():
    """`fp32-head` asks for a head."""
    torch.manual_seed(1)
    layers = {"first": nn.Linear(8, 32), "tanh": nn.Tanh(), "norm": nn.LayerNorm(32), "hidden": nn.Linear(32, 32)}
    return nn.Sequential(OrderedDict(layers, gelu=nn.GELU(), head=nn.Linear(32, 4)))


def _loop(model, optimizer, device, steps):
    counts, losses = [], []
    generator = torch.Generator().manual_seed(2)
    for _ in range(steps):
        x = torch.randn(16, 8, generator=generator).to(device)
        y = torch.randint(4, (16,), generator=generator).to(device)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        torch_xla.sync()
        counts.append(compiled())
        losses.append(loss)
    return counts, losses


RELEASING = "lean", "lean8", "lean4"
OF_BLOCKS = "torchao-nvfp4"  # for models that have some


@pytest.mark.parametrize(
    "recipe", [name for name in recipe_names() if name not in (*RELEASING, OF_BLOCKS, needs_grad_dtype)]
)
def test_a_step_is_one_graph_and_every_step_the_same(recipe, xla):
    """The first step has no state yet, the second is the graph of all that follow: two graphs at most, no fallback."""
    with hmpx.activate(recipe):
        model = net().to(xla)
        optimizer = optim.AdamW(model.parameters(), lr=1e-3)
        torch_xla.sync()
        before, known = compiled(), fallbacks()
        counts, losses = _loop(model, optimizer, xla, 6)
        assert counts[0] - before <= 1 and counts[1] - counts[0] <= 1 and len(set(counts[1:])) == 1
        assert fallbacks() == known
        narrow = read_recipe(recipe).parameter_dtype == "bfloat16"
        assert {p.dtype for p in model.parameters()} == {BF16 if narrow else FP32}
    with hmpx.activate(recipe):
        model = net()
        _, on_cpu = _loop(model, optim.AdamW(model.parameters(), lr=1e-3), "cpu", 6)
    assert all(abs(a.item() - b.item()) < 0.02 for a, b in zip(losses, on_cpu, strict=True))


@pytest.mark.parametrize("recipe", RELEASING)
def test_released_gradients(recipe, xla):
    results = []
    for each in (recipe, {"extends": recipe, "release_gradients": False}):
        with hmpx.activate(each):
            model = net().to(xla)
            _loop(model, optim.AdamW(model.parameters(), lr=1e-3), xla, 4)
        results.append(list(model.parameters()))
    assert all(same_bits(p, q) for p, q in zip(*results, strict=True))


@pytest.mark.skipif(hasattr(torch.Tensor, "grad_dtype"), reason="this torch has grad_dtype")
def test_nxd_standard_says_what_it_needs(xla):
    model = net().to(xla)
    with pytest.raises(hmpx.HmpxError, match=r"use_fp32_grad_acc needs torch 2\.11"):
        hmpx.prepare(model, optim.AdamW(model.parameters()), "nxd-standard")
    assert {p.dtype for p in model.parameters()} == {FP32}


def _calls(device):
    """Listed ops of torch.autocast("xla"), called from Python."""
    a, v = torch.rand(4, 4, device=device) + 0.1, torch.rand(4, device=device)
    image = torch.rand(1, 4, 8, 8, device=device)
    target = torch.tensor([0, 1, 2, 3], device=device)
    line, volume = torch.rand(1, 4, 8, device=device), torch.rand(1, 4, 4, 4, 4, device=device)
    kernel = {n: torch.rand(4, 4, *(3,) * n, device=device) for n in (1, 2, 3)}
    spd = torch.eye(4, device=device) * 2
    return {
        "conv1d": (F.conv1d, line, kernel[1]), "conv2d": (F.conv2d, image, kernel[2]),
        "conv3d": (F.conv3d, volume, kernel[3]), "conv_transpose1d": (F.conv_transpose1d, line, kernel[1]),
        "conv_transpose2d": (F.conv_transpose2d, image, kernel[2]),
        "conv_transpose3d": (F.conv_transpose3d, volume, kernel[3]), "bmm": (torch.bmm, a[None], a[None]),
        "mm": (torch.mm, a, a), "baddbmm": (torch.baddbmm, a[None], a[None], a[None]),
        "addmm": (torch.addmm, a, a, a), "addbmm": (torch.addbmm, a, a[None], a[None]), "linear": (F.linear, a, a),
        "matmul": (torch.matmul, a, v), "@": (lambda x, y: x @ y, a, a), "prelu": (F.prelu, a, v),
        "relu": (torch.relu, a), "max_pool2d": (F.max_pool2d, image, 2), "einsum": (torch.einsum, "ij,jk", a, a),
        "batch_norm": (F.batch_norm, a, v, v), "softmax": (F.softmax, a, -1), "log_softmax": (F.log_softmax, a, -1),
        "binary_cross_entropy": (F.binary_cross_entropy, a.clamp(0, 1), a.clamp(0, 1)), "pow": (torch.pow, a, 2.0),
        "square": (torch.square, a), "prod": (torch.prod, a), "cdist": (torch.cdist, a, a), "trace": (torch.trace, a),
        "cholesky": (torch.linalg.cholesky, spd), "inverse": (torch.inverse, spd),
        "reflection_pad1d": (torch._C._nn.reflection_pad1d, line, (1, 1)), "mse_loss": (F.mse_loss, a, a),
        "cosine_embedding_loss": (F.cosine_embedding_loss, a, a, torch.ones(4, device=device)),
        "nll_loss": (F.nll_loss, a, target), "hinge_embedding_loss": (F.hinge_embedding_loss, a, torch.ones_like(a)),
        "smooth_l1_loss": (F.smooth_l1_loss, a, a), "cross_entropy": (F.cross_entropy, a, target),
        "l1_loss": (F.l1_loss, a, a), "margin_ranking_loss": (F.margin_ranking_loss, v, v, torch.ones_like(v)),
        "soft_margin_loss": (F.soft_margin_loss, a, torch.ones_like(a)),
        "triplet_margin_loss": (F.triplet_margin_loss, a, a, a), "multi_margin_loss": (F.multi_margin_loss, a, target),
        "kl_div": (F.kl_div, a, a), "multilabel_margin_loss": (F.multilabel_margin_loss, a, target.expand(4, 4)),
        "binary_cross_entropy_with_logits": (F.binary_cross_entropy_with_logits, a, a),
        "svd": (torch.svd, a), "qr": (torch.qr, a), "cat": (torch.cat, [a, a]), "stack": (torch.stack, [a, a]),
        "index_copy": (torch.index_copy, a, 0, target, a),
        "exp": (torch.exp, a), "add": (torch.add, a, a), "gelu": (F.gelu, a), "layer_norm": (F.layer_norm, a, (4,)),
    }  # fmt: skip


def _dtypes(calls, make):
    found = {}
    for name, (function, *args) in calls.items():
        try:
            out = function(*make(args))
            found[name] = (out[0] if isinstance(out, tuple) else out).dtype
        except (RuntimeError, hmpx.HmpxError) as error:
            found[name] = str(error).splitlines()[0]
    return found


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_autocast_xla_gives_the_dtypes_of_torch_autocast(dtype, xla):
    """Op by op, beside the real ``torch.autocast("xla")``, with inputs of either dtype."""

    def make(args):
        def cast(a):
            if isinstance(a, list):
                return [cast(item) for item in a]
            return a.to(dtype) if isinstance(a, torch.Tensor) and a.is_floating_point() else a

        return [cast(a) for a in args]

    with torch.autocast("xla", dtype=BF16):
        expected = _dtypes(_calls(xla), make)
    folder = shipped() / "autocast-xla"
    with hmpx.convert(**{f"{side}_file_path": folder / f"{side}.txt" for side in ("bf16", "fp32", "promote")}):
        got = _dtypes(_calls(xla), make)
    if dtype is BF16:  # hmpx refuses it, and autocast does not
        assert "binary_cross_entropy_with_logits" in got.pop("binary_cross_entropy")
        del expected["binary_cross_entropy"]
    assert got == expected
    assert sum(d in (FP32, BF16) for d in expected.values()) >= 45, expected


def test_the_map_of_dtypes(xla):
    with hmpx.activate("xla-downcast-bf16"):
        made = [torch.zeros(2, device=xla), torch.ones(2, dtype=FP32, device=xla)]
        made += [torch.rand(2).to(xla), torch.ones(2).to(xla).float()]
        assert {t.dtype for t in made} == {BF16} and torch.ones(2, device=xla).double().dtype is FP32
        model = net().to(xla)
        loss = model(torch.rand(2, 8, device=xla)).square().mean()
        loss.backward()
        assert {t.dtype for p in model.parameters() for t in (p, p.grad)} == {BF16} and loss.dtype is BF16
    assert torch.zeros(1, device=xla).dtype is FP32


def test_cached_weights_keep_nothing_here(xla):
    """Writes leave no trace that could be seen; the compiler knows which casts are one."""
    layer = nn.Linear(4, 4).to(xla)
    with torch.no_grad(), hmpx.convert(), hmpx.cached_weights() as cache:
        first = layer(torch.ones(1, 4, device=xla)).cpu()
        layer.weight.data.mul_(2)
        layer.bias.data.mul_(2)
        assert torch.equal(layer(torch.ones(1, 4, device=xla)).cpu(), 2 * first) and repr(cache).startswith(
            "<hmpx.cached_weights: 0 casts"
        )


SCRIPT = """
import torch, torch_xla
import torch.nn.functional as F
from torch import nn

device = torch_xla.device()
model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for _ in range(5):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(torch.randn(8, 8).to(device)), torch.randint(4, (8,)).to(device))
    loss.backward()
    optimizer.step()
    torch_xla.sync()
print(model[0].weight.dtype, loss.dtype, model[0].weight.device.type)
"""


@pytest.mark.parametrize(
    "arguments, environment, expected",
    [
        (["--recipe", "neuron-bf16-sr"], {}, "torch.bfloat16 torch.float32 xla\n"),
        ([], {"XLA_USE_BF16": "1"}, "torch.bfloat16 torch.bfloat16 xla\n"),
    ],
)
def test_run(arguments, environment, expected, tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-m", "hmpx", "run", *arguments, tmp_path / "train.py"],
        capture_output=True, text=True, check=True, env={**os.environ, **environment},
    )  # fmt: skip
    assert done.stdout == expected and "hmpx: " in done.stderr
