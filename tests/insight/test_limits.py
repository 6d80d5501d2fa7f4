"""Where each limit of `doctor` lies: a training a little below it, one a little above, and what is said of both.

Each row makes the number that a limit is about out of numbers that BF16 and FP16 hold exactly, so that nothing else
moves it: 100 weights of which 89 move as they should have kept 0.89 of their way.
"""

import pytest
import torch
from torch import nn

import hmpx
from hmpx.insight.looks.steps import span_of, window_of

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
NOTHING, NOTE, WRONG = "nothing", "a note", "wrong"


def verdict(found, kind):
    assert not [each for each in found.not_checked if "raised when it was looked at" in each], found.not_checked
    of_kind = [each for each in found.findings if each.kind == kind]
    return WRONG if any(each.wrong for each in of_kind) else NOTE if of_kind else NOTHING


class Lagging(torch.optim.Optimizer):
    """SGD, by which weights in BF16 move a share of the way: of a parameter and a step, both counted from 0 and 1."""

    def __init__(self, params, share):
        super().__init__(params, {"lr": 0.125, "share": share})
        self.steps = 0

    @torch.no_grad()
    def step(self):
        self.steps += 1
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(group["lr"] * (group["share"](self.steps) if p.dtype is BF16 else 1.0) * p.grad)


def updates(*parts, steps=12):
    """Train parts of a model, each so many weights that move such a share of their way."""
    params = [nn.Parameter(torch.ones(size, dtype=BF16)) for size, _ in parts]
    shares = [share if callable(share) else lambda _, share=share: share for _, share in parts]
    optimizer = Lagging([{"params": [p], "share": share} for p, share in zip(params, shares, strict=True)], None)
    with hmpx.doctor() as found:
        for _ in range(steps):
            optimizer.zero_grad()
            sum(p.float().sum() for p in params).backward()
            optimizer.step()
    return found


