"""`torch.autocast` regions and questions where op lists cast; the oracle is torch.autocast, FP32, or eager code."""

import asyncio
import contextlib
import functools
import logging
import threading

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from torch import nn

import hmpx
from hmpx.base import process_state
from tests.support import python
from tests.support.autocast_lists import AUTOCAST_LISTS
from tests.support.compiling import nothing_compiled  # noqa: F401
from tests.support.islands import LISTS, Net, X, decorated, off
from tests.support.old_llama import old_llama
from tests.support.same import same

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
WHERE = pytest.mark.parametrize("where", ["model", "everywhere"])

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("recipe", ["autocast-cpu", "bf16-sr", "hmp-o2"])
def test_a_llama_in_the_old_style_is_as_near_to_fp32_as_under_autocast(recipe):
    """Angles of the positions above 256 are whole radians off where they are rounded to BF16."""
    model, ids = old_llama()
    with torch.no_grad():
        exact = model(ids)
        with torch.autocast("cpu", dtype=BF16, cache_enabled=False):
            autocasts = model(ids)
        with hmpx.activate(recipe):
            found = model(ids)
        if recipe == "autocast-cpu":
            with hmpx.convert(**AUTOCAST_LISTS, where="model", kernels="native"):
                assert same([model(ids)], [autocasts])
    off_by, usual = ((each.float() - exact).norm() / exact.norm() for each in (found, autocasts))
    assert off_by < 2 * usual < 0.05


@WHERE
def test_arithmetic_in_fp32_beside_weights_in_bf16_is_computed_in_the_widest(where):
    """torch refuses these mixtures; the oracle has the weights in FP32."""
    x = X.bfloat16().float()

    def body(net, x):
        w = net.w
        with off():
            return (
                *(net.linear(x), F.linear(x, w), x @ w, torch.einsum("ij,jk->ik", x, w), torch.addmm(w[0], x, w)),
                *(F.layer_norm(x, (4,), w[0]), torch.mm(x, mat2=w), x.clone().addmm_(x, w.to(x.dtype))),
            )

    net = Net(body).bfloat16()
    with hmpx.convert(where=where, **LISTS):
        found = net(x)
        assert same(torch.compile(net, backend="aot_eager", fullgraph=True)(x), found)
        assert net.w.dtype is BF16 and Net(lambda net, x: decorated(x, net.w)).bfloat16()(x.bfloat16()).dtype is BF16
    assert same(found, net.float()(x))


