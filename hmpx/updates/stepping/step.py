"""The steps of one optimizer. Each runs the plan of the step before, or a new one."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch

from hmpx.base.run_in_region import giving_back
from hmpx.base.torch_private import set_grad_enabled
from hmpx.errors import HmpxError
from hmpx.rounding.native import expect_kernels
from hmpx.updates.holding import state_dtypes
from hmpx.updates.holding.held import USUAL, RoundingKey, Segment
from hmpx.updates.holding.state_forms import adopt_states, find_weights_of
from hmpx.updates.holding.stores import WAYS, Settings, Stores
from hmpx.updates.stepping import step_count
from hmpx.updates.stepping.known_elsewhere import refuse_foreign_state
from hmpx.updates.stepping.names import BF16Parameters, Members, every_parameter, membership, parameters
from hmpx.updates.stepping.optimizer_classes import formula_used, is_known, is_scaled
from hmpx.updates.stepping.plan import Gradients, Plan
from hmpx.updates.stepping.released import finish
from hmpx.updates.stepping.standing import Standing, standing_or_none
from hmpx.updates.stepping.step_call import DeferredSignals, StepCall, WriteBack, mark_incomplete, refuse_graphs
from hmpx.updates.stepping.step_count import SEED_KEY, STEP_KEY

logger = logging.getLogger("hmpx")
_NARROWED = (
    "hmpx: %s: optimizer state that is to be FP32 is in BF16: a load or a line of the program has put it there, and "
    "this run has other bits from here on. A load casts it where it comes before `hmpx.attach()` or `hmpx.convert()` "
    "and outside of `with hmpx.disable_casts():`. Where it was saved in BF16: save it with state_dtype float32"
)
_OF_OTHERS = (
    "hmpx: %s: optimizer state that is to be FP32 is in BF16: a plain step, a load or a line of the program has left "
    "it so. It goes on in FP32, from the rounded numbers. Masters, where there are any, begin as the BF16 weights"
)
Parameter = torch.nn.Parameter
Optimizer = torch.optim.Optimizer


class WeightUpdates:
    """Runs the steps of one optimizer in FP32, and writes BF16 parameters back as `settings` say.

    This object holds no reference to the optimizer.
    """

    def __init__(self, settings: Settings, names: dict[Parameter, str] | None = None) -> None:
        self.settings, self.names = settings, names or {}
        self.stores = Stores()
        self.kept_steps = 0  # how many steps have used the plan of the step before
        # A backward pass that failed left gradients of these parameters waiting. The next step uses, then drops them.
        self.waited: list[Parameter] = []
        self._parameters = BF16Parameters(settings, self.names)
        self._number, self._numbered = [0], list[Parameter]()  # of the next step, and the parameters that have it
        self._kept: Plan | Standing | None = None
        self._misses = 0  # how many steps of an unknown class in a row have used no plan
        self._stepped: list[int] | None = None  # ids of the parameters of the last new plan
        self._open: _OpenStep | None = None
        # With released gradients, a step is taken in parts. Each part has a plan; the key is the ids of its parameters.
        self._parts: dict[tuple[int, ...], Plan] = {}  # plans of the step before that this step has not used yet
        self._taken: dict[tuple[int, ...], Plan] = {}  # plans that the open step has used
        self._members: tuple | None = None  # the result of `membership` when a step was last opened

    def __getstate__(self) -> dict[str, Any]:
        plans: dict[str, Any] = {"_kept": None, "_stepped": None, "_parts": {}, "_taken": {}}  # which cannot be copied
        return {**vars(self), **plans, "_numbered": []}

    def step(self, call: StepCall, changed: Callable[[], object] = lambda: None) -> Any:
        """Run a step. If it raises, BF16 weights and gradients are as before, or the optimizer refuses to go on.

        changed: called first where the plan of the step before does not fit. See `mark_incomplete` for the refusal.
        """
        return self._guarded(self._step, call, changed)

    def _guarded(self, function: Callable, call: StepCall, *args: Any) -> Any:
        """Call ``function(call, signals, *args)``. It may defer signals and turn gradients off; this undoes both."""
        if torch.is_inference_mode_enabled():  # tensors made in it have no versions, and no plain step may write them
            with torch.inference_mode(False):
                return self._guarded(function, call, *args)
        signals, gradients = DeferredSignals(), torch.is_grad_enabled()

        def give_back() -> None:
            set_grad_enabled(gradients)
            signals.end()

        return giving_back(give_back, function, call, signals, *args)

    def _step(self, call: StepCall, signals: DeferredSignals, changed: Callable[[], object]) -> Any:
        """Run the plan of the step before, or a new one; return what the optimizer's step returns."""
        optimizer, result, left, is_kept = call.optimizer, None, None, False
        known, has_arguments = is_known(optimizer, call.method), bool(call.args or call.kwargs)
        found = None if has_arguments else self._fitting(optimizer, known)
        if found is None:
            changed()
        write_back = self._write_back(call, signals)
        key = write_back.rounding_key
        try:
            if has_arguments:
                if call.closure is not None and known:  # a known class calls it before anything else
                    with torch.enable_grad():
                        result = call.closure()
                    if self.settings.release_gradients:
                        finish(parameters(optimizer))
                call = call._replace(args=(), kwargs={}) if known else call  # the closure was called
                found = self._fitting(optimizer, known)
            if self._open is not None:
                self._open.check(optimizer)
            plan, self._kept = self._kept, None
            signals.begin()
            set_grad_enabled(False)
            if plan is not None and found is not None:
                self.kept_steps += known
                left, is_kept = plan.run(call, write_back, found), plan.free_copies()
                if is_kept and not known:
                    self.kept_steps, self._misses = self.kept_steps + 1, 0
            elif self._open is None or any([p.grad is not None for p in parameters(optimizer)]):
                if isinstance(plan, Standing):
                    plan.refuse_lookups(optimizer)
                plan, is_usual = self._new_plan(optimizer, write_back, known)
                left = plan.run(call, write_back)
                plan = self._to_keep(plan, optimizer, known) if is_usual else None
                is_kept = plan is not None
            self._kept = plan if is_kept else None
            if not _skipped(optimizer):
                self._number[0] = (key.step + (not step_count.is_trial())) % 2**64
                step_count.keep(optimizer, **{STEP_KEY: self._number[0], SEED_KEY: key.seed})
            write_back.written.clear()
        except BaseException as error:
            mark_incomplete(optimizer, write_back, error)
            raise
        if found is None:
            self._tell_parameters(optimizer)
            if others := self.stores.own():
                logger.warning(_OTHERS_MASTERS, others, type(optimizer).__name__)
        for p in self.waited:
            p.grad = None
        if self._open is not None:
            self._open, self._parts, self._taken = None, self._taken, {}
        return result if known else left

    def _fitting(self, optimizer: Optimizer, known: bool) -> Gradients | None:
        """Return the gradients of this step, if the plan of the step before fits it."""
        plan = self._kept
        if plan is None or self._open is not None or isinstance(plan, Standing) is known:
            return None
        return plan.fits(optimizer)

    def _new_plan(self, optimizer: Optimizer, write_back: WriteBack, known: bool) -> tuple[Plan, bool]:
        """Return a plan of all parameters that have gradients, and whether it is worth while to keep it."""
        params = [p for p in parameters(optimizer) if p.grad is not None]
        before, self._stepped = self._stepped, list(map(id, params))
        members = self.members(optimizer, write_back.rounding_key)
        formula = formula_used(optimizer, self.settings.fused) if known else None
        plan = Plan(optimizer, members, params, write_back, formula, is_known=known)
        return plan, not known or (self._open is None and before in (None, self._stepped))

    def _to_keep(self, plan: Plan, optimizer: Optimizer, known: bool) -> Plan | Standing | None:
        """Return the plan of the next step."""
        if known:
            return plan if plan.keep(optimizer) else None
        # To make a plan that is never used takes as long as a step: made at misses 1, 2, 4 ... 64, then at each 64th
        self._misses += 1
        if self._misses & (self._misses - 1) and self._misses % 64:
            return None
        return standing_or_none(optimizer, plan.segments, self.stores)

    def _tell_parameters(self, optimizer: Optimizer) -> None:
        """Let the parameters follow the number of the next step, unless they do."""
        params = every_parameter(optimizer)
        are_same = len(params) == len(self._numbered) and all(map(is_, params, self._numbered))
        if not are_same or (params and not step_count.follows(params[0], self._number)):
            self._numbered = params
            step_count.follow(params, self._number)

    def step_part(self, call: StepCall, params: list[Parameter]) -> None:
        """Step some parameters, as a part of the next step."""
        self._guarded(self._part_of_step, call, params)

    def _part_of_step(self, call: StepCall, signals: DeferredSignals, params: list[Parameter]) -> None:
        signals.begin()
        if self._open is None:
            self._open = _OpenStep(self._write_back(call, signals), set(), _options(call.optimizer))
            before, self._members = self._members, membership(call.optimizer)
            if before != self._members:
                self._parts.clear()
        write_back, key = self._open.write_back, tuple(map(id, params))
        part = self._parts.pop(key, None)
        try:
            set_grad_enabled(False)
            found = None if part is None else part.fits(call.optimizer)
            if part is None or found is None:
                formula = formula_used(call.optimizer, self.settings.fused)
                if self._open.members is None:
                    self._open.members = self.members(call.optimizer, write_back.rounding_key)
                part = Plan(call.optimizer, self._open.members, params, write_back, formula, is_part=True)
                part.run(call, write_back)
                is_kept = part.keep(call.optimizer)
            else:
                part.run(call, write_back, found)
                is_kept = part.free_copies()
            self._open.stepped.update(key)
            if is_kept:
                self._taken[key] = part
        except BaseException as error:
            mark_incomplete(call.optimizer, write_back, error)
            raise

    def have_stepped(self, params: list[Parameter]) -> bool:
        """Return whether all of these parameters have taken the step that is open."""
        return self._open is not None and self._open.stepped.issuperset(map(id, params))

    def members(self, optimizer: Optimizer, key: RoundingKey) -> Members:
        """Look at every parameter, and bring all state to the form in which the settings hold it."""
        refuse_graphs(optimizer)
        has_stepped = bool(step_count.stored(optimizer).get(STEP_KEY))
        if has_stepped and self.settings.fused is None and formula_used(optimizer, None) is not None:
            _tell_of_before(optimizer)
        segments = self.segments(optimizer)
        expect_kernels(sum(each.count for each in segments if each.param.is_cpu and each.param.requires_grad))
        made_here = {torch.bfloat16} if has_stepped else set()  # the dtype to which steps before have rounded all state
        refuse_foreign_state(optimizer, [each for each in segments if each.way.state_dtype not in made_here])
        if not is_known(optimizer):
            find_weights_of(optimizer, segments)
        if adopt_states(optimizer, segments, key):
            logger.warning(_NARROWED if has_stepped else _OF_OTHERS, type(optimizer).__name__)
        return Members(optimizer, segments)

    @property
    def is_open(self) -> bool:
        """Whether parameters have begun to take the next step in parts."""
        return self._open is not None

    def segments(self, optimizer: Optimizer) -> list[Segment]:
        """Return a segment for each BF16 parameter: all of it, with its name."""
        return self._parameters.segments(optimizer)

    def rounding_key(self, optimizer: Optimizer, seed: int | None = None) -> RoundingKey:
        """Return the key of the next step. The region's seed outranks the settings' seed, then the stored one.

        The first step of an optimizer with a given seed is 0.
        """
        known = step_count.stored(optimizer)
        step_count.check([known])
        given = seed if seed is not None else self.settings.seed
        step = known.get(STEP_KEY)
        if step is None:
            step = step_count.first_of(every_parameter(optimizer)) if given is None else 0
        return RoundingKey(known.get(SEED_KEY, 0) if given is None else given, step)

    def _write_back(self, call: StepCall, signals: DeferredSignals) -> WriteBack:
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing() and self.segments(call.optimizer):
            raise HmpxError(
                "a step of BF16 parameters cannot be a part of a CUDA graph: the host hands over the step number, on "
                "which the random numbers depend, so every replay would round alike; capture forward and backward "
                "(torch.cuda.make_graphed_callables), and call optimizer.step() outside of the graph"
            )
        key = self.rounding_key(call.optimizer, call.seed)
        return WriteBack(self.stores, key, signals, [], torch.is_grad_enabled())

    def set_masters(self, optimizer: Optimizer, masters: Mapping[Parameter, torch.Tensor]) -> dict[str, int]:
        """Take over FP32 masters from a checkpoint. Return how many were dropped, for each reason."""
        self.look_again()
        dropped: Counter[str] = Counter()
        for segment in self._parameters.every(optimizer):
            given, weights = masters.get(segment.param), segment.way.weights
            if given is None:
                continue
            if not WAYS[weights].has_masters:
                dropped[f"weights={weights!r} holds none"] += 1
            elif given.dtype is torch.bfloat16:
                dropped["the load cast them to BF16; attach before it"] += 1
            else:
                self.stores.of(segment).take_masters(given)
        return dropped

    @torch.no_grad()
    def hand_over(self, optimizer: Optimizer, heirs: Mapping[Parameter, Parameter | None]) -> None:
        """Give the names and masters of parameters that left to their heirs. Warn of each that had masters.

        Another parameter in the place of one that left is no heir if it has a name of its own.
        """
        departed = [self._parameters.last(optimizer, p) for p in heirs]
        present = {each.param: each for each in self._parameters.every(optimizer)} if heirs else {}
        for gone in departed:
            p, heir = gone.param, heirs[gone.param]
            known = None if heir is None else self.names.get(heir, self._parameters.seen.get(heir))
            heir = heir if known in (None, gone.name) else None
            self._parameters.seen.pop(p, None)
            if heir is not None and p in self.names:
                self.names[heir] = self.names.pop(p)
                present[heir] = self._parameters.last(optimizer, heir)
            if not any(self.stores.beside([p])):
                continue
            said = "its masters wait in case that it comes back"
            if heir is not None and heir.dtype is torch.bfloat16:
                fit = self.stores.hand_over(gone, present[heir])
                said = f"the one in its place takes over {fit} of {gone.count} masters, and begins as BF16 elsewhere"
            name = repr(gone.name) if gone.name else f"of shape {tuple(gone.param.shape)}"
            logger.warning(
                "hmpx: parameter %s, which has FP32 masters, has left %s: %s", name, type(optimizer).__name__, said
            )

    def cast_state_along(self, optimizer: Optimizer, p: Parameter) -> None:
        """Cast the state of `p`, which is no longer BF16, to the dtype that plain steps want."""
        way = next((each.way for each in self._parameters.every(optimizer) if each.param is p), USUAL)
        state_dtypes.cast_along(optimizer, p, way.state_dtype)

    def look_again(self) -> None:
        """Forget everything kept from the last step, tensors included: a load is about to replace them."""
        self._kept = None
        self._parts.clear()
        self._taken.clear()
        self._parameters.forget()

    def abandon(self) -> None:
        """Forget the open step, which parameters have begun to take in parts."""
        self._open = None


