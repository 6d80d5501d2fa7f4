"""Adam, AdamW and SGD with the write-back in one kernel: one pass over weights, gradients and state.

Opt-in, ``attach(optimizer, fused=True)``. The formulas are torch's and the order of operations is the kernel's own, so
results agree with torch's to rounding and not to the bit. State has torch's keys and shapes, so a training run may
change between fused and sliced steps. Parameters that no kernel takes (no C compiler, a device that is neither CPU nor
CUDA, sparse gradients, strides, amsgrad) are stepped in slices.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import optim

from hmpx.rounding import native, triton
from hmpx.updates.segment import Segment
from hmpx.updates.step_call import WriteBack

Tensor = torch.Tensor
FUSED = (optim.Adam, optim.AdamW, optim.SGD)


def takes(optimizer: optim.Optimizer, group: dict, segment: Segment) -> bool:
    """Whether a kernel can step this parameter."""
    p, grad = segment.param, segment.grad
    if type(optimizer) not in FUSED or group.get("amsgrad") or group["differentiable"] or _kernels(p) is None:
        return False
    if getattr(optimizer, "grad_scale", None) is not None or getattr(optimizer, "found_inf", None) is not None:
        return False  # a GradScaler leaves the unscaling to torch's own kernels
    held = [v for v in optimizer.state.get(p, {}).values() if isinstance(v, Tensor) and v.dim()]
    return (
        p.numel() < 2**32
        and grad.dtype in (torch.bfloat16, torch.float32)
        and all(native.is_plain(t) and t.device == p.device and t.shape == p.shape for t in (p, grad, *held))
    )


def _kernels(p: Tensor) -> Any:
    """The module of kernels for a parameter; None where there is none."""
    if p.is_cpu and native.library() is not None:
        return native
    return triton if p.is_cuda and triton.available() else None


def prepare(optimizer: optim.Optimizer, group: dict, segment: Segment, write_back: WriteBack) -> Callable[[], None]:
    """A function that steps one parameter that a kernel `takes`. Nothing changes before it is called."""
    launch = _maker(optimizer)(segment, group, optimizer.state.get(segment.param) or {}, write_back)

    def kernel() -> None:
        launch(optimizer.state[segment.param])
        torch.autograd.graph.increment_version(segment.param)

    return kernel


def exact(optimizer: optim.Optimizer, group: dict, segment: Segment, write_back: WriteBack) -> Callable[[], Tensor]:
    """A function that says what the kernel that `prepare` makes is going to round, in FP32.

    It runs the same kernel on FP32 copies of the weights, which are not rounded, and on a copy of the state.
    """

    def compute() -> Tensor:
        held = optimizer.state.get(segment.param) or {}
        state = {key: value.clone() if isinstance(value, Tensor) else value for key, value in held.items()}
        weights = torch.nn.Parameter(segment.param.float(), requires_grad=False)
        weights.grad = segment.grad.float()
        _maker(optimizer)(replace(segment, param=weights), group, state, write_back)(state)
        return weights.detach()

    return compute


def _maker(optimizer: optim.Optimizer) -> Callable[..., Callable[[dict], None]]:
    return _sgd if type(optimizer) is optim.SGD else _adam


def _keyed_state(state: dict, key: str, segment: Segment, write_back: WriteBack) -> native.KeyedTensor:
    """A state tensor, made if it is not there yet."""
    if state.get(key) is None:
        state[key] = torch.zeros_like(segment.param, dtype=write_back.form.in_kernels, requires_grad=False)
    return state[key], write_back.rounding_key.derive(f"{segment.name}.{key}")


def _adam(segment: Segment, group: dict, state: dict, write_back: WriteBack) -> Callable[[dict], None]:
    p, rate, decay = segment.param, float(group["lr"]), group["weight_decay"]
    beta1, beta2 = (float(beta) for beta in group["betas"])
    step = state.get("step", torch.tensor(0.0, dtype=torch.float32, device="cpu")) + 1
    count = step.item()
    correction = math.sqrt(1.0 - beta2**count)
    decoupled = group.get("decoupled_weight_decay", False)
    scalars = (
        -1.0 if group["maximize"] else 1.0,
        1.0 - rate * decay if decoupled else 1.0,
        0.0 if decoupled else decay,
        beta1,
        1.0 - beta1,
        beta2,
        1.0 - beta2,
        rate * correction / (1.0 - beta1**count),
        group["eps"] * correction,
    )

    def launch(state: dict) -> None:
        state["step"] = step
        moments = (_keyed_state(state, key, segment, write_back) for key in ("exp_avg", "exp_avg_sq"))
        _kernels(p).adam((p, write_back.rounding_key.derive(segment.name)), (segment.grad, 0), *moments, *scalars)

    return launch


def _sgd(segment: Segment, group: dict, state: dict, write_back: WriteBack) -> Callable[[dict], None]:
    p, momentum = segment.param, float(group["momentum"])
    first = state.get("momentum_buffer") is None
    scalars = (
        -1.0 if group["maximize"] else 1.0,
        group["weight_decay"],
        momentum if momentum else -1.0,
        0.0 if first else momentum,
        1.0 if first else 1.0 - group["dampening"],
        group["nesterov"],
        float(group["lr"]),
    )

    def launch(state: dict) -> None:
        buffer = _keyed_state(state, "momentum_buffer", segment, write_back) if momentum else (None, 0)
        _kernels(p).sgd((p, write_back.rounding_key.derive(segment.name)), (segment.grad, 0), buffer, *scalars)

    return launch
