"""`cached_weights`: the bits of plain casts, one cast a weight, and nothing stale however a weight is written to."""

import copy
import ctypes
import itertools
import logging
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import hmpx
from hmpx.ops.wrapping import weight_cache

BF16 = torch.bfloat16
DATA = torch._C.TensorBase.__dict__["data"]


@pytest.fixture
def model():
    return nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4)).requires_grad_(False)


@pytest.fixture
def x():
    return torch.randn(3, 8, dtype=BF16)


@pytest.fixture(autouse=True)
def converted():
    hmpx.convert()
    yield
    hmpx.restore()
    assert not weight_cache.open_caches and "data" not in vars(torch.Tensor) and torch.Tensor.data is DATA


def casts(work):
    """How many casts `work` makes."""
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        work()
    return sum(event.name == "aten::_to_copy" for event in profiled.events())


def test_each_weight_is_cast_once_and_the_bits_are_the_same(model, x):
    expected = model(x)
    assert casts(lambda: model(x)) == 4
    with hmpx.cached_weights() as cache:
        assert casts(lambda: model(x)) == 4
        assert casts(lambda: model(x)) == 0
        assert torch.equal(model(x), expected)
        assert repr(cache) == "<hmpx.cached_weights: 4 casts, 0.0 MiB>"
        cache.clear()
        assert casts(lambda: model(x)) == 4
    assert casts(lambda: model(x)) == 4 and repr(cache) == "<hmpx.cached_weights, closed>"


def in_inference_mode(model):
    with torch.inference_mode():
        model[0].weight.mul_(2)


def doubled(model):
    return {name: value * 2 for name, value in model.state_dict().items()}


def double(model):
    return nn.Parameter(model[0].weight * 2, requires_grad=False)


WRITES = {
    "in place": lambda m: m[0].weight.mul_(2),
    "foreach": lambda m: torch._foreach_mul_(list(m.parameters()), 2),
    "through data": lambda m: m[0].weight.data.mul_(2),
    "through data of a state dict": lambda m: m.state_dict()["0.weight"].data.mul_(2),
    "through a view": lambda m: m[0].weight.detach().view(-1)[:10].mul_(2),
    "new data": lambda m: setattr(m[0].weight, "data", m[0].weight * 2),
    "a new parameter": lambda m: setattr(m[0], "weight", double(m)),
    "loaded": lambda m: m.load_state_dict(doubled(m)),
    "loaded by assignment": lambda m: m.load_state_dict(doubled(m), assign=True),
    "swapped": lambda m: torch.utils.swap_tensors(m[0].weight, double(m)),
    "in inference mode": in_inference_mode,
    "initialised": lambda m: nn.init.normal_(m[0].weight),
    "set to another": lambda m: m[0].weight.set_(torch.ones(8, 8)),
}


def test_no_write_is_missed(model, x):
    for name, write in WRITES.items():
        written = copy.deepcopy(model)
        with torch.no_grad(), hmpx.cached_weights():
            before = written(x)
            write(written)
            found = [written(x), written(x)]
            with torch.inference_mode():
                found.append(written(x))
        fresh = written(x)
        assert all(torch.equal(each, fresh) for each in found) and not torch.equal(before, fresh), name


@pytest.mark.parametrize(
    ("how", "attached"),
    [
        *(({"fused": True}, attached) for attached in (True, False)),
        ({"foreach": True}, False),
        ({"foreach": False}, True),
    ],
)
def test_an_optimizer_step_is_seen(model, x, how, attached):
    """A fused step leaves no trace in `_version`."""
    model.requires_grad_(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **how)
    if attached:
        hmpx.attach(optimizer)
    with hmpx.cached_weights():
        with torch.no_grad():
            model(x)
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        with torch.no_grad():
            after = model(x)
    assert torch.equal(after, model(x))


@pytest.mark.parametrize("alias", [lambda p: p.data, lambda p: p.detach().numpy(), lambda p: p.untyped_storage()])
def test_a_weight_whose_storage_something_else_holds_is_not_kept(model, x, alias, caplog):
    held = alias(model[0].weight)
    with hmpx.cached_weights() as cache, caplog.at_level(logging.WARNING, "hmpx"):
        model(x)
        assert len(weight_cache.current().casts) == 3 or isinstance(held, torch.UntypedStorage)
        if not isinstance(held, torch.UntypedStorage):
            held *= 2
            assert "1 casts made anew: something else holds its storage" in repr(cache)
            assert "casts a (8, 8) weight anew" in caplog.text
        after = model(x)
    assert torch.equal(after, model(x))


def by_another_process(weight, _):
    child = torch.multiprocessing.get_context("fork").Process(target=weight.fill_, args=(2.0,))
    child.start()
    child.join()


def mapped(folder):
    return torch.from_file(str(folder / "weights"), shared=True, size=64).view(8, 8)


