"""`convert` puts casts into torch, `restore` takes all of them away, and a `Conversion` is the handle of one.

Whatever can fail (a list that cannot be read, a name that does not exist) fails before torch is changed.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch

from hmpx.base import process_state, region_state
from hmpx.base.changes import Changes
from hmpx.base.process_state import Installation, casts_regions, variable
from hmpx.base.raw import none_collected
from hmpx.errors import HmpxError, OpListError, did_you_mean, with_hints
from hmpx.ops import compilers
from hmpx.ops.autocast import AutocastRegions
from hmpx.ops.casts import Casts, PatchTable, governs_autocast
from hmpx.ops.computing.kernels import GAINING, KernelsAsked, choose
from hmpx.ops.dtype_map import DtypeMap
from hmpx.ops.forwards import replaced_forwards, wrap_forwards
from hmpx.ops.module_rules import ModuleRule, scopes_of_rules
from hmpx.ops.overlays import Overlay, Policies, made_of, number_inside, with_names
from hmpx.ops.policies.catalog import catalog
from hmpx.ops.policies.fp8_format import Format
from hmpx.ops.policies.lists import SIDES, read_lists
from hmpx.ops.policies.policy import WHERE, OptLevel, Policy, Unknown, Where, build_policy
from hmpx.ops.user_functions import check_functions
from hmpx.ops.wrapping.observing import FirstStep, Observer, ObserverGroup, VerboseLog, positions_in_words
from hmpx.ops.wrapping.wrappers import Patch
from hmpx.updates import step_hooks
from hmpx.updates.attach import detach

logger = logging.getLogger("hmpx")


class Conversion(Installation):
    """The handle that `convert` returns; it says what was changed.

    As a context manager, it ends the conversion on exit and puts the one that it replaced in force again. If another
    `convert` has replaced it by then, the exit changes nothing.

    Attributes:
        policy: which op runs under which rule; prints as an op list file.
        kernels: what computes the ops that run in BF16 or FP16 on a CPU; prints in words.
        where: "model" or "everywhere", where ops are cast.
        active: whether this is the conversion that is in force.
        patched: every attribute of torch, or of a module of yours, that was changed.
        rebound: names that held a function of torch before, and hold its wrapper now.
        escaped: ops that the policy names and the conversion cannot reach, and whoever holds a function of torch where
            it is not replaced (a generator, a key of a table, a node of an fx graph), one sentence each. To ask takes a
            second or more: everything that is alive is looked through.

    `restore()` ends it; nothing happens if it is not the one in force.

    Example:
        >>> with hmpx.convert() as handle:
        ...     handle.active, inputs.matmul(inputs.t()).dtype
        (True, torch.bfloat16)
        >>> handle.active, inputs.matmul(inputs.t()).dtype
        (False, torch.float32)
        >>> [patch.rule for patch in handle.patched if patch.label == "torch.softmax"]
        [<Rule.FP32: 'fp32'>]
    """

    def __init__(
        self,
        policy: Policy,
        verbose: bool = False,
        enabled: bool = True,
        dtype_map: Mapping[torch.dtype, torch.dtype] | None = None,
        kernels: KernelsAsked = "auto",
        rules: Sequence[ModuleRule] = (),
        where: Where = "model",
    ) -> None:
        super().__init__()
        if where not in WHERE:
            raise HmpxError(f"where={where!r} is none of {', '.join(WHERE)}{did_you_mean(str(where), WHERE)}")
        for name, value in (("isVerbose", verbose), ("enabled", enabled)):
            if value not in (True, False):  # "False", say, which is true
                raise HmpxError(f"{name}={value!r} is neither True nor False")
        check_functions({0: policy, **{-i: rule.overlay.over(policy) for i, rule in enumerate(rules, 1)}})
        self.where: Where = where
        self.policy, self._verbose, self._enabled = policy, verbose, enabled
        self.dtype_map = DtypeMap(dtype_map) if dtype_map else None
        self.kernels = choose(kernels)
        self.rules, self._policies = list(rules), Policies({0: policy})
        self._log = VerboseLog()
        self._rounded: dict[str, int] = {}
        self._logged_once: set[str] = set()
        self._first_step = FirstStep(policy.low_precision)
        self.prepared: WeakKeyDictionary[torch.nn.Module, Any] = WeakKeyDictionary()
        self.prepared_by: Any = None  # the recipe, if `hmpx.prepare` has made this conversion
        self.leave: Callable[..., bool] | None = None  # ends what it does for some of several prepared models

    def _scopes(self) -> set[int]:
        """Return every scope that can occur: those of module rules, and of regions inside such modules."""
        scopes = scopes_of_rules() | {0}
        scopes |= {number_inside(scope, number) for scope in scopes for number in casts_regions.values()}
        alive = {*casts_regions.values(), *(rule.overlay.number for rule in process_state.module_rules)}
        return scopes | made_of(alive)  # those in which something may be running now

    def _learn(self, scopes: Iterable[int]) -> None:
        """Build wrappers for these scopes too."""
        with process_state.lock:
            new = {scope: self._policies.at(scope) for scope in scopes if scope not in self._policies}
            check_functions({0: self.policy, **new})
            self._policies.update(new)
            if not new or not self.active:
                return
            try:
                if self.dtype_map:  # its wrappers stand around ours
                    self.put_in_force_again()
                else:
                    self._casts.extend(self._changes)
            except BaseException:  # so that the next call builds them
                for scope in new:
                    del self._policies[scope]
                raise
        compilers.trace_anew()

    def expect(self, overlays: Iterable[Overlay]) -> None:
        """Build wrappers for rules that are about to be added."""
        self._learn([number_inside(0, overlay.number) for overlay in overlays])

    def add_rules(self, rules: Iterable[ModuleRule]) -> None:
        """Put rules of modules in force, which end with the conversion."""
        for rule in rules:
            self.rules.append(rule)
            if self.active:
                rule.apply(self._changes)
        self._learn(scopes_of_rules())

    def drop_rules(self, rules: Iterable[ModuleRule]) -> None:
        """End rules of modules before the conversion ends."""
        for rule in rules:
            self.rules.remove(rule)
            rule.remove()

    @property
    def policy_here(self) -> Policy:
        """The policy for ops that are called here and now; the innermost module rule or region decides."""
        return self._policies.at(region_state.scope())

    def _announce(self) -> None:
        """Log the two lines that HMP logs, and the reason if FP32 kernels replace BF16 ones."""
        logger.info("hmp:verbose_mode  %s", self._verbose)
        logger.info("hmp:opt_level  %s", self.policy.opt_level)
        if self._verbose and (positions := positions_in_words(self.policy)):
            logger.info("hmpx: %s", positions)
        if self.policy.low_precision in self.kernels.widened:
            logger.info("hmpx: %s: %s", self.kernels, GAINING)

    @property
    def patched(self) -> tuple[Patch, ...]:
        """Every attribute that this conversion changes: `label`, `op`, `rule`, `owner`, `original` and more."""
        return self._casts.patched

    @property
    def rebound(self) -> tuple[str, ...]:
        """Names that held a function of torch before `convert`, and hold its wrapper now."""
        return tuple(map(str, self._casts.rebound))

    @property
    def escaped(self) -> tuple[str, ...]:
        """What this conversion cannot reach, and who holds a function of torch now, one sentence each."""
        ops = catalog()
        names = [name for side in SIDES for name in getattr(self.policy, side)]
        unreachable = [
            f"{self.policy.origins.get(name, 'policy')}: {name} has no Python entry point in this torch"
            for name in names
            if name not in ops and "." not in name
        ]
        waiting = [f"{name} is not imported yet" for name in self._casts.waiting]
        captured = dict.fromkeys(map(str, self._casts.escaped))
        return (*unreachable, *waiting, *self._casts.foreign, *captured, *(replaced_forwards() if self.active else ()))

    def __repr__(self) -> str:
        state = "not in force" if not self.active else "active" if self._enabled else "active in enable_casts() only"
        return (
            f"<hmpx.Conversion {self.policy.opt_level}, {state}: {len(self.patched)} entry points patched, "
            f"{len(self.rebound)} captured names rebound, {len(self.escaped)} escaped; {self.kernels}; "
            f"where: {self.where}>"
        )

    @none_collected()
    def put_in_force_again(self) -> None:
        """Build every wrapper again, from torch and the observers as they are now. The log of decisions goes on."""
        self._log.goes_on = True
        try:
            self._changes.close()
            self._apply()
        finally:
            self._log.goes_on = False

    def _change(self, changes: Changes) -> None:
        everywhere = self.where == "everywhere"
        observers = [*([self._log] if self._verbose else ()), *process_state.observers]
        observer = ObserverGroup(observers) if observers else None

        self._put_variables(changes, observer)
        for rule in self.rules:
            rule.apply(changes)
        wrap_forwards(changes)
        self._policies.update({scope: self._policies.at(scope) for scope in self._scopes()})
        changes.callback(step_hooks.uninstall)
        step_hooks.install()  # first: the patch table wraps what it finds
        self._casts = Casts(PatchTable(self._policies, observer, self.dtype_map, self.kernels, everywhere))
        if self._verbose:
            self._log.apply(changes)
        if not self._log.goes_on:
            self._announce()
        if self.policy.bf16:
            self._first_step.apply(changes)
        if governs_autocast(self.policy):
            AutocastRegions(self._policies).apply(changes)
        self._casts.apply(changes)
        region_state.set_converted(True, enabled=self._enabled, everywhere=everywhere)
        changes.callback(region_state.set_converted, False)

    def _put_variables(self, changes: Changes, observer: Observer | None) -> None:
        """Give the variables of the process those of this conversion."""
        own = {"prepared": self.prepared, "learn": self._learn, "observer": observer}
        own |= {"gradients_rounded": self._rounded, "logged_once": self._logged_once}
        for noted in ("models", "averages"):
            own[noted] = modules = dict[int, Any]()
            changes.callback(modules.clear)
        for name, value in own.items():
            changes.put(variable(name), value)


def install(conversion: Conversion) -> Conversion:
    """Put a conversion that has just been made in force, and return it; its rules of modules end with it."""
    conversion._install()
    return conversion


def installed() -> Conversion | None:
    return process_state.in_force(Conversion)


@with_hints
def convert(
    opt_level: OptLevel = "O1",
    bf16_file_path: str | os.PathLike[str] | None = "",
    fp32_file_path: str | os.PathLike[str] | None = "",
    isVerbose: bool = False,
    *,
    promote_file_path: str | os.PathLike[str] | None = "",
    fp8_file_path: str | os.PathLike[str] | None = "",
    bf16: Iterable[str] | None = None,
    fp32: Iterable[str] | None = None,
    promote: Iterable[str] | None = None,
    fp8: Iterable[str] | None = None,
    fp8_format: Format | str | Mapping[str, Any] | None = None,
    unknown: Unknown = "error",
    enabled: bool = True,
    low_precision: torch.dtype | str | None = None,
    dtype_map: Mapping[torch.dtype, torch.dtype] | None = None,
    kernels: KernelsAsked = "auto",
    where: Where = "everywhere",
) -> Conversion:
    """Run torch's ops in the precision that op lists say.

    A second call replaces the first one; as a ``with`` statement, it does so until the end of the block.

    Args:
        opt_level: "O1": the lists decide. "O2": convolutions, linear and matrix products in BF16, every other op that
            computes in FP32; no list may be given.
        bf16_file_path, fp32_file_path, promote_file_path, fp8_file_path: op list files, read before the call returns.
            ``""`` and None stand for the default list. A YAML or JSON file given for one side also fills the sides not
            given.
        bf16, fp32, promote, fp8: the same lists, name by name, in the place of a file.
        fp8_format: how ops in the fp8 list are multiplied: "tensorwise", "rowwise", "blockwise", "mx", "mx-floor", of
            four bits "mxfp4" and "nvfp4", or keys, as in ``{"scaling": "rowwise", "backward": "e4m3"}``. None: what a
            list file says, else "tensorwise". Inputs, results and gradients are in BF16.
        isVerbose: log each distinct decision once (logger "hmpx"), with the line of the caller's code.
        unknown: what an unknown name in a list is: "error", or "warn" to skip it.
        enabled: True casts everywhere except in `disable_casts()` regions; False only in `enable_casts()` regions.
        low_precision: torch.bfloat16 or torch.float16: the dtype for ops in the bf16 list and for those of O2. With
            FP16, scale the loss (`torch.amp.GradScaler`). None: what a list file says, else torch.bfloat16.
        dtype_map: replaces a dtype wherever the program asks for it: torch.float32 and torch.float64 by torch.bfloat16
            and torch.float32. It acts on the default dtype, factory functions, ``x.float()``, ``x.double()``,
            ``x.to(dtype)``, ``dtype=``, module construction, `torch.load` and NumPy arrays, and not inside
            `disable_casts()` and optimizer steps.
        kernels: which kernels compute BF16, FP16 and FP8 ops on a CPU. "native": torch's kernels for that dtype, with
            the bits of torch.autocast. "float32": FP32 kernels on the same BF16 inputs, for matrix products,
            convolutions, attention and recurrences; results and gradients are rounded to BF16. "auto": "float32" for
            a dtype that the CPU has no instructions for (native kernels take up to 50 times as long there), else
            "native". "scaled_mm": "native", with torch's own FP8 product for the fp8 list, as a reference; otherwise
            FP8 codes are multiplied in BF16, or under "float32" in FP32. An NVIDIA GPU with FP8 tensor cores (sm_89 and
            later) multiplies codes on them, whatever is said here; an older GPU in BF16, which is logged at INFO. Other
            devices, ``out=``, in-place ops, tensor subclasses and `disable_casts()` always use native kernels.
        where: "everywhere" casts each call of a listed op, whoever makes it, as HMP did. "model" casts the ops of
            models: those called while the forward of a module with parameters runs in this thread; those with a tensor
            that requires a gradient, while grad mode is on; losses (ops with a `reduction`); and ops of the fp32 list
            wherever BF16 or FP16 comes. What else a program computes (data, timesteps, averages of weights, metrics)
            is left to torch, unless torch would raise because other casts have made the dtypes of its tensors differ.
            Hooks of gradients and data loading are left to torch either way; a model with BF16 weights that a data set
            calls on FP32 computes in FP32. Regions (`enable_casts`, `casts`) act wherever they stand.

    Returns:
        A handle: `policy`, `patched`, `rebound`, `escaped`, `restore()`, and ``with convert(...):``.

    Raises:
        OpListError, UnknownOpError, OptLevelError: a list or level is wrong. HmpxError: so is another argument. Nothing
            is changed then, and an earlier conversion stays in force.

    Example:
        >>> handle = hmpx.convert()
        >>> logits = model(inputs)
        >>> logits.dtype, logits.softmax(-1).dtype
        (torch.bfloat16, torch.float32)
        >>> hmpx.restore()
    """
    with none_collected():
        files = (bf16_file_path, fp32_file_path, promote_file_path, fp8_file_path)
        paths = dict(zip(SIDES, files, strict=True))
        names = dict(zip(SIDES, (bf16, fp32, promote, fp8), strict=True))
        if both := [side for side in paths if paths[side] and names[side] is not None]:
            raise OpListError(f"hmpx.convert: {both[0]} and {both[0]}_file_path: which of the two?")
        lists = with_names(read_lists(*paths.values()), names, sys._getframe(1))
        if fp8_format is not None:
            lists = replace(lists, fp8_format=Format.of(fp8_format))
        policy = build_policy(opt_level, lists, unknown, low_precision)
        return install(Conversion(policy, isVerbose, enabled, dtype_map, kernels, where=where))


def restore(*optimizers: torch.optim.Optimizer) -> None:
    """Put torch back exactly as it was, optimizer steps too unless a region is open or an optimizer attached.

    Args:
        optimizers: optimizers to detach too (`hmpx.detach`), which drops masters and rounds state to the dtype of the
            parameters. All others stay attached. After ``hmpx.prepare(model, optimizer, ...)``,
            ``hmpx.restore(optimizer)`` undoes everything except the dtype of the parameters. While other models are
            prepared, torch stays converted for these: the restored model is left uncast, and theirs are as before.

    Example:
        >>> before = id(torch.matmul)
        >>> handle = hmpx.convert()
        >>> id(torch.matmul) == before
        False
        >>> hmpx.restore()
        >>> id(torch.matmul) == before
        True
    """
    with process_state.lock:  # another thread may prepare a model meanwhile
        conversion = installed()
        if conversion is None or conversion.leave is None or not conversion.leave(optimizers):
            process_state.end_all()
            process_state.prepared.clear()
    for optimizer in optimizers:
        detach(optimizer)
    step_hooks.uninstall()
