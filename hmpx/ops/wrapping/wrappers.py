"""One wrapper for each entry point and rule: it looks at the arguments, casts as the rule says, and calls torch.

Plain functions are faster than wrapt proxies and `TorchFunctionMode`, and an op without a wrapper costs nothing.
Where the signature is known, `codegen` writes a wrapper that does not even walk `*args`. A `Patch` says where a wrapper
stands. The wrapper of an op that goes wrong on BF16 or FP16 says why.
"""

from __future__ import annotations

import enum
import functools
import inspect
import logging
import pkgutil
import re
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import wrapt

from hmpx.base import raw, region_state, run_in_region
from hmpx.base.changes import Attribute, Changes
from hmpx.base.compiling import leave_to_python
from hmpx.base.region_state import scope
from hmpx.base.tensors import dtype_name
from hmpx.errors import HmpxError
from hmpx.ops.policies.catalog import Entry
from hmpx.ops.policies.composition import accepts
from hmpx.ops.policies.policy import LOW_RULES, Case, Rule
from hmpx.ops.wrapping.callers import calling, pass_over, register
from hmpx.ops.wrapping.codegen import make_wrapper, widening
from hmpx.ops.wrapping.observing import EntryPoint, Observer, observed, reporting
from hmpx.ops.wrapping.overriding import call, called_by_torch, public, stand_in
from hmpx.ops.wrapping.rules import TARGETS, call_cast, eligible_dtypes, is_explicit
from hmpx.ops.wrapping.switch import WIDEN, Switch, forward_scope


class Patching(enum.Enum):
    """The effect of a patch on calls of an entry point."""

    CAST = "cast"  # the arguments are cast as its rule says
    UNCAST = "uncast"  # no op inside is cast: it is outside of the model, or was cast before
    FORWARD = "forward"  # what runs inside is a model's forward
    BACKWARD = "backward"  # what runs inside is outside of the model, except forwards that are computed again
    FP32 = "in fp32"  # it computes in FP32 and returns its input's dtype
    CHECK = "check"  # a layer's check of its input's dtype accepts an input that will be cast
    CARRYING = "carrying"  # a callback that it stores will run in the region of this call
    EXPLAINED = "explained"  # an error of torch says why; nothing else changes
    AUTOCAST = "autocast"  # it says that autocast is on where the lists cast
    OBSERVED = "observed"  # an observer sees the calls, and nothing else changes
    DTYPE_MAP = "dtype map"  # a dtype that is asked for becomes another

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Patch:
    """One attribute, before and after.

    how: the effect of the patch. rule: how a patch that casts does so; None for other patches. If the rule depends on
    the arguments of a call or on the scope, it is that of the first case. older: a wrapper of hmpx that it replaces.
    """

    op: str
    how: Patching
    rule: Rule | None
    label: str
    owner: Any
    attribute: str
    original: Any
    wrapper: Any
    older: Any = None

    def __str__(self) -> str:
        return f"{self.label:45} {self.rule or self.how}"

    @property
    def place(self) -> Attribute:
        return Attribute(self.owner, self.attribute, self.label)


class Patches:
    """Patches that are put in place together, until they are undone."""

    def __init__(self, patches: Iterable[Patch]) -> None:
        self.patches = tuple(patches)

    def originals(self) -> dict[Callable, Callable]:
        """Return each wrapper with its original."""
        return {patch.wrapper: patch.original for patch in self.patches}

    def replacements(self) -> list[tuple[Any, Any]]:
        """Return pairs of a replaced function and its wrapper, for names captured elsewhere."""
        return [(patch.original if patch.older is None else patch.older, patch.wrapper) for patch in self.patches]

    def apply(self, changes: Changes) -> None:
        for patch in self.patches:
            changes.put(patch.place, patch.wrapper)


