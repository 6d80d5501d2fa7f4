"""Functions of a user's own that are ops: decorated (`@hmpx.bf16`), or listed by a dotted name (`torchvision.ops.nms`).

The inputs of such a function are cast, it is the outermost op, and nothing inside it is cast again. A listed function
is patched where it stands, now or when its module is imported. Whatever is no plain function (methods of classes,
builtins) is wrapped by wrapt, which binds it right; it costs more per call.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import logging
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from time import perf_counter
from typing import Any, TypeVar

import wrapt
from torch.compiler import is_dynamo_compiling

from hmpx.base import process_state, region_state, run_in_region
from hmpx.base.changes import Changes
from hmpx.base.compiling import when_imported
from hmpx.base.raw import HEAP_TYPE
from hmpx.errors import HmpxError, UnknownOpError, did_you_mean
from hmpx.ops.policies.lists import OpLists, is_shipped, shipped
from hmpx.ops.policies.policy import Policy, Rule
from hmpx.ops.policies.signatures import Signature
from hmpx.ops.rebinding import Rebinding
from hmpx.ops.wrapping.callers import runs_later
from hmpx.ops.wrapping.observing import EntryPoint, Seen, observed, say_beats_island
from hmpx.ops.wrapping.rules import cast_arguments
from hmpx.ops.wrapping.switch import Switch
from hmpx.ops.wrapping.wrappers import Patch, Patching

logger = logging.getLogger("hmpx")
_SIGNATURE = Signature(python=True)
Rules = Mapping[int, Rule | None]  # by scope
Function = TypeVar("Function", bound=Callable[..., Any])


def _decorator(function: Function, rule: Rule) -> Function:
    name = getattr(function, "__qualname__", repr(function))

    def active() -> bool:
        if not region_state.innermost().island:
            return region_state.casts_on()
        if not is_dynamo_compiling():
            say_beats_island(f"@hmpx.{rule} of {name}", sys._getframe(1))
        return process_state.converted

    return _wrap(function, {0: rule}, name, active)


def bf16(function: Function) -> Function:
    """Decorate a function so that, under `convert()`, its floating tensor arguments come as bfloat16.

    That holds whatever `low_precision` the conversion has. Tensors in lists, tuples and mappings are cast too; float64,
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


# The wrapper


def _wrap(function: Any, rules: Rules, name: str, active: Callable[[], bool], where: str = "") -> Any:
    """Return `function` with its inputs cast while `active()`, by the rule of the scope that it is called from.

    rules: by scope; it may get more. where: begins the message where it is no function, or one that runs later.
    """
    some = next(filter(None, rules.values()))
    plain = inspect.unwrap(getattr(function, "__func__", function))
    if not callable(plain) or isinstance(plain, type):
        raise HmpxError(f"{where}{name} is no function but {plain!r}; {some} is for functions and methods")
    if runs_later(plain):
        raise HmpxError(
            f"{where}{name} is a generator or coroutine function, whose body runs after the call; list what it calls"
        )

    def call(wrapped, instance, args, kwargs):
        rule = some if len(rules) == 1 else rules.get(region_state.scope(), rules[0])
        observer = process_state.observer
        if observer is None or rule is None:
            return _called(wrapped, rule, active, *args, **kwargs)
        plain, run = (functools.partial(each, wrapped, rule, active) for each in (_called, _seen))
        return observed(EntryPoint(name, name, rule, wrapped), observer, plain, run, sys._getframe(1), args, kwargs)

    if not inspect.isfunction(function):
        return UserFunction(function, call)

    # A function around a function, because torch.compile takes a wrapt proxy for what it wraps, casts left out.
    @functools.wraps(function)
    def caller(*args, **kwargs):
        return call(function, None, args, kwargs)

    return caller


def _called(function: Callable, rule: Rule | None, active: Callable[[], bool], /, *args: Any, **kwargs: Any) -> Any:
    if rule is None or not active():
        return function(*args, **kwargs)
    return run_in_region.run_uncast(function, *cast_arguments(rule, _SIGNATURE, args, kwargs))


def _seen(function: Callable, rule: Rule, active: Callable[[], bool], /, *args: Any, **kwargs: Any) -> Seen:
    casting = active()
    if casting:
        args, kwargs = cast_arguments(rule, _SIGNATURE, args, kwargs)
    began = perf_counter()
    result = run_in_region.run_uncast(function, args, kwargs) if casting else function(*args, **kwargs)
    return Seen(args, kwargs, result, casting, began, perf_counter())


class UserFunction(wrapt.FunctionWrapper):
    """A wrapped function that copies and pickles as functions do: itself, by its name."""

    def __copy__(self):
        return self

    def __deepcopy__(self, memo: dict):
        return self

    def __reduce_ex__(self, protocol):
        return self.__wrapped__.__qualname__


# Functions that lists name


