"""Finds the modules that a recipe's patterns fit, and makes their rules.

A pattern is a name (``"*.attn"``) or a role (``"<head>"``, ``"<norms>"``, ``"<routers>"``, ``"<last 15%>"``): what a
module is for, whatever its name. A role that a model need not have ends in "?".
"""

from __future__ import annotations

import contextlib
import functools
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch

from hmpx.errors import HmpxError, did_you_mean, there_are
from hmpx.ops.module_rules import ModuleRule, modules_called_in, never_called
from hmpx.ops.overlays import Overlay
from hmpx.recipes.keys import HEAD, LAST, MODULES, NORMS, PARAMETERS, ROUTERS
from hmpx.recipes.recipe import Recipe
from hmpx.updates.holding.stores import fits_none
from hmpx.updates.stepping.names import names_in, plain_names

Module = torch.nn.Module
logger = logging.getLogger("hmpx")
HEAD_NAMES = ("lm_head", "head", "output", "embed_out")  # what models call their head; the first that is there counts
_ROUTER, _ROUTER_CLASS = re.compile(r"(^|[._])(gate|router)$"), re.compile(r"(Gate|Router)$")
_DIGITS = re.compile(r"(?<![^.])\d+(?![^.])")


def module_names(model: Module, *, all_names: bool = False) -> list[str]:
    """Return the names of ``model.modules()`` without torch's wrappers; with `all_names`, a tied module has several."""
    _, *inside = (f"{name}." for name, _ in model.named_modules(remove_duplicate=not all_names))
    return ["", *(name.removesuffix(".") for name in plain_names(inside))]


def check_names(models: list[Module], recipe: Recipe) -> None:
    """Check that each pattern in `modules` fits some module, and in `parameters` some parameter.

    Raises:
        HmpxError: one does not; with the name that was probably meant.
    """
    modules = {name: module for model in models for name, module in _named(model)}
    for pattern in recipe.modules:
        key = MODULES, pattern
        if role := _role(pattern):
            find, looked_for = role
            if not pattern.endswith("?") and not any(map(find, models)):
                kinds = ", ".join(type(model).__name__ for model in models)
                said = f"{MODULES}: {pattern!r} is no module of {kinds}: looked for {looked_for}"
                raise HmpxError(said, key=key)
        elif not any(fnmatchcase(name, pattern) for name in modules):
            classes = (name for name, module in modules.items() if name and type(module).__name__ == pattern)
            meant = next(classes, None)
            inner = [name for name in modules if name]
            hint = did_you_mean(pattern, inner, meant=meant) or there_are(inner)
            what = "a class and not the name of a module" if meant else "the name of no module"
            raise HmpxError(f"{MODULES}: {pattern!r} is {what}{hint}", key=key)
    names = [name for model in models for name in names_in(model).values()] if recipe.parameters else []
    tied = {other: name for model in models for other, name in _tied(model)} if recipe.parameters else {}
    for pattern in recipe.parameters:
        others = [(other, name) for other, name in tied.items() if fnmatchcase(other, pattern)]
        problem = fits_none(pattern, names)
        if problem and others:
            other, name = others[0]
            what = "" if other == pattern else f" fits {other!r}, which"
            problem = f"{PARAMETERS}: {pattern!r}{what} is tied to {name!r}, whose name decides"
        elif others := [(other, name) for other, name in others if not fnmatchcase(name, pattern)]:
            other, name = others[0]
            logger.warning(
                f"{PARAMETERS}: {pattern!r} does not hold for {other!r}, which is tied to {name!r}, whose name decides"
            )
        if problem:
            raise HmpxError(problem, key=(PARAMETERS, pattern))


def rules_for(models: Iterable[Module], recipe: Recipe) -> list[ModuleRule]:
    """Make the rules that a recipe has for the modules of some models; they are not in force yet.

    Of several patterns that fit one of a module's names, the last decides.

    Raises:
        HmpxError: a module that can have no rule, or a pattern that would do nothing.
    """
    overlays = recipe.overlays()
    if not overlays:
        return []
    found: list[ModuleRule] = []
    idle: dict[str, str] = {}  # why a pattern has done nothing so far
    for model in models:
        chosen = deciding_patterns(model, list(overlays))
        for module, pattern in chosen.items():
            why = never_called(module)
            idle[pattern] = why if pattern not in idle else why and idle[pattern]
            if not why:
                hiding = _hiding(module, chosen, overlays)
                if hiding:
                    _warn(pattern, module, hiding)
                with _of_pattern(pattern):
                    found.append(ModuleRule(module, overlays[pattern], casts_arguments=not hiding))
    for pattern, why in idle.items():
        with _of_pattern(pattern):
            if why:
                raise HmpxError(why)
    return found


def deciding_patterns(model: Module, patterns: list[str]) -> dict[Module, str]:
    """Return the last pattern that fits each module, by one of its names or by its role."""
    names: dict[Module, list[str]] = {}
    for name, module in _named(model):
        names.setdefault(module, []).append(name)
    of_role = {pattern: role[0](model) for pattern in patterns if (role := _role(pattern))}

    def fits(pattern: str, module: Module) -> bool:
        if pattern in of_role:
            return module in of_role[pattern]
        return any(fnmatchcase(name, pattern) for name in names[module])

    fitting = {module: [pattern for pattern in patterns if fits(pattern, module)] for module in names}
    return {module: its[-1] for module, its in fitting.items() if its}