def patch_at(path: str, how: Patching, build: Callable[[Any], Any]) -> Patch:
    """Return a patch, without casts, of one dotted name in torch. `build` makes the new value from the old one."""
    name, _, attribute = path.rpartition(".")
    return patch_of(pkgutil.resolve_name(name), attribute, path, how, build)


def patch_of(owner: Any, attribute: str, label: str, how: Patching, build: Callable[[Any], Any]) -> Patch:
    """Return the patch of an attribute of a class or module, which messages call `label`."""
    original = wrapt.resolve_path(owner, attribute)[2]  # from the namespace itself, or along the MRO of a class
    return Patch(attribute, how, None, label, owner, attribute, original, build(original))


def named_like(wrapper: Callable, label: str, original: Callable) -> Callable:
    """Give a wrapper the name of the function whose place it takes, for pickling too.

    What somebody has put in the place of torch's function may have attributes, and write to them by its own name: they
    are the wrapper's, too.
    """
    # No functools.wraps: C functions call themselves `_VariableFunctionsClass.softmax`, which pickle does not find.
    module, _, name = label.rpartition(".")
    method = module in ("Tensor", "torch.Tensor")
    wrapper.__module__, wrapper.__qualname__ = ("torch", f"Tensor.{name}") if method else (module, name)
    wrapper.__name__, wrapper.__doc__ = name, original.__doc__
    attributes = raw.attribute_dict(original)
    if attributes is not None and raw.maker(original).partition(".")[0] not in ("torch", "hmpx"):
        wrapper.__dict__ = attributes
    else:
        vars(wrapper)["__hmpx_original__"] = original
    return wrapper


def build_choice(
    op: str,
    entry: Entry,
    cases: tuple[Case, ...],
    original: Callable,
    switch: Switch,
    running: Callable[[Case], Callable],
    observer: Observer | None = None,
) -> Callable:
    """Return the wrapper of one entry point whose rule depends on the arguments. One case without a rule needs none.

    running: gives the function that computes the op in a case, for arguments that its rule has cast.
    """

    def build(case: Case) -> Callable:
        if observer is not None:
            point = EntryPoint(op, entry.label, case.rule, original, case.follows, entry.in_place)
            wrapper = _observed(entry, point, original, running(case), switch, observer)
        elif case.rule is None:
            return running(case)
        else:
            wrapper = _casting(entry, case.rule, running(case), original, switch)
        return named_like(wrapper, entry.label, original)

    if len(cases) == 1:
        return build(cases[0])
    runs = {case.rule: build(case) for case in reversed(cases)}
    choices = tuple((case.when, case.rule, runs[case.rule]) for case in cases if case.when is not None)
    otherwise = next((case.rule, runs[case.rule]) for case in cases if case.when is None)
    signature, widened = entry.signature, widening(original, entry.signature)

    def choice(*args, **kwargs):
        rule, run = next(((rule, run) for when, rule, run in choices if accepts(when, args, kwargs)), otherwise)
        left = observer is None and switch.casts_off(signature, args, kwargs, rule)
        if left or called_by_torch(args, kwargs, 1):
            return widened(*args, **kwargs) if left == WIDEN else call(original, args, kwargs)
        return run(*args, **kwargs)

    return named_like(choice, entry.label, original)


def build_scoped(entry: Entry, original: Callable, runs: Mapping[int, Callable]) -> Callable:
    """Return the wrapper of one entry point whose rule depends on the scope, for which it asks in each call.

    runs: the wrapper of each scope; more may be added.
    """
    elsewhere = runs[0]  # by number: Dynamo guards the keys of a dict that traced code reads, and objects cannot be

    def scoped(*args, **kwargs):
        return runs.get(scope() or forward_scope(), elsewhere)(*args, **kwargs)

    pass_over(scoped.__code__)
    return named_like(scoped, entry.label, original)


def build_untouched(original: Callable) -> Callable:
    """Return a wrapper that calls the original as torch would without hmpx."""

    def untouched(*args, **kwargs):
        return call(original, args, kwargs)

    return untouched


