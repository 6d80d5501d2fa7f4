"""Weight stores: how the weights of a BF16 model are held between two steps.

==========  ==========================================================  =======================
stochastic  BF16 weights, stochastic rounding on write-back             + 0 bytes a parameter
nearest     BF16 weights, round to nearest, which loses small updates   + 0
master      BF16 weights beside FP32 masters (Neuron's FP32ParamsCopy,   + 4
            NxD's use_master_weights)
split       the same masters, bit for bit: the BF16 weight is their     + 2
            upper half, an int16 the rest
split8      masters of 24 bits: an int8 is the rest, rounded            + 1
            stochastically
==========  ==========================================================  =======================

With `master`, a master that does not round to its weight shows that somebody else wrote the weight, which then counts.
With `split` and `split8`, a weight that somebody wrote keeps its old rest: at most half a unit in its last place.
`master` rounds ties to even; `split` and `split8` round ties away from zero (`hmpx.rounding.stochastic`).

To add a way, write a `Store` and name it in `WAYS`. If no kernel knows it, torch's operators move its weights.

`Settings` are those of one optimizer. A setting is a field there, which has its default, an argument of `hmpx.attach`,
which documents it, and a key of a recipe. A test holds the three names against one another.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from operator import attrgetter
from types import UnionType
from typing import Any, ClassVar, Literal, Union, cast, get_args, get_origin, get_type_hints

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from hmpx.base.tensors import dtype_named, lacks_data, shows_values
from hmpx.errors import HmpxError, did_you_mean
from hmpx.rounding import native
from hmpx.rounding.devices import kernels_for
from hmpx.rounding.stochastic import check_seed, join, read_masters, split
from hmpx.updates.holding.held import Held, RoundingKey, Segment, Way, Weights, laid_as
from hmpx.updates.holding.sharding import held_part, is_sharded, like, local
from hmpx.updates.holding.state_forms import STATE_FORMS, StateDtype

Tensor = torch.Tensor
Parameter = torch.nn.Parameter
_BESIDE = attrgetter("beside")


class Store(Held):
    """The weights of one BF16 parameter.

    Attributes:
        tensor: the parameter.
        beside: the tensors kept beside the weights. When one of them is exchanged, this becomes another tuple.
        bytes_beside: how many bytes are kept for each weight, beside the weight.
        has_masters: whether the result of `masters` has more digits than the BF16 weights.
        words: how updates are made, for `hmpx.explain`.
    """

    beside: tuple[Tensor, ...] = ()
    words: ClassVar[str]
    bytes_beside: ClassVar[float] = 0.0
    has_masters: ClassVar[bool] = False

    def begin(self) -> None:
        """Make the data beside the weights fit the weights as they are now. A step calls this first."""

    def prepare_for_kernels(self, segment: Segment, rounding_key: RoundingKey) -> None:
        """Bring the data beside the weights into the form that kernels need. The segment is the whole parameter."""

    def take_masters(self, masters: Tensor) -> None:
        """Take over FP32 masters from a checkpoint. If a master does not round to its weight, the weight counts."""

    def masters(self, segment: Segment) -> Tensor:
        """Return the FP32 masters, sharded as the parameter is. The segment is the whole parameter."""
        self.begin()
        out = torch.empty_like(local(self.tensor), dtype=torch.float32, requires_grad=False)
        self.read(segment, out)
        return like(self.tensor, out)

    def for_kernels(self, segment: Segment, name: int) -> native.StoredTensor | None:
        held = local(self.tensor.detach())
        if self.kind is None or kernels_for(held, *self.beside) is None:
            return None
        return native.StoredTensor(held, self.kind, name, self.beside[0] if self.beside else None)


class Stochastic(Store):
    """BF16 weights, written by stochastic rounding: updates below BF16's precision are kept on average."""

    kind = native.BF16
    words = "computed in FP32 and written back by stochastic rounding"

    def write(self, segment: Segment, x: Tensor, name: str, rounding_key: RoundingKey) -> None:
        rounding_key.round_into(local(self.tensor), x, name, segment.box)


class Nearest(Store):
    """BF16 weights, rounded to nearest as a plain torch step leaves them. The step itself is computed in FP32."""

    kind = native.NEAREST
    words = "computed in FP32 and written back by rounding to nearest, which loses small ones"

    def write(self, segment: Segment, x: Tensor, name: str, rounding_key: RoundingKey) -> None:
        local(self.tensor).copy_(x)


