"""`Attachment.updates()`: when it counts, what it says, and that no bit depends on it."""

from __future__ import annotations

import copy
import doctest
import gc
import inspect
import json
import re

import pytest
import torch
from torch import nn, optim
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor

import hmpx
from hmpx.updates.lost_updates import UpdateRow, Updates
from hmpx.updates.stepping import batching, update_counts
from hmpx.updates.stepping.update_counts import UpdateCounts
from tests.support import ranks
from tests.support.sharded import Small, digest, fixed_gradients
from tests.support.watched import BF16, WAYS, ClearsItsGradients, Whole, attached, drawn, give, parameters, train


@pytest.mark.parametrize(
    "settings",
    [
        *({"way": way} for way in WAYS),
        {"way": "stochastic", "fused": True},
        {"way": "stochastic", "state_dtype": BF16},
        {"way": "split", "release_gradients": True},
    ],
    ids=str,
)
def test_no_bit_changes_by_being_watched(settings, monkeypatch):
    """Of parameters in slices; of whole ones the FP32 copies of `test_update_counts.py` tell."""
    monkeypatch.setattr(batching, "_FLOOR", 64)
    found = []
    for is_watched in (False, True):
        params = parameters()
        optimizer = attached(optim.AdamW, {"lr": 1e-3}, params, **settings)
        if is_watched:
            assert optimizer.attachment.updates().active
        for step in range(5):
            if settings.get("release_gradients"):
                sum((p.float() * (drawn(100 + step)[name] * 1e-2)).sum() for name, p in params.items()).backward()
            else:
                give(params, step)
            optimizer.step()
        state = {f"{name}.{key}": v for name, p in params.items() for key, v in optimizer.state[p].items()}
        found.append((digest(params), digest(state)))
    assert found[0] == found[1]
    assert optimizer.attachment.updates().lost > 0.05


def test_what_does_not_move_says_why():
    """One without a gradient, one with zeros alone, one whose updates are lost, and results that are no numbers."""
    names = ("none", "zeros", "lost", "broken", "fine")
    params = {name: nn.Parameter(torch.ones(8, dtype=BF16)) for name in names}
    for cls in (optim.SGD, Whole, ClearsItsGradients):
        optimizer = cls(list(params.items()), lr=1e-4)
        updates = hmpx.attach(optimizer, "nearest").updates()
        for _ in range(3):
            for value, name in zip((0.0, 1.0, float("nan"), 1e3), names[1:], strict=True):
                params[name].grad = torch.full((8,), value, dtype=BF16)
            optimizer.step()
        rows = {row.name: row for row in updates.rows}
        assert [rows[name].no_gradient_steps for name in names] == [3, 0, 0, 0, 0]
        assert [rows[name].zero_gradient_steps for name in names] == [0, 3, 0, 0, 0]
        assert [rows[name].nonfinite for name in names] == [0, 0, 0, 24, 0]
        assert [rows[name].updates for name in names] == [0, 0, 24, 0, 24]
        assert [rows[name].idle_steps for name in names] == [3, 3, 3, 3, 0]
        assert updates.rows[0] is not None and updates.rows[0].name == "lost"
        hmpx.detach(optimizer)
        with torch.no_grad():
            for p in params.values():
                p.fill_(1)


def _raises_the_second_time():
    calls, compare = iter(range(10)), UpdateCounts.compare

    def compared(self, *segment):
        if next(calls):
            raise RuntimeError("no memory")
        compare(self, *segment)

    return compared


