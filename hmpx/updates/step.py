"""One optimizer step: names and numbers, and which road it takes, sliced or whole."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from hmpx.errors import HmpxError
from hmpx.rounding.stochastic import check_seed
from hmpx.rounding.xla import is_lazy
from hmpx.updates import fused_step, optimizer_state, step_count
from hmpx.updates.interrupts import DeferredSignals, mark_incomplete
from hmpx.updates.names import named, parameters
from hmpx.updates.optimizer_scope import scope_of
from hmpx.updates.overlap import Overlaps, refuse_overlaps
from hmpx.updates.ranks import checks
from hmpx.updates.ranks.sharding import box_of
from hmpx.updates.settings import Settings
from hmpx.updates.sliced_step import SlicedStep
from hmpx.updates.step_count import SEED_KEY, STEP_KEY
from hmpx.updates.weights import WAYS, RoundingKey, Segment, Stochastic
from hmpx.updates.whole_step import WholeStep

logger = logging.getLogger("hmpx")
Parameter = torch.nn.Parameter
Optimizer = torch.optim.Optimizer

MASTER_KEY = "hmpx_master"  # in the state of a parameter, in a checkpoint


def has_bf16(optimizer: Optimizer) -> bool:
    """Whether some parameter of `optimizer` is BF16."""
    return any(p.dtype is torch.bfloat16 for p in parameters(optimizer))


class WeightUpdates:
    """Runs the steps of one optimizer in FP32 and writes BF16 parameters back as `settings` say."""

    def __init__(self, settings: Settings, names: dict[Parameter, str] | None = None) -> None:
        self.settings = settings
        self.names = names or {}
        self.store = WAYS[settings.weights]()
        self._overlaps = Overlaps()
        self._open: _OpenStep | None = None

    def step(self, optimizer: Optimizer, step: Callable, args: tuple, kwargs: dict, seed: int | None = None) -> Any:
        """Run `step`, the optimizer's own function. If it raises, weights and gradients are as they were."""
        rounding_key = self.rounding_key(optimizer, seed)
        checks.check_failures(optimizer, rounding_key.step)
        with DeferredSignals() as signals:
            try:
                result = self._step(optimizer, step, args, kwargs, rounding_key, signals)
            except Exception as error:
                checks.report_failure(optimizer, rounding_key.step, error)
                raise
            if not _skipped(optimizer):
                step_number = rounding_key.step + (not step_count.is_trial())
                step_count.keep(optimizer, **{STEP_KEY: step_number, SEED_KEY: rounding_key.seed})
            self._open = None
        return result

    def _step(
        self,
        optimizer: Optimizer,
        step: Callable,
        args: tuple,
        kwargs: dict,
        rounding_key: RoundingKey,
        signals: DeferredSignals,
    ) -> Any:
        by_parts = scope_of(optimizer) != "whole"
        result = _evaluate(args, kwargs) if by_parts else None
        self._cast_state(optimizer, rounding_key)
        segments = self.segments(optimizer)
        one_by_one = by_parts and _is_uniform(optimizer, segments)
        if not one_by_one or self.settings.has_masters:
            refuse_overlaps(segments)
        if one_by_one:
            signals.begin()
            self._sliced(optimizer, segments, step, rounding_key)
        elif by_parts:
            self._whole(optimizer, segments, step, (), {}, rounding_key, signals)
        else:
            result = self._whole(optimizer, segments, step, args, kwargs, rounding_key, signals)
        return result

    def rounding_key(self, optimizer: Optimizer, seed: int | None = None) -> RoundingKey:
        """Of the step that is next. A seed given to the region outranks the settings', and that the stored one."""
        known = step_count.stored(optimizer)
        given = (seed, self.settings.seed, known.get(SEED_KEY), 0)
        return RoundingKey(check_seed(next(s for s in given if s is not None)), known.get(STEP_KEY, 0))

    def step_alone(self, optimizer: Optimizer, step: Callable, p: Parameter) -> None:
        """Step one parameter, as a part of the step that is next; under `torch.no_grad()`."""
        if self._open is None:
            rounding_key = self.rounding_key(optimizer)
            self._cast_state(optimizer, rounding_key)
            segments = self.segments(optimizer)
            if self.settings.has_masters:
                refuse_overlaps(segments)
            self._open = _OpenStep(optimizer, segments, step, self.store, self.settings, rounding_key)
        with DeferredSignals() as signals:
            signals.begin()
            self._open.run([p])

    @property
    def is_open(self) -> bool:
        """Whether a part of the step that is next has been taken."""
        return self._open is not None

    def take_masters(self, optimizer: Optimizer) -> None:
        """Take over masters that a load has left in the state of an optimizer that was not attached."""
        lost = 0
        for p, values in optimizer.state.items():
            masters = values.pop(MASTER_KEY, None) if isinstance(values, dict) else None
            if masters is not None and self.settings.has_masters and masters.dtype is torch.float32:
                self.store.set_masters(p, masters)
            elif masters is not None:
                lost += 1
        if lost:
            logger.warning(
                "hmpx: masters of %d parameters, loaded before attach, are dropped: %s",
                lost,
                "the load cast them to BF16" if self.settings.has_masters else f"weights={self.settings.weights!r}",
            )

    def drop(self, optimizer: Optimizer, p: Parameter) -> None:
        """`p` is not BF16 any more: from here on its steps are plain ones."""
        self.store.drop(p)
        optimizer_state.cast_state_of(optimizer, p, self.settings.state_dtype)

    def release_state(self, optimizer: Optimizer) -> None:
        """Bring the state into the dtype of its parameter, where a plain step wants it."""
        optimizer_state.cast_state(optimizer, torch.bfloat16)

    def _whole(
        self,
        optimizer: Optimizer,
        segments: list[Segment],
        step: Callable,
        args: tuple,
        kwargs: dict,
        rounding_key: RoundingKey,
        signals: DeferredSignals,
    ) -> Any:
        return WholeStep(optimizer, segments, self.store, self.settings.state_dtype).run(
            step, args, kwargs, rounding_key, signals
        )

    def _sliced(self, optimizer: Optimizer, segments: list[Segment], step: Callable, rounding_key: RoundingKey) -> None:
        params = [p for p in parameters(optimizer) if p.grad is not None]
        with torch.no_grad():
            _OpenStep(optimizer, segments, step, self.store, self.settings, rounding_key).run(params)

    def _cast_state(self, optimizer: Optimizer, rounding_key: RoundingKey) -> None:
        held = self.settings.state_dtype
        if optimizer_state.cast_state(optimizer, held, lists=held is torch.float32) and rounding_key.step:
            logger.warning(
                "hmpx: %s: load_state_dict cast the FP32 optimizer state down to BF16, so this run is not the resumed "
                "one; call it inside `with hmpx.disable_casts():` or after `hmpx.attach()` or `hmpx.convert()`",
                type(optimizer).__name__,
            )

    def segments(self, optimizer: Optimizer) -> list[Segment]:
        """The BF16 parameters, whole, with their names."""
        ours = [(name, p) for name, p in named(optimizer, self.names) if p.dtype is torch.bfloat16]
        with torch.no_grad():
            shared = self._overlaps.among([p for _, p in ours])
            return [
                Segment(p, name, box=box_of(p, name), overlaps=shared.get(p))
                for name, p in ours
                if _is_supported(name, p)
            ]


