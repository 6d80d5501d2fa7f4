"""A user's own functions as ops: decorators, and dotted names in list files (`torchvision.ops.nms`).

Such a function is an op like any other: its inputs are cast, it is the outermost, nothing inside is cast again. What is
no plain function (methods of classes, builtins) is wrapped by wrapt, which binds it right; it costs more per call.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import logging
import os
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Mapping
from time import perf_counter
from typing import Any, TypeVar

import wrapt

from hmpx import process_state, region_state
from hmpx.casts.captured_names.rebinding import Rebinding
from hmpx.casts.layouts import Layout
from hmpx.casts.observing import Point, Seen, observed
from hmpx.casts.op_lists import shipped
from hmpx.casts.patch_table import Patch, Patching
from hmpx.casts.policy import Rule
from hmpx.casts.rules import cast_arguments
from hmpx.changes import Changes
from hmpx.errors import HmpxError, UnknownOpError, did_you_mean

logger = logging.getLogger("hmpx")
_LAYOUT = Layout(python=True)
_HEAP_TYPE = 1 << 9  # the flag of a type made by a class statement
Function = TypeVar("Function", bound=Callable[..., Any])


def _wrap(function: Any, rule: Rule, name: str, active: Callable[[], bool]) -> Any:
    """`function` with its inputs cast while `active()`."""
    plain = inspect.unwrap(getattr(function, "__func__", function))
    if not callable(plain) or isinstance(plain, type):
        raise HmpxError(f"{name} is no function but {plain!r}; {rule} is for functions and methods")
    if any(
        test(plain) for test in (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)
    ):
        raise HmpxError(
            f"{name} is a generator or coroutine function, whose body runs after the call; list what it calls"
        )

    def call(wrapped, instance, args, kwargs):
        observer = process_state.observer
        if observer is None:
            return _called(wrapped, rule, active, *args, **kwargs)
        plain, run = (functools.partial(each, wrapped, rule, active) for each in (_called, _seen))
        return observed(Point(name, name, rule, wrapped), observer, plain, run, sys._getframe(1), args, kwargs)

    if not inspect.isfunction(function):
        return UserFunction(function, call)

    # A function around a function, because torch.compile takes a wrapt proxy for what it wraps, casts left out.
    @functools.wraps(function)
    def caller(*args, **kwargs):
        return call(function, None, args, kwargs)

    return caller


def _called(function: Callable, rule: Rule, active: Callable[[], bool], *args: Any, **kwargs: Any) -> Any:
    if not active():
        return function(*args, **kwargs)
    return region_state.run_uncast(function, *cast_arguments(rule, _LAYOUT, args, kwargs))


def _seen(function: Callable, rule: Rule, active: Callable[[], bool], *args: Any, **kwargs: Any) -> Seen:
    casting = active()
    if casting:
        args, kwargs = cast_arguments(rule, _LAYOUT, args, kwargs)
    began = perf_counter()
    result = region_state.run_uncast(function, args, kwargs) if casting else function(*args, **kwargs)
    return Seen(args, kwargs, result, casting, began, perf_counter())


class UserFunction(wrapt.FunctionWrapper):
    """A wrapped function that copies and pickles as functions do: itself, by its name."""

    def __copy__(self):
        return self

    def __deepcopy__(self, memo: dict):
        return self

    def __reduce_ex__(self, protocol):
        return self.__wrapped__.__qualname__


def _decorator(function: Function, rule: Rule) -> Function:
    return _wrap(function, rule, getattr(function, "__qualname__", repr(function)), region_state.casts_on)


def bf16(function: Function) -> Function:
    """Decorate a function so that, under `convert()`, its floating tensor arguments come as bfloat16.

    That holds whatever `low_precision` the conversion has. Lists, tuples and dicts of tensors are cast too; float64,
    integer, sparse and other tensors are not. Nothing inside the function is cast again. Without `convert()`, or inside
    `disable_casts()`, the call is the plain one.

    Raises:
        HmpxError: what is decorated is a class, or a generator or coroutine function.

    Example:
        >>> @hmpx.bf16
        ... def product(x, y):
        ...     return x * y
        >>> with hmpx.convert():
        ...     product(inputs, inputs).dtype
        torch.bfloat16
    """
    return _decorator(function, Rule.BF16)


def fp16(function: Function) -> Function:
    """Decorate a function so that, under `convert()`, its floating tensor arguments come as float16. See `bf16`.

    Example:
        >>> @hmpx.fp16
        ... def product(x, y):
        ...     return x * y
        >>> with hmpx.convert():
        ...     product(inputs, inputs).dtype
        torch.float16
    """
    return _decorator(function, Rule.FP16)


def fp32(function: Function) -> Function:
    """Decorate a function so that, under `convert()`, its floating tensor arguments come as float32. See `bf16`.

    Example:
        >>> @hmpx.fp32
        ... def product(x, y):
        ...     return x * y
        >>> with hmpx.convert():
        ...     product(inputs.bfloat16(), inputs.bfloat16()).dtype
        torch.float32
    """
    return _decorator(function, Rule.FP32)


def promote(function: Function) -> Function:
    """Decorate a function so that its floating tensor arguments come in the widest dtype among them. See `bf16`.

    Example:
        >>> @hmpx.promote
        ... def product(x, y):
        ...     return x * y
        >>> with hmpx.convert():
        ...     product(inputs, inputs.bfloat16()).dtype
        torch.float32
    """
    return _decorator(function, Rule.PROMOTE)


def _imported(module: Any) -> None:
    for functions in list(process_state.awaited.pop(module.__name__, ())):
        functions._take(module)


class UserFunctions:
    """The dotted names of one policy: patched where they stand now, or as soon as their module is imported."""

    def __init__(
        self, rules: Mapping[str, Rule], origins: Mapping[str, str], rebinding: Rebinding | None = None
    ) -> None:
        self._rebinding = rebinding
        self.rules = rules
        self.origins = origins
        self.patched: dict[str, Patch] = {}
        self._retired = False

    def check(self) -> None:
        """Raise `UnknownOpError` for a name that its imported module does not have; nothing is changed."""
        for name in self.rules:
            module, found = _longest_module(name), None
            if module is not None:
                found = self._find(name, *module)
            if found is not None:
                owner, _, original = found
                if isinstance(owner, type) and not owner.__flags__ & _HEAP_TYPE:
                    raise UnknownOpError(f"{self._where(name)}: {owner.__name__} is a type in C and cannot be changed")
                _wrap(original, self.rules[name], f"{self._where(name)}: {name}", self._active)

    @property
    def waiting(self) -> list[str]:
        """Names in a user's lists whose module is not imported yet."""
        waiting = [name for name in self.rules if name not in self.patched and not self._ships(name)]
        return [] if self._retired else waiting

    def _ships(self, name: str) -> bool:
        """Whether a list that comes with hmpx has the name: then nothing is said of it where it is not found."""
        return os.path.realpath(self.origins.get(name, "")).startswith(f"{os.path.realpath(shipped())}{os.sep}")

    def apply(self, changes: Changes) -> None:
        """Patch what is imported, until `changes` are undone."""
        self._changes = changes
        changes.callback(self._retire)
        for name in self.rules:
            module = _longest_module(name)
            if module is None or not self._patch(name, *module):
                self._await(name)

    def _find(self, name: str, prefix: str, module: Any) -> tuple[Any, str, Any] | None:
        """Owner, attribute and function; None where a submodule of that name may still come."""
        path = name.removeprefix(prefix + ".")
        try:
            return wrapt.resolve_path(module, path)
        except AttributeError:
            if hasattr(module, "__path__") or self._ships(name):
                return None
            message = f"{self._where(name)}: {prefix} has no {path!r}{did_you_mean(path, dir(module))}"
            raise UnknownOpError(message) from None

    def _patch(self, name: str, prefix: str, module: Any) -> bool:
        found = self._find(name, prefix, module)
        if found is None:
            return False
        owner, attribute, original = found
        rule, inherited = self.rules[name], attribute not in vars(owner)
        wrapper = _wrap(original, rule, name, self._active)
        patch = Patch(name, Patching.CAST, rule, name, owner, attribute, original, wrapper, inherited)
        if self._rebinding is not None:
            self._rebinding.expect(lambda: _replacements([patch]))
        self._changes.put(patch.place, patch.wrapper)
        self.patched[name] = patch
        return True

    def _await(self, name: str) -> None:
        parent = name.rpartition(".")[0]
        if not self._ships(name) and not _findable(parent.partition(".")[0]):
            logger.warning("%s: %s is not importable now; it is patched if it appears", self._where(name), name)
        # A name may lie in a module (pkg.ops.nms) or in a class of one (pkg.ops.Box.area): wait for both.
        for module in {parent, parent.rpartition(".")[0]} - {""}:
            known = module in process_state.awaited
            process_state.awaited.setdefault(module, weakref.WeakSet()).add(self)
            if not known:
                wrapt.register_post_import_hook(_imported, module)

    def _take(self, module: Any) -> None:
        """Patch what was waited for in a module that has just been imported."""
        for name in () if self._retired else self.waiting_for(module.__name__):
            try:
                if self._patch(name, module.__name__, module) and self._rebinding is not None:
                    self._rebinding.add_imported(_replacements([self.patched[name]]), _package(name))
            except HmpxError as error:  # an import is no place to raise; the handle goes on to say that it escaped
                logger.warning("%s", error)

    def waiting_for(self, module: str) -> list[str]:
        return [name for name in self.rules if name.startswith(f"{module}.") and name not in self.patched]

    def _where(self, name: str) -> str:
        return self.origins.get(name, "policy")

    def _active(self) -> bool:
        return not self._retired and region_state.casts_on()

    def _retire(self) -> None:
        self._retired = True
        for waiting in process_state.awaited.values():
            waiting.discard(self)

    def replacements(self) -> list[tuple[Any, Any]]:
        """Originals and wrappers, for names captured elsewhere."""
        return _replacements(self.patched.values())


def _replacements(patches: Iterable[Patch]) -> list[tuple[Any, Any]]:
    """A method is found through its class, so it has none."""
    return [(patch.original, patch.wrapper) for patch in patches if not isinstance(patch.owner, type)]


def _package(name: str) -> list[types.ModuleType]:
    """The imported modules of the package that a dotted name is in, one of which may define what another offers."""
    package = name.partition(".")[0]
    modules = [(each, module) for each, module in list(sys.modules.items()) if each.partition(".")[0] == package]
    return [module for _, module in modules if issubclass(type(module), types.ModuleType)]  # no `__class__` of a proxy


def _longest_module(name: str) -> tuple[str, Any] | None:
    """The longest prefix of `name` that is an imported module, and the module."""
    prefix = name.rpartition(".")[0]
    while prefix:
        if sys.modules.get(prefix) is not None:
            return prefix, sys.modules[prefix]
        prefix = prefix.rpartition(".")[0]
    return None


def _findable(top_level: str) -> bool:
    try:
        return importlib.util.find_spec(top_level) is not None
    except (ImportError, ValueError):
        return False
