"""The parameters of an optimizer and their names, which the rounding key depends on."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from weakref import WeakKeyDictionary

import torch

from hmpx.errors import HmpxError

logger = logging.getLogger("hmpx")
Parameter = torch.nn.Parameter
Optimizer = torch.optim.Optimizer

_told_of_positions = False
# Of an optimizer inside another one: the names that the outer one knows.
_shared_names: WeakKeyDictionary[Optimizer, dict[Parameter, str]] = WeakKeyDictionary()
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")  # prefixes inside a wrapped module


def parameters(optimizer: Optimizer) -> list[Parameter]:
    """Return every parameter of `optimizer`, in the order of its groups."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def has_bf16(optimizer: Optimizer) -> bool:
    """Whether some parameter of `optimizer` is BF16."""
    return any(p.dtype is torch.bfloat16 for p in parameters(optimizer))


def named(optimizer: Optimizer, names: dict[Parameter, str]) -> Iterator[tuple[str, Parameter]]:
    """Yield every parameter with its name: from `names`, from `named_parameters()`, or else its position.

    A name that another parameter has already gets a ``#``, so that no two parameters have the same random numbers.
    """
    index = 0
    names = {**_shared_names.get(optimizer, {}), **names}
    taken = set(names.values())
    of_groups = iter(plain_names([name for group in optimizer.param_groups for name in group.get("param_names", ())]))
    for group in optimizer.param_groups:
        for p in group["params"]:
            in_group = next(of_groups) if "param_names" in group else None
            name = names.get(p)
            if name is None:
                name = _position(index, p) if in_group is None else in_group
                while name in taken:
                    name += "#"
                taken.add(name)
            yield name, p
            index += 1


def membership(optimizer: Optimizer) -> tuple | None:
    """Return everything that `named` depends on, with the group of each parameter; None if that cannot be known.

    The names that `attach` was given do not change.
    """
    if optimizer in _shared_names:
        return None
    groups = [(len(group["params"]), list(group.get("param_names", ()))) for group in optimizer.param_groups]
    return list(map(id, parameters(optimizer))), groups


def share(outer: Optimizer, inner: Optimizer) -> None:
    """Give the parameters of `inner` the names, or the positions, that they have in `outer`."""
    shared = _shared_names.setdefault(inner, {})
    if len(shared) != len(parameters(outer)):
        shared.update((p, name) for name, p in named(outer, {}))


def plain_names(names: list[str]) -> list[str]:
    """Strip prefixes that torch.compile, checkpointing and DistributedDataParallel add to the names of a model."""
    for wrapper in _WRAPPERS:
        names = [name.replace(wrapper, "") for name in names]
    while names and all(name.startswith("module.") for name in names):
        names = [name.removeprefix("module.") for name in names]
    return names


def names_in(model: torch.nn.Module) -> dict[Parameter, str]:
    """Return the parameters of a model, each with its plain name."""
    in_model = dict(model.named_parameters())
    return dict(zip(in_model.values(), plain_names(list(in_model)), strict=True))


def _position(index: int, p: Parameter) -> str:
    global _told_of_positions
    if p.dtype is torch.bfloat16 and not _told_of_positions:
        _told_of_positions = True
        logger.info(
            "hmpx: parameters without names: rounding is keyed by position; give the optimizer named_parameters()"
        )
    return str(index)


def given_names(
    optimizer: Optimizer, model: torch.nn.Module | None, names: Iterable[str] | None
) -> dict[Parameter, str]:
    """Return the names that `attach` was given, by parameter; none if they come from `named_parameters()`.

    Raises:
        HmpxError: a name is no printable string, or is there twice; or names and parameters do not match.
    """
    params = parameters(optimizer)
    if model is not None and names is not None:
        raise HmpxError("names come from the model or from the list, not from both")
    if model is not None:
        if not isinstance(model, torch.nn.Module):
            raise HmpxError(f"model is a {type(model).__name__}, not a torch.nn.Module")
        named = names_in(model)
        missing = [i for i, p in enumerate(params) if p not in named]
        if missing:
            raise HmpxError(f"parameter {missing[0]} of the optimizer is not in the model")
        return named
    if names is None:
        given = [name for group in optimizer.param_groups for name in group.get("param_names", ())]
        _check(given)
        return {}
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise HmpxError(f"names is {names!r}, not a list of strings")
    given = list(names)
    if len(given) != len(params):
        raise HmpxError(f"{len(given)} names for {len(params)} parameters")
    _check(given)
    return dict(zip(params, given, strict=True))


def _check(names: list[str]) -> None:
    seen: dict[str, int] = {}
    for i, name in enumerate(names):
        if not isinstance(name, str):
            raise HmpxError(f"the name of parameter {i} is {name!r}, not a string")
        if not name.isprintable():
            raise HmpxError(f"the name of parameter {i} is {name!r}, which cannot be printed")
        if name in seen:
            raise HmpxError(f"the name {name!r} is given to parameters {seen[name]} and {i}")
        seen[name] = i
