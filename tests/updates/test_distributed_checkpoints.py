"""Checkpoints through torch.distributed.checkpoint: saved on some ranks, resumed on others, to the bit."""

import os
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import optim
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel

import hmpx
from tests.support import ranks
from tests.support.sharded import Small, digest, fixed_gradients, shard

BF16 = torch.bfloat16
CASES = {
    "stochastic": (optim.AdamW, {"seed": 11}),
    "master": (optim.AdamW, {"weights": "master", "use_master_weights_in_ckpt": True}),
    "split": (optim.SGD, {"weights": "split", "use_master_weights_in_ckpt": True}),
    "momentum": (optim.SGD, {"weights": "split", "use_master_weights_in_ckpt": True, "state_dtype": BF16}),
    "flash": (
        optim.AdamW,
        {"weights": "split8", "use_master_weights_in_ckpt": True, "state_dtype": "8bit", "seed": 5},
    ),
    "4bit": (optim.AdamW, {"state_dtype": "4bit", "seed": 5}),
    "factored": (optim.Adafactor, {"state_dtype": BF16}),
}
CODED = {"flash", "4bit"}  # where rows are cut inside, their state is in BF16, under keys of its own


def _made(case, how, attached=None):
    cls, options = CASES[case]
    model = Small(32, 48) if case == "4bit" else Small()  # with rows that share bytes on any ranks
    if how == "ddp":
        model = DistributedDataParallel(model)
    elif how != "one":
        model = shard(model, how)
    momentum = {"momentum": 0.9} if case == "momentum" else {}
    optimizer = cls(model.named_parameters(), lr=1e-2, **momentum)
    hmpx.attach(optimizer, **(options if attached is None else attached))
    return model, optimizer


def _train(model, optimizer, start, stop):
    for step in range(start, stop):
        fixed_gradients(model, step)
        optimizer.step()
        optimizer.zero_grad()


def _states(model, optimizer, **options):
    weights, state = get_state_dict(model, optimizer, options=StateDictOptions(**options))
    return {"model": weights, "optimizer": state}


def _load(model, optimizer, folder, **options):
    options = StateDictOptions(**options)
    weights, state = get_state_dict(model, optimizer, options=options)
    loaded = {"model": weights, "optimizer": state}
    dcp.load(loaded, checkpoint_id=folder)
    set_state_dict(
        model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"], options=options
    )


def _found(model, optimizer):
    names = [name.removeprefix("module.") for name, _ in model.named_parameters()]
    state = {
        f"{name}.{key}": value
        for name, p in zip(names, model.parameters(), strict=True)
        for key, value in optimizer.state[p].items()
        if isinstance(value, torch.Tensor)
    }
    numbers = {key: optimizer.param_groups[0][key] for key in ("hmpx_step", "hmpx_seed")}
    return digest(dict(zip(names, model.parameters(), strict=True))), digest(state), numbers


def _save(rank, how, folder):
    for case in CASES:
        model, optimizer = _made(case, how)
        _train(model, optimizer, 0, 4)
        dcp.save(_states(model, optimizer), checkpoint_id=f"{folder}/{case}")


def _resume(rank, how, folder, other=""):
    found = {}
    for case, (_, attached) in CASES.items():
        model, optimizer = _made(case, how, {**attached, "seed": None})
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(0.5)
        if case in CODED and "tensor" in (how, other):
            with pytest.raises(dcp.CheckpointException, match="Missing key in checkpoint"):
                _load(model, optimizer, f"{folder}/{case}")
            continue
        _load(model, optimizer, f"{folder}/{case}")
        _train(model, optimizer, 4, 8)
        found[case] = _found(model, optimizer)
    return found


@pytest.fixture(scope="module")
def never_interrupted():
    found = {}
    for case in CASES:
        model, optimizer = _made(case, "one")
        _train(model, optimizer, 0, 8)
        found[case] = _found(model, optimizer)
        hmpx.restore(optimizer)
    return found


