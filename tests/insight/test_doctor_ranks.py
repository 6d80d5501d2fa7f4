"""`doctor` on two ranks: shards are looked at as weights are, and replicas are compared."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import hmpx
from tests.support import ranks

BF16 = torch.bfloat16
POLICY = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)


SHARDED = {  # how a model is cut, trained and held, and what is wrong
    "policy, whole, clip": set(),
    "BF16, stochastic": set(),
    "BF16, lost": {"lost updates", "optimizer state"},
    "tensor parallel": set(),
    "tensor parallel, BF16, lost": {"lost updates", "optimizer state"},
    "early": set(),
}


def _sharded(rank):
    """Train once without and once with doctor, in each way."""
    return {how: (_trained(how, False)[0], *_trained(how, True)) for how in SHARDED}


def _trained(how, looks):
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2,))
    model = nn.Sequential(nn.Sequential(nn.Linear(16, 64), nn.GELU()), nn.Linear(64, 16), nn.Linear(16, 4))
    model.to(BF16 if "BF16" in how else torch.float32)
    if "parallel" in how:
        parallelize_module(model, mesh, {"0.0": ColwiseParallel(), "1": RowwiseParallel()})
    else:
        policy = {"mp_policy": POLICY} if "policy" in how else {}
        fully_shard(model[0], mesh=mesh, **policy)
        fully_shard(model, mesh=mesh, **policy, **({"reshard_after_forward": False} if "whole" in how else {}))
    if "early" in how:
        with torch.no_grad():
            model(torch.randn(8, 16))  # the root stays whole, and the optimizer is given what FSDP2 will free
    optimizer = torch.optim.AdamW(model.parameters(), 1e-5 if "lost" in how else 1e-3, weight_decay=0)
    if "stochastic" in how:
        hmpx.attach(optimizer, model=model)

    def train():
        for step in range(12):
            x = torch.randn(16, 16, generator=torch.Generator().manual_seed(step))
            loss = (model(x.to(model[2].weight.dtype)).float() - x[:, :4]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            if "clip" in how:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

    found = None
    if looks:
        with hmpx.doctor() as found:
            train()
    else:
        train()
    parts = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    bits = [part.detach().float().sum(dtype=torch.float64).item() for part in parts]
    wrong = {each.kind for each in found.findings if each.wrong} if found else None
    return bits, wrong, found and found.status, found and found.not_checked


def test_shards_are_looked_at_as_weights_are_but_for_those_whose_memory_fsdp_has_freed():
    for found in ranks.run(2, _sharded):
        for how, kinds in SHARDED.items():
            plain, bits, wrong, status, not_checked = found[how]
            assert plain == bits and wrong <= kinds and ("lost updates" in wrong) == bool(kinds), (how, wrong)
            assert status == (2 if how == "early" else bool(kinds)), (how, not_checked)
            said = ["parameters of AdamW have no memory" in each for each in not_checked]
            assert any(said) if how == "early" else not said, (how, not_checked)


class Rounded(torch.optim.SGD):
    """Rounds weights in BF16 stochastically, by random numbers of the rank's own."""

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            exact = (p.float() - self.param_groups[0]["lr"] * p.grad.float()).view(torch.int32)
            p.copy_(((exact + torch.randint(1 << 16, exact.shape, dtype=torch.int32)) & -(1 << 16)).view(torch.float32))


SAID = {
    "reduced": [],
    "in DDP": [],
    "reduced, rounded by the rank": [("replicas", True)],
    "reduced, rounded by hmpx": [],
    "drifting": [("replicas", True)],
    "forgotten": [("replicas", True)],
    "averaged": [("replicas", False)],
    "fold": [("replicas", False)],
}


def _replicas(rank):
    return {how: _replica(rank, how) for how in SAID}


def _replica(rank, how):
    torch.manual_seed(0)
    model = nn.Linear(8, 4, bias=False, dtype=BF16 if "rounded" in how else torch.float32)
    optimizer = (Rounded if "by the rank" in how else torch.optim.SGD)(model.parameters(), 0.1)
    if "by hmpx" in how:
        hmpx.attach(optimizer)
    forward = nn.parallel.DistributedDataParallel(model) if how == "in DDP" else model
    torch.manual_seed(rank)
    with hmpx.doctor() as found:
        for step in range(12):
            x = torch.randn(16, 8, generator=torch.Generator().manual_seed(2 * step + rank))
            loss = forward(x.to(model.weight.dtype)).float().square().mean()
            optimizer.zero_grad()
            loss.backward()
            for p in model.parameters() if "reduced" in how or how == "drifting" else ():
                dist.all_reduce(p.grad)
            optimizer.step()
            if how == "drifting" and step == 5:
                model.weight.data[rank] = 0
            if how == "averaged" and step % 5 == 4:
                for p in model.parameters():
                    dist.all_reduce(p.data)
        if how == "fold":
            dist.all_gather_object([None, None], loss.item())
    return [(each.kind, each.wrong) for each in found.findings], found.not_checked


def test_replicas_part_where_gradients_are_reduced_or_ranks_never_talk():
    assert ranks.run(2, _replicas)[0] == {how: (said, []) for how, said in SAID.items()}