def _head(model: Module) -> set[Module]:
    """Return the modules that make the logits: by `get_output_embeddings`, else by a tied weight, else by name."""
    modules = set(model.modules())
    if said := {head for each in modules if isinstance(head := _said_head(each), Module) and head in modules}:
        return said
    embeddings = [each for each in modules if isinstance(each, torch.nn.Embedding)]
    shared = {p for each in embeddings for p in each.parameters(recurse=False)}
    holding = {each for each in modules if not shared.isdisjoint(each.parameters(recurse=False))}
    if tied := {each for each in holding if isinstance(each, torch.nn.Linear)}:
        return {*tied}
    named = [(name, module) for name, module in _named(model) if name.rpartition(".")[2] in HEAD_NAMES]
    alike = Counter(_DIGITS.sub("*", name) for name in dict(named))
    once = [(name, module) for name, module in named if alike[_DIGITS.sub("*", name)] == 1]  # not in every layer
    for called in HEAD_NAMES:
        if own := [(name.count("."), module) for name, module in once if name.rpartition(".")[2] == called]:
            outermost = min(depth for depth, _ in own)
            return {module for depth, module in own if depth == outermost}
    return set()


def _said_head(module: Module) -> Any:
    """Return the head that a model of transformers, or one with the same method, names; None if it has none."""
    ask = getattr(module, "get_output_embeddings", None)
    try:
        return ask() if callable(ask) else None
    except NotImplementedError:
        return None


def _norms(model: Module) -> set[Module]:
    """Return the norm layers, without modules that only contain a norm, such as a block of norm and convolution."""
    return {
        module
        for module in model.modules()
        if "Norm" in type(module).__name__
        and not any(p.dim() > 1 for child in module.children() for p in child.parameters())
    }


def _routers(model: Module) -> set[Module]:
    """Return what chooses experts, by its name or that of its class."""
    called = ((name, module) for name, module in _named(model) if _narrows(module))
    return {module for name, module in called if _ROUTER.search(name) or _ROUTER_CLASS.search(type(module).__name__)}


def _narrows(module: Module) -> bool:
    """Return whether a module has at most half as many outputs as inputs, by its matrices."""
    matrices = [p for p in module.parameters() if p.dim() == 2]
    rows, columns = (max((p.shape[dim] for p in matrices), default=0) for dim in (0, 1))
    return 0 < 2 * rows <= columns


def _last_blocks(model: Module, percent: int) -> set[Module]:
    """Return the last blocks of a model, at least this part: of the largest container of modules of one class."""
    containers = (each for each in model.modules() if isinstance(each, _CONTAINERS) and len(each) > 1)
    alike = [list(each.children()) for each in containers if len(set(map(type, each.children()))) == 1]
    blocks = max(alike, key=lambda its: sum(p.numel() for block in its for p in block.parameters()), default=[])
    return set(blocks[len(blocks) - -(-len(blocks) * percent // 100) :])


def with_role(model: Module, role: str) -> set[Module]:
    """Return the modules of a model that have one of the roles `HEAD`, `NORMS` and `ROUTERS`."""
    return _ROLES[role][0](model)


def _role(pattern: str) -> _Role | None:
    """Return how the modules of a role are found and what is looked for; None if the pattern is a name."""
    pattern = pattern.removesuffix("?")
    if last := LAST.fullmatch(pattern):
        looked_for = "a ModuleList, ModuleDict or Sequential of blocks of one class; write their names in its place"
        return functools.partial(_last_blocks, percent=int(last[1])), looked_for
    return _ROLES.get(pattern)


_CONTAINERS = (torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.Sequential)
_Role = tuple[Callable[[Module], set[Module]], str]
_ROLES: dict[str, _Role] = {
    HEAD: (
        _head,
        "what get_output_embeddings() returns, a Linear that shares its weight with an Embedding, and a module that is "
        f"called {', '.join(HEAD_NAMES[:-1])} or {HEAD_NAMES[-1]}; write the name of the module in its place",
    ),
    NORMS: (
        _norms,
        "modules whose class has 'Norm' in its name and that hold no other layer with a matrix; write the names of the "
        "modules in its place",
    ),
    ROUTERS: (
        _routers,
        "modules called gate or router, or of a class Gate or Router, with at most half as many outputs as inputs; "
        "write the names of the modules in its place",
    ),
}


def _hiding(module: Module, chosen: Mapping[Module, str], overlays: Mapping[str, Overlay]) -> set[str]:
    """Return the patterns that decide all modules inside of a module, if its own rule decides none of them."""
    order, own = list(overlays), chosen[module]
    found = {chosen.get(each, own) for each in modules_called_in(module)}
    hidden = all(order.index(each) < order.index(own) and overlays[each].hides(overlays[own]) for each in found)
    return found if hidden else set()


def _warn(pattern: str, module: Module, hiding: set[str]) -> None:
    them = " and ".join(sorted(map(repr, hiding)))
    logger.warning(
        f"{MODULES}: {pattern!r} decides the ops in the forward of {type(module).__name__} itself and none in the "
        f"modules inside: each has a rule of its own from {them}, and the innermost decides. '' is the whole model as "
        f"one module; {pattern + '.*'!r} is what is inside of {pattern!r}"
    )


@contextlib.contextmanager
def _of_pattern(pattern: str) -> Iterator[None]:
    try:
        yield
    except HmpxError as error:
        raise HmpxError(f"{MODULES}: {pattern!r}: {error}", key=(MODULES, pattern)) from None


def _tied(model: Module) -> Iterator[tuple[str, str]]:
    """Yield the further names of each parameter that has several, with its first name."""
    own = names_in(model)
    named = list(model.named_parameters(remove_duplicate=False))
    for name, (_, p) in zip(plain_names([name for name, _ in named]), named, strict=True):
        if name != own[p]:
            yield name, own[p]


def _named(model: Module) -> Iterator[tuple[str, Module]]:
    """Yield every module under every name that it has."""
    modules = (module for _, module in model.named_modules(remove_duplicate=False))
    return zip(module_names(model, all_names=True), modules, strict=True)
