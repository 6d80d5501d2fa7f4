"""The fused kernels, beside the optimizers' own classes in float64."""

import copy
import ctypes
import math
from itertools import cycle, product

import pytest
import torch
from lion_pytorch import Lion
from torch import nn, optim

import hmpx
from hmpx.rounding import native
from hmpx.updates.stepping.chunk import Chunk
from tests.support import training
from tests.support.formulas import CONFIGURATIONS
from tests.support.numbers import nearly_equal
from tests.support.same import same
from tests.support.state_codes import PREFIXES, held_as, in_code, read
from tests.support.training import train

BF16 = torch.bfloat16
pytestmark = pytest.mark.skipif(native.library() is None, reason="no C compiler here, so the kernels do not run")


def parameters(dtype=BF16, sizes=((63, 5), (4001,), ())):
    return training.parameters(dtype, sizes)


@pytest.fixture
def by_kernels(monkeypatch):
    """No step is taken by the optimizer's own code."""

    def refused(self, *step):
        raise AssertionError(f"{[segment.name for segment in self.segments]} in chunks")

    monkeypatch.setattr(Chunk, "step", refused)


@pytest.mark.parametrize(
    "name, weights",
    [
        *((name, "stochastic") for name in CONFIGURATIONS),
        *zip(CONFIGURATIONS, cycle(["master", "split", "split8", "nearest"])),
    ],
)
def test_weights_masters_and_state_agree_with_float64(name, weights, by_kernels):
    cls, options = CONFIGURATIONS[name]
    options = {"lr": 1e-2, **options}
    named, twin = parameters(), parameters(torch.float64)
    optimizer, reference = cls(named, **options), cls(twin, **options)
    handle = hmpx.attach(optimizer, weights, fused=True)
    for step in range(5):
        before = [q.detach().clone() for _, q in twin]
        train(named, optimizer, step, step + 1)
        train(twin, reference, step, step + 1)
        for (key, p), (_, q), old in zip(named, twin, before, strict=True):
            exact = held = q.detach()
            if weights in ("stochastic", "nearest"):  # where the last bits of FP32 decide the rounding, others
                x, held = exact.float(), p.detach()
                rounded = x.bfloat16()
                if weights == "stochastic":
                    rounded = hmpx.stochastic_round(x, seed=0, step=step, name=key)
                assert nearly_equal(rounded, p, 1 + p.numel() // 500)
                assert ((held - exact).abs() <= exact.abs() * 2.0 ** (-7 if weights == "stochastic" else -8)).all()
            else:
                held, bits = handle.masters_of(p), 16 if weights == "split8" else 24
                terms = exact.abs() + (exact - old).abs().max()  # what is added up in a step
                assert ((held - exact).abs() <= terms * 2.0 ** (2 - bits)).all()
                assert ((p.detach() - held).abs() <= held.abs() * 2**-8).all()
                assert weights != "split8" or not (held.view(torch.int32) & 0xFF).any()
            for k, expected in reference.state[q].items() if weights == "stochastic" else ():
                got = optimizer.state[p].get(k)
                assert (got is None) == (expected is None)
                if got is not None:  # a few units in the last place of FP32 at the size of the terms that are added
                    assert (got.double() - expected).abs().max() <= 8 * 2**-24 * expected.abs().max(), k
            with torch.no_grad():
                q.copy_(held)  # both go on from the same weights


@pytest.mark.parametrize("name", ["AdamW", "Adam weight decay", "NAdam", "Adagrad", "SGD momentum", "RMSprop"])
def test_parameters_of_a_group_that_were_unfrozen_later_have_counts_of_their_own(name, by_kernels):
    """Beside those of a second group with options of its own; the oracle is torch in float64."""
    cls, options = CONFIGURATIONS[name]
    options = {"lr": 1e-2, **options}
    named, twin = parameters(), parameters(torch.float64)
    optimizer, reference = (
        cls([{"params": each[:2]}, {"params": each[2:], "lr": 0.05}], **options) for each in (named, twin)
    )
    handle = hmpx.attach(optimizer, "master", fused=True)
    for first, start in ((slice(0, 1), 0), (slice(0, 2), 3), (slice(None), 5)):
        train(named[first], optimizer, start, start + 3)
        train(twin[first], reference, start, start + 3)
        for (_, p), (_, q) in zip(named, twin, strict=True):
            torch.testing.assert_close(handle.masters_of(p).double(), q.detach(), rtol=1e-5, atol=1e-6)
            p.grad = q.grad = None


@pytest.mark.parametrize(
    "name, state_dtype",
    [
        ("AdamW", torch.float32),
        ("SGD momentum", BF16),
        ("RMSprop momentum", "8bit"),
        ("Lion", "8bit"),
        ("NAdam", "4bit"),
    ],
)
def test_two_ways_to_hold_the_same_masters_step_alike(name, state_dtype, by_kernels):
    cls, options = CONFIGURATIONS[name]
    found = []
    for weights in ("master", "split"):
        named = parameters()
        optimizer = cls(named, **{"lr": 1e-2, **options})
        handle = hmpx.attach(optimizer, weights, fused=True, state_dtype=state_dtype)
        train(named, optimizer, 0, 5)
        found.append([handle.masters_of(p) for _, p in named])
        assert all(weights == "split" or torch.equal(handle.masters_of(p).bfloat16(), p) for _, p in named)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_run_goes_on_with_or_without_the_kernels():
    results = []
    for roads in ((True, False), (False, True), (False, False)):
        named = parameters()
        optimizer = optim.AdamW(named, lr=1e-3)
        for start, road in zip((0, 3), roads, strict=True):
            saved = optimizer.state_dict()
            hmpx.detach(optimizer)
            hmpx.attach(optimizer, fused=road)
            optimizer.load_state_dict(saved)
            train(named, optimizer, start, start + 3)
        results.append([p.detach().clone() for _, p in named])
        assert {k: v.dtype for k, v in optimizer.state[named[0][1]].items()}["exp_avg"] is torch.float32
    for one in results[:2]:
        assert all(nearly_equal(a, b, 1 + a.numel() // 200) for a, b in zip(one, results[2], strict=True))


def test_what_has_no_kernel_is_refused():
    message = "kernels for Adagrad, Adam, .*, Lion of .*, not for Adadelta"
    with pytest.raises(hmpx.HmpxError, match=message):
        hmpx.attach(optim.Adadelta(parameters()), fused=True)


@pytest.mark.parametrize("turns, weights", [(0, "split8"), (1, "master"), (4, "stochastic")])
@pytest.mark.parametrize("kernels", [True, False])
def test_options_that_cannot_be_read_leave_everything_as_it_was(turns, weights, kernels, monkeypatch):
    """Also what torch steps beside the kernels, which goes first; and where torch's operators step by the formula."""
    if not kernels:
        monkeypatch.setattr(native, "can_read", lambda *tensors: False)
    named = [*parameters(), ("plain", nn.Parameter(torch.ones(3)))]
    optimizer = optim.AdamW([{"params": named[:2]}, {"params": named[2:]}], lr=1e-2)
    hmpx.attach(optimizer, weights, fused=True)
    train(named, optimizer, 0, turns)
    before = copy.deepcopy((training.weights(named), optimizer.state_dict()["state"]))
    optimizer.param_groups[0]["lr"] = "fast"
    with pytest.raises(ValueError):
        train(named, optimizer, turns, turns + 1)
    assert same(training.weights(named), before[0]) and same(optimizer.state_dict()["state"], before[1])
    optimizer.param_groups[0]["lr"] = 1e-2
    train(named, optimizer, turns, turns + 1)
    assert optimizer.state[named[0][1]]["step"] == turns + 1


def test_codes_that_lie_otherwise_are_read_as_the_numbers_that_they_are():
    found = []
    for laid in (torch.clone, torch.Tensor.contiguous):
        named = parameters(sizes=((64, 64),))
        optimizer = optim.AdamW(named, lr=1e-2)
        hmpx.attach(optimizer, fused=True, state_dtype="8bit")
        train(named, optimizer, 0, 3)
        codes = optimizer.state[named[0][1]]["hmpx_codes_exp_avg"]
        codes.data = laid(codes.data.t())
        train(named, optimizer, 3, 5)
        found.append(named[0][1].detach())
    assert torch.equal(*found)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("settings", [{}, {"weights": "split"}, {"weights": "master", "state_dtype": BF16}])
def test_an_infinite_weight_of_a_closed_choice_stays(settings, layout):
    """Without a penalty, and with a gradient of 0, as torch leaves it: by kernels, and by torch's operators."""
    for cls, options in CONFIGURATIONS.values():
        is_decoupled = cls in (optim.AdamW, Lion) or options.get("decoupled_weight_decay")
        options = {"lr": 1e-3, **options} if is_decoupled else {"lr": 1e-3, **options, "weight_decay": 0.0}
        start = torch.randn(4, 4, 8, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
        start.view(-1)[:5] = torch.tensor([-torch.inf, torch.inf, -torch.inf, -torch.inf, torch.inf])
        closed = start.isinf()
        p = nn.Parameter(start.to(memory_format=layout, copy=True))
        optimizer = cls([p], **options)
        hmpx.attach(optimizer, **settings)
        for step in range(3):
            grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(step)).bfloat16()
            p.grad = grad.masked_fill(closed, 0).to(memory_format=layout)
            optimizer.step()
        assert torch.equal(p[closed], start[closed]) and p[~closed].isfinite().all(), cls
        assert not any(v.float().isnan().any() for v in optimizer.state[p].values()), cls


@pytest.mark.parametrize("dtype, state_dtype", [(torch.float64, torch.float32), (torch.float16, "8bit")])
def test_state_of_another_dtype_is_named(dtype, state_dtype):
    """Somebody has put it there: a plan, and a first look, find it."""
    named = parameters(sizes=((64, 64), (7,)))
    optimizer = optim.AdamW(named, lr=1e-2)
    hmpx.attach(optimizer, fused=True, state_dtype=state_dtype)
    train(named, optimizer, 0, 2)
    state, before = optimizer.state[named[1][1]], [p.detach().clone() for _, p in named]
    held = [state.pop(key) for key in list(state) if key.endswith("exp_avg")]
    state["exp_avg"] = torch.ones(7, dtype=dtype)
    for _ in range(2):
        with pytest.raises(
            hmpx.HmpxError, match=f"'layer1.weight': its state 'exp_avg' is {str(dtype)[6:]}, .* takes float32"
        ):
            train(named, optimizer, 2, 3)
    assert held and all(torch.equal(p, old) for (_, p), old in zip(named, before, strict=True))
    state["exp_avg"] = state["exp_avg"].float()
    train(named, optimizer, 2, 3)
    assert state["step"] == 3 and not torch.equal(named[1][1], before[1])


OF_EACH_CLASS = {cls: name for name, (cls, _) in CONFIGURATIONS.items()}.values()
ONE_EACH = [*zip(CONFIGURATIONS, cycle(PREFIXES))]
OTHERS = [each for each in product(OF_EACH_CLASS, PREFIXES) if each not in ONE_EACH]


@pytest.mark.parametrize("name, code", [*ONE_EACH, *(pytest.param(*each, marks=pytest.mark.slow) for each in OTHERS)])
def test_state_in_codes_is_that_of_the_fp32_kernel_rounded(name, code, monkeypatch):
    """Rows that are whole blocks, and longer and shorter ones; the steps after the first are planned ones, too."""
    cls, options = CONFIGURATIONS[name]
    sizes = ((4, 128), (9, 300), (1, 1001), (6, 2, 77), (2, 3), (33, 33), (7, 1), (9, 127), (5, 304), (3, 4, 3, 16))
    both = []
    for state_dtype in (torch.float32, code):
        named = parameters(sizes=sizes)
        both.append((named, cls(named, **{"lr": 1e-2, **options})))
        hmpx.attach(both[-1][1], fused=True, state_dtype=state_dtype, seed=4)
    (wide, reference), (named, optimizer) = both
    if cls is optim.Adagrad:  # whose constructor has made the state
        for key, p in wide:
            reference.state[p]["sum"] = in_code(
                torch.full(p.shape, 0.1 if "initial_accumulator_value" in options else 0.0),
                held_as(code, p.shape),
                **{"seed": 4, "step": 0, "name": f"{key}.sum.moved"},
            )[0]
            reference.state[p]["step"] += 0
    monkeypatch.setattr(Chunk, "step", None)  # nothing is left to it
    for step in range(3):
        train(wide, reference, step, step + 1)
        train(named, optimizer, step, step + 1)
        for (key, q), (_, p) in zip(wide, named, strict=True):
            assert torch.equal(p, q), (key, step)
            for part, value in reference.state[q].items():
                if isinstance(value, torch.Tensor) and value.dim():
                    value.copy_(in_code(value, held_as(code, value.shape), seed=4, step=step, name=f"{key}.{part}")[0])
                    assert torch.equal(read(optimizer.state[p], part, p.shape), value), (key, part, step)
    assert any(PREFIXES[code] in str(optimizer.state[p].keys()) for _, p in named) == bool(reference.state[wide[0][1]])


CODED = (40, 63), (40, 64), (3,), (), (8, 4, 3, 3), (64, 16, 3, 3)


@pytest.mark.parametrize(
    "cls, options, taken, state_dtype",
    [
        (optim.AdamW, {}, CODED, "8bit"),
        (optim.AdamW, {}, CODED, "fp8"),
        (optim.AdamW, {}, CODED, "4bit"),
        (optim.AdamW, {"amsgrad": True}, (), "8bit"),
        (optim.SGD, {"momentum": 0.9}, CODED, "8bit"),
        (optim.SGD, {}, CODED, "8bit"),  # keeps no state
    ],
)
def test_which_parameters_with_state_in_codes_the_kernels_take(cls, options, taken, state_dtype, monkeypatch):
    named = parameters(sizes=CODED)
    optimizer = cls(named, lr=1.0, **options)
    hmpx.attach(optimizer, fused=True, state_dtype=state_dtype)
    by_kernel, start, words_of_a_row = [], native.start, 7 + 5 * 4

    def told(kernel, address, count, *more):
        if kernel == "step_list":
            by_kernel.append((ctypes.c_int64 * (words_of_a_row * count)).from_address(address)[1::words_of_a_row])
        start(kernel, address, count, *more)

    monkeypatch.setattr(native, "start", told)
    before = [p.detach().clone() for _, p in named]
    train(named, optimizer, 0, 3)
    assert by_kernel == ([[math.prod(shape) for shape in taken]] * 3 if taken else [])
    assert not any(torch.equal(p, was) for (_, p), was in zip(named, before, strict=True))
