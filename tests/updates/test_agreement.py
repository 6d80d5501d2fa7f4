"""Ranks that differ are told of it, on all ranks, and Join is refused."""

import signal
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.algorithms.join import Join
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import hmpx
from hmpx.updates import ranks as agreement
from tests.support import ranks

BF16 = torch.bfloat16


def _parameters(names=("a", "b"), value=1.0):
    return [(name, nn.Parameter(torch.full((4,), value, dtype=BF16))) for name in names]


def _attach_differently(rank):
    return {what: _told_of(rank, what) for what in DIFFERENCES}


def _told_of(rank, what):
    names = ("a", "c") if what == "names" and rank == 1 else ("a", "b")
    named = _parameters(names)
    if what == "shapes" and rank == 1:
        named[1][1].data = torch.ones(5, dtype=BF16)
    options = {"seed": rank} if what == "seed" else {"weights": "split" if what == "recipe" and rank else "stochastic"}
    optimizer = optim.SGD(named, lr=1e-2)
    if what == "step" and rank:
        optimizer.param_groups[0]["hmpx_step"] = 7
    message = None
    try:
        hmpx.attach(optimizer, **options)
    except hmpx.HmpxError as error:
        message = str(error)
    return message, hasattr(optimizer, "_hmpx_attachment")


DIFFERENCES = {
    "names": "parameter 1's name is 'c', not 'b'",
    "shapes": "parameter 1's shape is [5], not [4]",
    "seed": "seed is 1, not 0",
    "recipe": "weights is 'split', not 'stochastic'",
    "step": "step is 7, not 0",
}


def test_ranks_that_differ_are_all_told_when_they_attach():
    first, other = ranks.run(2, _attach_differently)
    for what, difference in DIFFERENCES.items():
        told, attached = first[what]
        assert first[what] == other[what] and not attached
        expected = f"hmpx.attach(SGD): rank 1 differs from rank 0: {difference}"
        assert told.partition(";")[0] == expected and ("process_group=" in told) is ("parameter" in difference)


def _attach_alike(rank):
    """Several optimizers; some on a part of the ranks, where parameters may be others."""
    hmpx.attach(optim.SGD(_parameters(), lr=1e-2))
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    stage = rank // 2
    named = _parameters(("a", "b") if stage == 0 else ("x", "y", "z"))
    optimizer = optim.AdamW(named, lr=1e-2)
    hmpx.attach(optimizer, seed=stage, process_group=pairs[stage])
    alone = [dist.new_group([r]) for r in range(4)][rank]
    hmpx.attach(optim.AdamW(_parameters((str(rank),)), lr=1e-2), process_group=alone)
    for _, p in named:
        p.grad = torch.ones_like(p)
    optimizer.step()
    return optimizer.param_groups[0]["hmpx_step"]


def test_ranks_are_compared_with_those_that_hold_the_same_optimizer():
    assert ranks.run(4, _attach_alike) == [1] * 4


def _zero_named_differently(rank):
    model = nn.ModuleDict({("a", "b")[rank]: nn.Linear(4, 4)}).bfloat16()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optim.SGD, lr=1e-2)
    try:
        hmpx.attach(optimizer, model=model)
    except hmpx.HmpxError as error:
        return str(error)


def test_zero_compares_the_names_of_the_whole_optimizer():
    for message in ranks.run(2, _zero_named_differently):
        assert message.startswith(
            "hmpx.attach(ZeroRedundancyOptimizer): rank 1 differs from rank 0: parameter 0's name is 'b.weight', not "
            "'a.weight'"
        )


# In training


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
    """A plain optimizer may step less often on one rank; an attached one, and a copy of it, may not."""
    replica = DistributedDataParallel(_model())
    optimizer = optim.SGD(replica.parameters(), lr=0.1)
    other = nn.Linear(2, 2).bfloat16()
    hmpx.attach(optim.SGD(other.parameters(), lr=0.1))
    with Join([replica]):
        _train(replica, optimizer, rank, range(2 + rank))
    before = [p.tolist() for p in replica.parameters()]
    hmpx.attach(optimizer)
    zero = ZeroRedundancyOptimizer(_model().parameters(), optim.SGD, lr=0.1)
    hmpx.attach(zero)
    for joinable in (replica, zero):
        with pytest.raises(hmpx.HmpxError, match=r"Join: ranks with fewer .*drop_last=True"), Join([joinable]):
            raise AssertionError("not reached")
    with Join([replica], enable=False):
        pass
    assert [p.tolist() for p in replica.parameters()] == before
    hmpx.detach(optimizer)
    with Join([replica]):
        _train(replica, optimizer, rank, range(2 + rank))
    return [p.tolist() for p in replica.parameters()]