class Master(Store):
    """BF16 weights beside FP32 masters."""

    kind = native.MASTER
    words = "made to FP32 masters, of which the weights are the rounding to nearest"
    bytes_beside: ClassVar[float] = 4.0
    has_masters: ClassVar[bool] = True

    def begin(self) -> None:
        masters = self.beside[0] if self.beside else None
        fitting = _copy_for(local(self.tensor), masters)
        if fitting is not masters:
            self.beside = (fitting,)

    def read(self, segment: Segment, out: Tensor) -> None:
        read_masters(self.beside[0], local(self.tensor), out)

    def write(self, segment: Segment, x: Tensor, name: str, rounding_key: RoundingKey) -> None:
        self.beside[0].copy_(x)
        local(self.tensor).copy_(x)

    def take_masters(self, masters: Tensor) -> None:
        self.beside = (laid_as(held_part(self.tensor, masters), local(self.tensor), torch.float32),)


class Split(Store):
    """FP32 masters in two halves, without loss: the upper one is the weight itself, the lower one an int16 beside it.

    Masters from a checkpoint stay FP32 copies until the first step, for two reasons: the weights may be loaded after
    them, and the checkpoint may be of a run with "master", which rounds ties to even.
    """

    kind = native.SPLIT
    words = "made to FP32 masters, whose lower halves are kept beside the weights"
    bytes_beside: ClassVar[float] = 2.0
    has_masters: ClassVar[bool] = True
    _dtype: ClassVar[torch.dtype] = torch.int16  # the dtype of the lower halves

    def __init__(self, tensor: Tensor) -> None:
        super().__init__(tensor)
        self._loaded: Tensor | None = None
        self._lower: Tensor | None = None  # row-major, even if the weight is not

    def begin(self) -> None:
        held, lower = local(self.tensor), self._lower
        if lower is None or lower.shape != held.shape or lacks_data(lower) != lacks_data(held):
            lower = torch.zeros(held.shape, dtype=self._dtype, device=held.device)
        loaded = None if self._loaded is None else _copy_for(held, self._loaded)
        self._keep(loaded, lower if lower.device == held.device else lower.to(held.device))

    def _keep(self, loaded: Tensor | None, lower: Tensor | None) -> None:
        if loaded is not self._loaded or lower is not self._lower:
            self._loaded, self._lower = loaded, lower
            self.beside = tuple([held for held in (lower, loaded) if held is not None])

    def prepare_for_kernels(self, segment: Segment, rounding_key: RoundingKey) -> None:
        if self._loaded is not None:
            self.write(segment, local(self.masters(segment)), segment.name, rounding_key)

    def for_kernels(self, segment: Segment, name: int) -> native.StoredTensor | None:
        return super().for_kernels(segment, name) if self._loaded is None else None

    def read(self, segment: Segment, out: Tensor) -> None:
        if self._loaded is not None:
            read_masters(self._loaded, local(self.tensor), out)
        else:
            join(local(self.tensor), self.beside[0], out)

    def write(self, segment: Segment, x: Tensor, name: str, rounding_key: RoundingKey) -> None:
        spans = rounding_key.spans(x.numel(), segment.box)
        split(x, local(self.tensor), self.beside[0], spans, rounding_key.keys(name))
        self._keep(None, self._lower)

    def take_masters(self, masters: Tensor) -> None:
        self._keep(laid_as(held_part(self.tensor, masters), local(self.tensor), torch.float32), None)


class Split8(Split):
    """Masters of 24 bits, rounded stochastically: an int8 beside each weight."""

    kind = native.SPLIT8
    words = "made to masters of 24 bits, whose lower 8 are rounded stochastically and kept beside the weights"
    bytes_beside: ClassVar[float] = 1.0
    _dtype = torch.int8


def _copy_for(weights: Tensor, masters: Tensor | None) -> Tensor:
    """Return `masters` on the device and in the layout of the weights. If they do not fit: the weights in FP32."""
    if masters is None or masters.shape != weights.shape or lacks_data(masters) != lacks_data(weights):
        return weights.detach().float()
    if masters.device != weights.device:
        return masters.to(weights.device)
    if masters.stride() == weights.stride():
        return masters
    laid = torch.empty_like(weights, dtype=torch.float32, requires_grad=False)
    return masters if laid.stride() == masters.stride() else laid.copy_(masters)


WAYS: dict[str, type[Store]] = {
    "stochastic": Stochastic,
    "nearest": Nearest,
    "master": Master,
    "split": Split,
    "split8": Split8,
}


# For each weight with masters, by its memory: the stores that had these last. A weak reference to the weight itself
# would not do, since `torch.utils.swap_tensors` refuses tensors that have one.
_owners: dict[tuple[Any, ...], tuple[StorageWeakRef, weakref.ref[Stores]]] = {}


