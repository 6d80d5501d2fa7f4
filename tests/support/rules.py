"""What a program can do: each rule does it to the model under hmpx and to the FP32 copies.

A rule draws its arguments with `random`, as numbers that mean something wherever it stands. It raises `NotNow`, before
it changes anything, where it does not fit.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import pickle
import random
import signal
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import optim
from torch.utils._python_dispatch import TorchDispatchMode

import hmpx
from hmpx.updates.stepping.released import Released
from tests.support.models import BF16, FP32, SharpnessAware, laid_out, make, random_attach, random_spec, values
from tests.support.oracle import Entry, Stopped, TorchRefuses
from tests.support.state_codes import PREFIXES, widened
from tests.support.world import FOREIGN, Different, World, same_bits

Tensor = torch.Tensor
RULES: dict[str, tuple[Callable, float, dict[str, Callable]]] = {}  # by name: what it does, how often, its arguments

NEED_CLOSURE = (optim.LBFGS, SharpnessAware)


class NotNow(Exception):
    """The action does not fit here."""


def number(draw: random.Random) -> int:
    return draw.randrange(1000)


def one_of(*choices: Any) -> Callable:
    return lambda draw: draw.choice(choices)


def rule(often: float = 1, **arguments: Callable) -> Callable:
    """Register a rule; each argument is drawn by its function."""

    def register(act: Callable) -> Callable:
        RULES[act.__name__] = act, often, arguments
        return act

    return register


def need(condition: Any) -> None:
    if not condition:
        raise NotNow


def some(entries: list[Entry], which: int) -> list[Entry]:
    """A part of `entries`, most of them."""
    draw = random.Random(which)
    return [entry for entry in entries if draw.random() < 0.85]


def pick(choices: list, which: int) -> Any:
    need(choices)
    return choices[which % len(choices)]


def followed(w: World) -> list[Entry]:
    """Parameters whose gradients are known: one that was taken out keeps FP32 until that is noticed.

    An older attachment that releases gradients steps it in backward again.
    """
    releases = any(settings.get("release_gradients") for _, settings in w.older)
    return w.held if releases or any_in_fp32(w) else w.entries


def any_in_fp32(w: World) -> bool:
    """Whether an attachment, or an older one of the same parameters, accumulates gradients in FP32."""
    return any(settings.get("use_fp32_grad_acc") for settings in (w.settings, *(of for _, of in w.older)))


def is_expanded(w: World, entry: Entry) -> bool:
    grad = w[entry.name].grad
    return grad is not None and grad.layout is torch.strided and 0 in grad.stride() and grad.numel() > 1


def is_even(entry: Entry) -> bool:
    """Whether torch's fused kernels compute it to the same bits in every layout: see `models.EVEN_SHAPES`."""
    return entry.q.numel() % 16 == 0


def gradient(entry: Entry, seed: int) -> Tensor:
    return values(tuple(entry.q.shape), 7919 * seed + int(entry.name[1:]))


def ready(w: World) -> None:
    """Nothing but the rest of a step may come after a part of one."""
    need(not w.released)


# Gradients


