"""The attachment of one optimizer: everything that `attach` installs on it, and how it is taken off."""

from __future__ import annotations

import contextlib
import functools
import logging
import weakref
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from hmpx.base.changes import Attribute, take_back
from hmpx.base.compiling import never_compile
from hmpx.base.process_state import new_lock
from hmpx.base.raw import MISSING
from hmpx.base.tensors import dtype_name
from hmpx.base.torch_private import private
from hmpx.errors import HmpxError
from hmpx.updates import step_hooks
from hmpx.updates.checkpoints import Checkpoints
from hmpx.updates.gradients import Claim
from hmpx.updates.holding.sharding import is_sharded, widened
from hmpx.updates.holding.state_dtypes import release_state
from hmpx.updates.holding.stores import Settings
from hmpx.updates.optimizer_hooks import attach_copy, replaced_methods, watch_step, widen_hyperparameters
from hmpx.updates.stepping import released, step_count
from hmpx.updates.stepping.names import ATTRIBUTE, named, own_attachment, parameters
from hmpx.updates.stepping.step import WeightUpdates
from hmpx.updates.stepping.step_call import StepCall
from hmpx.updates.stepping.step_count import SEED_KEY

Parameter = torch.nn.Parameter
Optimizer = torch.optim.Optimizer
logger = logging.getLogger("hmpx")
_QUEUE = private("torch.autograd.Variable._execution_engine.queue_callback")
_lock = new_lock()  # while parameters take a part of a step
_DOCTOR = "`python -m hmpx doctor train.py` finds the updates that are lost"
_GONE = {"updates": _DOCTOR, "watched": _DOCTOR, "places": "DTensors know where they stand"}
_GONE["kept_steps"] = "measure a step with `python examples/bench step`"


