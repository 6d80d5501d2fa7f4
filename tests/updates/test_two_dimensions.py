"""A Llama-like model cut along two dimensions of a mesh, by recipes: saved on four ranks, resumed on two and on one."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn, optim
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

import hmpx
from tests.support import ranks
from tests.support.sharded import digest

RECIPES = ["neuron-bf16-sr", "lean8", "flash"]
STEPS = 3  # before the save, and after it
WORDS, WIDTH, HIDDEN = 11, 12, 10  # two by two ranks do not share 11 or 10 rows evenly


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.w1, self.w3 = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(WIDTH, HIDDEN, bias=False)
        self.w2 = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x):
        h = self.norm(x)
        q, k, v = (w(h).unflatten(-1, (-1, 3)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        x = x + self.wo(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))


class Llama(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(7)
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.RMSNorm(WIDTH)
        self.bfloat16()

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def cut(model, how):
    """Tensor parallelism under FSDP2, HSDP, FSDP2 alone, or all of it in one process."""
    if how == "one":
        return model
    world = dist.get_world_size()
    if how == "tensor":
        mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("data", "tensor"))
        plan = {f"w{i}": ColwiseParallel() for i in "qkv13"} | {"wo": RowwiseParallel(), "w2": RowwiseParallel()}
        parallelize_module(model, mesh["tensor"], {f"blocks.*.{name}": style for name, style in plan.items()})
        parallelize_module(model, mesh["tensor"], {"head": ColwiseParallel()})
        mesh = mesh["data"]
    elif how == "hsdp":
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh("cpu", (world,))
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh)
    return model


def made(recipe, how):
    model = cut(Llama(), how)
    optimizer = optim.AdamW(model.named_parameters(), lr=1e-2)
    hmpx.prepare(model, optimizer, recipe)
    return model, optimizer, dict(zip(model.parameters(), held_elements(how), strict=True))


def held_elements(how):
    """Which elements a rank holds, as torch cuts them out of a model of their indices."""
    model = Llama().double()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.arange(p.numel()).view(p.shape))
    params = cut(model, how).parameters()
    return [(p.to_local() if isinstance(p, DTensor) else p).detach().long() for p in params]


def train(model, optimizer, elements, start):
    """Steps with given gradients: what the batches of ranks add up to depends on their order.

    They come from a backward pass, in which `lean8` steps.
    """
    for step in range(start, start + STEPS):
        with torch.no_grad():
            model(torch.arange(8).view(2, 4))
        if hasattr(model, "reshard"):
            model.reshard()  # as a backward pass would
        generator = torch.Generator().manual_seed(step)
        for p in model.parameters():
            gradient = torch.randn(p.shape, generator=generator).bfloat16()
            held = p.to_local() if isinstance(p, DTensor) else p
            (held * gradient.view(-1)[elements[p]]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def found(model, optimizer, _):
    params = dict(model.named_parameters())
    state = {f"{n}.{k}": v for n, p in params.items() for k, v in optimizer.state[p].items() if torch.is_tensor(v)}
    group = optimizer.param_groups[0]
    return digest(params), digest(state), group["hmpx_step"], group["hmpx_seed"]


def _save(rank, how, folder):
    after = []
    for recipe in RECIPES:
        model, optimizer, _ = run = made(recipe, how)
        train(*run, 0)
        weights, state = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=f"{folder}/{recipe}")
        after.append(found(*run))
        hmpx.restore(optimizer)
    return after


def _resume(rank, how, folder):
    after = []
    for recipe in RECIPES:
        model, optimizer, _ = run = made(recipe, how)
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(0.5)
        weights, state = get_state_dict(model, optimizer)
        loaded = {"model": weights, "optimizer": state}
        dcp.load(loaded, checkpoint_id=f"{folder}/{recipe}")
        set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
        train(*run, STEPS)
        after.append(found(*run))
        hmpx.restore(optimizer)
    return after


@pytest.fixture(scope="module")
def one_process():
    after = []
    for recipe in RECIPES:
        run = made(recipe, "one")
        train(*run, 0)
        middle = found(*run)
        train(*run, STEPS)
        after.append((middle, found(*run)))
        hmpx.restore(run[1])
    return [[each[i] for each in after] for i in range(2)]


@pytest.mark.slow
def test_tensor_parallelism_under_fully_shard_has_the_bits_of_one_process(one_process, tmp_path):
    """Along the first dimension both cut, unevenly."""
    assert ranks.run(4, _save, "tensor", str(tmp_path)) == [one_process[0]] * 4


@pytest.mark.slow
@pytest.mark.parametrize("how", ["tensor", "hsdp"])
def test_saved_on_four_ranks_and_resumed_on_two_and_one(how, one_process, tmp_path):
    """Weights, state, step number and seed are those of a run in one process that nobody interrupted."""
    middle, end = one_process
    assert ranks.run(4, _save, how, str(tmp_path)) == [middle] * 4
    for world, other in ((2, "tensor"), (2, "plain"), (1, "plain"), (4, how)):
        assert ranks.run(world, _resume, other, str(tmp_path)) == [end] * world, (world, other)
    assert ranks.run(1, _resume, "one", str(tmp_path)) == [end]
