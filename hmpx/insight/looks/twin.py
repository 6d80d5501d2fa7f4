"""An FP32 copy of weights in low precision, stepped by the optimizer's own code with the gradients of the script.

If an optimizer treats each element by itself, it does to a sample what it does to the whole. So samples of many
parameters are joined to one parameter, which stands for all of them. Any other optimizer steps copies of whole
parameters and their state, if these fit into `BOUND` bytes.
"""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from hmpx.base.torch_private import tree_leaves
from hmpx.insight.report import size
from hmpx.insight.tensors import LOW, eager, has_numbers, put_back, sample, widened
from hmpx.rounding.native import PLAIN
from hmpx.rounding.state_codes import is_coded
from hmpx.updates.holding.held import HeldState, held_states
from hmpx.updates.holding.sharding import is_sharded, local
from hmpx.updates.stepping.names import inner_optimizers, own_attachment, parameters
from hmpx.updates.stepping.optimizer_classes import is_known, own_step, scope_of

Tensor = torch.Tensor
Parameter = torch.nn.Parameter
Optimizer = torch.optim.Optimizer

BOUND = 1e9  # bytes that the copies of one optimizer may take
_TABLE = 1e8  # bytes of the copy of a parameter whose gradient is zero in most rows; a larger one is sampled
_PLAINLY = {"foreach": False, "capturable": False, "differentiable": False, "fused": False}


class NotChecked(Exception):
    """Says why updates could not be looked at."""


