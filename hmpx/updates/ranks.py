"""What ranks of one job do together: compare facts, and exchange FP32 gradients under DistributedDataParallel (DDP).

**Facts** that must be equal on all ranks are compared through the job's key-value store, the one in which
`torch.distributed.init_process_group` met. It needs no collective, device or process group, so a rank may read it at
any time and no other rank has to answer. Two things are written to it:

- when an optimizer is attached, the facts of the first rank; every other rank compares itself with them, and all wait
  until they agree;
- seed and number of the 1st, 2nd, 4th, 8th ... step after that, compared likewise, which finds a rank that alone has
  loaded a checkpoint.

**Gradients.** DDP copies gradients into buckets of the parameter's dtype, BF16. A hook moves each gradient into an FP32
tensor before DDP reads it. A communication hook reduces these tensors in FP32, and writes the mean into `p.grad` when
backward is done. NxD's `use_fp32_grad_acc` and Megatron's `accumulate_allreduce_grads_in_fp32` do the same in their own
engines.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from hmpx.base.changes import Attribute, Changes
from hmpx.base.compiling import never_compile
from hmpx.base.torch_private import FP32_SUMS, JOINS, graph_task, private
from hmpx.errors import HmpxError
from hmpx.updates.stepping.names import parameters

_PATIENCE = timedelta(minutes=5)  # with which ranks wait for each other; less where the job's own timeout is less

_compared: Counter[tuple] = Counter()  # how often each set of ranks has compared in this store
_met: weakref.ref | None = None  # the process group that it belongs to
_TOLD = "_hmpx_told"  # on an error that the other ranks know of


def in_job() -> bool:
    """Return whether this process is a rank, perhaps the only one."""
    return dist.is_available() and dist.is_initialized()


def several_ranks() -> bool:
    return in_job() and dist.get_world_size() > 1


def _store() -> dist.Store:
    global _met
    if _met is None or _met() is not dist.group.WORLD:
        _met = weakref.ref(dist.group.WORLD)
        _compared.clear()
    return private("torch.distributed.distributed_c10d._get_default_store")()


def compare(what: str, facts: dict[str, Any], group: dist.ProcessGroup | None = None) -> None:
    """Raise on every rank of `group` (None: all) if `facts`, which must be JSON, differ on one, or one has refused.

    Every rank of the group calls this as often as the first, or raises in `raising_everywhere`. It waits for the rest.
    """
    ranks = _together(group)
    if ranks:
        store, key = _store(), _next_key(ranks)
        with _telling(what, lambda: key, ranks):
            store.set(_here(key, dist.get_rank()), "")
            _compare_with_first(store, key, what, facts, ranks)
            if store.add(f"{key}/agreed", 1) == len(ranks):
                store.set(f"{key}/end", "")
            _wait(store, key, "/end", what, ranks)
            if message := store.get(f"{key}/end").decode():
                raise _told(message)


@contextlib.contextmanager
def raising_everywhere(what: str, group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Return a context around `compare`: if an error leaves it on one rank, the others raise at once, too.

    Those that are past the last comparison in it raise at their next one, which may be that of a step.
    """
    ranks = _together(group)
    with _telling(what, lambda: _next_key(ranks), ranks) if ranks else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def _telling(what: str, key_of: Callable[[], str], ranks: tuple[int, ...]) -> Iterator[None]:
    """End the comparison of a key on all ranks with an error that leaves this context, unless they know of it."""
    try:
        yield
    except BaseException as error:
        if _TOLD not in vars(error):
            is_ours, here = isinstance(error, HmpxError), f"on rank {dist.get_rank()}: "
            said = f"was refused {here}" if is_ours else f"failed {here}{type(error).__name__}: "
            with contextlib.suppress(RuntimeError):  # the rank that holds the store may be gone
                store, key = _store(), key_of()
                store.add(f"{key}/agreed", -len(ranks))  # so that no rank that comes late finds all agreed
                store.set(f"{key}/end", f"{what} {said}{error}")
                if dist.get_rank() == ranks[0]:
                    store.set(key, json.dumps(None))
        vars(error)[_TOLD] = True
        raise


