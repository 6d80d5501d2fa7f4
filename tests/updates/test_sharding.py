"""Sharded parameters: the weights are those of one process, however they are cut."""

import copy
import functools
import itertools
import math
import random
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh

import hmpx
from hmpx.rounding import native
from hmpx.rounding.shared import Span
from hmpx.rounding.state_codes import EIGHT_BITS
from hmpx.rounding.stochastic import Rounding, round_all
from hmpx.updates.holding.held import HeldCodes, HeldState, RoundingKey, Segment, held_states
from hmpx.updates.holding.sharding import Box
from hmpx.updates.holding.stores import Settings
from hmpx.updates.stepping import fused_batch
from hmpx.updates.stepping.released import Released
from tests.support import ranks
from tests.support.optimizers import UnlistedAdamW
from tests.support.sharded import Small, digest, fixed_gradients, shard
from tests.support.training import needs_grad_dtype

BF16 = torch.bfloat16
MIXED = {  # each in another way
    "parameters": {
        "[ab]": {"weights": "split", "state_dtype": "8bit"},
        "c": {"weights": "nearest", "state_dtype": BF16},
        "[bd]": {"weights": "master"},
    }
}
SHAPES = {"a": (16, 12), "b": (5, 7), "c": (13,), "d": (3, 4, 6), "e": (1, 2), "f": ()}
WIDE = {"a": (6, 300), "b": (400,), "c": (3, 9, 20), "d": (130, 2), "e": (2, 3, 4, 40)}  # blocks have 128 elements
MATRICES = {"a": (16, 12), "b": (5, 7), "e": (1, 2)}  # Muon takes nothing else


def drawn(shapes, seed):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}


def train(case, place=lambda tensor: tensor):
    """Four steps with given gradients; hashes of the weights and of the state, and the kinds of the state."""
    cls, options, attached, shapes = case
    params = {name: nn.Parameter(place(weight)) for name, weight in drawn(shapes, 3).items()}
    optimizer = cls(list(params.items()), **options)
    handle = hmpx.attach(optimizer, **attached)
    for step in range(4):
        for name, gradient in drawn(shapes, 100 + step).items():
            params[name].grad = place(gradient)
        versions = {p: p._version for p in params.values()}
        optimizer.step()
        assert all(p._version > before for p, before in versions.items())  # by which autograd knows of the write
    state = {f"{n}.{k}": v for n, p in params.items() for k, v in held_states(optimizer.state[p], p).items()}
    state = {key: value.whole() if isinstance(value, HeldState) else value for key, value in state.items()}
    handle.detach()
    return digest(params), digest(state)


ELEMENT = [
    (optim.AdamW, {"lr": 1e-2}, {}, SHAPES),
    (optim.AdamW, {"lr": 1e-2, "foreach": False}, {"weights": "split"}, SHAPES),
    (optim.AdamW, {"lr": 1e-2}, {"weights": "master", "state_dtype": BF16}, SHAPES),
    (optim.SGD, {"lr": 1e-2, "momentum": 0.9}, {"state_dtype": BF16}, SHAPES),
    (optim.AdamW, {"lr": 1e-2}, {"state_dtype": "8bit"}, SHAPES),
    (optim.SGD, {"lr": 1e-2, "momentum": 0.9}, {"weights": "split8", "state_dtype": "8bit"}, WIDE),
    (optim.AdamW, {"lr": 1e-2}, {"state_dtype": "fp8"}, WIDE),
    (optim.AdamW, {"lr": 1e-2}, {"state_dtype": "4bit"}, WIDE),
    (optim.SGD, {"lr": 1e-2, "momentum": 0.9}, {"state_dtype": "4bit"}, SHAPES),
    (optim.RAdam, {}, {"weights": "nearest"}, SHAPES),
    (optim.AdamW, {"lr": 1e-2}, MIXED, SHAPES),
]
ELEMENT += [
    (cls, options, {**attached, "fused": False}, shapes)
    for cls, options, attached, shapes in ELEMENT
    if cls is not optim.RAdam
]
PARAMETER = [
    (optim.Adafactor, {}, {}, SHAPES),
    (optim.Adafactor, {}, {"weights": "split", "state_dtype": BF16}, SHAPES),
    (optim.Muon, {}, {"weights": "master"}, MATRICES),
    (optim.Muon, {}, {"state_dtype": BF16}, MATRICES),
    (optim.Muon, {}, {"state_dtype": "8bit"}, {**MATRICES, "g": (6, 300)}),
    (optim.Adafactor, {}, {"state_dtype": "8bit"}, SHAPES),
    (optim.Adafactor, {}, {"state_dtype": "4bit"}, SHAPES),
    (optim.Adafactor, {}, MIXED, SHAPES),
]
CASES = [*ELEMENT, *PARAMETER]


