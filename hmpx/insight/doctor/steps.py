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
from dataclasses import dataclass
from typing import Any

import torch

from hmpx import region_state
from hmpx.dtype_names import dtype_name
from hmpx.insight.doctor.diagnosis import Problem, percent, some
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
Names = Mapping[Parameter, str]

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


@dataclass
class _Before:
    """Samples of one parameter in low precision and of its state, from before a step.

    shaped: the keys of state that has an element for each element of the parameter.
    """

    parameter: Parameter
    group: dict[str, Any]
    weight: Tensor
    state: dict[str, Any]
    shaped: frozenset[str]

    @classmethod
    def of(cls, p: Parameter, group: dict[str, Any], state: dict[str, Any]) -> _Before:
        shaped = {key for key, value in state.items() if isinstance(value, Tensor) and value.shape == p.shape}
        shaped = {key for key in shaped if p.dim() or key != "step"}
        kept = {key: sample(value) if key in shaped else value for key, value in state.items()}
        kept = {key: value.clone() if isinstance(value, Tensor) else value for key, value in kept.items()}
        return cls(p, group, sample(p).clone(), kept, frozenset(shaped))

    @property
    def kind(self) -> tuple:
        """What parameters have in common that can be stepped as one."""
        numbers = tuple((key, value) for key, value in self.state.items() if isinstance(value, int | float))
        return id(self.group), self.weight.dtype, *self.state, *numbers


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
        self._decay = [0.0, 0.0]  # what weight decay does in FP32, and what arrives in the weights, in ulp
        self._falls: dict[str, list[int]] = defaultdict(lambda: [0, 0])  # by key of state: should fall, and stays
        self._unknown = [0, 0]  # of a class whose steps cannot be taken again: weights with a gradient, and that stay
        self._no_grad: Counter[Parameter] = Counter()  # samples
        self._zero_grad: Counter[Parameter] = Counter()
        self._nonfinite: tuple[str, int] | None = None  # weights or gradients that were inf or NaN, in which step first
        self._before: list[_Before] = []
        self._grads: dict[Parameter, Tensor] = {}

    def begin(self) -> None:
        """A step begins."""
        how = attachment_of(self.optimizer)
        self.is_rounded = region_state.rounding() is not None or (how is not None and how.settings.weights != "nearest")
        self._before, self._grads = [], {}
        if not is_sampled(self.steps + 1):
            return
        self._grads = {p: p.grad for p in parameters(self.optimizer) if p.grad is not None}
        for group in self.optimizer.param_groups if not self.is_rounded else ():
            for p in group["params"]:
                if p.dtype in LOW and local(p).numel():
                    self._before.append(_Before.of(p, group, self.optimizer.state.get(p) or {}))

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
        if not bool(getattr(self.optimizer, "found_inf", None)):
            alike: dict[tuple, list[_Before]] = defaultdict(list)
            for before in self._before:
                if before.parameter in dense:
                    alike[before.kind].append(before)
            for some_before in alike.values():
                self._compare(some_before, torch.cat([sample(dense[each.parameter]) for each in some_before]))

    def _compare(self, before: list[_Before], grad: Tensor) -> None:
        """Compare what parameters that are alike have become with what they become in steps taken again."""
        first, old = before[0], torch.cat([each.weight for each in before])
        new = torch.cat([sample(each.parameter) for each in before])
        if scope_of(self.optimizer) != "element":
            changing = (grad != 0) & torch.isfinite(grad)
            self._unknown[0] += int(changing.sum())
            self._unknown[1] += int((changing & (new == old)).sum())
            return
        state = {
            key: torch.cat([each.state[key] for each in before]) if key in first.shaped else first.state[key]
            for key in first.state
        }
        group, wide = first.group, old.float()
        again, _ = self._stepped(group, old, grad, state)
        if float((again == new).float().mean()) < _FAITHFUL:
            return
        exact, _ = self._stepped(group, wide, grad, state)
        updated = (exact != wide) & torch.isfinite(exact)
        lost, ulp = updated & (new == old), _spacing(old)
        if bool(updated.any()):
            self._sizes.append(float(((exact - wide).abs() / ulp)[updated].median()))
        of_each = torch.stack([updated, lost]).split([len(each.weight) for each in before], 1)
        counts = torch.stack([part.sum(1) for part in of_each]).tolist()
        for each, (count, gone) in zip(before, counts, strict=True):
            self._updates[each.parameter] += count
            self._lost[each.parameter] += gone
        if group.get("weight_decay"):
            without = {**group, "weight_decay": 0 * group["weight_decay"]}
            in_fp32 = exact - self._stepped(without, wide, grad, state)[0]
            arrived = again.float() - self._stepped(without, old, grad, state)[0].float()
            self._decay[0] += float((in_fp32.abs() / ulp).nansum())
            self._decay[1] += float((arrived * in_fp32.sign() / ulp).nansum())
        low = {key for key in first.shaped if state[key].dtype in LOW}
        if low:
            exact_state, again_state = (self._stepped(group, w, torch.zeros_like(grad), state)[1] for w in (wide, old))
            for key in low & exact_state.keys() & again_state.keys():
                falls = (exact_state[key] != state[key].float()) & (exact_state[key].abs() > 1e-30)
                self._falls[key][0] += int(falls.sum())
                self._falls[key][1] += int((falls & (again_state[key] == state[key])).sum())

    def _stepped(
        self, group: dict[str, Any], weight: Tensor, grad: Tensor, state: dict[str, Any]
    ) -> tuple[Tensor, dict[str, Any]]:
        """Return what the optimizer's own code makes of one parameter and its state, in the dtype of `weight`."""
        p = Parameter(weight.clone())
        p.grad = grad.to(p.dtype)
        own = {key: value.clone() if isinstance(value, Tensor) else value for key, value in state.items()}
        wide = p.dtype is torch.float32
        if wide:
            own = {k: v.float() if isinstance(v, Tensor) and v.dtype in LOW else v for k, v in own.items()}
        twin = object.__new__(type(self.optimizer))
        vars(twin).update(vars(self.optimizer))
        vars(twin).update({name: OrderedDict() for name in _HOOKS})
        for name in ("grad_scale", "found_inf"):  # of GradScaler, which has seen to the gradient
            vars(twin).pop(name, None)
        plain = {"foreach": False, "capturable": False, "differentiable": False}
        plain["fused"] = bool(group.get("fused")) and not wide
        settings: dict[str, Any] = {key: value for key, value in plain.items() if key in group}
        if isinstance(lr := group.get("lr"), Tensor):
            settings["lr"] = float(lr)
        twin.param_groups = [{**group, **settings, "params": [p]}]
        twin.state = defaultdict(dict, {p: own} if own else {})
        own_step(type(self.optimizer))(twin)
        return p.detach(), dict(twin.state[p])

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
        updates, (seen, stayed) = self._updates.total(), self._unknown
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
        elif not updates and stayed > THRESHOLD * seen:
            share = stayed / seen
            said = f"{percent(share)} of the weights in low precision that had a gradient did not move in a step of "
            said += f"{cls}, which cannot be taken again in FP32 to tell why"
            do_ask = "hmpx.attach(optimizer).updates() counts what is lost"
            yield Problem("lost updates", False, said, do_ask, where, weight=share)
        asked, arrived = self._decay
        if asked >= _LEAST_DECAY and arrived < 0.1 * asked:
            group = next(group for group in self.optimizer.param_groups if group.get("weight_decay"))
            a_step = float(group["lr"]) * float(group["weight_decay"])
            said = f"{percent(max(arrived / asked, 0.0))} of the weight decay arrives: lr x weight_decay takes "
            said += f"{a_step:.1g} of a weight in a step, and half an ulp is 0.002 or more"
            yield Problem("weight decay", True, said, do, where, weight=0.5, recipe=recipe)
        for key, (falls, stays) in self._falls.items():
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
