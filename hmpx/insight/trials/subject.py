"""What is run: a model, its batches and its loss, again and again from one state; and the lists meant."""

from __future__ import annotations

import contextlib
import inspect
import math
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from hmpx.base.torch_private import private, tree_leaves, tree_map
from hmpx.conversion import installed
from hmpx.errors import HmpxError, kind_of
from hmpx.insight.tensors import LOW, Tensor, differentiable, eager, put_back, widened
from hmpx.ops.computing.kernels import KernelsAsked
from hmpx.ops.module_rules import ModuleRule
from hmpx.ops.policies.policy import Policy, build_policy
from hmpx.ops.wrapping.callers import users_frame
from hmpx.ops.wrapping.observing import unobserved
from hmpx.recipes.casting import cast_models
from hmpx.recipes.module_patterns import check_names, rules_for
from hmpx.recipes.reading import as_recipe
from hmpx.recipes.recipe import Recipe

_hooks_of = private("torch.Tensor._post_accumulate_grad_hooks").__get__

Loss = Callable[..., Tensor | tuple[Tensor, Tensor]]  # a scalar, or that and log-probs
_SAME = 1e-5  # relative difference of two FP32 losses that rounding explains


class Stopped(Exception):
    """A comparison cannot go on; its words are the verdict."""


class Subject:
    """A model, its batches, and a loss.

    Each run starts from the same random numbers and buffers, and leaves both, with parameters and their gradients, as
    they were. In FP32, parameters, buffers and inputs in low precision are widened.

    asked: the function that a user has called, for errors. log_probs: those that the loss of the last run returned
    beside its scalar, in FP32; or None.
    """

    log_probs: Tensor | None = None

    def __init__(
        self,
        model: torch.nn.Module,
        batches: Sequence[tuple],
        loss: Loss,
        recipe: Recipe | None,
        asked: str = "compare",
    ) -> None:
        if not isinstance(model, torch.nn.Module):
            raise HmpxError(f"{asked}: model is {kind_of(model)}, not a torch.nn.Module")
        if not callable(loss):
            raise HmpxError(f"{asked}: loss is {kind_of(loss)}; it is called as loss(model, *batch)")
        self._asked, self._recipe = asked, recipe
        self.model, self.batches, self.loss = model, arguments_of(batches, "batches", asked), loss
        self._reentrant: bool | None = None  # whether there is a checkpoint with use_reentrant=True
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.names, self.parameters = [*named], [*named.values()]
        if not self.parameters:
            raise HmpxError(f"{asked}: no parameter of the model requires a gradient")
        _check_arguments(model, self.batches[0], loss, asked)

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Run compiled functions eagerly, and take the gradients that the parameters hold aside until the end."""
        held = [(p, p.grad) for p in self.model.parameters()]
        for p, _ in held:
            p.grad = None
        try:
            with eager():
                yield
        finally:
            for p, gradient in held:
                p.grad = gradient

    def low(self, batch: tuple, gradients: bool = True) -> tuple[float, list[Tensor]]:
        """Run with the parameter dtypes that go with the lists; return the loss, and the gradients in FP32."""
        with contextlib.ExitStack() as undo:
            if self._recipe is not None:
                with unobserved():  # it is no cast that the program makes
                    cast_models([self.model], self._recipe, undo)
            return self._run(batch, gradients)

    def wide(self, batch: tuple, gradients: bool = True) -> tuple[float, list[Tensor]]:
        """Run with everything in FP32; return the same."""
        with contextlib.ExitStack() as undo:
            for tensor in (*self.model.parameters(), *self.model.buffers()):
                if tensor.dtype in LOW:
                    undo.callback(setattr, tensor, "data", tensor.data)
                    tensor.data = widened(tensor.data)
            return self._run(tree_map(widened, batch), gradients)

    def not_finite(self, batch: tuple) -> str:
        """Say which part of the input is not finite; "" where all is."""
        for what, tensors in (("have its inputs", _floats(batch)), ("have parameters", list(self.model.parameters()))):
            if not all(bool(torch.isfinite(tensor).all()) for tensor in tensors):
                return what
        return ""

    def check_repeats(self, exact: float, again: float) -> None:
        """Check that two runs in FP32 of the first batch come to one loss."""
        if math.isfinite(exact) and abs(again - exact) > _SAME * max(abs(exact), abs(again)):
            raise HmpxError(
                f"{self._asked}: the FP32 loss of the first batch is {exact:.9g}, and {again:.9g} when it is computed "
                f"again, {abs(again - exact):.1e} apart: something changes from run to run that is neither a buffer "
                "nor a random generator of torch, NumPy or Python; put it back in loss(model, *batch)"
            )

    def _run(self, batch: tuple, gradients: bool) -> tuple[float, list[Tensor]]:
        with put_back(self.model):
            loss, self.log_probs = self.loss(self.model, *batch), None
            if isinstance(loss, tuple) and len(loss) == 2 and isinstance(loss[1], Tensor):
                loss, log_probs = loss
                with unobserved():
                    self.log_probs = log_probs.detach().float()
            check_loss(loss, self._asked)
            found = self._gradients(loss) if gradients else []
            return float(loss.detach()), found

    def _gradients(self, loss: Tensor) -> list[Tensor]:
        if self._reentrant is None:
            self._reentrant = _has_reentrant_checkpoint(loss)
        found: Sequence[Tensor | None]
        if self._reentrant and not any(map(_hooks_of, self.parameters)):
            loss.backward()  # which such a checkpoint needs, and which would run these hooks
            found = [p.grad for p in self.parameters]
            for p in self.parameters:
                p.grad = None
        else:
            found = torch.autograd.grad(loss, self.parameters, allow_unused=True)
        pairs = zip(self.parameters, found, strict=True)
        with unobserved():
            return [widened(torch.zeros_like(p) if g is None else _dense(g.detach())) for p, g in pairs]


def check_loss(loss: Any, asked: str, has_gradient: bool = True) -> None:
    """Check that a loss is a scalar tensor, and that it has a gradient."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        what = f"tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise HmpxError(f"{asked}: loss(model, *batch) must return a scalar tensor, not a {what}")
    if has_gradient and not loss.requires_grad:
        raise HmpxError(
            f"{asked}: the loss has no gradient: it was computed under torch.no_grad, or detached, or is of another "
            "model than the one that loss is given"
        )