class _OpenStep:
    """A step that is taken in parts: by slices, and by fused kernels where they were asked for."""

    def __init__(
        self,
        optimizer: Optimizer,
        segments: list[Segment],
        step: Callable,
        store: Stochastic,
        settings: Settings,
        rounding_key: RoundingKey,
    ) -> None:
        self._optimizer, self._settings, self._rounding_key = optimizer, settings, rounding_key
        self._segments = {segment.param: segment for segment in segments}
        self._slices = SlicedStep(optimizer, step, store, settings.state_dtype, rounding_key)
        self._by_element = scope_of(optimizer) == "element"
        self._group = {p: group for group in optimizer.param_groups for p in group["params"]}

    def run(self, params: list[Parameter]) -> None:
        """Step `params`, which have gradients."""
        sliced, kernels = [], []
        for segment in (self._segments[p] for p in params if p in self._segments):
            group = self._group[segment.param]
            if self._settings.fused and fused_step.takes(self._optimizer, group, segment):
                kernel = fused_step.prepare(
                    self._optimizer, group, segment, self._settings.state_dtype, self._rounding_key
                )
                kernels.append((segment.name, kernel))
            else:
                sliced.append(segment)
        try:
            self._slices.run(sliced, [p for p in params if p not in self._segments], self._by_element)
            for name, kernel in kernels:
                self._slices.written.append(name)
                kernel()
        except BaseException as error:
            if self._slices.written:
                mark_incomplete(self._optimizer, self._rounding_key.step, self._slices.written, error)
            raise


def _evaluate(args: tuple, kwargs: dict) -> Any:
    """Call the closure, as the steps of the listed classes would before anything else."""
    closure = args[0] if args else kwargs.get("closure")
    with torch.enable_grad():
        return None if closure is None else closure()


def _is_uniform(optimizer: Optimizer, segments: list[Segment]) -> bool:
    """Whether no part of a step can meet what the first did not: dense gradients, and fitting state of one kind.

    A step on XLA is not taken in parts: it is one graph, in which the compiler sees to memory.
    """
    if any(is_lazy(segment.param) for segment in segments):
        return False
    by_element = scope_of(optimizer) == "element"
    for group in optimizer.param_groups:
        kinds: dict[bool, set] = {}
        for p in group["params"]:
            state = optimizer.state.get(p)
            if not isinstance(state, dict) or not state:
                continue
            kinds.setdefault(p.dim() > 1, set()).add(frozenset(state))  # Adafactor: another kind for matrices
            tensors = (v for v in state.values() if isinstance(v, torch.Tensor) and v.dim())
            if by_element and any(v.shape != p.shape for v in tensors):
                return False
        if any(len(kind) > 1 for kind in kinds.values()):
            return False
    grads = (segment.param.grad for segment in segments)
    return all(grad is None or grad.layout is torch.strided for grad in grads)


def _is_supported(name: str, p: Parameter) -> bool:
    if getattr(p, "_fsdp_flattened", False):
        raise HmpxError(
            f"parameter {name!r} belongs to FullyShardedDataParallel (FSDP1), which flattens parameters into one and "
            "hides where an element belongs; shard the model with torch.distributed.fsdp.fully_shard"
        )
    return True


def _skipped(optimizer: Optimizer) -> bool:
    """Whether a GradScaler found inf or NaN and told a fused optimizer not to update."""
    found = getattr(optimizer, "found_inf", None)
    return isinstance(found, torch.Tensor) and bool(found.item())
