"""A step of an optimizer, taken again on a few elements: by its own code, in FP32 or in the dtype of the weights.

An optimizer that treats each element by itself does the same to a sample as to the whole, so one parameter that is put
together of samples of many stands for all of them.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from dataclasses import dataclass, field
from typing import Any

import torch

from hmpx.updates.ranks.sharding import local
from hmpx.updates.step_hooks import own_step

Tensor = torch.Tensor
Parameter = torch.nn.Parameter
Optimizer = torch.optim.Optimizer

MOST = 1024  # elements of one tensor that are looked at
_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def sample(tensor: Tensor, most: int = MOST) -> Tensor:
    """At most `most` elements of what this rank holds, evenly spaced, flat."""
    flat = local(tensor.detach()).reshape(-1)
    step = -(-flat.numel() // most)
    return flat[:: step + (step > 1 and step % 2 == 0)]  # an odd step does not stay in one column of a matrix


def spacing(weight: Tensor) -> Tensor:
    """The distance of a BF16 or FP16 number to the next one of its power of two, in FP32."""
    digits, least = (8, -133) if weight.dtype is torch.bfloat16 else (11, -24)
    exponent = torch.frexp(weight.float()).exponent
    return torch.ldexp(torch.ones_like(weight, dtype=torch.float32), (exponent - digits).clamp(min=least))


@dataclass
class Sampled:
    """What a step found of some parameters of one group that are alike: samples of weights and of state."""

    group: dict[str, Any]
    dtype: torch.dtype
    params: list[Parameter] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)
    state: dict[str, list[Any]] = field(default_factory=dict)  # by key, for each parameter
    shaped: set[str] = field(default_factory=set)  # keys of state that has an element for each of the parameter's

    def joined(self, kept: list[int]) -> tuple[Tensor, dict[str, Any]]:
        """Weights and state of some of the parameters, as of one parameter."""
        state = {
            key: torch.cat([values[i] for i in kept]) if key in self.shaped else values[kept[0]]
            for key, values in self.state.items()
        }
        return torch.cat([self.weights[i] for i in kept]), state


def take(optimizer: Optimizer) -> list[Sampled]:
    """Sample the parameters of an optimizer in BF16 and FP16, before a step."""
    found: dict[tuple, Sampled] = {}
    for number, group in enumerate(optimizer.param_groups):
        for p in group["params"]:
            if p.dtype not in (torch.bfloat16, torch.float16) or not local(p).numel():
                continue
            state = optimizer.state.get(p) or {}
            shaped = {key for key, value in state.items() if isinstance(value, Tensor) and value.shape == p.shape}
            shaped &= {key for key in shaped if state[key].dim() or (p.numel() == 1 and key != "step")}
            numbers = tuple((key, value) for key, value in state.items() if isinstance(value, int | float))
            taken = found.setdefault((number, p.dtype, *state, *numbers), Sampled(group, p.dtype, shaped=shaped))
            taken.params.append(p)
            taken.weights.append(sample(p).clone())
            for key, value in state.items():
                kept = sample(value) if key in shaped else value
                taken.state.setdefault(key, []).append(kept.clone() if isinstance(kept, Tensor) else kept)
    return [*found.values()]


def stepped(
    optimizer: Optimizer, group: dict[str, Any], weight: Tensor, grad: Tensor, state: dict[str, Any]
) -> tuple[Tensor, dict[str, Any]]:
    """What the optimizer's own code makes of one parameter with this gradient and state; in the dtype of `weight`."""
    p = Parameter(weight.clone())
    p.grad = grad.to(p.dtype)
    wide = p.dtype is torch.float32
    own = {key: value.clone() if isinstance(value, Tensor) else value for key, value in state.items()}
    if wide:
        low = (torch.bfloat16, torch.float16)
        own = {k: v.float() if isinstance(v, Tensor) and v.dtype in low else v for k, v in own.items()}
    twin = object.__new__(type(optimizer))
    vars(twin).update(vars(optimizer))
    vars(twin).update({name: OrderedDict() for name in _HOOKS})
    for name in ("grad_scale", "found_inf"):  # of GradScaler, which has seen to the gradient
        vars(twin).pop(name, None)
    plain = {"foreach": False, "capturable": False, "differentiable": False, "fused": group.get("fused") and not wide}
    settings = {key: value for key, value in plain.items() if key in group}
    lr = group.get("lr")
    if isinstance(lr, Tensor):
        settings["lr"] = float(lr)
    twin.param_groups = [{**group, **settings, "params": [p]}]
    twin.state = defaultdict(dict, {p: own} if own else {})
    own_step(type(optimizer))(twin)
    return p.detach(), dict(twin.state[p])