class UserFunctions:
    """The dotted names of policies: patched where they stand now, or as soon as their module is imported.

    policies: by scope, 0 among them. rebinding: finds names that others have captured.
    """

    def __init__(self, policies: Mapping[int, Policy], switch: Switch) -> None:
        self._switch = switch
        self.rebinding = Rebinding()
        self.rules: dict[str, dict[int, Rule | None]] = {}
        self.origins: dict[str, str] = {}
        self.patched: dict[str, Patch] = {}
        self.add(policies)

    def add(self, policies: Mapping[int, Policy]) -> None:
        """Add policies; `apply` patches what they name and earlier ones did not."""
        listed = {scope: policy.user_functions() for scope, policy in policies.items()}
        named = dict.fromkeys(name for rules in listed.values() for name in rules)
        self._new = [name for name in named if name not in self.rules]
        for name in (*self.rules, *self._new):
            self.rules.setdefault(name, {}).update({scope: each.get(name) for scope, each in listed.items()})
        for policy in policies.values():
            self.origins = dict(policy.origins) | self.origins

    @property
    def waiting(self) -> list[str]:
        """Names whose module is not imported yet, except names in hmpx's own lists."""
        waiting = [name for name in self.rules if name not in self.patched and name not in shipped_names()]
        return [] if self._switch.retired else waiting

    def apply(self, changes: Changes) -> None:
        """Patch the functions of policies that were added since, as they are imported, until `changes` are undone."""
        self._changes = changes
        for name in self._new:
            self._patch_or_await(name)

    def replacements(self) -> list[tuple[Any, Any]]:
        """Return originals and wrappers of the same, for names captured elsewhere."""
        return _replacements(self.patched[name] for name in self._new if name in self.patched)

    def _find(self, name: str) -> tuple[Any, str, Any] | None:
        """Return owner, attribute and function; None where the module, or a submodule of that name, may still come."""
        prefix = name.rpartition(".")[0]
        while prefix and sys.modules.get(prefix) is None:
            prefix = prefix.rpartition(".")[0]
        if not prefix:
            return None
        module, path = sys.modules[prefix], name.removeprefix(prefix + ".")
        try:
            return wrapt.resolve_path(module, path)
        except AttributeError:
            if hasattr(module, "__path__") or is_shipped(self.origins.get(name, "")):
                return None
            message = f"{self._where(name)}: {prefix} has no {path!r}{did_you_mean(path, dir(module))}"
            raise UnknownOpError(message) from None

    def _patch_of(self, name: str) -> Patch | None:
        found = self._find(name)
        if found is None:
            return None
        owner, attribute, original = found
        if isinstance(owner, type) and not owner.__flags__ & HEAP_TYPE:
            raise UnknownOpError(f"{self._where(name)}: {owner.__name__} is a type in C and cannot be changed")
        rules = self.rules[name]
        rule = next(filter(None, rules.values()))
        wrapper = _wrap(original, rules, name, self._active, f"{self._where(name)}: ")
        return Patch(name, Patching.CAST, rule, name, owner, attribute, original, wrapper)

    def _patch(self, name: str) -> bool:
        patch = self._patch_of(name)
        if patch is None:
            return False
        self.rebinding.expect(lambda: _replacements([patch]))
        self._changes.put(patch.place, patch.wrapper)
        self.patched[name] = patch
        return True

    def _patch_or_await(self, name: str) -> None:
        if name in self.patched or self._patch(name):
            return
        parent = name.rpartition(".")[0]
        if name not in shipped_names() and not _findable(parent.partition(".")[0]):
            logger.warning("%s: %s is not importable now; it is patched if it appears", self._where(name), name)
        # A name may lie in a module (pkg.ops.nms) or in a class of one (pkg.ops.Box.area): wait for both.
        for module in {parent, parent.rpartition(".")[0]} - {""}:
            when_imported(module, self._take, self._changes)

    def _take(self, module: types.ModuleType) -> None:
        """Patch the functions of a module that has just been imported."""
        names = [name for name in self.rules if name.startswith(f"{module.__name__}.") and name not in self.patched]
        for name in names:
            try:
                if self._patch(name):
                    self.rebinding.add_imported(_replacements([self.patched[name]]), _package(name))
            except HmpxError as error:  # an import is no place to raise; the handle goes on to say that it escaped
                logger.warning("%s", error)

    def _where(self, name: str) -> str:
        return self.origins.get(name, "policy")

    def _active(self) -> bool:
        return not self._switch.retired and region_state.casts_on()


def check_functions(policies: Mapping[int, Policy]) -> None:
    """Raise `HmpxError` for a name in policies that is no function of its imported module; nothing is changed."""
    functions = UserFunctions(policies, Switch())
    for name in functions.rules:
        functions._patch_of(name)


@functools.cache
def shipped_names() -> frozenset[str]:
    """Return the dotted names in hmpx's own lists: of libraries that a program may do without.

    A printed recipe repeats them; so the name tells, and not the list that it stands in.
    """
    files = [OpLists.read(path, "bf16") for path in shipped().glob("*/*.txt")]
    return frozenset(listed.name for lists in files for listed in lists.bf16 or () if "." in listed.name)


def _replacements(patches: Iterable[Patch]) -> list[tuple[Any, Any]]:
    """Return originals and wrappers. A method is found through its class, so it needs none."""
    return [(patch.original, patch.wrapper) for patch in patches if not isinstance(patch.owner, type)]


def _package(name: str) -> list[types.ModuleType]:
    """Return the imported modules of the package of a dotted name: one may define a function that another offers."""
    package = name.partition(".")[0]
    modules = [module for each, module in list(sys.modules.items()) if each.partition(".")[0] == package]
    return [module for module in modules if issubclass(type(module), types.ModuleType)]  # no `__class__` of a proxy


def _findable(top_level: str) -> bool:
    try:
        return importlib.util.find_spec(top_level) is not None
    except (ImportError, ValueError):
        return False