def as_cut(case, dims):
    """The same, with state in BF16 where codes are asked for and these dimensions cut the blocks of a parameter."""
    cls, options, attached, shapes = case
    ways, rules = Settings(**attached), dict(attached.get("parameters", {}))
    for name, shape in shapes.items():
        way, cut = ways.way(name), [dim if dim < len(shape) else 0 for dim in dims if shape]
        first = max(len(shape) - 1, 0)
        while first > 1 and math.prod(shape[first:]) < 128:
            first -= 1
        if isinstance(way.state_dtype, str) and max(cut, default=-1) >= first:
            rules[name] = {"weights": way.weights, "state_dtype": BF16}
    return cls, options, {**attached, "parameters": rules}, shapes


def placer(mesh, *placements):
    """Cut along the given dimensions where a tensor has them, else along its first."""

    def place(tensor):
        fitting = [p if not isinstance(p, Shard) or p.dim < tensor.dim() else Shard(0) for p in placements]
        fitting = [Replicate() if isinstance(p, Shard) and not tensor.dim() else p for p in fitting]
        if len({p.dim for p in fitting if isinstance(p, Shard)}) < sum(isinstance(p, Shard) for p in fitting):
            fitting = [Replicate(), *fitting[1:]]
        return distribute_tensor(tensor, mesh, fitting, src_data_rank=None)  # every rank has all of it: none sends

    return place


def cuts(world):
    """The dimensions that are cut, by the mesh's; None is replicated."""
    return [(0,), (1,), *([(0, 1), (2, 0), (2, 1), (None, 0)] if world == 4 else [(2,), (None,)])]


def _cut_in_every_way(rank, cases):
    world = dist.get_world_size()
    meshes = {1: init_device_mesh("cpu", (world,))}
    if world == 4:
        meshes[2] = init_device_mesh("cpu", (2, 2))
    ways = [
        placer(meshes[len(dims)], *(Replicate() if dim is None else Shard(dim) for dim in dims)) for dims in cuts(world)
    ]
    return [[train(case, way) for way in ways] for case in cases]


@functools.cache
def of_one_process(number, dims):
    return train(as_cut(CASES[number], dims))