def _told(message: str) -> HmpxError:
    error = HmpxError(message)
    vars(error)[_TOLD] = True
    return error


def _together(group: dist.ProcessGroup | None) -> tuple[int, ...]:
    """Return the ranks of a group that this one belongs to; none if there is no other one."""
    ranks = tuple(dist.get_process_group_ranks(group or dist.group.WORLD)) if several_ranks() else ()
    return ranks if len(ranks) > 1 and dist.get_rank() in ranks else ()


def _next_key(ranks: tuple[int, ...]) -> str:
    _compared[ranks] += 1
    return f"hmpx/compare/{','.join(map(str, ranks))}/{_compared[ranks]}"


def _here(key: str, rank: int) -> str:
    return f"{key}/rank {rank}"


def _wait(store: dist.Store, key: str, part: str, what: str, ranks: tuple[int, ...]) -> None:
    patience = min(_PATIENCE, getattr(store, "timeout", _PATIENCE))
    pause, end = 0.001, time.monotonic() + patience.total_seconds()
    with contextlib.suppress(RuntimeError):  # torch's DistStoreError is one: the store is gone
        while not store.check([key + part]) and time.monotonic() < end:
            time.sleep(pause)  # in `store.wait`, Python would not hear of Ctrl-C
            pause = min(2 * pause, 0.1)
        if store.check([key + part]):
            return
    raise HmpxError(
        f"{what}: {_absent(store, key, ranks)} did not get there within {patience.total_seconds():.0f} s, and has "
        "ended or waits elsewhere; if only some ranks hold this optimizer, give process_group="
    )


def _absent(store: dist.Store, key: str, ranks: tuple[int, ...]) -> str:
    try:
        absent = [rank for rank in ranks if not store.check([_here(key, rank)])]
    except RuntimeError:
        return "the rank that holds the store of the job"
    return f"rank{'s' * (len(absent) > 1)} {', '.join(map(str, absent))}" if absent else "another rank"


def _compare_with_first(store: dist.Store, key: str, what: str, facts: dict[str, Any], ranks: tuple[int, ...]) -> None:
    if dist.get_rank() == ranks[0]:
        store.set(key, json.dumps(facts))
        return
    _wait(store, key, "", what, ranks)
    theirs = json.loads(store.get(key))
    if theirs is None:  # it has refused, and says so at the end
        return
    ours = json.loads(json.dumps(facts))
    difference = next(_differences(ours, theirs), None)
    if difference is not None:
        message = f"{what}: rank {dist.get_rank()} differs from rank {ranks[0]}: {difference}"
        if "parameter" in difference and "dtype" not in difference:
            message += "; ranks that hold other parameters, as stages of a pipeline do, each want a process_group="
        store.set(f"{key}/end", message)
        raise _told(message)


