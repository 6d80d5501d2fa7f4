"""The map of dtypes: whatever asks for one gets its successor, and afterwards everything is as before."""

import pickle

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

import hmpx
from hmpx.ops.dtype_map import DtypeMap
from hmpx.ops.wrapping.wrappers import Patching
from tests.support.tensor_classes import Recording

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
USE, DOWNCAST = {FP32: BF16, FP64: BF16}, {FP32: BF16, FP64: FP32}
both = pytest.mark.parametrize("mapping", [USE, DOWNCAST], ids=["use", "downcast"])


@pytest.fixture
def mapped(lists):
    """`convert` with a map and empty lists."""
    return lambda mapping: hmpx.convert(**lists(), dtype_map=mapping)


# What asks for a float, and the same for a double. `x` is FP32 from before, `n` NumPy.
ASKING = {
    "torch.zeros": lambda d, x: torch.zeros(3, dtype=d),
    "torch.empty": lambda d, x: torch.empty((3,), dtype=d),
    "torch.full": lambda d, x: torch.full((3,), 2.0, dtype=d),
    "torch.arange": lambda d, x: torch.arange(3, dtype=d),
    "torch.linspace": lambda d, x: torch.linspace(0, 1, 3, dtype=d),
    "torch.eye": lambda d, x: torch.eye(3, dtype=d),
    "torch.randn": lambda d, x: torch.randn(3, dtype=d),
    "torch.normal": lambda d, x: torch.normal(0.0, 1.0, (3,), dtype=d),
    "torch.tensor": lambda d, x: torch.tensor([1, 2], dtype=d),
    "torch.as_tensor": lambda d, x: torch.as_tensor([1, 2], dtype=d),
    "torch.asarray": lambda d, x: torch.asarray([1, 2], dtype=d),
    "torch.hann_window": lambda d, x: torch.hann_window(3, dtype=d),
    "torch.zeros_like": lambda d, x: torch.zeros_like(x, dtype=d),
    "torch.rand_like": lambda d, x: torch.rand_like(x, dtype=d),
    "x.new_zeros": lambda d, x: x.new_zeros(3, dtype=d),
    "x.new_tensor": lambda d, x: x.new_tensor([1.0], dtype=d),
    "x.to(d)": lambda d, x: x.half().to(d),
    "x.to(dtype=d)": lambda d, x: x.half().to(dtype=d),
    "x.to(device, d)": lambda d, x: x.half().to("cpu", d),
    "x.to(other)": lambda d, x: x.half().to(torch.ones(1, dtype=d)),
    "x.type(d)": lambda d, x: x.half().type(d),
    "x.type(name)": lambda d, x: x.half().type("torch.FloatTensor" if d is FP32 else "torch.DoubleTensor"),
    "x.float, x.double": lambda d, x: x.half().float() if d is FP32 else x.half().double(),
    "x.sum": lambda d, x: x.sum(dtype=d),
    "torch.mean": lambda d, x: torch.mean(x, 0, dtype=d),
    "torch.cumsum": lambda d, x: torch.cumsum(x, 0, dtype=d),
    "F.softmax": lambda d, x: F.softmax(x, -1, dtype=d),
    "F.log_softmax": lambda d, x: F.log_softmax(x, -1, dtype=d),
    "torch.linalg.vector_norm": lambda d, x: torch.linalg.vector_norm(x.bfloat16(), dtype=d),
    "torch.FloatTensor": lambda d, x: (torch.FloatTensor if d is FP32 else torch.DoubleTensor)([1.0]),
    "nn.Linear": lambda d, x: nn.Linear(2, 2, dtype=d).weight,
    "module.to": lambda d, x: nn.Linear(2, 2).half().to(d).weight,
    "module.float": lambda d, x: (nn.Linear(2, 2).half().float() if d is FP32 else nn.Linear(2, 2).double()).weight,
    "buffer": lambda d, x: nn.BatchNorm1d(2, dtype=d).running_mean,
    "NumPy, from_numpy": lambda d, x: torch.from_numpy(_array(d)),
    "NumPy, as_tensor": lambda d, x: torch.as_tensor(_array(d)),
    "NumPy, tensor": lambda d, x: torch.tensor(_array(d)),
    "NumPy, asarray": lambda d, x: torch.asarray(_array(d)),
    "NumPy, scalar": lambda d, x: torch.tensor(_array(d)[0]),
    "torch.from_dlpack": lambda d, x: torch.from_dlpack(_array(d)),
    "torch.frombuffer": lambda d, x: torch.frombuffer(bytearray(_array(d).tobytes()), dtype=d),
    "x.view": lambda d, x: torch.from_numpy(_array(d).view(np.uint8)).view(d),
}  # fmt: skip