@pytest.mark.parametrize("world", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_however_parameters_are_cut_the_weights_are_those_of_one_process(world):
    every = slice(None, None, 5 if world == 1 else 1)  # alone a rank holds whole tensors
    for found in ranks.run(world, _cut_in_every_way, CASES[every]):
        for number, ways in zip(range(len(CASES))[every], found, strict=True):
            for dims, way in zip(cuts(world), ways, strict=True):
                cut = tuple(dim for dim in dims if dim is not None) if world > 1 else ()
                assert way == of_one_process(number, cut), (CASES[number], dims)


def _taken_by_kernels(rank):
    """The names of the parameters that kernels have stepped, by the dimension that is cut and by how state is held."""
    line, found = init_device_mesh("cpu", (dist.get_world_size(),)), {}
    for dim, state_dtype in itertools.product((0, 1), (torch.float32, "8bit")):
        stepped = []

        class Told(fused_batch.KernelBackend):
            def __init__(self, taken, *args, stepped=stepped):
                super().__init__(taken, *args)
                stepped += [each.segment.name for each in taken]

        with mock.patch.object(fused_batch, "KernelBackend", Told):
            train((optim.AdamW, {}, {"state_dtype": state_dtype}, SHAPES), placer(line, Shard(dim)))
        found[dim, state_dtype] = {*stepped}
    return found


@pytest.mark.skipif(native.library() is None, reason="no C compiler here, so the kernels do not run")
def test_kernels_take_shards_of_whole_rows():
    """Not what has gaps, which steps by the formula, to the same bits."""
    for found in ranks.run(2, _taken_by_kernels):
        assert found[0, torch.float32] == found[0, "8bit"] == {*SHAPES}
        assert found[1, torch.float32] == found[1, "8bit"] == {"c", "e", "f"}


def _from_codes_of_before(rank):
    """State of the sharded parameters in codes, of which hmpx 0.2 held parts of a block, is there; then a step."""
    mesh, found = init_device_mesh("cpu", (2,)), {}
    for dim, shape in ((0, (300,)), (1, (4, 300))):
        value = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        whole = HeldCodes.new(EIGHT_BITS, value)
        whole.write(Segment(nn.Parameter(value.bfloat16()), "w"), value, "w.m", RoundingKey(0, 0))
        p = nn.Parameter(distribute_tensor(torch.ones(shape, dtype=BF16), mesh, [Shard(dim)]))
        optimizer = optim.SGD([("w", p)], lr=0.0, momentum=1.0)
        p.grad = torch.zeros_like(p)
        scales = distribute_tensor(whole.scales, mesh, [Replicate()])
        codes = distribute_tensor(whole.tensor, mesh, [Shard(dim)])
        optimizer.state[p] = {"hmpx_codes_momentum_buffer": codes, "hmpx_scales_momentum_buffer": scales}
        hmpx.attach(optimizer, state_dtype="8bit")
        optimizer.step()
        state = optimizer.state[p]["momentum_buffer"]
        found[dim] = [*optimizer.state[p]], state.dtype is BF16, torch.equal(state.full_tensor().float(), whole.whole())
    return found


def test_codes_of_blocks_that_ranks_share_are_loaded_into_bf16():
    for found in ranks.run(2, _from_codes_of_before):
        assert found == dict.fromkeys((0, 1), (["momentum_buffer"], True, True))


def test_a_box_knows_where_its_elements_stand():
    """Against indices that torch cuts out of an arange."""
    generator = random.Random(0)
    for _ in range(2000):
        whole = tuple(generator.randint(1, 5) for _ in range(generator.randint(0, 4)))
        offsets = tuple(generator.randint(0, size) for size in whole)
        sizes = tuple(generator.randint(0, size - offset) for size, offset in zip(whole, offsets, strict=True))
        cut = tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))
        indices = torch.arange(torch.Size(whole).numel()).view(whole)[cut].reshape(-1).tolist()
        start = generator.randint(0, len(indices))
        stop = generator.randint(start, len(indices))
        found = []
        for span in Box.cut(whole, sizes, offsets).spans(start, stop):
            assert span.start == start + len(found) and (span.stop - span.start) % span.width == 0
            for row in range((span.stop - span.start) // span.width):
                first = span.offset + row * span.stride
                found += range(first, first + span.width)
        assert found == indices[start:stop]


def test_rows_of_a_huge_parameter_are_rounded_as_its_elements():
    """A parameter of more than 2^32 elements, by offsets: element by element against rows."""
    for offset, (width, stride) in itertools.product(
        [5, 2**32 - 20, 2**32 - 7, 2**32 - 3, 2**33 - 40], [(7, 13), (8, 8), (1, 2), (600, 2**31)]
    ):
        x = torch.randn(4 * width)
        rows = torch.empty(4 * width, dtype=BF16)
        round_all([Rounding(rows, x, "w", [Span(0, 4 * width, offset, width, stride)])], 1, 2)
        starts = [offset + i // width * stride + i % width for i in range(len(x))]
        singly = [
            hmpx.stochastic_round(x[i : i + 1], seed=1, step=2, name="w", offset=at) for i, at in enumerate(starts)
        ]
        assert torch.equal(rows, torch.cat(singly)), (offset, width)


def test_a_box_of_a_parameter_of_more_than_two_to_the_32_elements():
    """2^34 elements in rows of 2^14, the fourth eighth of every row: worked by hand."""
    box = Box.cut((2**20, 2**14), (2**20, 2**11), (0, 3 * 2**11))
    (last,) = box.spans(2**31 - 5, 2**31)
    assert last == (2**31 - 5, 2**31, (2**20 - 1) * 2**14 + 4 * 2**11 - 5, 5, 2**14)
    (rows,) = box.spans(2**29, 2**29 + 2 * 2**11)
    assert rows == (2**29, 2**29 + 2**12, 2**18 * 2**14 + 3 * 2**11, 2**11, 2**14) and rows.offset > 2**32


def _gradients_cut_in_another_way(rank):
    mesh = init_device_mesh("cpu", (2,))
    found = []
    for placements in ([Shard(0)], [Replicate()], [Shard(1)], [Partial()]):
        for cls in (optim.AdamW, optim.Adafactor):
            p = nn.Parameter(distribute_tensor(drawn({"w": (6, 4)}, 1)["w"], mesh, [Shard(0)]))
            optimizer = cls([("w", p)], lr=1e-2)
            hmpx.attach(optimizer)
            for step in range(3):
                whole = drawn({"w": (6, 4)}, 50 + step)["w"]
                if placements == [Partial()]:
                    p.grad = DTensor.from_local(whole if rank == 0 else torch.zeros_like(whole), mesh, placements)
                else:
                    p.grad = distribute_tensor(whole, mesh, placements)
                optimizer.step()
            found.append(digest({"w": p}))
    return found


def test_gradients_may_be_sharded_in_another_way_than_the_parameter():
    for found in ranks.run(2, _gradients_cut_in_another_way):
        assert len(set(found[::2])) == len(set(found[1::2])) == 1 and found[0] != found[1]


def _fully_sharded(rank, how):
    found = {}
    for weights in ("stochastic", "master", "split", "split8"):
        model = shard(Small(), how)
        optimizer = optim.AdamW(model.named_parameters(), lr=1e-2)
        hmpx.attach(optimizer, weights)
        for step in range(5):
            model(torch.ones(2, 6, dtype=BF16)).sum().backward()  # FSDP's own machinery in between
            fixed_gradients(model, step)
            optimizer.step()
            model(torch.ones(2, 6, dtype=BF16))
            optimizer.zero_grad()
        found[weights] = digest(dict(model.named_parameters()))
    return found


@pytest.fixture(scope="module")
def one_process():
    found = {}
    for weights in ("stochastic", "master", "split", "split8"):
        model = Small()
        optimizer = optim.AdamW(model.named_parameters(), lr=1e-2)
        handle = hmpx.attach(optimizer, weights)
        for step in range(5):
            fixed_gradients(model, step)
            optimizer.step()
        found[weights] = digest(dict(model.named_parameters()))
        handle.detach()
    hmpx.restore()
    return found


@pytest.mark.parametrize(
    "world, how",
    [(2, "plain"), (2, "policy"), *(pytest.param(4, how, marks=pytest.mark.slow) for how in ("plain", "hsdp"))],
)
def test_fully_shard_gives_the_weights_of_one_process(world, how, one_process):
    assert ranks.run(world, _fully_sharded, how) == [one_process] * world


def _policy_dtypes(rank):
    """FP32 weights under a policy are torch's affair; BF16 ones beside it get FP32 reductions and our write-back."""
    model = shard(Small(), "policy")
    seen = []
    model.first.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    optimizer = optim.SGD(model.named_parameters(), lr=1e-3)
    with hmpx.convert():
        model(torch.ones(2, 6)).sum().backward()
        seen += [model.first.weight.grad.dtype, model.first.weight.dtype]
        with hmpx.disable_casts():
            optimizer.step()
    wide = shard(Small().float(), "policy")
    wide(torch.ones(2, 6)).sum().backward()
    return [*seen, wide.first.weight.grad.dtype, wide.first.weight.dtype]


def test_a_mixed_precision_policy_beside_hmpx():
    assert ranks.run(2, _policy_dtypes) == [[BF16, BF16, BF16, torch.float32, torch.float32]] * 2


def _whole_and_released(rank):
    found = []
    for cls, attached in ((optim.AdamW, {}), (UnlistedAdamW, {}), (optim.AdamW, {"release_gradients": True})):
        model = shard(Small(), "plain")
        optimizer = cls(model.named_parameters(), lr=1e-2)
        hmpx.attach(optimizer, **attached)
        for step in range(3):
            inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(step)).bfloat16()
            model(inputs).square().sum().backward()
            gone = all(isinstance(p.grad, Released) for p in model.parameters())
            assert gone == bool(attached)
            optimizer.step()
            optimizer.zero_grad()
        found.append(digest(dict(model.named_parameters())))
    return found


def test_unknown_classes_and_released_gradients():
    (found, other) = ranks.run(2, _whole_and_released)
    assert found == other and len(set(found)) == 1


class Weighted(nn.Module):
    """The gradient of its weight is what it is called with."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5, dtype=BF16))

    def forward(self, gradient):
        return (self.weight * gradient).sum()


def _accumulated(rank):
    """Of one gradient and of four that BF16 has no room for beside it: attached, then detached."""
    model = fully_shard(Weighted(), mesh=init_device_mesh("cpu", (2,)))
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    handle = hmpx.attach(optimizer, use_fp32_grad_acc=True)
    found = []
    for end in (handle.detach, optimizer.zero_grad):
        for gradient in (1, *(4 * [2**-10])):
            model(torch.full((), gradient, dtype=BF16)).backward()
        found.append((model.weight.grad.dtype, model.weight.grad.full_tensor().tolist()))
        optimizer.zero_grad()
        end()
    return found


@needs_grad_dtype
def test_gradients_of_fully_shard_accumulate_in_fp32_as_long_as_that_is_wanted():
    for found in ranks.run(2, _accumulated):
        assert found == [(torch.float32, [1 + 2**-8] * 5), (BF16, [1.0] * 5)]


def _refusals(rank):
    messages = []
    mesh = init_device_mesh("cpu", (2,))
    partial = nn.Parameter(DTensor.from_local(torch.ones(4, dtype=BF16), mesh, [Partial()]))
    flat = FullyShardedDataParallel(Small(), device_id=torch.device("cpu"))
    original = FullyShardedDataParallel(Small(), device_id=torch.device("cpu"), use_orig_params=True)
    for params in ([("w", partial)], flat.named_parameters(), original.named_parameters()):
        optimizer = optim.SGD(params, lr=1e-2)
        try:
            hmpx.attach(optimizer)
        except hmpx.HmpxError as error:
            messages.append(str(error))
        assert not hasattr(optimizer, "_hmpx_attachment")
    original(torch.ones(2, 6, dtype=BF16)).sum().backward()
    before = copy.deepcopy([p.detach() for p in original.parameters()])
    try:
        with hmpx.disable_casts():
            optimizer.step()
    except hmpx.HmpxError as error:
        messages.append(str(error))
    assert all(torch.equal(p, q) for p, q in zip(original.parameters(), before, strict=True))
    return messages


def test_what_cannot_be_done_is_refused():
    for messages in ranks.run(2, _refusals):
        assert len(messages) == 4 and "partial sum" in messages[0]
        assert all("FSDP1" in message and "fully_shard" in message for message in messages[1:])
