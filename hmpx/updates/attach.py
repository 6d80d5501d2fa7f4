"""`attach` and `detach`: how one optimizer updates weights, set once, in force without any region."""

from __future__ import annotations

import contextlib
import functools
import logging
import weakref
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from hmpx import region_state
from hmpx.changes import MISSING, Attribute, take_back
from hmpx.errors import HmpxError
from hmpx.updates import optimizer_state, step_count, step_hooks
from hmpx.updates.checkpoints import Checkpoints
from hmpx.updates.fused_step import FUSED
from hmpx.updates.gradients import released
from hmpx.updates.gradients.accumulation import end_unused_exchanges, replicas
from hmpx.updates.gradients.claims import Claim
from hmpx.updates.names import given_names, named, parameters
from hmpx.updates.optimizer_methods import writing_methods
from hmpx.updates.optimizer_scope import SCOPES, scope_of
from hmpx.updates.ranks import zero
from hmpx.updates.ranks.checks import compare
from hmpx.updates.settings import Settings
from hmpx.updates.step import WeightUpdates, has_bf16
from hmpx.updates.step_count import SEED_KEY
from hmpx.updates.weights import Stochastic

logger = logging.getLogger("hmpx")
Parameter = torch.nn.Parameter
Optimizer = torch.optim.Optimizer
BF16 = torch.bfloat16


class Attachment:
    """What `attach` did to one optimizer: the handle that it returns.

    Attributes:
        settings: what `attach` was asked for.
    """

    def __init__(self, optimizer: Optimizer, settings: Settings, names: dict[Parameter, str]) -> None:
        self.settings = settings
        self._optimizer = weakref.ref(optimizer)  # which holds this: no cycle, so it dies when its user lets it go
        self._updates = WeightUpdates(settings, names)
        self._undo = contextlib.ExitStack()  # what puts parameters and hooks back
        # The attachment holds the optimizer while a step is open, and a parameter outlives it.
        release = (
            functools.partial(_call_if_alive, weakref.WeakMethod(self._release)) if settings.release_gradients else None
        )
        self._claim = Claim(fp32=settings.use_fp32_grad_acc, release=release)
        self._dtypes: dict[Parameter, torch.dtype] = {}

    @property
    def optimizer(self) -> Optimizer | None:
        """The optimizer; None if it is gone."""
        return self._optimizer()

    @property
    def active(self) -> bool:
        """Whether this is what the optimizer is attached by now."""
        return self.optimizer is not None and vars(self.optimizer).get(step_hooks.ATTRIBUTE) is self

    def detach(self) -> None:
        """See `hmpx.detach`."""
        if self.active:
            detach(self.optimizer)

    def __repr__(self) -> str:
        changed = [f"{k}={v!r}" for k, v in vars(self.settings).items() if v != getattr(Settings, k) or k == "weights"]
        state = f"of {type(self.optimizer).__name__}" if self.active else "detached"
        return f"<hmpx.Attachment {state}: {', '.join(changed)}>"

    def _must_agree(self, optimizer: Optimizer) -> dict[str, Any]:
        """What must be the same on every rank; `optimizer` is the one that knows all parameters."""
        rounding_key = self._updates.rounding_key(self.optimizer)
        own = {key: str(value) for key, value in vars(self.settings).items()}
        params = {
            f"parameter {i}": {"name": name, "dtype": str(p.dtype), "shape": list(p.shape)}
            for i, (name, p) in enumerate(named(optimizer, self._updates.names))
        }
        return {
            **own,
            "seed": rounding_key.seed,
            "step": rounding_key.step,
            "number of parameters": len(params),
            **params,
        }

    def _install(self, outer: Optimizer | None = None) -> None:
        """`outer`: the one that the user has, if this is the optimizer inside it."""
        self._outer = weakref.ref(outer or self.optimizer)
        step_hooks.install()
        self._gone = weakref.finalize(self.optimizer, _optimizer_is_gone, self._undo)
        methods = {"__reduce_ex__": functools.partial(_reduce, self._optimizer)}
        for name in writing_methods(type(self.optimizer)):
            methods[name] = functools.partial(_other_step, self._optimizer, name)
        own = vars(self.optimizer)
        self._added = {name: (method, own.get(name, MISSING)) for name, method in methods.items()}
        own.update({step_hooks.ATTRIBUTE: self, **methods})
        try:
            self._checkpoints = Checkpoints(self._updates)
            self._checkpoints.register(self.optimizer, self._undo)
            if outer not in (None, self.optimizer):
                zero.watch_loads(outer, self._checkpoints, self._undo)
            self._undo.callback(_end_claim, self._claim, self._dtypes)
            self.sync_parameters()
            if self.settings.seed is not None:
                step_count.keep(self.optimizer, **{SEED_KEY: self.settings.seed})
        except BaseException:
            self._remove()
            raise

    def _remove(self) -> None:
        self._gone.detach()
        self._undo.close()
        vars(self.optimizer).pop(step_hooks.ATTRIBUTE, None)
        for name, (ours, before) in self._added.items():  # no `Changes`, which would hold the optimizer
            take_back(Attribute(self.optimizer, name, f"{type(self.optimizer).__name__}.{name}"), ours, before)
        step_hooks.uninstall()

    def sync_parameters(self) -> None:
        """Follow what the optimizer holds by now: parameters that came, went, or were cast."""
        now = dict.fromkeys(parameters(self._outer() or self.optimizer))
        gone = [p for p in self._dtypes if p not in now]
        for p in gone:
            del self._dtypes[p]
        self._claim.drop(gone)
        released.finish(gone)
        new = [p for p in now if p not in self._dtypes]
        cast = [p for p, dtype in self._dtypes.items() if p.dtype is not dtype]
        for p in cast:
            if self._dtypes[p] is BF16:
                self._updates.drop(self.optimizer, p)
        self._dtypes.update((p, p.dtype) for p in new + cast)
        self._claim.add(new)
        self._claim.update(cast)

    def load_last(self, optimizer: Optimizer) -> None:
        """See `Checkpoints.load_last`."""
        if optimizer is self.optimizer:  # and no copy that took every attribute along
            self._checkpoints.load_last(optimizer)

    def step(self, optimizer: Optimizer, step: Any, args: tuple, kwargs: dict, seed: int | None) -> Any:
        """Run the optimizer's own `step` function as the settings say."""
        if optimizer is not self.optimizer:  # a copy that took every attribute along
            return _attach_copy(optimizer, self).step(optimizer, step, args, kwargs, seed)
        self.sync_parameters()
        result = self._updates.step(optimizer, step, args, kwargs, seed)
        released.finish(self._dtypes)
        return result

    def _release(self, p: Parameter) -> None:
        if released.is_released(p):
            raise HmpxError(
                "release_gradients: a second gradient before optimizer.step(). Each parameter has stepped in backward, "
                "so gradients cannot accumulate over several; after a backward that failed, call optimizer.step() too"
            )
        if not self._updates.is_open:
            self.sync_parameters()
        step_hooks.step_alone(self.optimizer, self._updates, p)
        released.release(p, self.optimizer)


