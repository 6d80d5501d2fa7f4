"""The ops that hmpx knows: op name -> its entry points in torch, and how its arguments are laid out.

Nearly everything is read off the installed torch: which names exist, which objects sit under them, and (from the
operator schemas) which arguments are tensors. Facts that torch does not say about itself stand in `op_facts`.

An *entry point* is an attribute a Python caller can reach (`torch.softmax`, `Tensor.softmax`, `Tensor.__add__`). A
Python function of torch that only checks its arguments and calls the C function of the same op (`F.softmax`,
`F.layer_norm`) is no entry point of its own: the innermost callable is, so names captured from `F` stay right and
`inplace=`, `dtype=` or `max_norm=` are already resolved when hmpx sees the call.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import sys
import types
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
import torch.overrides

from hmpx.base.raw import none_collected
from hmpx.base.torch_private import has, private
from hmpx.errors import HmpxError, did_you_mean
from hmpx.ops.policies import op_facts
from hmpx.ops.policies.composition import COMPOSED, Composition
from hmpx.ops.policies.signatures import (
    Argument,
    Signature,
    all_schemas,
    is_tensor,
    promotes,
    read_signature,
    refuses_mixed,
    schemas,
)

Tensor = torch.Tensor


@dataclass(frozen=True)
class Entry:
    """One attribute under which an op can be called. `in_place`: it writes to its first argument.

    arguments: their signature, or a function that reads it. Most entries are never patched, and nobody asks for theirs.
    """

    owner: Any
    attribute: str
    label: str
    arguments: Signature | Callable[[], Signature]
    in_place: bool = False

    @property
    def signature(self) -> Signature:
        return self.arguments if isinstance(self.arguments, Signature) else self.arguments()


@dataclass(frozen=True)
class Op:
    """One op by its list name.

    follows: the op whose rule it takes when no list names it (`multiply` follows `mul`).
    refuses_mixed: torch raises when its tensor arguments differ in dtype.
    computes: it makes new values, as opposed to a view or a factory. O2 casts only these.
    view: it only shows its first argument in another shape, and is never cast, in a list or not. Ops that copy where a
        view is impossible (`reshape`, `flatten`, `contiguous`) are among them: moving data has no precision.
    rows: its parts, where torch composes it in C++; they decide if a list names neither it nor the op it follows.
    """

    name: str
    entries: tuple[Entry, ...] = field(default=(), repr=False)
    follows: str | None = None
    refuses_mixed: bool = False
    computes: bool = True
    view: bool = False
    rows: tuple[Composition, ...] = field(default=(), repr=False)

    @property
    def promotes(self) -> bool:
        """Whether a mixture is promoted in no list."""
        return promotes(self.name)

    @property
    def is_matrix_product(self) -> bool:
        """Whether hmpx can multiply in its place, as FP8 and "bf16-to-fp32" do."""
        return self.name in op_facts.MATRIX_PRODUCTS or self.follows in op_facts.MATRIX_PRODUCTS


Named = Iterator[tuple[str, Entry]]  # entries, each with the name of its op


def _functions() -> Named:
    """Yield C functions, each under every attribute that holds it: F.conv2d and torch.conv2d are one object."""
    places: dict[int, list[tuple[Any, str, str]]] = {}
    for label, module in op_facts.NAMESPACES.items():
        for attribute, value in vars(module).items():
            if isinstance(value, types.BuiltinFunctionType):
                places.setdefault(id(value), []).append((module, attribute, f"{label}.{attribute}"))
    variable, layers = private("torch._C._VariableFunctions"), private("torch._VF") if has("torch._VF") else None
    # Recurrent layers call by `torch._VF`, which is none of the namespaces.
    for aten in dir(variable):
        if not aten.startswith("__") and schemas(aten):
            held = places.get(id(getattr(variable, aten)), ())
            yield from _builtin(aten, held if layers is None else (*held, (layers, aten, f"torch._VF.{aten}")))
    for alias, aten in op_facts.ALIASES.items():
        yield from _builtin(aten, places.get(id(getattr(variable, alias, None)), ()))
    spaces = ("", private("torch._C._nn")), ("linalg_", torch.linalg), ("fft_", torch.fft), ("special_", torch.special)
    for prefix, space in spaces:
        for attribute in dir(space):
            function = getattr(space, attribute)
            if isinstance(function, types.BuiltinFunctionType) and schemas(f"{prefix}{attribute}"):
                yield from _builtin(f"{prefix}{attribute}", places.get(id(function), ()))


def _builtin(aten: str, places: Iterable[tuple[Any, str, str]]) -> Named:
    in_place = aten.endswith("_") and not aten.endswith("__")
    name = aten.rstrip("_") if in_place else aten
    signature = functools.partial(read_signature, aten, "input")
    for owner, attribute, label in places:
        yield name, Entry(owner, attribute, label, signature, in_place)


def _methods() -> Named:
    for attribute in dir(Tensor.__base__):  # which is written in C
        method = getattr(Tensor, attribute)
        # One that torch has written in Python calls others; one that somebody else has put there stands for torch's.
        if attribute.startswith("__") or _is_of(Tensor.__deepcopy__.__globals__, method):
            continue
        if callable(method) and schemas(attribute):
            signature = functools.partial(read_signature, attribute, "self")
            in_place = attribute.endswith("_")
            yield attribute.removesuffix("_"), Entry(Tensor, attribute, f"Tensor.{attribute}", signature, in_place)


def _is_of(namespace: dict[str, Any], function: Any) -> bool:
    return inspect.isfunction(function) and function.__globals__ is namespace


def _operators() -> Named:
    for name, attributes in op_facts.OPERATORS.items():
        for attribute in attributes:
            operands = op_facts.OPERANDS.get(attribute, ("self", "other"))
            signature = Signature(
                lead=tuple(Argument(operand, tensor=operand != "index") for operand in operands),
                dtype_positional=False,
                python=inspect.isfunction(getattr(Tensor, attribute)),
                refuses_mixed=name in op_facts.REFUSES_MIXED,
            )
            yield name, Entry(Tensor, attribute, f"Tensor.{attribute}", signature, attribute in op_facts.WRITING)


def _python_functions(found: Container[str]) -> Named:
    """Yield functions of torch written in Python that stand for an op with no C function of the same name."""
    overridable = torch.overrides.get_testing_overrides()
    for label, module in (("torch.nn.functional", F), ("torch", torch), ("torch.functional", torch.functional)):
        for attribute, function in list(vars(module).items()):
            if not inspect.isfunction(function) or function not in overridable or attribute.startswith("_"):
                continue
            front = op_facts.RENAMED.get(attribute, attribute) in found and attribute not in op_facts.NOT_FRONTS
            if not front:  # every argument may be a tensor; only `dtype=` matters to the call
                signature = Signature(
                    python=True,
                    refuses_mixed=attribute in op_facts.REFUSES_MIXED,
                    loss="reduction" in inspect.signature(function).parameters,
                )
                yield attribute, Entry(module, attribute, f"{label}.{attribute}", signature)
    for name, label in op_facts.ELSEWHERE.items():
        signature = Signature(python=True, refuses_mixed=name in op_facts.REFUSES_MIXED)
        yield name, Entry(importlib.import_module(label), name, f"{label}.{name}", signature)


def _computes(name: str, entries: tuple[Entry, ...]) -> bool:
    """Return whether some overload returns tensors that are no views, from tensors that it was given."""
    found = schemas(name)
    if not found:
        return any(not entry.signature.python for entry in entries)
    fresh = any(r.alias_info is None and "Tensor" in str(r.type) for s in found for r in s.returns)
    takes_tensor = any(is_tensor(a) for s in found for a in s.arguments)
    return fresh and takes_tensor and not name.startswith(op_facts.NOT_COMPUTING)


def _is_view(name: str) -> bool:
    """Return whether every overload that returns tensors returns its first argument again, as a view."""
    found = [
        schema
        for schema in schemas(name)
        if any(map(is_tensor, schema.returns)) and any(map(is_tensor, schema.arguments[:1]))
    ]
    shown = [(schema.arguments[0], *filter(is_tensor, schema.returns)) for schema in found]
    by_schema = bool(shown) and all(
        each.alias_info is not None and not each.alias_info.is_write for tensors in shown for each in tensors
    )
    return (by_schema or name in op_facts.VIEWS) and name not in op_facts.CAST_VIEWS


@functools.cache
@none_collected()
def catalog() -> dict[str, Op]:
    """Return every op by its list name. Built once: entries are attributes, so later patches do not make it stale."""
    try:
        torch.overrides.get_overridable_functions()  # caches functions by identity: fill it while they are torch's own
    except AttributeError as error:
        raise HmpxError(
            f"torch.overrides cannot list torch's functions, as what stands in the place of one is no function "
            f"({error}): give it a __name__, or put it there after the first convert()"
        ) from error
    torch.overrides.resolve_name(torch.matmul)
    private("torch.utils._device._device_constructors")()  # the functions that `with torch.device(...)` gives a device
    found: dict[str, dict[tuple[int, str], Entry]] = {}
    in_place: dict[str, list[Entry]] = {}
    for spelling, entry in chain(_functions(), _methods(), _operators(), _python_functions(found)):
        name = op_facts.RENAMED.get(spelling, spelling)
        if entry.in_place:
            in_place.setdefault(name, []).append(entry)
        else:
            found.setdefault(name, {})[id(entry.owner), entry.attribute] = entry
    ops = {}
    for name in sorted(found.keys() | in_place.keys()):
        if name in op_facts.NOT_OPS or (name not in found and name not in op_facts.OPERATORS):
            continue
        entries = (*found.get(name, {}).values(), *in_place.get(name, ()))
        follows = op_facts.FOLLOWS.get(name)
        if follows is None and name.startswith(("special_", "linalg_")) and name.split("_", 1)[1] in found:
            bare = name.split("_", 1)[1]  # `torch.linalg.norm` and the like compute something else than their namesakes
            follows = bare if name.startswith("special_") or bare == "matmul" else None
        ops[name] = Op(
            name,
            entries,
            follows,
            refuses_mixed=refuses_mixed(name),
            computes=_computes(name, entries),
            view=_is_view(name),
            rows=COMPOSED.get(name, ()),
        )
    return ops


_MODULES = tuple(f"{module}." for module in op_facts.ELSEWHERE.values())
_PREFIXES = (*_MODULES, "torch.nn.functional.", "torch.Tensor.", "torch.", "F.", "Tensor.", "aten::")


def canonical(name: str) -> str:
    """Return the list name of the op that `name` means; `name` itself if it means none.

    Understood are an aten overload (`pow.Tensor_Scalar`), a dotted name in torch (`torch.linalg.inv`), an operator
    (`__add__`) and the spellings of torch's C side (`cross_entropy_loss`).
    """
    bare = next((name.removeprefix(prefix) for prefix in _PREFIXES if name.startswith(prefix)), name)
    if bare.startswith(("linalg.", "fft.", "special.")):
        bare = bare.replace(".", "_")
    bare = _ops_of_operators().get(bare, bare)
    base, _, overload = bare.partition(".")
    if overload and base in legal_names() and _is_overload(base, overload):
        bare = base
    bare = op_facts.RENAMED.get(bare, bare)
    return bare if bare in catalog() or aten_only(bare) or retired(bare) else name


def _is_overload(base: str, overload: str) -> bool:
    # Overloads for named dimensions come and go between versions of torch; lists written for one name them.
    known = {schema.overload_name for schema in all_schemas(f"aten::{base}")}
    return overload in known or "dimname" in overload.lower()


@functools.cache
def _ops_of_operators() -> dict[str, str]:
    return {attribute: name for name, attributes in op_facts.OPERATORS.items() for attribute in attributes}


@functools.cache
def legal_names() -> frozenset[str]:
    """Return every name a list may use for an op of torch."""
    return frozenset(catalog()) | frozenset(op_facts.RENAMED)


def aten_only(name: str) -> bool:
    """Return whether the dispatcher knows aten::`name` although no Python caller reaches it."""
    writes = name.endswith("_") and not name.endswith("__")
    return name not in op_facts.NOT_OPS and not writes and bool(all_schemas(f"aten::{name}"))


def retired(name: str) -> bool:
    """Return whether a function of torch only raises an error any more, as `torch.qr` from torch 2.14 on.

    A list may name it, for older versions; it has no rule, as no call of it computes anything.
    """
    return getattr(getattr(torch, name, None), "__module__", None) == "torch._linalg_utils"


# Names that lists may have: of ops, and of functions outside torch. A wrong one is answered with what it may mean


def is_op(name: str) -> bool:
    """Return whether the canonical name is that of an op, be it one that only aten has."""
    return name in catalog() or aten_only(name)


def may_be_user_function(name: str) -> bool:
    """Return whether a dotted name may be a function outside torch; `linear.x` only if a module `linear` exists."""
    top, _, rest = name.partition(".")
    if not rest or top in ("torch", "nn", "F", "functional"):  # usual names of torch and its modules
        return False
    return top not in legal_names() or top in sys.modules or importlib.util.find_spec(top) is not None


# As papers and other libraries have them, without underscores. A name that is spelt alike is found without this.
_ELSEWHERE = {
    **dict.fromkeys(("attention", "sdpa", "selfattention", "flashattention"), "scaled_dot_product_attention"),
    **dict.fromkeys(("multiheadattention", "mha"), "multi_head_attention_forward"),
    **dict.fromkeys(("dense", "fc", "fullyconnected"), "linear"),
    **dict.fromkeys(("ce", "celoss", "xent", "softmaxcrossentropy", "crossentropyloss"), "cross_entropy"),
    **dict.fromkeys(("bce", "bceloss"), "binary_cross_entropy"),
    **dict.fromkeys(("batchmatmul", "batchedmatmul"), "bmm"),
    **dict.fromkeys(("mse", "l2loss"), "mse_loss"),
    **dict.fromkeys(("bcewithlogits", "bcewithlogitsloss"), "binary_cross_entropy_with_logits"),
    **{"gemm": "mm", "swish": "silu", "nll": "nll_loss", "klloss": "kl_div", "kldivloss": "kl_div"},
    **{"gels": "linalg_lstsq", "lstsq": "linalg_lstsq", "symeig": "linalg_eigh"},
}


def unknown_op(name: str) -> str:
    """Return the message for an unknown name."""
    if retired(canonical(name)):
        return (
            f"torch {torch.__version__} has removed {name!r}: here the line does nothing (an older torch may have it)"
        )
    in_place = name.removesuffix("_")
    if in_place != name and in_place in legal_names():
        return f"{name!r} writes to its input and keeps its dtype; list {in_place!r} for the op"
    spelling = name.rpartition(".")[2] or name
    meant = _ELSEWHERE.get(spelling.lower().replace("_", ""))
    if isinstance(vars(torch.nn).get(spelling), type):
        hint = did_you_mean(spelling, legal_names(), cutoff=0.8, meant=meant)
        return f"{name!r} is a class, and a list names functions{hint or ': list the functions that its forward calls'}"
    return f"unknown op {name!r}{did_you_mean(spelling, legal_names(), meant=meant)}"