def stepped(line, steps=4):
    """Train one weight in FP32; `line` runs in each iteration, and the loss depends on what it returns."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with hmpx.doctor() as found:
        for _ in range(steps):
            optimizer.zero_grad()
            made = line()
            loss = model(torch.ones(1, 4)).square().mean()
            (loss if made is None else loss * (1 + made.float().mean())).backward()
            optimizer.step()
    return found


def of_weights(share):
    return verdict(updates((100, share)), "lost updates")


def of_one_window(share):
    """The first of three; over all steps more than 0.9 is kept."""
    return verdict(updates((100, lambda step: share if step < 20 else 1.0), steps=60), "lost updates")


def of_a_part(size):
    """Of 100 weights, so many do not move at all."""
    return verdict(updates((size, 0.0), (100 - size, 1.0)), "lost updates")


def of_half_dead_weights(share):
    """A tenth of them, which is too small a part to harm."""
    return verdict(updates((10, share), (90, 1.0)), "lost updates")


def of_slow_weights(share):
    """A quarter of them; the weights as a whole are above 0.9."""
    return verdict(updates((25, share), (75, 1.0)), "lost updates")


def of_parameters(counts):
    """So many of them, each a thousandth of the weights, move less than half of the way."""
    slow, every = counts
    return verdict(updates(*[(1, 0.0)] * slow, *[(1000, 1.0)] * (every - slow)), "lost updates")


def by_hand(lost):
    """Of 100 weights so many stand at 256, where BF16 has no half."""
    weight = torch.where(torch.arange(100) < lost, 256.0, 1.0).to(BF16).requires_grad_()

    def line():
        weight.float().square().mean().backward()
        weight.grad = None
        with torch.no_grad():
            weight.sub_(0.5).add_(0.0)
            weight.copy_(torch.where(torch.arange(100) < lost, 256.0, 1.0))

    return verdict(stepped(line), "lost updates")


def of_an_average(lost):
    average = torch.where(torch.arange(100) < lost, 256.0, 1.0).to(BF16)
    return verdict(stepped(lambda: [average.add_(0.5)].clear(), steps=3), "average of weights")


def of_a_number(added):
    """At 512, where the numbers of BF16 are 4 apart."""
    total = torch.tensor(512.0, dtype=BF16)
    return verdict(stepped(lambda: [total.add_(added)].clear(), steps=3), "running value")


def of_a_state(begun, line):
    """A forward moves it 20 times by half: at 256, where BF16 has no half, it stands still."""

    class Moved(nn.Module):
        def forward(self, y):
            for _ in range(20):
                y = line(y, torch.full_like(y, 0.5))
            return y

    return verdict(stepped(lambda: Moved()(torch.full((8,), begun, dtype=BF16)) * 0), "running value")


def of_a_factor(factor):
    average = torch.ones(100, dtype=BF16)
    return verdict(stepped(lambda: [average.mul_(factor)].clear(), steps=3), "average of weights")


def of_a_result(distance):
    """log(1 + d) of a rounded number is off by the rounding over d; the oracle is FP64."""
    x = 1 + distance * torch.linspace(0.9, 1.1, 512)
    exact = x.double().log()
    off = (x.to(BF16).log().double() - exact).norm() / exact.norm()
    assert 0.017 < off < 0.023, off
    scale = torch.ones(512, requires_grad=True)
    return verdict(stepped(lambda: (x * scale).to(BF16).log()), "log")


def of_angles(largest, dtype=BF16):
    return verdict(stepped(lambda: torch.linspace(1, largest, 32).to(dtype).sin()), "angles")


def of_a_sum_along(length):
    """Of ones, to which BF16 adds no more from 256 on."""
    return verdict(stepped(lambda: torch.ones(length, dtype=BF16).requires_grad_().cumsum(0)), "cumulative sum")


def of_positions(count):
    return verdict(stepped(lambda: torch.arange(count, dtype=BF16).requires_grad_().sin().sum()), "integers")


def of_passes(passes):
    """The gradient is 1 in each; in BF16 the 257th and those after it are lost."""
    weight = nn.Parameter(torch.ones(4, dtype=BF16))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    with hmpx.doctor(at=[2]) as found:
        for passes_of_step in (1, passes):
            for _ in range(passes_of_step):
                weight.sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return verdict(found, "gradient accumulation")


def of_small_gradients(digits):
    """Each is so many times the distance of the numbers that FP16 has below its normal ones, 2^-24."""
    weight = nn.Parameter(torch.ones(250, dtype=FP16))
    factors = torch.full((250,), digits * 2.0**-24).half()
    optimizer = torch.optim.SGD([weight], lr=1.0)
    with hmpx.doctor() as found:
        for _ in range(4):
            optimizer.zero_grad()
            (weight * factors).float().sum().backward()
            optimizer.step()
    return verdict(found, "loss scaling")


def of_skipped_steps(calls):
    """All of them; the later half is judged."""
    weight = nn.Parameter(torch.ones(4))
    optimizer, scaler = torch.optim.SGD([weight], lr=0.1), torch.amp.GradScaler("cpu", init_scale=1.0)
    with hmpx.doctor() as found:
        for _ in range(calls):
            optimizer.zero_grad()
            scaler.scale((weight * torch.inf).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
    return verdict(found, "GradScaler")


class Root(torch.optim.Optimizer):
    """Steps by a power of the gradient."""

    def __init__(self, params, power):
        super().__init__(params, {"lr": 0.1, "power": power})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(group["lr"] * p.grad.sign() * p.grad.abs() ** group["power"])


def of_clipping(left, power=1.0):
    """Gradients that a GradScaler has scaled by 1024 are clipped to a share of what they are."""
    weight = nn.Parameter(torch.ones(64))
    optimizer, scaler = Root([weight], power), torch.amp.GradScaler("cpu", init_scale=1024.0)
    with hmpx.doctor() as found:
        for _ in range(4):
            optimizer.zero_grad()
            scaler.scale(weight.sum() / 512).backward()  # the norm is 16
            nn.utils.clip_grad_norm_([weight], 16 * left)
            scaler.step(optimizer)
            scaler.update()
    return verdict(found, "clipping")


def between_steps(lost):
    """FP32 weights go through BF16 after each step; so many of 64 stand where neither BF16 nor FP16 has a half."""
    weight = nn.Parameter(torch.where(torch.arange(64) < lost, 4096.0, 1.0))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    with hmpx.doctor() as found:
        for _ in range(3):
            optimizer.zero_grad()
            weight.sum().backward()
            optimizer.step()
            weight.data.copy_(weight.to(BF16))
    return verdict(found, "rounded between steps")


def of_decay(share):
    """It takes such a share of each weight in a step, and BF16 loses it."""
    weights = [nn.Parameter(torch.full((1000,), 1.5, dtype=BF16)) for _ in range(4)]
    optimizer = torch.optim.SGD(weights, lr=1.0, weight_decay=share)
    with hmpx.doctor() as found:
        for _ in range(4):
            optimizer.zero_grad()
            (sum(each.float().sum() for each in weights) / 32).backward()
            optimizer.step()
    return verdict(found, "weight decay")


LADDERS = {
    "what all weights keep of their way": (of_weights, {0.88: WRONG, 0.92: NOTHING}),
    "what they keep in one window": (of_one_window, {0.78: WRONG, 0.82: NOTHING}),
    "a part that does not move": (of_a_part, {19: NOTE, 21: WRONG}),
    "lost updates of many parameters": (of_parameters, {(1, 4): NOTE, (2, 10): NOTE, (2, 9): WRONG, (3, 14): WRONG}),
    "what is half dead": (of_half_dead_weights, {0.48: NOTE, 0.52: NOTE, 0.78: NOTE, 0.82: NOTHING}),
    "what is slow in all steps": (of_slow_weights, {0.78: WRONG, 0.82: NOTHING}),
    "weights that no optimizer moves": (by_hand, {9: NOTHING, 11: WRONG}),
    "an average that follows late, or not at all": (of_an_average, {19: NOTHING, 21: NOTE, 49: NOTE, 51: WRONG}),
    "one number": (of_a_number, {4.4: NOTHING, 4.5: WRONG}),
    **{
        f"a state that {name} moves": (
            lambda begun, line=line: of_a_state(begun, line),
            {32.0: NOTHING, -32.0: NOTHING, 512.0: WRONG},
        )
        for name, line in {
            "add": torch.add,
            "sub": torch.sub,
            "sub with a rate": lambda y, u: torch.sub(y, u, alpha=1.0),
            "add with a rate below 0": lambda y, u: torch.add(y, u, alpha=-1.0),
        }.items()
    },
    "a factor that is harmless": (of_a_factor, {1 - 1.9e-5: NOTHING, 1 - 2.1e-5: WRONG}),
    "the error of a result": (of_a_result, {0.105: WRONG, 0.12: NOTE}),
    "angles": (of_angles, {126: NOTHING, 130: WRONG}),
    "angles in FP16": (lambda largest: of_angles(largest, FP16), {511: NOTHING, 514: WRONG}),
    "a sum along a dimension": (of_a_sum_along, {256: NOTHING, 257: NOTE}),
    "positions": (of_positions, {256: NOTHING, 258: WRONG}),
    "backward passes before a step": (of_passes, {258: NOTE, 259: WRONG}),
    "gradients that FP16 cannot hold": (of_small_gradients, {15: NOTE, 14: WRONG}),
    "steps that a GradScaler skips": (of_skipped_steps, {8: NOTHING, 10: WRONG}),
    "what clipping leaves": (of_clipping, {0.24: WRONG, 0.26: NOTHING}),
    "a step with what clipping leaves": (lambda power: of_clipping(0.2, power), {0.06: NOTE, 0.07: WRONG}),
    "numbers that pass through BF16": (between_steps, {6: NOTE, 7: WRONG}),
    "weight decay": (of_decay, {1.8e-5: NOTE, 2.2e-5: WRONG}),
}


@pytest.mark.parametrize("limit", LADDERS)
def test_a_verdict_changes_at_its_limit(limit):
    run, expected = LADDERS[limit]
    assert {step: run(step) for step in expected} == expected


def test_windows_of_steps_are_those_of_the_documentation():
    """2 to 9, 20 to 27, 40 to 47, 80 to 87 and so on; each stands for the steps until the next."""
    starts = (2, 20, 40, 80, 160)
    within = {step: start for start in starts for step in range(start, start + 8)}
    assert {step: window_of(step) for step in range(1, 200)} == {step: within.get(step, 0) for step in range(1, 200)}
    assert [span_of(start, 100) for start in starts[:4]] == [18, 20, 40, 21] and span_of(20, 20) == span_of(40, 20) == 1
