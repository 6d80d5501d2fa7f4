"""What becomes of the updates of weights in BF16 and FP16 that a plain optimizer steps.

In some steps, a sample of each parameter is stepped again in FP32, by the optimizer's own code. An update is lost where
that moves and the weight does not, as `Attachment.updates()` counts it. The same step without weight decay, and one
with a gradient of zeros, tell what becomes of the decay and of the optimizer's state.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

import torch

from hmpx import region_state
from hmpx.insight.doctor.twin import Sampled, sample, spacing, stepped, take
from hmpx.updates.optimizer_hooks import attachment_of
from hmpx.updates.ranks.sharding import local
from hmpx.updates.stepping.names import parameters
from hmpx.updates.stepping.optimizer_scope import scope_of

Tensor = torch.Tensor
Parameter = torch.nn.Parameter
Optimizer = torch.optim.Optimizer
_FAITHFUL = 0.9  # of a sample: so many come out of the step in low precision, taken again, as they did in the step


@dataclass
class Tally:
    """Of one parameter, over the samples: updates in FP32, and those that were lost."""

    updates: int = 0
    lost: int = 0


@dataclass
class Stepped:
    """What was seen of one optimizer.

    sizes: medians of |update| in ulp, of parts of the steps. decay: what weight decay does in FP32, and what arrives in
    the weights, in ulp. idle: by key of the state, elements that a gradient of zeros moves in FP32, and those of them
    that stay. unknown: weights with a gradient, and those that did not move, of a class whose steps cannot be taken
    again. no_grad, zero_grad: by parameter, in how many samples. nonfinite: the first step with such a gradient.
    """

    optimizer: Optimizer
    where: str = ""
    steps: int = 0
    samples: int = 0
    tallies: dict[Parameter, Tally] = field(default_factory=lambda: defaultdict(Tally))
    sizes: list[float] = field(default_factory=list)
    decay: list[float] = field(default_factory=lambda: [0.0, 0.0])
    idle: dict[str, list[float]] = field(default_factory=lambda: defaultdict(lambda: [0.0, 0.0]))
    unknown: list[float] = field(default_factory=lambda: [0.0, 0.0])
    no_grad: Counter[Parameter] = field(default_factory=Counter)
    zero_grad: Counter[Parameter] = field(default_factory=Counter)
    low_state: set[torch.dtype] = field(default_factory=set)
    nonfinite: int | None = None
    nonfinite_weights: int | None = None
    rounds: bool = False  # hmpx holds the weights
    bytes: float = 0.0  # of weights in low precision, with gradients and state
    failed: str = ""
    _taken: list[Sampled] = field(default_factory=list)
    _grads: dict[Parameter, Tensor] = field(default_factory=dict)

    def begin(self, sampled: bool) -> None:
        """A step of the optimizer begins."""
        how = attachment_of(self.optimizer)
        self.rounds = region_state.rounding() is not None or (how is not None and how.settings.weights != "nearest")
        self._taken = take(self.optimizer) if sampled and not self.rounds else []
        self._grads = {p: p.grad for p in parameters(self.optimizer) if p.grad is not None} if sampled else {}

    def end(self, sampled: bool) -> None:
        """The step is done; it has been the `steps`-th."""
        self.steps += 1
        params = [p for p in parameters(self.optimizer) if p.requires_grad]
        grads = {p: grad for p in params if (grad := p.grad if p.grad is not None else self._grads.get(p)) is not None}
        self._look_for_nonfinite(grads)
        if not sampled:
            return
        self.samples += 1
        self._look_at_gradients(params, grads)
        found_inf = getattr(self.optimizer, "found_inf", None)
        if found_inf is None or not bool(found_inf):
            for taken in self._taken:
                kept = [i for i, p in enumerate(taken.params) if p in grads and grads[p].layout is torch.strided]
                if kept:
                    self._compare(taken, kept, torch.cat([sample(grads[taken.params[i]]) for i in kept]))
        low = [p for p in params if p.dtype in (torch.bfloat16, torch.float16)]
        self.bytes = sum(_bytes(p, grads.get(p), self.optimizer.state.get(p) or {}) for p in low)
        self._taken, self._grads = [], {}

    def _look_for_nonfinite(self, grads: dict[Parameter, Tensor]) -> None:
        """One look at a few small gradients: NaN spreads to all of them."""
        if self.nonfinite is not None or not grads:
            return
        found = sorted(grads.items(), key=lambda item: item[1].numel())[:8]
        if not _finite([sample(grad) for _, grad in found]):
            self.nonfinite = self.steps
        if self.nonfinite_weights is None and not _finite([sample(p) for p, _ in found]):
            self.nonfinite_weights = self.steps

    def _look_at_gradients(self, params: list[Parameter], grads: dict[Parameter, Tensor]) -> None:
        self.no_grad.update(p for p in params if p not in grads)
        dense = [p for p in grads if grads[p].layout is torch.strided and local(grads[p]).numel()]
        any_is = torch.stack([(sample(grads[p]) != 0).any().cpu() for p in dense]).tolist() if dense else []
        for p, some in zip(dense, any_is, strict=True):
            if not some and not bool((local(grads[p]) != 0).any()):
                self.zero_grad[p] += 1

    def _compare(self, taken: Sampled, kept: list[int], grad: Tensor) -> None:
        params = [taken.params[i] for i in kept]
        old, state = taken.joined(kept)
        new = torch.cat([sample(p) for p in params])
        changing = (grad != 0) & torch.isfinite(grad)
        if scope_of(self.optimizer) != "element":
            self.unknown[0] += int(changing.sum())
            self.unknown[1] += int((changing & (new == old)).sum())
            return
        again, _ = stepped(self.optimizer, taken.group, old, grad, state)
        if float((again == new).float().mean()) < _FAITHFUL:
            self.failed = "its steps come out otherwise when they are taken again"
            return
        exact, _ = stepped(self.optimizer, taken.group, old.float(), grad.float(), state)
        update = exact - old.float()
        updated = (update != 0) & torch.isfinite(exact)
        lost = updated & (new == old)
        if bool(updated.any()):
            self.sizes.append(float((update.abs() / spacing(old))[updated].median()))
        of_each = torch.stack([updated, lost]).split([len(taken.weights[i]) for i in kept], 1)
        counts = torch.stack([part.sum(1) for part in of_each]).tolist()
        for p, (some, gone) in zip(params, counts, strict=True):
            self.tallies[p].updates += some
            self.tallies[p].lost += gone
        if taken.group.get("weight_decay"):
            self._compare_decay(taken.group, old, grad, state, exact, again)
        if state:
            self._compare_state(taken, old, grad, state)

    def _compare_decay(self, group: dict, old: Tensor, grad: Tensor, state: dict, exact: Tensor, again: Tensor) -> None:
        without = {**group, "weight_decay": 0 * group["weight_decay"]}
        in_fp32 = exact - stepped(self.optimizer, without, old.float(), grad.float(), state)[0]
        arrived = again.float() - stepped(self.optimizer, without, old, grad, state)[0].float()
        ulp = spacing(old)
        self.decay[0] += float((in_fp32.abs() / ulp).nansum())
        self.decay[1] += float((arrived * in_fp32.sign() / ulp).nansum())

    def _compare_state(self, taken: Sampled, old: Tensor, grad: Tensor, state: dict[str, Any]) -> None:
        low = {key for key in taken.shaped if state[key].dtype in (torch.bfloat16, torch.float16)}
        if not low:
            return
        self.low_state |= {state[key].dtype for key in low}
        none = torch.zeros_like(grad)
        exact = stepped(self.optimizer, taken.group, old.float(), none, state)[1]
        again = stepped(self.optimizer, taken.group, old, none, state)[1]
        for key in low & exact.keys() & again.keys():
            moved = (exact[key] != state[key].float()) & (exact[key].abs() > 1e-30)
            self.idle[key][0] += int(moved.sum())
            self.idle[key][1] += int((moved & (again[key] == state[key])).sum())


def _finite(tensors: list[Tensor]) -> bool:
    sums = [t.float().abs().max().cpu() for t in tensors if t.numel()]
    return not sums or bool(torch.isfinite(torch.stack(sums)).all())


def _bytes(p: Parameter, grad: Tensor | None, state: dict[str, Any]) -> float:
    held = [p, *([grad] if grad is not None else []), *(v for v in state.values() if isinstance(v, Tensor) and v.dim())]
    return sum(local(each.detach()).numel() * each.element_size() for each in held)