class Stores:
    """The stores of one optimizer's parameters. A store with data beside the weights stays until `drop` or `forget`.

    Attributes:
        kept: by parameter, the stores that keep data beside the weights.
        are_torn: whether an error has ended a step that had written some parameters and not others.
    """

    def __init__(self) -> None:
        self.are_torn, self._owned = False, 0
        self.kept: dict[Parameter, Store] = {}

    def of(self, segment: Segment) -> Store:
        """Return the store of a parameter, chosen by its `way`."""
        kind = WAYS[segment.way.weights]
        store = self.kept.get(segment.param)
        if store is None or type(store) is not kind:
            store = kind(segment.param)
            if kind.bytes_beside:
                self.kept[segment.param] = store
        return store

    def beside(self, params: Iterable[Parameter] | None = None) -> list[tuple[Tensor, ...]]:
        """Return the tensors that are kept beside the weights of these parameters, or of all."""
        stores = self.kept.values() if params is None else [self.kept[p] for p in params if p in self.kept]
        return list(map(_BESIDE, stores))

    @torch.no_grad()
    def own(self) -> int:
        """Note that these stores have the masters. Return how many parameters had them in other stores before."""
        others = 0
        if self._owned == len(self.kept):
            return others
        self._owned = len(self.kept)
        for key in [key for key, (memory, _) in _owners.items() if memory.expired()]:
            del _owners[key]
        for held in filter(shows_values, map(local, self.kept)):
            memory = StorageWeakRef(held.untyped_storage())
            known = _owners.get(key := (memory.cdata, held.storage_offset()))
            others += known is not None and known[1]() is not self
            _owners[key] = memory, weakref.ref(self)
        return others

    def masters(self, segment: Segment) -> Tensor | None:
        """Return the FP32 masters of a whole parameter, sharded as it is; None if its way has no masters."""
        return self.of(segment).masters(segment) if WAYS[segment.way.weights].has_masters else None

    def hand_over(self, gone: Segment, heir: Segment) -> int:
        """Give the masters of a parameter that left to its heir; return how many elements fit.

        The two may differ in size. An element fits if both have it, with the same weight.
        """
        store = self.kept.pop(gone.param, None)
        p, before = heir.param, gone.param
        if store is None or is_sharded(p) or is_sharded(before) or p.dim() != before.dim() or p.device != before.device:
            return 0
        both = tuple([slice(min(sizes)) for sizes in zip(p.shape, before.shape, strict=True)])
        masters, fits = p.detach().float(), p.detach()[both] == before.detach()[both]
        masters[both] = torch.where(fits, store.masters(gone)[both], masters[both])
        self.of(heir).take_masters(masters)
        return int(fits.sum())

    def forget(self) -> None:
        """Drop all masters: the next step starts from the BF16 weights."""
        self.kept.clear()
        self.are_torn = False

    def drop(self, param: Parameter) -> None:
        """Drop the data kept beside the weights of one parameter."""
        self.kept.pop(param, None)


Rules = tuple[tuple[str, Way], ...]  # a pattern of names, and the way of the parameters that it fits


@dataclass(frozen=True)
class Settings:
    """The arguments of `hmpx.attach` that say how an optimizer updates weights; see there.

    The defaults are what a `disable_casts()` region does. A dtype may be given by its name (``"bf16"``). `parameters`
    becomes a tuple of patterns, each with its `Way`.

    Raises:
        HmpxError: a value that is not legal, or masters in a checkpoint without a store that has them.
    """

    weights: Weights = "stochastic"
    seed: int | None = None
    state_dtype: StateDtype = torch.float32
    parameters: Rules | Mapping[str, Mapping[str, Any]] = ()
    use_fp32_grad_acc: bool = False
    use_master_weights_in_ckpt: bool = False
    release_gradients: bool = False
    fused: bool | None = None

    def __post_init__(self) -> None:
        usual = _checked(Way(self.weights, self.state_dtype))
        object.__setattr__(self, "state_dtype", usual.state_dtype)
        object.__setattr__(self, "parameters", _read_rules(self.parameters, usual))
        if self.seed is not None:
            check_seed(self.seed)
        for name, legal in _LEGAL.items():
            if not is_one_of(legal, value := getattr(self, name)):
                raise HmpxError(f"{name}={value!r} is neither {' nor '.join(map(repr, legal))}", key=(name,))
        if self.use_master_weights_in_ckpt and not self.has_masters:
            raise HmpxError(
                f"weights={self.weights!r} has no masters; use_master_weights_in_ckpt needs master, split or split8",
                key=("use_master_weights_in_ckpt",),
            )

    @property
    def has_masters(self) -> bool:
        return any(WAYS[way.weights].has_masters for way in self.ways)

    @property
    def ways(self) -> list[Way]:
        """The usual way, and the ways of all rules."""
        return list(dict.fromkeys([self._usual, *(way for _, way in self.rules)]))

    def way(self, name: str) -> Way:
        """Return how the parameter with this name is held: the last rule that fits decides, else the usual way."""
        return next((way for pattern, way in reversed(self.rules) if fnmatchcase(name, pattern)), self._usual)

    @property
    def _usual(self) -> Way:
        return Way(self.weights, self.state_dtype)

    @property
    def rules(self) -> Rules:
        """Patterns of parameters' names, each with the way of the parameters that it fits."""
        return cast(Rules, self.parameters)  # since `__post_init__`

    def check_patterns(self, names: Collection[str]) -> None:
        """Check that each pattern fits one of the names that parameters have.

        Raises:
            HmpxError: one does not; with the nearest name.
        """
        for pattern, _ in self.rules:
            if wrong := fits_none(pattern, names):
                if names and all(name.isdecimal() for name in names):
                    hint = "; the optimizer knows them by position: give it named_parameters(), or attach model="
                    wrong = f"parameters: {pattern!r} is the name of no parameter{hint}"
                raise HmpxError(wrong, key=("parameters", pattern))