def test_steps_that_do_not_count(monkeypatch):
    """One that raises, before it writes or in the middle; one that a GradScaler skips; one for a checkpoint's sake."""
    params = parameters()
    optimizer = attached(ClearsItsGradients, {"lr": 1e-3}, params)
    updates = optimizer.attachment.updates()
    give(params, 0)
    with pytest.raises(ValueError, match="mine"):
        optimizer.step(lambda: (_ for _ in ()).throw(ValueError("mine")))
    assert updates.steps == 0 and updates.rows == []
    give(params, 0)
    optimizer.step()
    assert updates.steps == 1

    params = parameters()
    optimizer = attached(optim.SGD, {"lr": 1e-3}, params)
    updates, saved = optimizer.attachment.updates(), optimizer.state_dict()
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="no memory"):
        patch.setattr(UpdateCounts, "compare", _raises_the_second_time())
        give(params, 0)
        optimizer.step()
    optimizer.load_state_dict(saved)
    params["long"].grad = None
    optimizer.step()
    rows = {row.name: row for row in updates.rows}
    assert updates.steps == 1 and (rows["long"].updates, rows["long"].no_gradient_steps) == (0, 1)
    assert 0 < rows["matrix"].updates <= 960

    model = nn.Linear(8, 8).bfloat16()
    optimizer = optim.SGD(model.named_parameters(), lr=1e-3, momentum=0.9, fused=True)
    updates = hmpx.attach(optimizer).updates()
    model(torch.ones(2, 8, dtype=BF16)).sum().backward()
    optimizer.grad_scale, optimizer.found_inf = torch.ones(()), torch.ones(())
    optimizer.step()
    assert updates.steps == 0

    optimizer = optim.AdamW(model.named_parameters(), lr=1e-3)
    updates = hmpx.attach(optimizer).updates()
    optimizer.zero_grad()
    assert get_optimizer_state_dict(model, optimizer)["state"]
    assert updates.steps == 0 and updates.rows == []


def test_one_object_goes_on_until_it_is_closed():
    params = parameters()
    optimizer = attached(optim.SGD, {"lr": 1e-3}, params)
    attachment = optimizer.attachment
    first = attachment.updates()
    train(params, optimizer, 2)
    assert attachment.updates() is first and first.active and first.steps == 2
    with attachment.updates() as same:
        assert same is first
    assert not first.active
    train(params, optimizer, 2)
    assert first.steps == 2 and first["long"].steps == 2
    second = attachment.updates()
    assert second is not first and second.steps == 0 and "no update" in str(second)
    train(params, optimizer, 3)
    other = copy.deepcopy(optimizer)
    assert other._hmpx_attachment._updates.watch is None  # a copy is watched by nobody
    attachment.detach()
    assert (second.active, second.steps, first.steps) == (False, 3, 2) and second.rows
    with pytest.raises(hmpx.HmpxError, match=r"detached.* takes no steps .*hmpx\.attach\(optimizer\) first"):
        attachment.updates()
    hmpx.detach(other)


def test_an_optimizer_that_nobody_holds_is_watched_no_more():
    params = parameters()
    optimizer = attached(optim.SGD, {"lr": 1e-3}, params)
    updates = optimizer.attachment.updates()
    train(params, optimizer, 1)
    assert updates.active
    del optimizer
    gc.collect()
    assert not updates.active and updates.steps == 1 and updates.lost > 0
    with hmpx.disable_casts():  # what was collected is taken away on the next occasion
        pass


def test_nothing_is_in_the_way_of_a_step_that_nobody_watches(monkeypatch):
    monkeypatch.setattr(update_counts, "count", None)
    monkeypatch.setattr(update_counts, "UpdateCounts", None)
    params, seen = parameters(), []
    optimizer = attached(optim.SGD, {"lr": 1e-3}, params)
    updates = optimizer.attachment._updates
    make = updates._write_back
    monkeypatch.setattr(updates, "_write_back", lambda *call: seen.append(make(*call)) or seen[-1])
    train(params, optimizer, 2)
    assert [each.counts for each in seen] == [None] * 2


def test_plain_parameters_are_not_counted():
    params = {"half": nn.Parameter(torch.ones(8, dtype=BF16)), "full": nn.Parameter(torch.ones(8))}
    optimizer = optim.SGD(list(params.items()), lr=1e-3)
    updates = hmpx.attach(optimizer).updates()
    for p in params.values():
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert [row.name for row in updates.rows] == ["half"]
    with pytest.raises(hmpx.HmpxError, match="no update of a parameter 'halv' was counted; did you mean 'half'"):
        updates["halv"]
    with pytest.raises(hmpx.HmpxError, match="'full' was counted"):
        updates["full"]


