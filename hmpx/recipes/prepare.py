"""`prepare`: set a model and its optimizer up as a recipe says."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from dataclasses import asdict, replace
from fnmatch import fnmatchcase
from typing import Any, TypeVar
from weakref import WeakSet

import torch

from hmpx.base.dtype_names import dtype_name
from hmpx.errors import HmpxError, kind_of
from hmpx.ops.module_rules import ModuleRule
from hmpx.ops.policies.lists import LOW_DTYPES
from hmpx.recipes.kept_dtypes import kept_in_fp32, tell_kept, tell_narrowed
from hmpx.recipes.keys import DTYPES, dtype_of
from hmpx.recipes.module_patterns import check_names, module_names, rules_for
from hmpx.recipes.prepared import Prepared, take
from hmpx.recipes.reading import Stated, as_recipe
from hmpx.recipes.recipe import Recipe
from hmpx.updates.attach import attach, attached
from hmpx.updates.holding.settings import Settings
from hmpx.updates.ranks.checks import compare
from hmpx.updates.ranks.ddp import replicas
from hmpx.updates.ranks.sharding import is_sharded, is_shell, refuse_shell
from hmpx.updates.stepping.names import inside_zero, named, names_in, parameters

logger = logging.getLogger("hmpx")


Optimizers = TypeVar("Optimizers", torch.optim.Optimizer, Sequence[torch.optim.Optimizer])


def prepare(
    model: torch.nn.Module, optimizer: Optimizers, recipe: Stated, *, process_group: Any = None
) -> tuple[torch.nn.Module, Optimizers]:
    """Set a model and its optimizer up as a recipe says: cast the parameters, `hmpx.convert`, `hmpx.attach`.

    Parameters stay the same objects, so schedulers, tied weights and the optimizer go on as they are. A model that is
    to be replicated or sharded is cast before it is wrapped (``model.bfloat16()``) and prepared after that. The
    `prepare` of Accelerate may run before this or after it. ``hmpx.restore(optimizer)`` undoes it; the parameters keep
    their dtype.

    Several models may be prepared by different recipes: each is cast by its own lists, and an op outside of them (a
    loss) by those of the model whose output it takes. `dtype_map`, `kernels` and `verbose` hold for the process.

    Args:
        optimizer: one, or a list of those that train the model.
        recipe: a name (``"nxd-standard"``), the path of a YAML file, a dict of a recipe's keys, a `Recipe`, or NxD's
            own configuration under its one key, ``{"mixed_precision_config": {...}}``, with NxD's defaults (see
            `Recipe.from_nxd`): under ZeRO-1 means that the optimizer is a `ZeroRedundancyOptimizer`. Under the key
            `extends`, a file or dict names the recipe that its other keys change: ``{"extends": "lean", "weights":
            "split"}``. None: the default lists with FP32 weights.
        process_group: in a distributed job, the ranks that hold the same parameters: those of one stage of a pipeline,
            say. None: all ranks.

    Returns:
        The model and the optimizer, the same objects.

    Raises:
        HmpxError: something does not fit, or differs between ranks, or the optimizer is prepared by another recipe;
            model, torch and optimizer are as they were.

    Example:
        >>> model, optimizer = hmpx.prepare(model, optimizer, {"weights": "split", "fp32": ["linear"]})
        >>> model.weight.dtype, model(inputs).dtype
        (torch.bfloat16, torch.float32)
        >>> hmpx.restore(optimizer)
    """
    if not isinstance(model, torch.nn.Module):
        swapped = isinstance(model, torch.optim.Optimizer) and isinstance(optimizer, torch.nn.Module)
        hint = "; the two arguments are swapped: prepare(model, optimizer, recipe)" if swapped else ""
        raise HmpxError(f"model is {kind_of(model)}, not a torch.nn.Module{hint}")
    given: Any = optimizer
    optimizers: list[torch.optim.Optimizer] = [*given] if isinstance(given, list | tuple) else [given]
    for each in optimizers:
        if not isinstance(each, torch.optim.Optimizer):
            raise HmpxError(f"prepare needs a torch.optim.Optimizer, not {type(each).__name__}")
    if not optimizers:
        raise HmpxError("prepare needs an optimizer, and the list has none; hmpx.convert() casts ops alone")
    stepping: list[torch.optim.Optimizer] = [unwrapped(each) for each in optimizers]
    stated = as_recipe(recipe)
    recipes = [stated.under_zero(inside_zero(each) is not None) for each in stepping]
    whole = recipes[0]
    policy = whole.policy()
    compare("hmpx.prepare", facts(whole), process_group)
    with whole.naming_lines():
        settings = [of_own(own.settings(), each, model, [model]) for own, each in zip(recipes, stepping, strict=True)]
    for each, asked in zip(stepping, settings, strict=True):
        _refuse_another(each, asked, model, whole)
    with whole.naming_lines(), contextlib.ExitStack() as undo:
        check_names([model], whole)
        rules: list[ModuleRule] = rules_for([model], whole)
        tell_cast(cast_model(model, whole, undo))
        if any(p.dtype is torch.bfloat16 for p in model.parameters()):
            for each, asked in zip(stepping, settings, strict=True):
                before = attached(each)
                attachment = attach(each, model=model, process_group=process_group, **vars(asked))
                if attachment is not before:
                    undo.callback(attachment.abandon)
        take(model, Prepared(whole, policy, WeakSet([*optimizers, *stepping]), rules))
        undo.pop_all()
    logger.info("hmpx: prepared by this recipe:\n%s", whole)
    return model, optimizer


def _refuse_another(
    optimizer: torch.optim.Optimizer, settings: Settings, model: torch.nn.Module, recipe: Recipe
) -> None:
    """Raise if an optimizer is attached already, in a way that is not the recipe's."""
    before = attached(optimizer)
    if before is None:
        return
    dtypes = _dtypes(model, recipe)
    widens = any(p.dtype is torch.bfloat16 is not dtypes.get(p, torch.bfloat16) for p in parameters(optimizer))
    if widens or before.settings != settings:
        raise HmpxError(
            f"this {type(optimizer).__name__} is attached already ({before!r}), and the recipe holds weights in "
            "another way: call hmpx.detach(optimizer) first, then prepare; weights keep their dtype and values"
        )


