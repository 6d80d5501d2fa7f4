"""Steps for the kernels: parameters whose weights and states are held in every way."""

import torch

from hmpx.rounding import stochastic
from hmpx.rounding.native import BF16, FP32, MASTER, NEAREST, SPLIT, SPLIT8, StepArguments, StoredTensor
from hmpx.rounding.shared import name_id
from hmpx.rounding.state_codes import EIGHT_BITS
from tests.support.numbers import special_values

KEY = (2**63 + 5, 9)  # seed and step
KINDS = (FP32, BF16, NEAREST, MASTER, SPLIT, SPLIT8)
ADAM = (1.0, 0.1, 0.99, 0.9, 0.1, 0.999, 0.001, 1e-2, 0.0)  # without eps, so that there is NaN where no element is

STEPS = {  # kernels, and the scalars of `native_steps.c`, with all that they can switch
    "adam": [(-1.0, 0.1, 0.99, 0.9, 0.1, 0.999, 0.001, 1e-2, 1e-8)],
    "sgd": [
        *((1.0, 0.1, 1e-2, 0.9, 0.9, 1.0, nesterov) for nesterov in (0.0, 1.0)),
        (1.0, 0.0, 0.1, -1.0, 0.0, 1.0, 0.0),
    ],
    "lion": [(1.0, 0.0, 0.99, 0.9, 0.1, 0.99, 0.01, 1e-3)],
    "adagrad": [(-1.0, 0.1, 1e-2, 1e-10)],
    "rmsprop": [
        (1.0, 0.1, 1e-2, 0.99, 0.01, 1e-8, momentum, centered) for momentum in (-1.0, 0.9) for centered in (0.0, 1.0)
    ],
    "nadam": [(1.0, 0.1, 0.99, 0.1, 0.999, 0.001, 1e-3, 1e-2, 1e-8, 0.1)],
}
STATES = {"adam": 2, "sgd": 1, "lion": 1, "adagrad": 1, "rmsprop": 3, "nadam": 2}


def stepped(kernel, scalars, weight_dtype, state_dtype, grad_dtype, sizes=(1037, 1, 70)):
    """What a list of steps is given: the same numbers each time, tensors of their own."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for n, size in enumerate(sizes):
        p, g, *states = (torch.randn(size, generator=generator) for _ in range(2 + STATES[kernel]))
        states = [state.to(state_dtype) if i else state.square().to(state_dtype) for i, state in enumerate(states)]
        if kernel in ("adam", "nadam"):
            states[1] = states[1].square()
        if (kernel == "sgd" and scalars[3] < 0) or (kernel == "rmsprop" and scalars[6] < 0):
            states[0 if kernel == "sgd" else 1] = None
        if kernel == "rmsprop":
            states[2] = (states[2] * 0.1).to(state_dtype) if scalars[7] else None
            states[0] = (states[0] + 1).to(state_dtype)  # so that the variance is positive
        p = StoredTensor.of(p.bfloat16().to(weight_dtype), 2**64 - 3 - n)
        states = [x if x is None else StoredTensor.of(x, 10 * n + i) for i, x in enumerate(states)]
        found.append(StepArguments(p, StoredTensor.of(g.to(grad_dtype)), tuple(states), scalars))
    return found


def with_special_values(kernel, scalars, place):
    """A step in FP32: each special value meets each as the gradient, in the weights (`place` 0) or in a state."""
    special = special_values()
    found = [torch.linspace(0.5, 1.5, len(special) ** 2) for _ in range(1 + STATES[kernel])]
    found[place] = special.repeat(len(special))
    (shown,) = stepped(kernel, scalars, torch.float32, torch.float32, torch.float32, sizes=(1,))
    held = zip(shown.states, found[1:], strict=True)
    states = tuple(None if had is None else StoredTensor.of(x) for had, x in held)
    grad = StoredTensor.of(special.repeat_interleave(len(special)))
    return [StepArguments(StoredTensor.of(found[0]), grad, states, scalars)]


def made(size, row, kind, seed=0):
    """AdamW's: both moments in 8 bits, in rows; some weights and masters that are special, and some written to."""
    generator = torch.Generator().manual_seed(seed)
    x, special = torch.randn(size, generator=generator), special_values()
    x[: min(size, len(special))] = special[:size]
    weight, name = x if kind == FP32 else x.bfloat16(), name_id("w")
    kept = StoredTensor(weight, kind, name)
    if kind == MASTER:
        weight[3::7] += 1
        x[30:34] = torch.tensor([0.0, -0.0, 1e-42, -1e-42])[: max(size - 30, 0)]
        weight[30:34] = torch.tensor([-0.0, 0.0, -0.0, 0.0])[: max(size - 30, 0)]
        kept = StoredTensor(weight, kind, name, x)
    if kind in (SPLIT, SPLIT8):
        lower = torch.randint(-128, 128, (size,), generator=generator, dtype=torch.int8)
        if kind == SPLIT:
            lower = torch.empty(size, dtype=torch.int16)
            stochastic.split(x, weight, lower)
        weight[5::701] += 1
        weight[7::703], weight[11::709] = 0, -torch.inf
        kept = StoredTensor(weight, kind, name, lower)
    named = ((name_id("w.m"), True), (name_id("w.v"), False))
    states = tuple(_coded(size, row, signed, name, generator) for name, signed in named)
    grad = StoredTensor.of(torch.randn(size, generator=generator).bfloat16())
    return StepArguments(kept, grad, states, ADAM)


def _coded(size, row, signed, name, generator):
    """Any codes, and scales of small numbers."""
    codes = torch.randint(0, 126 if signed else 254, (size,), generator=generator, dtype=torch.uint8)
    codes += 128 * torch.randint(0, 2, (size,), generator=generator, dtype=torch.uint8) * signed
    scales = 2.0 ** -torch.randint(0, 20, (-(-row // 128) * (size // row),), generator=generator)
    return StoredTensor(codes, EIGHT_BITS.kind, name, (-scales if signed else scales).bfloat16(), row=row)


def shard_of(one, start, stop):
    """Elements `start` ... `stop - 1` of what `made` returns, whole rows, as a rank holds them."""

    def part(held):
        if held is None:
            return None
        beside = held.beside
        if held.kind == EIGHT_BITS.kind:
            beside = beside[start // held.row * -(-held.row // 128) : stop // held.row * -(-held.row // 128)]
        elif beside is not None:
            beside = beside[start:stop]
        beside = None if beside is None else beside.clone()
        return held._replace(tensor=held.tensor[start:stop].clone(), beside=beside)

    weight, grad, *states = (part(held) for held in (one.weight, one.grad, *one.states))
    return StepArguments(weight, grad, tuple(states), one.scalars, one.first + start)


def tensors(one):
    """All that a step writes to."""
    held = [each for tensor in (one.weight, *one.states) for each in (tensor.tensor, tensor.beside)]
    return [each for each in held if each is not None]


def bits(x):
    return x.contiguous().view(-1).view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()])


def same(one, other):
    """To the bit; NaN, of which processors make several, is NaN."""
    nan = one.isnan() & other.isnan()
    return one.dtype is other.dtype and bool(((bits(one) == bits(other)) | nan.view(-1)).all())
