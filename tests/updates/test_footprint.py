"""The table of bytes against memory that is measured."""

import itertools

import pytest
import torch
from torch import nn, optim
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import hmpx
from hmpx.recipes.reading import read_recipe
from hmpx.recipes.recipe import footprint
from hmpx.shell.main import main
from hmpx.updates.holding.state_forms import STATE_FORMS
from hmpx.updates.holding.stores import WAYS, Settings
from tests.support import ranks
from tests.support.bench import memory
from tests.support.recipe_memory import RECIPES, assert_memory_of
from tests.support.sharded import Small, shard

BF16 = torch.bfloat16
SHAPE = 15, 133_312
COUNT = 4 * 15 * 133_312


@pytest.mark.parametrize(
    "settings, foreach",
    [
        *(({"weights": way, "state_dtype": torch.float32, "fused": False}, i % 2 == 1) for i, way in enumerate(WAYS)),
        *(({"weights": "master", "state_dtype": dtype, "fused": False}, False) for dtype in STATE_FORMS),
        ({"weights": "split8", "state_dtype": "8bit", "fused": False}, True),
        *(({"state_dtype": dtype}, None) for dtype in (torch.float32, "8bit", "4bit")),
        *(({"weights": way, "state_dtype": BF16}, None) for way in WAYS),
    ],
    ids=str,
)
def test_every_way_takes_what_the_table_says(settings, foreach):
    params = [nn.Parameter(torch.ones(SHAPE, dtype=BF16)) for _ in range(4)]
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer = optim.AdamW(params, foreach=foreach)
    hmpx.attach(optimizer, **settings)
    expected = footprint(Settings(**settings), BF16)
    _, stays = memory(optimizer.step, torch.device("cpu"))
    peak, left = memory(optimizer.step, torch.device("cpu"))
    assert stays / COUNT == pytest.approx(expected.masters + expected.state, abs=0.001)
    assert params[0].element_size() == expected.weights and params[0].grad.element_size() == expected.gradients
    most = expected.transient(COUNT, largest=COUNT // 4)
    least = most * (1 - 4 / expected.copies) if foreach else most  # of FP32 temporaries, a foreach step has one less
    assert 0.99 * least <= peak - left <= most * 1.01 + 100_000
    hmpx.detach(optimizer)


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_holds_and_takes_what_its_footprint_says(recipe):
    assert_memory_of(read_recipe(recipe), torch.device("cpu"))


def test_fp32_weights():
    params = [nn.Parameter(torch.ones(1000, 1000))]
    params[0].grad = torch.ones_like(params[0])
    _, stays = memory(optim.AdamW(params).step, torch.device("cpu"))
    expected = footprint(Settings(), torch.float32)
    assert stays / 1e6 == pytest.approx(expected.state + expected.masters, abs=0.001)
    assert (expected.weights, expected.gradients, expected.copies) == (4, 4, 0)


def _held_in_all(rank, modes, settings):
    return {(mode, i): _held(mode, each) for mode in modes for i, each in enumerate(settings)}


def _held(mode, settings):
    """Bytes per parameter of weights, gradients, masters and state on this rank."""
    model = Small()
    count = sum(p.numel() for p in model.parameters())
    if mode == "fsdp2":
        model = shard(model, "plain")
    elif mode != "one":
        model = DistributedDataParallel(model)
    params = list(model.parameters())
    if mode == "zero1":
        optimizer = ZeroRedundancyOptimizer(params, optim.AdamW, lr=1e-3)
    else:
        optimizer = optim.AdamW(params, lr=1e-3)
    attachment = hmpx.attach(optimizer, model=model, **settings)
    model(torch.ones(2, 6, dtype=BF16)).sum().backward()
    optimizer.step()
    inner = attachment.optimizer
    kept = [
        *params,
        *(p.grad for p in params),
        *itertools.chain(*attachment._updates.stores.beside()),
    ]
    kept += [v for values in inner.state.values() for v in values.values() if v.dim()]
    hmpx.detach(optimizer)
    return sum(t.nbytes for t in (t.to_local() if isinstance(t, DTensor) else t for t in kept)) / count


def test_what_two_ranks_hold():
    settings = [{}, {"weights": "master", "state_dtype": BF16}, {"weights": "split"}]
    kept = ("weights", "gradients", "masters", "state")
    cut = {"ddp": (), "zero1": ("masters", "state"), "fsdp2": kept}
    one, other = ranks.run(2, _held_in_all, list(cut), settings)
    for (mode, i), held in one.items():
        expected = footprint(Settings(**settings[i]), BF16)
        parts = {part: getattr(expected, part) for part in kept}
        on_rank = expected.on_rank(1e9, 2, mode) / 1e9 - (2 if mode != "fsdp2" else 0)  # buckets
        on_rank -= expected.copies / 60 / (1 if mode == "ddp" else 2)  # on a GPU, a sixtieth is stepped at once
        assert on_rank == pytest.approx(_on_two(parts, cut[mode]) / 2, abs=0.03)
        assert held + other[mode, i] == pytest.approx(_on_two(parts, cut[mode])), (mode, settings[i])


def _on_two(parts, cut):
    return sum(parts.values()) * 2 - sum(parts[part] for part in cut)


def test_the_command_prints_the_tables(capsys):
    """NxD: 2 + 4 + 4 + 8 bytes; of ZeRO-1 on 512 ranks 6 and a 512th of 12, with 2 of buckets."""
    assert main("explain nxd-standard --params 7e9 --ranks 1,8,64,512".split()) == 0
    lines = capsys.readouterr().out.splitlines()
    (nxd,) = [line.split() for line in lines if line.startswith("nxd-standard ")]
    assert nxd[1:6] == ["2.00", "4.00", "4.00", "8.00", "18.00"]
    (zero,) = [line.split() for line in lines if line.startswith("nxd-standard, zero1")]
    assert float(zero[-1]) * 2**30 / 7e9 == pytest.approx(2 + 4 + 2 + 12 / 512, abs=0.001)  # a step takes no more
    assert any(line.startswith("GiB on each rank, 7e+09 parameters") for line in lines)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--params 0", "no number of parameters"),
        ("--ranks 1,0", "0 is no count"),
        ("--params 7e9 --recipe nxd", "there is no recipe 'nxd'"),
        ("softmax --params 7e9", "softmax is none"),
    ],
)
def test_wrong_arguments(arguments, message, capsys):
    try:
        code = main(["explain", *arguments.split()])
    except SystemExit as left:
        code = left.code
    assert code == 2 and message in capsys.readouterr().err
