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
from hmpx.updates.interrupts import Deferral, tear
from hmpx.updates.names import named, parameters
from hmpx.updates.optimizer_scope import reach_of
from hmpx.updates.overlap import Overlaps, refuse_overlaps
from hmpx.updates.ranks import checks
from hmpx.updates.ranks.sharding import box_of
from hmpx.updates.settings import Settings
from hmpx.updates.sliced_step import SlicedStep
from hmpx.updates.step_count import SEED_KEY, STEP_KEY
from hmpx.updates.weights import WAYS, Numbers, Run, Stochastic
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
        self.way = WAYS[settings.weights]()
        self._overlaps = Overlaps()
        self._open: _OpenStep | None = None

    def step(self, optimizer: Optimizer, step: Callable, args: tuple, kwargs: dict, seed: int | None = None) -> Any:
        """Run `step`, the optimizer's own function. If it raises, weights and gradients are as they were."""
        numbers = self.numbers(optimizer, seed)
        checks.check_failures(optimizer, numbers.step)
        with Deferral() as signals:
            try:
                result = self._step(optimizer, step, args, kwargs, numbers, signals)
            except Exception as error:
                checks.report_failure(optimizer, numbers.step, error)
                raise
            if not _skipped(optimizer):
                step_number = numbers.step + (not step_count.is_trial())
                step_count.keep(optimizer, **{STEP_KEY: step_number, SEED_KEY: numbers.seed})
            self._open = None
        return result

    def _step(
        self, optimizer: Optimizer, step: Callable, args: tuple, kwargs: dict, numbers: Numbers, signals: Deferral
    ) -> Any:
        by_parts = reach_of(optimizer) != "whole"
        result = _evaluate(args, kwargs) if by_parts else None
        self._settle(optimizer, numbers)
        runs = self.runs(optimizer)
        one_by_one = by_parts and _is_uniform(optimizer, runs)
        if not one_by_one or self.settings.has_masters:
            refuse_overlaps(runs)
        if one_by_one:
            signals.begin()
            self._sliced(optimizer, runs, step, numbers)
        elif by_parts:
            self._whole(optimizer, runs, step, (), {}, numbers, signals)
        else:
            result = self._whole(optimizer, runs, step, args, kwargs, numbers, signals)
        return result

    def numbers(self, optimizer: Optimizer, seed: int | None = None) -> Numbers:
        """Of the step that is next. A seed given to the region outranks the settings', and that the stored one."""
        known = step_count.numbers(optimizer)
        given = (seed, self.settings.seed, known.get(SEED_KEY), 0)
        return Numbers(check_seed(next(s for s in given if s is not None)), known.get(STEP_KEY, 0))

    def step_alone(self, optimizer: Optimizer, step: Callable, p: Parameter) -> None:
        """Step one parameter, as a part of the step that is next; under `torch.no_grad()`."""
        if self._open is None:
            numbers = self.numbers(optimizer)
            self._settle(optimizer, numbers)
            runs = self.runs(optimizer)
            if self.settings.has_masters:
                refuse_overlaps(runs)
            self._open = _OpenStep(optimizer, runs, step, self.way, self.settings, numbers)
        with Deferral() as signals:
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
                self.way.set_masters(p, masters)
            elif masters is not None:
                lost += 1
        if lost:
            logger.warning(
                "hmpx: masters of %d parameters, loaded before attach, are dropped: %s",
                lost,
                "the load cast them to BF16" if self.settings.has_masters else f"weights={self.settings.weights!r}",
            )

    def leave(self, optimizer: Optimizer, p: Parameter) -> None:
        """`p` is not BF16 any more: from here on its steps are plain ones."""
        self.way.drop(p)
        optimizer_state.widen(optimizer, p, self.settings.state_dtype)

    def release_state(self, optimizer: Optimizer) -> None:
        """Bring the state into the dtype of its parameter, where a plain step wants it."""
        optimizer_state.settle(optimizer, torch.bfloat16)

    def _whole(
        self,
        optimizer: Optimizer,
        runs: list[Run],
        step: Callable,
        args: tuple,
        kwargs: dict,
        numbers: Numbers,
        signals: Deferral,
    ) -> Any:
        return WholeStep(optimizer, runs, self.way, self.settings.state_dtype).run(step, args, kwargs, numbers, signals)

    def _sliced(self, optimizer: Optimizer, runs: list[Run], step: Callable, numbers: Numbers) -> None:
        params = [p for p in parameters(optimizer) if p.grad is not None]
        with torch.no_grad():
            _OpenStep(optimizer, runs, step, self.way, self.settings, numbers).run(params)

    def _settle(self, optimizer: Optimizer, numbers: Numbers) -> None:
        held = self.settings.state_dtype
        if optimizer_state.settle(optimizer, held, lists=held is torch.float32) and numbers.step:
            logger.warning(
                "hmpx: %s: load_state_dict cast the FP32 optimizer state down to BF16, so this run is not the resumed "
                "one; call it inside `with hmpx.disable_casts():` or after `hmpx.attach()` or `hmpx.convert()`",
                type(optimizer).__name__,
            )

    def runs(self, optimizer: Optimizer) -> list[Run]:
        """The BF16 parameters, whole, with their names."""
        ours = [(name, p) for name, p in named(optimizer, self.names) if p.dtype is torch.bfloat16]
        with torch.no_grad():
            shared = self._overlaps.among([p for _, p in ours])
            return [Run(p, name, box=box_of(p, name), overlaps=shared.get(p)) for name, p in ours if _is_taken(name, p)]


