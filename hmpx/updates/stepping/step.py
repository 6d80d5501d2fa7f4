"""One optimizer step: parameter names and rounding key, and whether it is taken in slices or whole."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import torch

from hmpx.errors import HmpxError
from hmpx.rounding.stochastic import check_seed
from hmpx.updates.holding import state_dtypes
from hmpx.updates.holding.rounding_key import RoundingKey
from hmpx.updates.holding.segment import Segment
from hmpx.updates.holding.settings import Settings
from hmpx.updates.holding.state_forms import STATE_FORMS
from hmpx.updates.holding.stores import WAYS, Stores
from hmpx.updates.holding.ways import USUAL
from hmpx.updates.ranks import checks
from hmpx.updates.ranks.sharding import Box, Place, box_of, placed
from hmpx.updates.stepping import step_count
from hmpx.updates.stepping.batched_step import BatchedStep, Members, is_uniform
from hmpx.updates.stepping.interrupts import DeferredSignals
from hmpx.updates.stepping.names import fingerprint, named, parameters
from hmpx.updates.stepping.optimizer_scope import scope_of
from hmpx.updates.stepping.overlap import Overlaps, refuse_overlaps
from hmpx.updates.stepping.remembered import Remembered
from hmpx.updates.stepping.step_call import StepCall, WriteBack
from hmpx.updates.stepping.step_count import SEED_KEY, STEP_KEY
from hmpx.updates.stepping.update_counts import UpdateCounts
from hmpx.updates.stepping.whole_step import WholeStep

logger = logging.getLogger("hmpx")
Parameter = torch.nn.Parameter
Optimizer = torch.optim.Optimizer

MASTER_KEY = "hmpx_master"  # in the state of a parameter, in a checkpoint


class WeightUpdates:
    """Runs the steps of one optimizer in FP32 and writes BF16 parameters back as `settings` say."""

    def __init__(
        self, settings: Settings, names: dict[Parameter, str] | None = None, places: dict[str, Place] | None = None
    ) -> None:
        self.settings = settings
        self.names = names or {}
        self.places = places or {}  # of parameters that are slices of larger ones, by name
        self.stores = Stores()
        self.kept_steps = 0  # that were taken in the batches of the one before
        self._overlaps = Overlaps()
        self._segments: Remembered[tuple[Any, list[Segment]]] = Remembered()
        self._kept: Remembered[BatchedStep] = Remembered()
        self._stepped: Remembered[list[int]] = Remembered()  # the parameters of the last step, by id
        self._open: _OpenStep | None = None
        self.watch: UpdateCounts | None = None  # what counts the updates, from the next step on
        self._counts: UpdateCounts | None = None  # what counts those of the step that has begun

    def step(self, call: StepCall) -> Any:
        """Run a step of an optimizer. If it raises, weights and gradients are as they were."""
        optimizer, write_back = call.optimizer, self._write_back(call)
        number = write_back.rounding_key.step
        checks.check_failures(optimizer, number)
        with DeferredSignals() as signals:
            try:
                result = self._step(call, write_back, signals)
            except Exception as error:
                checks.report_failure(optimizer, number, error)
                raise
            if not _skipped(optimizer):
                is_trial = step_count.is_trial()
                number += not is_trial
                step_count.keep(optimizer, **{STEP_KEY: number, SEED_KEY: write_back.rounding_key.seed})
                if self._counts is not None and not is_trial:
                    with torch.no_grad():
                        self._counts.end(self._named_bf16(optimizer))
            self._open = None
        return result

    def _step(self, call: StepCall, write_back: WriteBack, signals: DeferredSignals) -> Any:
        optimizer, by_parts, result = call.optimizer, scope_of(call.optimizer) != "whole", None
        if by_parts:
            if call.closure is not None:  # the listed classes call it before anything else
                with torch.enable_grad():
                    result = call.closure()
            call = call.without_arguments()
        if by_parts and self._kept_step(call, write_back, signals):
            return result
        segments = self.segments(optimizer)
        self._cast_state(optimizer, write_back, segments)
        by_parts = by_parts and is_uniform(optimizer, segments)
        if not by_parts or self.settings.has_masters:
            refuse_overlaps(segments)
        if not by_parts:
            of_whole = WholeStep(call, segments, write_back).run(signals)
            return of_whole if scope_of(optimizer) == "whole" else result
        signals.begin()
        params = [p for p in parameters(optimizer) if p.grad is not None]
        before, self._stepped[optimizer] = self._stepped.get(optimizer), list(map(id, params))
        with torch.no_grad():
            step = BatchedStep(optimizer, Members(optimizer, segments), params, write_back, fused=self.settings.fused)
            step.run(call, write_back, [])
            is_alone = self._open is None and write_back.counts is None
            if is_alone and before in (None, self._stepped[optimizer]) and step.keep(optimizer):
                self._kept[optimizer] = step
        return result

    def _kept_step(self, call: StepCall, write_back: WriteBack, signals: DeferredSignals) -> bool:
        """Take the step in the batches of the last one, if these fit; if not, nothing has changed."""
        step = self._kept.pop(call.optimizer, None)
        if step is None or self._open is not None or write_back.counts is not None or not step.fits(call.optimizer):
            return False
        signals.begin()
        self.kept_steps += 1
        with torch.no_grad():
            step.run(call, write_back, [])
            if step.rest():
                self._kept[call.optimizer] = step
        return True

    def rounding_key(self, optimizer: Optimizer, seed: int | None = None) -> RoundingKey:
        """The key of the next step. The region's seed outranks the settings' seed, which outranks the stored one."""
        known = step_count.stored(optimizer)
        given = (seed, self.settings.seed, known.get(SEED_KEY), 0)
        return RoundingKey(check_seed(next(s for s in given if s is not None)), known.get(STEP_KEY, 0))

    def _write_back(self, call: StepCall) -> WriteBack:
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing() and self.segments(call.optimizer):
            raise HmpxError(
                "a step of BF16 parameters cannot be a part of a CUDA graph: the host hands over the step number, on "
                "which the random numbers depend, so every replay would round alike; capture forward and backward "
                "(torch.cuda.make_graphed_callables), and call optimizer.step() outside of the graph"
            )
        key = self.rounding_key(call.optimizer, call.seed)
        if self._open is None:
            self._counts = self.watch if self.watch is not None and self.watch.is_open else None
            if self._counts is not None:
                self._counts.begin()
        return WriteBack(self.stores, key, self._counts)

    def step_alone(self, call: StepCall, p: Parameter) -> None:
        """Step one parameter, as a part of the next step; under `torch.no_grad()`."""
        if self._open is None:
            write_back = self._write_back(call)
            segments = self.segments(call.optimizer)
            self._cast_state(call.optimizer, write_back, segments)
            if self.settings.has_masters:
                refuse_overlaps(segments)
            self._open = _OpenStep(Members(call.optimizer, segments), write_back, [])
        members, write_back, written = self._open
        with DeferredSignals() as signals:
            signals.begin()
            part = BatchedStep(call.optimizer, members, [p], write_back, fused=self.settings.fused)
            part.run(call, write_back, written)

    def set_masters(self, optimizer: Optimizer, masters: Mapping[Parameter, torch.Tensor]) -> dict[str, int]:
        """Take over masters from a checkpoint.

        Returns:
            How many there were for parameters that have none, by how these are held.
        """
        self._kept.pop(optimizer, None)
        without: Counter[str] = Counter()
        for segment in self._all_segments(optimizer):
            if segment.param in masters and WAYS[segment.way.weights].has_masters:
                self.stores.of(segment).take_masters(masters[segment.param])
            elif segment.param in masters:
                without[segment.way.weights] += 1
        return dict(without)

    def _all_segments(self, optimizer: Optimizer) -> list[Segment]:
        """Every parameter, of whatever dtype: masters may come before their parameter is BF16."""
        return [Segment(p, name, way=self.settings.way(name)) for name, p in named(optimizer, self.names)]

    @property
    def is_open(self) -> bool:
        """Whether a part of the next step has been taken."""
        return self._open is not None

    def take_masters(self, optimizer: Optimizer) -> None:
        """Take over masters that a load before `attach` has left in the optimizer's state."""
        held: dict[Parameter, torch.Tensor] = {}
        cast_down = 0
        for p, values in optimizer.state.items():
            masters = values.pop(MASTER_KEY, None) if isinstance(values, dict) else None
            if masters is not None and masters.dtype is torch.float32:
                held[cast(Parameter, p)] = masters
            elif masters is not None:
                cast_down += 1
        lost = {"the load cast them to BF16": cast_down} if self.settings.has_masters else {}
        without = self.set_masters(optimizer, held)
        if not self.settings.has_masters and cast_down:
            without[self.settings.weights] = without.get(self.settings.weights, 0) + cast_down
        for why, count in (lost | {f"weights={weights!r}": count for weights, count in without.items()}).items():
            if count:
                logger.warning("hmpx: masters of %d parameters, loaded before attach, are dropped: %s", count, why)

    def cast_state_along(self, optimizer: Optimizer, p: Parameter) -> None:
        """Cast the state of `p`, which is no longer BF16, for plain steps."""
        way = next((self.settings.way(name) for name, each in named(optimizer, self.names) if each is p), USUAL)
        state_dtypes.cast_state_of(optimizer, p, way.state_dtype)

    def release_state(self, optimizer: Optimizer) -> None:
        """Cast the state to the dtype of its parameter, for plain steps."""
        state_dtypes.release_state(optimizer)

    def _cast_state(self, optimizer: Optimizer, write_back: WriteBack, segments: list[Segment]) -> None:
        key, found = write_back.rounding_key, False
        for state_dtype in dict.fromkeys(way.state_dtype for way in self.settings.ways):
            own = [segment for segment in segments if segment.way.state_dtype == state_dtype]
            others = {s.param for s in segments if s not in own} if len(own) != len(segments) else set()
            found = STATE_FORMS[state_dtype].adopt(optimizer, own, key, others) or found
        if found and key.step:
            logger.warning(
                "hmpx: %s: load_state_dict cast the FP32 optimizer state down to BF16, or it was saved so, and this "
                "run is not the resumed one; call it inside `with hmpx.disable_casts():` or after `hmpx.attach()` or "
                "`hmpx.convert()`, and save it with state_dtype float32",
                type(optimizer).__name__,
            )

    def look_again(self) -> None:
        """Forget everything kept from the last step, tensors included: a load is about to replace them."""
        self._kept.clear()
        self._segments.clear()

    def segments(self, optimizer: Optimizer) -> list[Segment]:
        """The BF16 parameters, whole, with their names."""
        known, now = self._segments.get(optimizer), fingerprint(optimizer)
        if known is not None and now is not None and known[0] == now:
            return known[1]
        ours = self._named_bf16(optimizer)
        with torch.no_grad():
            shared = self._overlaps.among([p for _, p in ours])
            found = [
                Segment(p, name, box=self._box(p, name), overlaps=shared.get(p), way=self.settings.way(name))
                for name, p in ours
                if _is_supported(name, p)
            ]
        self._segments[optimizer] = now, found
        return found

    def _box(self, p: Parameter, name: str) -> Box | None:
        place = self.places.get(name)
        if place is None:
            return box_of(p, name)
        if self.settings.way(name).state_dtype == "8bit" and (p.dim() == 1 or place.whole[1:] != p.shape[1:]):
            raise HmpxError(
                f"places: {name!r} is cut across rows, which in 8 bits share scales with other ranks: give it "
                "state_dtype=torch.bfloat16, or shard it as a DTensor"
            )
        return placed(p, name, place)

    def _named_bf16(self, optimizer: Optimizer) -> list[tuple[str, Parameter]]:
        return [(name, p) for name, p in named(optimizer, self.names) if p.dtype is torch.bfloat16]


class _OpenStep(NamedTuple):
    """A step that parameters take one by one (`release_gradients`)."""

    members: Members
    write_back: WriteBack
    written: list[str]


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