@rule(6, seed=number, which=number, fails=one_of(False, False, False, False, True))
def backward(w: World, seed: int, which: int, fails: bool = False) -> None:
    """Accumulate gradients; with release_gradients, step. One that fails does so when it has come to half of them."""
    need(w.cls is not optim.SparseAdam)
    entries = [entry for entry in some(followed(w), which) if w[entry.name].requires_grad]
    release = w.attached and w.settings.get("release_gradients")
    if release:
        held = w.held
        entries = [entry for entry in entries if entry in held and entry.name not in w.released]
    need(entries and not any(is_expanded(w, entry) for entry in entries))
    grads = {entry: gradient(entry, seed) for entry in entries}
    complete: list[Entry] = []

    def total(entries: list[Entry], loss: Tensor) -> Tensor:
        for entry in entries:
            product = w[entry.name] * grads[entry].to(w[entry.name].dtype)
            product.register_hook(lambda _, entry=entry: complete.append(entry))
            loss = loss + product.sum()
        return loss

    later = entries[len(entries) // 2 :] if fails else []  # autograd comes to them last
    hidden = total(later, torch.zeros((), requires_grad=True) * 1)
    if fails:
        hidden.register_hook(run_out)
    stopped = None
    try:
        total([entry for entry in entries if entry not in later], hidden).backward()
    except Exception as error:  # of `run_out`, or of a step that torch refuses too
        stopped = error.with_traceback(None)  # which would keep the graph
    for i, entry in enumerate(complete, 1):
        g = grads[entry].to(entry.grad_dtype)
        entry.grad = g if entry.grad is None else entry.grad + g
        if release:
            w.let_wait(entry, i == len(entries))
    if stopped is not None and not (fails and isinstance(stopped, torch.OutOfMemoryError)):
        raise stopped


@rule(
    2, seed=number, which=number, layout=one_of(None, "contiguous", "transposed", "sliced", "channels_last", "expanded")
)
def set_gradients(w: World, seed: int, which: int, layout: str | None) -> None:
    """Assign gradients by hand, in layouts of their own."""
    entries = some(followed(w), which)
    need(entries and (layout is None or w.takes_any_gradient))
    fused = w.setup.options.get("fused")
    for entry in entries:
        # torch's fused kernels take no other, and its plain ones compute expanded gradients to other bits
        layout = None if entry.weight is None and (fused or layout == "expanded") else layout
        g = gradient(entry, seed)
        if w.cls is optim.SparseAdam:
            g = torch.where((torch.arange(g.shape[0]) % 3 == seed % 3)[:, None], g, 0).to_sparse(1).coalesce()
        else:
            g = torch.empty_like(entry.q).copy_(g) if layout is None else laid_out(g, layout)
            g = torch.empty_like(w[entry.name], dtype=FP32).copy_(g) if layout is None else g
        narrow = g.to(entry.grad_dtype) if layout != "expanded" else laid_out(g.to(entry.grad_dtype), layout)
        w.set_grad(entry, narrow)


@rule(2, to_none=one_of(True, True, False))
def zero_grad(w: World, to_none: bool) -> None:
    entries = [entry for entry in w.held if entry.grad is not None]
    need(to_none or not any(entry.grad.is_sparse or is_expanded(w, entry) for entry in entries))
    if any(type(w[entry.name].grad) is Released for entry in w.held):
        try:
            w.optimizer.zero_grad(set_to_none=to_none)
        except hmpx.HmpxError:
            return
        raise Different("zero_grad drops gradients that are in the weights")
    w.optimizer.zero_grad(set_to_none=to_none)
    for entry in entries:
        entry.grad = None if to_none else torch.zeros_like(entry.grad)


@rule(1, factor=one_of(0.5, 0.3, 4.0), which=number)
def scale_gradients(w: World, factor: float, which: int) -> None:
    """Clipping, and unscaling by hand."""
    entries = [entry for entry in some(w.entries, which) if entry.grad is not None and not entry.grad.is_sparse]
    need(entries and not any(is_expanded(w, entry) for entry in entries))
    for entry in entries:
        w[entry.name].grad.mul_(factor)
        entry.grad = entry.grad * factor


# Steps


def closures(w: World, seed: int, clear: bool, fails: int = 0) -> tuple[Callable, Callable]:
    """The same closure for both sides, as models have it; call number `fails` raises."""
    entries = [entry for entry in w.held if w[entry.name].requires_grad]
    calls = {"ours": 0, "theirs": 0}

    def evaluate(side: str, seen: Callable, old: Callable, put: Callable) -> Tensor:
        calls[side] += 1
        if calls[side] == fails:
            raise Stopped
        loss = torch.zeros((), dtype=torch.float64, device="cpu")
        for entry in entries:
            x = seen(entry).detach()
            g = (gradient(entry, seed) + x.float() * 0.5).to(entry.grad_dtype)
            put(entry, g if clear or old(entry) is None else old(entry) + g)
            loss += x.double().contiguous().flatten().square().sum()
        return loss

    def ours() -> Tensor:
        if clear:
            w.optimizer.zero_grad()
        return evaluate(
            "ours",
            lambda entry: w[entry.name],
            lambda entry: w[entry.name].grad,
            lambda entry, g: setattr(w[entry.name], "grad", torch.empty_like(w[entry.name], dtype=g.dtype).copy_(g)),
        )

    def theirs(points: dict[Entry, Tensor]) -> Tensor:
        for entry in w.held if clear else ():
            entry.grad = None
        return evaluate("theirs", points.get, lambda entry: entry.grad, lambda entry, g: setattr(entry, "grad", g))

    return ours, theirs


def takes_step(w: World, seed: int | None = None, in_region: bool = False, pair: tuple | None = None) -> None:
    """One step on both sides, which must come to the same loss."""
    ours, theirs = pair or (None, None)
    region = in_region or not w.attached
    w.is_new_copy = False
    w.stepped = w.attached or any(entry.weight is not None for entry in w.held)
    try:
        with w.region(seed, in_region):
            given = w.optimizer.step(*([] if ours is None else [ours]))
    except (RuntimeError, TypeError, ValueError):
        w.step_copies(seed if region else None, theirs)
        raise
    meant = w.step_copies(seed if region else None, theirs)
    if repr(given) != repr(meant):
        raise Different(f"step returned {given}, not {meant}")


@rule(12, region=one_of(None, None, 0, 5), seed=number, closure=one_of(False, False, True), clear=one_of(True, False))
def step(w: World, region: int | None, seed: int, closure: bool, clear: bool) -> None:
    """With and without a closure, and in a region with a seed of its own."""
    if w.cls in NEED_CLOSURE:
        closure = True
    need(not closure or (w.cls is not optim.SparseAdam and not (w.attached and w.settings.get("release_gradients"))))
    need(not (closure and not clear and any(is_expanded(w, entry) for entry in w.held)))
    in_region = region is not None
    need(not (in_region and w.released and region != w.reference.seed()))
    takes_step(w, region, in_region, closures(w, seed, clear) if closure else None)


@rule(2, seed=number)
def backward_and_step(w: World, seed: int) -> None:
    """What most loops do most of the time."""
    if w.cls is optim.SparseAdam:
        set_gradients(w, seed, 0, None)
    elif w.cls not in NEED_CLOSURE:
        backward(w, seed, seed)
    step(w, None, seed, False, True)
    zero_grad(w, True)


@rule(1, keep=one_of(True, False), seed=number)
def step_with_rate_0(w: World, keep: bool, seed: int) -> None:
    """Moments move and the step counts, with gradients and without."""
    ready(w)
    need(w.cls not in NEED_CLOSURE)
    if not keep:
        zero_grad(w, True)
    rates = [group["lr"] for group in w.optimizer.param_groups]
    for optimizer in (w.optimizer, w.reference.optimizer):
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * 0
    takes_step(w)
    for optimizer in (w.optimizer, w.reference.optimizer):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate


@rule(1)
def scheduler_step(w: World) -> None:
    ready(w)
    if w.schedulers is None:
        w.schedulers = [optim.lr_scheduler.ExponentialLR(each, 0.9) for each in (w.optimizer, w.reference.optimizer)]
    for scheduler in w.schedulers:
        scheduler.step()


@rule(1, seed=number, overflow=one_of(False, False, True))
def scaler_step(w: World, seed: int, overflow: bool) -> None:
    """GradScaler: unscale, look for inf, step or pass."""
    ready(w)
    entries = [entry for entry in w.held if entry.grad is not None]
    need(w.cls not in NEED_CLOSURE and w.cls is not optim.SparseAdam and entries)
    need(not (w.attached and w.settings.get("release_gradients")))
    need(not any(is_expanded(w, entry) for entry in entries))
    need(any(entry.grad.numel() for entry in entries))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.zeros(()))
    for entry in entries:
        p = w[entry.name]
        p.grad.mul_(4)
        if overflow:
            p.grad.fill_(float("inf"))
            entry.grad = torch.full_like(entry.grad, float("inf"))
    scaler.unscale_(w.optimizer)
    with w.region():
        scaler.step(w.optimizer)
    overflow = overflow or not all(entry.grad.isfinite().all() for entry in entries)
    if not overflow:
        w.step_copies()
    elif getattr(w.optimizer, "_step_supports_amp_scaling", False):
        w.reference.overflow()


