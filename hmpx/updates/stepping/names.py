"""What an optimizer holds: its attachment, and its parameters, with their names and what they share in memory.

The rounding key depends on names. Parameters that share elements in memory (one weight under two names, or views of one
buffer that overlap) are refused: the second update would undo the first. Views of one buffer that do not overlap (a
fused projection that is cut in three) share no element and are updated like any others.

A ZeroRedundancyOptimizer (ZeRO-1) holds an optimizer that steps the parameters of one rank, and broadcasts their values
afterwards. hmpx works on the optimizer inside. Its parameters have the names of the outer one, because positions in the
inner one differ from rank to rank. Source: Rajbhandari et al., "ZeRO: Memory optimizations toward training trillion
parameter models" (SC 2020).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch

from hmpx.base.tensors import shows_values
from hmpx.base.torch_private import ZERO
from hmpx.errors import HmpxError, kind_of
from hmpx.updates.holding.held import Segment, Way, held_dtype
from hmpx.updates.holding.sharding import box_of, is_shell, local, refuse_shell, share
from hmpx.updates.holding.stores import Settings
from hmpx.updates.stepping.optimizer_classes import wants_bf16

Tensor = torch.Tensor
Parameter = torch.nn.Parameter
Optimizer = torch.optim.Optimizer

ATTRIBUTE = "_hmpx_attachment"  # where an attached optimizer holds its attachment
# Of an optimizer inside another one: the names that the outer one knows.
_shared_names: WeakKeyDictionary[Optimizer, dict[Parameter, str]] = WeakKeyDictionary()
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")  # prefixes inside a wrapped module


def own_attachment(optimizer: Optimizer) -> Any:
    """Return the attachment that an optimizer holds itself, or None; see `attach.attached`."""
    return vars(optimizer).get(ATTRIBUTE)


def parameters(optimizer: Optimizer) -> list[Parameter]:
    """Return every parameter of `optimizer`, in the order of its groups."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def trained(optimizer: Optimizer) -> list[Parameter]:
    """Return the parameters that steps move: they require a gradient, or were given one, as of `torch.func.grad`."""
    return [p for p in parameters(optimizer) if p.requires_grad or p.grad is not None]


def every_parameter(optimizer: Optimizer) -> list[Parameter]:
    """Return `parameters`, or those of the ZeroRedundancyOptimizer around this one: they are the same on every rank."""
    return list(_shared_names.get(optimizer, ())) or parameters(optimizer)


def has_bf16(optimizer: Optimizer) -> bool:
    return torch.bfloat16 in [p.dtype for group in optimizer.param_groups for p in group["params"]]


def named(optimizer: Optimizer, names: dict[Parameter, str]) -> Iterator[tuple[str, Parameter]]:
    """Yield every parameter with its name: from `names`, from `named_parameters()`, or else its position.

    A name that another parameter has already gets a ``#``, so that no two parameters have the same random numbers. One
    that was put into a group by hand has no name there, and gets its position.
    """
    index = 0
    names = {**_shared_names.get(optimizer, {}), **names}
    taken = set(names.values())
    of_groups = iter(plain_names([name for group in optimizer.param_groups for name in group.get("param_names", ())]))
    for group in optimizer.param_groups:
        in_group = [next(of_groups) for _ in group.get("param_names", ())]
        for i, p in enumerate(group["params"]):
            name = names.get(p)
            if name is None:
                name = in_group[i] if i < len(in_group) else str(index)
                while name in taken:
                    name += "#"
                taken.add(name)
            yield name, p
            index += 1


def inner_optimizers(optimizer: Optimizer) -> list[Optimizer]:
    """Return the optimizers that another one holds as attributes, or in lists and dicts."""
    found: list[Optimizer] = []
    state = getattr(optimizer, "state", None)  # none of one that never ran `Optimizer.__init__`
    for value in vars(optimizer).values():
        if value is not state:
            inside = (
                value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else (value,)
            )
            found += [each for each in inside if isinstance(each, Optimizer) and each is not optimizer]
    return found


def membership(optimizer: Optimizer) -> tuple:
    """Return everything that `named` depends on, with the group of each parameter.

    The names that `attach` was given do not change.
    """
    groups = [(len(group["params"]), list(group.get("param_names", ()))) for group in optimizer.param_groups]
    return list(map(id, parameters(optimizer))), groups, list(_shared_names.get(optimizer, {}).values())


def shared_names(optimizer: Optimizer) -> dict[Parameter, str]:
    """Return the names that the optimizer around this one knows; the same dict in every call."""
    return _shared_names.setdefault(optimizer, {})


def layout(optimizer: Optimizer) -> tuple | None:
    """Return everything that `named` and the overlaps in memory depend on; None if that cannot be known."""
    params = parameters(optimizer)
    if not all([type(p) is Parameter and (p.is_cpu or p.is_cuda) for p in params]):
        return None
    memory = [p.data_ptr() for p in params], [p.shape for p in params], [p.stride() for p in params]
    return membership(optimizer), *memory, [p.dtype for p in params]


def inside_zero(optimizer: Optimizer) -> Optimizer | None:
    """Return the optimizer that steps this rank's parameters; None if `optimizer` is no ZeroRedundancyOptimizer."""
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    if module is None or not isinstance(optimizer, module.ZeroRedundancyOptimizer):
        return None
    if ZERO.is_on() and optimizer._overlap_with_ddp:
        raise HmpxError(
            "ZeroRedundancyOptimizer(overlap_with_ddp=True) steps in functions of its own, which hmpx does not see; "
            "leave overlap_with_ddp out"
        )
    return optimizer.optim


