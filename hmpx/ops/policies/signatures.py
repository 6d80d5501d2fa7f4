"""The signatures of ops, read off torch's schemas: which arguments may be tensors, and which are written to."""

from __future__ import annotations

import functools
import keyword
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from hmpx.base.torch_private import private
from hmpx.ops.policies import op_facts
from hmpx.ops.policies.composition import TAKES_MIXED

all_schemas = private("torch._C._jit_get_schemas_for_operator")


class Argument(NamedTuple):
    """One positional parameter of an op.

    tensor: it may be a tensor. default: of one that is not required. optional: None is legal.
    """

    name: str
    required: bool = True
    tensor: bool = True
    default: Any = None
    optional: bool = False


@dataclass(frozen=True)
class Signature:
    """The arguments of one op.

    lead: the positional parameters up to the last tensor one; None where overloads disagree, and then every argument
        is looked at.
    tail: the parameters behind `lead`, as far as overloads agree and their defaults are numbers.
    dtype_positional: a `dtype` or an `out_dtype` may stand among the positional arguments behind `lead`.
    statistics: positions of tensors that the op may write to. same_dtype: of tensors whose dtype is theirs.
    python: implemented in Python, so that it may call other listed ops.
    refuses_mixed: torch raises where its tensors differ in dtype. takes_mixed: calls in which it does not. promotes: in
        no list they are promoted, where torch raises.
    loss: it has a `reduction`, as losses alone have. in_lists: it takes lists, and their tensors in pairs.
    adds: the argument that is added to a product; "" for other ops.
    """

    lead: tuple[Argument, ...] | None = None
    tail: tuple[Argument, ...] = ()
    dtype_positional: bool = True
    statistics: tuple[int, ...] = ()
    same_dtype: tuple[int, ...] = ()
    python: bool = False
    refuses_mixed: bool = False
    takes_mixed: Callable[..., bool] | None = None
    promotes: bool = False
    loss: bool = False
    in_lists: bool = False
    adds: str = ""


@functools.cache
def schemas(name: str) -> tuple[Any, ...]:
    """Return the functional overloads that the dispatcher has for aten::`name`, without those that ask for a dtype."""
    found = all_schemas(f"aten::{name}")
    return tuple([s for s in found if not any(map(_asks_for_the_result, s.arguments))])


def _asks_for_the_result(argument: Any) -> bool:
    must = argument.name == "out_dtype" and not argument.has_default_value()
    return must or argument.name == "out" or argument.is_out


def is_tensor(argument: Any) -> bool:
    return "Tensor" in str(argument.type)


@functools.cache
def read_signature(name: str, first: str) -> Signature:
    """Read a signature off the schemas of aten::`name`; `first` is Python's name for the schema's `self`."""
    overloads = [[a for a in schema.arguments if not a.kwarg_only] for schema in schemas(name)]
    for arguments in overloads if first == "self" else ():
        arguments.sort(key=lambda a: a.name != "self")  # a method: the tensor it belongs to comes first
    length = max((i + 1 for arguments in overloads for i, a in enumerate(arguments) if is_tensor(a)), default=0)
    leads = [arguments[:length] for arguments in overloads]
    shared = _merge([[_argument(a, first) for a in lead] for lead in leads])
    writable = all(
        (not a.has_default_value() or a.default_value is None) and _is_free(a.name) for lead in leads for a in lead
    )
    agreed = shared is not None and 0 < len(shared) == length and writable
    every = [a for schema in all_schemas(f"aten::{name}") for a in schema.arguments if not a.kwarg_only]
    dtype_positional = any(a.name in ("dtype", "out_dtype") for a in every)
    statistics, same_dtype = _statistics(name, overloads)
    op = op_facts.RENAMED.get(name, name).removesuffix("_")
    if not statistics and not name.endswith("_"):
        statistics = tuple({i for arguments in overloads for i, a in enumerate(arguments) if _is_written(a)})
    return Signature(
        lead=shared if agreed else None,
        tail=_tail([arguments[length:] for arguments in overloads]) if agreed else (),
        dtype_positional=dtype_positional or not agreed,
        statistics=statistics,
        same_dtype=same_dtype,
        refuses_mixed=refuses_mixed(op),
        takes_mixed=TAKES_MIXED.get(op),
        promotes=promotes(op),
        loss=any(a.name == "reduction" for arguments in overloads for a in arguments),
        in_lists=op.startswith("_foreach_"),
        adds=_addend(op, shared) if shared is not None and agreed else "",
    )


def refuses_mixed(op: str) -> bool:
    """Return whether an op refuses mixed dtypes; one with lists of tensors does so as its own op with each pair."""
    return op.removeprefix("_foreach_") in op_facts.REFUSES_MIXED


def promotes(op: str) -> bool:
    """Return whether an op that refuses mixed dtypes promotes in no list."""
    return op in op_facts.PROMOTES or op in op_facts.NO_LOW_KERNEL


def _is_free(name: str) -> bool:
    """Return whether a written wrapper can have an argument of this name; its own begin with an underscore."""
    return name.isidentifier() and not keyword.iskeyword(name) and not name.startswith("_") and name != "type"


def _addend(op: str, lead: tuple[Argument, ...]) -> str:
    if op not in op_facts.O2_BF16:
        return ""
    scaled = any(a.name == "beta" for schema in schemas(op) for a in schema.arguments)
    return lead[0].name if scaled else next((p.name for p in lead if p.name == "bias"), "")


def _argument(argument: Any, first: str) -> Argument:
    name = first if argument.name == "self" else argument.name
    required, optional = not argument.has_default_value(), str(argument.type).startswith("Optional")
    return Argument(name, required, is_tensor(argument), optional=optional or not required)


def _statistics(name: str, overloads: list[list[Any]]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return where a norm takes running statistics, which it writes to, and the pair whose dtype must be theirs."""
    places = {a.name: i for arguments in overloads for i, a in enumerate(arguments)}
    if name.endswith("_backward") or not places.keys() >= {*op_facts.STATISTICS}:
        return (), ()
    pairs = (tuple(places[each] for each in pair) for pair in op_facts.BESIDE_STATISTICS if places.keys() >= {*pair})
    return tuple(places[each] for each in op_facts.STATISTICS), next(pairs, ())


def _is_written(argument: Any) -> bool:
    # TorchScript's lists have methods under the same names (`sort`, `append`), which write to their `self`.
    return argument.name != "self" and argument.alias_info is not None and argument.alias_info.is_write


def _merge(leads: list[list[Argument]]) -> tuple[Argument, ...] | None:
    """Return one parameter list for overloads that differ at most in which arguments may be tensors."""
    if len({tuple((p.name, p.required) for p in lead) for lead in leads}) != 1:
        return None
    return tuple(
        Argument(ps[0].name, ps[0].required, any(p.tensor for p in ps), optional=any(p.optional for p in ps))
        for ps in zip(*leads, strict=True)
    )


def _tail(overloads: list[list[Any]]) -> tuple[Argument, ...]:
    """Return the leading number arguments with a default that all overloads share."""
    tail = []
    for same in zip(*overloads, strict=False):
        found = {(a.name, type(a.default_value), a.default_value) for a in same if _is_number(a)}
        if len(found) != 1 or not all(map(_is_number, same)):
            break
        name, _, default = found.pop()
        tail.append(Argument(name, False, False, op_facts.PYTHON_DEFAULTS.get(name, default)))
    return tuple(tail)


def _is_number(argument: Any) -> bool:
    usual = argument.has_default_value() and type(argument.default_value) in (bool, int, float)
    return usual and _is_free(argument.name)
