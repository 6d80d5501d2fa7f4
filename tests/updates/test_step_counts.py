"""Ranks that would round by other numbers: what Join leaves behind is mended, everything else is an error on all."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn, optim
from torch.distributed.algorithms.join import Join
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

import hmpx
from tests.support import ranks

BF16 = torch.bfloat16


def _model():
    torch.manual_seed(3)
    return nn.Linear(32, 32).bfloat16()


def _batch(step, rank):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, 32, generator=generator).bfloat16()


def _train(replica, optimizer, rank, steps):
    for step in steps:
        optimizer.zero_grad()
        replica(_batch(step, rank)).float().square().mean().backward()
        optimizer.step()


def _joined(rank):
    replica = DistributedDataParallel(_model())
    optimizer = optim.SGD(replica.parameters(), lr=0.1)
    hmpx.attach(optimizer)
    for epoch in range(2):
        with Join([replica]):
            _train(replica, optimizer, rank, range(20 * epoch, 20 * epoch + 5 + 3 * rank))
    _train(replica, optimizer, rank, range(100, 110))
    return optimizer.param_groups[0]["hmpx_step"], [p.tolist() for p in replica.parameters()]


def test_replicas_agree_after_uneven_batches():
    (number, weights), (other, others) = ranks.run(2, _joined)
    assert number == other == 8 + 8 + 10 and weights == others


def _loads_alone(rank):
    replica = DistributedDataParallel(_model())
    optimizer = optim.SGD(replica.parameters(), lr=0.1)
    hmpx.attach(optimizer)
    _train(replica, optimizer, rank, range(3))
    if rank:
        state = optimizer.state_dict()
        state["param_groups"][0]["hmpx_step"] = 7
        optimizer.load_state_dict(state)
    with pytest.raises(hmpx.HmpxError) as error:
        _train(replica, optimizer, rank, range(3, 9))
    return str(error.value)


def test_a_rank_that_loads_alone_is_an_error_on_every_rank():
    for message in ranks.run(2, _loads_alone):
        assert "rank 1 differs from rank 0: step is 7, not 3" in message


def _refuses(rank):
    optimizer = optim.SGD(_model().parameters(), lr=0.1)
    begun = time.monotonic()
    with pytest.raises(hmpx.HmpxError) as error:
        hmpx.attach(optimizer, parameters={"nothing.*" if rank else "weight": "master"} if rank else {})
    return str(error.value), time.monotonic() - begun


def test_a_rank_that_refuses_to_attach_ends_the_attach_of_all_at_once():
    (told, waited), (own, _) = ranks.run(2, _refuses)
    assert told == f"hmpx.attach(SGD) was refused on rank 1: {own}" and "nothing.*" in own
    assert waited < 60  # of 300 that it would wait for a rank that does nothing


def _fsdp1(rank):
    torch.manual_seed(3)
    model = nn.Linear(32, 32)
    flat = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    before = [(p.dtype, p.detach().clone()) for p in flat.parameters()]
    with hmpx.activate("neuron-bf16-sr"), pytest.raises(hmpx.HmpxError):
        optim.SGD(flat.parameters(), lr=0.1)
    return all(
        p.dtype is dtype and torch.equal(p, old) for p, (dtype, old) in zip(flat.parameters(), before, strict=True)
    )


def test_fsdp1_is_refused_before_anything_is_changed():
    assert ranks.run(2, _fsdp1) == [True, True]


def _stages(rank):
    """Each rank is a stage of a pipeline, with parameters of its own."""
    groups = [torch.distributed.new_group([each]) for each in range(2)]
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(1 + rank)))
    optimizer = optim.SGD(model.named_parameters(), lr=0.1)
    hmpx.prepare(model, optimizer, "neuron-bf16-sr", process_group=groups[rank])
    hmpx.restore()
    with hmpx.activate("neuron-bf16-sr", process_group=groups[rank]):
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(1 + rank)))
        optimizer = optim.SGD(model.named_parameters(), lr=0.1)
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
    with pytest.raises(hmpx.HmpxError) as error:
        hmpx.attach(optim.SGD(_model().parameters() if rank else [_model().weight], lr=0.1))
    return str(error.value)


def test_stages_of_a_pipeline_have_a_process_group_of_their_own():
    for message in ranks.run(2, _stages):
        assert "number of parameters is 2, not 1" in message and "process_group=" in message


def _in_a_region(rank, seeds, is_replica):
    model = _model()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    replica = DistributedDataParallel(model) if is_replica else model
    try:
        for step in range(3):
            replica(_batch(step, 0)).float().square().mean().backward()
            with hmpx.disable_casts(seed=seeds[rank]):
                optimizer.step()
    except hmpx.HmpxError as error:
        return str(error)
    return [p.tolist() for p in model.parameters()]


def test_a_seed_of_each_rank_is_refused_in_a_region_too():
    said = ranks.run(2, _in_a_region, (0, 1), True)
    assert said[0] == said[1] and said[0].startswith("step 1 of SGD since its first in a region: rank 1 differs")
    assert "seed is 1, not 0" in said[0]
    one, other = ranks.run(2, _in_a_region, (5, 5), True)
    assert isinstance(one, list) and one == other


def test_models_that_are_no_replicas_may_have_seeds_of_their_own():
    one, other = ranks.run(2, _in_a_region, (0, 1), False)
    assert isinstance(one, list) and one != other
