"""State in codes goes to and from other dtypes and codes, and keeps updates as large as FP32 state does."""

import contextlib
import copy
import re

import pytest
import torch
from torch import nn, optim

import hmpx
from hmpx.rounding.state_codes import EIGHT_BITS, STATE_CODES
from hmpx.updates.holding.held import HeldCodes, RoundingKey, Segment
from tests.support.optimizers import UnlistedAdamW
from tests.support.same import same
from tests.support.state_codes import PREFIXES, read, widened

BF16, FP32 = torch.bfloat16, torch.float32
SHAPES = {"a": (20, 304), "b": (77,)}
MOMENTS = ("exp_avg", "exp_avg_sq")


def made(state_dtype=None, steps=0):
    generator = torch.Generator().manual_seed(0)
    params = {name: nn.Parameter(torch.randn(shape, generator=generator).bfloat16()) for name, shape in SHAPES.items()}
    optimizer = optim.AdamW([*params.items()], lr=1e-2)
    if state_dtype is not None:
        hmpx.attach(optimizer, state_dtype=state_dtype)
    step(params, optimizer, steps)
    return params, optimizer


def step(params, optimizer, count=1):
    for number in range(count):
        generator = torch.Generator().manual_seed(number)
        for p in params.values():
            p.grad = torch.randn(p.shape, generator=generator).bfloat16()
        optimizer.step()


def in_fp32(params, optimizer):
    return {n: {k: read(optimizer.state[p], k, p.shape).float() for k in MOMENTS} for n, p in params.items()}


of_every_code = pytest.mark.parametrize("code", PREFIXES)


@of_every_code
@pytest.mark.parametrize("into", [FP32, BF16])
@pytest.mark.parametrize("attached_first", [True, False])
def test_a_checkpoint_in_codes_is_read_into_wider_state(code, into, attached_first):
    """BF16 holds the numbers of 8 bits; those of 4 bits are rounded to it."""
    params, optimizer = made(code, 3)
    others, wide = made(into if attached_first else None)
    wide.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    if not attached_first:
        hmpx.attach(wide, state_dtype=into)  # torch has cast the codes to BF16, which holds them exactly
    for p in others.values():
        p.grad = None
    wide.step()  # of nothing, by which state comes to its dtype
    expected = in_fp32(params, optimizer)
    if code == "4bit":
        expected = {n: {k: value.to(into).float() for k, value in each.items()} for n, each in expected.items()}
    assert same(expected, in_fp32(others, wide))
    assert all(wide.state[p][k].dtype is into for p in others.values() for k in MOMENTS)


