"""`torch.autocast` regions in compiled, exported and traced code where op lists cast; the oracle is the eager model."""

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import hmpx
from tests.support.compiling import nothing_compiled  # noqa: F401
from tests.support.islands import BODIES, LISTS, Net, X, decorated, off
from tests.support.same import same
from tests.support.spanning import spanning

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
WHERE = pytest.mark.parametrize("where", ["model", "everywhere"])
COMPILED = ["a block", "a decorator", "nested", "a question first"]

pytestmark = pytest.mark.filterwarnings("ignore")


PAIRS = [("eager", "everywhere"), ("aot_eager", "model"), ("aot_eager", "everywhere"), ("eager", "model")]


@pytest.mark.parametrize(
    ("name", "pair"),
    [
        *spanning(COMPILED, PAIRS),
        *(
            pytest.param(name, ("inductor", where), marks=pytest.mark.slow)
            for name in COMPILED
            for where in ("model", "everywhere")
        ),
    ],
)
def test_whole_graphs_have_the_dtypes_and_bits_of_eager(name, pair):
    backend, where = pair
    net = Net(BODIES[name])
    compiled = torch.compile(net, backend=backend, fullgraph=True)
    with hmpx.convert(where=where, **LISTS):
        expected = net(X)
        for _ in range(2):
            found = compiled(X)
            assert [each.dtype for each in found] == [each.dtype for each in expected]
            assert backend == "inductor" or same(found, expected)
        sum(each.float().sum() for each in found).backward()
        with hmpx.disable_casts():
            assert same(compiled(X), net(X))
    assert same(compiled(X), net(X))


def in_region(region, function):
    def step(x):
        with region():
            return function(x)

    return step


def opened():
    return torch.autocast("cpu", dtype=BF16)


def several(net):
    """The script's own products beside those of a model."""
    return lambda x: (torch.mm(x, x), x @ x, *net(x), torch.mm(x, x), *net(x), x @ x)


SCRIPTS = {
    "a model": (off, lambda net: net),
    "a model in a model": (off, lambda net: Net(lambda _, x: net(x))),
    "a model and the script's own products": (off, several),
    "the script's own products": (off, lambda net: lambda x: (torch.mm(x, x), x @ x)),
    "with other weights": (off, lambda net: lambda x: torch.func.functional_call(net, {"w": x}, (x,))),
    "computed again": (off, lambda net: lambda x: checkpoint(net, x, use_reentrant=False)),
    "enabled": (opened, lambda net: net),
    "disabled in it": (opened, lambda net: in_region(off, net)),
    "a region of hmpx": (hmpx.disable_casts, lambda net: in_region(off, net)),
}


@pytest.mark.parametrize(("name", "where"), spanning(SCRIPTS, ["model", "everywhere"]))
def test_a_compiled_step_with_the_scripts_own_region_has_the_bits_of_eager(name, where):
    """Around a model, ``torch.autocast(enabled=False)`` is the switch of a script, and the model is cast."""
    region, build = SCRIPTS[name]
    step = in_region(region, build(Net(lambda net, x: (x @ net.w, torch.mm(x, net.w)))))
    with hmpx.convert(where=where, **LISTS):
        expected = step(X)
        found = torch.compile(step, backend="aot_eager", fullgraph=True)(X)
        assert [each.dtype for each in found] == [each.dtype for each in expected] and same(found, expected)
        assert (torch.mm(X, X).dtype is BF16) == (where == "everywhere")


def test_a_graph_is_made_anew_where_answers_and_regions_around_it_differ():
    """Two graphs a conversion: on the island and off it, however often they are called."""
    count = torch._dynamo.testing.CompileCounterWithBackend("eager")
    net = Net(lambda net, x: (x @ net.w, x.to(torch.get_autocast_dtype("cpu"))))
    compiled = torch.compile(net, backend=count, fullgraph=True)

    def body(_, x):
        outside = compiled(x)
        with off():
            return *outside, compiled(x)[0]

    outer = Net(body)
    for where, low in (("model", BF16), ("everywhere", FP16)):
        with hmpx.convert(where=where, low_precision=low, **LISTS):
            for _ in range(3):
                assert [each.dtype for each in outer(X)] == [low, low, FP32]
    assert count.frame_count == 4


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_region_around_a_graph_break_holds_on_both_sides(backend):
    def body(net, x):
        with off():
            before = torch.mm(x, net.w)
            torch._dynamo.graph_break()
            after = torch.mm(x, net.w), x @ net.w
        return before, *after, torch.mm(x, net.w)

    net = Net(body)
    compiled = torch.compile(net, backend=backend)
    with hmpx.convert(**LISTS):
        for _ in range(2):
            assert same(compiled(X), net(X))
        assert (X @ X).dtype is BF16


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_body_has_its_islands(reentrant):
    def part(x, w):
        with off():
            inside = x @ w
        return inside + torch.mm(x, w).float()

    net, found = Net(lambda net, x: checkpoint(part, x, net.w, use_reentrant=reentrant).square().sum()), []
    with hmpx.convert(where="model", **LISTS):
        for run in (net, torch.compile(net, backend="aot_eager", fullgraph=True)):
            x = X.clone().requires_grad_()
            run(x).backward()
            found.append((x.grad, net.w.grad))
            net.w.grad = None
    assert same(*found)