def _has_reentrant_checkpoint(loss: Tensor) -> bool:
    seen, nodes = set(), [loss.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            nodes += [following for following, _ in node.next_functions]
    return any(type(node).__name__ == "CheckpointFunctionBackward" for node in seen)


def place_of(error: Exception) -> str:
    """Return the line of the user's code in which an error was raised, as file:line."""
    places = [
        f"{frame.f_code.co_filename}:{line}"
        for frame, line in traceback.walk_tb(error.__traceback__)
        if users_frame(frame) is frame
    ]
    return places[-1] if places else "?"


def arguments_of(batches: Any, what: str, asked: str) -> list[tuple]:
    """Return batches as tuples of arguments; a list is taken as a tuple, for a DataLoader gives lists."""
    if isinstance(batches, Tensor | dict | str) or not isinstance(batches, Sequence):
        raise HmpxError(f"{asked}: {what} is a list of tuples of arguments, not a {type(batches).__name__}")
    found = [tuple(batch) if isinstance(batch, tuple | list) else (batch,) for batch in batches]
    if not found:
        raise HmpxError(f"{asked}: {what} is empty")
    return found


def _check_arguments(model: torch.nn.Module, batch: tuple, loss: Loss, asked: str) -> None:
    try:
        inspect.signature(loss).bind(model, *batch)
    except TypeError as error:
        raise HmpxError(
            f"{asked}: it calls loss(model, *batch), here with {len(batch)} of a batch: {error}; write "
            "loss(model, inputs, targets), or give batches of one argument: [(batch,), ...]"
        ) from None
    except ValueError:  # it has no signature to look at
        pass


def _dense(gradient: Tensor) -> Tensor:
    return gradient.to_dense() if gradient.is_sparse else gradient


def _floats(result: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and differentiable(leaf.dtype)]


def lists_meant(lists: Any, asked: str = "compare") -> tuple[Policy, Recipe | None, KernelsAsked]:
    """Return the policy that is meant, the recipe whose parameter dtypes go with it, and its kernels.

    asked: the function that a user has called, for errors.
    """
    if lists is None:
        now = installed()
        if now is None:
            return build_policy(), None, "auto"
        if now.dtype_map is not None:
            raise HmpxError(f"{asked}: the conversion in force maps dtypes, so that there is no FP32 beside it")
        return now.policy, None, now.kernels.asked
    if isinstance(lists, Policy):
        return lists, None, "auto"
    recipe = as_recipe(lists)
    policy = recipe.policy()
    if policy is None or recipe.dtype_map:
        why = "leaves ops as they are (opt_level null)" if policy is None else "maps dtypes"
        raise HmpxError(f"{asked}: this recipe {why}, so that there are no op lists to compare with FP32")
    return policy, recipe, recipe.kernels


def rules_meant(lists: Any, recipe: Recipe | None, model: torch.nn.Module) -> list[ModuleRule]:
    """Return the rules for modules that go with the lists: of the recipe, or of the conversion that is in force."""
    now = installed() if lists is None else None
    if now is not None:
        return list(now.rules)
    if recipe is None or not recipe.modules:
        return []
    with recipe.naming_lines():
        check_names([model], recipe)
        return rules_for([model], recipe)
