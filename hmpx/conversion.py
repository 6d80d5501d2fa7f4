"""The conversion that is in force: all that casts by op lists change in torch, and the handle that undoes it."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch

from hmpx.base import installation, process_state, region_state
from hmpx.base.changes import Changes
from hmpx.base.garbage import none_collected
from hmpx.base.installation import Installation
from hmpx.base.process_state import casts_regions, place
from hmpx.errors import HmpxError, did_you_mean
from hmpx.ops import compilers
from hmpx.ops.autocast import AutocastRegions
from hmpx.ops.casts import Casts, PatchTable, governs_autocast
from hmpx.ops.computing.kernels import GAINING, Kernels, KernelsAsked, choose
from hmpx.ops.decision_log import FirstStep, VerboseLog, positions_in_words
from hmpx.ops.dtype_map import DtypeMap
from hmpx.ops.forwards import replaced_forwards, wrap_forwards
from hmpx.ops.model_lists import ListsRule
from hmpx.ops.module_rules import ModuleRule, scopes_of_rules
from hmpx.ops.overlays import Overlay
from hmpx.ops.policies.catalog import catalog
from hmpx.ops.policies.lists import SIDES
from hmpx.ops.policies.policy import WHERE, Policy, Where
from hmpx.ops.policies.scopes import Policies, made_of, number_inside
from hmpx.ops.user_functions import UserFunctions
from hmpx.ops.wrapping.observing import Several
from hmpx.ops.wrapping.switch import Switch
from hmpx.ops.wrapping.wrappers import Patch
from hmpx.updates import step_hooks

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
        verbose: bool,
        enabled: bool,
        dtype_map: DtypeMap | None,
        kernels: Kernels,
        rules: Sequence[ModuleRule],
        where: Where,
    ) -> None:
        super().__init__()
        self.where: Where = where
        self.policy, self.kernels = policy, kernels
        self.rules, self._policies = list(rules), Policies({0: policy})
        self._verbose, self._enabled, self.dtype_map = verbose, enabled, dtype_map
        self._log = VerboseLog()
        self._rounded: dict[str, int] = {}
        self._said: set[str] = set()
        self._first_step = FirstStep(policy.low_precision)
        self.prepared: WeakKeyDictionary[torch.nn.Module, Any] = WeakKeyDictionary()
        self.settings: Any = None  # of `recipes.prepared`, if it has made this conversion
        self.model_lists: tuple[int, ...] = ()

    def _scopes(self) -> set[int]:
        """Return every scope that can occur: those of module rules, and of regions inside such modules."""
        scopes = scopes_of_rules() | {0} | {number_inside(0, lists) for lists in self.model_lists}
        scopes |= {number_inside(scope, number) for scope in scopes for number in casts_regions.values()}
        alive = {*casts_regions.values(), *(rule.overlay.number for rule in process_state.module_rules)}
        return scopes | made_of(alive)  # those in which something may be running now

    def _learn(self, scopes: Iterable[int]) -> None:
        """Build wrappers for these scopes too."""
        with process_state.lock:
            new = {scope: self._policies.at(scope) for scope in scopes if scope not in self._policies}
            UserFunctions({0: self.policy, **new}, Switch()).check()
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

    def share(self, rules: Iterable[ListsRule], model_lists: tuple[int, ...]) -> None:
        """Let models have different lists from here on; other threads may be computing.

        rules: what puts their lists in force. model_lists: see `process_state`.
        """
        with process_state.lock:
            self._learn([number_inside(0, lists) for lists in model_lists])
            self.add_rules(rules)
            self.model_lists = model_lists
            self._changes.put(place("model_lists"), model_lists)
        compilers.forget_compiled()

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
        """Make every change of this conversion, from torch as it is now."""
        changes.put(place("prepared"), self.prepared)
        changes.put(place("model_lists"), self.model_lists)
        for rule in self.rules:
            rule.apply(changes)
        wrap_forwards(changes)
        self._policies.update({scope: self._policies.at(scope) for scope in self._scopes()})
        changes.put(place("learn"), self._learn)
        changes.put(place("gradients_rounded"), self._rounded)
        changes.put(place("said"), self._said)
        for noted in ("models", "averages"):
            changes.put(place(noted), modules := dict[int, Any]())
            changes.callback(modules.clear)
        changes.callback(step_hooks.uninstall)
        step_hooks.install()  # first: the patch table wraps what it finds
        observers = [*([self._log] if self._verbose else ()), *process_state.observers]
        observer = Several(observers) if observers else None
        everywhere = self.where == "everywhere"
        self._casts = Casts(PatchTable(self._policies, observer, self.dtype_map, self.kernels, everywhere))
        if self._verbose:
            self._log.apply(changes)
        if not self._log.goes_on:
            self._announce()
        if self.policy.bf16:
            self._first_step.apply(changes)
        if governs_autocast(self.policy):
            AutocastRegions(self._policies).apply(changes)
        changes.put(place("observer"), observer)
        self._casts.apply(changes)
        region_state.set_converted(True, enabled=self._enabled, everywhere=everywhere)
        changes.callback(region_state.set_converted, False)


def install(
    policy: Policy,
    verbose: bool = False,
    enabled: bool = True,
    dtype_map: Mapping[torch.dtype, torch.dtype] | None = None,
    kernels: KernelsAsked = "auto",
    rules: Sequence[ModuleRule] = (),
    where: Where = "model",
) -> Conversion:
    """Convert by a policy that is built already. `rules` of modules end with the conversion."""
    if where not in WHERE:
        raise HmpxError(f"where={where!r} is none of {', '.join(WHERE)}{did_you_mean(str(where), WHERE)}")
    policies = {0: policy, **{-i: rule.overlay.over(policy) for i, rule in enumerate(rules, 1)}}
    UserFunctions(policies, Switch()).check()
    mapping = DtypeMap(dtype_map) if dtype_map else None
    conversion = Conversion(policy, verbose, enabled, mapping, choose(kernels), rules, where)
    conversion._install()
    return conversion


def installed() -> Conversion | None:
    """Return the conversion that is in force."""
    return installation.current(Conversion)