def test_mixed_dtypes_are_computed_in_the_widest():
    def body(net, x):
        with off():
            x = x.float()
            return torch.mm(x, net.w), F.linear(x, net.w), x @ net.w, F.layer_norm(x, (4,), net.w[0])

    net = Net(body).bfloat16()
    with hmpx.convert(where="model", **LISTS):
        found = torch.compile(net, backend="aot_eager", fullgraph=True)(X)
    assert same(found, net.float()(X))


class Custom(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=FP32)
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, gradient):
        x, w = ctx.saved_tensors
        return gradient @ w.t(), x.t() @ gradient


def test_custom_fwd_computes_in_fp32_forward_and_backward():
    net, found = Net(lambda net, x: Custom.apply(x.bfloat16(), net.w)), []
    with hmpx.convert(where="model", **LISTS):
        for run in (net, torch.compile(net, backend="aot_eager")):
            x = X.clone().requires_grad_()
            y = run(x)
            y.square().sum().backward()
            found.append((y, x.grad, net.w.grad))
            net.w.grad = None
    assert y.dtype is FP32 and same(*found)


class Angles(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("inv_freq", 1 / 10000 ** (torch.arange(0, 8, 2) / 8))
        self.linear = nn.Linear(4, 4)

    def forward(self, positions):
        with off():
            angles = (self.inv_freq[None, :, None] @ positions[:, None, :].float()).transpose(1, 2)
        return angles, self.linear(angles.cos())


PROGRAMS = {
    "export, strict": lambda model, *inputs: torch.export.export(model, inputs, strict=True).module(),
    "export": lambda model, *inputs: torch.export.export(model, inputs, strict=False).module(),
    "trace": torch.jit.trace,
}


@pytest.mark.parametrize("way", PROGRAMS)
def test_exported_and_traced_programs_keep_their_islands(way):
    model, positions = Angles(), torch.arange(300)[None]
    exact = model(positions)[0]
    with hmpx.convert(where="model", **LISTS):
        expected, program = model(positions), PROGRAMS[way](model, positions)
    assert torch.equal(expected[0], exact) and expected[1].dtype is BF16
    assert same(program(positions), expected)


@WHERE
def test_the_modules_in_a_scripts_own_region_are_cast_in_one_graph_with_it(where):
    net = Net(lambda net, x: net.linear(x))

    def step(x, enabled):
        with torch.autocast("cpu", dtype=BF16, enabled=enabled):
            return net(x)

    def inside(x):
        with torch.autocast("cpu", dtype=BF16):
            y = net(x)
            with off():
                return y, y.float() @ y.float().t()

    @torch.compile(backend="eager", fullgraph=True)
    def angles(x):
        with off():
            return x @ x

    with hmpx.convert(where=where, **LISTS):
        for enabled in (True, False):
            assert torch.compile(step, backend="eager", fullgraph=True)(X, enabled).dtype is BF16
        assert [each.dtype for each in torch.compile(inside, backend="eager", fullgraph=True)(X)] == [BF16, FP32]
        assert Net(lambda net, x: angles(x))(X).dtype is FP32, "in a forward that is not compiled"


def test_a_rule_of_the_module_beats_its_island_in_compiled_code_too():
    def body(net, x):
        with off():
            return torch.mm(x, net.w), decorated(x, net.w), net.linear(x)

    net = Net(body)
    for module, low in ((net, [BF16, BF16, BF16]), (net.linear, [FP32, FP32, BF16])):
        rule = hmpx.policy_for(module, bf16=["linear", "mm"])
        with hmpx.convert(where="model", **LISTS):
            expected, found = net(X), torch.compile(net, backend="eager", fullgraph=True)(X)
        assert [each.dtype for each in expected] == low and same(found, expected)
        rule.remove()
