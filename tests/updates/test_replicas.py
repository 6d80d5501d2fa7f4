"""DistributedDataParallel and ZeroRedundancyOptimizer: replicas stay one model, whatever each rank's generator does."""

import contextlib
import gc
import io
import itertools

import pytest
import torch
from lion_pytorch import Lion
from torch import nn, optim
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import hmpx
from tests.support import ranks
from tests.support.same import same
from tests.support.sharded import digest
from tests.support.training import needs_grad_dtype

BF16 = torch.bfloat16
WAYS = ("stochastic", "master", "split", "split8")


class Net(nn.Module):
    """BF16 layers, one of them unused, and one in FP32."""

    def __init__(self, unused=False, checkpointed=False):
        super().__init__()
        torch.manual_seed(5)
        self.first, self.second, self.wide = nn.Linear(8, 16), nn.Linear(16, 4), nn.Linear(4, 2)
        self.bfloat16()
        self.wide.float()
        self.checkpointed = checkpointed
        if unused:
            self.unused = nn.Linear(3, 3).bfloat16()

    def forward(self, x):
        x = checkpoint(self.first, x.requires_grad_(), use_reentrant=True) if self.checkpointed else self.first(x)
        return self.wide(self.second(torch.relu(x)).float())


def inputs(step, micro, rank):
    generator = torch.Generator().manual_seed(10_000 * step + 100 * micro + rank)
    return torch.randn(4, 8, generator=generator).bfloat16()


def mean_gradients(model, step, world):
    """What DDP's all-reduce leaves: the sum of the ranks' shares, in the dtype of each gradient."""
    shares = []
    for rank in range(world):
        model.zero_grad()
        model(inputs(step, 0, rank)).square().sum().backward()
        shares.append([p.grad / world for p in model.parameters()])
    for p, *parts in zip(model.parameters(), *shares, strict=True):
        p.grad = sum(parts[1:], parts[0])