def attach_made(
    optimizer: torch.optim.Optimizer, settings: Settings, models: list[torch.nn.Module], process_group: Any = None
) -> None:
    """Attach an optimizer that has BF16 parameters; their names are its own, or those of the model that holds all."""
    params = parameters(optimizer)
    if not any(p.dtype is torch.bfloat16 for p in params):
        return
    whole = next((model for model in models if set(params) <= set(model.parameters())), None)
    model = None if any("param_names" in group for group in optimizer.param_groups) else whole
    own = of_own(settings, optimizer, model, models)
    attach(optimizer, model=model, process_group=process_group, **vars(own))


def of_own(
    settings: Settings, optimizer: torch.optim.Optimizer, model: torch.nn.Module | None, models: list[torch.nn.Module]
) -> Settings:
    """Return the settings with only the rules that fit parameters of this optimizer.

    Raises:
        HmpxError: rules go by names that the optimizer does not know.
    """
    if not settings.rules:
        return settings
    in_models = {p: name for each in models for p, name in names_in(each).items()}
    names = []
    for name, p in named(optimizer, names_in(model) if model is not None else {}):
        names.append(name)
        if settings.way(in_models.get(p, name)) != settings.way(name):
            raise HmpxError(
                f"parameters: {type(optimizer).__name__} knows parameter {in_models[p]!r} as {name!r}, so that other "
                "patterns fit it: give it the named_parameters() of the whole model, or parameters()",
                key=("parameters",),
            )
    return replace(
        settings, parameters=tuple(rule for rule in settings.rules if any(fnmatchcase(name, rule[0]) for name in names))
    )


