"""`convert` and `restore`: the one owner of what is installed in this process.

At most one conversion is installed. A second `convert` replaces the first; everything that can go wrong (a list that
does not read, a name that does not exist) goes wrong before torch is touched.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping

import torch

from hmpx import compiling, scope, scripting
from hmpx.captures import Capture, rebind
from hmpx.catalog import catalog
from hmpx.dtype_map import DtypeMap
from hmpx.functions import UserFunctions
from hmpx.oplist import read_lists
from hmpx.patching import Patch, PatchTable
from hmpx.policy import Policy, build_policy
from hmpx.updates import steps
from hmpx.verbose import VerboseLog

logger = logging.getLogger("hmpx")
_lock = threading.RLock()
_installed: Conversion | None = None
beside: set[Callable[[], None]] = set()  # what else `restore` calls


class Conversion:
    """What one `convert` did: the handle that it returns.

    As a context manager it restores torch on exit, unless another `convert` has replaced it by then.

    Attributes:
        policy: which op runs under which rule; prints as an op list file.
    """

    def __init__(
        self,
        policy: Policy,
        verbose: bool = False,
        enabled: bool = True,
        dtype_map: DtypeMap | None = None,
    ) -> None:
        self.policy = policy
        self._enabled = enabled
        self._log = VerboseLog() if verbose else None
        self._dtype_map = dtype_map
        self._table = PatchTable.build(policy, self._log and self._log.observer, dtype_map and dtype_map.patches)
        self._functions = UserFunctions(policy.user_functions(), policy.origins)
        self._captures: list[Capture] = []
        self._fast_path = torch.backends.mha.get_fastpath_enabled()

    @property
    def active(self) -> bool:
        """Whether this is the conversion that is installed now."""
        return _installed is self

    @property
    def patched(self) -> tuple[Patch, ...]:
        """Every attribute that this conversion changes: `label`, `op`, `rule`, `owner`, `original` and more."""
        return (*self._table.patches, *self._functions.patched.values())

    @property
    def rebound(self) -> tuple[str, ...]:
        """Names that had been captured before `convert` and now hold the wrapper."""
        return tuple(str(capture) for capture in self._captures if capture.rebound)

    @property
    def escaped(self) -> tuple[str, ...]:
        """What the policy names and this conversion does not reach, one sentence each."""
        ops = catalog()
        names = (*self.policy.bf16, *self.policy.fp32, *self.policy.promote)
        unreachable = [
            f"{self.policy.origins.get(name, 'policy')}: {name} has no Python entry point in this torch"
            for name in names
            if name not in ops and "." not in name
        ]
        waiting = [f"{name} is not imported yet" for name in self._functions.waiting]
        captured = dict.fromkeys(str(capture) for capture in self._captures if not capture.rebound)
        return (*unreachable, *waiting, *captured)

    def restore(self) -> None:
        """Take this conversion away again; nothing happens if it is not the installed one."""
        with _lock:
            if self.active:
                _take_away_installed()

    def __enter__(self) -> Conversion:
        return self

    def __exit__(self, *exception: object) -> None:
        self.restore()

    def __repr__(self) -> str:
        state = "restored" if not self.active else "active" if self._enabled else "active in enable_casts() only"
        return (
            f"<hmpx.Conversion {self.policy.opt_level}, {state}: {len(self.patched)} entry points patched, "
            f"{len(self.rebound)} captured names rebound, {len(self.escaped)} escaped>"
        )

    def _apply(self) -> None:
        steps.install()
        try:
            self._captures = self._table.apply()
            self._functions.apply()
            self._captures += rebind(self._functions.replacements())
            compiling.install(self._table.originals(), f"{self.policy}{self._dtype_map or ''}")
            scripting.install(self._table.originals())
            if self.policy.bf16 or self.policy.fp32:
                # TransformerEncoder in eval would run in one C++ call that no patch sees.
                torch.backends.mha.set_fastpath_enabled(False)
            if self._dtype_map:
                self._dtype_map.apply()
            if self._log:
                self._log.open()
        except BaseException:
            self._take_away()
            raise
        scope.set_converted(True, enabled=self._enabled)

    def _take_away(self) -> None:
        scope.set_converted(False)
        steps.uninstall()
        compiling.uninstall()
        scripting.uninstall()
        torch.backends.mha.set_fastpath_enabled(self._fast_path)
        back = {wrapper: original for original, wrapper in self._functions.replacements().items()}
        self._functions.restore()
        rebind(back)
        self._table.restore()
        if self._dtype_map:
            self._dtype_map.restore()
        if self._log:
            self._log.close()


def convert(
    opt_level: str = "O1",
    bf16_file_path: str | os.PathLike | None = "",
    fp32_file_path: str | os.PathLike | None = "",
    isVerbose: bool = False,
    *,
    promote_file_path: str | os.PathLike | None = "",
    unknown: str = "error",
    enabled: bool = True,
    dtype_map: Mapping[torch.dtype, torch.dtype] | None = None,
) -> Conversion:
    """Run torch's ops in the precision that op lists say. A second call replaces the first.

    Args:
        opt_level: "O1": the lists decide. "O2": convolutions, linear and matrix products in BF16, every other op that
            computes in FP32; no list may be given.
        bf16_file_path, fp32_file_path, promote_file_path: op list files, read before the call returns. ``""`` and
            None stand for the default list. A YAML or JSON file given for one side also fills the sides not given.
        isVerbose: log each distinct decision once (logger "hmpx"), with the line of the caller's code.
        unknown: "error", or "warn" to skip names that stand for nothing.
        enabled: cast everywhere but in `disable_casts()` regions; False: only in `enable_casts()` regions.
        dtype_map: dtypes that become others wherever one is asked for, from torch.float32 and torch.float64 to
            torch.bfloat16 and torch.float32: default dtype, factory functions, ``x.float()``, ``x.double()``,
            ``x.to(dtype)``, ``dtype=``, module construction, `torch.load`, NumPy arrays. Not inside `disable_casts()`
            and optimizer steps.

    Returns:
        A handle: `policy`, `patched`, `rebound`, `escaped`, `restore()`, and ``with convert(...):``.

    Raises:
        OpListError, UnknownOpError, OptLevelError: before anything is changed; what was installed stays installed.
    """
    lists = read_lists(bf16_file_path, fp32_file_path, promote_file_path)
    return install(build_policy(opt_level, lists, unknown), isVerbose, enabled, dtype_map)


def install(
    policy: Policy,
    verbose: bool = False,
    enabled: bool = True,
    dtype_map: Mapping[torch.dtype, torch.dtype] | None = None,
) -> Conversion:
    """`convert` by a policy that is built already."""
    global _installed
    UserFunctions(policy.user_functions(), policy.origins).check()
    mapping = DtypeMap(dtype_map) if dtype_map else None
    with _lock:
        _take_away_installed()
        conversion = Conversion(policy, verbose, enabled, mapping)
        logger.info("hmp:verbose_mode  %s", verbose)
        logger.info("hmp:opt_level  %s", policy.opt_level)
        conversion._apply()
        _installed = conversion
    return conversion


def installed() -> Conversion | None:
    """The conversion that is installed now."""
    return _installed


def restore() -> None:
    """Put torch back exactly as it was; without a `convert`, nothing happens."""
    with _lock:
        _take_away_installed()
        for end in list(beside):
            end()
        steps.uninstall_collected()


def _take_away_installed() -> None:
    global _installed
    conversion, _installed = _installed, None
    steps.uninstall_for_graphs()
    if conversion is not None:
        conversion._take_away()