_OTHERS_MASTERS = (
    "hmpx: the masters of %d parameters are in another optimizer, or went with it: %s starts from the BF16 weights. "
    "To keep what is below BF16's precision, go on with the same optimizer, or load the state_dict of the other, with "
    "use_master_weights_in_ckpt=True for both; with weights='stochastic' there is nothing to keep"
)


@dataclass
class _OpenStep:
    """A step that parameters take in parts, as their gradients come (`release_gradients`).

    Attributes:
        stepped: ids of the parameters that have taken the step.
        options: those of each group when the first of them took it.
        members: the optimizer's members; None until a part needs a new plan.
    """

    write_back: WriteBack
    stepped: set[int]
    options: list[dict[str, Any]]
    members: Members | None = None

    def check(self, optimizer: Optimizer) -> None:
        """Check, in `step`, that options are those that the parameters have stepped by.

        Raises:
            HmpxError: one has changed since.
        """
        for i, (then, now) in enumerate(zip(self.options, _options(optimizer), strict=False)):
            for key in {**then, **now}:
                was, now_is = ("not there" if key not in of else repr(of[key]) for of in (then, now))
                if was != now_is:
                    raise HmpxError(
                        f"{type(optimizer).__name__}: {key!r} of param_groups[{i}] was {was} in backward(), where "
                        f"parameters have stepped by it (release_gradients=True), and is {now_is} in step(): set "
                        "options before backward(), or take release_gradients=False"
                    )