@pytest.mark.parametrize(
    "code, saved, own, state_dtype",
    [
        ("8bit", (40, 64), (64, 40), "8bit"),
        ("8bit", (64, 32), (32, 32), "8bit"),
        ("8bit", (5, 200), (5, 300), BF16),
        ("4bit", (64, 32), (32, 64), "4bit"),
        ("4bit", (4, 16), (4, 8), "4bit"),  # whose codes have the shape of the other's state
        ("fp8", (40, 64), (64, 40), "4bit"),
    ],
)
def test_state_in_codes_of_another_shape_is_refused(code, saved, own, state_dtype):
    """When it is loaded, or by the first step if `attach` comes after the load; nothing changes."""

    def of_shape(shape):
        p = nn.Parameter(torch.ones(shape).bfloat16())
        return p, optim.AdamW([("layer.weight", p)], lr=1e-2)

    p, optimizer = of_shape(saved)
    hmpx.attach(optimizer, state_dtype=code)
    step({"p": p}, optimizer)
    checkpoint = copy.deepcopy(optimizer.state_dict())
    p, optimizer = of_shape(own)
    hmpx.attach(optimizer, state_dtype=state_dtype)
    step({"p": p}, optimizer)
    before = p.detach().clone(), copy.deepcopy(optimizer.state_dict())
    kept, shown = ((each[0], each[1] // 2) if code == "4bit" else each for each in (saved, own))  # two in a byte
    shapes = rf"parameter {{}} .*{re.escape(str(kept))} with .*; the parameter's is {re.escape(str(shown))} with".format
    with pytest.raises(hmpx.HmpxError, match=shapes(0)):
        optimizer.load_state_dict(copy.deepcopy(checkpoint))
    after = optimizer.state_dict()
    assert str(before[1]) == str(after) and torch.equal(before[0], p)
    p, optimizer = of_shape(own)
    optimizer.load_state_dict(copy.deepcopy(checkpoint))
    hmpx.attach(optimizer, state_dtype=state_dtype)
    for _ in range(2):
        with pytest.raises(hmpx.HmpxError, match=shapes("('layer.weight'|0)")):
            step({"p": p}, optimizer)
        assert torch.equal(p, torch.ones(own).bfloat16())


def test_scales_that_are_not_there_are_missed():
    _, optimizer = made("8bit", 1)
    checkpoint = copy.deepcopy(optimizer.state_dict())
    del checkpoint["state"][0]["hmpx_scales_exp_avg"]
    with pytest.raises(hmpx.HmpxError, match="parameter 0 is in 8 bits without its scales"):
        optimizer.load_state_dict(checkpoint)


def loaded_by_torch(cls, options, active, code="8bit"):
    """A plain optimizer with the state of another one in a code; `active`: whether hmpx stands in torch meanwhile."""
    made = []
    for _ in range(2):
        p = nn.Parameter(torch.ones(20, 304).bfloat16())
        made.append((p, cls([("p", p)], **options)))
    (p, optimizer), (q, plain) = made
    hmpx.attach(optimizer, state_dtype=code)
    step({"p": p}, optimizer, 2)
    checkpoint, before = copy.deepcopy(optimizer.state_dict()), widened(optimizer.state[p], p.shape)
    if not active:
        hmpx.restore(optimizer)
    plain.load_state_dict(checkpoint)
    hmpx.detach(optimizer)
    return q, plain, before


class _OfMatrices(optim.Optimizer):
    """Muon and momentum in one class, which hmpx does not list; most are of this kind."""

    def __init__(self, params):
        super().__init__(params, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure=None):
        for p in (p for group in self.param_groups for p in group["params"]):
            momentum = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
            momentum.mul_(0.9).add_(p.grad)
            p.sub_(1e-2 * (momentum / momentum.norm() if p.dim() == 2 else momentum))


OF_MATRICES = [type(name, (_OfMatrices,), {}) for name in ("MuonOfMine", "SOAP", "DistributedShampoo", "SCIONLight")]


@pytest.mark.parametrize("cls", [optim.Muon, *OF_MATRICES])
def test_state_of_matrix_functions_is_in_bf16_where_codes_are_asked_for(cls):
    """Beside a rule for one parameter as without; with the bits of `state_dtype=torch.bfloat16`."""
    found = []
    rule = {"b": {"state_dtype": "4bit"}}
    for options in ({"state_dtype": BF16}, {"state_dtype": "8bit"}, {"state_dtype": BF16, "parameters": rule}):
        params = {name: nn.Parameter(torch.ones(6, 40, dtype=BF16)) for name in "ab"}
        optimizer = cls([*params.items()])
        hmpx.attach(optimizer, **options)
        step(params, optimizer, 3)
        held = [optimizer.state[p]["momentum_buffer"] for p in params.values()]
        assert all(momentum.dtype is BF16 for momentum in held)
        found.append([*held, *params.values()])
    assert same(found[1], found[0]) and same(found[2], found[0])


def test_a_class_whose_name_only_contains_these_letters_has_codes():
    p = nn.Parameter(torch.ones(6, 40, dtype=BF16))
    optimizer = type("IsoApg", (_OfMatrices,), {})([p])
    hmpx.attach(optimizer, state_dtype="8bit")
    step({"p": p}, optimizer)
    assert "hmpx_codes_momentum_buffer" in optimizer.state[p]


OF_TORCH = {
    "AdamW": (optim.AdamW, {}),
    "SGD": (optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "RMSprop": (optim.RMSprop, {"momentum": 0.9}),
}


@pytest.mark.parametrize("name, code", [*((name, "8bit") for name in OF_TORCH), ("SGD", "fp8"), ("SGD", "4bit")])
def test_plain_steps_on_codes_are_refused_and_go_on_after_detach(name, code):
    """Those that ask for their state by `get` or `in` would begin anew, without a word."""
    p, plain, before = loaded_by_torch(*OF_TORCH[name], active=True, code=code)
    said = rf'state in {4 if code == "4bit" else 8} bits, .* state_dtype="{code}", .* hmpx\.attach\(optimizer\)'
    for region in (contextlib.nullcontext, hmpx.convert):
        with region(), pytest.raises(hmpx.HmpxError, match=said):
            step({"p": p}, plain)
    assert torch.equal(p, torch.ones_like(p))
    hmpx.detach(plain)
    assert plain.state[p].keys() == before.keys()
    assert all(torch.equal(value, before[key].to(value.dtype)) for key, value in plain.state[p].items())
    step({"p": p}, plain)


def test_a_plain_step_on_fp32_state_of_a_checkpoint_names_the_way_out():
    """Torch's own error would be of two dtypes."""
    _, optimizer = made(FP32, 2)
    others, plain = made()
    plain.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    with pytest.raises(
        hmpx.HmpxError, match=r"has loaded the state of such a step, .* hmpx\.detach\(optimizer\) brings"
    ):
        step(others, plain)
    hmpx.detach(plain)
    step(others, plain)


@of_every_code
def test_a_load_that_hmpx_does_not_see_is_found_by_the_steps_that_it_sees(code):
    """It casts codes to BF16, which holds them."""
    p, plain, before = loaded_by_torch(*OF_TORCH["SGD"], active=False, code=code)
    with hmpx.convert(), pytest.raises(hmpx.HmpxError, match=f'state_dtype="{code}"'):
        step({"p": p}, plain)
    hmpx.detach(plain)
    assert torch.equal(plain.state[p]["momentum_buffer"], before["momentum_buffer"].bfloat16())


def test_torch_by_itself_does_not_take_codes_for_numbers():
    p, plain, _ = loaded_by_torch(*OF_TORCH["AdamW"], active=False)
    with pytest.raises(KeyError, match="exp_avg"):
        step({"p": p}, plain)


@of_every_code
def test_a_resumed_run_is_the_run_also_if_it_was_loaded_before_attach(code):
    params, optimizer = made(code, 3)
    others, resumed = made()
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    hmpx.attach(resumed, state_dtype=code)
    with torch.no_grad():
        for name, p in others.items():
            p.copy_(params[name])
    for each in ((params, optimizer), (others, resumed)):
        step(*each)
    assert same(others, params)
    assert all(same(resumed.state[p], optimizer.state[params[name]]) for name, p in others.items())


@of_every_code
@pytest.mark.parametrize("attached_first", [True, False])
def test_codes_of_one_dimension_of_earlier_checkpoints_are_loaded_into_bf16(code, attached_first):
    """hmpx 0.2 and before held them so, and BF16 holds their numbers; of 4 bits, as 8."""
    params, optimizer = made(code, 2)
    checkpoint, held = copy.deepcopy(optimizer.state_dict()), EIGHT_BITS if code == "4bit" else STATE_CODES[code]
    of_b, expected = checkpoint["state"][1], {}
    assert all(of_b[key].dtype is BF16 for key in MOMENTS)
    for key in MOMENTS:
        x = of_b.pop(key).float()
        codes = HeldCodes.new(held, x)
        codes.write(Segment(params["b"], "b"), x, "b", RoundingKey(0, 0))
        of_b |= codes.entries(key)
        expected[key] = read(codes.entries(key), key, x.shape).bfloat16()
    others, resumed = made(code if attached_first else None)
    resumed.load_state_dict(checkpoint)
    if not attached_first:
        hmpx.attach(resumed, state_dtype=code)
    for p in others.values():
        p.grad = None
    resumed.step()
    state = resumed.state[others["b"]]
    assert state.keys() == {"step", *MOMENTS} and all(torch.equal(state[key], expected[key]) for key in MOMENTS)
    step(others, resumed)
    assert state["step"] == 3 and all(state[key].dtype is BF16 for key in MOMENTS)


@of_every_code
def test_state_of_a_parameter_without_a_gradient_stays(code):
    """Also where the optimizer sees all parameters at once; rounding 4 bits once more could change them."""
    for cls in (optim.AdamW, UnlistedAdamW):
        params = {name: nn.Parameter(torch.ones(shape).bfloat16()) for name, shape in SHAPES.items()}
        optimizer = cls([*params.items()], lr=1e-2)
        hmpx.attach(optimizer, state_dtype=code)
        step(params, optimizer)
        before = copy.deepcopy(widened(optimizer.state[params["a"]], SHAPES["a"]))
        for _ in range(3):
            params["a"].grad = None
            optimizer.step()
        assert same(widened(optimizer.state[params["a"]], SHAPES["a"]), before)
        assert optimizer.state[params["b"]]["step"] == 4


# Where gradients differ in size within a block


def one_large():
    return torch.full((4, 128), 1e-3).index_fill_(1, torch.tensor([5]), 1.0)


def lognormal(sigma):
    return torch.exp(sigma * torch.randn(16, 128, generator=torch.Generator().manual_seed(0)))


def largest_update(cls, options, sizes, **settings):
    """Of an element in one step, in units of the learning rate."""
    p = nn.Parameter(torch.zeros(sizes.shape, dtype=BF16))
    optimizer = cls([("p", p)], lr=1e-3, **options)
    hmpx.attach(optimizer, **settings)
    generator, before, found = torch.Generator().manual_seed(1), torch.zeros(sizes.shape), 0.0
    for _ in range(120):
        p.grad = (torch.randn(sizes.shape, generator=generator) * sizes).bfloat16()
        optimizer.step()
        after = p.detach().float()
        found, before = max(found, (after - before).abs().max().item()), after
    return found / 1e-3


@pytest.mark.parametrize(
    "cls, options, sizes",
    [
        (optim.AdamW, {"weight_decay": 0.0}, one_large()),
        (optim.Adam, {"amsgrad": True}, lognormal(1.0)),
        (optim.Adam, {}, lognormal(1.5)),
    ],
)
def test_no_update_is_twice_the_largest_one_of_fp32_state(cls, options, sizes):
    case = cls, options, sizes
    reference = largest_update(*case, weights="split")
    for code in PREFIXES:
        assert largest_update(*case, weights="split", state_dtype=code) <= 2 * reference
    assert largest_update(*case, fused=True, state_dtype="8bit") <= 2 * reference


def test_a_root_of_a_difference_is_warned_of(caplog):
    for options, warned in (({"centered": True}, 1), ({}, 0)):
        caplog.clear()
        optimizer = optim.RMSprop([nn.Parameter(torch.ones(4, 128, dtype=torch.bfloat16))], **options)
        hmpx.attach(optimizer, state_dtype="4bit")
        assert caplog.text.count("RMSprop(centered=True) takes the root of a difference") == warned
        assert caplog.text.count("state_dtype='4bit'") == warned


CASTS = {
    torch.float64: "",
    FP32: "",
    BF16: "",
    torch.int64: "scales",
    torch.float16: "scales",
    torch.bool: "codes, scales",
    torch.complex64: "codes, scales",
    "strided": "",
    "None": "codes, scales",
    "list": "codes, scales",
    "other": "codes, scales",
}


@of_every_code
@pytest.mark.parametrize("how", ["load", "by hand"])
def test_codes_and_scales_in_another_dtype_are_cast_back_or_refused(code, how):
    """What lost nothing takes the same next step; the rest is one error that names the key."""
    params, optimizer = made(code, steps=3)
    saved, weights = copy.deepcopy(optimizer.state_dict()), {name: p.detach().clone() for name, p in params.items()}
    step(params, optimizer)
    for cast, refused in CASTS.items():
        for what in ("codes", "scales"):
            key = f"{PREFIXES[code] if what == 'codes' else 'hmpx_scales_'}exp_avg"
            value = saved["state"][0][key].clone()
            if isinstance(cast, torch.dtype):
                value = value.to(cast)
            elif cast == "strided":
                value = value.t().contiguous().t()
            else:
                value = {"None": None, "list": value.tolist(), "other": value.double() + 2.0**-30}[cast]
            changed = copy.deepcopy(saved)
            changed["state"][0][key] = value
            again, loaded = made(code)
            with torch.no_grad():
                for name, p in again.items():
                    p.copy_(weights[name])
            error = pytest.raises(hmpx.HmpxError, match=key) if what in refused else contextlib.nullcontext()
            with error:
                loaded.load_state_dict(copy.deepcopy(changed if how == "load" else saved))
                if how == "by hand":
                    loaded.state[again["a"]].update(changed["state"][0])
                step(again, loaded)
            assert what in refused or same(in_fp32(params, optimizer), in_fp32(again, loaded)), (cast, what)


class KeepsWeights(optim.Optimizer):
    """Momentum, and slow weights half of the way: as Lookahead, SAM and schedule-free optimizers keep them in state."""

    def __init__(self, params, lr=0.0):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if not state:
                state.update(count=torch.zeros(1), slow=p.clone(), momentum=torch.zeros_like(p))
            state["count"] += 1
            state["momentum"].mul_(0.9).add_(p.grad)
            p.add_(state["momentum"], alpha=-self.param_groups[0]["lr"])
            state["slow"].lerp_(p, 0.5)
            p.copy_(state["slow"])


@pytest.mark.parametrize("weights", ["stochastic", "master", "split"])
@pytest.mark.parametrize("state_dtype", [BF16, *PREFIXES])
def test_weights_and_counts_in_state_stay_as_a_step_leaves_them(state_dtype, weights):
    """At a rate of 0 nothing moves, and moments are in codes all the same; after a resume, too."""
    named, optimizer = None, None
    for load in (None, "a checkpoint"):
        generator = torch.Generator().manual_seed(0)
        shapes = (20, 304), (77,), (1,)
        made_of = [
            (f"p{i}", nn.Parameter(torch.randn(s, generator=generator).bfloat16())) for i, s in enumerate(shapes)
        ]
        made_by = KeepsWeights(made_of)
        hmpx.attach(made_by, weights, state_dtype=state_dtype, use_master_weights_in_ckpt=weights != "stochastic")
        if load is not None:
            made_by.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        named, optimizer, start = made_of, made_by, [p.detach().clone() for _, p in made_of]
        for _ in range(600 if load is None and state_dtype == BF16 else 6):
            for _, p in named:
                p.grad = torch.randn(p.shape, generator=generator).bfloat16()
            optimizer.step()
        assert all(torch.equal(p, before) for (_, p), before in zip(named, start, strict=True))
        for _, p in named:
            state = optimizer.state[p]
            assert state["count"].item() in (6, 12, 600, 606) and state["slow"].dtype is FP32
            single = p.numel() == 1
            assert ("momentum" in state) == (state_dtype == BF16 or p.dim() < 2)
            assert single or state_dtype != BF16 or state["momentum"].dtype is BF16


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float64, torch.float16])
@pytest.mark.parametrize("state_dtype", [FP32, BF16, "8bit"])
def test_state_of_another_dtype_stays_as_it_is(state_dtype, dtype):
    """A mask, or an age, beside momentum, in the layout of weights that no kernel takes as they lie, and contiguous."""
    for layout in (torch.channels_last, torch.contiguous_format):
        for cls, options in ((optim.SGD, {"momentum": 0.9}), (UnlistedAdamW, {})):
            start = torch.randn(8, 8, 3, 3, generator=torch.Generator().manual_seed(0))
            p = nn.Parameter(start.bfloat16().to(memory_format=layout))
            optimizer = cls([p], lr=1e-3, **options)
            hmpx.attach(optimizer, state_dtype=state_dtype)
            kept = (torch.arange(p.numel()).view(p.shape) % 3).to(dtype)
            for number in range(4):
                p.grad = torch.ones_like(p)
                optimizer.step()
                if not number:
                    optimizer.state[p]["kept"] = kept.clone()
            now = optimizer.state[p]["kept"]
            assert now.dtype is dtype and torch.equal(now, kept)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float64])