def _casting(entry: Entry, rule: Rule, run: Callable, original: Callable, switch: Switch) -> Callable:
    public(original)  # keeps the result, found before torch is patched
    if entry.signature.python or entry.signature.lead is None or rule is Rule.INSIDE:
        return _general(entry, rule, original, run, switch)
    return make_wrapper(entry.signature, rule, entry.attribute, switch.everywhere)(original, run, switch)


def _general(entry: Entry, rule: Rule, original: Callable, run: Callable, switch: Switch) -> Callable:
    """Return a wrapper for any signature. Inside a Python function of torch, nothing is cast again."""
    signature = entry.signature
    stated = _stated_positions(original) if signature.python else ()
    inner = uncast_inside(run) if signature.python else run
    widened = widening(original, signature)

    def wrapper(*args, **kwargs):
        left = switch.casts_off(signature, args, kwargs, rule)
        if left or called_by_torch(args, kwargs, 1):
            return widened(*args, **kwargs) if left == WIDEN else call(original, args, kwargs)
        if is_explicit(args, kwargs) or kwargs.get("inplace") or _is_stated_at(stated, args):
            return call(inner, args, kwargs)
        return call_cast(inner, rule, signature, args, kwargs)

    wrapper.__code__ = _code_under(rule, wrapper.__code__, entry.attribute if signature.python else "wrapper")
    return wrapper


@functools.cache
def _code_under(rule: Rule, code: types.CodeType, name: str) -> types.CodeType:
    """Return a copy of the code for one rule, so that the code of a running frame tells the rule."""
    own = code.replace(co_name=f"{name}_{rule.name.lower()}")
    register(own, rule)
    if rule is Rule.INSIDE:  # AOT would take an LSTM apart in a graph, so compiled code runs it in Python
        leave_to_python(own)
    return own


def uncast_inside(function: Callable, run: Callable = run_in_region.run_uncast) -> Callable:
    """Return `function` with casts off inside. `run` opens the region."""

    @stand_in(function, computes=False)
    def inner(*args, **kwargs):
        return run(call, (function, args, kwargs), {})

    return inner