@rule(2, how=one_of("closure", "option", "sparse", "hook", "late hook"), call=one_of(1, 1, 2), which=number)
def failing_step(w: World, how: str, call: int, which: int) -> None:
    """A step that raises takes nothing along."""
    ready(w)
    undo: list[Callable] = []
    pair = closures(w, which, True) if w.cls in NEED_CLOSURE else None
    if how == "closure":
        need(w.cls is not optim.SparseAdam and not (w.attached and w.settings.get("release_gradients")))
        need(call == 1 or w.cls in NEED_CLOSURE)
        # what torch steps by itself it does not take back; LBFGS makes state before it calls a closure
        need((call == 1 and w.cls is not optim.LBFGS) or all(entry.weight is not None for entry in w.held))
        pair = closures(w, which, False, call)
    elif how == "option":
        need(all(entry.weight is not None for entry in w.held))  # what torch steps by itself it does not take back
        for optimizer in (w.optimizer, w.reference.optimizer):
            group = pick(optimizer.param_groups, which)
            undo.append(lambda group=group, rate=group["lr"]: group.update(lr=rate))
            group["lr"] = "none"
    elif how == "sparse":
        need(w.takes_any_gradient and w.cls is not optim.SGD)
        need(all(entry.weight is not None for entry in w.held))
        entry = pick([e for e in w.held if e.weight is not None and e.q.dim() == 2 and e.grad is not None], which)
        p, grad, meant = w[entry.name], w[entry.name].grad, entry.grad
        undo.append(lambda: (setattr(p, "grad", grad), setattr(entry, "grad", meant)))
        p.grad = entry.grad = meant.to_sparse(1)
    else:

        def hook(*_: Any) -> None:
            raise Stopped

        late = how == "late hook"
        undo.append((w.optimizer.register_step_post_hook if late else w.optimizer.register_step_pre_hook)(hook).remove)
    try:
        with w.region():
            w.optimizer.step(*(pair or ())[:1])
    except (Stopped, RuntimeError, TypeError, ValueError):
        failed = True
    else:
        failed = False
    if not failed or how == "late hook":
        try:
            w.step_copies(None, (pair or (None, None))[1])
        except TorchRefuses as error:
            raise Different("a step went through that torch refuses") from error
    elif pair is not None and (how, call) != ("closure", 1):  # what a closure did to the gradients stays or goes
        for entry in w.entries:
            p = w[entry.name]
            entry.grad = None if p.grad is None else p.grad.detach().clone()
    for each in undo:
        each()
    if failed and how in ("closure", "option", "sparse"):
        none_or_told(w)


