"""A small model, the ways to shard it, and a hash that is the same however tensors are cut."""

import hashlib

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

BF16 = torch.bfloat16


def digest(tensors):
    """A hash of the bits of named tensors, sharded or not."""
    found = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        whole = tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()
        found.update(name.encode() + whole.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


class Small(nn.Module):
    """Layers whose rows two and four ranks cannot share evenly; or with rows of other lengths."""

    def __init__(self, taken=6, width=10):
        super().__init__()
        torch.manual_seed(7)
        self.sizes = taken, width
        self.first, self.norm, self.last = nn.Linear(taken, width), nn.LayerNorm(width), nn.Linear(width, 3)
        self.bfloat16()

    def forward(self, x):
        return self.last(torch.relu(self.norm(self.first(x))))


def fixed_gradients(model, step):
    """The same for every number of ranks: what the ranks' batches would add up to depends on their order."""
    generator, elements = torch.Generator().manual_seed(step), getattr(model, "elements", None)
    for name, p in model.named_parameters():
        whole = torch.randn(p.shape, generator=generator).bfloat16()
        if elements is not None:
            place = {"shape": p.shape, "stride": p.stride()}
            p.grad = DTensor.from_local(whole.view(-1)[elements[name]], p.device_mesh, p.placements, **place)
        else:
            p.grad = distribute_tensor(whole, p.device_mesh, p.placements) if isinstance(p, DTensor) else whole


def shard(model, how):
    """Cut a `Small` by FSDP2; "tensor": after tensor parallelism, both along the first dimension."""
    _cut(model, how)
    if how == "tensor":  # `distribute_tensor` cannot cut gradients so: they are picked by what torch cuts of indices
        indices = Small(*model.sizes).double()
        with torch.no_grad():
            for p in indices.parameters():
                p.copy_(torch.arange(p.numel()).view(p.shape))
        _cut(indices, how)
        model.elements = {name: p.to_local().detach().long() for name, p in indices.named_parameters()}
    return model


def _cut(model, how):
    world = dist.get_world_size()
    if how == "tensor":
        mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("data", "tensor"))
        parallelize_module(model, mesh["tensor"], {"first": ColwiseParallel(), "last": RowwiseParallel()})
        mesh = mesh["data"]
    elif how == "hsdp":
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh("cpu", (world,))
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32 if how == "policy" else None)
    for layer in (model.first, model.last, model):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