def _stated_positions(function: Callable) -> tuple[int, ...]:
    """Return positions of `out`, `dtype` and `inplace` in a Python function of torch. To set one turns casts off."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    names = code.co_varnames[: code.co_argcount] if code else ()
    return tuple(names.index(name) for name in ("out", "dtype", "inplace") if name in names)


def _is_stated_at(positions: tuple[int, ...], args: tuple) -> bool:
    return any(i < len(args) and args[i] is not None and args[i] is not False for i in positions)


def _observed(
    entry: Entry, point: EntryPoint, original: Callable, run: Callable, switch: Switch, observer: Observer
) -> Callable:
    public(original)
    if point.rule is None:
        plain, inner = run, reporting(run, casting=False)
    else:
        plain = _casting(entry, point.rule, run, original, switch)
        inner = _casting(entry, point.rule, reporting(run, casting=True), reporting(original, casting=False), switch)

    def wrapper(*args, **kwargs):
        caller = calling(sys._getframe(1))
        if observer.leaves(caller.f_code) or called_by_torch(args, kwargs, 1):
            return plain(*args, **kwargs)
        return observed(point, observer, plain, inner, caller, args, kwargs)

    return wrapper


# Ops that go wrong on BF16 or FP16. If torch has no kernel for that dtype, its error gets a note: why the input has
# that dtype, and the way out. If rounded input makes the result wrong without an error (`binary_cross_entropy`), the
# call is an error of hmpx

logger = logging.getLogger("hmpx")
_OF_DTYPES = re.compile("BFloat16|Half|dtype|[Ll]ow precision|float|not implemented")  # in torch's words


def build_explaining(op: str, label: str, original: Callable, run: Callable) -> Callable:
    """Return `run`, a wrapper of an op that may have no BF16 kernel, with the way out in its error."""

    def explaining(*args, **kwargs):
        try:
            return run(*args, **kwargs)
        except (RuntimeError, TypeError) as error:
            _explain(error, op, (*args, *kwargs.values()))
            raise

    pass_over(explaining.__code__)
    return named_like(explaining, label, original)


def build_refusing(
    op: str, label: str, original: Callable, run: Callable, switch: Switch, instead: str, asked: bool
) -> Callable:
    """Return `run`, a wrapper of an op that is unsafe on rounded input, with an error for a BF16 or FP16 first input.

    instead: the op that is safe. asked: a list of the user's own names the op, so that this is a warning, once.
    """
    warned = False

    def refusing(*args, **kwargs):
        nonlocal warned
        value = args[0] if args else kwargs.get("input")
        if isinstance(value, torch.Tensor) and value.dtype in LOW_RULES and not (switch.casts_off() or warned):
            dtype = dtype_name(value.dtype)
            message = (
                f"{op} of {dtype} probabilities: .999 is 1 in {dtype}, so that a confident wrong answer has loss 100 "
                f"and gradient 0; use {instead} on the logits"
            )
            if not asked:
                raise HmpxError(f"{message}, or compute the sigmoid in float32")
            logger.warning("hmpx: %s", message)
            warned = True
        return run(*args, **kwargs)

    pass_over(refusing.__code__)
    return named_like(refusing, label, original)


def build_telling(op: str, rule: Rule | None, function: Callable) -> Callable:
    """Return `function`, called where the gradient of an op is sparse, with a warning, once, if a list asks for a cast.

    rule: of the list.
    """
    told, target = False, TARGETS.get(rule) if rule else None

    @stand_in(function)
    def telling(*args, **kwargs):
        nonlocal told
        found = eligible_dtypes((*args, *kwargs.values()))
        if not told and found and target not in (None, found[0]):
            told = True
            logger.warning(
                "hmpx: %s is in the %s list, and its gradient is sparse: its weight stays %s, since torch cannot send "
                "a sparse gradient through a cast; for the cast, make it with sparse=False",
                *(op, rule, dtype_name(found[0])),
            )
        return function(*args, **kwargs)

    return telling


def _explain(error: Exception, op: str, values: Iterable[Any]) -> None:
    """Add a note to `error`, which `op` raised, if one of its arguments is of low precision.

    Python 3.10 has no notes: there it is another line of the message.
    """
    low = next((v for v in values if isinstance(v, torch.Tensor) and v.dtype in LOW_RULES), None)
    if (
        low is None
        or not _OF_DTYPES.search(str(error))
        or not region_state.casts_on()
        or "hmpx:" in str((error.args, getattr(error, "__notes__", ())))
    ):
        return
    dtype = dtype_name(low.dtype)
    note = f"hmpx: the input of {op} is {dtype}{_origin(low)}, and torch has no {dtype} kernel of {op} here. "
    if "." in op:  # lists have no such name
        note += "Call it with input.float()."
    else:
        note += (
            f"Put it in the fp32 list: a line {op!r} in the file of fp32_file_path, fp32: [{op}] in a recipe, or "
            f"`with hmpx.casts(fp32=[{op!r}]):` around the call."
        )
    if hasattr(error, "add_note"):
        error.add_note(note)
    else:
        error.args = ("\n".join((*map(str, error.args[:1]), note)), *error.args[1:])


def _origin(value: torch.Tensor) -> str:
    """Return the op that made a tensor, as far as autograd knows."""
    if isinstance(value, torch.nn.Parameter):
        return ", a parameter"
    node = value.grad_fn
    while node is not None and "ToCopy" in node.name() and node.next_functions:  # the cast of a result
        node = node.next_functions[0][0]
    if node is None or "AccumulateGrad" in node.name():
        return ""
    made_by = re.sub(r"Backward\d*$", "", node.name().rpartition("::")[2])
    return f", the result of {made_by}"