def attach(
    optimizer: Optimizer,
    weights: str = "stochastic",
    *,
    model: torch.nn.Module | None = None,
    names: Iterable[str] | None = None,
    seed: int | None = None,
    state_dtype: torch.dtype = torch.float32,
    use_fp32_grad_acc: bool = False,
    use_master_weights_in_ckpt: bool = False,
    release_gradients: bool = False,
    fused: bool = False,
    process_group: dist.ProcessGroup | None = None,
) -> Attachment:
    """From here on, every step of `optimizer` computes in FP32 and holds BF16 parameters as `weights` says.

    Parameters of other dtypes get a plain step. Works with and without `hmpx.convert()`; the optimizer stays the same
    object and is used as before: LR schedulers, GradScaler, `state_dict`, `copy.deepcopy` and pickle included.

    Args:
        optimizer: any `torch.optim.Optimizer`.
        weights: "stochastic" (rounding; nothing beside the BF16 weights), "nearest", "master" (FP32 copies, 4 bytes a
            parameter more) or "split" (the same masters exactly, 2 bytes more).
        model, names: where names of parameters come from, if the optimizer was not given `named_parameters()`: the
            model, or one name for each parameter in the order of `param_groups`. The rounding numbers depend on them.
        seed: of the rounding numbers, in [0, 2^64). None: the one that `state_dict` carries, else 0.
        state_dtype: torch.bfloat16 holds the optimizer's state in BF16 too, rounded stochastically.
        use_fp32_grad_acc: gradients of BF16 parameters accumulate in FP32 (torch's `grad_dtype`, 2.13 or newer).
        use_master_weights_in_ckpt: `optimizer.state_dict()` holds the FP32 masters.
        release_gradients: each parameter steps, and frees its gradient, during backward; `optimizer.step()` then
            finishes the step. Same bits. Not for accumulation, gradient clipping or GradScaler, which raise.
        fused: Adam, AdamW and SGD run in one kernel of hmpx's own. Faster; the order of its operations is its own, so
            results agree with torch's to rounding and not to the bit.
        process_group: in a distributed job, the ranks that hold the same optimizer; all of them must attach. None: all
            ranks of the job.

    A `ZeroRedundancyOptimizer` is attached as any other. With use_fp32_grad_acc under DistributedDataParallel, attach
    once the model is in it.

    Returns:
        A handle with `detach()`. Attaching again with the same settings returns it again.

    Raises:
        HmpxError: something does not fit, or differs from the first rank's; the optimizer is as it was.
    """
    if not isinstance(optimizer, Optimizer):
        raise HmpxError(f"attach needs a torch.optim.Optimizer, not {type(optimizer).__name__}")
    settings = Settings(
        weights, seed, state_dtype, use_fp32_grad_acc, use_master_weights_in_ckpt, release_gradients, fused
    )
    given = given_names(optimizer, model, names)
    target = zero.inner(optimizer) or optimizer
    before = attached(optimizer)
    if before is not None:
        if before.settings == settings and given in ({}, before._updates.names):
            return before
        raise HmpxError(f"{before!r} is in force; hmpx.detach(optimizer) first")
    _check(target, settings)
    if not has_bf16(optimizer):
        logger.warning("hmpx: %s has no BF16 parameters, so its steps are plain ones", type(optimizer).__name__)
    attachment = Attachment(target, settings, given)
    compare(f"hmpx.attach({type(target).__name__})", attachment._must_agree(optimizer), process_group)
    attachment._install(optimizer)
    attachment._updates.take_masters(target)
    return attachment


