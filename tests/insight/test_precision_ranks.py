"""What doctor says that gradients are summed in on two ranks, and what `--expect` says there."""

import json
import threading

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from hmpx.insight.doctor import examined
from tests.support import ranks

BF16, FP32 = torch.bfloat16, torch.float32


def _compressed(_, bucket):
    """Reduce in BF16, and widen what comes on another thread."""
    low, done = bucket.buffer().to(BF16).div_(2), torch.futures.Future()
    work = dist.all_reduce(low, async_op=True)

    def widen():
        work.wait()
        done.set_result(bucket.buffer().copy_(low))

    threading.Thread(target=widen).start()
    return done


def _trained(rank, how, expected=None, steps=4):
    """Return what a rank finds, as JSON has it."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Sequential(nn.Linear(16, 32), nn.GELU()), nn.LayerNorm(32), nn.Linear(32, 4))
    model = net = net.to(BF16 if "BF16" in how else FP32)
    if "DDP" in how:
        model = DistributedDataParallel(net)
        if "hook" in how:
            model.register_comm_hook(None, _compressed)
    elif "FSDP2" in how:
        policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=None if "own" in how else FP32)
        for each in (net[0], net):
            fully_shard(each, mesh=init_device_mesh("cpu", (dist.get_world_size(),)), mp_policy=policy)
    if "late" in how:  # FSDP2 asks trainable parameters, in the first forward pass, what to reduce in
        net.requires_grad_(False)
        model(torch.randn(8, 16, dtype=net[2].weight.dtype))
        net.reshard()
        net.requires_grad_(True)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    with examined(None, (), expected=expected) as found:
        for step in range(steps):
            optimizer.zero_grad()
            for part in range(2 if "twice" in how else 1):
                if "synced last" in how:
                    net.set_requires_gradient_sync(part == 1)
                x = torch.randn(8, 16, generator=torch.Generator().manual_seed(4 * step + 2 * part + rank))
                with torch.autocast("cpu", BF16, enabled="autocast" in how):
                    out = model(x.to(net[2].weight.dtype))
                out.float().square().mean().backward()
            optimizer.step()
    return json.loads(json.dumps(found.as_json())), found.status


def _all(rank, hows):
    return {how: _trained(rank, how)[0]["precision"] for how in hows}


SUMMED = {
    "DDP": {"all-reduce": "float32"},
    "DDP, autocast, twice": {"all-reduce": "float32", "add": "float32"},
    "DDP, BF16": {"all-reduce": "bfloat16"},
    "DDP, hook": {"all-reduce": "?"},  # it ends on another thread
    "FSDP2": {"reduce-scatter": "float32", "policy": "float32"},
    "FSDP2, own": {"reduce-scatter": "bfloat16"},
    "FSDP2, BF16": {"reduce-scatter": "float32", "policy": "float32"},
    "FSDP2, twice": {"reduce-scatter": "float32", "policy": "float32", "add": "float32"},
    "FSDP2, twice, synced last": {"reduce-scatter": "float32", "policy": "float32", "add": "float32"},
    "neither": {},
}


def test_gradients_are_summed_in_what_was_seen():
    found = ranks.run(2, _all, [*SUMMED])[0]
    for how, wanted in SUMMED.items():
        table, low = found[how], "BF16" in how
        assert [row["summed"] for row in table["rows"]] == [wanted] * 6, (how, table)
        assert {(row["master"], row["moved"]) for row in table["rows"]} == {("none", True)}, how
        assert {row["stored"] for row in table["rows"]} == {"bfloat16" if low else "float32"}, how
        assert {row["gradient"] for row in table["rows"]} == {"bfloat16" if low else "float32"}, how
        products = {row["computed"] for row in table["rows"] if row["kind"] == "rest"}
        assert products == {"bfloat16" if low or "FSDP2" in how or "autocast" in how else "float32"}, how
        assert (table["ranks"], table["rows"][0]["count"]) == (2, 512), how


def _again(rank, before, how):
    found, status = _trained(rank, how, before, steps=3)
    return [each["said"] for each in found["findings"] if each["kind"] == "expected"], status, found["not_checked"]


def _changed(rank):
    """Return what is said of a run in each of three ways, beside an earlier run; the last two are as before."""
    ways = ("FSDP2, BF16, late", "FSDP2, BF16"), ("FSDP2", "FSDP2"), ("DDP, autocast, twice", "DDP, autocast, twice")
    return [_again(rank, _trained(rank, before)[0]["precision"], now) for now, before in ways]


def test_a_reduction_in_another_dtype_than_the_policys_is_told_by_the_first_rank_and_healthy_runs_end_with_0():
    (changed, *healthy), (of_second, *others) = ranks.run(2, _changed)
    (said,), status, _ = changed
    assert said.startswith("reduce-scatter of gradients bf16 now, fp32 before: 6 parameters"), said
    assert status == 1 and of_second[0] == []
    assert healthy == others == [([], 0, [])] * 2


def test_the_table_of_one_rank_serves_for_two():
    before = ranks.run(1, _trained, "FSDP2")[0][0]["precision"]
    said, status, _ = ranks.run(2, _again, before, "FSDP2")[0]
    assert (said, status) == ([], 0)
