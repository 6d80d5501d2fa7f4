"""The frameworks' own DDP and FSDP2 on two ranks, on gloo: the weights of one process, and of a run without a break.

Both ranks see the same batches, so that the mean of their gradients is exact.
"""

from __future__ import annotations

import logging
import os
import socket
from pathlib import Path

import pytest

from tests.downstream.by_hand import RECIPES, ByHand, adamw, batches, bits, digest, loader, net
from tests.support import out_of_sight, ranks

pytestmark = pytest.mark.filterwarnings("ignore")
BATCHES = 4  # an epoch, of which there are two


def _as_torchrun_does(port: int) -> None:
    """The environment in which a script finds itself that torchrun has started."""
    world = os.environ["WORLD_SIZE"]
    os.environ.update(
        LOCAL_WORLD_SIZE=world, GROUP_RANK="0", TORCHELASTIC_RUN_ID="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def _by_lightning(rank: int, port: int, folder: str) -> dict:
    """The bits of each strategy's weights, of an unbroken run and of one that was resumed half-way."""
    _as_torchrun_does(port)
    import logging
    import warnings

    from tests.downstream import torchvision_ops  # noqa: F401

    warnings.filterwarnings("ignore")
    logging.disable(logging.INFO)
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
    from torch.distributed.fsdp import fully_shard

    from hmpx.integrations.lightning import HmpxPrecision
    from tests.downstream.lightning_net import Net

    out_of_sight.hide()

    class Sharded(Net):
        def configure_model(self):
            for part in (self.net[0], self.net[3], self.net):
                fully_shard(part, mesh=self.device_mesh["data_parallel"])

    def fit(recipe, shards, epochs, path=None):
        strategy = ModelParallelStrategy() if shards else DDPStrategy(process_group_backend="gloo")
        model = Sharded() if shards else Net()
        run = pl.Trainer(
            accelerator="cpu", devices=2, strategy=strategy, max_epochs=epochs, logger=False,
            use_distributed_sampler=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, plugins=HmpxPrecision(recipe),
        )  # fmt: skip
        run.fit(model, loader(BATCHES), ckpt_path=path)
        whole = {name: getattr(p, "full_tensor", lambda p=p: p)() for name, p in model.net.named_parameters()}
        return run, {name: digest(tensor) for name, tensor in whole.items()}

    found = {}
    for way, shards in (("stochastic", False), ("master", True)):
        path = Path(folder) / f"{way}.ckpt"
        found[way] = fit(RECIPES[way], shards, 2)[1]
        half, _ = fit(RECIPES[way], shards, 1)
        half.save_checkpoint(path)
        found[f"{way}, resumed"] = fit(RECIPES[way], shards, 2, path)[1]
    found["master, FP32 gradients"] = fit({**RECIPES["master"], "use_fp32_grad_acc": True}, False, 2)[1]
    return found


def test_lightnings_strategies_have_the_bits_of_one_process(tmp_path):
    found = ranks.run(2, _by_lightning, _free_port(), str(tmp_path))
    assert found[0] == found[1] and len(found[0]) == 5
    for name, weights in found[0].items():
        by_hand = ByHand(net(), name.split(",")[0], prefix="net.").train(batches(BATCHES) * 2)
        assert weights == bits(by_hand.model), name


def _by_transformers(rank: int, port: int, folder: str) -> dict:
    """The bits under DDP of an unbroken run, and of one that was resumed half-way."""
    _as_torchrun_does(port)
    import warnings

    import torch

    import hmpx
    from tests.downstream import torchvision_ops  # noqa: F401

    warnings.filterwarnings("ignore")
    from tests.downstream.trainer import NO_DROPOUT, gpt2, texts, trained

    out_of_sight.hide()
    # Each batch stands there twice, so that both ranks see it.
    data = [text for i in range(0, 32, 4) for text in texts()[i : i + 4] * 2]
    how = {"save_strategy": "steps", "save_steps": 4, "ddp_backend": "gloo", "weight_decay": 0.0, "max_grad_norm": 0.0}
    found = {}
    for way in ("stochastic", "master"):
        at = Path(folder) / way
        for name, resume in ((way, None), (f"{way}, resumed", str(at / "checkpoint-4"))):
            model = gpt2(**NO_DROPOUT)
            run = trained(model, RECIPES[way], at, resume, data=data, **how)
            assert isinstance(run.model_wrapped, torch.nn.parallel.DistributedDataParallel)
            found[name] = bits(model)
        hmpx.restore()
    return found


def test_transformers_under_ddp_has_the_bits_of_one_process(tmp_path):
    from tests.downstream import trainer

    found = ranks.run(2, _by_transformers, _free_port(), str(tmp_path))
    assert found[0] == found[1] and len(found[0]) == 4
    for name, weights in found[0].items():
        by_hand = trainer.by_hand(name.split(",")[0], lambda ps: adamw(ps, weight_decay=0.0))
        assert weights == bits(by_hand), name


def bits_of_shards(model) -> list[str]:
    return [digest(p.to_local()) for p in model.parameters()]


def _by_accelerate(rank: int, port: int, folder: str) -> dict:
    """The bits of an unbroken run and of one that was resumed half-way, by DDP and FSDP2."""
    _as_torchrun_does(port)
    import warnings

    import accelerate
    import torch
    from torch.distributed.fsdp import fully_shard

    import hmpx

    warnings.filterwarnings("ignore")
    out_of_sight.hide()

    def run(name, recipe, resume=False):
        accelerate.state.AcceleratorState._reset_state(True)
        shards = {"fsdp_version": 2, "reshard_after_forward": True, "auto_wrap_policy": "no_wrap"}
        plugin = accelerate.FullyShardedDataParallelPlugin(**shards) if name == "FSDP2" else None
        accelerator = accelerate.Accelerator(cpu=True, fsdp_plugin=plugin)
        model = net() if name == "DDP, before" else net().bfloat16()
        optimizer = adamw(model.parameters())
        if name == "DDP, before":
            hmpx.prepare(model, optimizer, recipe)
        model, optimizer = accelerator.prepare(model, optimizer)
        if name != "DDP, before":
            hmpx.prepare(model, optimizer, recipe)
        at = str(Path(folder) / name)
        if resume:
            accelerator.load_state(at)
        for i, (inputs, targets) in enumerate(batches()):
            if resume and i < 4:
                continue
            accelerator.backward(torch.nn.functional.cross_entropy(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
            if i == 3 and not resume:
                accelerator.save_state(at)
        hmpx.restore()
        whole = {name: getattr(p, "full_tensor", lambda p=p: p)() for name, p in model.named_parameters()}
        return {name.removeprefix("module."): digest(tensor) for name, tensor in whole.items()}

    sharded = net()
    fully_shard(sharded)
    optimizer, before = adamw(sharded.parameters()), bits_of_shards(sharded)
    with pytest.raises(hmpx.HmpxError, match="float32 and replicated or sharded already"):
        hmpx.prepare(sharded, optimizer, RECIPES["master"])
    assert bits_of_shards(sharded) == before and torch.ones(2, 2).matmul(torch.ones(2, 2)).dtype is torch.float32

    found = {}
    for name in ("DDP, before", "DDP", "FSDP2"):
        found[name] = run(name, RECIPES["master"])
        found[f"{name}, resumed"] = run(name, RECIPES["master"], resume=True)
    return found


def test_accelerates_ddp_and_fsdp2_have_the_bits_of_one_process(tmp_path):
    found = ranks.run(2, _by_accelerate, _free_port(), str(tmp_path))
    assert found[0] == found[1] and len(found[0]) == 6
    by_hand = bits(ByHand(net(), "master").train(batches()).model)
    assert found[0] == dict.fromkeys(found[0], by_hand)


def _widened(rank: int, port: int, when: str, mixed: str) -> tuple[list[str], set | None]:
    """Return what is said, and the dtypes that train. Accelerate has FSDP2 for GPUs alone, so it is told of one."""
    _as_torchrun_does(port)
    import accelerate
    import torch
    from accelerate.utils import DistributedType

    import hmpx

    plugin = accelerate.FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=False)
    by = accelerate.Accelerator(cpu=True, mixed_precision=mixed)
    by.state.distributed_type, by.state.fsdp_plugin = DistributedType.FSDP, plugin
    if mixed != "no":
        plugin.set_mixed_precision(mixed)
    said, keep = [], logging.Handler(logging.WARNING)
    keep.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("hmpx").addHandler(keep)
    model = net().bfloat16()
    optimizer = adamw(model.parameters())
    if when == "before":
        hmpx.prepare(model, optimizer, "bf16-sr")
    model, optimizer = by.prepare(model, optimizer)
    try:
        if when == "after":
            hmpx.prepare(model, optimizer, "bf16-sr")
    except hmpx.HmpxError as error:
        return [str(error)], None
    by.backward(model(torch.ones(2, 16)).float().square().sum())
    optimizer.step()
    return said, {str(p.dtype) for p in model.parameters()}


def test_weights_that_accelerate_widens_as_it_shards_them_are_told_and_what_is_told_helps():
    how = "Accelerate under mixed_precision='bf16' makes weights float32 as it shards them, under 'no' it does not"
    for when, dtypes, what in (
        ("after", None, "is torch.float32 and replicated or sharded already"),
        ("before", {"torch.float32"}, "were bfloat16 when it was attached, and are float32: its steps are plain ones"),
    ):
        for said, found in ranks.run(2, _widened, _free_port(), when, "bf16"):
            assert len(said) == 1 and what in said[0] and how in said[0] and found == dtypes, when
        assert ranks.run(2, _widened, _free_port(), when, "no") == [([], {"torch.bfloat16"})] * 2, when