def refuse_left_buckets(zero: Any) -> None:
    """Raise if a ZeroRedundancyOptimizer sends buckets to the other ranks that its parameters are not in any more."""
    dtypes = {bucket.dtype for of_device in zero._buckets for bucket in of_device} if ZERO.is_on() else set()
    if dtypes and any(p.requires_grad and p.dtype not in dtypes for p in parameters(zero)):
        raise HmpxError(
            "ZeroRedundancyOptimizer(parameters_as_bucket_view=True) sends buckets that its parameters have left, so "
            "ranks would drift apart: cast the model (model.bfloat16()) before this optimizer is made"
        )


def share_names(outer: Optimizer, inner: Optimizer) -> None:
    """Give the parameters of `inner` the names, or the positions, that they have in `outer`."""
    shared = shared_names(inner)
    if len(shared) != len(parameters(outer)):
        shared.update((p, name) for name, p in named(outer, dict(shared)))


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
            raise HmpxError(f"model is {kind_of(model)}, not a torch.nn.Module")
        named = names_in(model)
        missing = [i for i, p in enumerate(params) if p not in named]
        if missing:
            raise HmpxError(
                f"parameter {missing[0]} of the optimizer is not in the model; of several modules with one optimizer, "
                "give torch.nn.ModuleList([...])"
            )
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


class Members:
    """The segment of each BF16 parameter of an optimizer, and the index of each parameter's group."""

    def __init__(self, optimizer: Optimizer, segments: list[Segment]) -> None:
        self.segments = {segment.param: segment for segment in segments}
        self.group = {p: i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
        self.elements = sum(map(share, self.group))  # of a rank


class BF16Parameters:
    """Finds the BF16 parameters of one optimizer, again only after something that they depend on has changed.

    Attributes:
        names: those that `attach` was given, by parameter.
        seen: names by `named_parameters()`, as they were first seen: a parameter keeps its name as groups come and go.
    """

    def __init__(self, settings: Settings, names: dict[Parameter, str]) -> None:
        self._settings, self.names = settings, names
        self._known: tuple[tuple | None, list[Segment]] = None, []
        self.seen: dict[Parameter, str] = {}

    def forget(self) -> None:
        """Look at every parameter again."""
        self._known = None, []

    def segments(self, optimizer: Optimizer) -> list[Segment]:
        """Return a segment for each of them, whole."""
        now = layout(optimizer)
        if now is None or self._known[0] != now:
            ours = self.named(optimizer)
            for name, p in ours:
                refuse_shell(p, name)
            with torch.no_grad():
                _refuse_overlaps(ours)
                self._known = now, [self._segment(optimizer, p, name) for name, p in ours]
        return self._known[1]

    def named(self, optimizer: Optimizer) -> list[tuple[str, Parameter]]:
        """Return them with their names, without frozen shells (of quantized weights, say), which get no updates."""
        found = [(name, p) for name, p in self._all(optimizer) if p.dtype is torch.bfloat16]
        return [(name, p) for name, p in found if p.requires_grad or not is_shell(p)]

    def every(self, optimizer: Optimizer) -> list[Segment]:
        """Return a segment for each parameter of any dtype: masters may come before their parameter is BF16."""
        return [Segment(p, name, way=self._way(optimizer, p, name)) for name, p in self._all(optimizer)]

    def last(self, optimizer: Optimizer, p: Parameter) -> Segment:
        """Return a segment for a parameter that was there when parameters were looked at before."""
        name = self.names.get(p) or self.seen.get(p, "")
        return Segment(p, name, way=self._way(optimizer, p, name))

    def _all(self, optimizer: Optimizer) -> list[tuple[str, Parameter]]:
        seen = {p: self.seen[p] for p in parameters(optimizer) if p in self.seen}
        found = list(named(optimizer, {**seen, **self.names}))
        have_names = {p for group in optimizer.param_groups if "param_names" in group for p in group["params"]}
        self.seen.update((p, name) for name, p in found if p in have_names)
        return found

    def _way(self, optimizer: Optimizer, p: Parameter, name: str) -> Way:
        way = self._settings.way(name)
        if not isinstance(way.state_dtype, str):
            return way
        held = torch.bfloat16 if wants_bf16(optimizer) else held_dtype(way.state_dtype, p)
        return way._replace(state_dtype=held)

    def _segment(self, optimizer: Optimizer, p: Parameter, name: str) -> Segment:
        if getattr(p, "_fsdp_flattened", False):
            raise HmpxError(
                f"parameter {name!r} belongs to FullyShardedDataParallel (FSDP1), which flattens parameters into one "
                "and hides where an element belongs; shard the model with torch.distributed.fsdp.fully_shard"
            )
        return Segment(p, name, box=box_of(p, name), way=self._way(optimizer, p, name))


def _refuse_overlaps(named: list[tuple[str, Parameter]]) -> None:
    """Raise if parameters share elements in memory; needs `torch.no_grad()`."""
    by_storage: dict[int, list[tuple[str, Tensor]]] = {}
    for name, p in named:
        held = local(p) if shows_values(p) else None
        if held is not None and held.numel():
            by_storage.setdefault(held.untyped_storage().data_ptr(), []).append((name, held))
    for views in by_storage.values():
        if len(views) < 2:
            continue
        first = views[0][1]
        size = first.untyped_storage().nbytes() // first.element_size()
        owner = torch.zeros(size, dtype=torch.int32, device="cpu")
        for number, (name, view) in enumerate(views, 1):
            here = owner.as_strided(view.shape, view.stride(), view.storage_offset())
            if before := int(here.max()):
                raise HmpxError(
                    f"parameters {views[before - 1][0]!r} and {name!r} share memory, and each update would undo the "
                    "other: give the optimizer one of them, or make them one Parameter (head.weight = embedding.weight)"
                )
            here.fill_(number)