def attached(optimizer: Optimizer) -> Attachment | None:
    """What `attach` did to this optimizer, or to the one inside it."""
    return vars(zero.inner(optimizer) or optimizer).get(step_hooks.ATTRIBUTE)


def detach(optimizer: Optimizer) -> None:
    """Make an attached optimizer, or one that has stepped in regions, a plain torch one again; else nothing happens.

    Its state goes to the dtype of each parameter, as torch's own `load_state_dict` does, and masters are dropped: save
    `state_dict()` before if you want them back.
    """
    if not isinstance(optimizer, Optimizer):
        raise HmpxError(f"detach needs a torch.optim.Optimizer, not {type(optimizer).__name__}")
    optimizer, attachment = zero.inner(optimizer) or optimizer, attached(optimizer)
    if attachment is not None:
        attachment._remove()
        end_unused_exchanges()
        attachment._updates.release_state(optimizer)
        step_count.remove(optimizer)
    elif step_hooks.allow_plain_steps(optimizer):
        optimizer_state.cast_state(optimizer, BF16)


def _other_step(reference: weakref.ref, name: str, *args: Any, **kwargs: Any) -> Any:
    optimizer = reference()
    method = getattr(type(optimizer), name)
    if not has_bf16(optimizer):  # inside a step of its own
        return method(optimizer, *args, **kwargs)
    with region_state.region(casting=False):
        return vars(optimizer)[step_hooks.ATTRIBUTE].step(optimizer, method, args, kwargs, None)


def _check(optimizer: Optimizer, settings: Settings) -> None:
    if not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        raise HmpxError(
            f"{type(optimizer).__name__} never ran Optimizer.__init__, so its step cannot be seen; "
            "attach the optimizer that it holds"
        )
    WeightUpdates(settings).segments(optimizer)  # raises where a parameter cannot be taken
    if settings.release_gradients and scope_of(optimizer) == "whole":
        listed = ", ".join(cls.__name__ for cls in SCOPES)
        raise HmpxError(
            f"release_gradients needs an optimizer that updates each parameter by itself ({listed}), "
            f"and {type(optimizer).__name__} may look across them"
        )
    if settings.release_gradients and any(p in replicas() for p in parameters(optimizer)[:1]):
        raise HmpxError("release_gradients steps before DistributedDataParallel has reduced the gradients")
    if settings.fused and type(optimizer) not in FUSED:
        listed = ", ".join(cls.__name__ for cls in FUSED)
        raise HmpxError(f"fused has kernels for {listed}, not for {type(optimizer).__name__}")
    if settings.fused and settings.weights != "stochastic":
        raise HmpxError(f"fused goes with weights='stochastic', not with {settings.weights!r}")
    if settings.use_fp32_grad_acc and not hasattr(torch.Tensor, "grad_dtype"):
        raise HmpxError(f"use_fp32_grad_acc needs torch 2.13 or newer (Tensor.grad_dtype), not {torch.__version__}")


def _call_if_alive(reference: weakref.WeakMethod, p: Parameter) -> None:
    method = reference()
    if method is not None:
        method(p)


def _end_claim(claim: Claim, dtypes: dict[Parameter, torch.dtype]) -> None:
    claim.end()
    released.finish(dtypes)


def _optimizer_is_gone(undo: contextlib.ExitStack) -> None:
    """The optimizer is gone: its parameters are as they were."""
    undo.close()
    step_hooks.uninstall_later()


def _attach_copy(optimizer: Optimizer, original: Attachment) -> Attachment:
    for name in (step_hooks.ATTRIBUTE, *original._added):
        vars(optimizer).pop(name, None)
    attachment = Attachment(optimizer, original.settings, original._updates.names)
    attachment._install()
    return attachment


def _reduce(reference: weakref.ref, protocol: int) -> tuple:
    """Copies and pickles of an attached optimizer are attached; torch keeps state, groups and defaults alone."""
    optimizer = reference()
    attached = vars(optimizer)[step_hooks.ATTRIBUTE]
    updates = attached._updates
    if step_count.stored(optimizer):
        step_count.keep(optimizer)
    added = {step_hooks.ATTRIBUTE, *attached._added}
    state = {key: value for key, value in optimizer.__getstate__().items() if key not in added}
    return _rebuild, (type(optimizer), state, attached.settings, updates.names, updates.store)


def _rebuild(cls: type, state: dict, settings: Settings, names: dict, store: Stochastic) -> Optimizer:
    optimizer = cls.__new__(cls)
    optimizer.__setstate__(state)
    step_count.forget(optimizer)
    attachment = Attachment(optimizer, settings, names)
    attachment._updates.store = store
    attachment._install()
    return optimizer
