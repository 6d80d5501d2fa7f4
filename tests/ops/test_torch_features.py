"""Casts beside everything else that torch does with functions and tensors."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import itertools
import pickle
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import hmpx
from tests.support.same import same
from tests.support.tensor_classes import Recording

BF16, FP32, FP16 = torch.bfloat16, torch.float32, torch.float16
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def model():
    return nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))


@pytest.fixture
def x():
    return torch.randn(4, 8)


@pytest.fixture(autouse=True)
def converted():
    yield hmpx.convert()
    hmpx.restore()


def gradients(model, forward, around_backward=None):
    model.zero_grad()
    loss = forward().float().square().sum()
    with around_backward or hmpx.enable_casts():
        loss.backward()
    return [p.grad.clone() for p in model.parameters()]


REGIONS = hmpx.disable_casts, hmpx.enable_casts, functools.partial(hmpx.casts, fp32=["linear"])


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_recomputes_as_it_computed(model, x, reentrant):
    """In the regions around the forward, in those inside of it, and in its modules, wherever backward stands."""
    x.requires_grad_()
    rule = hmpx.policy_for(model[0], "fp32")
    for region, backward, inside in itertools.product(REGIONS, REGIONS[:2], (True, False)):

        def body(x, region=region, inside=inside):
            with region() if inside else contextlib.nullcontext():
                return model(x)

        def plain(region=region, body=body):
            with region():
                return body(x)

        def checkpointed(region=region, body=body):
            with region():
                return checkpoint(body, x, use_reentrant=reentrant)

        expected = gradients(model, plain, backward())
        assert same(gradients(model, checkpointed, backward()), expected), (region, backward, inside)
        assert plain().dtype is (BF16 if region is hmpx.enable_casts else FP32)
    rule.remove()


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_in_a_decorated_function(model, x, reentrant):
    x.requires_grad_()
    decorated = hmpx.fp32(lambda x: checkpoint(model, x, use_reentrant=reentrant))
    assert same(gradients(model, lambda: decorated(x)), gradients(model, lambda: hmpx.fp32(lambda x: model(x))(x)))


class Functions(nn.Module):
    def forward(self, x):
        y = torch.matmul(x, x.t()) @ x
        return F.layer_norm(F.softmax(y, -1), (8,)) + torch.relu(y).mul(2)


def test_fx_graphs_hold_torchs_names_and_follow_the_conversion(x):
    graph = torch.fx.symbolic_trace(Functions())
    assert torch.equal(graph(x), Functions()(x)) and graph(x).dtype is BF16
    hmpx.restore()
    assert torch.equal(graph(x), Functions()(x)) and graph(x).dtype is FP32
    assert "hmpx" not in graph.code and "torch.matmul" in graph.code


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.encoder = nn.LSTM(8, 8), nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.encoder(self.lstm(x)[0])


def formula(x: torch.Tensor) -> torch.Tensor:
    return torch.einsum("ij,kj->ik", [x, x]) + F.dropout1d(x @ x.t(), 0.0) + F.cross_entropy(x, x).softmax(0)


def test_scripted_code_is_compiled_from_the_originals(x):
    """It does not cast, which `record` finds."""
    square = x[:, :4].contiguous()
    modules = Recurrent().eval(), nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).eval()
    scripted = [torch.jit.script(module) for module in modules]
    function = torch.jit.script(formula)
    under = scripted[0](x[None]), scripted[1](x), function(square)
    hmpx.restore()
    expected = modules[0](x[None]), modules[1](x), formula(square)
    after = torch.jit.script(Recurrent().eval())(x[None]), torch.jit.script(modules[1])(x), function(square)
    assert all(a.dtype is FP32 and torch.allclose(a, b, atol=1e-6) for a, b in zip(under, expected, strict=True))
    assert same(after[1:], under[1:]) and after[0].dtype is FP32


CALLS = {
    "F.linear": (lambda t: F.linear(t, t), "linear"),
    "torch.matmul": (lambda t: torch.matmul(t, t), "matmul"),
    "Tensor.matmul": (lambda t: t.matmul(t), "matmul"),
    "operator": (lambda t: t @ t, "matmul"),
    "reflected operator": (lambda t: torch.ones(8, 8, dtype=t.dtype) @ t, "matmul"),
    "Tensor.__mul__": (lambda t: t * t, "mul"),
    "Tensor.__rtruediv__": (lambda t: 2 / t, "__rdiv__"),
    "Tensor.addmm_": (lambda t: t.addmm_(t.float(), t.float()), "addmm_"),
    "layer_norm": (lambda t: F.layer_norm(t, (8,)), "layer_norm"),
    "softmax": (lambda t: t.softmax(-1), "softmax"),
    "cat": (lambda t: torch.cat([t, torch.ones(8, 8)]), "cat"),
    "einsum": (lambda t: torch.einsum("ij,jk->ik", t, t), "einsum"),
    "batch_norm": (lambda t: F.batch_norm(t, torch.zeros(8), torch.ones(8)), "batch_norm"),
    "mse_loss": (lambda t: F.mse_loss(t, t), "mse_loss"),
}


def handed(call, op, tensor):
    """The result of a call, and the functions of that name that its class was handed; none is a wrapper."""
    Recording.seen.clear()
    result = call(tensor.clone().as_subclass(Recording))
    assert not any(hasattr(function, "__hmpx_original__") for function in Recording.seen)
    return result, [function for function in Recording.seen if getattr(function, "__name__", "") == op]


@pytest.mark.parametrize("verbose", [True, False])
def test_a_subclass_is_handed_torchs_own_functions(verbose):
    hmpx.restore()
    values = {dtype: torch.randn(8, 8, dtype=dtype) for dtype in (FP32, BF16)}
    wanted = {name: handed(call, op, values[FP32])[1] for name, (call, op) in CALLS.items()}
    hmpx.convert(isVerbose=verbose)
    for (name, (call, op)), (dtype, tensor) in itertools.product(CALLS.items(), values.items()):
        plain = call(tensor.clone())
        result, got = handed(call, op, tensor)
        assert wanted[name] and got[: len(wanted[name])] == wanted[name], (name, dtype)
        assert isinstance(result, Recording) and same([result.as_subclass(torch.Tensor)], [plain]), (name, dtype)


def test_functions_and_modules_copy_and_pickle(model, x):
    functions = (F.linear, torch.matmul, torch.softmax, torch.Tensor.matmul, torch.layer_norm, F.mse_loss, F.dropout2d)
    for function in functions:
        assert pickle.loads(pickle.dumps(function)) is function and copy.deepcopy(function) is function
    for made in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert made(x).dtype is BF16
    data = pickle.dumps((F.linear, torch.matmul))
    hmpx.restore()
    assert pickle.loads(data) == (F.linear, torch.matmul)


def test_reloading_a_users_module_and_hmpx(tmp_path, monkeypatch, x):
    (tmp_path / "layers_of_a_user.py").write_text("from torch import matmul\nfrom torch.nn.functional import gelu\n")
    monkeypatch.syspath_prepend(tmp_path)
    users = importlib.import_module("layers_of_a_user")
    assert users.matmul(x, x.t()).dtype is BF16
    importlib.reload(users)
    importlib.reload(hmpx)
    assert users.matmul(x, x.t()).dtype is BF16
    hmpx.restore()
    assert users.matmul is torch.matmul and users.matmul(x, x.t()).dtype is FP32
    del sys.modules["layers_of_a_user"]


def test_wrappers_that_someone_holds_after_restore_are_inert(model, x):
    held = {name: getattr(torch, name) for name in ("matmul", "softmax", "layer_norm", "einsum", "batch_norm")}
    in_python = F.dropout2d
    holder = [F.linear, torch.Tensor.__matmul__, held["matmul"]]
    hmpx.restore()
    assert holder[0](x, x).dtype is holder[1](x, x.t()).dtype is FP32
    with hmpx.convert(**{"opt_level": "O2"}):  # another conversion does not wake them up
        assert held["matmul"].__hmpx_original__ is not None
    assert held["matmul"](x, x.t()).dtype is FP32 and held["softmax"](x.to(BF16), -1).dtype is BF16
    assert in_python(x[None]).dtype is FP32
    assert held["batch_norm"](x, None, None, None, None, True, 0.1, 1e-5, False).dtype is FP32
