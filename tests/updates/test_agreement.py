"""Ranks that differ, or that fail, are told of."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.optim import ZeroRedundancyOptimizer

import hmpx
from tests.support import ranks

BF16 = torch.bfloat16


def _parameters(names=("a", "b"), value=1.0):
    return [(name, nn.Parameter(torch.full((4,), value, dtype=BF16))) for name in names]


def _attach_differently(rank, what):
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


@pytest.mark.parametrize(
    "what, difference",
    [
        ("names", "parameter 1's name is 'c', not 'b'"),
        ("shapes", "parameter 1's shape is [5], not [4]"),
        ("seed", "seed is 1, not 0"),
        ("recipe", "weights is 'split', not 'stochastic'"),
        ("step", "step is 7, not 0"),
    ],
)
def test_ranks_that_differ_are_all_told_when_they_attach(what, difference):
    (first, attached), (told, other) = ranks.run(2, _attach_differently, what)
    assert first == told and not attached and not other
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


class Failing(optim.SGD):
    fail = False

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(1.0)
                if self.fail:
                    raise ValueError("out of luck")


def _fail(rank, who, attached):
    """Step 2 fails on the ranks in `who`, whose users catch that and go on."""
    named = _parameters()
    optimizer = Failing(named, lr=1.0)
    if attached:
        hmpx.attach(optimizer)
    found = []
    for step in range(5):
        for _, p in named:
            p.grad = torch.ones_like(p)
        dist.barrier()  # the collectives of a backward pass
        Failing.fail = step == 2 and rank in who
        try:
            with hmpx.disable_casts():
                optimizer.step()
            found.append((named[0][1][0].item(), named[1][1][0].item()))
        except (hmpx.HmpxError, ValueError) as error:
            found.append((named[0][1][0].item(), named[1][1][0].item(), f"{type(error).__name__}: {error}"))
    return found


@pytest.mark.parametrize("attached", [True, False])
def test_no_rank_goes_on_after_another_ones_step_failed(attached):
    whole, failed = ranks.run(2, _fail, [1], attached)
    assert failed[:3] == [(2.0, 2.0), (3.0, 3.0), (3.0, 3.0, "ValueError: out of luck")]
    assert whole[:3] == [(2.0, 2.0), (3.0, 3.0), (4.0, 4.0)]
    message = whole[3][2]
    assert message.startswith("HmpxError: step 2 of Failing failed on rank 1 (ValueError: out of luck)")
    assert "differ by one step" in message and whole[3][:2] == (4.0, 4.0) and whole[4][2] == message


def test_ranks_that_fail_together_are_as_they_were_and_go_on():
    expected = [(2.0, 2.0), (3.0, 3.0), (3.0, 3.0, "ValueError: out of luck"), (4.0, 4.0), (5.0, 5.0)]
    assert ranks.run(2, _fail, [0, 1], True) == [expected] * 2


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