def _replicas(rank):
    found = {}
    for weights, static_graph in itertools.product(WAYS, (False, True)):
        model = DistributedDataParallel(Net(), static_graph=static_graph)
        optimizer = optim.AdamW(model.named_parameters(), lr=1e-2)
        hmpx.attach(optimizer, weights)
        torch.manual_seed(1000 + rank)
        for step in range(20):
            torch.rand(rank * 3 + 1)  # one rank draws more numbers than the other
            model(inputs(step, 0, rank)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        found[weights, static_graph] = digest(dict(model.module.named_parameters()))
    return found


def test_replicas_are_one_model_and_that_of_one_process():
    """Two ranks: a sum of two numbers does not depend on their order."""
    expected = {}
    for weights in WAYS:
        model = Net()
        optimizer = optim.AdamW(model.named_parameters(), lr=1e-2)
        handle = hmpx.attach(optimizer, weights)
        for step in range(20):
            mean_gradients(model, step, 2)
            optimizer.step()
        expected[weights] = digest(dict(model.named_parameters()))
        handle.detach()
    assert expected["stochastic"] != expected["master"] == expected["split"]  # no ties, or they would differ
    found = {(weights, static_graph): expected[weights] for weights in WAYS for static_graph in (False, True)}
    assert ranks.run(2, _replicas) == [found, found]


ENDS = [({}, "collected"), ({"static_graph": True}, "detached"), ({"gradient_as_bucket_view": True}, "detached")]


def _gradients_after_each_end(rank):
    return [_gradients_after(rank, *end) for end in ENDS]


def _gradients_after(rank, options, how):
    """Gradients of a replica whose optimizer accumulated in FP32 for two passes, and beside them torch's own."""
    found = []
    for attached in (True, False):
        replica = DistributedDataParallel(Net(), **options)
        optimizer = optim.SGD(replica.named_parameters(), lr=1e-3)
        if attached:
            handle = hmpx.attach(optimizer, use_fp32_grad_acc=True)
        gradients = []
        for step in range(5):
            if step == 2 and attached:
                if how == "detached":
                    handle.detach()
                else:  # collected as garbage
                    del handle, optimizer
                    gc.collect()
            replica.zero_grad()
            replica(inputs(step, 0, rank)).square().sum().backward()
            if step >= 2:
                gradients.append([p.grad.clone() for p in replica.parameters()])
        found.append(gradients)
    return same(*found)


@needs_grad_dtype
def test_a_replica_reduces_as_torch_does_when_nobody_accumulates_in_fp32_any_more():
    """On 3 ranks: a third is no number of FP32, and torch multiplies by it."""
    assert ranks.run(3, _gradients_after_each_end) == [[True] * len(ENDS)] * 3


REPLICAS = [  # options of DDP, and of the net
    ({}, {}),
    ({"gradient_as_bucket_view": True, "bucket_cap_mb": 0.0001}, {}),
    ({"find_unused_parameters": True}, {"unused": True}),
    ({"static_graph": True}, {"unused": True}),
    ({"static_graph": True, "gradient_as_bucket_view": True}, {"unused": True}),
    ({}, {"checkpointed": True}),
]


def _fp32_gradients_of_each(rank):
    return [_fp32_gradients(rank, *replica) for replica in REPLICAS]


def _fp32_gradients(rank, options, net):
    """Three micro-batches; each gradient beside the FP32 sum over micro-batches and ranks, made by hand."""
    model = Net(**net)
    replica = DistributedDataParallel(model, **options)
    optimizer = optim.SGD(replica.named_parameters(), lr=1e-3)
    hmpx.attach(optimizer, use_fp32_grad_acc=True)
    twin = Net(**net)
    right = []
    replica(inputs(9, 9, rank)).sum().backward()  # in its first pass a static graph is learnt, always synchronising
    model.zero_grad()
    for step in range(3):
        twin.load_state_dict(model.state_dict())
        for micro in range(3):
            with replica.no_sync() if micro < 2 else contextlib.nullcontext():
                replica(inputs(step, micro, rank)).square().sum().backward()
            if micro < 2:
                assert model.second.weight.grad.dtype is torch.float32
        sums = []
        for other in range(2):
            by_hand = {}
            for micro in range(3):
                twin.zero_grad()
                twin(inputs(step, micro, other)).square().sum().backward()
                for name, p in twin.named_parameters():
                    if p.grad is not None:
                        by_hand[name] = by_hand.get(name, 0) + p.grad.float()
            sums.append(by_hand)
        for name, p in model.named_parameters():
            if name in sums[0]:
                right.append(p.grad.dtype is torch.float32)
                right.append(torch.equal(p.grad, sums[0][name] / 2 + sums[1][name] / 2))
            else:
                right.append(p.grad is None)
        optimizer.step()
        optimizer.zero_grad(set_to_none=step == 1)
    hmpx.detach(optimizer)
    model.zero_grad()
    replica(inputs(0, 0, rank)).sum().backward()
    right.append(model.first.weight.grad.dtype is BF16 and bool(model.first.weight.grad.any()))
    hmpx.attach(optimizer, use_fp32_grad_acc=True)  # where there are BF16 gradients
    kept = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    replica(inputs(0, 1, rank)).sum().backward()
    twin.load_state_dict(model.state_dict())
    for other in range(2):
        twin.zero_grad()
        twin(inputs(0, 1, other)).sum().backward()
        sums[other] = {name: kept[name] + p.grad for name, p in twin.named_parameters() if p.grad is not None}
    right += [torch.equal(model.get_parameter(n).grad, each / 2 + sums[1][n] / 2) for n, each in sums[0].items()]
    return right, digest(dict(model.named_parameters()))


@needs_grad_dtype
def test_gradients_accumulate_and_are_exchanged_in_fp32():
    for replica, (right, weights), (too, others) in zip(REPLICAS, *ranks.run(2, _fp32_gradients_of_each), strict=True):
        assert all(right) and all(too) and len(right) > 20 and weights == others, replica


def _mixed_bucket(rank):
    """Two optimizers, one of which takes gradients as they come, and a parameter that only one rank uses."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)]).bfloat16()
    model.forward = lambda x: model[0](x) + model[1](x) if rank else model[0](x) + model[1](x) + model[2](x)
    replica = DistributedDataParallel(model, find_unused_parameters=True)
    first, second = optim.SGD(model[::2].parameters(), lr=1e-2), optim.SGD(model[1].parameters(), lr=1e-2)
    hmpx.attach(first, use_fp32_grad_acc=True)
    hmpx.attach(second)
    replica(torch.full((1, 4), 1.0 + rank, dtype=BF16)).sum().backward()
    kinds = [layer.weight.grad.dtype for layer in model]
    values = [layer.weight.grad.float().unique().tolist() for layer in model]
    first.step()
    second.step()
    return kinds, values, digest(dict(model.named_parameters()))


@needs_grad_dtype
def test_a_bucket_with_gradients_of_both_kinds():
    one, other = ranks.run(2, _mixed_bucket)
    assert one == other
    assert one[:2] == ([torch.float32, BF16, torch.float32], [[1.5], [1.5], [0.5]])


def _wrapped_again(rank, how):
    """Weights after five steps beside those of a model that keeps its first wrapper, and torch's plain reduction."""
    found = []
    for again in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).bfloat16()
        if how == "thawed":
            model[0].requires_grad_(False)
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        is_late = again and how == "wrapped late"
        replica = model if is_late else DistributedDataParallel(model)
        hmpx.attach(optimizer, "master", use_fp32_grad_acc=True)
        wrappers = [replica]
        for step in range(5):
            if how == "thawed" and step == 2:
                model[0].requires_grad_(True)
                replica = DistributedDataParallel(model)
            if again and (step >= 1 if how == "many times" else step == (0 if is_late else 2)):
                if how == "accumulated":
                    with replica.no_sync():  # which the next pass of the old wrapper would reduce
                        replica(inputs(step, 1, rank)).float().square().mean().backward()
                if how == "forward without backward":
                    replica(inputs(step, 7, rank))
                if how == "collected":
                    wrappers.clear()
                    del replica
                    gc.collect()
                replica = DistributedDataParallel(model, bucket_cap_mb=1e-4)
                wrappers.append(replica)
            elif how == "accumulated" and step == 2:
                with replica.no_sync():
                    replica(inputs(step, 1, rank)).float().square().mean().backward()
            used = wrappers[0] if how == "in turn" and again and step % 2 else replica
            used(inputs(step, 0, rank)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(digest(dict(model.named_parameters())))
        for p in model.parameters():
            assert p.grad is None
        model(inputs(9, 0, rank)).sum().backward()  # without a wrapper: nothing is reduced
        own = [p.grad.clone() for p in model.parameters()]
        assert all(gradient.dtype is torch.float32 for gradient in own)
        hmpx.detach(optimizer)
        model.zero_grad()
        model(inputs(9, 0, rank)).sum().backward()
        assert all(torch.equal(a.bfloat16(), p.grad) for a, p in zip(own, model.parameters(), strict=True))
    return found


AGAIN = (
    "kept", "collected", "many times", "thawed", "accumulated", "in turn", "forward without backward", "wrapped late",
)  # fmt: skip


def _in_each_way(rank):
    return {how: _wrapped_again(rank, how) for how in AGAIN}


@needs_grad_dtype
def test_a_model_that_is_wrapped_again_stays_one_model():
    """torch asks for a new wrapper after parameters were frozen or thawed; frameworks wrap after hmpx was told."""
    one, other = ranks.run(2, _in_each_way)
    assert [how for how in AGAIN if one[how] != other[how] or one[how][0] != one[how][1]] == []


def _parts(rank):
    """The wrapper goes to a part of the model, whose rest has none."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)).bfloat16()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    hmpx.attach(optimizer, use_fp32_grad_acc=True)
    whole = DistributedDataParallel(model)
    whole(inputs(0, 0, rank)).sum().backward()
    model.zero_grad()
    part = DistributedDataParallel(model[0])
    model[1](part(inputs(0, 0, rank))).sum().backward()
    ours = [p.grad for p in model.parameters()]
    shares = []
    for other in range(2):
        wide = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)).bfloat16()
        wide.load_state_dict(model.state_dict())
        wide(inputs(0, 0, other)).sum().backward()
        shares.append([p.grad.float() for p in wide.parameters()])
    means = [(a + b) / 2 for a, b in zip(*shares, strict=True)]
    return [torch.equal(a, b) for a, b in zip(ours, [*means[:2], *shares[rank][2:]], strict=True)]


@needs_grad_dtype
def test_a_wrapper_around_a_part_reduces_that_part():
    assert all(all(right) for right in ranks.run(2, _parts))


def _unfit(rank):
    def raises(match, act):
        with pytest.raises(hmpx.HmpxError, match=match):
            act()

    def batch(replica):
        return replica(torch.ones(1, 4, dtype=BF16)).sum().backward()

    model = nn.Linear(4, 4).bfloat16()
    optimizer = optim.SGD(model.parameters(), lr=1e-2)
    hmpx.attach(optimizer, release_gradients=True)
    batch(model)
    optimizer.step()
    replica = DistributedDataParallel(model)
    raises("release_gradients steps each parameter before", lambda: batch(replica))
    replica = DistributedDataParallel(nn.Linear(4, 4).bfloat16())
    late = optim.SGD(replica.parameters(), lr=1e-2)
    raises("release_gradients", lambda: hmpx.attach(late, release_gradients=True))
    batch(replica)
    assert replica.module.weight.grad is not None
    if hasattr(torch.Tensor, "grad_dtype"):
        hooked = DistributedDataParallel(nn.Linear(4, 4).bfloat16())
        hooked.register_comm_hook(None, lambda state, bucket: torch.futures.Future())
        unfit = optim.SGD(hooked.parameters(), lr=1e-2)
        raises("communication hook", lambda: hmpx.attach(unfit, use_fp32_grad_acc=True))
        assert all(p.grad_dtype is BF16 for p in hooked.parameters())
        model = nn.Linear(4, 4).bfloat16()
        early = optim.SGD(model.parameters(), lr=1e-2)
        hmpx.attach(early, use_fp32_grad_acc=True)
        hooked = DistributedDataParallel(model)
        hooked.register_comm_hook(None, default_hooks.allreduce_hook)
        for _ in range(2):  # for whoever catches the first error
            raises("communication hook", lambda: batch(hooked))


def test_what_ddp_cannot_go_with_is_said():
    ranks.run(2, _unfit)


OPTIMIZERS = [
    (optim.AdamW, {"lr": 1e-2}, {}),
    (optim.AdamW, {"lr": 1e-2}, {"weights": "master", "use_master_weights_in_ckpt": True}),
    (optim.SGD, {"lr": 1e-2, "momentum": 0.9}, {"weights": "split", "use_master_weights_in_ckpt": True}),
    (optim.Adafactor, {"lr": 1e-2}, {"state_dtype": BF16, "seed": 9}),
    (Lion, {"lr": 1e-3}, {}),
    (optim.SGD, {"lr": 1e-2, "momentum": 0.9}, {"weights": "split8", "use_master_weights_in_ckpt": True}),
    (optim.AdamW, {"lr": 1e-2}, {"state_dtype": "8bit"}),
    (optim.AdamW, {"lr": 1e-2}, {"state_dtype": "4bit"}),
    (optim.RMSprop, {"lr": 1e-3}, {"weights": "split8", "state_dtype": "8bit", "use_master_weights_in_ckpt": True}),
]


def _states(state_dict):
    return {
        f"{i}.{key}": value
        for i, values in state_dict["state"].items()
        for key, value in values.items()
        if isinstance(value, torch.Tensor)
    }


def _train(rank, replica, optimizer, start, stop):
    for step in range(start, stop):
        replica(inputs(step, 0, rank)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return digest(dict(replica.module.named_parameters()))


def _zero(rank, saved):
    """Six steps with the state on one rank each and with all of it everywhere; the states after them."""
    found = []
    for (cls, options, attached), blob in zip(OPTIMIZERS, saved or [None] * len(OPTIMIZERS), strict=True):
        row = []
        for zero in (False, True):
            replica = DistributedDataParallel(Net())
            params = [p for p in replica.parameters() if p.dtype is BF16]
            optimizer = ZeroRedundancyOptimizer(params, cls, **options) if zero else cls(params, **options)
            hmpx.attach(optimizer, model=replica, **attached)
            if blob is None:
                row.append(_train(rank, replica, optimizer, 0, 6))
            else:
                model_state, optimizer_state = torch.load(io.BytesIO(blob))
                replica.module.load_state_dict(model_state)
                optimizer.load_state_dict(optimizer_state)
                row.append(_train(rank, replica, optimizer, 6, 9))
            if zero:
                optimizer.consolidate_state_dict(to=0)
            if rank == 0:
                state = optimizer.state_dict()
                row += [digest(_states(state)), state["param_groups"][0]["hmpx_step"]]
                buffer = io.BytesIO()
                torch.save((replica.module.state_dict(), state), buffer)
        found.append((row, buffer.getvalue() if rank == 0 else None))
        if rank == 0:
            assert row[:3] == row[3:], (cls, row)
        else:
            assert row[0] == row[1], (cls, row)
    return found


def _never_interrupted(rank):
    found = []
    for cls, options, attached in OPTIMIZERS:
        replica = DistributedDataParallel(Net())
        optimizer = cls([p for p in replica.parameters() if p.dtype is BF16], **options)
        hmpx.attach(optimizer, model=replica, **attached)
        found.append(_train(rank, replica, optimizer, 0, 9))
    return found


@pytest.mark.slow
def test_zero_is_the_whole_optimizer_bit_for_bit_and_resumes():
    first = ranks.run(2, _zero, None)
    weights = [[row[0] for row, _ in rank] for rank in first]
    assert weights[0] == weights[1] and len(set(weights[0])) == len(OPTIMIZERS)
    second = ranks.run(2, _zero, [blob for _, blob in first[0]])
    assert [row[2] for row, _ in second[0]] == [9] * len(OPTIMIZERS)
    assert [row[0] for row, _ in second[0]] == ranks.run(2, _never_interrupted)[0]
    ranks.run(4, _zero, [blob for _, blob in first[0]])  # more ranks: other gradients, the same agreement


def _zero_in_a_region(rank):
    """Without an attachment parameters are known by position, the position in the whole optimizer."""
    found = []
    for zero in (False, True):
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))).bfloat16()
        with torch.no_grad():
            for i, p in enumerate(model.parameters()):
                p.fill_(1.0 + i)
        params = [{"params": list(model[:2].parameters()), "lr": 1e-2}]
        optimizer = (
            ZeroRedundancyOptimizer(params, optim.SGD, lr=1e-2) if zero else optim.SGD(params, lr=1e-2, momentum=0.0)
        )
        optimizer.add_param_group({"params": list(model[2].parameters())})
        scheduler = optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        for step in range(4):
            for i, p in enumerate(model.parameters()):
                p.grad = torch.full_like(p, 0.01 * (i + step + 1))
            with hmpx.disable_casts(seed=3):
                optimizer.step()
            scheduler.step()
        found.append(digest(dict(model.named_parameters())))
    return found


def test_zero_in_a_region_with_groups_and_a_scheduler():
    one, other = ranks.run(2, _zero_in_a_region)
    assert one == other and len(set(one)) == 1


def _overlap(rank):
    replica = DistributedDataParallel(nn.Linear(4, 4).bfloat16())
    optimizer = ZeroRedundancyOptimizer(replica.parameters(), optim.SGD, lr=1e-2, overlap_with_ddp=True)
    with pytest.raises(hmpx.HmpxError) as error:
        hmpx.attach(optimizer)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optim.SGD, lr=1e-2, parameters_as_bucket_view=True)
    with pytest.raises(hmpx.HmpxError, match="cast the model") as late:
        hmpx.prepare(model, optimizer, "bf16-sr")
    assert model[0].weight.dtype is torch.float32, late
    optimizer = ZeroRedundancyOptimizer(
        model.bfloat16().parameters(), optim.SGD, lr=1e-2, parameters_as_bucket_view=True
    )
    hmpx.prepare(model, optimizer, "bf16-sr")
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    return str(error.value), digest(dict(model.named_parameters()))


def test_zero_that_overlaps_or_whose_buckets_were_left_is_refused():
    one, other = ranks.run(2, _overlap)
    assert "overlap_with_ddp" in one[0] and one == other


def _failed_backward(rank):
    """A backward pass that raises leaves nothing behind that the next one would add."""
    replica = DistributedDataParallel(Net())
    optimizer = optim.SGD(replica.parameters(), lr=1e-2)
    hmpx.attach(optimizer, use_fp32_grad_acc=True)
    found = []
    for fail in (False, True):
        if fail:
            handle = replica.module.first.weight.register_hook(lambda gradient: 1 / 0)
            with pytest.raises(ZeroDivisionError), replica.no_sync():
                replica(inputs(1, 0, rank)).sum().backward()
            handle.remove()
            replica.zero_grad()
        replica(inputs(0, 0, rank)).sum().backward()
        found.append([p.grad.clone() for p in replica.parameters()])
        replica.zero_grad(set_to_none=False)
    return [torch.equal(a, b) and bool(a.any()) for a, b in zip(*found, strict=True)]


@needs_grad_dtype
def test_a_backward_that_fails_leaves_nothing_behind():
    assert all(all(right) for right in ranks.run(2, _failed_backward))