class At(TorchDispatchMode):
    """Do something in place of the operation of this number, and of none after it."""

    def __init__(self, number: int, act: Callable) -> None:
        super().__init__()
        self.number, self.act = number, act

    def __torch_dispatch__(self, operation: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.number -= operation.namespace != "profiler"  # torch's own, around the step
        if self.number == 0:
            self.number, act = -1, self.act
            act()
        return operation(*args, **(kwargs or {}))


def run_out(*_: Tensor) -> None:
    raise torch.OutOfMemoryError("of the program")


@rule(1.5, at=lambda draw: int(2 ** draw.uniform(0, 8)), signalled=one_of(True, False))
def interrupted_step(w: World, at: int, signalled: bool) -> None:
    """At any operation, hmpx's own among them: none of the step is done, or all of it, or every use says what is."""
    is_open = bool(w.released)
    need(w.cls not in NEED_CLOSURE and threading.current_thread() is threading.main_thread())
    need(all(entry.weight is not None for entry in w.held))  # what torch steps by itself it does not take back
    try:
        with w.region(), At(at, (lambda: signal.raise_signal(signal.SIGINT)) if signalled else run_out):
            w.optimizer.step()
    except torch.OutOfMemoryError:
        finished_or_told(w) if is_open else none_or_told(w)
        return
    except KeyboardInterrupt:
        try:
            w.optimizer.state_dict()
        except hmpx.HmpxError:
            finished_or_told(w) if is_open else none_or_told(w)
            return
        adopt_early(w)
        with contextlib.suppress(*[Different] * (not is_open)):  # what backward has begun can only be complete
            w.step_copies() if is_open else None
            w.check()
            return
    w.step_copies()


def finished_or_told(w: World) -> None:
    """A step that backward has begun waits for `optimizer.step()` still, or it refuses until a checkpoint is loaded."""
    try:
        w.optimizer.step()
    except hmpx.HmpxError:
        back_to_checkpoint(w)
    else:
        adopt_early(w)
        w.step_copies()


def adopt_early(w: World) -> None:
    for entry, name in w.reference.names().items():
        w.reference.adopt_early(entry, name, widened(w.optimizer.state.get(w[entry.name], {}), entry.q.shape))


def none_or_told(w: World) -> None:
    """A step that failed has changed nothing, or the optimizer refuses to go on until a checkpoint is loaded."""
    told = 0
    for use in (w.optimizer.state_dict, w.optimizer.step):
        try:
            if told or use == w.optimizer.state_dict:
                use()
        except hmpx.HmpxError:
            told += 1
    if not told:
        adopt_early(w)
        return
    if told == 1:
        raise Different("the optimizer steps on where it cannot be saved")
    back_to_checkpoint(w)


def back_to_checkpoint(w: World) -> None:
    for entry in w.entries:
        w.set_grad(entry, None)
        entry.master = None  # nobody knows which of them have moved
    try:
        load(w, 0, "same", "model first")
    except NotNow:
        raise TorchRefuses from None


# Weights


def has_bf16_state(w: World, entry: Entry) -> bool:
    """Whether somebody has made the state BF16 since the last step."""
    state = w.optimizer.state.get(w[entry.name], {})
    return any(isinstance(value, Tensor) and value.dtype is BF16 for value in state.values())


@rule(1, to=one_of(BF16, FP32), swap=one_of(True, False))
def cast(w: World, to: torch.dtype, swap: bool) -> None:
    """`model.bfloat16()` and `model.float()`, with `.data` exchanged or with the parameters swapped."""
    ready(w)
    need(w.cls is not optim.SparseAdam and not w.setup.options.get("fused"))
    need(w.attached or w.cls is not optim.Adagrad)  # whose state is made in BF16, and left so where nobody is attached
    need(w.attached or to is BF16 or not any(has_bf16_state(w, entry) for entry in w.held))
    need(not any(is_expanded(w, entry) for entry in w.entries))
    wide = w.settings.get("use_fp32_grad_acc")  # torch casts a gradient that waits to what it may not be then
    need(not wide or all(entry.grad is None for entry in w.entries))
    gc.collect() if swap else None  # torch does not swap what the error of an interrupted step still holds
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(swap)
    try:
        w.model.to(to)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
    for entry in w.entries:
        if entry.seen.dtype is not to:
            w.reference.cast(entry, to)
        if not wide and getattr(w[entry.name], "grad_dtype", None) not in (None, to):
            w[entry.name].grad_dtype = to  # as whoever casts has to do where it was ever set: torch cannot unset it
    w.adopted()


@rule(1, which=number, seed=number)
def swap(w: World, which: int, seed: int) -> None:
    """Another tensor's content in the same object, as `torch.utils.swap_tensors` does it."""
    ready(w)
    entry = pick(w.entries, which)
    p = w[entry.name]
    x = values(tuple(p.shape), seed).to(p.dtype)
    other = torch.nn.Parameter(torch.empty_like(p, requires_grad=False).copy_(x), requires_grad=p.requires_grad)
    gc.collect()  # as in `cast`
    torch.utils.swap_tensors(p, other)
    w.reference.write(entry, x)
    entry.grad = None


@rule(1, which=number, frozen=one_of(True, False, False))
def freeze(w: World, which: int, frozen: bool) -> None:
    ready(w)
    p = w[pick(w.entries, which).name]
    need(p.requires_grad == frozen)
    p.requires_grad_(not frozen)


@rule(1, which=number, bound=one_of(0.25, 1.0, 100.0))
def clamp(w: World, which: int, bound: float) -> None:
    ready(w)
    entry = pick(w.entries, which)
    with torch.no_grad():
        w[entry.name].clamp_(-bound, bound)
        w.reference.write(entry, entry.seen.clamp(-bound, bound))


WRITES = ("copy_", "data", "part", "storage", "zeros and infs", "same", "same storage", "same in a buffer")


@rule(3, which=number, seed=number, how=one_of(*WRITES))
def write(w: World, which: int, seed: int, how: str) -> None:
    """By hand, in the ways that people do; three of them change no value."""
    ready(w)
    entry = pick(w.entries, which)
    p = w[entry.name]
    x = (values(tuple(p.shape), seed) if not how.startswith("same") else entry.seen.float()).to(p.dtype)
    with torch.no_grad():
        if how == "part":
            need(p.dim() and p.shape[0])
            x = torch.cat([x[:1], entry.seen[1:]])
            p[0] = x[0]
        elif how == "zeros and infs":
            need(p.dim())
            x = entry.seen.clone()
            x[::2], x[1::3] = 0.0, -torch.inf
            p.copy_(x)
        elif how.endswith("buffer"):
            need(p.is_contiguous())
            p.data = torch.cat([x.flatten(), x.flatten()])[-p.numel() :].view(p.shape)
        elif how == "data":
            p.data.copy_(x)
        elif how.endswith("storage"):
            p.data = torch.empty_like(p).copy_(x)
        else:
            p.copy_(x)
    w.reference.write(entry, x)


@rule(1, rate=one_of(0.5, 0.1))
def average(w: World, rate: float) -> None:
    """An exponential average beside the weights."""
    for entry in w.entries:
        seen = entry.seen.float()
        w.averages[entry.name] = torch.lerp(w.averages.get(entry.name, seen), seen, rate).to(entry.seen.dtype).float()


@rule(1, how=one_of("copy_", "data", "storage"))
def average_in_or_out(w: World, how: str) -> None:
    """For an evaluation: the averages take the weights' place, and the next time the weights come back."""
    ready(w)
    need(w.aside or w.averages)
    coming = w.aside or w.averages
    aside = {} if w.aside else {entry.name: entry.seen.clone() for entry in w.entries}
    for entry in w.entries:
        if entry.name in coming:
            p, x = w[entry.name], coming[entry.name].to(entry.seen.dtype)
            with torch.no_grad():
                if how == "storage":
                    p.data = torch.empty_like(p).copy_(x)
                else:
                    (p.data if how == "data" else p).copy_(x)
            w.reference.write(entry, x)
    w.aside = aside


@rule(1, which=number, layout=one_of("channels_last", "channels_last_3d", "contiguous", "module"))
def memory_format(w: World, which: int, layout: str) -> None:
    ready(w)
    need(w.cls is not optim.LBFGS)  # which takes contiguous parameters alone
    if layout == "module":
        need(all(w[entry.name].dim() in (0, 1, 2, 3, 4) for entry in w.entries))
        changed = [entry for entry in w.entries if entry.q.dim() == 4]
        need(not w.setup.options.get("fused") or all(e.weight is not None and is_even(e) for e in changed))
        need(w.takes_any_gradient or all(e.weight is not None or e.grad is None for e in changed))
        w.model.to(memory_format=torch.channels_last)
        for entry in w.entries:
            w.reference.lay(entry, w[entry.name].detach())
        return
    entry = pick([entry for entry in w.entries if entry.q.dim() in (4, 5)], which)
    need(not w.setup.options.get("fused") or (entry.weight is not None and is_even(entry)))
    need(entry.weight is not None or w.takes_any_gradient or entry.grad is None)
    with torch.no_grad():
        w[entry.name].data = laid_out(w[entry.name].detach(), layout)
    w.reference.lay(entry, w[entry.name].detach())


# The optimizer


@rule(1, which=number, how=one_of("elsewhere", "BF16", "BF16 in place", "strided", "removed"))
def other_state(w: World, which: int, how: str) -> None:
    """Somebody puts other tensors into the state, or casts those that are there."""
    ready(w)
    need(w.cls not in (optim.Adagrad, optim.LBFGS))  # which make state once, and cannot step without it
    need(not w.reference.has_codes and not w.was_in_codes)
    entry = pick([e for e in w.held if e.weight is not None and e.q in w.reference.optimizer.state], which)
    state, meant = w.optimizer.state[w[entry.name]], w.reference.optimizer.state[entry.q]
    if how == "removed":
        state.clear(), meant.clear()
    for key in [key for key, value in meant.items() if isinstance(value, Tensor) and value.shape == entry.q.shape]:
        x, value = state[key], meant[key]
        if not x.dim():
            continue
        if how == "BF16 in place":
            x.data = x.data.bfloat16()
        else:
            state[key] = {"BF16": x.bfloat16(), "strided": laid_out(x, "transposed")}.get(how, x.clone())
        meant[key] = value.bfloat16().float() if how.startswith("BF16") else value


@rule(1, which=number)
def option(w: World, which: int) -> None:
    """A user turns the sign of the updates of one group, changes how its weights decay, or makes its rate a tensor."""
    ready(w)
    if which % 3 == 0:
        need(w.cls in (optim.Adam, optim.AdamW) and not w.setup.options.get("foreach"))
        for optimizer in (w.optimizer, w.reference.optimizer):
            group = optimizer.param_groups[which % len(optimizer.param_groups)]
            group["lr"] = torch.tensor(float(group["lr"]))
        return
    for optimizer in (w.optimizer, w.reference.optimizer):
        group = optimizer.param_groups[which % len(optimizer.param_groups)]
        key = next((key for key in ("maximize", "weight_decay") if key in group), None)
        need(key)
        group[key] = not group[key] if key == "maximize" else 0.25 - group[key]


@rule(1, seed=number, again=one_of(True, False))
def add_group(w: World, seed: int, again: bool) -> None:
    """Of a new parameter, or of one that was taken out."""
    ready(w)
    need(w.cls not in (optim.LBFGS, optim.Adagrad) and len(w.entries) < 9)  # torch's own take no more parameters
    out = [entry for entry in w.entries if entry not in w.held]
    if again:
        entry = pick(out, seed)
    else:
        spec = random_spec(random.Random(seed), w.cls, w.setup.options)
        name = f"w{len(w.entries)}"
        w.model.register_parameter(name, torch.nn.Parameter(make((spec,)).w0.detach(), requires_grad=not spec.frozen))
        entry = w.reference.add(name, w[name])
    more = {"lr": w.optimizer.param_groups[-1]["lr"]}
    w.optimizer.add_param_group({"params": [w.item(entry.name)], **more})
    w.reference.notice_casts()
    w.reference.optimizer.add_param_group({"params": [entry.q], **more})
    if w.attached:
        w.adopted()


@rule(0.7, which=number)
def pop_group(w: World, which: int) -> None:
    ready(w)
    groups = w.optimizer.param_groups
    need(len(groups) > 1 and (w.attached or not w.is_new_copy))
    which %= len(groups)
    staying = [entry for group in order(w)[:which] + order(w)[which + 1 :] for entry in group]
    for entry in w.held if any_in_fp32(w) else ():
        if entry.name not in staying:
            w.set_grad(entry, None)
    for optimizer in (w.optimizer, w.reference.optimizer):
        for p in optimizer.param_groups.pop(which)["params"]:
            optimizer.state.pop(p, None)  # torch cannot save the state of a parameter that is not there


@rule(1.5, seed=number, how=one_of("order", "an empty one", "one from elsewhere", "copies"))
def other_groups(w: World, seed: int, how: str) -> None:
    """Groups change in the list itself; the number of the step and the seed stay with the optimizer."""
    ready(w)
    need((len(w.optimizer.param_groups) > 1 or how != "order") and (w.attached or not w.is_new_copy))
    need(w.cls is not optim.LBFGS)  # which has one group
    need(w.reference.count or how != "one from elsewhere")  # before, its numbers are those of a user
    for optimizer in (w.optimizer, w.reference.optimizer):
        groups = optimizer.param_groups
        plain = [{key: value for key, value in group.items() if not key.startswith("hmpx")} for group in groups]
        if how == "order":
            random.Random(seed).shuffle(groups)
        elif how == "copies":
            groups[:] = plain
        else:
            empty = {key: [] if key in ("params", "param_names") else value for key, value in plain[0].items()}
            groups.insert(0, {**empty, "hmpx_step": FOREIGN, "hmpx_seed": 99} if how == "one from elsewhere" else empty)
            if optimizer is w.reference.optimizer:
                groups[0] = empty


@rule(1, how=one_of("deepcopy", "pickle", "torch.save"))
def copied(w: World, how: str) -> None:
    """Go on with a copy; torch's copies of parameters have no gradients."""
    ready(w)
    need(w.cls is not optim.LBFGS)  # whose copies torch forgets to give parameters
    carried = next((group["hmpx_step"] for group in w.optimizer.param_groups if "hmpx_step" in group), None)
    need(w.attached or carried == (w.reference.count or None))
    w.reference.notice_casts()
    both = (w.model, w.optimizer)
    for entry in w.entries:
        w.set_grad(entry, None)
    if how == "deepcopy":
        w.model, w.optimizer = copy.deepcopy(both)
    elif how == "pickle":
        w.model, w.optimizer = pickle.loads(pickle.dumps(both))
    else:
        file = io.BytesIO()
        torch.save(both, file)
        file.seek(0)
        w.model, w.optimizer = torch.load(file, weights_only=False)
    w.schedulers, w.is_new_copy = None, True
    for entry in w.entries:  # the numbers of a copied model are in its optimizer alone
        entry.next = w.reference.count if entry in w.held else 0


@rule(1.5, seed=number, same=one_of(True, False, "but for the numbers", "but for the numbers"))
def attach_anew(w: World, seed: int, same: bool | str) -> None:
    """Detach and attach, with the same settings, others, or other numbers; or attach what has stepped in regions."""
    if w.attached:
        with torch.device(w.setup.default_device):
            hmpx.detach(w.optimizer)
        if any(key.startswith("hmpx") for group in w.optimizer.param_groups for key in group):
            raise Different("groups have settings of hmpx after detach")
        for entry, grad in w.waiting.items():
            entry.grad = grad
        w.waiting.clear(), w.released.clear()
        w.reference.detach()
        for entry in w.entries:
            wide = FP32 if claimed_in_fp32(w, entry) else BF16
            if entry.weight is not None:
                entry.grad, entry.grad_dtype = entry.grad if entry.grad is None else entry.grad.to(wide), wide
        settings = w.settings if same else random_attach(random.Random(seed), w.cls)
        if same == "but for the numbers":
            settings = held_otherwise(w.settings, seed)
    else:
        settings = {**random_attach(random.Random(seed), w.cls), "state_dtype": FP32}
    w.reference.settings = settings
    w.attach()


def claimed_in_fp32(w: World, entry: Entry) -> bool:
    """Whether an older attachment, in force again when the last one ends, accumulates a gradient in FP32."""
    for optimizer, settings in reversed(w.older):
        if any(p is w[entry.name] for group in optimizer.param_groups for p in group["params"]):
            return bool(settings.get("use_fp32_grad_acc"))
    return False


@rule(1, seed=number, same=one_of(True, False), keep=one_of(True, False))
def successor(w: World, seed: int, same: bool, keep: bool) -> None:
    """A new optimizer of the same parameters, as when a notebook's cell is run twice; the old one may live on."""
    ready(w)
    names = order(w)
    need(w.attached and len(w.older) < 3 and all(names))  # torch takes no empty group with names
    settings = w.settings if same else random_attach(random.Random(seed), w.cls)
    w.older.append((w.optimizer, w.settings))
    w.optimizer, w.schedulers = w.new_optimizer(names), None
    w.reference.succeed(settings)
    w.attach()
    if not keep:
        w.older.clear()
        gc.collect()
        for entry in w.entries:
            if entry not in w.held and entry.weight is not None:
                entry.grad_dtype = BF16  # of one that had been taken out: nobody holds its gradient in FP32 any more


# Checkpoints


def order(w: World) -> list[list[str]]:
    of = {id(entry.q): entry.name for entry in w.entries}
    return [[of[id(q)] for q in group["params"]] for group in w.reference.optimizer.param_groups]


@rule(1.5, serialised=one_of(True, False))
def save(w: World, serialised: bool) -> None:
    """That of a step which backward has begun, and which goes on, is refused."""
    if w.released:
        try:
            w.optimizer.state_dict()
        except hmpx.HmpxError:
            return
        raise Different("checkpoint of half a step")
    held = {"model": w.model.state_dict(), "optimizer": w.optimizer.state_dict()}
    reference = w.reference.save()
    if w.attached and w.settings.get("use_master_weights_in_ckpt"):
        for i, (entry, master) in enumerate(zip(w.held, reference["masters"], strict=True)):
            given = held["optimizer"]["state"].get(i, {}).get("hmpx_master", entry.seen.float())
            if entry.weight is not None and not same_bits(given, master):
                raise Different(f"the checkpoint's master of {entry.name}: {given}, not {master}")
    if serialised:
        file = io.BytesIO()
        torch.save(held, file)
        file.seek(0)
        held = torch.load(file)
    w.saved.append((order(w), copy.deepcopy(held), reference, dict(w.settings), w.attached))


def turned(_: Any, state_dict: dict) -> dict:
    """A hook of a user who brings parameters into another order."""
    groups = [dict(group) for group in state_dict["param_groups"]]
    for group in groups:
        for key in ("params", "param_names"):
            if key in group:
                group[key] = group[key][::-1]
    return {**state_dict, "param_groups": groups}


def held_otherwise(settings: dict, seed: int) -> dict:
    """Settings into which a checkpoint of these can be loaded."""
    draw, ways = random.Random(seed), {"master": "split", "split": "master"}
    dtypes = [FP32, BF16] if settings.get("fused") else [FP32, BF16, *PREFIXES]
    way = settings["weights"]
    other = draw.choice([way, ways.get(way, way)]) if settings.get("use_master_weights_in_ckpt") else way
    return {**settings, "weights": other, "state_dtype": draw.choice(dtypes)}


def goes_into(saved: dict, here: dict) -> bool:
    """Whether a checkpoint with these settings can be loaded with those: the rest of it decides nothing in between.

    State comes to its dtype in the next step, and masters in a checkpoint are for `master` and `split` alike.
    """
    plain = [{**each, "state_dtype": None, "release_gradients": None} for each in (saved, here)]
    for each in plain:
        if each.get("use_master_weights_in_ckpt") and each["weights"] == "split":
            each["weights"] = "master"
    return plain[0] == plain[1]


WHAT = ("model first", "optimizer first", "optimizer")


@rule(1.5, which=number, into=one_of("same", "same", "fresh"), what=one_of(*WHAT), hook=one_of(False, False, True))
def load(w: World, which: int, into: str, what: str, hook: bool = False) -> None:
    """Into the objects that are there, or into new ones as after a restart. It ends a step that backward has begun."""
    need(not w.released or what != "optimizer")
    fits = [s for s in w.saved if s[0] == order(w) and goes_into(s[3], w.settings) and s[4] == w.attached]
    names, held, reference, *_ = pick(fits, which)
    names_there = {entry.name for entry in w.entries}
    need(names_there == set(reference["weights"]))
    need(into == "same" or all(names))
    if into == "fresh":
        model = copy.deepcopy(w.model)
        for p in model.parameters():
            p.grad = None
        w.model, w.schedulers = model, None
        old, w.optimizer = w.optimizer, None
        w.optimizer = w.new_optimizer(names)
        del old
        for entry in w.entries:
            entry.grad, entry.master, entry.next = None, None, 0
        if w.attached:
            w.attach()
    is_open = bool(w.waiting or w.released)
    w.waiting.clear(), w.released.clear()
    state = copy.deepcopy(held["optimizer"])
    state = turned(w.optimizer, state) if hook else state  # each group's parameters in the opposite order
    handle = w.optimizer.register_load_state_dict_pre_hook(turned) if hook else None
    if what == "model first":
        w.model.load_state_dict(held["model"])
    with w.region():
        w.optimizer.load_state_dict(state)
    if handle is not None:
        handle.remove()
    if what == "optimizer first":
        w.model.load_state_dict(held["model"])
    w.reference.load(reference, what != "optimizer", is_open)


@rule(2, seed=number, what=one_of(*WHAT))
def go_back(w: World, seed: int, what: str) -> None:
    """To a checkpoint of a step before."""
    ready(w)
    save(w, False)
    backward_and_step(w, seed)
    load(w, -1, "same", what)
