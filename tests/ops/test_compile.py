"""torch.compile under a conversion: whole graphs, the bits of eager, and nothing stale."""

import contextlib
import copy
import subprocess
import sys
import textwrap

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from torch import nn, optim

import hmpx
from hmpx.base import region_state
from hmpx.updates import step_hooks
from tests.support.compiling import nothing_compiled, recent  # noqa: F401
from tests.support.same import same

BF16, FP32 = torch.bfloat16, torch.float32


class Operators(nn.Module):
    def forward(self, x):
        y = x @ x.t()
        y = y + x
        y += x
        z = y.matmul(x) * torch.mm(x, y)
        return (F.softmax(z, -1) + z.softmax(-1) + torch.softmax(z, -1)).exp().sum(-1)


class Convolution(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(F.relu(self.norm(self.conv(x))).mean((2, 3)))


def encoder(train):
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).train(train)


MODELS = {
    "MLP": (lambda: nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 8)), (8, 8)),
    "operators": (Operators, (8, 8)),
    "convolution": (Convolution, (2, 3, 8, 8)),
    "convolution eval": (lambda: Convolution().eval(), (2, 3, 8, 8)),
    "encoder": (lambda: encoder(True), (2, 4, 8)),
    "encoder eval": (lambda: encoder(False), (2, 4, 8)),
}
QUICK = {"operators", "convolution", "encoder eval"}  # which have the ops of the others


def run(function, model, x):
    """Output, gradients and what the model has afterwards; the model itself stays as it was."""
    before = copy.deepcopy(model.state_dict())
    model.zero_grad()
    x = x.clone().requires_grad_()
    out = function(x)
    out.backward(torch.arange(out.numel()).reshape(out.shape).to(out.dtype))  # no op that a list may name
    found = [out.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]
    found += [b.clone() for b in model.buffers()]
    model.load_state_dict(before)
    return found


@pytest.mark.parametrize(
    ("name", "level"),
    [
        *(pytest.param(name, "O1", marks=() if name in QUICK else pytest.mark.slow) for name in MODELS),
        *(pytest.param(name, "O2", marks=pytest.mark.slow) for name in MODELS),
    ],
)
def test_one_graph_with_the_bits_of_eager(name, level):
    make, shape = MODELS[name]
    torch.manual_seed(0)
    model, x = make(), torch.randn(shape)
    plain = run(model, model, x)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for _ in range(2):  # a second conversion finds Dynamo's tables as the first left them
        with hmpx.convert(level):
            eager = run(model, model, x)
            assert same(run(compiled, model, x), eager) and not same(eager, plain)
        assert same(run(compiled, model, x), plain)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["MLP", "convolution", "encoder"])
def test_inductor_fuses_the_casts_and_keeps_the_dtypes(name):
    """It keeps fused intermediate results in FP32: the dtypes of eager, and errors that are no larger."""
    make, shape = MODELS[name]
    torch.manual_seed(0)
    model, x = make(), torch.randn(shape)
    plain = run(model, model, x)
    with hmpx.convert():
        eager = run(model, model, x)
        compiled = run(torch.compile(model, fullgraph=True), model, x)
    for exact, e, c in zip(plain, eager, compiled, strict=True):
        assert e.dtype is c.dtype
        assert (c.float() - exact).abs().max() <= 2 * (e.float() - exact).abs().max() + 1e-6


@pytest.mark.parametrize("is_placed", [False, True])
def test_torchs_own_decompositions_are_not_cast(is_placed, lists):
    """layer_norm, gelu and more are in no list; what torch spells them out in when it compiles is in one.

    is_placed: in another module these ops have other rules, so that each call asks where it is.
    """
    names = "add sub mul div exp rsqrt mean sum pow erf tanh amax where truediv iadd sqrt var var_mean reciprocal"
    model = nn.Sequential(nn.LayerNorm(8), nn.GELU(), nn.GroupNorm(2, 8), nn.Hardswish())
    x = torch.randn(4, 8)
    plain = run(torch.compile(model, fullgraph=True, backend="aot_eager_decomp_partition"), model, x)
    torch._dynamo.reset()
    elsewhere, other = contextlib.ExitStack(), nn.Identity()
    if is_placed:
        elsewhere.callback(hmpx.policy_for(other, fp32=names.split()).remove)
    with hmpx.convert(**lists(bf16=names)), elsewhere:
        assert (x.exp() * x).dtype is BF16
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager_decomp_partition")
        assert same(run(compiled, model, x), plain)


@pytest.mark.parametrize(
    ("how", "converted"),
    [("attached", False), *(pytest.param("region", converted, marks=recent) for converted in (True, False))],
)
def test_a_compiled_step_rounds_stochastically(how, converted):
    results = []
    if converted:
        hmpx.convert()
    for compile_it in (False, True):
        torch._dynamo.reset()
        p = nn.Parameter(torch.ones(300, dtype=BF16))
        optimizer = optim.AdamW([("w", p)], lr=1e-3)
        if how == "attached":
            hmpx.attach(optimizer)

        def step(optimizer=optimizer):
            if how == "attached":
                optimizer.step()
            else:
                with hmpx.disable_casts():
                    optimizer.step()

        function = torch.compile(step, backend="aot_eager") if compile_it else step
        for _ in range(3):
            p.grad = torch.ones_like(p)
            function()
        results.append(p.detach().clone())
        assert optimizer.param_groups[0]["hmpx_step"] == 3
    assert torch.equal(*results) and len(results[0].unique()) > 1
    assert not region_state.open_regions()  # Dynamo, which may trace a function in pieces, has kept out
    hmpx.restore()
    assert step_hooks._is_installed is (how == "attached")  # the watch that a compiled region leaves behind