class _OpenStep:
    """A step that is taken in parts: by slices, and by fused kernels where they were asked for."""

    def __init__(
        self,
        optimizer: Optimizer,
        runs: list[Run],
        step: Callable,
        way: Stochastic,
        settings: Settings,
        numbers: Numbers,
    ) -> None:
        self._optimizer, self._settings, self._numbers = optimizer, settings, numbers
        self._runs = {run.param: run for run in runs}
        self._slices = SlicedStep(optimizer, step, way, settings.state_dtype, numbers)
        self._by_element = reach_of(optimizer) == "element"
        self._group = {p: group for group in optimizer.param_groups for p in group["params"]}

    def run(self, params: list[Parameter]) -> None:
        """Step `params`, which have gradients."""
        sliced, kernels = [], []
        for run in (self._runs[p] for p in params if p in self._runs):
            group = self._group[run.param]
            if self._settings.fused and fused_step.takes(self._optimizer, group, run):
                kernel = fused_step.prepare(self._optimizer, group, run, self._settings.state_dtype, self._numbers)
                kernels.append((run.name, kernel))
            else:
                sliced.append(run)
        try:
            self._slices.run(sliced, [p for p in params if p not in self._runs], self._by_element)
            for name, kernel in kernels:
                self._slices.written.append(name)
                kernel()
        except BaseException as error:
            if self._slices.written:
                tear(self._optimizer, self._numbers.step, self._slices.written, error)
            raise


def _evaluate(args: tuple, kwargs: dict) -> Any:
    """Call the closure, as the steps of the listed classes would before anything else."""
    closure = args[0] if args else kwargs.get("closure")
    with torch.enable_grad():
        return None if closure is None else closure()


def _is_uniform(optimizer: Optimizer, runs: list[Run]) -> bool:
    """Whether no part of a step can meet what the first did not: dense gradients, and fitting state of one kind.

    A step on XLA is not taken in parts: it is one graph, in which the compiler sees to memory.
    """
    if any(is_lazy(run.param) for run in runs):
        return False
    by_element = reach_of(optimizer) == "element"
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
    grads = (run.param.grad for run in runs)
    return all(grad is None or grad.layout is torch.strided for grad in grads)


def _is_taken(name: str, p: Parameter) -> bool:
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