def test_a_count_of_another_dtype_is_counted_as_torch_does(dtype):
    for cls in (optim.AdamW, optim.Adagrad, optim.RMSprop, optim.NAdam):
        found = []
        for count in (torch.float32, dtype):
            p = nn.Parameter(torch.randn(16, 16, generator=torch.Generator().manual_seed(0)).bfloat16())
            optimizer = cls([p], lr=1e-2)
            hmpx.attach(optimizer, "master")
            for number in range(4):
                p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(number)).bfloat16()
                optimizer.step()
                if not number:
                    saved = copy.deepcopy(optimizer.state_dict())
                    saved["state"][0]["step"] = saved["state"][0]["step"].to(count)
                    optimizer.load_state_dict(saved)
            assert optimizer.state[p]["step"] == 4, cls
            found.append(p.detach())
        assert torch.equal(*found)


class KeepsAMultiple(optim.Optimizer):
    """A multiple of the weights, from which it makes them again, and momentum."""

    def __init__(self, params, factor):
        super().__init__(params, {"lr": 0.0})
        self.factor = factor

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if not state:
                state.update(sum=p * self.factor, momentum=torch.zeros_like(p))
            state["momentum"].mul_(0.9).add_(p.grad)
            p.copy_(state["sum"] / self.factor)