def test_join_is_refused_beside_an_attached_optimizer():
    one, other = ranks.run(2, _joined)
    assert one == other


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


def _ends_alone(rank, how, raised):
    """Rank 1 raises, from code of the user's or for want of memory. Returns what each rank is told, and when."""

    def named():
        if rank:
            raise raised("of rank 1")
        return iter(_model().named_parameters())

    model = _model().float()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    begun = time.monotonic()
    with pytest.raises((hmpx.HmpxError, raised)) as error:
        if how == "attach":
            hmpx.attach(optimizer, parameters={"nothing.*": "master"} if rank else {})
        elif how == "names":
            hmpx.attach(optimizer, names=(name for _ in (0,) for name, _ in named()))
        elif how == "prepare":
            if rank:
                model.named_parameters = lambda *args, **kwargs: named()
            hmpx.prepare(model, optimizer, "bf16-sr")
        elif how == "install":  # behind the last comparison, so the other rank raises at that of its step
            if rank:
                optimizer.register_state_dict_pre_hook(lambda _: named())
            hmpx.attach(optimizer.add_param_group({"params": _model().weight}) or optimizer, **_SAVED)
            optimizer.step()
        else:
            with hmpx.activate({"extends": "bf16-sr", "parameters": {"more.*": {"weights": "master"}}}):
                whole = nn.ModuleDict({"some" if rank else "more": model})
                optim.SGD(whole.parameters(), lr=0.1)
    return f"{error.type.__name__}: {error.value}", time.monotonic() - begun


_SAVED = {"weights": "master", "use_master_weights_in_ckpt": True}


@pytest.mark.parametrize(
    "how, raised, what",
    [
        ("attach", hmpx.HmpxError, "hmpx.attach(SGD)"),
        ("names", KeyboardInterrupt, "hmpx.attach(SGD)"),
        ("install", MemoryError, "hmpx.attach(SGD)"),
        ("prepare", MemoryError, "hmpx.prepare"),
        ("activate", hmpx.HmpxError, "hmpx.activate"),
    ],
)
def test_an_error_on_one_rank_ends_the_attach_of_all_at_once(how, raised, what):
    (told, waited), (own, _) = ranks.run(2, _ends_alone, how, raised)
    said = (
        f"was refused on rank 1: {own.partition(': ')[2]}" if raised is hmpx.HmpxError else f"failed on rank 1: {own}"
    )
    assert told == f"HmpxError: {what} {said}" and own.startswith(raised.__name__)
    assert waited < 60  # of 300 that it would wait for a rank that does nothing


def _comes_late(rank, why):
    """Rank 0 waits no longer, since it is interrupted or has no more patience; then the other one comes."""
    optimizer, store = optim.SGD(_model().parameters(), lr=0.1), dist.distributed_c10d._get_default_store()
    dist.barrier()
    if rank:
        store.wait(["gone"], timedelta(seconds=60))
    elif why == "patience":
        agreement._PATIENCE = timedelta(seconds=1)
    else:
        threading.Timer(0.5, signal.raise_signal, (signal.SIGINT,)).start()
    with pytest.raises((hmpx.HmpxError, KeyboardInterrupt)) as error:
        hmpx.attach(optimizer)
    store.set("gone", "")
    return f"{error.type.__name__}: {error.value}", hasattr(optimizer, "_hmpx_attachment")


@pytest.mark.parametrize("why, said", [("patience", "was refused on rank 0"), ("Ctrl-C", "failed on rank 0: Keyboard")])
def test_a_rank_that_comes_after_another_has_gone_is_not_attached_alone(why, said):
    (first, attached), (told, other) = ranks.run(2, _comes_late, why)
    assert ("rank 1 did not get there" in first) if why == "patience" else first.startswith("KeyboardInterrupt")
    assert said in told and not attached and not other


_AS_IT_IS = {"parameter_dtype": None, "weights": "nearest"}


def _in_other_dtypes(rank, how):
    """A recipe that leaves dtypes alone, and a rank that has loaded its model in another one."""
    model = _model().float() if rank else _model()
    with pytest.raises(hmpx.HmpxError) as error:
        if how == "prepare":
            hmpx.prepare(model, optim.SGD(model.parameters(), lr=0.1), _AS_IT_IS)
        else:
            with hmpx.activate(_AS_IT_IS):
                optim.SGD(model.parameters(), lr=0.1)
    return str(error.value)


@pytest.mark.parametrize("how", ["prepare", "activate"])
def test_a_rank_whose_model_is_in_another_dtype_is_told_so(how):
    said = f"hmpx.{how}: rank 1 differs from rank 0: list of optimizers in BF16 is [], not ['SGD']"
    assert ranks.run(2, _in_other_dtypes, how) == [said, said]


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
    groups = [dist.new_group([each]) for each in range(2)]
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
