"""What becomes of the updates of weights in BF16 and FP16 that a plain optimizer steps.

In some steps, a sample of each parameter is stepped again by the optimizer's own code: in FP32, and in the dtype of the
weights. An update is lost if it moves the FP32 sample and not the weight, as `Attachment.updates()` counts it. The same
step without weight decay, and one with a gradient of zeros, tell what becomes of the decay and of the state.

An optimizer that treats each element by itself does the same to a sample as to the whole.
"""

from __future__ import annotations

import statistics
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from hmpx.base import region_state
from hmpx.base.dtype_names import dtype_name
from hmpx.insight.doctor.diagnosis import Names, Problem, percent, some
from hmpx.insight.tensors import LOW
from hmpx.recipes.recipe import Recipe
from hmpx.updates.lost_updates import THRESHOLD
from hmpx.updates.optimizer_hooks import attachment_of
from hmpx.updates.ranks.sharding import local
from hmpx.updates.step_hooks import own_step
from hmpx.updates.stepping.names import parameters
from hmpx.updates.stepping.optimizer_scope import scope_of

Tensor = torch.Tensor
Parameter = torch.nn.Parameter
Optimizer = torch.optim.Optimizer
# Of each parameter, a sample of its weight, under the key "", and of its state.
Samples = Mapping[Parameter, dict[str, Any]]

_MOST = 1024  # elements of one tensor that are looked at
_FAITHFUL = 0.9  # of a sample: at least so many come out as in the step when it is taken again in low precision
_LEAST_DECAY = 5.0  # in ulp: if less than that should arrive, it may fail to by accident
_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_SR = "hmpx.attach(optimizer) (steps and state in FP32, stochastic rounding{}; see tune_weights too)"
_WIDE = "keep the weights in float32 with products in BF16, as torch.autocast does{}"