@pytest.mark.parametrize(
    "saved, resumed",
    [
        pytest.param((4, "hsdp"), (1, "plain"), marks=pytest.mark.slow),
        pytest.param((4, "tensor"), (2, "plain"), marks=pytest.mark.slow),
        pytest.param((2, "plain"), (4, "tensor"), marks=pytest.mark.slow),
        pytest.param((2, "ddp"), (4, "ddp"), marks=pytest.mark.slow),
        ((2, "ddp"), (2, "plain")),
    ],
)
def test_saved_on_some_ranks_and_resumed_on_others(saved, resumed, never_interrupted, tmp_path):
    ranks.run(saved[0], _save, saved[1], str(tmp_path))
    found = ranks.run(resumed[0], _resume, resumed[1], str(tmp_path), saved[1])
    refused = CODED if "tensor" in (saved[1], resumed[1]) else set()
    for case, expected in never_interrupted.items():
        if case in refused:
            assert not any(case in each for each in found), case
            continue
        assert [each[case] for each in found] == [expected] * resumed[0], case


def _asynchronous(rank, folder):
    """The checkpoint is of the moment of the call, however far training is when it is written."""
    model, optimizer = _made("master", "plain")
    _train(model, optimizer, 0, 4)
    own = dist.new_group(backend="gloo")  # the background thread must not talk between training's collectives
    writing = dcp.async_save(_states(model, optimizer), checkpoint_id=folder, process_group=own)
    _train(model, optimizer, 4, 8)
    writing.result()
    went_on = _found(model, optimizer)
    fresh, other = _made("master", "plain")
    _load(fresh, other, folder)
    _train(fresh, other, 4, 8)
    return went_on == _found(fresh, other), went_on


def test_an_asynchronous_save_is_of_the_moment_it_was_asked_for(never_interrupted, tmp_path):
    assert ranks.run(2, _asynchronous, str(tmp_path)) == [(True, never_interrupted["master"])] * 2


def _flattened(rank, folder):
    model, optimizer = _made("stochastic", "plain")
    _train(model, optimizer, 0, 4)
    dcp.save(_states(model, optimizer, flatten_optimizer_state_dict=True), checkpoint_id=folder)
    fresh, other = _made("stochastic", "plain", {})
    _load(fresh, other, folder, flatten_optimizer_state_dict=True)
    _train(fresh, other, 4, 8)
    return _found(fresh, other)


def test_the_flat_layout_of_state_dicts(never_interrupted, tmp_path):
    assert ranks.run(2, _flattened, str(tmp_path)) == [never_interrupted["stochastic"]] * 2


class _Killed(dcp.FileSystemWriter):
    """Dies as a machine does, between the first file and the last."""

    def write_data(self, plan, planner):
        super().write_data(plan, planner).wait()
        os.kill(os.getpid(), signal.SIGKILL)


def _killed_save(rank, folder):
    model, optimizer = _made("master", "plain")
    _train(model, optimizer, 0, 4)
    dcp.save(_states(model, optimizer), checkpoint_id=f"{folder}/step4")
    _train(model, optimizer, 4, 6)
    dist.barrier()
    dcp.save(_states(model, optimizer), storage_writer=_Killed(f"{folder}/step6"))


def _resume_the_last(rank, folder):
    complete = sorted(path.parent.name for path in Path(folder).glob("*/.metadata"))
    model, optimizer = _made("master", "plain")
    _load(model, optimizer, f"{folder}/{complete[-1]}")
    _train(model, optimizer, 4, 8)
    return complete, _found(model, optimizer)


def test_a_save_that_was_killed_leaves_the_one_before_it_readable(never_interrupted, tmp_path):
    with pytest.raises(ranks.RankFailed, match=r"exit codes \[-9, -9\]"):
        ranks.run(2, _killed_save, str(tmp_path))
    assert list((tmp_path / "step6").iterdir())  # it did begin
    assert ranks.run(2, _resume_the_last, str(tmp_path)) == [(["step4"], never_interrupted["master"])] * 2