def _differences(ours: Any, theirs: Any, at: str = "") -> Iterator[str]:
    """Yield each difference in words, in the order of the facts."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key in [*ours, *(key for key in theirs if key not in ours)]:
            yield from _differences(ours.get(key), theirs.get(key), f"{at}'s {key}" if at else key)
    elif ours != theirs:
        yield f"{at} is {ours!r}, not {theirs!r}"


Tensor = torch.Tensor
Parameter = torch.nn.Parameter

_exchanges: WeakKeyDictionary[DistributedDataParallel, _Exchange] = WeakKeyDictionary()
_ours: set[Parameter] = set()  # whose gradients accumulate in FP32, in whatever module
_aside: dict[Tensor, Tensor] = {}  # their gradients, while p.grad is zeros
_backward: int | None = None  # the pass that they come from
_zeros: dict[torch.device, Tensor] = {}


def reducers() -> list[DistributedDataParallel]:
    """Return the DistributedDataParallel modules of this process."""
    if not in_job():
        return []
    modules = [m for m in gc.get_objects() if issubclass(type(m), torch.nn.Module)]  # in C: there are millions
    modules = [m for m in modules if isinstance(m, DistributedDataParallel)]
    return [m for m in modules if hasattr(m, "module")]  # its constructor may be running


def replicas() -> dict[Parameter, DistributedDataParallel]:
    """Return the parameters whose gradients a DistributedDataParallel module reduces, each with that module."""
    return {p: module for module in reducers() for p in module.parameters()}


def watch_wrapping(changes: Changes, wrapped: Callable[[DistributedDataParallel], None]) -> None:
    """Call `wrapped` before the first forward of each module that is made from now on, until `changes` are undone."""

    def registered(ddp: torch.nn.Module, name: str, _: torch.nn.Module) -> None:
        if name == "module" and isinstance(ddp, DistributedDataParallel):  # its constructor takes the model

            def first(ddp: DistributedDataParallel, _: object) -> None:
                wrapped(ddp)
                handle.remove()

            handle = ddp.register_forward_pre_hook(first)  # by then, the user's communication hook is there

    changes.callback(register_module_module_registration_hook(registered).remove)


def watch_joins(changes: Changes, settings_of: Callable[[Iterable[torch.nn.Parameter]], Any]) -> None:
    """Refuse every `Join` of parameters that an attached optimizer steps, until `changes` are undone."""
    if not (dist.is_available() and JOINS.is_on()):
        return
    from torch.distributed.algorithms.join import Join

    def is_attached(joinable: Any) -> bool:
        is_optimizer = isinstance(joinable, torch.optim.Optimizer)
        return settings_of(parameters(joinable) if is_optimizer else joinable.parameters()) is not None

    def entering(join: Any) -> Any:
        if join._enable and any(map(is_attached, join._joinables)):
            raise HmpxError(
                "torch.distributed.algorithms.Join: ranks with fewer batches step less often than others, and the "
                "rounding of an attached optimizer depends on the number of the step: give every rank as many batches "
                "(drop_last=True of the sampler), or detach the optimizer"
            )
        return enter(join)

    enter = Join.__enter__
    entry = Attribute(Join, "__enter__", "torch.distributed.algorithms.Join.__enter__")
    changes.put(entry, functools.wraps(enter)(entering))


def hook_when_complete(p: Parameter, hook: Callable[[Parameter], None]) -> RemovableHandle:
    """Call `hook` after each accumulation of a gradient, also for a parameter that is frozen now.

    Dynamo would compile it where a compiled function calls `backward()`.
    """
    requires_grad = p.requires_grad
    try:
        return p.requires_grad_(True).register_post_accumulate_grad_hook(never_compile(hook))
    finally:
        p.requires_grad_(requires_grad)


def exchange_in_fp32(p: Parameter, undo: contextlib.ExitStack) -> None:
    """Keep the gradient of `p` in FP32 for whichever module reduces it in a backward pass, until `undo`."""
    FP32_SUMS.require()
    _ours.add(p)
    undo.callback(_ours.discard, p)
    undo.callback(_aside.pop, p, None)  # a backward pass that failed may have left it
    undo.callback(hook_when_complete(p, _set_aside).remove)


def exchange_of(modules: Iterable[DistributedDataParallel]) -> None:
    """Make modules reduce in FP32 if they hold a parameter of `exchange_in_fp32`.

    Raises:
        HmpxError: one has another communication hook.
    """
    for ddp in modules:
        if ddp not in _exchanges and not _ours.isdisjoint(ddp.parameters()):
            _exchanges[ddp] = _Exchange(ddp)


class _Exchange:
    """The FP32 gradients of one DDP module, from the end of their accumulation to the end of backward.

    Meanwhile `p.grad` is zeros, which DDP copies into its BF16 bucket; the communication hook does not use them. Where
    several modules hold one parameter, as after a model was wrapped again, the one whose forward ran calls its hook.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._group, self._params = ddp.process_group, set(ddp.parameters())
        for p in self._params:  # the zeros of a pass are in one buffer, which may not grow while they are in use
            _zeros_like(p)
        self._begun: int | None = None  # the backward pass
        self._hook = lambda _, bucket: self._reduce(bucket)
        try:
            ddp.register_comm_hook(None, self._hook)
        except RuntimeError as error:
            raise HmpxError(
                "use_fp32_grad_acc exchanges gradients in a communication hook of DistributedDataParallel, and this "
                f"module has another one already ({error})",
                key=("use_fp32_grad_acc",),
            ) from None
        ddp.register_forward_pre_hook(lambda *_: self._before_forward())

    def _before_forward(self) -> None:
        for p in self._params & _aside.keys():  # a backward pass that failed may have left some
            del _aside[p]

    def begin(self, p: Parameter) -> None:
        """Handle the first gradient of a backward pass, also of an inner one (reentrant checkpoints)."""
        if p in self._params and self._begun != _backward:
            self._begun = _backward
            for q in self._params & _ours:
                if q.grad is not None:  # DDP reads earlier gradients, too, of parameters that this pass does not use
                    _take(q)
                    q.grad = _zeros_like(q)

    @never_compile
    def _reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        if _ours.isdisjoint(self._params):  # torch cannot remove a communication hook: this does what its reducer does
            mean = bucket.buffer().mul_(1 / self._group.size())
            return (
                dist.all_reduce(mean, group=self._group, async_op=True).get_future().then(lambda done: done.value()[0])
            )
        params, buffer = bucket.parameters(), bucket.buffer()
        counts = [p.numel() for p in params]
        flat = torch.zeros(sum(counts), dtype=torch.promote_types(buffer.dtype, torch.float32), device=buffer.device)
        means = [part.view(p.shape) for p, part in zip(params, flat.split(counts), strict=True)]
        ours, theirs = [], []
        for p, mean, in_bucket in zip(params, means, bucket.gradients(), strict=True):
            if p not in _ours:
                mean.copy_(in_bucket)
                theirs.append((in_bucket, mean))
                continue
            gradient = _aside.pop(p, None)
            if gradient is None and p.grad is not None and p.grad.dtype is torch.float32:
                gradient = p.grad  # restored by the backward pass of a checkpoint inside this one
            ours.append((p, mean, gradient is not None))
            if gradient is not None:
                mean.copy_(gradient)
        work = dist.all_reduce(flat.div_(self._group.size()), group=self._group, async_op=True)

        def finish() -> None:
            work.wait()
            for p, mean, is_here in ours:
                # DDP sets it, in BF16, where another rank has used the parameter; another module may have reduced it.
                if is_here or (p.grad is not None and p.grad.dtype is not torch.float32):
                    p.grad = mean

        def fill(_: torch.futures.Future) -> Tensor:
            for in_bucket, mean in theirs:
                in_bucket.copy_(mean)
            return buffer

        _when_backward_is_done(finish)
        return work.get_future().then(fill)


