"""What somebody else does beside a step, or in its middle: ranks that die, forks, scalers, loads, lookups by object."""

import contextlib
import os
import signal
from datetime import timedelta

import pytest
import schedulefree
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import hmpx
from hmpx.updates.stepping import step_count
from tests.support import ranks
from tests.support.training import needs_grad_dtype, parameter, step_by
from tests.support.world import same_bits

BF16 = torch.bfloat16
_UNSCALE = "_amp_foreach_non_finite_check_and_unscale_"


class Plain(optim.Optimizer):
    """Subtracts a hundredth of the gradient."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure=None):
        for p in (p for group in self.param_groups for p in group["params"]):
            p.sub_(p.grad, alpha=0.01)


@pytest.mark.parametrize("options", [{}, {"weights": "master"}, {"fused": True}, {"state_dtype": "8bit"}], ids=str)
def test_a_step_in_inference_mode_is_a_step(options):
    found = []
    for inside in (False, True):
        p = parameter(4, 4)
        optimizer = optim.AdamW([p], lr=0.01)
        hmpx.attach(optimizer, **options)
        with torch.inference_mode() if inside else contextlib.nullcontext():
            step_by(optimizer)
        step_by(optimizer)
        found.append(p.detach())
    assert same_bits(*found)


def test_weights_that_move_outside_of_steps_are_refused():
    p = parameter(4)
    optimizer = schedulefree.ScheduleFreeWrapper(optim.SGD([p], lr=0.1), momentum=0.9)
    hmpx.attach(optimizer.base)
    optimizer.train()
    with pytest.raises(hmpx.HmpxError, match="SGD has state 'z' of parameter '0', which this class does not make"):
        step_by(optimizer)


def test_gradscaler_where_torch_has_no_kernel_for_bf16(monkeypatch):
    """A stub stands in for a GPU; the same weights as where the kernel is there."""
    kernel, found = getattr(torch, _UNSCALE), []

    def of_gpu(grads, found_inf, inv_scale):
        if any(grad.dtype is BF16 for grad in grads):
            raise NotImplementedError("not implemented for 'BFloat16'")
        kernel(grads, found_inf, inv_scale)

    for unscale in (kernel, of_gpu):
        monkeypatch.setattr(torch, _UNSCALE, unscale)
        torch.manual_seed(0)
        model = nn.Linear(8, 8).bfloat16()
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        hmpx.attach(optimizer)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(4):
            optimizer.zero_grad()
            loss = model(torch.ones(4, 8).bfloat16()).float().square().mean() * (float("inf") if step == 2 else 1)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        hmpx.restore(optimizer)
        found.append(([p.detach() for p in model.parameters()], scaler.get_scale()))
    (weights, scale), (same, too) = found
    assert all(map(same_bits, weights, same)) and scale == too == 512.0


class Forking(Plain):
    def step(self, closure=None):
        child = os.fork()
        if not child:
            os._exit(signal.getsignal(signal.SIGTERM) is not _own)
        self.status = os.waitpid(child, 0)[1]
        self.waits = signal.getsignal(signal.SIGTERM) is not _own


def _own(number, frame):
    raise KeyboardInterrupt


@pytest.fixture
def own_handler():
    before = signal.signal(signal.SIGTERM, _own)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("own_handler")
def test_a_child_that_is_forked_in_a_step_has_the_programs_handlers():
    optimizer = Forking([parameter(4)])
    hmpx.attach(optimizer)
    step_by(optimizer)
    assert optimizer.status == 0 and optimizer.waits and signal.getsignal(signal.SIGTERM) is _own


@pytest.mark.usefixtures("own_handler")
def test_a_signal_at_the_end_of_a_released_step_leaves_it_complete(monkeypatch):
    keep = step_count.keep

    def signalled(*args, **kwargs):
        os.kill(os.getpid(), signal.SIGTERM)  # it waits until the step is complete
        keep(*args, **kwargs)

    model, twin = nn.Linear(4, 4).bfloat16(), nn.Linear(4, 4).bfloat16()
    twin.load_state_dict(model.state_dict())
    found = []
    for each, is_signalled in ((model, True), (twin, False)):
        optimizer = optim.SGD(each.named_parameters(), lr=0.1)
        hmpx.attach(optimizer, release_gradients=True)
        for step in range(3):
            each(torch.ones(1, 4).bfloat16()).sum().backward()
            if is_signalled and step == 1:
                with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                    patch.setattr(step_count, "keep", signalled)
                    optimizer.step()
            else:
                optimizer.step()
            optimizer.zero_grad()
        found.append(optimizer.param_groups[0]["hmpx_step"])
    assert found == [3, 3] and same_bits(model.weight.detach(), twin.weight.detach())


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

    def forward(self, x, both):
        return self.a(x) + self.b(x) if both else self.a(x)


def _unused_in_the_last(rank):
    found = []
    for uses in ((True, False), (True, True, False), (False, False), (True, True)):
        model = Two().bfloat16()
        replica = DistributedDataParallel(model, find_unused_parameters=True)
        optimizer = optim.SGD(model.named_parameters(), lr=0.0)
        handle = hmpx.attach(optimizer, use_fp32_grad_acc=True)
        for i, both in enumerate(uses):
            with contextlib.nullcontext() if i == len(uses) - 1 else replica.no_sync():
                replica(torch.full((1, 4), 256.0 if i == 0 else 1.0).bfloat16(), both).float().sum().backward()
        found.append([None if p.grad is None else p.grad[0, 0].item() for p in model.parameters()])
        handle.detach()
    return found


@needs_grad_dtype
def test_a_parameter_that_the_last_micro_batch_leaves_out_keeps_its_fp32_sum():
    one, other = ranks.run(2, _unused_in_the_last)
    assert one == other == [[257.0, 256.0], [258.0, 257.0], [257.0, None], [257.0, 257.0]]


def _sums_of_fsdp(rank):
    said = []
    for policy in (MixedPrecisionPolicy(), MixedPrecisionPolicy(reduce_dtype=torch.float32)):
        model = nn.Sequential(nn.Linear(4, 4)).bfloat16()
        fully_shard(model, mp_policy=policy)
        optimizer = optim.SGD(model.named_parameters(), lr=0.0)
        handle = hmpx.attach(optimizer, use_fp32_grad_acc=True)
        for name in ("set_requires_gradient_sync", "set_requires_all_reduce"):
            try:
                getattr(model, name)(False)
                said.append("")
            except hmpx.HmpxError as error:
                said.append(str(error))
            getattr(model, name)(True)
        handle.detach()
        model.set_requires_gradient_sync(False)
    return said


@needs_grad_dtype
def test_sums_of_fsdp2_in_bf16_are_refused():
    for said in ranks.run(2, _sums_of_fsdp):
        assert all("MixedPrecisionPolicy(reduce_dtype=torch.float32)" in each for each in said[:2])
        assert said[2:] == ["", ""]


def _one_is_late(rank):
    optimizer = optim.SGD([("p", parameter(4))], lr=0.1)
    hmpx.attach(optimizer)
    step_by(optimizer)
    store = dist.distributed_c10d._get_default_store()
    store.set_timeout(timedelta(seconds=1))
    if rank:
        store.wait(["said"], timedelta(seconds=60))
        return ""
    with pytest.raises(hmpx.HmpxError) as error:
        step_by(optimizer)
    store.set("said", "")
    return str(error.value)


def test_a_rank_that_does_not_answer_is_named_within_the_jobs_own_timeout():
    said, _ = ranks.run(2, _one_is_late)
    assert "step 2 of SGD since hmpx.attach: rank 1 did not get there within 1 s" in said
