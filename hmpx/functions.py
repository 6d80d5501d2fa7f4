"""A user's own functions as ops: decorators, and dotted names in list files (`torchvision.ops.nms`).

Such a function is an op like any other: its inputs are cast, it is the outermost, nothing inside is cast again. wrapt
carries the decorators, because right binding and signatures matter more here than nanoseconds.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import wrapt

from hmpx import scope
from hmpx.casting import cast_arguments
from hmpx.catalog import Layout
from hmpx.errors import HmpxError, nearest
from hmpx.policy import Rule

logger = logging.getLogger("hmpx")
_LAYOUT = Layout(python=True)
F = TypeVar("F", bound=Callable[..., Any])


def _casting_wrapper(rule: Rule, active: Callable[[], bool]) -> Callable:
    def call(wrapped, instance, args, kwargs):
        if not active():
            return wrapped(*args, **kwargs)
        args, kwargs = cast_arguments(rule, _LAYOUT, args, kwargs)
        return scope.run_uncast(wrapped, args, kwargs)

    return call


def bf16(function: F) -> F:
    """Decorate a function so that, under `convert()`, its floating tensor arguments come as bfloat16.

    Lists, tuples and dicts of tensors are cast too; float64, integer, sparse and other tensors are not. Nothing inside
    the function is cast again. Without `convert()`, or inside `disable_casts()`, the call is the plain one.
    """
    return wrapt.FunctionWrapper(function, _casting_wrapper(Rule.BF16, scope.casts_on))


def fp32(function: F) -> F:
    """Decorate a function so that, under `convert()`, its floating tensor arguments come as float32. See `bf16`."""
    return wrapt.FunctionWrapper(function, _casting_wrapper(Rule.FP32, scope.casts_on))


def promote(function: F) -> F:
    """Decorate a function so that its floating tensor arguments come in the widest dtype among them. See `bf16`."""
    return wrapt.FunctionWrapper(function, _casting_wrapper(Rule.PROMOTE, scope.casts_on))


class UserFunctions:
    """The dotted names of one policy: patched where they stand now, or as soon as their module is imported."""

    def __init__(self, rules: dict[str, Rule], origins: dict[str, str]) -> None:
        self.rules = rules
        self.origins = origins
        self.patched: dict[str, tuple[Any, str, Any, Any]] = {}
        self._retired = False

    @property
    def waiting(self) -> list[str]:
        """Names whose module is not imported yet."""
        return [name for name in self.rules if name not in self.patched]

    def apply(self) -> None:
        for name in self.rules:
            module = _longest_module(name)
            if module is not None:
                self._patch(name, module)
            if name not in self.patched:
                self._await(name)

    def _await(self, name: str) -> None:
        parent = name.rpartition(".")[0]
        if not _findable(parent.partition(".")[0]):
            logger.warning(
                "%s: %s is not importable now; it is patched if it appears", self.origins.get(name, name), name
            )
        # A name may lie in a module (pkg.ops.nms) or in a class of one (pkg.ops.Box.area): wait for both.
        for module in {parent, parent.rpartition(".")[0]} - {""}:
            wrapt.register_post_import_hook(lambda loaded, name=name: self._imported(name, loaded), module)

    def _imported(self, name: str, module: Any) -> None:
        if not self._retired and name not in self.patched:
            self._patch(name, module, late=True)

    def _patch(self, name: str, module: Any, late: bool = False) -> None:
        path = name.removeprefix(module.__name__ + ".")
        try:
            owner, attribute, original = wrapt.resolve_path(module, path)
        except AttributeError:
            if late or _is_package(module):
                return  # a submodule of that name may still come
            message = f"{self.origins.get(name, name)}: {module.__name__} has no {path!r}{nearest(path, dir(module))}"
            raise HmpxError(message) from None
        rule = self.rules[name]
        if not callable(original) and not isinstance(original, staticmethod | classmethod):
            raise HmpxError(f"{self.origins.get(name, name)}: {name} is no function but {original!r}")
        wrapper = wrapt.FunctionWrapper(original, _casting_wrapper(rule, self._active))
        setattr(owner, attribute, wrapper)
        self.patched[name] = owner, attribute, original, wrapper

    def _active(self) -> bool:
        return not self._retired and scope.casts_on()

    def restore(self) -> None:
        self._retired = True
        for name, (owner, attribute, original, wrapper) in self.patched.items():
            if vars(owner).get(attribute) is wrapper:
                setattr(owner, attribute, original)
            else:
                logger.warning("%s was patched again after convert(); that patch stays", name)
        self.patched.clear()

    def replacements(self) -> dict[Any, Any]:
        """Original -> wrapper, of what is patched now."""
        return {original: wrapper for _, _, original, wrapper in self.patched.values()}


def _longest_module(name: str) -> Any | None:
    """The imported module that the longest prefix of `name` names."""
    prefix = name.rpartition(".")[0]
    while prefix:
        if prefix in sys.modules:
            return sys.modules[prefix]
        prefix = prefix.rpartition(".")[0]
    return None


def _is_package(module: Any) -> bool:
    return hasattr(module, "__path__")


def _findable(top_level: str) -> bool:
    try:
        return importlib.util.find_spec(top_level) is not None
    except (ImportError, ValueError):
        return False