def unwrapped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer inside a wrapper of Accelerate or Lightning, which looks like what it holds."""
    while (attribute := _WRAPPERS.get(type(optimizer).__module__)) in vars(optimizer):
        optimizer = vars(optimizer)[attribute]
    return optimizer


_WRAPPERS = {
    "accelerate.optimizer": "optimizer",
    "lightning.pytorch.core.optimizer": "_optimizer",
    "pytorch_lightning.core.optimizer": "_optimizer",
}


def facts(recipe: Recipe) -> dict[str, Any]:
    """Return what must be the same on every rank; they may hold the same list under different paths."""
    return asdict(recipe.inlined())


def tell_cast(cast: Sequence[torch.nn.Parameter]) -> None:
    """Log which parameters a recipe has cast."""
    if cast:
        numbers, dtypes = sum(p.numel() for p in cast), " and ".join({dtype_name(p.dtype): None for p in cast})
        logger.info("hmpx: %d parameters (%s numbers) were cast to %s by the recipe", len(cast), f"{numbers:,}", dtypes)


def cast_model(model: torch.nn.Module, recipe: Recipe, undo: contextlib.ExitStack) -> list[torch.nn.Parameter]:
    """Cast the floating parameters of a model in place, and its buffers where a recipe maps dtypes.

    Returns:
        The parameters that had another dtype.

    Raises:
        HmpxError: a parameter must be cast and is replicated or sharded already, or cannot be cast.
    """
    _refuse_lazy(model)
    dtypes = _dtypes(model, recipe)
    others = {p: name for name, p in model.named_parameters() if p.is_floating_point() and p.dtype is not dtypes[p]}
    reduced = replicas()
    for p, name in others.items():
        refuse_shell(p, name)
        if p in reduced or is_sharded(p):
            raise HmpxError(
                f"parameter {name!r} is {p.dtype} and replicated or sharded already: cast it to {dtypes[p]} before the "
                "model is wrapped"
            )
        if p.is_cpu and p.is_shared():
            raise HmpxError(
                f"parameter {name!r} is {p.dtype} in memory that processes share: cast it to {dtypes[p]} before "
                "share_memory(), or the others would not see its updates"
            )
    parts = [name for p, name in others.items() if p.untyped_storage().nbytes() > p.nbytes]
    if parts:
        logger.warning("hmpx: %r and %d more were parts of larger storages, and are no more", parts[0], len(parts) - 1)
    for p in others:
        undo.callback(_assign, p, p.data, p.grad)
        _assign(p, p.data.to(dtypes[p]), None if p.grad is None else p.grad.to(dtypes[p]))
    mapped = recipe.mapped()
    for buffer in model.buffers():
        if buffer.dtype in mapped:
            undo.callback(_assign, buffer, buffer.data, None)
            _assign(buffer, buffer.data.to(mapped[buffer.dtype]), None)
    return [*others]


def _refuse_lazy(model: torch.nn.Module) -> None:
    for name, p in model.named_parameters():
        if isinstance(p, torch.nn.parameter.UninitializedParameter):
            raise HmpxError(
                f"parameter {name!r} of a lazy module has no shape yet: run a batch through the model before"
            )


def _dtypes(model: torch.nn.Module, recipe: Recipe) -> dict[torch.nn.Parameter, torch.dtype]:
    """Return the dtype that each parameter is to have; for a tied one, the first module that holds it decides.

    A frozen parameter stays in low precision if no rule names it, because it has no updates to lose. A frozen shell
    around tensors, such as a quantized parameter, stays because it cannot be cast. FP32 parameters that a model keeps
    on purpose stay, and so do FP64 ones under a recipe of FP32 weights (`kept_dtypes`).
    """
    found: dict[torch.nn.Parameter, torch.dtype] = {}
    mapped, on_purpose, kept, narrowed = recipe.mapped(), kept_in_fp32(model, recipe), [], []
    for module_name, module in zip(module_names(model), model.modules(), strict=True):
        for name, p in module.named_parameters(recurse=False):
            dtype = mapped.get(p.dtype, p.dtype)
            if recipe.parameter_dtype is not None and not mapped:
                dtype = DTYPES[recipe.parameter_dtype]
            stays = p.dtype in LOW_DTYPES.values() and dtype is torch.float32
            if not p.requires_grad and (stays or is_shell(p)):
                dtype = p.dtype
            full_name = f"{module_name}.{name}" if module_name else name
            stated = dtype_of(full_name, recipe.parameters, recipe.module_dtypes)
            if stated is None and p.dtype is torch.float64 and dtype is torch.float32 and not mapped:
                dtype = p.dtype
            elif stated is None and p.dtype is torch.float64 and dtype is not p.dtype:
                narrowed.append(full_name)
            elif stated is None and p in on_purpose and dtype in LOW_DTYPES.values() and not mapped:
                kept.append(full_name)
                dtype = p.dtype
            found.setdefault(p, stated or dtype)
    tell_kept(kept, torch.float32, torch.bfloat16)
    tell_narrowed(narrowed, torch.bfloat16 if not mapped else mapped[torch.float64])
    return found


def _assign(p: torch.Tensor, data: torch.Tensor, grad: torch.Tensor | None) -> None:
    p.grad = None
    p.data = data
    p.grad = grad
