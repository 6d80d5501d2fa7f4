"""Gradients of BF16 parameters that accumulate in FP32, over micro-batches and over ranks.

Three cases. A parameter that nobody reduces gets torch's ``grad_dtype``. The gradient of a sharded parameter (FSDP2) is
set by FSDP, and widened as soon as it is there. DistributedDataParallel copies gradients into BF16 buckets, and takes
no others: there each gradient is set aside in FP32 before DDP looks, its bucket is exchanged in FP32 by a communication
hook, and the mean is put back when backward is done. NxD's `use_fp32_grad_acc` and Megatron's
`accumulate_allreduce_grads_in_fp32` do the same in their own engines.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from hmpx.errors import HmpxError
from hmpx.updates.ranks.checks import in_job
from hmpx.updates.ranks.sharding import is_sharded

Tensor = torch.Tensor
Parameter = torch.nn.Parameter

_exchanges: WeakKeyDictionary[DistributedDataParallel, _Exchange] = WeakKeyDictionary()


def replicas() -> dict[Parameter, DistributedDataParallel]:
    """Parameters whose gradients a DistributedDataParallel module reduces, and that module."""
    if not in_job():
        return {}
    modules = [m for m in gc.get_objects() if issubclass(type(m), torch.nn.Module)]  # in C: there are millions
    modules = [m for m in modules if isinstance(m, DistributedDataParallel)]
    ready = [m for m in modules if "module" in vars(m).get("_modules", ())]  # its constructor may be running
    return {p: module for module in ready for p in module.parameters()}


def accumulate_in_fp32(p: Parameter, reduced: dict, refuse: Callable, undo: contextlib.ExitStack) -> None:
    """From here on the gradients of `p` are FP32 while it is BF16; `undo` makes them BF16 again.

    reduced: `replicas()`. refuse: of `refuse_ddp`, for a parameter that is none of them.
    """
    before = p.grad_dtype
    undo.callback(lambda own: _set_grad_dtype(p, p.dtype if own else before), before is p.dtype)
    if p in reduced:
        _set_grad_dtype(p, None)
        _exchange_of(reduced[p]).take_over(p, undo)
    elif is_sharded(p):
        _set_grad_dtype(p, None)
        undo.callback(hook_when_complete(p, _widen).remove)
    else:
        _set_grad_dtype(p, torch.float32)
        if in_job():
            undo.callback(hook_when_complete(p, refuse).remove)


def hook_when_complete(p: Parameter, hook: Callable[[Parameter], None]) -> RemovableHandle:
    """Call `hook` when a gradient is accumulated; on a frozen parameter, once it is not frozen any more."""
    requires_grad = p.requires_grad
    try:
        return p.requires_grad_(True).register_post_accumulate_grad_hook(hook)
    finally:
        p.requires_grad_(requires_grad)


def refuse_ddp(what: str) -> Callable[[Parameter], None]:
    """A hook on parameters that must not come under DistributedDataParallel later on; it looks once."""
    looked = False

    def refuse(p: Parameter) -> None:
        nonlocal looked
        if not looked and p in replicas():
            raise HmpxError(f"{what}: attach the optimizer after the model is in DistributedDataParallel, not before")
        looked = True

    return refuse


def _set_grad_dtype(p: Parameter, dtype: torch.dtype | None) -> None:
    """`dtype`: of every gradient that is assigned or accumulated; None leaves it as it comes."""
    grad, p.grad = p.grad, None
    p.grad_dtype = dtype
    p.grad = grad if grad is None or dtype is None else grad.to(dtype)


def _widen(p: Parameter) -> None:
    if p.grad.dtype is torch.bfloat16:
        p.grad = p.grad.float()


def end_unused_exchanges() -> None:
    """Let modules reduce gradients as torch does, none of which accumulates in FP32 any more."""
    for ddp, exchange in list(_exchanges.items()):
        exchange.end_if_unused(ddp)


def _exchange_of(ddp: DistributedDataParallel) -> _Exchange:
    if ddp not in _exchanges:
        _exchanges[ddp] = _Exchange(ddp)
    return _exchanges[ddp]


class _Exchange:
    """The FP32 gradients of one DDP module, from the end of a gradient's accumulation to the end of backward.

    In their place DDP finds zeros, which it copies into its bucket and which the communication hook leaves there.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._group = ddp.process_group
        self._aside: dict[Parameter, Tensor] = {}
        self._backward: int | None = None  # which one this is
        self._ours: set[Parameter] = set()
        self._hook = lambda _, bucket: self._reduce(bucket)
        try:
            ddp.register_comm_hook(None, self._hook)
        except RuntimeError as error:
            raise HmpxError(
                "use_fp32_grad_acc exchanges gradients in a communication hook of DistributedDataParallel, and this "
                f"module has another one already ({error})"
            ) from None
        self._handle = ddp.register_forward_pre_hook(lambda module, _: self._before_forward(module))

    def _before_forward(self, ddp: DistributedDataParallel) -> None:
        self._aside.clear()  # of a backward pass that failed
        self.end_if_unused(ddp)  # the last optimizer was collected as garbage, which may be at any time

    def end_if_unused(self, ddp: DistributedDataParallel) -> None:
        """Take the hooks away. A communication hook cannot be removed; DDP is given a reducer that has none."""
        if self._ours:
            return
        self._handle.remove()
        ddp._comm_hooks = [each for each in ddp._comm_hooks if each[0] is not self._hook]
        ddp._remove_autograd_hooks()
        params, sparse = ddp._build_params_for_reducer()
        ddp._ddp_init_helper(params, sparse, ddp._build_debug_param_to_name_mapping(params), ddp.static_graph)
        del _exchanges[ddp]

    def take_over(self, p: Parameter, undo: contextlib.ExitStack) -> None:
        self._ours.add(p)
        undo.callback(self._ours.discard, p)
        undo.callback(hook_when_complete(p, self._set_aside).remove)

    def _set_aside(self, p: Parameter) -> None:
        """A post-accumulate hook; DDP looks at the gradient after it."""
        if self._backward != torch._C._current_graph_task_id():
            self._begin()
        self._take(p)
        p.grad = _zeros_like(p)

    def _begin(self) -> None:
        """The first gradient of a backward pass, which may be one inside another: that of a reentrant checkpoint."""
        self._backward = torch._C._current_graph_task_id()
        _when_backward_is_done(self._put_back)
        for p in self._ours:  # DDP reads earlier gradients of parameters that this pass does not use, too
            self._take(p)
            p.grad = None

    def _take(self, p: Parameter) -> None:
        gradient = p.grad
        if gradient is None:
            return
        zeros = gradient.data_ptr() == _zeros_like(p).data_ptr()  # that a second use in this pass has added to
        if p in self._aside:
            self._aside[p] += gradient
        else:
            self._aside[p] = gradient.float()
        if zeros:
            gradient.zero_()

    def _reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        params, buffer = bucket.parameters(), bucket.buffer()
        counts = [p.numel() for p in params]
        flat = torch.zeros(sum(counts), dtype=torch.promote_types(buffer.dtype, torch.float32), device=buffer.device)
        means = [part.view(p.shape) for p, part in zip(params, flat.split(counts), strict=True)]
        ours, theirs = [], []
        for p, mean, in_bucket in zip(params, means, bucket.gradients(), strict=True):
            if p not in self._ours:
                mean.copy_(in_bucket)
                theirs.append((in_bucket, mean))
                continue
            gradient = self._aside.pop(p, None)
            if gradient is None and p.grad is not None and p.grad.dtype is torch.float32:
                gradient = p.grad  # put back by the backward pass of a checkpoint inside this one
            ours.append((p, mean, gradient is not None))
            if gradient is not None:
                mean.copy_(gradient)
        work = dist.all_reduce(flat.div_(self._group.size()), group=self._group, async_op=True)

        def finish() -> None:
            work.wait()
            for p, mean, is_here in ours:
                if is_here or p.grad is not None:  # DDP has set it: another rank has used the parameter
                    p.grad = mean

        def fill(_: torch.futures.Future) -> Tensor:
            for in_bucket, mean in theirs:
                in_bucket.copy_(mean)
            return buffer

        _when_backward_is_done(finish)
        return work.get_future().then(fill)

    def _put_back(self) -> None:
        """Gradients that DDP did not ask for: it was told not to synchronise."""
        while self._aside:
            p, gradient = self._aside.popitem()
            p.grad = gradient


def _when_backward_is_done(work: Callable[[], None]) -> None:
    """Queue `work` behind what DDP queues in this backward pass to write the buckets into the gradients."""
    queue = torch.autograd.Variable._execution_engine.queue_callback
    queue(functools.partial(queue, work))


def _zeros_like(p: Parameter) -> Tensor:
    """Zeros of the size and strides of `p` that take no memory of their own: they lie in a common buffer."""
    size = 1 + sum((n - 1) * stride for n, stride in zip(p.shape, p.stride(), strict=True)) if p.numel() else 0
    if p.device not in _zeros or _zeros[p.device].numel() < size:
        _zeros[p.device] = torch.zeros(size, dtype=torch.bfloat16, device=p.device)
    return _zeros[p.device].as_strided(p.size(), p.stride())


_zeros: dict[torch.device, Tensor] = {}