class Descent(optim.Optimizer):
    """Its `step` has no graph break of torch's own, so that Dynamo traces it into the graph around it."""

    def __init__(self, params):
        super().__init__(params, {"lr": 2**-10})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"])


@recent
def test_a_step_that_dynamo_could_trace_is_kept_out_of_the_graph():
    p = nn.Parameter(torch.ones(300, dtype=BF16))
    optimizer = Descent([("w", p)])

    def step():
        with hmpx.disable_casts():
            optimizer.step()

    p.grad = torch.ones_like(p)
    torch.compile(step, backend="eager")()
    expected = hmpx.stochastic_round(torch.ones(300) - 2**-10, seed=0, step=0, name="w")
    hmpx.restore()
    assert torch.equal(p, expected) and len(p.unique()) == 2


@recent
@pytest.mark.parametrize("recipe", ["lean8", "bf16-sr"])
def test_a_compiled_function_may_hold_the_backward_and_the_step(recipe, caplog):
    """Dynamo leaves the graph for `backward()`, and would compile the hooks that this calls, once a parameter."""
    results = []
    for compile_it in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
        optimizer = optim.AdamW(model.parameters(), lr=1e-2)
        hmpx.prepare(model, optimizer, recipe)

        def train(x, model=model, optimizer=optimizer):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        train = torch.compile(train, backend="aot_eager") if compile_it else train
        for _ in range(3):
            train(torch.ones(2, 8))
        hmpx.restore(optimizer)
        results.append([p.detach().clone() for p in model.parameters()])
    assert same(*results)
    assert "recompile_limit" not in caplog.text


@pytest.mark.slow
def test_dynamo_may_be_loaded_before_or_after():
    for first in ("import torch._dynamo; hmpx.convert()", "hmpx.convert(); import torch._dynamo"):
        code = f"""
            import sys, torch, hmpx
            assert "torch._dynamo" not in sys.modules
            {first}
            linear, x = torch.nn.Linear(4, 4), torch.randn(4, 4)
            compiled = torch.compile(lambda x: linear(x) @ x, fullgraph=True, backend="aot_eager")
            assert torch.equal(compiled(x), linear(x) @ x) and compiled(x).dtype is torch.bfloat16
            hmpx.restore()
            assert torch.equal(compiled(x), linear(x) @ x) and compiled(x).dtype is torch.float32
            """
        subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=300)


def test_a_graph_holds_casts_and_torchs_own_ops_and_no_wrapper():
    linear, matmul, seen = F.linear, torch.matmul, []

    def backend(module, _):
        seen.extend(node.target for node in module.graph.nodes if node.op.startswith("call"))
        return module

    with hmpx.convert():
        assert F.linear is not linear
        torch.compile(lambda x: torch.matmul(F.linear(x, x), x), backend=backend)(torch.randn(4, 4))
    assert seen == ["bfloat16", "bfloat16", linear, "bfloat16", matmul]


@pytest.mark.parametrize("cls", [optim.LBFGS, optim.SparseAdam])
def test_classes_that_dynamo_wraps_are_still_watched(cls):
    """The first use of torch.compile replaces `step` of these two, of which instances exist by then."""

    def stepped():
        p = nn.Parameter(torch.ones(4, dtype=BF16))
        optimizer = cls([("p", p)])
        p.grad = torch.ones_like(p).to_sparse() if cls is optim.SparseAdam else torch.ones_like(p)
        with hmpx.disable_casts():
            optimizer.step(lambda: torch.tensor(0.0))
        return optimizer.param_groups[0].get("hmpx_step")

    assert stepped() == 1
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    assert hasattr(vars(cls)["step"], "_torchdynamo_orig_callable")
    assert stepped() == 1


def test_a_wrapper_behind_a_graph_break_is_no_graph_of_its_own():
    """As the C function that it stands for is none."""
    linear = nn.Linear(8, 8)
    graphs = torch._dynamo.testing.CompileCounter()
    with hmpx.convert():
        compiled = torch.compile(linear.__call__, backend=graphs)  # Dynamo does not look into nn.Module's own code
        assert compiled(torch.randn(4, 8)).dtype is compiled(torch.randn(4, 8, dtype=BF16)).dtype is BF16
    assert graphs.frame_count == 0


@pytest.mark.slow
def test_torchs_cache_on_disk_tells_conversions_apart(lists, tmp_path, monkeypatch):
    """A graph stands there under the names of its ops; what the lists make of `x @ y` is decided behind them."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    def model(x):
        return torch.relu(x @ x) * 3.0625

    def dtype():
        torch._dynamo.reset()
        return torch.compile(model)(torch.randn(4, 4)).dtype

    tag = torch.compiler.config.cache_key_tag
    for _ in range(2):
        assert dtype() is torch.float32
        with hmpx.convert(**lists(bf16="matmul")):
            assert dtype() is BF16
        with hmpx.convert(**lists()):
            assert dtype() is torch.float32
    assert torch.compiler.config.cache_key_tag == tag


@recent
def test_a_graph_that_fails_in_a_region_leaves_casts_on():
    def body(x, y):
        with hmpx.disable_casts():
            return torch.gather(x, 0, y)

    compiled, x = torch.compile(body, backend="eager"), torch.randn(4, 4)
    with hmpx.convert():
        for _ in range(2):
            compiled(x, torch.zeros(4, 4, dtype=torch.long))
            with pytest.raises(RuntimeError):
                compiled(x, torch.full((4, 4), 9))
            assert (x @ x).dtype is BF16 and torch.compile(torch.mm, backend="eager")(x, x).dtype is BF16