def _array(dtype):
    return np.ones(3, np.float32 if dtype is FP32 else np.float64)


@both
def test_what_is_asked_for_follows_the_map(mapping, mapped):
    x = torch.ones(3)

    def given():
        return {name: {d: ask(d, x).dtype for d in (FP32, FP64)} for name, ask in ASKING.items()}

    plain = {name: {FP32: FP32, FP64: FP64} for name in ASKING}
    assert given() == plain
    with mapped(mapping):
        assert given() == {name: mapping for name in ASKING}
    assert given() == plain


def test_numbers_are_those_of_a_cast(mapped):
    numbers = np.random.default_rng(0).normal(size=64)
    plain = torch.from_numpy(numbers)
    with mapped(USE):
        assert torch.equal(torch.from_numpy(numbers), plain.bfloat16())
        assert torch.equal(torch.frombuffer(bytearray(numbers.tobytes()), dtype=FP64), plain.bfloat16())
        assert torch.equal(torch.tensor(numbers.tolist()), plain.bfloat16())
        array = plain.bfloat16().numpy()  # NumPy has no BF16
        assert array.dtype == np.float32 and np.array_equal(array, plain.bfloat16().to(torch.float16).float().numpy())
    assert np.array_equal(array, plain.to(BF16).float().numpy())


@both
def test_what_asks_for_nothing_gets_the_default(mapping, mapped):
    with mapped(mapping):
        made = [torch.zeros(2), torch.tensor(1.5), torch.arange(3) / 2, torch.rand(2), torch.Tensor(2), torch.eye(2)]
        assert all(t.dtype is BF16 for t in made) and torch.get_default_dtype() is BF16
        torch.set_default_dtype(FP64)
        assert torch.zeros(2).dtype is mapping[FP64]
        torch.set_default_dtype(FP32)
        assert torch.zeros(2).dtype is BF16 and torch.float64 is FP64
        others = [torch.ones(2, dtype=d) for d in (torch.int32, torch.bool, torch.float16, torch.complex64)]
        assert [t.dtype for t in others] == [torch.int32, torch.bool, torch.float16, torch.complex64]
    assert torch.get_default_dtype() is FP32


def test_a_double_of_downcast_stays_fp32(mapped):
    with mapped(DOWNCAST):
        x = torch.ones(4).double()
        held = [x, x + 1, x.view(2, 2), x.reshape(4), x.sum(), torch.zeros_like(x), x.clone(), x.to("cpu"), x.detach()]
        held += [torch.as_tensor(x), torch.asarray(x), torch.as_tensor(data=x), torch.asarray(obj=x)]
        held += [torch.tensor(x.tolist()).double(), x.to(x)]
        assert {t.dtype for t in held} == {FP32}
        x.requires_grad_()
        (grad,) = torch.autograd.grad((x.float().double() * 2).sum(), x)
        assert grad.dtype is FP32


def test_a_checkpoint_that_was_saved_in_fp32(mapped, tmp_path):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = optim.AdamW(model.parameters())
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    saved = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "whole": model,
        "pair": (torch.ones(2), 1),
    }
    saved["double"] = torch.ones(2, dtype=FP64)
    saved["parameters"] = [nn.Parameter(torch.ones(2).to(dtype), requires_grad=dtype is BF16) for dtype in (FP32, BF16)]
    torch.save(saved, tmp_path / "checkpoint")
    with mapped(DOWNCAST):
        loaded = torch.load(tmp_path / "checkpoint", weights_only=False)
        assert {k: v.dtype for k, v in loaded["model"].items() if v.is_floating_point()} == {
            k: BF16 for k, v in model.state_dict().items() if v.is_floating_point()
        }
        assert loaded["model"]._metadata == saved["model"]._metadata
        assert loaded["double"].dtype is FP32 and loaded["pair"][0].dtype is BF16
        state = loaded["optimizer"]["state"][0]
        assert state["exp_avg"].dtype is BF16 and state["step"].dtype is FP32  # which counts beyond 256
        assert all(p.dtype is BF16 and type(p) is nn.Parameter for p in loaded["whole"].parameters())
        alone = loaded["parameters"]
        assert all(p.dtype is BF16 and type(p) is nn.Parameter for p in alone)
        assert [p.requires_grad for p in alone] == [False, True]
        fresh = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        fresh.load_state_dict(loaded["model"])
        assert torch.equal(fresh[0].weight, model[0].weight.bfloat16())
    assert torch.load(tmp_path / "checkpoint", weights_only=False)["double"].dtype is FP64


