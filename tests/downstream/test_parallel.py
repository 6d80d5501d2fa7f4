"""Models that are divided among processes: pipelines, and tensor parallelism under FSDP2."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn, optim

import hmpx
from tests.downstream.by_hand import AUTOCASTS
from tests.support import ranks

pytestmark = pytest.mark.filterwarnings("ignore")
BF16 = torch.bfloat16


def _model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8), nn.Linear(8, 4))


def _stage(rank, named):
    """GPipe over two ranks, each a group of its own; a stage calls its parameters 0.weight ... 1.bias."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    groups = [torch.distributed.new_group([each]) for each in range(2)]
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logging.getLogger("hmpx").addHandler(handler)
    first = 2 * rank
    stage_model = nn.Sequential(*_model()[first : first + 2]).bfloat16()
    optimizer = optim.AdamW(stage_model.parameters(), lr=1e-2)
    if named:
        parts = [name.partition(".") for name, _ in stage_model.named_parameters()]
        names = [f"{int(index) + first}.{rest}" for index, _, rest in parts]
        hmpx.attach(optimizer, names=names, process_group=groups[rank])
    hmpx.prepare(stage_model, optimizer, RECIPE, process_group=groups[rank])
    inside, outside = (torch.ones(2, size, dtype=BF16, requires_grad=True) for size in (8, 8 >> rank))
    stage = PipelineStage(stage_model, rank, 2, torch.device("cpu"), input_args=(inside,), output_args=outside)
    schedule = ScheduleGPipe(stage, 2, loss_fn=lambda out, target: (out.float() - target.float()).square().sum())
    for _ in range(5):
        schedule.step(*(() if rank else (_batch(),)), **({"target": torch.ones(4, 4)} if rank else {}))
        optimizer.step()
        optimizer.zero_grad()
    weights = [p.flatten().tolist() for p in stage_model.parameters()]
    return weights, [message for message in told if "Rounding goes by names" in message]


def _batch():
    return torch.arange(32.0).view(4, 8).bfloat16() / 32


RECIPE = {**AUTOCASTS, "weights": "stochastic"}


def test_two_stages_of_a_pipeline_have_the_bits_of_one_process():
    model = _model()
    optimizer = optim.AdamW(model.named_parameters(), lr=1e-2)
    hmpx.prepare(model, optimizer, RECIPE)
    for _ in range(5):
        losses = [(model(x).float() - 1).square().sum() for x in _batch().split(2)]
        for loss in losses:
            loss.div(2).backward()  # the schedule divides gradients by the number of micro-batches
        optimizer.step()
        optimizer.zero_grad()
    assert next(model.parameters()).dtype is BF16
    expected = [p.flatten().tolist() for p in model.parameters()]
    (first, quiet), (second, silent) = ranks.run(2, _stage, True)
    assert first + second == expected and not quiet + silent
    (first, _), (second, _) = ranks.run(2, _stage, False)  # names of the parts: other random numbers
    assert first + second != expected


def _tensor_parallel(rank):
    """A block with bias over two ranks by tensor, and those over two by FSDP2, under lists that cast in DTensor."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8)).bfloat16()
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["data"])
    optimizer = optim.SGD(model.named_parameters(), lr=0.1)
    hmpx.prepare(model, optimizer, AUTOCASTS)
    for step in range(3):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        out = model(x.bfloat16())
        out.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    hmpx.restore()
    return [p.full_tensor().detach().float().tolist() for p in model.parameters()]


def test_tensor_parallelism_with_bias_under_fsdp2_is_that_of_one_process():
    """All ranks have one result; beside one process, products are summed in another order."""
    first, *others = ranks.run(4, _tensor_parallel)
    assert others == [first] * 3
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8)).bfloat16()
    optimizer = optim.SGD(model.named_parameters(), lr=0.1)
    hmpx.prepare(model, optimizer, AUTOCASTS)
    for step in range(3):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        model(x.bfloat16()).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for p, found in zip(model.parameters(), first, strict=True):
        assert torch.allclose(p.float(), torch.tensor(found), rtol=2**-6, atol=2**-9)