def test_the_answer_is_yes_for_some_or_no():
    answers = []
    for rates in ((1e-6, 1e-6), (1e-6, 1.0), (1.0, 1.0)):
        small, large = nn.Parameter(torch.ones(10, dtype=BF16)), nn.Parameter(torch.ones(990, dtype=BF16))
        optimizer = optim.SGD(
            [{"params": [("small", small)], "lr": rates[0]}, {"params": [("large", large)], "lr": rates[1]}]
        )
        with hmpx.attach(optimizer, "nearest").updates() as updates:
            small.grad, large.grad = torch.ones_like(small), torch.ones_like(large)
            optimizer.step()
        answers.append(" ".join(str(updates).partition("here? ")[2].split()))
    assert answers == [
        "Yes: round-to-nearest would lose 100.0 % of the updates, and more than 5 % in 2 of 2 parameters, worst in "
        "'small' (100.0 %).",
        "For some parameters: round-to-nearest would lose 1.0 % of the updates, and more than 5 % in 1 of 2 "
        "parameters, worst in 'small' (100.0 %).",
        "No: round-to-nearest would lose 0.0 % of the updates, and more than 5 % in 0 of 2 parameters.",
    ]


def test_it_prints_as_a_table_a_terminal_wide_and_says_what_does_not_move(stored):
    """Names that are longer, and more parameters than the table shows."""
    given = dict.fromkeys((f"model.layers.{i}.self_attention.output_projection.weight" for i in range(22)), 1.0)
    given |= {"none": None, "zeros": 0.0, "broken": float("nan"), "fine": 1e3}
    params = {name: nn.Parameter(torch.ones(4, dtype=BF16)) for name in given}
    optimizer = optim.SGD(list(params.items()), lr=1e-4)
    updates = hmpx.attach(optimizer, "nearest").updates()
    for _ in range(3):
        for name, gradient in given.items():
            params[name].grad = None if gradient is None else torch.full((4,), gradient, dtype=BF16)
        optimizer.step()
    assert max(map(len, str(updates).splitlines())) <= 80
    stored("updates", str(updates))


def test_the_json_has_all_of_it():
    params = parameters()
    optimizer = attached(optim.AdamW, {"lr": 1e-3}, params, "split")
    updates = optimizer.attachment.updates()
    train(params, optimizer)
    found = json.loads(json.dumps(updates.as_json()))
    assert found["schema"] == 1 and (found["optimizer"], found["weights"], found["steps"]) == ("AdamW", "split", 5)
    assert found["lost"] == updates.lost and found["needed"] is True and found["threshold"] == 0.05
    assert [each["name"] for each in found["rows"]] == [row.name for row in updates.rows]
    assert found["rows"][0] == vars(updates.rows[0])
    assert sorted(found["rows"], key=lambda row: -row["lost"]) == found["rows"]


def test_the_docstrings_say_all_and_their_example_runs():
    said: list[str] = []
    (test,) = doctest.DocTestFinder(recurse=False).find(Updates, "Updates")
    doctest.DocTestRunner(verbose=False).run(test, out=said.append)
    assert test.examples and not said, "".join(said)
    for cls in (Updates, UpdateRow):
        own = {*vars(cls), *inspect.get_annotations(cls)}
        assert {name for name in own if not name.startswith("_")} <= set(re.split(r"\W+", cls.__doc__))


def _watched_on_one_rank(rank):
    model = fully_shard(Small())
    optimizer = optim.AdamW(model.named_parameters(), lr=1e-3)
    attachment = hmpx.attach(optimizer)
    updates = attachment.updates() if rank == 0 else None
    for step in range(3):
        fixed_gradients(model, step)
        optimizer.step()
    held = {name: p.to_local().numel() for name, p in model.named_parameters() if isinstance(p, DTensor)}
    if updates is not None:
        assert updates.steps == 3 and {row.name: row.elements for row in updates.rows} == held
    weights = digest(dict(model.named_parameters()))

    model = Small()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optim.AdamW, lr=1e-3)
    updates = hmpx.attach(optimizer, model=model).updates()
    fixed_gradients(model, 0)
    optimizer.step()
    return weights, [row.name for row in updates.rows]


def test_one_rank_may_watch_and_each_sees_its_own():
    """No rank waits for another: FSDP2 watched on the first alone. ZeRO: the parameters that a rank steps."""
    (first, mine), (second, yours) = ranks.run(2, _watched_on_one_rank)
    assert first == second
    assert mine and yours and sorted([*mine, *yours]) == sorted(dict(Small().named_parameters()))
