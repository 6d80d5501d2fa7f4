"""What becomes of the updates of weights in BF16 and FP16 that a plain optimizer steps.

In some steps, a sample of each parameter is stepped again by the optimizer's own code: in FP32, and in the dtype of the
weights. An update is lost if it moves the FP32 sample and not the weight, as `Attachment.updates()` counts it. The same
step without weight decay, and one with a gradient of zeros, tell what becomes of the decay and of the state.

An optimizer that treats each element by itself does the same to a sample as to the whole, so one parameter that is put
together of samples of many stands for all of them.
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
Values = dict[str, Any]  # of a parameter: a sample of its weight, under the key "", and of its state

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


def _sampled(p: Parameter, state: Mapping[str, Any]) -> Values:
    shaped = {key for key, v in state.items() if isinstance(v, Tensor) and v.shape == p.shape and key != "step"}
    own = {"": sample(p), **{key: sample(v) if key in shaped else v for key, v in state.items()}}
    return {key: v.clone() if isinstance(v, Tensor) else v for key, v in own.items()}


def _joined(several: Sequence[Values]) -> Values:
    """Return the samples of parameters that are alike as those of one parameter."""
    first = several[0]
    shaped = [key for key, v in first.items() if isinstance(v, Tensor) and v.shape == first[""].shape]
    return {**first, **{key: torch.cat([values[key] for values in several]) for key in shaped}}


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
        self._in_fp32 = False  # whether hmpx takes the steps: in FP32, and weights are rounded after
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
        self._before: list[tuple[Parameter, dict[str, Any], Values]] = []  # with its group
        self._grads: dict[Parameter, Tensor] = {}

    def begin(self) -> None:
        """A step begins."""
        how = attachment_of(self.optimizer)
        self._in_fp32 = how is not None
        self.is_rounded = region_state.rounding() is not None or (how is not None and how.settings.weights != "nearest")
        self._before, self._grads = [], {}
        if not is_sampled(self.steps + 1):
            return
        self._grads = {p: p.grad for p in parameters(self.optimizer) if p.grad is not None}
        for group in self.optimizer.param_groups if not self.is_rounded else ():
            for p in group["params"]:
                if p.dtype in LOW and local(p).numel():
                    self._before.append((p, group, _sampled(p, self.optimizer.state.get(p) or {})))

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
        alike: dict[tuple, list[tuple[Parameter, dict[str, Any], Values]]] = defaultdict(list)
        for p, group, values in self._before if not bool(getattr(self.optimizer, "found_inf", None)) else ():
            if p in dense:  # those that are alike are stepped as one
                numbers = tuple((key, value) for key, value in values.items() if isinstance(value, int | float))
                kind = (id(group), p.dtype, p.device, *values, *numbers)
                alike[kind].append((p, group, values))
        for several in alike.values():
            params, groups, before = zip(*several, strict=True)
            self._compare(params, groups[0], _joined(before), torch.cat([sample(dense[p]) for p in params]))

    def _compare(self, params: Sequence[Parameter], group: dict[str, Any], before: Values, grad: Tensor) -> None:
        """Compare what parameters that are alike have become with what they become in steps taken again."""
        of_each = [sample(p) for p in params]
        old, new = before[""], torch.cat(of_each)
        if scope_of(self.optimizer) != "element":
            changing = (grad != 0) & torch.isfinite(grad)
            self._moving += int(changing.sum())
            self._still += int((changing & (new == old)).sum())
            return
        wide, ulp = old.float(), _spacing(old)
        again = self._stepped(group, before, grad, wide=False)[""]
        if float((again == new).float().mean()) < _FAITHFUL:
            return
        exact = self._stepped(group, before, grad, wide=True)[""]
        updated = (exact != wide) & torch.isfinite(exact)
        if bool(updated.any()):
            self._sizes.append(float(((exact - wide).abs() / ulp)[updated].median()))
        parts = torch.stack([updated, updated & (new == old)]).split([len(few) for few in of_each], 1)
        for p, (count, lost) in zip(params, torch.stack([part.sum(1) for part in parts]).tolist(), strict=True):
            self._updates[p] += count
            self._lost[p] += lost
        if group.get("weight_decay"):
            without = {**group, "weight_decay": 0 * group["weight_decay"]}
            asked = exact - self._stepped(without, before, grad, wide=True)[""]
            arrived = again.float() - self._stepped(without, before, grad, wide=False)[""].float()
            self._asked += float((asked.abs() / ulp).nansum())
            self._arrived += float((arrived * asked.sign() / ulp).nansum())
        low = [key for key, v in before.items() if key and isinstance(v, Tensor) and v.dtype in LOW]
        if low:
            falling, left = (self._stepped(group, before, torch.zeros_like(grad), wide) for wide in (True, False))
            for key in low:
                falls = (falling[key] != before[key].float()) & (falling[key].abs() > 1e-30)
                self._falls[key] += int(falls.sum())
                self._stays[key] += int((falls & (left[key] == before[key])).sum())

    def _stepped(self, group: dict[str, Any], before: Values, grad: Tensor, wide: bool) -> Values:
        """Return what the optimizer's own code makes of one parameter and its state, in FP32 or in their own dtypes."""
        own = {key: v.clone() if isinstance(v, Tensor) else v for key, v in before.items()}
        widens = wide or self._in_fp32
        if widens:
            own = {key: v.float() if isinstance(v, Tensor) and v.dtype in LOW else v for key, v in own.items()}
        p = Parameter(own.pop(""))
        p.grad = grad.to(p.dtype)
        twin = object.__new__(type(self.optimizer))
        state = defaultdict(dict, {p: own} if own else {})
        vars(twin).update(vars(self.optimizer), **{name: OrderedDict() for name in _HOOKS}, state=state)
        for name in ("grad_scale", "found_inf"):  # of GradScaler, which has seen to the gradient
            vars(twin).pop(name, None)
        plain: dict[str, Any] = {"foreach": False, "capturable": False, "differentiable": False}
        plain["fused"] = bool(group.get("fused")) and not widens
        plain["lr"] = float(group.get("lr", 0.0))
        twin.param_groups = [{**group, **{key: v for key, v in plain.items() if key in group}, "params": [p]}]
        own_step(type(self.optimizer))(twin)
        return {"": p.detach() if wide else p.detach().to(before[""].dtype), **state[p]}

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