class Trainer(nn.Module):
    """A module that trains another one, as those of ultralytics and Lightning do."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def fit(self):
        def step():
            with off():
                return self.inner(X)

        return step()

    def training_step(self):
        with off():
            return self.inner(X)

    def in_a_region(self):
        with hmpx.enable_casts():
            return self.fit()


@WHERE
def test_a_region_is_a_models_where_it_opens_inside_of_a_forward(where, caplog):
    """And not where some method of a module is among the callers; a method that opens one itself is told so."""

    class Decorated(Net):
        @torch.autocast("cpu", enabled=False)
        def forward(self, x):
            return self.linear(x)

    plain, hooked = Trainer(Net(lambda net, x: net.linear(x))), Net(lambda net, x: x)
    hooked.register_forward_hook(lambda module, inputs, result: Trainer(module.linear).training_step())
    protected = Trainer(Net(lambda net, x: Trainer(net.linear).training_step()))
    cases = [(plain, name, BF16) for name in ("fit", "training_step", "in_a_region")]
    cases += [(protected, name, FP32) for name in ("fit", "training_step")]
    cases += [(Trainer(each), "fit", FP32) for each in (Decorated(None), hooked)]
    with hmpx.convert(where=where, **LISTS):
        for trainer, method, dtype in cases:
            caplog.clear()
            assert getattr(trainer, method)().dtype is dtype, method
            assert caplog.text.count("Trainer.training_step, which is no forward") == (method == "training_step")
            process_state.logged_once.clear()


@WHERE
def test_what_is_asked_is_answered_for_the_lists(where):
    def body(net, x):
        found = [torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled(), torch.is_autocast_cpu_enabled()]
        with off():
            found.append(torch.is_autocast_enabled("cpu"))
        with hmpx.disable_casts():
            found.append(torch.is_autocast_enabled("cpu"))
        with hmpx.casts(FP32):
            found.append(torch.is_autocast_enabled("cpu"))
        dtypes = torch.get_autocast_dtype("cuda"), torch.get_autocast_dtype("cpu"), torch.get_autocast_gpu_dtype()
        return found, {*dtypes}

    for low in (BF16, FP16):
        with hmpx.convert(where=where, low_precision=low):
            assert Net(body)(X) == ([True, True, True, False, False, False], {low})
            with pytest.raises(RuntimeError):
                torch.is_autocast_enabled("nonsense")
    with hmpx.convert(where="model"):
        assert not torch.is_autocast_enabled("cpu")
    assert not Net(lambda net, x: torch.is_autocast_enabled("cpu"))(X) and torch.get_autocast_dtype("cuda") is FP16


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx, gradient):
        x, w = ctx.saved_tensors
        return gradient @ w.t(), x.t() @ gradient


def custom(cast_inputs):
    forward = torch.amp.custom_fwd(Product.forward, device_type="cpu", cast_inputs=cast_inputs)
    backward = torch.amp.custom_bwd(Product.backward, device_type="cpu")
    return type("Custom", (Product,), {"forward": staticmethod(forward), "backward": staticmethod(backward)})


@WHERE
@pytest.mark.parametrize("cast_inputs", [None, FP32, BF16])
def test_custom_fwd_and_custom_bwd_are_those_of_autocast(cast_inputs, where):
    function = custom(cast_inputs)

    def results(x, around, run=lambda net: net):
        net = Net(lambda net, x: function.apply(x, net.w if cast_inputs else net.w.to(x.dtype)))
        x = x.clone().requires_grad_()
        with around:
            y = run(net)(x)
        y.float().square().sum().backward()
        return y, x.grad, net.w.grad

    for x in (X, X.bfloat16()):
        expected = results(x, torch.autocast("cpu", BF16, cache_enabled=False))
        assert same(results(x, hmpx.convert(where=where, **LISTS)), expected), x.dtype
    if (where, cast_inputs) == ("model", FP32):
        compiled = functools.partial(torch.compile, backend="aot_eager")
        assert same(results(x, hmpx.convert(where=where, **LISTS), compiled), expected)


@WHERE
def test_tasks_and_replicas_are_answered_for_regions_of_their_own(where):
    class Replicated(nn.Module):
        """As DataParallel does it: asked here, entered in threads that know nothing of here."""

        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            asking = {"torch": torch, "__name__": "torch.nn.parallel.parallel_apply"}
            enabled, dtypes = eval("torch.is_autocast_enabled()", asking), []

            def work():
                with torch.amp.autocast("cuda", enabled=enabled):
                    dtypes.append(self.linear(x).dtype)

            run = threading.Thread(target=work)
            run.start()
            run.join()
            return dtypes

    async def tasks():
        async def one(region):
            with region:
                await asyncio.sleep(0)
                return torch.is_autocast_enabled("cpu")

        return await asyncio.gather(one(off()), one(torch.autocast("cpu")))

    with hmpx.convert(where=where, **LISTS):
        assert Replicated()(X) == [BF16] and asyncio.run(tasks()) == [False, True]


@pytest.mark.parametrize("enabled", [True, False])
def test_a_conversion_may_end_and_begin_inside_of_a_region(enabled):
    with torch.autocast("cpu", BF16, enabled=enabled):
        with hmpx.convert(**LISTS):
            assert Net(lambda net, x: net.linear(x))(X).dtype is BF16
        assert torch.is_autocast_enabled("cpu") is enabled
    handle = hmpx.convert(**LISTS)
    with torch.autocast("cpu", BF16, enabled=enabled):
        handle.restore()
        assert not torch.is_autocast_enabled("cpu")
    assert not torch.is_autocast_enabled("cpu")


class Rotary(nn.Module):
    def forward(self, x):
        with off():
            return (x @ x).dtype


@hmpx.bf16
def product(x):
    return x.dtype


def enabled_inside(net, x):
    with off(), hmpx.enable_casts():
        return (x @ x).dtype


def casts_inside(net, x):
    with off(), hmpx.casts(bf16=["mm"]):
        return torch.mm(x, x).dtype


def decorated_inside(net, x):
    with off():
        return product(x)


def test_who_beats_an_island_is_said_in_one_line(caplog):
    """A rule that names the module and ops for low precision; a region or a function inside of the island."""
    caplog.set_level(logging.INFO, "hmpx")
    rotary = Rotary()
    cases = {
        "enable_casts()": (Net(enabled_inside), None, BF16),
        "casts()": (Net(casts_inside), None, BF16),
        "@hmpx.bf16 of product": (Net(decorated_inside), None, BF16),
        "the rule for this Rotary": (rotary, {"bf16": ["matmul"]}, BF16),
        "": (Rotary(), {"fp32": ["softmax"]}, FP32),
    }
    for name, (module, rule, dtype) in cases.items():
        handle = rule and hmpx.policy_for(module, rule)
        caplog.clear()
        with hmpx.convert(where="model", **LISTS):
            assert {module(X), module(X)} == {dtype}, name
        told = [said for said in caplog.messages if "casts inside torch.autocast(enabled=False)" in said]
        assert len(told) == bool(name) and all("test_islands.py:" in said and name in said for said in told), name
        if handle:
            handle.remove()


def test_regions_of_a_script_are_told_once(caplog):
    """The lists cast in them; at WARNING where they ask for another dtype, and where autocast is on by hand."""
    caplog.set_level(logging.INFO, "hmpx")
    net = Net(lambda net, x: net.linear(x).dtype)

    def told(around, **lists):
        caplog.clear()
        with hmpx.convert(**{**LISTS, **lists}):
            for _ in range(2):
                with around():
                    found = net(X)
        return found, [(each.levelname, each.getMessage()) for each in caplog.records if "autocast" in each.message]

    @contextlib.contextmanager
    def by_hand():
        torch.set_autocast_enabled("cpu", True)
        try:
            yield
        finally:
            torch.set_autocast_enabled("cpu", False)

    fp16, linear_in_fp32 = {"low_precision": FP16}, {"bf16": [], "fp32": ["linear"]}
    cases = {
        "in this torch.autocast the op lists cast;": (lambda: torch.autocast("cpu"), {}, BF16, "INFO"),
        "the op lists cast; torch's own": (lambda: torch.autocast("hpu", BF16), {}, BF16, "INFO"),
        "to bfloat16 and not to float16": (lambda: torch.autocast("cpu", FP16), {}, BF16, "WARNING"),
        "to float16 and not to bfloat16": (lambda: torch.autocast("cpu", BF16), fp16, FP16, "WARNING"),
        "torch's own lists do nothing": (lambda: torch.autocast("cpu"), linear_in_fp32, FP32, "INFO"),
        "torch.set_autocast_enabled(True) changes nothing here": (by_hand, {}, BF16, "INFO"),
        "by torch.set_autocast_enabled or around": (by_hand, {"where": "model"}, BF16, "WARNING"),
    }
    for words, (around, lists, dtype, level) in cases.items():
        found, said = told(around, **lists)
        assert found is dtype and len(said) == 1 and said[0][0] == level and words in said[0][1], (words, said)
        assert "test_islands.py:" in said[0][1], words


@pytest.mark.parametrize("where", ["model", "everywhere"])
def test_what_a_model_has_asked_and_writes_back_changes_nothing_in_torch(where):
    """A layer saves whether autocast is on, and in which dtype, sets it off, and writes back what it was told."""

    def forward(net, x):
        before = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cuda")
        torch.set_autocast_enabled("cpu", False)
        torch.set_autocast_enabled(device_type="cpu", enabled=before[0])
        torch.set_autocast_dtype("cuda", before[1])
        torch.set_autocast_gpu_dtype(before[1])
        return (*before, net.linear(x).dtype)

    def of_torch():
        return torch._C.is_autocast_enabled("cpu"), torch._C.get_autocast_dtype("cuda")

    before = of_torch()
    with hmpx.convert(where=where, **LISTS):
        assert Net(forward)(X) == (True, BF16, BF16) and of_torch() == before
    assert of_torch() == before == (False, FP16)


def test_torchs_own_autocast_is_noticed_on_devices_that_torch_does_not_ship():
    """A device that a package has registered, and those that torch names."""
    program = """
import logging, torch
logging.basicConfig(format="%(message)s", level=logging.WARNING)
torch.utils.rename_privateuse1_backend("mine")
import hmpx
for device in ("mine", "hpu", "xla"):
    torch.set_autocast_enabled(device, True)
    with hmpx.convert(bf16=["linear"]):
        torch.set_autocast_enabled(device, False)
"""
    said = python.run("-c", program, check=True)
    assert said.stderr.count("torch's own autocast is on") == 3, said.stderr


def test_autocast_that_a_model_sets_off_by_hand_is_told(caplog):
    def forward(net, x):
        torch.set_autocast_enabled("cpu", False)
        return net.linear(x).dtype

    for lists, dtype in (({"bf16": ["linear"], "fp32": []}, BF16), ({"bf16": [], "fp32": []}, FP32)):
        caplog.clear()
        with hmpx.convert(where="model", **{**LISTS, **lists}):
            torch.set_autocast_enabled("cpu", False)  # in no model
            assert {Net(forward)(X), Net(forward)(X)} == {dtype}
        assert [said.count("does not turn the op lists off") for said in caplog.messages] == [1] * (dtype is BF16)


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