class Attachment:
    """What `attach` did to one optimizer: the handle that it returns.

    Attributes:
        settings: the arguments of `attach` that say how weights are updated.
        names: the names of parameters that `attach` was given, by parameter.
        methods: the names of its methods that rewrite weights, as `attach` was given them.
        are_whole: whether the names were given one by one, as those of the whole model.
        optimizer: the optimizer, or for a `ZeroRedundancyOptimizer` the one inside it; None if it is gone.
        active: whether the optimizer is still attached by this handle.

    `detach()` makes the optimizer a plain torch one again, as `hmpx.detach` does.

    Example:
        >>> optimizer = torch.optim.SGD(torch.nn.Linear(4, 4).bfloat16().parameters(), lr=0.1)
        >>> handle = hmpx.attach(optimizer, "split")
        >>> print(handle)
        <hmpx.Attachment of SGD: weights='split'>
        >>> handle.settings.weights, handle.optimizer is optimizer
        ('split', True)
        >>> handle.detach()
        >>> handle.active
        False
    """

    def __init__(
        self,
        optimizer: Optimizer,
        settings: Settings,
        names: dict[Parameter, str],
        group: Any = None,
        *,
        methods: tuple[str, ...] = (),
        are_whole: bool = False,
    ) -> None:
        self.settings, self.methods, self.are_whole = settings, methods, are_whole
        self._counts = step_hooks.StepCounts(group)
        self._optimizer = weakref.ref(optimizer)  # the optimizer holds this object, and a cycle would keep both alive
        self._updates = WeightUpdates(settings, names)
        self.names = self._updates.names
        self._undo = contextlib.ExitStack()  # puts parameters and hooks back
        # Parameters hold this callback and may outlive the optimizer, so it must not hold the attachment.
        release = functools.partial(_call_if_alive, weakref.WeakMethod(self._release))
        self._claim = Claim(settings, release if settings.release_gradients else None)
        self._seen: tuple[list[int], list[torch.dtype]] = ([], [])
        self._waiting = released.Waiting()
        self._dtypes: dict[Parameter, torch.dtype] = {}  # of the parameters, in the last `sync_parameters`
        self._states = id(optimizer.state)  # in the last `sync_parameters`
        self._places: dict[Parameter, tuple[int, int]] = {}  # then too: the index of its group, and its index there

    @property
    def optimizer(self) -> Optimizer | None:
        """The optimizer; None if it is gone."""
        return self._optimizer()

    @property
    def active(self) -> bool:
        """Whether the optimizer is still attached by this handle."""
        return self.optimizer is not None and own_attachment(self.optimizer) is self

    def detach(self) -> None:
        """See `hmpx.detach`."""
        if self.active:
            self.detach_from(self._alive)

    if not TYPE_CHECKING:  # a type checker that sees `__getattr__` accepts every name

        def __getattr__(self, name: str) -> NoReturn:
            gone = f"Attachment.{name} is gone: {_GONE[name]}" if name in _GONE else f"Attachment has no {name!r}"
            raise AttributeError(gone)

    def abandon(self) -> None:
        """Undo `install` after it has failed. Unlike `detach`, this does not cast state to the parameters' dtype."""
        optimizer = self._alive
        self._put_back()
        step_count.remove(optimizer)
        if self._counted:
            step_count.keep(optimizer, **self._counted)
        self._leave()

    def detach_from(self, optimizer: Optimizer) -> None:
        """Detach, and make `optimizer` a plain one: it is this handle's optimizer, or a copy with its attributes."""
        self.cast_state_along()
        self._put_back()
        release_state(optimizer)
        step_count.remove(optimizer)
        self._leave()

    @property
    def _alive(self) -> Optimizer:
        """The optimizer, for methods that nobody calls after it is gone."""
        optimizer = self._optimizer()
        assert optimizer is not None, "the optimizer is gone"
        return optimizer

    def __repr__(self) -> str:
        changed = [f"{k}={v!r}" for k, v in vars(self.settings).items() if v != getattr(Settings, k) or k == "weights"]
        state = f"of {type(self.optimizer).__name__}" if self.active else "detached"
        return f"<hmpx.Attachment {state}: {', '.join(changed)}>"

    def masters_of(self, p: Parameter) -> torch.Tensor | None:
        """Return the FP32 masters of a parameter; None if it has none."""
        segments = (each for each in self._updates.segments(self._alive) if each.param is p)
        return next(map(self._updates.stores.masters, segments), None)

    def facts(self, outer: Optimizer) -> dict[str, Any]:
        """Return the facts that must be equal on every rank. `outer` is the optimizer that has all parameters."""
        rounding_key = self._updates.rounding_key(self._alive)
        stated = {**vars(self.settings), "methods": self.methods}
        settings = {key: str(value) for key, value in stated.items()}
        params = {
            f"parameter {i}": {"name": name, "dtype": str(p.dtype), "shape": list(p.shape)}
            for i, (name, p) in enumerate(named(outer, self.names))
        }
        counts = {"seed": rounding_key.seed, "step": rounding_key.step, "number of parameters": len(params)}
        return {**settings, **counts, **params}

    def install(self, outer: Optimizer | None = None) -> None:
        """Attach the optimizer. `outer`: the one that the user has, if it is a wrapper around this one."""
        self._outer = weakref.ref(outer or self._alive)
        optimizer = self._alive
        methods, own = replaced_methods(optimizer, self._optimizer, self.methods), vars(optimizer)
        self._counted = step_count.stored(optimizer)
        self._added = {name: (method, own.get(name, MISSING)) for name, method in methods.items()}
        step_hooks.install(optimizer)
        self._gone = weakref.finalize(optimizer, self._undo.close)  # restores the parameters
        own.update({ATTRIBUTE: self, **methods})
        try:
            self.watch_step()
            self._checkpoints = Checkpoints(self._updates)
            self._checkpoints.register(self._alive, self._undo)
            if outer is not None and outer is not self.optimizer:
                self._checkpoints.watch_loads(outer, self._undo)
            self._undo.callback(self._claim.end)
            self._undo.callback(_end, self._dtypes, self._waiting.taken)  # runs first: no claim can cast a `Released`
            self.sync_parameters()
            if self.settings.seed is not None:
                step_count.keep(self._alive, **{SEED_KEY: self.settings.seed})
            self._checkpoints.take(self._alive)
            widen_hyperparameters(optimizer, *optimizer.param_groups)
        except BaseException:  # for instance, there is no memory for masters
            self.abandon()
            raise

    def watch_step(self) -> None:
        """Watch a `step` that somebody has put on the optimizer itself."""
        watch_step(self._alive, self._optimizer, self._added)

    def _put_back(self) -> None:
        """Undo `install`. After an interrupt in the middle, a second call does all of it again."""
        self._updates.look_again()
        self._waiting.end_wait(self._updates.have_stepped)
        _end(self._dtypes, self._waiting.taken)
        self._claim.end()
        self._undo.close()
        for name, (ours, before) in self._added.items():  # a `Changes` would keep the optimizer alive
            take_back(Attribute(self.optimizer, name, f"{type(self.optimizer).__name__}.{name}"), ours, before)

    def _leave(self) -> None:
        """End the attachment. This comes last: until then, `detach` can be called again after an interrupt."""
        step_hooks.detached(self._alive)
        self._gone.detach()
        vars(self.optimizer).pop(ATTRIBUTE, None)

    def sync_parameters(self) -> None:
        """Look at the optimizer's parameters: since the last look, some may have come, left or been cast."""
        params, states = parameters(self._outer() or self._alive), self._states
        self._states = id(self._alive.state)
        if self._seen == (seen := ([*map(id, params)], [p.dtype for p in params])):
            return
        self._seen = seen
        now = dict.fromkeys(params)
        were_narrow = torch.bfloat16 in self._dtypes.values()
        gone = [p for p in self._dtypes if p not in now]
        self._hand_over(gone, is_swapped=self._states != states)
        for p in gone:
            del self._dtypes[p]
        self._claim.drop(gone)
        released.finish(gone)
        self._waiting.taken.difference_update(map(id, gone))
        new = [p for p in now if p not in self._dtypes]
        wide = [p for p in new if p.dtype is torch.float32]
        if wide and torch.bfloat16 in self._dtypes.values():
            logger.warning(
                "hmpx: %d float32 parameters have joined %s, whose others are BF16: they get plain steps; "
                "to treat them alike, cast them to BF16 before add_param_group",
                len(wide),
                type(self._alive).__name__,
            )
        cast = [p for p, dtype in self._dtypes.items() if p.dtype is not dtype]
        self.cast_state_along()
        for p in new + cast:
            if p.dtype is not torch.bfloat16:
                self._updates.stores.drop(p)
        self._dtypes.update((p, p.dtype) for p in new + cast)
        self._claim.add(new)
        self._claim.update(cast)
        if were_narrow and params and torch.bfloat16 not in self._dtypes.values():
            name, to = type(self._alive).__name__, dtype_name(params[0].dtype)
            said = (
                "hmpx: the parameters of %s were bfloat16 when it was attached, and are %s: its steps are plain ones%s"
            )
            logger.warning(said, name, to, widened() if is_sharded(params[0]) else "")

    def _hand_over(self, gone: list[Parameter], *, is_swapped: bool) -> None:
        """Give the name and the masters of each parameter that left to the new one in its place, if there is one.

        is_swapped: whether they left with all of the optimizer's state. They come back then, so nobody takes over:
            `torch.optim.swap_in_optimizer_params_and_state` shows others for a while.
        """
        before, groups = self._places, self._alive.param_groups
        self._places = {p: (i, j) for i, group in enumerate(groups) for j, p in enumerate(group["params"])}
        heirs = {place: p for p, place in self._places.items() if p not in before and not is_swapped}
        self._updates.hand_over(self._alive, {p: heirs.get(before[p]) for p in gone if p in before})

    def cast_state_along(self) -> None:
        """Cast the state of parameters that are no longer BF16: it is about to be saved, or used in plain steps."""
        for p, dtype in self._dtypes.items():
            if dtype is torch.bfloat16 and p.dtype is not dtype:
                self._updates.cast_state_along(self._alive, p)

    def before_load(self, optimizer: Optimizer) -> None:
        """Prepare for `optimizer.load_state_dict`, which is about to run."""
        if optimizer is self.optimizer:  # a copy has this attachment among its attributes, and is not prepared
            self._updates.look_again()
            self._checkpoints.hook_last(optimizer)

    def after_load(self, optimizer: Optimizer) -> None:
        """After `optimizer.load_state_dict`, drop a step that is open: the state that it changed was replaced."""
        self._states = id(optimizer.state)
        if optimizer is self.optimizer and self.is_open:
            self._waiting.forget()
            released.finish(self._dtypes)
            self._updates.abandon()

    def step(self, call: StepCall) -> Any:
        """Run a step of the optimizer as the settings say."""
        if call.optimizer is not self.optimizer:  # a copy, which has this attachment among its attributes
            return attach_copy(call.optimizer, self).step(call)
        self._updates.waited = self._waiting.end_wait(self._updates.have_stepped) if self.is_open else []
        if self.is_open:  # some have stepped in a backward that failed
            released.finish(self._dtypes)
        self._counts.compare(call.optimizer, self._updates, call.seed)
        try:
            return self._updates.step(call, self.sync_parameters)
        finally:  # the step may be complete and still raise: from a signal that has waited for its end
            if not self._updates.is_open:
                self._waiting.taken.clear()

    @property
    def is_open(self) -> bool:
        """Whether a step is open: parameters take it in backward, and no `optimizer.step()` has ended it yet."""
        return bool(self._waiting.taken)

    def refuse_open(self, what: str) -> None:
        """Raise an HmpxError if a step is open: no checkpoint can hold half a step."""
        if self.is_open:
            raise HmpxError(
                f"{type(self._alive).__name__}: {what}: some parameters have taken the next step in backward, and "
                "others not (release_gradients), so no checkpoint can hold this: save it after optimizer.step(). After "
                "a backward that failed, load the last checkpoint"
            )

    def _release(self, p: Parameter) -> None:
        if id(p) in self._waiting.taken:
            raise HmpxError(
                "release_gradients: a second gradient before optimizer.step(). Each parameter has stepped in backward, "
                "so gradients cannot accumulate over several; after a backward that failed, call optimizer.step() too"
            )
        released.refuse_scaled(self._alive)
        with _lock:  # autograd has a thread for each device
            if not self.is_open:
                self.sync_parameters()
            if self._waiting.add(p, self._alive):
                self._step_waiting()
            if self._waiting.is_first():
                at_end = functools.partial(_call_if_alive, weakref.WeakMethod(self._step_waiting))
                _QUEUE(at_end)

    def _step_waiting(self) -> None:
        """Step the parameters that wait, and free their gradients. If a step raises, its parameters get them back."""
        with _lock:
            for where in self._waiting.ready():
                try:
                    step_hooks.step_part(self._alive, self._updates, self._waiting.show(where))
                finally:
                    self._waiting.end_wait(self._updates.have_stepped, where)


def _end(params: dict[Parameter, torch.dtype], taken: set[int]) -> None:
    if taken:
        logger.warning(
            "hmpx: %d parameters have stepped in a backward() that no optimizer.step() followed "
            "(release_gradients=True): their weights have moved all the same",
            len(taken),
        )
    released.finish(params)
    taken.clear()


@never_compile
def _call_if_alive(reference: weakref.WeakMethod, *args: Parameter) -> None:
    method = reference()
    if method is not None:
        method(*args)
