"""What BF16 brings at each call: time, FLOPs, or memory of saved activations, measured beside FP32 on this device."""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Callable
from time import perf_counter
from typing import Any, Literal

import torch
from torch.utils.flop_counter import FlopCounterMode

from hmpx import region_state
from hmpx.insight.comparing.calls import Asked
from hmpx.insight.comparing.computing import in_fp32
from hmpx.insight.tensors import Tensor, floating
from hmpx.insight.tuning.charges import Scored
from hmpx.insight.tuning.roundings import Rounded, redrawing, with_inputs
from hmpx.ops import op_facts
from hmpx.ops.observing import unobserved

Objective = Literal["speed", "coverage", "memory"]
OBJECTIVES: tuple[Objective, ...] = ("speed", "coverage", "memory")
_ROUNDS = 5  # of a time that is measured
_LEAST = 2e-4  # seconds that a round takes at least
_SIZES = 1 << 12, 1 << 20  # elements of the two casts of which the time is measured


Worth = dict[str, float]  # of one site in one batch, by the names below
LOW, WIDE, FLOPS = "low", "wide", "flops"  # seconds or bytes in BF16 and in FP32; FLOPs forward


class Measuring:
    """Looks at each call that is scored, and measures what is asked for; calls that are alike are measured once."""

    def __init__(self, objective: Objective) -> None:
        self._objective = objective
        self._known: dict[tuple, Worth] = {}

    def look(self, site: Scored, asked: Asked, rounded: Rounded) -> None:
        tensors = floating((asked.args, asked.kwargs))
        rest = [each for each in (*asked.args, *asked.kwargs.values()) if not isinstance(each, Tensor)]
        shapes = tuple((t.shape, t.stride(), t.dtype, t.requires_grad) for t in tensors)
        key = asked.point.label, shapes, repr(rest) if not any(isinstance(each, list) for each in rest) else ""
        if key not in self._known:
            with unobserved(), redrawing(), torch.autograd.graph.saved_tensors_hooks(_itself, _itself):
                self._known[key] = self._measured(asked, rounded)
        for name, value in self._known[key].items():
            site.worth[name] = site.worth.get(name, 0.0) + value

    def _measured(self, asked: Asked, rounded: Rounded) -> Worth:
        grad = torch.is_grad_enabled()
        if self._objective == "speed":
            wide = low = seconds(_work(asked, asked.args, asked.kwargs, False, grad))
            with contextlib.suppress(NotImplementedError):  # a backward pass that BF16 has not, which scoring tells
                low = seconds(_work(asked, rounded.seen.args, rounded.seen.kwargs, True, grad))
        elif self._objective == "memory":
            low, wide = _saved(asked, True), _saved(asked, False)
        else:
            low, wide = 0.0, _flops(asked)
        return {LOW: low, WIDE: wide, FLOPS: _flops(asked)}


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _work(asked: Asked, args: tuple, kwargs: dict, low: bool, grad: bool) -> Callable[[], object]:
    """The op forward and backward, on inputs that have their dtypes already."""
    wanted = [t.requires_grad for t in floating((asked.args, asked.kwargs))]
    tensors = floating((args, kwargs))
    leaves = [t.detach().requires_grad_(each and grad) for t, each in zip(tensors, wanted, strict=True)]
    call = with_inputs(asked.with_arguments(args, kwargs), leaves)
    needed = [leaf for leaf in leaves if leaf.requires_grad]

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


def cast_seconds(device: torch.device) -> Callable[[int, int], float]:
    """What casts and those of their gradients take, by how many there are and how many elements they have together."""

    def both(elements: int) -> float:
        x = torch.zeros(elements, device=device)
        low = x.bfloat16()
        return seconds(lambda: (x.bfloat16(), low.float()))

    small, large = map(both, _SIZES)
    rate = max(large - small, 0.0) / (_SIZES[1] - _SIZES[0])
    return lambda casts, elements: casts * small + elements * rate


def free(casts: int, elements: int) -> float:
    """What casts cost where time is no matter."""
    return 0.0


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