@pytest.mark.parametrize("factor", [-1.0, 0.25, 8.0])
def test_a_multiple_of_the_weights_is_held_as_they_are(factor):
    p = nn.Parameter(torch.randn(20, 304, generator=torch.Generator().manual_seed(5)).bfloat16())
    optimizer, before = KeepsAMultiple([("p", p)], factor), p.detach().clone()
    hmpx.attach(optimizer, "master", state_dtype="4bit")
    step({"p": p}, optimizer, 3)
    assert torch.equal(p, before) and optimizer.state[p].keys() == {"sum", "hmpx_4bit_momentum", "hmpx_scales_momentum"}


class MakesStateBesideSteps(KeepsWeights):
    """As Sophia does, whose loop calls `update_hessian` every ten steps."""

    @torch.no_grad()
    def update_hessian(self):
        for p in self.param_groups[0]["params"]:
            if "momentum" not in self.state[p]:
                self.state[p]["momentum"] = torch.zeros_like(p)
            self.state[p]["momentum"].mul_(0.9).addcmul_(p.grad, p.grad)


@pytest.mark.parametrize("methods", [(), ("update_hessian",)])
def test_state_that_is_made_beside_its_codes_is_said(methods):
    p = nn.Parameter(torch.full((4, 128), 5.0, dtype=BF16))
    optimizer = MakesStateBesideSteps([("w", p)])
    hmpx.attach(optimizer, state_dtype="8bit", methods=methods)
    p.grad = torch.ones_like(p)
    for _ in range(3):  # the plan of the second step is kept
        optimizer.step()
    before = {key: value.clone() for key, value in optimizer.state[p].items()}
    optimizer.update_hessian()
    error = pytest.raises(hmpx.HmpxError, match=r"'momentum' of parameter 'w' is there twice: in 8 bits.*methods=")
    with contextlib.nullcontext() if methods else error:
        optimizer.step()
    if not methods:
        del optimizer.state[p]["momentum"]  # nothing is lost
        assert all(torch.equal(optimizer.state[p][key], value) for key, value in before.items())
    optimizer.step()
