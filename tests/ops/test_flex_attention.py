"""`flex_attention` in a list: query, key and value are cast, score functions and block masks are not."""

import functools

import pytest
import torch
from torch import nn
from torch.nn.attention import flex_attention as module
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import hmpx
from hmpx.base import region_state
from hmpx.ops.policies.catalog import canonical
from hmpx.ops.policies.lists import shipped
from tests.support.compiling import nothing_compiled  # noqa: F401

BF16, FP32 = torch.bfloat16, torch.float32
LENGTH, SIZE = 128, 16
ERROR = 0.01 if torch.__version__ >= "2.10" else 0.012  # before, its backward multiplied scores in BF16
MASK = create_block_mask(lambda b, h, i, j: i >= j, None, None, LENGTH, LENGTH, device="cpu")
BIAS = torch.randn(2, LENGTH, generator=torch.Generator().manual_seed(1))
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


@pytest.fixture(autouse=True)
def _backward_on_a_cpu(monkeypatch):
    """It refuses a backward pass on a CPU, where its eager implementation has one all the same."""
    monkeypatch.setattr(module, "_validate_device", lambda *tensors: None)


@pytest.fixture
def listed(tmp_path):
    (tmp_path / "bf16.txt").write_text("flex_attention\nadd\nmatmul\n")
    (tmp_path / "fp32.txt").write_text("")
    return {"bf16_file_path": tmp_path / "bf16.txt", "fp32_file_path": tmp_path / "fp32.txt"}


def score_mod(score, batch, head, i, j):
    assert BIAS.dtype is FP32
    return score + BIAS[head, j]


class Attention(nn.Module):
    def forward(self, *args, **kwargs):
        return flex_attention(*args, **kwargs)


def inputs():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, 2, LENGTH, SIZE, generator=generator) for _ in range(3)]


def run(function, query, key, value):
    leaves = [each.clone().requires_grad_() for each in (query, key, value)]
    out = function(*leaves, score_mod=score_mod, block_mask=MASK)
    out.double().square().sum().backward()
    return [out.detach(), *(leaf.grad for leaf in leaves)]


@functools.cache
def by_hand():
    query, key, value = inputs()
    return run(lambda q, k, v, **how: flex_attention(q.to(BF16), k.to(BF16), v.to(BF16), **how), query, key, value)


def by_formula(query, key, value, **kwargs):
    """In the dtype of its inputs."""
    scores = query @ key.mT / SIZE**0.5 + BIAS.to(query)[None, :, None, :]
    return scores.masked_fill(~torch.ones(LENGTH, LENGTH).tril().bool(), -torch.inf).softmax(-1) @ value


WAYS = {
    "eager": lambda: Attention(),
    "a compiled model": lambda: torch.compile(Attention(), backend="aot_eager", fullgraph=True),
    "compiled": lambda: torch.compile(module.flex_attention, backend="aot_eager", fullgraph=True),
    "compiled before": lambda: torch.compile(flex_attention, backend="aot_eager"),  # called before any conversion
}


@pytest.mark.parametrize(
    "way", ["eager", "compiled before", *(pytest.param(each, marks=pytest.mark.slow) for each in [*WAYS][1:3])]
)
def test_it_is_computed_as_if_cast_by_hand(way, listed):
    """Whatever the dtypes that the three come in, forward and backward, call after call."""
    query, key, value = inputs()
    wanted = by_hand()
    exact = run(by_formula, query.double(), key.double(), value.double())
    before = WAYS["compiled before"]()
    with hmpx.convert(**listed) as handle:
        function = before if way == "compiled before" else WAYS[way]()
        for low in (value, value.to(BF16), value):
            for found, expected, right in zip(run(function, query, key, low), wanted, exact, strict=True):
                assert torch.equal(found, expected.to(found.dtype))
                assert (found - right).norm() < ERROR * right.norm()
        assert function(query, key, value).dtype is BF16
        assert not [each for each in handle.escaped if "flex" in each]
    assert flex_attention(query, key, value).dtype is before(query, key, value).dtype is FP32


@pytest.mark.parametrize("way", ["eager", "compiled"])
def test_in_no_list_key_and_value_come_in_the_dtype_of_the_query(way, listed):
    listed["bf16_file_path"].write_text("linear\n")
    query, key, value = inputs()
    with hmpx.convert(**listed):
        function = WAYS[way]()
        assert torch.equal(function(query, key, value.to(BF16)), function(query, key, value.to(BF16).float()))
        assert function(query.to(BF16), key, value).dtype is BF16


def test_where_casts_belong_to_the_model_compiled_code_is_one(listed):
    query, key, value = inputs()
    function = WAYS["compiled before"]()
    with hmpx.convert(**listed, where="model"):
        model = nn.Identity()
        model.forward = lambda *args: function(*args)
        assert [f(query, key, value).dtype for f in (function, model, function)] == [BF16] * 3


@pytest.mark.slow
def test_inductor(listed):
    query, key, value = inputs()
    expected = flex_attention(query.to(BF16), key.to(BF16), value.to(BF16), score_mod, MASK)
    with hmpx.convert(**listed):
        found = torch.compile(module.flex_attention)(query, key, value, score_mod, MASK)
    assert found.dtype is BF16 and torch.allclose(found, expected, rtol=0.02, atol=0.01)


def test_a_higher_order_op_in_a_region_leaves_casts_on(listed):
    """Dynamo forgets what is written, behind one, to an object that was written to before it."""
    linear, x = nn.Linear(4, 4), torch.ones(2, 4)

    @torch.compile(backend="eager", fullgraph=True)
    def function(x):
        with hmpx.disable_casts():
            x = torch.cond(x.sum() > 0, lambda y: y.sin(), lambda y: y.cos(), (x,))
        return linear(x)

    with hmpx.convert():
        assert function(x).dtype is BF16
        assert not region_state.traced.inside
        assert function(x.to(BF16)).dtype is linear(x).dtype is BF16


def test_it_stands_in_every_list_but_gaudis_beside_scaled_dot_product_attention():
    lists = {path.parent.name: path.read_text().split("\n") for path in shipped().glob("*/bf16.txt")}
    one = [folder for folder, names in lists.items() if "scaled_dot_product_attention" in names]
    own = [folder for folder, names in lists.items() if "flex_attention" in names]
    assert sorted(own) == sorted({*one} - {"gaudi-autocast"}) and len(own) == 5
    assert canonical("torch.nn.attention.flex_attention.flex_attention") == "flex_attention"