def samples(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([sample(each) for each in tensors])


def of_shape(p: Tensor, state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of a parameter's state that have its shape and hold floating numbers."""
    shaped = {key: v for key, v in state.items() if isinstance(v, Tensor) and v.shape == p.shape and key != "step"}
    return {key: v for key, v in shaped.items() if v.is_floating_point() and (type(v) in PLAIN or is_sharded(v))}


def _widened(value: Any) -> Any:
    """Return a tensor or a dtype in low precision as FP32. A container or object is returned, widened in place."""
    if isinstance(value, Tensor):
        return widened(value) if type(value) in PLAIN else value
    if isinstance(value, torch.dtype):
        return torch.float32 if value in LOW else value
    if isinstance(value, dict | list | deque):
        for key in value if isinstance(value, dict) else range(len(value)):
            value[key] = _widened(value[key])
    elif hasattr(value, "__dict__") and not isinstance(value, type | Optimizer):
        _widened(vars(value))  # such as a projector of gradients
    return value


class Twin:
    """A copy of an optimizer and of some of its parameters, which it steps in FP32.

    Args:
        is_sampled: whether it copies samples of the parameters, joined to one, instead of whole parameters.
        is_wide: whether the copy is in FP32; otherwise it is in the dtype of its parameters.
        known: samples by name, for several twins of one step to share.
        is_fresh: whether it begins without state.
        changed: options of the param group that differ from the optimizer's.

    Attributes:
        params: those of which something is in low precision, or else all. group: that of the first parameter.
        rows: of a table whose gradient touches only some rows, those that are looked at; None: all rows.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        params: Sequence[Parameter],
        is_sampled: bool,
        is_wide: bool = True,
        known: dict[str, Tensor] | None = None,
        is_fresh: bool = False,
        **changed: Any,
    ) -> None:
        self._known = known
        self.rows = (
            _rows(grad) if len(params) == 1 and (grad := params[0].grad) is not None and _by_rows(grad) else None
        )
        self.params = [p for p in params if is_rounded(optimizer, p)] or [*params]
        self.optimizer, self._all, self.is_sampled = optimizer, params, is_sampled
        self._wide, self._changed = (_widened if is_wide else lambda value: value), changed
        self.group = next(group for group in optimizer.param_groups if any(p is params[0] for p in group["params"]))
        self._copies = (self._sample if is_sampled else self._whole)()
        if is_fresh:
            self._twin.state = defaultdict(dict)

    def _sample(self) -> dict[Parameter, Parameter]:
        self._twin = _copied(self.optimizer, {}, {"state", "param_groups"})
        first = self.params[0]
        q = Parameter(self._wide(self._samples("its weights", self.params)))
        states = [_read(self.optimizer, p) for p in self.params]
        state = {key: v.clone() if isinstance(v, Tensor) else copy.deepcopy(v) for key, v in states[0].items()}
        for key in of_shape(first, states[0]):
            state[key] = self._samples(key, [each[key] for each in states])
        self._twin.state = defaultdict(dict, {q: {key: self._wide(v) for key, v in state.items()}} if state else {})
        self._twin.param_groups = [{**self.group, "params": [q]}]
        return {first: q}

    def _samples(self, name: str, tensors: Sequence[Any]) -> Tensor:
        if self._known is None:
            return samples(tensors)
        if name not in self._known:
            self._known[name] = samples(tensors)
        return self._known[name].clone()

    def _whole(self) -> dict[Parameter, Parameter]:
        copies = {p: Parameter(self._wide(p.detach()).clone(), p.requires_grad) for p in self._all}
        memo: dict[int, Any] = {id(p): q for p, q in copies.items()}
        if not is_known(self.optimizer):
            self._twin = _copied(self.optimizer, memo, set())
        else:  # some of its parameters, each by itself
            self._twin = _copied(self.optimizer, memo, {"state", "param_groups"})
            states = {q: _read(self.optimizer, p) for p, q in copies.items()}
            self._twin.state = defaultdict(
                dict, {q: copy.deepcopy(state, memo) for q, state in states.items() if state}
            )
            self._twin.param_groups = [
                {**group, "params": [copies[p] for p in group["params"] if p in copies]}
                for group in self.optimizer.param_groups
            ]
        for each in memo.values():
            if isinstance(each, Optimizer):
                vars(each).update({name: self._wide(value) for name, value in vars(each).items()})
        return copies

    def step(self, factor: float = 1.0) -> None:
        """Take one step with the gradients and settings that the real parameters have now. factor: of the gradients.

        Raises:
            NotChecked: the optimizer's code cannot do it.
        """
        scale = getattr(self.optimizer, "grad_scale", None)  # a GradScaler leaves the division by it to a fused kernel
        for real, group in zip(self._groups(), self._twin.param_groups, strict=True):
            plain: dict[str, Any] = {key: v for key, v in _PLAINLY.items() if key in real}
            own = {key: v.clone() if isinstance(v, Tensor) else v for key, v in real.items() if key != "params"}
            own["lr"] = float(real["lr"]) if self.is_sampled and "lr" in real else self._wide(own.get("lr"))
            group.update({key: v for key, v in {**own, **plain, **self._changed}.items() if key in real})
        for p, q in self._copies.items():
            grads = [each.grad for each in self.params] if self.is_sampled else [p.grad]
            if grads[0] is None or (not factor and not grads[0].is_sparse):
                q.grad = None if factor else torch.zeros_like(q)
                continue
            grad = self._samples("its gradient", grads) if self.is_sampled else grads[0].detach()
            q.grad = grad.to(q.dtype, copy=True)  # some optimizers compute in their gradients
            if factor != 1.0 or scale is not None:
                q.grad *= factor if scale is None else factor / scale
        try:
            with put_back(None), eager():
                own_step(type(self._twin))(self._twin)
        except Exception as error:
            raise NotChecked(f"its step cannot be repeated on a copy: {type(error).__name__}: {_line(error)}") from None

    def _groups(self) -> list[dict[str, Any]]:
        return [self.group] if self.is_sampled else self.optimizer.param_groups

    def samples(self, tensors: Iterable[Tensor]) -> Tensor:
        return samples(tensors if self.rows is None else [each.detach()[self.rows] for each in tensors])

    def weights(self) -> Tensor:
        return self._flat(self._watched(), self.is_sampled).detach().float().clone()

    def _watched(self) -> list[Parameter]:
        return [q for p, q in self._copies.items() if any(p is each for each in self.params)]

    def take_weights(self) -> None:
        """Give the copies the weights that the parameters have now."""
        for p, q in self._copies.items():
            q.data.copy_(samples(self.params) if self.is_sampled else p.detach())

    def again(
        self, gradient: float, is_wide: bool = True, known: dict[str, Tensor] | None = None, **changed: Any
    ) -> Twin:
        """Return a copy of what the optimizer and these parameters are now, which has taken one step.

        gradient: a factor of the gradients. known, changed: as for `Twin`.
        """
        twin = Twin(self.optimizer, self._all, self.is_sampled, is_wide, known, **changed)
        twin.rows = self.rows
        twin.step(gradient)
        return twin

    def state(self) -> dict[str, Tensor]:
        """Return samples of the state tensors that have the shape of their parameter, by key."""
        return self._state(self._twin, self._watched(), self.is_sampled)

    def real_state(self) -> dict[str, Tensor]:
        """Return samples of the same tensors of the optimizer itself."""
        return self._state(self.optimizer, self.params)

    def _state(self, optimizer: Optimizer, params: Sequence[Parameter], is_sample: bool = False) -> dict[str, Tensor]:
        states = [of_shape(p, _read(optimizer, p)) for p in params]
        keys = [key for key in states[0] if all(key in each for each in states)]
        return {key: self._flat([each[key] for each in states], is_sample).clone() for key in keys}

    def _flat(self, tensors: Iterable[Tensor], is_sample: bool) -> Tensor:
        first, *_ = tensors
        return first if is_sample else self.samples(tensors)


def _by_rows(grad: Tensor) -> bool:
    """Return whether a gradient touches only some rows of a table: it is sparse, or a matrix that is mostly zero."""
    if grad.is_sparse or grad.dim() != 2 or type(grad) not in PLAIN:
        return grad.is_sparse
    part = sample(grad)
    return 0 < 2 * int(part.count_nonzero()) < part.numel()


def _rows(grad: Tensor) -> Tensor:
    """Return the indices of a few rows that a gradient has touched, evenly spaced."""
    grad = grad.detach()
    rows = grad.coalesce().indices()[0] if grad.is_sparse else grad.any(1).nonzero().flatten()
    most = max(1024 // max(grad.numel() // grad.shape[0], 1), 16)
    return rows[:: -(-rows.numel() // most)] if rows.numel() else rows


def _read(optimizer: Optimizer, p: Parameter) -> dict[str, Any]:
    """Return the state of a parameter. What hmpx holds in codes is returned as numbers."""
    state = optimizer.state.get(p) or {}
    seen = held_states(state, p) if is_coded(state) else state
    return {key: value.whole() if isinstance(value, HeldState) else value for key, value in seen.items()}


def is_rounded(optimizer: Optimizer, p: Parameter) -> bool:
    """Return whether a step rounds a weight, or what the optimizer itself keeps of it, to low precision."""
    if p.dtype in LOW or own_attachment(optimizer) is not None:
        return p.dtype in LOW
    state = (optimizer.state.get(p) or {}).values()
    return any(isinstance(each, Tensor) and each.dtype in LOW and each.shape == p.shape for each in state)


def twins_of(optimizer: Optimizer) -> list[Twin]:
    """Return copies of the parameters with a gradient that `is_rounded`; those that are alike share one.

    Raises:
        NotChecked: they cannot be copied.
    """
    for each in [*inspect.signature(own_step(type(optimizer))).parameters.values()][1:]:
        if each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD):
            by = "runs the model several times, by a closure" if each.name == "closure" else f"takes {each.name}"
            raise NotChecked(f"its step {by}")
    every = [p for p in parameters(optimizer) if p.grad is not None and local(p).numel() and has_numbers(p)]
    low = [p for p in every if is_rounded(optimizer, p)]
    odd = next((p for p in low if type(p) not in PLAIN and not is_sharded(p)), None)
    if odd is not None:
        raise NotChecked(f"weights are a {type(odd).__name__}, whose values hmpx does not read")
    if not low:
        return []
    scope = scope_of(optimizer)
    if scope == "element":
        alike: dict[tuple, list[Parameter]] = defaultdict(list)
        sparse = [p for p in low if p.grad is not None and p.grad.is_sparse]
        dense = [
            p for p in low if p.grad is not None and _bytes(p, optimizer.state.get(p)) < _TABLE and _by_rows(p.grad)
        ]
        tables = dict.fromkeys([*sparse, *dense])
        for group in optimizer.param_groups:
            for p in group["params"]:
                if any(p is each for each in low) and p not in tables:
                    alike[_kind(group, p, _read(optimizer, p))].append(p)
        if (whole := sum(_bytes(p, optimizer.state.get(p)) for p in sparse)) > BOUND:
            raise NotChecked(
                f"a copy of the tables with sparse gradients takes {size(whole)}, and may take {size(BOUND)}"
            )
        return [Twin(optimizer, each, True) for each in alike.values()] + [Twin(optimizer, [p], False) for p in tables]
    if any(is_sharded(p) for p in low):
        raise NotChecked("its step looks across elements, which are on several ranks")
    params = parameters(optimizer) if scope == "model" else low
    taken, left = [], BOUND
    for p in params:
        left -= _bytes(p, optimizer.state.get(p))
        taken += [p] if left >= 0 else []
    if not taken or (scope == "model" and left < 0):
        raise NotChecked(f"a copy of its parameters and state takes {size(BOUND - left)}, and may take {size(BOUND)}")
    return [Twin(optimizer, taken, False)]


def _kind(group: dict[str, Any], p: Parameter, state: Mapping[str, Any]) -> tuple:
    """Return a key: parameters with the same key can be joined to one."""
    numbers = [v for v in state.values() if isinstance(v, int | float)]
    numbers += [float(v) for v in state.values() if isinstance(v, Tensor) and not v.dim() and v.is_cpu]
    return (id(group), p.dtype, p.device, *state, *numbers)


def _bytes(p: Parameter, state: Any) -> float:
    held = sum(t.numel() * max(4, t.element_size()) for t in tree_leaves(state) if isinstance(t, Tensor))
    return held + 3.0 * 4 * p.numel()  # weight, gradient, and what the step computes in between


def _line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "")


def _copied(optimizer: Optimizer, memo: dict[int, Any], apart: set[str]) -> Optimizer:
    """Copy an optimizer and those that it holds, without hooks. memo: of `copy.deepcopy`. apart: names to leave out.

    Raises:
        NotChecked: something that it holds cannot be copied.
    """
    twin = memo[id(optimizer)] = object.__new__(type(optimizer))
    for each in inner_optimizers(optimizer):
        if id(each) not in memo:
            _copied(each, memo, set())
    for value in tree_leaves(list(optimizer.state.values())):
        if hasattr(value, "__tensor_flatten__") and not is_sharded(value):  # `copy.deepcopy` fails for codes of torchao
            names, about = value.__tensor_flatten__()
            parts = {name: getattr(value, name).clone() for name in names}
            memo[id(value)] = type(value).__tensor_unflatten__(parts, about, value.shape, value.stride())
    for name, value in vars(optimizer).items():
        if name.endswith("_hooks") and isinstance(value, dict):
            vars(twin)[name] = OrderedDict()
        elif name in apart or name in ("step", "grad_scale", "found_inf"):  # schedulers wrap `step`
            continue
        elif value is None or value is not own_attachment(optimizer):  # it holds the weights themselves
            try:
                vars(twin)[name] = copy.deepcopy(value, memo)
            except Exception as error:
                raise NotChecked(f"its {name} cannot be copied: {_line(error)}") from None
    return twin