def test_regions_and_hmpx_itself_say_what_they_mean(mapped):
    with mapped(USE):
        with hmpx.disable_casts():
            assert torch.zeros(2, dtype=FP32).dtype is FP32
            with hmpx.enable_casts():
                assert torch.zeros(2, dtype=FP32).dtype is BF16
        with hmpx.disable_casts():
            x = torch.randn(70_000, dtype=FP32)
        rounded = hmpx.stochastic_round(x, seed=1, step=2, name="x")
        assert repr(rounded[:2]).startswith("tensor([")
    assert torch.equal(rounded, hmpx.stochastic_round(x, seed=1, step=2, name="x"))


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_functions_follow_it(backend, mapped):
    def model(x):
        return F.softmax(x.double() + torch.ones(3, dtype=FP64), -1) * x.to(FP64) + x.new_zeros(3, dtype=FP32)

    x = torch.randn(3)
    assert torch.compile(model, backend=backend, fullgraph=True)(x).dtype is FP64
    with mapped(DOWNCAST):
        assert torch.compile(model, backend=backend, fullgraph=True)(x).dtype is FP32
    with mapped(USE):
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        assert compiled(x).dtype is BF16
    assert compiled(x).dtype is FP64


def test_every_attribute_is_the_identical_one_again(mapped):
    with mapped(USE) as handle:
        patches = [patch for patch in handle.patched if patch.how is Patching.DTYPE_MAP]
        assert len(patches) > 140 and {"torch.zeros", "torch.Tensor.to", "torch.load"} <= {p.label for p in patches}
        assert pickle.loads(pickle.dumps(torch.zeros)) is torch.zeros
    for patch in patches:
        assert getattr(patch.owner, patch.attribute) is patch.original
    assert torch.FloatTensor.__name__ == "FloatTensor" and torch.get_default_dtype() is FP32
    assert str(DtypeMap(USE)) != str(DtypeMap(DOWNCAST))  # which torch's cache of compiled graphs is told


def test_tensor_subclasses_are_handed_torchs_own_functions(mapped):
    x = torch.ones(2).as_subclass(Recording)
    to, double = torch.Tensor.to, torch.Tensor.bfloat16
    with mapped(USE):
        Recording.seen.clear()
        assert x.to(FP64).dtype is BF16 and x.double().dtype is BF16 and type(x.double()) is Recording
    assert to in Recording.seen and double in Recording.seen


def test_a_map_that_is_none_is_refused(mapped):
    with mapped(USE) as handle:
        for wrong in ({torch.int8: BF16}, {FP32: torch.float16}, {"float32": BF16}):
            with pytest.raises(hmpx.HmpxError, match="it maps torch"):
                hmpx.convert(dtype_map=wrong)
        assert handle.active and torch.zeros(1).dtype is BF16


def test_weights_begin_as_those_of_fp32_rounded(mapped):
    def make():
        torch.manual_seed(0)
        lstm, linear, table = nn.LSTM(4, 4), nn.Linear(4, 4), nn.Embedding(5, 4)
        nn.init.orthogonal_(linear.weight)
        return [*lstm.parameters(), *linear.parameters(), *table.parameters()]

    plain = make()
    with mapped(USE):
        made = make()
    assert all(torch.equal(p, q.bfloat16()) and p.requires_grad for p, q in zip(made, plain, strict=True))


def test_ops_whose_result_is_a_double_whatever_they_are_given(mapped):
    with mapped(DOWNCAST):
        assert torch.bincount(torch.tensor([0, 1, 1]), weights=torch.ones(3)).dtype is FP32
        assert torch.sparse.sum(torch.eye(2).to_sparse(), dtype=FP64).dtype is FP32
