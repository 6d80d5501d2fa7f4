"""What BF16 saves at one call of an op: time, FLOPs, or memory of saved activations, measured on this device."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from time import perf_counter
from typing import Any, Literal, NamedTuple

import torch
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import FlopCounterMode

from hmpx import region_state
from hmpx.insight.comparing.calls import Asked, in_fp32
from hmpx.insight.tensors import LOW, Tensor, floating
from hmpx.ops.policies import op_facts

Objective = Literal["speed", "coverage", "memory"]
OBJECTIVES: tuple[Objective, ...] = ("speed", "coverage", "memory")
UNITS = {"speed": "s", "coverage": "FLOP", "memory": "B"}
_ROUNDS = 5  # of a time that is measured
_LEAST = 2e-4  # seconds that a round takes at least
_SIZES = 1 << 12, 1 << 20  # elements of the two casts whose times are measured


class Worth(NamedTuple):
    """One call of an op.

    low, wide: what it costs in BF16 and in FP32, in the unit of the objective. flops: of its forward pass, if it is a
    matrix product. pinned: why it is on the wide side in any case.
    """

    low: float
    wide: float
    flops: float
    pinned: str = ""


def worth_of(asked: Asked, objective: Objective) -> Worth | None:
    """Measure one call either way; None where a bf16 list casts nothing.

    Raises:
        Exception: whatever the op raises in BF16, in its forward or its backward pass.
    """
    with torch.autograd.graph.saved_tensors_hooks(_itself, _itself):  # unseen by a checkpoint around the call
        with region_state.region(True), torch.no_grad():
            seen = asked.run(*asked.args, **asked.kwargs)
        if not seen.casting or not any(tensor.dtype in LOW for tensor in floating((seen.args, seen.kwargs))):
            return None
        low = _work(asked, asked.with_arguments(seen.args, seen.kwargs), True)
        low()
        flops = _flops(asked)
        if objective == "speed":
            return Worth(seconds(low), seconds(_work(asked, asked, False)), flops)
        if objective == "memory":
            return Worth(_saved(asked, True), _saved(asked, False), flops)
        return Worth(0.0, flops, flops)


def rounding_of(asked: Asked) -> float:
    """How far the result in BF16 is from that in FP32, relative to its size; infinite where it is not finite."""
    with torch.no_grad(), region_state.region(True):
        low = floating((asked.run(*asked.args, **asked.kwargs).result,))
    with torch.no_grad():
        exact = floating((in_fp32(asked),))
        found = [
            float((a.float() - b).norm() / (b.norm() or 1.0))
            for a, b in zip(low, exact, strict=False)
            if a.shape == b.shape
        ]
    return max((each if math.isfinite(each) else math.inf for each in found), default=0.0)


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _work(asked: Asked, given: Asked, low: bool) -> Callable[[], object]:
    """The op forward and backward, on the inputs of `given`, which have their dtypes already."""
    grad = torch.is_grad_enabled()
    wanted = iter([tensor.requires_grad and grad for tensor in floating((asked.args, asked.kwargs))])

    def leaf(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        needed = value.dtype.is_floating_point and next(wanted, False)
        return value.detach().requires_grad_(needed)

    call = asked.with_arguments(*tree_map(leaf, (given.args, given.kwargs)))
    needed = [tensor for tensor in floating((call.args, call.kwargs)) if tensor.requires_grad]

    def work() -> None:
        with region_state.region(low):
            result = asked.run(*call.args, **call.kwargs).result if low else in_fp32(call)
        results = [each for each in floating((result,)) if each.requires_grad]
        if needed and results:
            torch.autograd.grad(results, needed, [torch.ones_like(each) for each in results], allow_unused=True)

    return work


def seconds(work: Callable[[], object]) -> float:
    """The median of a few rounds."""
    work()
    once = _timed(work, 1)
    calls = max(1, min(20, math.ceil(_LEAST / max(once, 1e-9))))
    return statistics.median(_timed(work, calls) for _ in range(_ROUNDS))


def _timed(work: Callable[[], object], calls: int) -> float:
    _wait()
    began = perf_counter()
    for _ in range(calls):
        work()
    _wait()
    return (perf_counter() - began) / calls


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def cast_seconds(device: torch.device) -> tuple[float, float]:
    """What a cast and that of its gradient take: each, and for each element."""

    def both(elements: int) -> float:
        x = torch.zeros(elements, device=device)
        low = x.bfloat16()
        return seconds(lambda: (x.bfloat16(), low.float()))

    small, large = map(both, _SIZES)
    return small, max(large - small, 0.0) / (_SIZES[1] - _SIZES[0])


def _flops(asked: Asked) -> float:
    """Of a matrix product, forward; 0 for every other op."""
    name = asked.point.op
    if name not in op_facts.FP32_KERNELS:
        return 0.0
    tensors = floating((asked.args, asked.kwargs))
    if name == "scaled_dot_product_attention":
        q, k, v = tensors[:3]
        return 2.0 * q.shape[:-1].numel() * k.shape[-2] * (q.shape[-1] + v.shape[-1])
    if name.startswith(("lstm", "gru", "rnn_")):
        steps = tensors[0].shape[:-1].numel()
        return 2.0 * steps * sum(t.numel() for t in tensors[1:] if t.dim() == 2)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        in_fp32(asked)
    return float(counter.get_total_flops())


def _saved(asked: Asked, low: bool) -> float:
    """Bytes that the op saves for its backward pass, casts included; parameters in FP32 are there anyway."""
    held: dict[int, int] = {}
    parameters = {t.untyped_storage().data_ptr() for t in floating((asked.args, asked.kwargs)) if t.is_leaf}

    def pack(tensor: Tensor) -> Tensor:
        memory = tensor.untyped_storage()
        if memory.data_ptr() not in parameters:
            held[memory.data_ptr()] = memory.nbytes()
        return tensor

    alive: Any
    with torch.autograd.graph.saved_tensors_hooks(pack, _itself), region_state.region(low):
        alive = asked.run(*asked.args, **asked.kwargs).result if low else in_fp32(asked)
    del alive
    return float(sum(held.values()))