def legal_values(cls: type) -> dict[str, tuple]:
    """Return the values of each attribute that is annotated with literals, bool and None alone."""
    found = {name: _values_of(hint) for name, hint in get_type_hints(cls).items()}
    return {name: values for name, values in found.items() if values is not None}


def _values_of(hint: Any) -> tuple | None:
    if get_origin(hint) in (Union, UnionType):
        parts = [_values_of(each) for each in get_args(hint)]
        return None if None in parts else tuple(value for part in parts for value in part or ())
    return get_args(hint) if get_origin(hint) is Literal else {bool: (True, False), type(None): (None,)}.get(hint)


_LEGAL = legal_values(Settings)


def is_one_of(legal: Iterable[Any], value: Any) -> bool:
    """Return whether a value is one of these, of the same type: 1 is not True."""
    return any(type(value) is type(each) and value == each for each in legal)


def _read_rules(given: Any, usual: Way) -> Rules:
    """Read a mapping of patterns to mappings of settings. A key that a rule lacks has the value of `usual`."""
    try:
        pairs = dict(given).items()
    except (TypeError, ValueError):
        raise HmpxError(f"parameters is {given!r}, not a mapping of parameters' names to settings") from None
    found = []
    for pattern, rule in pairs:
        if not isinstance(pattern, str):
            raise HmpxError(f"parameters: {pattern!r} is no name of a parameter, nor a pattern of names")
        said = rule._asdict() if isinstance(rule, Way) else rule
        if not isinstance(said, Mapping):
            example = "{'weights': 'split'}"
            raise HmpxError(f"parameters: {pattern!r}: {rule!r} is no mapping of settings, such as {example}")
        for key in said:
            if key not in Way._fields:
                legal = ", ".join(Way._fields)
                hint = did_you_mean(str(key), Way._fields)
                raise HmpxError(f"parameters: {pattern!r}: {key!r} is none of {legal}{hint}")
        found.append((pattern, _checked(usual._replace(**said), f"parameters: {pattern!r}: ")))
    return tuple(found)


def _checked(way: Way, where: str = "") -> Way:
    """Check the values, and replace names of dtypes by dtypes. An error begins with `where`."""
    weights, state_dtype = way.weights, dtype_named(way.state_dtype)
    if not isinstance(weights, str) or weights not in WAYS:
        legal = ", ".join(repr(way) for way in WAYS)
        if isinstance(weights, torch.nn.Module):
            raise HmpxError(f"weights is a {type(weights).__name__}, not one of {legal}; did you mean model=?")
        raise HmpxError(f"{where}weights={weights!r} is none of {legal}{did_you_mean(str(weights), WAYS)}")
    if not is_one_of(STATE_FORMS, state_dtype):
        legal, words = ", ".join(map(repr, STATE_FORMS)), [each for each in STATE_FORMS if isinstance(each, str)]
        hint = did_you_mean(str(state_dtype), words)
        raise HmpxError(f"{where}state_dtype={state_dtype!r} is none of {legal}{hint}")
    return Way(weights, state_dtype)


def fits_none(pattern: str, names: Collection[str]) -> str:
    """Describe the problem with a pattern that fits no parameter's name; return "" if it fits one."""
    if any(fnmatchcase(name, pattern) for name in names):
        return ""
    inside = any(fnmatchcase(name, f"{pattern}.*") for name in names)
    what = "a module and not the name of a parameter" if inside else "the name of no parameter"
    hint = did_you_mean(pattern, names, meant=f"{pattern}.*" if inside else None)
    return f"parameters: {pattern!r} is {what}{hint}"
