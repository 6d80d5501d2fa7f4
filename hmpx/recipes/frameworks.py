"""Settings of training frameworks that conflict with a recipe: one table for all of hmpx.

The integrations and `prepare` raise for a conflict before anything is changed. `activate`, and so ``python -m hmpx
run``, warns of it once. Frameworks are read through the objects that a user makes; nothing here imports one.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from hmpx.base.awaited import when_imported
from hmpx.base.changes import Changes
from hmpx.errors import Fault, raise_faults
from hmpx.recipes.constructor_hooks import constructor_watch
from hmpx.recipes.recipe import Recipe

logger = logging.getLogger("hmpx")

AUTOCAST, MODEL_DTYPE, ENGINE = "autocast", "model dtype", "engine"
ACCUMULATION, GRADIENT_NORM = "accumulation", "gradient norm"


@dataclass(frozen=True)
class FrameworkSetting:
    """One setting of a framework: in the words of the user's script, what it does, and what to write instead."""

    words: str
    what: str
    instead: str = "leave it out"


def of_accelerate() -> Iterator[FrameworkSetting]:
    """Yield what the `Accelerator` of this process was asked for; nothing if there is none."""
    states = sys.modules.get("accelerate.state")
    if states is None:
        return
    precision = states.AcceleratorState._shared_state.get("_mixed_precision", "no")
    if precision not in ("no", None):
        yield FrameworkSetting(f"Accelerator(mixed_precision={str(precision)!r})", AUTOCAST)
    if str(states.PartialState._shared_state.get("distributed_type")).endswith("DEEPSPEED"):
        yield FrameworkSetting("Accelerate's DeepSpeed plugin", ENGINE)
    steps = (states.GradientState._shared_state.get("plugin_kwargs") or {}).get("num_steps", 1)
    if steps > 1:
        yield FrameworkSetting(f"Accelerator(gradient_accumulation_steps={steps})", ACCUMULATION)


def of_transformers(arguments: Any) -> Iterator[FrameworkSetting]:
    """Yield what `TrainingArguments` ask for, and Accelerate below them."""
    for name in ("bf16", "fp16", "bf16_full_eval", "fp16_full_eval"):
        if getattr(arguments, name, False):
            what = MODEL_DTYPE if name.endswith("full_eval") else AUTOCAST
            kind = type(arguments).__name__
            by_itself = "" if kind == "TrainingArguments" else f", which {kind} sets by itself"  # TRL's do
            yield FrameworkSetting(f"{kind}({name}=True)", what, f"write {name}=False{by_itself}")
    if not (getattr(arguments, "bf16", False) or getattr(arguments, "fp16", False)):  # `accelerate launch` may have
        yield from (asked for asked in of_accelerate() if asked.what == AUTOCAST)
    if getattr(arguments, "deepspeed", None):
        yield FrameworkSetting("TrainingArguments(deepspeed=...)", ENGINE)
    if arguments.gradient_accumulation_steps > 1:
        steps = arguments.gradient_accumulation_steps
        yield FrameworkSetting(f"TrainingArguments(gradient_accumulation_steps={steps})", ACCUMULATION)
    # With max_grad_norm=0 the Trainer still measures the norm, to log it.
    yield FrameworkSetting(f"TrainingArguments(max_grad_norm={arguments.max_grad_norm})", GRADIENT_NORM)


def of_lightning(trainer: Any) -> Iterator[FrameworkSetting]:
    """Yield what a `Trainer` of Lightning was asked for."""
    precision = getattr(trainer.precision_plugin, "precision", "32-true")
    if not hasattr(trainer.precision_plugin, "recipe") and precision != "32-true":
        yield FrameworkSetting(
            f"Trainer(precision={precision!r})", AUTOCAST if precision.endswith("mixed") else MODEL_DTYPE
        )
    if type(trainer.strategy).__name__ == "DeepSpeedStrategy":
        yield FrameworkSetting("Trainer(strategy=DeepSpeedStrategy())", ENGINE)
    if trainer.accumulate_grad_batches > 1:
        yield FrameworkSetting(f"Trainer(accumulate_grad_batches={trainer.accumulate_grad_batches})", ACCUMULATION)
    if any(type(callback).__name__ == "GradientAccumulationScheduler" for callback in trainer.callbacks):
        yield FrameworkSetting("the callback GradientAccumulationScheduler", ACCUMULATION)
    if trainer.gradient_clip_val:
        yield FrameworkSetting(f"Trainer(gradient_clip_val={trainer.gradient_clip_val})", GRADIENT_NORM)


def conflict(asked: FrameworkSetting, recipe: Recipe) -> str:
    """Return why a setting conflicts with a recipe, and the way out; an empty string if it does not."""
    if asked.what == AUTOCAST and recipe.opt_level is not None:
        why = "its torch.autocast would cast the ops once more, by lists of its own"
        return (
            f"{asked.words} beside a recipe: {why}; {asked.instead}: the recipe says which op runs in which precision"
        )
    if asked.what == MODEL_DTYPE:
        why = "it casts the model itself, and the recipe says which dtype the weights have"
        return f"{asked.words} beside a recipe: {why}; {asked.instead}"
    if asked.what == ENGINE:
        return f"{asked.words} beside a recipe: DeepSpeed holds and updates weights in an engine of its own; take one"
    if asked.what in (ACCUMULATION, GRADIENT_NORM) and recipe.release_gradients:
        why = "adds up gradients" if asked.what == ACCUMULATION else "clips or measures gradients before the step"
        return (
            f"{asked.words} {why}, which the recipe's release_gradients has freed by then; take a recipe with "
            "release_gradients: false"
        )
    return ""


def refuse(everything: Iterable[FrameworkSetting], recipe: Recipe) -> None:
    """Raise for settings that conflict with a recipe.

    Raises:
        HmpxError: every conflict, one a line.
    """
    raise_faults(
        Fault(why, key=("release_gradients",) if each.what in (ACCUMULATION, GRADIENT_NORM) else ())
        for each in everything
        if (why := conflict(each, recipe))
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

# The constructors that are watched, by their module, and how to read what they were given.
_CONSTRUCTORS: dict[str, tuple[str, Callable[[Any], Iterable[FrameworkSetting]]]] = {
    "accelerate.accelerator": ("Accelerator", lambda accelerator: of_accelerate()),
    "transformers.trainer": ("Trainer", lambda trainer: of_transformers(trainer.args)),
    "lightning.pytorch.trainer.trainer": ("Trainer", of_lightning),
    "pytorch_lightning.trainer.trainer": ("Trainer", of_lightning),
}


def watch_frameworks(recipe: Recipe, changes: Changes) -> None:
    """Warn of each conflict once, when a framework's trainer has been made, until `changes` are undone."""
    said: set[FrameworkSetting] = set()

    def made(trainer: Any) -> None:  # a Trainer makes an Accelerator: the outer one is seen
        cls = next(each for each in type(trainer).__mro__ if each.__module__ in _CONSTRUCTORS)
        for asked in _CONSTRUCTORS[cls.__module__][1](trainer):
            if asked not in said and (why := conflict(asked, recipe)):
                said.add(asked)
                logger.warning("hmpx: %s", why)

    def imported(name: str, module: ModuleType) -> None:
        watch(getattr(module, name))

    watch = constructor_watch(made, changes)
    for path, (name, _) in _CONSTRUCTORS.items():
        when_imported(path, functools.partial(imported, name), changes)