def _options(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the values of the options of each group, of tensors the numbers that they hold now.

    Whoever steps released gradients reads no other keys than those that it has defaults for.
    """

    def value_of(option: Any) -> Any:
        if isinstance(option, torch.Tensor):
            return option.tolist()
        return tuple(map(value_of, option)) if isinstance(option, (tuple, list)) else option

    known = optimizer.defaults
    return [{key: value_of(each) for key, each in group.items() if key in known} for group in optimizer.param_groups]


def _tell_of_before(optimizer: Optimizer) -> None:
    """After a load of an earlier version's checkpoint, warn that steps of this version have other last bits."""
    if step_count.is_of_before(optimizer):
        logger.warning(
            "hmpx: %s: the checkpoint is of hmpx 0.2 or before, whose steps were the optimizer's own; from here on "
            "they are in the arithmetic of hmpx's kernels, with other last bits of FP32: fused=False, of hmpx.attach "
            "or in the recipe, goes on with the bits of before",
            type(optimizer).__name__,
        )


def _skipped(optimizer: Optimizer) -> bool:
    """Return whether a GradScaler found an inf or a NaN, and has told a fused optimizer to leave its weights alone."""
    found = getattr(optimizer, "found_inf", None) if is_scaled(optimizer) else None
    return isinstance(found, torch.Tensor) and bool(found.item())
