"""A loop of your own in torchtitan's style, under a recipe: four lines, which are marked. In half a minute.

``python examples/titan_loop.py``, or on several ranks ``torchrun --nproc-per-node 2 examples/titan_loop.py``. The model
is made on the meta device, cast, sharded with `fully_shard`, and then given memory and its first weights; gradients are
clipped by their norm over all ranks, and the checkpoint goes through torch.distributed.checkpoint.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from charlm import CharTransformer, batch, load_text, loss_of, validate
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.utils import clip_grad_norm_

import hmpx  # 1


def build(characters: int) -> nn.Module:
    """On the meta device, sharded, then with memory and weights."""
    with torch.device("meta"):
        model = CharTransformer(characters)
    model.bfloat16()  # 2: before `fully_shard`; the recipe would refuse a model that is sharded in another dtype
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="neuron-bf16-sr", help="a recipe's name or file; default neuron-bf16-sr")
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()

    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("gloo", **alone)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    training, validation, characters = load_text()
    model = build(characters)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
    hmpx.prepare(model, optimizer, options.recipe)  # 3

    for step in range(options.steps):
        generator = torch.Generator().manual_seed(ranks * step + rank)
        loss = loss_of(model, *batch(training, generator))
        loss.backward()
        norm = clip_grad_norm_(model.parameters(), 1.0).full_tensor()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if rank == 0:
            line = f"\rstep {step + 1}/{options.steps}  loss {loss.item():.3f}  norm {norm.item():.2f} "
            print(line, end="", file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory() as folder:
        folders = [folder]
        dist.broadcast_object_list(folders)
        weights, state = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folders[0])
        dist.barrier()
    reached = validate(model, validation)
    hmpx.restore()  # 4: torch is as it was
    if rank == 0:
        print(file=sys.stderr)
        print(f"{options.recipe}, {ranks} rank{'s' * (ranks > 1)}: validation loss {reached:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
