"""Train the character transformer on several ranks, three ways, and see that the weights are the same, to the bit.

``torchrun --nproc-per-node 2 examples/distributed.py --mode ddp`` (or ``zero1``, ``fsdp2``); 1, 2 or 4 processes on
gloo, no GPU. With ``--checkpoint FOLDER`` it saves as it goes and resumes from the last complete checkpoint there,
whichever mode and number of ranks wrote it. Torch 2.13 or newer.

Each step takes four batches, shared out among the ranks. A batch's gradient does not depend on who computes it, nor
does a weight update on who makes it. What may is the order in which four gradients are added: that is done in FP32, and
the sum is rounded to BF16, so that a difference in its last bit is seldom seen.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from charlm import CharTransformer, batch, load_text, loss_of, validate
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import hmpx

BATCHES = 4  # a step
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)  # keyed by parameter: ranks may hold different ones


def distribute(model: nn.Module, mode: str, lr: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model, wrapped for `mode`, and an optimizer whose gradients are added up in FP32."""
    if mode == "fsdp2":
        for block in model.blocks:
            fully_shard(block, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
        fully_shard(model, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
    else:
        model = DistributedDataParallel(model)
    if mode == "zero1":
        optimizer = ZeroRedundancyOptimizer(list(model.parameters()), torch.optim.AdamW, lr=lr, weight_decay=0.01)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)
    hmpx.attach(optimizer, model=model, seed=0, use_fp32_grad_acc=mode != "fsdp2")
    return model, optimizer


def add_up_gradients(model: nn.Module, data: torch.Tensor, step: int) -> torch.Tensor:
    """Backward through this rank's batches; the ranks' gradients meet in the last of them. Returns the mean loss."""
    rank, share = dist.get_rank(), BATCHES // dist.get_world_size()
    total = torch.zeros(())
    for i in range(share):
        generator = torch.Generator().manual_seed(BATCHES * step + rank * share + i)
        is_last = i == share - 1
        if isinstance(model, DistributedDataParallel):
            model.require_backward_grad_sync = is_last  # what no_sync() sets
        else:
            model.set_requires_gradient_sync(is_last)
        loss = loss_of(model, *batch(data, generator)) / share
        loss.backward()
        total += loss.detach()
    for p in model.parameters():
        if p.grad.dtype is torch.float32:
            p.grad = p.grad.bfloat16()  # FSDP hands gradients over in the dtype of the weights, so all modes do
    dist.all_reduce(total)
    return total / dist.get_world_size()


def states(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    weights, state = get_state_dict(model, own(optimizer), options=FLAT)
    return {"model": weights, "optimizer": state}


def own(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer of what this rank steps."""
    return optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer


def resume(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> int:
    """Load the last checkpoint that is complete, and return its step; a save that was cut off has no `.metadata`."""
    complete = sorted(int(path.parent.name) for path in folder.glob("*/.metadata"))
    if not complete:
        return 0
    loaded = states(model, optimizer)
    dcp.load(loaded, checkpoint_id=folder / str(complete[-1]))
    set_state_dict(
        model,
        own(optimizer),
        model_state_dict=loaded["model"],
        optim_state_dict=loaded["optimizer"],
        options=FLAT,
    )
    return complete[-1]


def hash_of(model: nn.Module) -> str:
    """Of all weights, in the order of their names."""
    found = hashlib.sha256()
    for _, p in sorted((name.removeprefix("module."), p) for name, p in model.named_parameters()):
        whole = p.detach().full_tensor() if isinstance(p, DTensor) else p.detach()
        found.update(whole.contiguous().view(torch.int16).numpy().tobytes())
    return found.hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=("ddp", "zero1", "fsdp2"), default="ddp")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument(
        "--same-batch", action="store_true", help="one batch for every rank, whose gradients add exactly"
    )
    parser.add_argument("--checkpoint", type=Path, metavar="FOLDER")
    parser.add_argument("--every", type=int, default=50, metavar="N", help="save every N steps")
    options = parser.parse_args()

    torch.set_num_threads(1)  # on any number of ranks: threads share out sums, too
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo")
    ranks, first = dist.get_world_size(), dist.get_rank() == 0
    if BATCHES % ranks:
        raise SystemExit(f"{ranks} ranks cannot share {BATCHES} batches evenly; take 1, 2 or 4")
    training, validation, characters = load_text()
    torch.manual_seed(0)
    model, optimizer = distribute(CharTransformer(characters).bfloat16(), options.mode, options.lr)
    start = resume(model, optimizer, options.checkpoint) if options.checkpoint else 0
    torch.manual_seed(dist.get_rank())  # nothing below depends on a rank's own generator
    if first and start:
        print(f"resumed at step {start}")

    started = time.perf_counter()
    for step in range(start, options.steps):
        loss = add_up_gradients(model, training, step)
        optimizer.step()
        optimizer.zero_grad()
        if first:
            print(
                f"\r{options.mode}, {ranks} ranks  step {step + 1}/{options.steps}  loss {loss:.4f} ",
                end="",
                file=sys.stderr,
            )
        if options.checkpoint and (step + 1) % options.every == 0:
            dcp.save(states(model, optimizer), checkpoint_id=options.checkpoint / str(step + 1))
    reached, weights = validate(model, validation), hash_of(model)
    if first:
        print(file=sys.stderr)
        seconds = time.perf_counter() - started
        print(f"{options.mode}, {ranks} ranks, {options.steps} steps in {seconds:.0f} s: validation loss {reached:.4f}")
        print(f"weights {weights}")
        print("the same in every mode and on 1, 2 or 4 ranks, unless the order of adding gradients turned a last bit")
    dist.barrier()  # a thread of gloo that still holds a tensor when Python ends takes the process down with it
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
