"""`attach` and `detach`: how one optimizer updates weights, set once, in force without any region."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from hmpx.base.tensors import dtype_named
from hmpx.base.torch_private import RELEASED
from hmpx.errors import HmpxError
from hmpx.updates.attachment import Attachment
from hmpx.updates.holding import state_dtypes
from hmpx.updates.holding.stores import Rules, Settings, Weights
from hmpx.updates.optimizer_hooks import check_methods, takes_hooks
from hmpx.updates.ranks import compare, raising_everywhere
from hmpx.updates.step_hooks import allow_plain_steps
from hmpx.updates.stepping import step_count
from hmpx.updates.stepping.known_elsewhere import refuse_lookups
from hmpx.updates.stepping.names import (
    BF16Parameters,
    given_names,
    has_bf16,
    inner_optimizers,
    inside_zero,
    named,
    own_attachment,
    refuse_left_buckets,
    share_names,
)
from hmpx.updates.stepping.names import parameters as parameters_of
from hmpx.updates.stepping.optimizer_classes import (
    FUSED,
    SCOPES,
    cell_of,
    formula_of,
    is_known,
    is_own,
    is_watched,
    replaced_step,
)
from hmpx.updates.stepping.step_call import refuse_graphs

logger = logging.getLogger("hmpx")
Optimizer = torch.optim.Optimizer


def attach(
    optimizer: Optimizer,
    weights: Weights = Settings.weights,
    *,
    model: torch.nn.Module | None = None,
    names: Iterable[str] | None = None,
    places: None = None,
    methods: Iterable[str] = (),
    seed: int | None = Settings.seed,
    state_dtype: torch.dtype | str = Settings.state_dtype,
    parameters: Mapping[str, Mapping[str, Any]] | Rules = Settings.parameters,
    use_fp32_grad_acc: bool = Settings.use_fp32_grad_acc,
    use_master_weights_in_ckpt: bool = Settings.use_master_weights_in_ckpt,
    release_gradients: bool = Settings.release_gradients,
    fused: bool | None = Settings.fused,
    process_group: dist.ProcessGroup | None = None,
) -> Attachment:
    """Make every step of `optimizer` compute in FP32, and hold its BF16 parameters between steps as `weights` says.

    Parameters of other dtypes get a plain step. Works with and without `hmpx.convert()`; the optimizer stays the same
    object and is used as before: LR schedulers, GradScaler, `state_dict`, `copy.deepcopy` and pickle included.

    Args:
        optimizer: any `torch.optim.Optimizer`.
        weights: "stochastic" (rounding; nothing beside the BF16 weights), "nearest", "master" (FP32 copies, 4 bytes a
            parameter more), "split" (the same masters exactly, 2 bytes more) or "split8" (their upper 24 bits, rounded
            stochastically, 1 byte more).
        model, names: where names of parameters come from, before those of `named_parameters()` that the optimizer was
            given: the model, or one name for each parameter in the order of `param_groups`. The rounding numbers
            depend on them, so a stage of a pipeline gives its parameters the names that they have in the whole model.
        places: of version 0.2; anything but None raises an error that says what to use.
        methods: names of further methods of the optimizer that rewrite weights; each call of one is a step. hmpx knows
            `first_step`, `second_step` and `third_step` (SAM), `train` and `eval` (schedule-free optimizers).
        seed: of the rounding numbers, in [0, 2^64); the first step is number 0 then. None: the one that `state_dict`
            carries, else 0; a new optimizer goes on from the last step number of its parameters.
        state_dtype: how the optimizer's state is held between steps. torch.bfloat16 rounds it to BF16, stochastically.
            "8bit", "4bit" and the other names of `hmpx.rounding.state_codes` hold each state tensor of the parameter's
            shape in codes, with a scale for 128 elements; "4bit" in 8 bits where rows have an odd number of elements.
            Three kinds of state are in BF16 then: of parameters of one dimension; of those that are cut along the last
            one, as some are by tensor parallelism, or along another but the first where the last has fewer than 128
            elements; and of Muon, SCION, SOAP and Shampoo, as their matrix functions make the noise of 8 bits cost
            loss.
        parameters: exceptions by the name of a parameter or a pattern, ``{"*.norm*": {"weights": "master"}}``, with
            `weights`, `state_dtype` or both. Of several patterns that fit, the last decides; a key that it lacks
            has the value above.
        use_fp32_grad_acc: gradients of BF16 parameters accumulate in FP32 (torch's `grad_dtype`, 2.11 or newer).
            torch cannot unset it: whoever casts the model to FP32 after `detach` sets ``p.grad_dtype = p.dtype``.
        use_master_weights_in_ckpt: `optimizer.state_dict()` holds the FP32 masters.
        release_gradients: each parameter steps, and frees its gradient, during backward; `optimizer.step()` then
            finishes the step, with the same bits. Accumulation, clipping, GradScaler, skipped steps, and options (a
            rate) that are set between `backward()` and `step()` raise.
        fused: None: Adam, AdamW, SGD and the other classes that `hmpx.explain` names step in the arithmetic of hmpx's
            kernels, one call for all parameters; others by their own code, and so do groups with amsgrad,
            differentiable or capturable, and sparse gradients. Results agree with the optimizer's own to rounding and
            not to the bit. They are the same on every device, in every layout and on any number of ranks: where no
            kernel can take a parameter (the head of `stepping/fused_batch.py` has the list), torch's operators give the
            same bits, slower. True: refuse other classes. False: the optimizer's own step, with its bits. Its own code,
            and torch's operators, step FP32 copies of a few parameters at a time, in a room of at least the largest
            parameter; a class that hmpx does not know sees all of them at once.
        process_group: in a distributed job, the ranks that hold the same optimizer; all of them must attach. None: all
            ranks of the job.

    A `ZeroRedundancyOptimizer` is attached as any other. DistributedDataParallel may be put around the model before or
    after, and again.

    Returns:
        A handle with `detach()`. Attaching again with the same settings returns it again.

    Raises:
        HmpxError: something does not fit, or differs from the first rank's; the optimizer is as it was.

    Example:
        >>> model = torch.nn.Linear(4, 4).bfloat16()
        >>> optimizer = torch.optim.AdamW(model.named_parameters())
        >>> handle = hmpx.attach(optimizer, "master", use_master_weights_in_ckpt=True)
        >>> model(inputs.bfloat16()).sum().backward()
        >>> optimizer.step()
        >>> optimizer.state_dict()["state"][0]["hmpx_master"].dtype
        torch.float32
    """
    if not isinstance(optimizer, Optimizer):
        raise HmpxError(f"attach needs a torch.optim.Optimizer, not {type(optimizer).__name__}")
    refuse_unseen(optimizer)
    if places is not None:
        raise HmpxError(
            "attach(places=) is gone: shard parameters as DTensors, which know where their elements stand; others need "
            "their names in the whole model (names=), and are rounded as well, not to the bits of one process"
        )
    what = f"hmpx.attach({type(optimizer).__name__})"
    target = inside_zero(optimizer) or optimizer
    with raising_everywhere(what, process_group):
        settings = Settings(
            weights=weights,
            seed=seed,
            state_dtype=dtype_named(state_dtype),
            parameters=parameters,
            use_fp32_grad_acc=use_fp32_grad_acc,
            use_master_weights_in_ckpt=use_master_weights_in_ckpt,
            release_gradients=release_gradients,
            fused=fused,
        )
        given, writing = given_names(optimizer, model, names), check_methods(target, methods)
        before = attached(optimizer)
        if before is not None:
            same_names = given in ({}, before.names) or (before.are_whole and names is None)
            if before.settings == settings and same_names and writing in ((), before.methods):
                return before
            raise HmpxError(f"{before!r} is in force; hmpx.detach(optimizer) first")
        if target is not optimizer:
            refuse_left_buckets(optimizer)
            share_names(optimizer, target)
        known = [name for name, _ in named(optimizer, given)]
        settings.check_patterns({*given.values(), *known})
        check_optimizer(target, settings, given)
        if not has_bf16(optimizer):
            logger.warning("hmpx: %s has no BF16 parameters, so its steps are plain ones", type(optimizer).__name__)
        coded = [way.state_dtype for way in settings.ways if isinstance(way.state_dtype, str)]
        if coded and any(group.get("centered") for group in target.param_groups):
            logger.warning(
                "hmpx: %s(centered=True) takes the root of a difference, which can be NaN with state_dtype=%r; "
                "torch.bfloat16 does not have that",
                type(target).__name__,
                coded[0],
            )
        attachment = Attachment(target, settings, given, process_group, methods=writing, are_whole=names is not None)
        compare(what, attachment.facts(optimizer), process_group)
        attachment.install(optimizer)
        return attachment


def attached(optimizer: Optimizer) -> Attachment | None:
    """Return the attachment of an optimizer; for a `ZeroRedundancyOptimizer`, that of the optimizer inside it.

    None if it is not attached.
    """
    optimizer = unwrapped(optimizer)
    return own_attachment(inside_zero(optimizer) or optimizer)


def unwrapped(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer that steps, of one that only hands on its calls, as those of Accelerate and Lightning do.

    torch has not wrapped the step of such a one, and its state and groups are those of an optimizer that it holds.
    """
    while cell_of(type(optimizer).step) is None and not is_watched(type(optimizer).step):
        state, groups = getattr(optimizer, "state", None), getattr(optimizer, "param_groups", None)
        shared = (
            (each, getattr(each, "state", 0), getattr(each, "param_groups", 0)) for each in inner_optimizers(optimizer)
        )
        holder = next((each for each, its, own in shared if its is state and own is groups), None)
        if holder is None:
            break
        optimizer = holder
    return optimizer


def steppers(optimizer: Optimizer, inside: Iterable[Optimizer] = ()) -> list[Optimizer]:
    """Return the optimizers that step where `optimizer` does, each of which is to be attached.

    These are the optimizer and those that it holds and that have other parameters (a Muon may hold an AdamW); in place
    of one that never ran `Optimizer.__init__`, those that it holds.

    inside: others that it may hold.
    """
    optimizer = unwrapped(optimizer)
    known = {id(each): each for each in (*inner_optimizers(optimizer), *inside)}
    if known and not takes_hooks(optimizer):
        return [each for one in known.values() for each in steppers(one)]
    own = set(parameters_of(optimizer)) if known else set()
    return [optimizer, *(each for each in known.values() if (its := parameters_of(each)) and own.isdisjoint(its))]


def detach(optimizer: Optimizer) -> None:
    """Make an optimizer a plain torch one again, if it is attached or has state of regions or in codes.

    Its state goes to the dtype of each parameter, as torch's own `load_state_dict` does, and masters are dropped: save
    `state_dict()` before if you want them back.

    Example:
        >>> optimizer = torch.optim.SGD(torch.nn.Linear(4, 4).bfloat16().parameters(), lr=0.1)
        >>> handle = hmpx.attach(optimizer)
        >>> hmpx.detach(optimizer)
        >>> handle.active
        False
    """
    if not isinstance(optimizer, Optimizer):
        raise HmpxError(f"detach needs a torch.optim.Optimizer, not {type(optimizer).__name__}")
    optimizer = unwrapped(optimizer)
    stepping = steppers(optimizer)
    for each in stepping:
        if each is not optimizer:
            detach(each)
    if optimizer not in stepping:
        return
    optimizer, attachment = inside_zero(optimizer) or optimizer, attached(optimizer)
    if attachment is not None:
        attachment.detach_from(optimizer)
        return
    if allow_plain_steps(optimizer) or state_dtypes.code_in(optimizer):
        state_dtypes.release_state(optimizer)
    step_count.remove(optimizer)


def refuse_unseen(optimizer: Optimizer) -> None:
    """Raise an HmpxError if the steps of an optimizer cannot be seen."""
    if not takes_hooks(optimizer):
        raise HmpxError(
            f"{type(optimizer).__name__} never ran Optimizer.__init__, so its step cannot be seen; "
            "attach the optimizer that it holds"
        )


def check_optimizer(optimizer: Optimizer, settings: Settings, given: dict[torch.nn.Parameter, str]) -> None:
    """Check that an optimizer can be attached; nothing is changed.

    Raises:
        HmpxError: it cannot.
    """
    if settings.release_gradients:
        RELEASED.require()
    refuse_graphs(optimizer)
    # Raises where a parameter is of a kind that cannot be updated.
    BF16Parameters(settings, given).segments(optimizer)
    is_replaced = replaced_step(optimizer) is not None or (type(optimizer) in SCOPES and not is_own(type(optimizer)))
    if is_replaced or not is_known(optimizer):
        refuse_lookups(optimizer)
        if settings.release_gradients:
            known = ", ".join(cls.__name__ for cls in SCOPES)
            name = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
            raise HmpxError(
                f"release_gradients needs an optimizer that updates each parameter by itself ({known}), and {name}"
                f"{', whose step somebody has replaced,' if is_replaced else ''} may look across them",
                key=("release_gradients",),
            )
    if settings.fused and (is_replaced or formula_of(optimizer) is None):
        name = f"{type(optimizer).__name__}{', whose step somebody has replaced' if is_replaced else ''}"
        raise HmpxError(f"fused has kernels for {FUSED}, not for {name}", key=("fused",))
    check_torch(settings)


def check_torch(settings: Settings) -> None:
    """Check that this torch version supports the settings.

    Raises:
        HmpxError: `use_fp32_grad_acc` before torch 2.11.
    """
    if settings.use_fp32_grad_acc and not hasattr(torch.Tensor, "grad_dtype"):
        said = f"use_fp32_grad_acc needs torch 2.11 or newer (Tensor.grad_dtype), not {torch.__version__}"
        raise HmpxError(said, key=("use_fp32_grad_acc",))