def _set_aside(p: Parameter) -> None:
    """Take the gradient before DDP reads it; a post-accumulate hook."""
    global _backward
    if _backward != (now := graph_task()):
        _backward = now
        _when_backward_is_done(_put_back)
    _take(p)  # first: it may have been added to the zeros, which others have as well
    p.grad = _zeros_like(p)
    for exchange in list(_exchanges.values()):
        exchange.begin(p)


def _take(p: Parameter) -> None:
    gradient = p.grad
    if gradient is None:
        return
    zeros = gradient.data_ptr() == _zeros_like(p).data_ptr()  # a second use in this pass has added to them
    if p in _aside:
        _aside[p] += gradient
    else:
        _aside[p] = gradient.float()
    if zeros:
        gradient.zero_()


def _put_back() -> None:
    """Restore the gradients that no DDP has read: it was told not to synchronise, or the model ran without it."""
    while _aside:
        p, gradient = _aside.popitem()
        p.grad = gradient


def _when_backward_is_done(work: Callable[[], None]) -> None:
    """Queue `work` after DDP's own callback, which writes the buckets into the gradients."""
    queue = private("torch.autograd.Variable._execution_engine.queue_callback")
    queue(functools.partial(queue, never_compile(work)))


def _zeros_like(p: Parameter) -> Tensor:
    """Return zeros of the size and strides of `p`, in a buffer that all parameters of a device share."""
    size = 1 + sum((n - 1) * stride for n, stride in zip(p.shape, p.stride(), strict=True)) if p.numel() else 0
    if p.device not in _zeros or _zeros[p.device].numel() < size:
        _zeros[p.device] = torch.zeros(size, dtype=torch.bfloat16, device=p.device)
    return _zeros[p.device].as_strided(p.size(), p.stride())