BY_OTHERS = {"shared": by_another_process, "mapped": lambda _, folder: mapped(folder).fill_(2.0)}


@pytest.mark.parametrize("how", BY_OTHERS)
def test_memory_that_another_process_may_write_to_is_not_kept(model, x, how, tmp_path):
    (tmp_path / "weights").write_bytes(bytes(256))
    model[0].weight = nn.Parameter(mapped(tmp_path), False) if how == "mapped" else model[0].share_memory().weight
    with hmpx.cached_weights() as cache:
        before = model(x)
        BY_OTHERS[how](model[0].weight, tmp_path)
        after = model(x)
        assert "casts made anew: another process may write to its memory" in repr(cache)
    assert torch.equal(after, model(x)) and not torch.equal(before, after)


def test_a_collective_is_seen_that_raises_no_version(model, x):
    """No cast is kept while the work goes on, and it is kept again when that is done."""
    weight, two = model[0].weight, torch.full((8, 8), 2.0)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        for collective, new in ((torch.distributed.scatter, [two]), (torch.distributed.all_to_all_single, two.neg())):
            with hmpx.cached_weights():
                before, version = model(x), weight._version
                collective(weight.detach(), new)
                after = model(x)
                assert weight._version == version and casts(lambda: model(x)) == 0
            assert torch.equal(after, model(x)) and not torch.equal(before, after)
    finally:
        torch.distributed.destroy_process_group()
    done = [False]
    with hmpx.cached_weights():
        model(x)
        weight_cache.current().clear()
        weight_cache.current().pending.append((SimpleNamespace(is_completed=lambda: done[0]), weight.data_ptr()))
        assert [casts(lambda: model(x)) for _ in range(2)] == [4, 1]
        done[0] = True
        assert [casts(lambda: model(x)) for _ in range(2)] == [1, 0]


TO_CAST = {
    "itself": lambda cast: cast.zero_(),
    "a view": lambda cast: cast[1:].zero_(),
    "its data": lambda cast: cast.data.zero_(),
    "the data of a view": lambda cast: cast[1:].data.zero_(),
    "memory of a view": lambda cast: cast[1:].view(torch.int16).numpy().fill(0),
}


@pytest.mark.parametrize("kernels", ["native", "float32"])
def test_what_an_op_returns_of_a_cast_may_be_written_to(kernels, lists):
    """A dropout that drops nothing hands its input on."""
    hmpx.convert(**lists(bf16="dropout linear"), kernels=kernels)
    for how, write in TO_CAST.items():
        layer, x = nn.Linear(8, 8, bias=False).requires_grad_(False), torch.randn(2, 8)
        with hmpx.cached_weights():
            expected = layer(x)
            write(nn.functional.dropout(layer.weight, training=False))  # the cast, the caller's own without a cache
            assert torch.equal(layer(x), expected) and expected.any(), how


def test_a_weight_that_needs_a_gradient_gets_one(model, x, caplog):
    model[2].requires_grad_(True)
    with hmpx.cached_weights() as cache, caplog.at_level(logging.WARNING, "hmpx"):
        for _ in range(2):
            model(x).sum().backward()
        assert "it requires a gradient; put torch.no_grad() around" in caplog.text and len(caplog.records) == 1
        assert repr(cache).startswith("<hmpx.cached_weights: 2 casts, 0.0 MiB; 4 casts made anew: it requires")
        with torch.no_grad():
            model(x)
        model(x).sum().backward()
    cached = copy.deepcopy(model[2].weight.grad)
    model.zero_grad()
    for _ in range(3):
        model(x).sum().backward()
    assert torch.equal(model[2].weight.grad, cached)


def test_inference_mode_and_a_graph_may_take_turns(model, x):
    """The weights are frozen, the input is not: the cast that inference mode made is saved for backward."""
    with hmpx.cached_weights():
        with torch.inference_mode():
            model(x)
        x = x.clone().requires_grad_()
        model(x).sum().backward()
    expected = x.grad.clone()
    x.grad = None
    model(x).sum().backward()
    assert torch.equal(x.grad, expected)


def test_weights_made_in_inference_mode_are_not_kept(x):
    with torch.inference_mode():
        layer = nn.Linear(8, 8)
        with hmpx.cached_weights() as cache:
            layer(x)
            layer.weight.zero_()
            assert torch.equal(layer(x), layer.bias.to(BF16).expand(3, 8)) and "inference mode" in repr(cache)


