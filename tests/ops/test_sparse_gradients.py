"""An op whose gradient is sparse is not cast on its weight: torch cannot send such a gradient through a cast."""

import logging

import pytest
import torch

import hmpx

KINDS = (torch.nn.Embedding, torch.nn.EmbeddingBag)
INDICES = torch.tensor([[1, 2, 2]])


def gradient(layer):
    layer(INDICES).float().square().sum().backward()
    return layer.weight.grad


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lists", [{}, {"bf16": ["embedding", "embedding_bag"]}], ids=["default", "bf16"])
def test_it_is_the_gradient_of_torch_and_one_line_names_a_list_that_asks_for_a_cast(kind, dtype, lists, caplog):
    plain = kind(12, 4, sparse=True).to(dtype)
    layer = kind(12, 4, sparse=True).to(dtype)
    layer.load_state_dict(plain.state_dict())
    exact = gradient(plain)
    with hmpx.convert(**lists), caplog.at_level(logging.WARNING, "hmpx"):
        assert layer(INDICES).dtype is dtype
        found = gradient(layer)
    assert found.layout is torch.sparse_coo and torch.equal(found.to_dense(), exact.to_dense())
    lines = [line for line in caplog.messages if "sparse" in line]
    asked = "bf16" if lists else "fp32"
    if dtype is (torch.float32 if asked == "fp32" else torch.bfloat16):
        assert not lines
    else:
        op = "embedding" if kind is torch.nn.Embedding else "embedding_bag"
        assert len(lines) == 1 and lines[0].startswith(f"hmpx: {op} is in the {asked} list, and its gradient is sparse")


def test_other_inputs_take_the_dtype_of_the_weight():
    layer = torch.nn.EmbeddingBag(12, 4, mode="sum", sparse=True).bfloat16()
    with hmpx.convert():
        assert layer(INDICES, per_sample_weights=torch.ones(1, 3)).dtype is torch.bfloat16


def test_gather():
    x = torch.eye(3, requires_grad=True)
    with hmpx.convert(bf16=["gather"]):
        x.gather(0, INDICES, sparse_grad=True).sum().backward()
        assert x.grad.layout is torch.sparse_coo
        assert x.gather(0, INDICES).dtype is torch.bfloat16


def test_record_shows_it():
    sparse, dense = torch.nn.Embedding(12, 4, sparse=True), torch.nn.Embedding(12, 4)
    with hmpx.convert(bf16=["embedding"]), hmpx.record() as log:
        sparse(INDICES)
        dense(INDICES)
    found = {site.rule: site.dtypes for site in log.sites if site.op == "embedding"}
    assert found == {"": "float32", "bf16": "float32 -> bfloat16"}
    assert not any(" and ran in " in line for line in log.escaped)