def is_sampled(step: int) -> bool:
    """Whether updates are looked at in a step, counted from 1: in 1, 2, 4, 7, 11, 16, 22, ..."""
    root = int((2 * (step - 1)) ** 0.5)
    return any(each * (each + 1) // 2 == step - 1 for each in (root - 1, root, root + 1))


def sample(tensor: Tensor, most: int = _MOST) -> Tensor:
    """Return at most `most` elements of what this rank holds, evenly spaced, flat."""
    flat = local(tensor.detach()).reshape(-1)
    step = -(-flat.numel() // most)
    return flat[:: step + (step > 1 and step % 2 == 0)]  # an odd step does not stay in one column of a matrix


def _sampled(p: Parameter, state: Mapping[str, Any]) -> dict[str, Any]:
    own = {key: sample(v) if isinstance(v, Tensor) and v.shape == p.shape else v for key, v in state.items()}
    return {key: v.clone() if isinstance(v, Tensor) else v for key, v in {"": sample(p), **own}.items()}


def _joined(samples: Samples, key: str, params: Sequence[Parameter]) -> Tensor:
    return torch.cat([samples[p][key].flatten() for p in params])


class SteppedOptimizer:
    """What was seen of one optimizer.

    Attributes:
        steps, samples: how many there were, and how many of them were looked at.
        is_rounded: whether hmpx holds the weights, and so rounds them.
    """

    def __init__(self, optimizer: Optimizer, where: str) -> None:
        self.optimizer, self._where = optimizer, where
        self.steps = self.samples = 0
        self.is_rounded = False
        self._updates: Counter[Parameter] = Counter()
        self._lost: Counter[Parameter] = Counter()
        self._sizes: list[float] = []  # medians of |update| in ulp
        self._asked = self._arrived = 0.0  # what weight decay does in FP32, and what arrives in the weights, in ulp
        self._falls: Counter[str] = Counter()  # by key of state: elements that should fall
        self._stays: Counter[str] = Counter()  # and those of them that stay
        self._moving = self._still = 0  # of a class whose steps cannot be taken again: weights with a gradient
        self._no_grad: Counter[Parameter] = Counter()  # samples
        self._zero_grad: Counter[Parameter] = Counter()
        self._nonfinite: tuple[str, int] | None = None  # weights or gradients that were inf or NaN, in which step first
        self._before: dict[Parameter, dict[str, Any]] = {}
        self._grads: dict[Parameter, Tensor] = {}

    def begin(self) -> None:
        """A step begins."""
        how = attachment_of(self.optimizer)
        self.is_rounded = region_state.rounding() is not None or (how is not None and how.settings.weights != "nearest")
        self._before, self._grads = {}, {}
        if not is_sampled(self.steps + 1):
            return
        params = parameters(self.optimizer)
        self._grads = {p: p.grad for p in params if p.grad is not None}
        if not self.is_rounded:
            low = [p for p in params if p.dtype in LOW and local(p).numel()]
            self._before = {p: _sampled(p, self.optimizer.state.get(p) or {}) for p in low}

    def end(self) -> None:
        """The step is done."""
        self.steps += 1
        params = [p for p in parameters(self.optimizer) if p.requires_grad]
        grads = {p: grad for p in params if (grad := p.grad if p.grad is not None else self._grads.get(p)) is not None}
        dense = {p: grad for p, grad in grads.items() if grad.layout is torch.strided and local(grad).numel()}
        few = sorted(dense, key=lambda p: p.numel())[:8]  # NaN spreads to all
        for what, tensors in (("weights", few), ("gradients", [grads[p] for p in few])):
            if self._nonfinite is None and not _are_finite(tensors):
                self._nonfinite = what, self.steps
        if not is_sampled(self.steps):
            return
        self.samples += 1
        self._no_grad.update(p for p in params if p not in grads)
        self._zero_grad.update(p for p, grad in dense.items() if not (sample(grad).any() or local(grad).any()))
        before = {p: each for p, each in self._before.items() if p in dense}
        if before and not bool(getattr(self.optimizer, "found_inf", None)):
            self._compare(before, {p: sample(dense[p]).clone() for p in before})  # dense, for fused kernels

    def _compare(self, before: Samples, grads: Mapping[Parameter, Tensor]) -> None:
        """Compare what parameters have become with what they become in steps taken again."""
        params = list(before)
        old, new = _joined(before, "", params), torch.cat([sample(p) for p in params])
        if scope_of(self.optimizer) != "element":
            grad = torch.cat(list(grads.values()))
            changing = (grad != 0) & torch.isfinite(grad)
            self._moving += int(changing.sum())
            self._still += int((changing & (new == old)).sum())
            return
        wide, ulp = old.float(), _spacing(old)
        again = _joined(self._stepped(before, grads, wide=False), "", params)
        if float((again == new).float().mean()) < _FAITHFUL:
            return
        exact = _joined(self._stepped(before, grads, wide=True), "", params)
        updated = (exact != wide) & torch.isfinite(exact)
        if bool(updated.any()):
            self._sizes.append(float(((exact - wide).abs() / ulp)[updated].median()))
        of_each = torch.stack([updated, updated & (new == old)]).split([len(grads[p]) for p in params], 1)
        counts = torch.stack([part.sum(1) for part in of_each]).tolist()
        for p, (count, lost) in zip(params, counts, strict=True):
            self._updates[p] += count
            self._lost[p] += lost
        if any(group.get("weight_decay") for group in self.optimizer.param_groups):
            without = [
                _joined(self._stepped(before, grads, wide, weight_decay=0.0), "", params) for wide in (True, False)
            ]
            asked, arrived = exact - without[0], again.float() - without[1].float()
            self._asked += float((asked.abs() / ulp).nansum())
            self._arrived += float((arrived * asked.sign() / ulp).nansum())
        kept = [(key, v) for state in before.values() for key, v in state.items() if key]
        if low := {key for key, v in kept if isinstance(v, Tensor) and v.dtype in LOW}:
            self._compare_state(before, {p: torch.zeros_like(grad) for p, grad in grads.items()}, low)

    def _compare_state(self, before: Samples, zeros: Mapping[Parameter, Tensor], keys: set[str]) -> None:
        """Compare what state in low precision becomes with a gradient of zeros, in FP32 and as it is."""
        exact, again = (self._stepped(before, zeros, wide) for wide in (True, False))
        for key in keys:
            having = [p for p in before if key in before[p]]
            was, falling, left = (_joined(each, key, having) for each in (before, exact, again))
            falls = (falling != was.float()) & (falling.abs() > 1e-30)
            self._falls[key] += int(falls.sum())
            self._stays[key] += int((falls & (left == was)).sum())

    def _stepped(self, before: Samples, grads: Mapping[Parameter, Tensor], wide: bool, **settings: Any) -> Samples:
        """Return what the optimizer's own code makes of samples, in FP32 or in their own dtype."""
        stepped: dict[Parameter, Parameter] = {}
        state: dict[Parameter, dict[str, Any]] = defaultdict(dict)
        for p, values in before.items():
            own = {key: v.clone() if isinstance(v, Tensor) else v for key, v in values.items()}
            if wide:
                own = {key: v.float() if isinstance(v, Tensor) and v.dtype in LOW else v for key, v in own.items()}
            stepped[p] = Parameter(own.pop(""))
            stepped[p].grad = grads[p].to(stepped[p].dtype)
            if own:
                state[stepped[p]] = own
        twin = object.__new__(type(self.optimizer))
        vars(twin).update(vars(self.optimizer), **{name: OrderedDict() for name in _HOOKS}, state=state)
        for name in ("grad_scale", "found_inf"):  # of GradScaler, which has seen to the gradient
            vars(twin).pop(name, None)
        twin.param_groups = []
        for group in self.optimizer.param_groups:
            plain = {"foreach": False, "capturable": False, "differentiable": False, **settings}
            plain["fused"] = bool(group.get("fused")) and not wide
            plain["lr"] = float(group.get("lr", 0.0))
            own = {**group, **{key: value for key, value in plain.items() if key in group}}
            twin.param_groups.append({**own, "params": [stepped[p] for p in group["params"] if p in stepped]})
        own_step(type(self.optimizer))(twin)
        return {p: {"": each.detach(), **state[each]} for p, each in stepped.items()}

    def problems(self, names: Names) -> Iterator[Problem]:
        """What all that says about the training. names: of the parameters."""
        if not self.is_rounded:
            yield from self._of_updates(names)
        where, rates = self._where, [group.get("lr") for group in self.optimizer.param_groups]
        low = next((lr.dtype for lr in rates if isinstance(lr, Tensor) and lr.dtype in LOW), None)
        if low is not None:
            said = f"the learning rate is a tensor in {dtype_name(low)}: a factor of 0.999 leaves it as it is"
            do = "give the optimizer a float, or a tensor in float32"
            yield Problem("learning rate", True, said, do, where, weight=0.4)
        if self._nonfinite is not None:
            what, step = self._nonfinite
            said = f"{what} are inf or NaN {f'from step {step} on' if what == 'weights' else f'in step {step}'}"
            do = f"doctor --at {step} looks at every op of that step and names the first"
            yield Problem("inf or NaN", True, said, do, where, weight=1.0 if what == "weights" else 0.9)
        params = parameters(self.optimizer)
        for found, what in ((self._no_grad, "no gradient"), (self._zero_grad, "a gradient of zeros")):
            always = tuple(names[p] for p in params if found[p] == self.samples)
            every = len(always) == len(params)
            if self.samples > 1 and always and not (every and what == "no gradient"):
                said = f"{len(always)} of {len(params)} parameters had {what} in each step that was looked at: "
                do = "leave them out of the optimizer, or look for what cuts them off"
                yield Problem("gradients", every, said + some(always), do, where, always, weight=0.05)

    def _of_updates(self, names: Names) -> Iterator[Problem]:
        cls, where = type(self.optimizer).__name__, self._where
        half = any(p.dtype is torch.float16 for p in self._updates)
        recipe: dict[str, Any] = {"parameter_dtype": "float32"} if half else {"weights": "stochastic"}
        do = (_WIDE if half else _SR).format(self._bytes(Recipe(**recipe)))
        updates = self._updates.total()
        worst = sorted(self._updates, key=lambda p: -self._lost[p] / max(self._updates[p], 1))
        losing = [p for p in worst if self._lost[p] > THRESHOLD * self._updates[p]]
        if losing:
            lost, first = self._lost.total() / updates, losing[0]
            said = (  # in the words of `Attachment.updates()`
                f"round-to-nearest loses {percent(lost)} of the updates of {dtype_name(first.dtype)} weights by {cls}, "
                f"and more than {100 * THRESHOLD:g} % in {len(losing)} of {len(worst)} parameters, worst in "
                f"{names[first]} ({percent(self._lost[first] / self._updates[first])}); half of the updates are below "
                f"{statistics.median(self._sizes):.2g} ulp"
            )
            yield Problem("lost updates", True, said, do, where, tuple(names[p] for p in losing), (), lost, recipe)
        elif not updates and self._still > THRESHOLD * self._moving:
            share = self._still / self._moving
            said = f"{percent(share)} of the weights in low precision that had a gradient did not move in a step of "
            said += f"{cls}, which cannot be taken again in FP32 to tell why"
            do_ask = "hmpx.attach(optimizer).updates() counts what is lost"
            yield Problem("lost updates", False, said, do_ask, where, weight=share)
        if self._asked >= _LEAST_DECAY and self._arrived < 0.1 * self._asked:
            group = next(group for group in self.optimizer.param_groups if group.get("weight_decay"))
            a_step = float(group["lr"]) * float(group["weight_decay"])
            said = f"{percent(max(self._arrived / self._asked, 0.0))} of the weight decay arrives: lr x weight_decay "
            said += f"takes {a_step:.1g} of a weight in a step, and half an ulp is 0.002 or more"
            yield Problem("weight decay", True, said, do, where, weight=0.5, recipe=recipe)
        for key, falls in self._falls.items():
            stays = self._stays[key]
            if stays > 0.5 * falls:
                said = f"{key} in low precision cannot fall in {percent(stays / falls)} of its elements: a step takes "
                said += "off less than half an ulp"
                yield Problem("optimizer state", True, said, do, where, weight=0.45, recipe=recipe)

    def _bytes(self, recipe: Recipe) -> str:
        """Return in words the bytes of weight, gradient and state under a recipe, and those of today."""
        for p in self._updates:
            state = (self.optimizer.state.get(p) or {}).values()
            held = [each for each in state if isinstance(each, Tensor) and each.dim() and each.shape == p.shape]
            today = 2 * p.element_size() + sum(each.element_size() for each in held)
            return f", {sum(recipe.bytes_per_parameter(len(held)).values()):g} bytes a parameter for {today} today"
        return ""


def _spacing(weight: Tensor) -> Tensor:
    """Return the distance of each BF16 or FP16 number to the next one of its power of two, in FP32."""
    digits, least = (8, -133) if weight.dtype is torch.bfloat16 else (11, -24)
    exponent = torch.frexp(weight.float()).exponent
    return torch.ldexp(torch.ones_like(weight, dtype=torch.float32), (exponent - digits).clamp(min=least))


def _are_finite(tensors: Sequence[Tensor]) -> bool:
    largest = [few.float().abs().max().cpu() for each in tensors if (few := sample(each)).numel()]
    return not largest or bool(torch.isfinite(torch.stack(largest)).all())