def test_no_cast_is_kept_of_a_graph_that_records_or_taken_from_another_stream(monkeypatch):
    """On the meta device, with a stand-in for what CUDA says of streams."""
    now = SimpleNamespace(stream=1, capturing=False)
    device = SimpleNamespace(current_stream=lambda _: now.stream, is_current_stream_capturing=lambda: now.capturing)
    monkeypatch.setattr(torch, "get_device_module", lambda _: device)
    weight, cache, casts_made = nn.Parameter(torch.empty(8, device="meta"), False), weight_cache.WeightCache(), []

    def cast(weight):
        casts_made.append(weight)
        return weight.bfloat16()

    def made(stream, capturing):
        now.stream, now.capturing = stream, capturing
        casts_made.clear()
        assert cache.get(weight, BF16, cast).dtype is BF16
        return len(casts_made)

    assert made(1, True) == 1  # and nothing is kept
    assert [made(1, False), made(1, False)] == [1, 0]
    assert [made(1, True), made(1, False)] == [1, 0]
    assert [made(2, False), made(2, False)] == [1, 0]


def test_a_cache_belongs_to_its_thread(model, x):
    seen = []

    def other():
        seen.append(casts(lambda: model(x)))
        with hmpx.cached_weights():
            model(x)
        seen.append(torch.Tensor.data is DATA)

    with hmpx.cached_weights():
        model(x)
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert seen == [4, False] and casts(lambda: model(x)) == 0


def test_regions_lists_and_restore_inside(model, lists):
    x = torch.randn(3, 8)
    with hmpx.cached_weights():
        assert model(x).dtype is BF16
        with hmpx.disable_casts():
            assert model(x).dtype is torch.float32
        with hmpx.casts(bf16=["linear"], low_precision="fp16"):  # each dtype has a cast of its own
            weight, bias = (p.half() for p in model[0].parameters())
            assert torch.equal(model[0](x), nn.functional.linear(x.half(), weight, bias))
        hmpx.convert(**lists(fp32="linear"))
        assert model(x).dtype is torch.float32 and model.bfloat16()(x).dtype is torch.float32
        hmpx.restore()
        assert model(x.to(BF16)).dtype is BF16
    with hmpx.cached_weights():  # without a conversion
        assert model(x.to(BF16)).dtype is BF16


def test_recurrent_layers_and_convolutions():
    lstm, conv = nn.LSTM(4, 4).requires_grad_(False), nn.Conv2d(1, 2, 3).requires_grad_(False)
    norm, image, x = nn.BatchNorm2d(2).eval(), torch.randn(1, 1, 8, 8), torch.randn(2, 1, 4, dtype=BF16)

    def run():
        return torch.cat([lstm(x)[0].flatten(), norm(conv(image)).flatten()])

    expected = run()
    with hmpx.cached_weights():
        run()
        assert casts(run) == 2  # of the image, and of x for the check of its dtype
        assert torch.equal(run(), expected)


def test_transforms_modes_and_compiled_code_make_their_own_casts(model, x):
    expected, mapped = model(x), torch.vmap(model)(x)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with hmpx.cached_weights():
        assert torch.equal(compiled(x), expected)
        assert torch.equal(torch.vmap(model)(x), mapped)
        from torch._subclasses.fake_tensor import FakeTensorMode

        with FakeTensorMode(allow_non_fake_inputs=True):
            model(x)
        assert not weight_cache.current().casts
        assert torch.equal(model(x), expected) and casts(lambda: model(x)) == 0
        assert torch.equal(compiled(x), expected)
    torch._dynamo.reset()


TO_MEMORY = {
    "numpy": lambda w: w.detach().numpy(),
    "asarray": lambda w: np.asarray(w.detach()),
    "dlpack": lambda w: np.from_dlpack(w.detach()),
    "torch's dlpack": lambda w: torch.from_dlpack(w.detach()).numpy(),
    "address": lambda w: np.ctypeslib.as_array((ctypes.c_float * w.numel()).from_address(w.data_ptr())),
    "storage": lambda w: torch.tensor([], dtype=w.dtype).set_(w.untyped_storage(), 0, w.shape).numpy(),
    "a view": lambda w: w[1:].detach().numpy(),
}


def test_memory_that_is_taken_after_the_cast_was_kept(lists):
    names = "numpy", "data_ptr", "untyped_storage", "__dlpack__"
    before = {name: vars(torch.Tensor).get(name) for name in names}
    hmpx.convert(**lists(bf16="linear"))
    for (how, taken), kept in itertools.product(TO_MEMORY.items(), (True, False)):
        layer, x = nn.Linear(4, 4, bias=False), torch.ones(2, 4)
        with torch.no_grad(), hmpx.cached_weights() as cached:
            layer(x)
            memory = taken(layer.weight)
            if kept:
                layer(x)
            memory[...] = 0.5
            if how == "address" and kept:  # which nobody can see the use of
                cached.clear()
            assert torch.equal(layer(x), nn.functional.linear(x.bfloat16(), layer.weight.bfloat16())), (how, kept)
            assert (layer.weight[1:] == 0.5).all()
        assert before == {name: vars(torch.Tensor).get(name) for name in names}, how
