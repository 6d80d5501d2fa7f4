"""Recipes: one file, or one dict, for what a whole training run does with precision.

A recipe's keys are the arguments of `hmpx.convert` and `hmpx.attach`, and what the parameters are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, ClassVar

import torch
import yaml

from hmpx.base.tensors import dtype_name
from hmpx.errors import HmpxError, Origin, Places, errors_at
from hmpx.ops.computing.kernels import KernelsAsked
from hmpx.ops.overlays import Overlay, read_overlay
from hmpx.ops.policies.lists import FP8_FORMAT, LIST_KEYS, LOW_PRECISION, SIDES, OpLists, read_lists
from hmpx.ops.policies.policy import OptLevel, Policy, Where, build_policy
from hmpx.recipes.keys import (
    DTYPES,
    LISTS,
    MAPPED,
    MODULES,
    OF_DTYPES,
    PARAMETERS,
    STATE_DTYPES,
    check,
    dtype_of,
    nxd_keys,
    spelled_out,
)
from hmpx.updates.holding.state_forms import STATE_FORMS, state_name
from hmpx.updates.holding.stores import WAYS, Settings, Weights, legal_values
from hmpx.updates.stepping.released import Waiting
from hmpx.updates.stepping.transfers import room_size
from hmpx.version import __version__


@dataclass(frozen=True, repr=False)
class Recipe:
    """What a run does with precision. ``print(recipe)`` writes it as a file that needs no other one.

    Attributes:
        opt_level, bf16_file_path, fp32_file_path, promote_file_path, fp8_file_path, bf16, fp32, promote, fp8: as of
            `hmpx.convert`; opt_level None leaves torch's ops alone.
        fp8_format, low_precision, kernels, where, dtype_map: as of `hmpx.convert`, with dtypes by name.
        verbose: its `isVerbose`: log each distinct decision of the op lists once.
        modules: rules for parts of the model, by the name of a module or a pattern (``"lm_head"``, ``"*.attn"``), or by
            what it is for (``"<head>"``, ``"<norms>"``, ``"<last 15%>"`` of the blocks): a dtype for every op in it, or
            lists that lie over those around it (``{"fp32": ["linear"]}``); see `hmpx.policy_for`. The innermost module
            decides, of two patterns for one the last.
        parameter_dtype: "bfloat16" or "float32", of the model's parameters. None: they keep theirs, as in a file or
            dict with nothing but keys about ops.
        parameters: exceptions by the name of a parameter or a pattern (``"lm_head.*"``, ``"*.norm*"``), to this and to
            `weights` and `state_dtype`: a dtype, or a mapping of any of ``dtype``, ``weights``, ``state_dtype``
            (``{"*.norm*": "float32", "*.bias": {"weights": "master"}}``). The last that fits decides; what it leaves
            out is as for the others.
        weights, state_dtype, use_fp32_grad_acc, use_master_weights_in_ckpt, release_gradients, fused, seed: as of
            `hmpx.attach`, with dtypes by name (``"bf16"``, ``"fp32"`` for short).

    `from_nxd()` makes one of NxD's configuration, `inlined()` one without paths. `policy()`, `overlays()`, `mapped()`
    and `settings()` say what it means for `hmpx.convert`, `hmpx.policy_for` and `hmpx.attach`, `bytes_per_parameter()`
    and `footprint()` what it takes.

    Example:
        >>> recipe = hmpx.Recipe(bf16=("linear",), fp32=("softmax",), promote=(), weights="split")
        >>> recipe.policy().bf16, recipe.settings().weights, sum(recipe.bytes_per_parameter().values())
        (('linear',), 'split', 14.0)
        >>> print(recipe)
        # Written by hmpx ... with torch ...
        opt_level: O1
        bf16: [linear]
        fp32: [softmax]
        ...
        release_gradients: false
        <BLANKLINE>
    """

    opt_level: OptLevel | None = "O1"
    bf16_file_path: str = ""
    fp32_file_path: str = ""
    promote_file_path: str = ""
    fp8_file_path: str = ""
    bf16: Sequence[str] | None = None
    fp32: Sequence[str] | None = None
    promote: Sequence[str] | None = None
    fp8: Sequence[str] | None = None
    fp8_format: str | Mapping[str, Any] | None = None
    low_precision: str | None = None
    modules: Mapping[str, Any] = field(default_factory=dict)
    kernels: KernelsAsked = "auto"
    where: Where = "model"
    verbose: bool = False
    dtype_map: Mapping[str, str] = field(default_factory=dict)
    parameter_dtype: str | None = "bfloat16"
    parameters: Mapping[str, Any] = field(default_factory=dict)
    weights: Weights = Settings.weights
    state_dtype: str = state_name(Settings.state_dtype)
    use_fp32_grad_acc: bool = Settings.use_fp32_grad_acc
    use_master_weights_in_ckpt: bool = Settings.use_master_weights_in_ckpt
    release_gradients: bool = Settings.release_gradients
    fused: bool | None = Settings.fused
    seed: int | None = Settings.seed
    # What a recipe knows beside its keys, of the file that it was read from:
    _places: ClassVar[Places] = {}  # the line of each key, and of what is in it
    _under_zero: ClassVar[Mapping[str, Any]] = {}  # keys that NxD leaves to a default, which is another under ZeRO-1
    _keeps_dtype: ClassVar[bool] = False  # it is of ops alone, and so has no word on the dtype of parameters

    def __post_init__(self) -> None:
        """
        Raises:
            HmpxError: a value that the key cannot have, with the legal ones.
        """
        values = {name: spelled_out(name, getattr(self, name)) for name in KEYS}
        for name, value in values.items():
            check(name, value, KEYS, LEGAL)
        rules = values[PARAMETERS].items()  # one that says a dtype alone is that dtype
        values[PARAMETERS] = {name: rule["dtype"] if [*rule] == ["dtype"] else rule for name, rule in rules}
        for name, value in values.items():
            object.__setattr__(self, name, value)
        OpLists.of({key: values[key] for key in LIST_KEYS}, "recipe")

    @property
    def parameter_rules(self) -> dict[str, dict[str, Any]]:
        return spelled_out(PARAMETERS, self.parameters)

    @classmethod
    def from_nxd(cls, config: Mapping[str, bool] | None = None, *, with_zero: bool = False) -> Recipe:
        """Make the recipe that NeuronX Distributed's `mixed_precision_config` means: ``nxd-standard`` with its changes.

        Args:
            config: any of NxD's keys, with its defaults for the others: ``use_master_weights`` (FP32 masters, else
                BF16 rounded to nearest) and ``use_fp32_grad_acc`` are true exactly under ZeRO-1,
                ``use_master_weights_in_ckpt`` is false.
            with_zero: whether the optimizer is a `ZeroRedundancyOptimizer`.

        Raises:
            HmpxError: another key, or a value that is neither True nor False.

        Example:
            >>> hmpx.Recipe.from_nxd({"use_master_weights": True}).weights
            'master'
        """
        return cls(**nxd_keys(config, with_zero))

    def __str__(self) -> str:
        """Return the recipe as a file that needs no other file, with the versions that it was written with.

        What NxD's configuration leaves to a default that is another under ZeRO-1 is told in a comment.
        """
        keys = {key: value for key, value in asdict(self.inlined()).items() if value not in ("", {}, None)}
        keys = {key: value for key, value in keys.items() if key != "verbose" or value}
        keys |= {
            "opt_level": self.opt_level,
            "parameter_dtype": self.parameter_dtype,
            **{side: list(keys[side]) for side in SIDES if side in keys},
        }
        text = yaml.safe_dump(keys, sort_keys=False, default_flow_style=None, width=116)
        zero = yaml.safe_dump(dict(self._under_zero), default_flow_style=True, width=116)
        said = f"# Under ZeRO-1 NxD's defaults were others, which a file of keys cannot say: {zero}" * bool(
            self._under_zero
        )
        return f"# Written by hmpx {__version__} with torch {torch.__version__}.\n{said}{text}"

    def __repr__(self) -> str:
        said = [f"{key}={value!r}" for key, value in asdict(self).items() if value != getattr(USUAL, key)]
        return f"hmpx.Recipe({', '.join(said)})"

    def inlined(self) -> Recipe:
        """Read the list files, and return the recipe with their names in place of their paths.

        Raises:
            HmpxError: as `policy`.
        """
        policy = self.policy()
        if policy is None:
            return changed(self, **dict.fromkeys(LISTS, ""))
        names = {side: getattr(policy, side) for side in SIDES} if self.opt_level == "O1" else {}
        if policy.fp8:
            names[FP8_FORMAT] = policy.fp8_format.keys()
        elif names:
            names["fp8"] = None
        low = dtype_name(policy.low_precision)
        return changed(self, **dict.fromkeys(LISTS, ""), **names, low_precision=low)

    def under_zero(self, in_use: bool = True) -> Recipe:
        """Return the recipe for optimizers under ZeRO-1, where NxD's configuration has other defaults."""
        return changed(self, **self._under_zero) if in_use else self

    def naming_lines(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which errors begin with the file and line of the key that they are about."""
        return naming_lines(self._places, {key: getattr(self, key) for key in LISTS})

    @property
    def lists(self) -> OpLists:
        """The lists that the recipe says itself, each name with its place; those of its files are not among them."""
        return OpLists.of({key: getattr(self, key) for key in LIST_KEYS}, "recipe", self._places)

    def policy(self) -> Policy | None:
        """Return which op runs under which rule; None where torch's ops are left alone.

        Raises:
            HmpxError: a list that is wrong; a key about ops where ops are left alone. With the recipe's file and line,
                if it has one.
        """
        with self.naming_lines():
            if self.opt_level is not None:
                files = read_lists(**{key: getattr(self, key) for key in LISTS})
                return build_policy(self.opt_level, self.lists.over(files))
            for key in (LOW_PRECISION, "kernels", "where", FP8_FORMAT, "dtype_map", MODULES, *SIDES, *LISTS):
                if (value := getattr(self, key)) and value != getattr(USUAL, key):
                    later = [place for place in self._places if place in ((key,), ("opt_level",))]
                    what = f"{key} {value}" if isinstance(value, str) else key
                    said = f"{what} would do nothing: opt_level null leaves torch's ops as they are"
                    raise HmpxError(said, key=later[-1] if later else ())
            return None

    @property
    def place(self) -> str:
        return str(self._places.get(("opt_level",), "a recipe"))

    def overlays(self) -> dict[str, Overlay]:
        """Return the rules in `modules`, by pattern.

        Raises:
            HmpxError: a rule that says nothing, or names no op. With the recipe's file and line, if it has one.
        """
        found: dict[str, Overlay] = {}
        with self.naming_lines():
            for pattern, rule in self.modules.items():
                above = (MODULES, pattern)
                places = {key[2:]: place for key, place in self._places.items() if key[:2] == above and len(key) > 2}
                where = f"{self._places.get(above, 'recipe')}, {MODULES} {pattern!r}"
                with errors_at({}, key=above):
                    found[pattern] = read_overlay(rule, where, f"{MODULES}: {pattern!r}", places=places)
        return found

    def mapped(self) -> dict[torch.dtype, torch.dtype]:
        """Return `dtype_map` with torch's dtypes."""
        return {MAPPED[old]: DTYPES[new] for old, new in self.dtype_map.items()}

    def footprint(self, states: int = 2, name: str | None = None) -> Footprint:
        """Return what a parameter takes, as `bytes_per_parameter`."""
        settings, dtype = self.settings(), None
        if name is not None:
            way, dtype = settings.way(name), dtype_of(name, self.parameters)
            settings = replace(settings, weights=way.weights, state_dtype=way.state_dtype)
        found = footprint(settings, dtype or DTYPES[self.parameter_dtype or "float32"], states)
        policy = self.policy()
        by_codes = policy is not None and policy.fp8 and policy.fp8_format.scaling not in ("mx", "nvfp4")
        return replace(found, codes=1) if by_codes else found

    def bytes_per_parameter(self, states: int = 2, name: str | None = None) -> dict[str, float]:
        """Return bytes of weights, gradients, masters and state for each parameter, between backward and step.

        Args:
            states: tensors of a parameter's size that the optimizer keeps: 2 for Adam, 1 for momentum.
            name: of the parameter; None: of a parameter that no exception names.
        """
        each = self.footprint(states, name)
        return {part: getattr(each, part) for part in ("weights", "gradients", "masters", "state")}

    def settings(self) -> Settings:
        """Return the settings for `hmpx.attach`.

        Raises:
            HmpxError: settings that exclude each other, with the recipe's file and line, if it has one.
        """
        own = {key: getattr(self, key) for key in _SETTINGS if key not in ("state_dtype", PARAMETERS)}
        narrow = "bfloat16" in (self.parameter_dtype or "bfloat16", *self.dtype_map.values())
        with self.naming_lines():
            rules = self.parameter_rules.items()
            if not narrow and all(rule.get("dtype") != "bfloat16" for _, rule in rules):
                for key in _SETTINGS:
                    value = getattr(self, key)
                    if key not in ("seed", PARAMETERS) and value != getattr(USUAL, key):
                        raise HmpxError(
                            f"{key}: {str(value).lower()} would do nothing: by parameter_dtype all parameters are "
                            "float32, which get plain steps; say parameter_dtype: bfloat16 too",
                            key=(key,),
                        )
            for pattern, rule in rules if not narrow else ():
                if rule and "dtype" not in rule:
                    raise HmpxError(
                        f"{PARAMETERS}: {pattern!r}: {' and '.join(rule)} would do nothing: by parameter_dtype these "
                        "parameters are float32, which gets plain steps; say dtype: bfloat16 too",
                        key=(PARAMETERS, pattern),
                    )
            ways = {pattern: {key: rule[key] for key in rule if key != "dtype"} for pattern, rule in rules}
            own["parameters"] = ways if any(ways.values()) else {}  # `hmpx.attach` is not told of dtypes
            return Settings(state_dtype=STATE_DTYPES[self.state_dtype], **own)


KEYS = tuple(each.name for each in fields(Recipe))
LEGAL = legal_values(Recipe) | OF_DTYPES
_SETTINGS = tuple(each.name for each in fields(Settings))  # keys that are settings of the optimizer
USUAL = Recipe()  # what each key is where it is left out
DEFAULT = Recipe(parameter_dtype="float32")  # where no recipe is named: the default lists, FP32 weights


@contextlib.contextmanager
def naming_lines(places: Places, paths: Mapping[str, str]) -> Iterator[None]:
    """Let errors begin with the place of the key that they are about; of a list file, of the key that names it.

    paths: of list files, by their keys.
    """
    with errors_at(places):
        try:
            yield
        except HmpxError as error:
            for key, path in paths.items():
                line = places.get((key,))
                if line and line.line and isinstance(error.place, Origin) and error.place.path == path:
                    raise type(error)(f"{key}: {error}", line) from None
            raise


def changed(recipe: Recipe, **keys: Any) -> Recipe:
    """Return the recipe with other values for some keys; the other keys keep their places."""
    places = {key: place for key, place in recipe._places.items() if key[0] not in keys}
    zero = {key: value for key, value in recipe._under_zero.items() if key not in keys}
    return noted(replace(recipe, **keys), places, zero, recipe._keeps_dtype and "parameter_dtype" not in keys)


def noted(recipe: Recipe, places: Places, under_zero: Mapping[str, Any], keeps_dtype: bool = False) -> Recipe:
    vars(recipe).update(_places=places, _under_zero=under_zero, _keeps_dtype=keeps_dtype)
    return recipe


# Ways to distribute a model, each with the tensors that are divided among the ranks.
MODES = {
    "ddp": frozenset(),
    "zero1": frozenset({"masters", "state"}),
    "fsdp2": frozenset({"weights", "gradients", "masters", "state"}),
}
_FP32 = 4
_STEPPED_BY = {
    None: "hmpx's kernels, as of Adam: the class of the optimizer chooses (fused=None)",
    True: "hmpx's kernels (fused=True)",
    False: "the optimizer's own code (fused=False)",
}


@dataclass(frozen=True)
class Footprint:
    """Bytes per parameter, of a model that is whole on one rank.

    Attributes:
        weights, gradients: between backward and step. Released gradients count as none.
        buckets: the buffers in which DistributedDataParallel exchanges gradients, unless gradients are views of them
            (``gradient_as_bucket_view=True``, not with use_fp32_grad_acc).
        masters: beside the weights, 4 (FP32), 2 or 1 (the lower halves, of 16 or 8 bits).
        state: of the optimizer, between two steps. In codes, with the scales of rows that are whole blocks; of one
            with fewer than 128 elements, and of others' last blocks, each scale serves fewer. State of parameters of
            one dimension is in BF16, and that in rows of an odd number of elements in 8 bits where 4 are asked for.
        waiting: of a gradient that is released; so many elements wait in backward, and the parameter that makes it
            enough (`hmpx.updates.stepping.released`).
        copies: in a step, for each element that is stepped at once: FP32 weight and gradient, FP32 state that is not
            held so, and two temporaries of torch's own. These are the elements of the largest parameter, or of as many
            as `hmpx.updates.stepping.transfers` says, if that is more. 0 where hmpx's kernels step. A class that hmpx
            does not know sees all at once; on a CPU, up to 128 MiB of that stay.
        stepped_by: who takes the steps, and by whose choice.
        codes: of a weight in FP8, from its forward to its backward, on a GPU; sharded models have those of whole
            weights on each rank, and none where layers are checkpointed.
    """

    weights: int
    gradients: int
    buckets: int
    masters: float
    state: float
    copies: int
    waiting: int = 0
    codes: int = 0
    stepped_by: str = ""

    def transient(self, elements: float, device: str = "cpu", largest: float = 0) -> int:
        """Return the most bytes that a step allocates beyond the rest.

        Args:
            elements: of the parameters that this rank steps.
            largest: of the largest of them. 0: it is not known, and taken for a small one.
        """
        waiting = Waiting.ELEMENTS if device == "cpu" else Waiting.ELEMENTS_OF_ACCELERATORS
        room = max(room_size(int(elements), torch.device(device)), int(largest))
        at_once = (self.copies, room), (self.waiting, waiting)
        return sum([each * min(size, int(elements)) for each, size in at_once])

    def on_rank(self, elements: float, ranks: int, mode: str) -> float:
        """Bytes on one of `ranks`, each a GPU. For a sharded model, without the layer that is gathered at the time."""
        parts = ("weights", "gradients", "masters", "state")
        held = sum(getattr(self, part) / (ranks if part in MODES[mode] else 1) for part in parts)
        if mode != "fsdp2" and ranks > 1:
            held += self.buckets
        stepped = elements / ranks if "state" in MODES[mode] else elements
        return held * elements + max(self.transient(stepped, "cuda"), self.codes * elements)


def footprint(settings: Settings, dtype: torch.dtype, states: int = 2) -> Footprint:
    """Return the footprint of `settings` for parameters of `dtype`, float32 or bfloat16.

    Args:
        states: tensors of a parameter's size that the optimizer keeps: 2 for Adam, 1 for momentum.
    """
    if dtype is torch.float32:  # a plain step
        return Footprint(_FP32, _FP32, _FP32, 0, states * _FP32, 0, stepped_by="the optimizer's own code: FP32 weights")
    wide_gradients = settings.use_fp32_grad_acc
    form = STATE_FORMS[settings.state_dtype]
    return Footprint(
        weights=dtype.itemsize,
        gradients=0 if settings.release_gradients else _FP32 if wide_gradients else dtype.itemsize,
        buckets=dtype.itemsize,
        masters=WAYS[settings.weights].bytes_beside,
        state=states * form.bytes_each,
        copies=_FP32 * (4 + (0 if form.as_left else states)) if settings.fused is False else 0,
        stepped_by=_STEPPED_BY[settings.fused],
        waiting=dtype.itemsize if settings.release_gradients else 0,
    )
