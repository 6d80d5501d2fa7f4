"""Decides how the gradients of a parameter are held: accumulated in FP32, or released as soon as they are complete.

Each attached optimizer makes a claim on its parameters. Of several claims on one parameter, the last one decides. When
a claim ends, the one before it is in force again, in whatever order they end. When the last one ends, the parameter is
as it was. The garbage collector may end a claim, at any time.

Parameters are kept by `id`, and kept alive: `torch.utils.swap_tensors` refuses tensors with weak references.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from hmpx.base.changes import Attribute, Changes
from hmpx.base.process_state import over_forks
from hmpx.base.torch_private import FSDP_SUMS, SWAPPED
from hmpx.errors import HmpxError
from hmpx.updates.holding.sharding import is_sharded, shards_of
from hmpx.updates.holding.stores import Settings
from hmpx.updates.ranks import exchange_in_fp32, exchange_of, hook_when_complete, in_job, reducers

Parameter = torch.nn.Parameter

_lock = over_forks(threading.Lock())
_claimed: dict[int, _ClaimedParameter] = {}
_ended: deque[tuple[Claim, Parameter]] = deque()
_summed: set[Parameter] = set()  # sharded ones whose gradients accumulate in FP32
_fsdp_changes = Changes()  # of FSDPModule, while there are some


class Claim:
    """How one attached optimizer wants gradients to be held, and what acts beside its steps.

    With `use_fp32_grad_acc`, gradients accumulate in FP32, as long as their parameter is BF16.

    Args:
        release: called with each parameter whose gradient is complete.
    """

    def __init__(self, settings: Settings, release: Callable[[Parameter], None] | None) -> None:
        self.settings, self.release = settings, release
        self.params: dict[int, Parameter] = {}

    def add(self, params: list[Parameter]) -> None:
        """Claim these parameters; the new claim is in force."""
        modules = reducers() if params and (self.settings.use_fp32_grad_acc or self.release is not None) else []
        with _lock:
            for p in params:
                if id(p) not in self.params:
                    self.params[id(p)] = p
                    entry = _claimed.setdefault(id(p), _ClaimedParameter(p))
                    entry.claims.append(self)
                    entry.update()
            _reduce_by(modules)
        _remove_ended()

    def update(self, params: Iterable[Parameter]) -> None:
        """Update the claims after these parameters were cast to another dtype."""
        with _lock:
            for p in params:
                _claimed[id(p)].update()
        _remove_ended()

    def drop(self, params: Iterable[Parameter]) -> None:
        """End the claim to these parameters."""
        _ended.extend((self, p) for p in params)
        _remove_ended()

    def end(self) -> None:
        """End the claim to every parameter."""
        self.drop(list(self.params.values()))


class _ClaimedParameter:
    """One parameter, the claims on it, the latest last, and the one that is in force."""

    def __init__(self, param: Parameter) -> None:
        self.param = param
        self.claims: list[Claim] = []
        self._fp32, self._release = contextlib.ExitStack(), contextlib.ExitStack()
        self._reduced = False  # whether a DDP module has reduced the gradients
        self._dtype_before: tuple[torch.dtype | None, torch.dtype] | None = None  # of gradients, of the weights
        self._widened: tuple[bool, bool] = (False, False)  # whether gradients are FP32; whether DDP reduces them so
        self._released = False

    def update(self) -> None:
        """Put the latest claim into force. If it is in force already, change nothing."""
        last = self.claims[-1] if self.claims else None
        # An FP32 parameter is prepared too: it may be cast to BF16 later.
        of_fp32 = self.param.dtype is torch.float32 and not in_job()
        is_asked = last is not None and last.settings.use_fp32_grad_acc
        wanted = is_asked and (self.param.dtype is torch.bfloat16 or of_fp32)
        if self._widened != (now := (wanted, wanted and self._reduced)):
            self._narrow()
            self._widened = now
            if wanted:
                self._dtype_before = self.param.grad_dtype, self.param.dtype
                _accumulate_in_fp32(self.param, self._reduced, self._fp32)
        released = last is not None and last.release is not None
        if released is not self._released:
            self._release.close()
            self._released = released
            if released:
                self._release.callback(hook_when_complete(self.param, self._complete).remove)

    def _narrow(self) -> None:
        """Undo `_accumulate_in_fp32`, as often as it is asked for: an interrupt may have come in the middle."""
        self._fp32.close()
        if self._dtype_before is not None:
            before, of_weights = self._dtype_before
            _set_grad_dtype(self.param, self.param.dtype if before is of_weights else before)
            self._dtype_before = None

    def reduce(self) -> None:
        """A DDP module reduces the gradients from here on.

        Raises:
            HmpxError: they are released before it can.
        """
        if self._released:
            raise HmpxError(
                "release_gradients steps each parameter before DistributedDataParallel has reduced its gradient: "
                "attach with release_gradients=False, or use a recipe that leaves it out, such as bf16-sr",
                key=("release_gradients",),
            )
        self._reduced = True
        self.update()

    def _complete(self, p: Parameter) -> None:
        if self.claims and self.claims[-1].release is not None:
            self.claims[-1].release(p)

    def install_again(self) -> None:
        """After `swap_tensors`: `grad_dtype` went with the old contents, and torch does not call the hooks any more."""
        self._narrow()
        self._release.close()
        self._widened, self._released = (False, False), False
        # They stay with the object; assigning them installs them.
        hooks = self.param._post_accumulate_grad_hooks if SWAPPED.is_on() else None
        if hooks is not None:
            self.param._post_accumulate_grad_hooks = hooks
        self.update()


def wrapped(module: DistributedDataParallel) -> None:
    """A new module is going to reduce gradients.

    Raises:
        HmpxError: gradients of its parameters are released, or it has a communication hook where they are FP32.
    """
    with _lock:
        _reduce_by([module])
    _remove_ended()


def _reduce_by(modules: list[DistributedDataParallel]) -> None:
    for entry in [_claimed[id(p)] for module in modules for p in module.parameters() if id(p) in _claimed]:
        entry.reduce()
    exchange_of(modules)


def settings_of(params: Iterable[Parameter]) -> Settings | None:
    """Return the settings of an attached optimizer that has one of these parameters; None if there is none."""
    found = (claim.settings for p in params if id(p) in _claimed for claim in _claimed[id(p)].claims[-1:])
    return next(found, None)


def are_of_claimed(gradients: Iterable[torch.Tensor]) -> bool:
    """Return whether one of these is the gradient of a parameter that an attached optimizer has."""
    if torch.compiler.is_compiling():  # which knows no identities
        return bool(_claimed)
    given = set(map(id, gradients))
    return any(id(entry.param.grad) in given for entry in tuple(_claimed.values()))


def swapped(*tensors: torch.Tensor) -> None:
    """Install hooks again after `torch.utils.swap_tensors` has exchanged the contents of these parameters."""
    with _lock:
        for entry in [_claimed[id(t)] for t in tensors if id(t) in _claimed]:
            entry.install_again()
    _remove_ended()


def _remove_ended() -> None:
    """Remove ended claims. If another call holds the lock, that call does it."""
    while _ended and _lock.acquire(blocking=False):
        try:
            while _ended:
                claim, p = _ended[0]  # it stays there until it is done, where an interrupt comes
                entry = _claimed.get(id(p))
                claim.params.pop(id(p), None)
                if entry is not None:
                    entry.claims[:] = [each for each in entry.claims if each is not claim]
                    entry.update()
                    if not entry.claims:
                        _claimed.pop(id(p), None)
                _ended.popleft()
        finally:
            _lock.release()


def _accumulate_in_fp32(p: Parameter, reduced: bool, undo: contextlib.ExitStack) -> None:
    """Make the gradients of `p` FP32 while it is BF16, until `undo` makes them BF16 again.

    A parameter that no module reduces gets torch's ``grad_dtype``. DDP refuses that, and reduces as `ranks.py` says.
    FSDP2 sets the gradient of a sharded parameter: a hook casts it to FP32 as soon as it is set, and sums in BF16 are
    refused.
    """
    sharded = is_sharded(p)
    _set_grad_dtype(p, None if reduced or sharded else torch.float32)
    _widen(p)  # torch adds the next gradient to the one that is there
    if reduced:
        exchange_in_fp32(p, undo)
    elif sharded:
        undo.callback(hook_when_complete(p, _widen).remove)
        _sum_in_fp32(p, undo)


def _sum_in_fp32(p: Parameter, undo: contextlib.ExitStack) -> None:
    """Refuse sums of the gradient of `p` in BF16, until `undo`.

    Between two reductions FSDP2 keeps the sum of whole gradients: in ``MixedPrecisionPolicy(reduce_dtype=...)``, or
    else in the dtype of the weights. A sum in BF16 cannot be made FP32 afterwards.
    """
    module = sys.modules.get("torch.distributed.fsdp")
    if module is not None and not _summed and FSDP_SUMS.is_on():
        for name in ("set_requires_gradient_sync", "set_requires_all_reduce"):
            method = getattr(module.FSDPModule, name)
            _fsdp_changes.put(Attribute(module.FSDPModule, name, f"FSDPModule.{name}"), _refusing(method))
    _summed.add(p)
    undo.callback(_leave_fsdp, p)


def _leave_fsdp(p: Parameter) -> None:
    _summed.discard(p)
    if not _summed:
        _fsdp_changes.close()


def _refusing(method: Callable) -> Callable:
    @functools.wraps(method)
    def checked(module: Any, required: bool, *, recurse: bool = True) -> None:
        for each in module.modules() if recurse and not required else [module] * (not required):
            if isinstance(each, sys.modules["torch.distributed.fsdp"].FSDPModule) and _sums_low(each):
                raise HmpxError(
                    f"{method.__name__}(False) lets FSDP2 add up the gradients of micro-batches in bfloat16, and this "
                    f"model is attached with use_fp32_grad_acc: shard it with fully_shard(..., mp_policy="
                    "MixedPrecisionPolicy(reduce_dtype=torch.float32)), or let each micro-batch be reduced"
                )
        method(module, required, recurse=recurse)

    return checked


def _sums_low(module: Any) -> bool:
    """Return whether this module, without modules inside it, adds up gradients of `_summed` parameters in BF16."""
    held = shards_of(module)
    return any(each.sharded_param in _summed and each.mp_policy.reduce_dtype is not torch.float32 for each in held)


def _set_grad_dtype(p: Parameter, dtype: torch.dtype | None) -> None:
    """Set the dtype of every gradient that is assigned or accumulated; None keeps the one that it has."""
    grad, p.grad = p.grad, None
    p.grad_dtype = dtype
    p.grad = grad if grad is None or dtype is None else grad.to(dtype)


def _widen(p: Parameter) -> None:
    if p.grad is not None and p.grad.dtype is torch.bfloat16:
        p.grad = p.grad.float()
