"""`audit`: what a patch in Python cannot reach, found by watching the dispatcher below it.

Listed ops that other ops call in C++, `torch.ops.aten`, scripted modules and names that escaped do not pass a wrapper.
They do pass torch's dispatcher, where a `TorchDispatchMode` sees every aten op with its tensors.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hmpx import region_state
from hmpx.casts.callers import frames, rule_of, users_line
from hmpx.casts.composition import callers
from hmpx.casts.fp32_kernels import is_computing
from hmpx.casts.ops import Op, canonical, catalog
from hmpx.casts.policy import Policy, Rule
from hmpx.casts.rules import TARGETS, eligible_dtypes
from hmpx.conversion import installed
from hmpx.errors import HmpxError


@dataclass(frozen=True)
class Finding:
    """A listed op that ran in another dtype than its list says.

    Attributes:
        op: its list name. aten: the operator that ran, with its overload. rule: what the list says.
        dtypes: of its floating inputs, each once. where: the line of the caller's code, as file:line. calls: how many.

    Example:
        >>> with hmpx.convert():
        ...     found = hmpx.audit(lambda x: torch.ops.aten.mm(x, x), torch.ones(4, 4))
        >>> finding = found.findings[0]
        >>> finding.op, finding.aten, finding.rule, finding.dtypes, finding.calls
        ('mm', 'aten.mm.default', <Rule.BF16: 'bf16'>, (torch.float32,), 1)
        >>> print(finding)  # finding.where begins it
        <doctest ...>:2: mm is in the bf16 list and ran in float32 (aten.mm.default)
    """

    op: str
    aten: str
    rule: Rule
    dtypes: tuple[torch.dtype, ...]
    where: str
    calls: int

    def __str__(self) -> str:
        dtypes = " and ".join(str(dtype).removeprefix("torch.") for dtype in self.dtypes)
        times = f", {self.calls} times" if self.calls > 1 else ""
        return f"{self.where}: {self.op} is in the {self.rule} list and ran in {dtypes} ({self.aten}{times})"


@dataclass(frozen=True)
class Audit:
    """What `audit` found; prints one line each. Truthy when there is something.

    Attributes:
        findings: listed ops that ran in another dtype. escaped: what the conversion does not reach in any model.

    Example:
        >>> with hmpx.convert():
        ...     found = hmpx.audit(model, inputs)
        >>> bool(found), found.findings
        (False, ())
        >>> print(hmpx.insight.audit.Audit((), ()))
        every listed op ran in the dtype that its list says
    """

    findings: tuple[Finding, ...]
    escaped: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.findings)

    def __str__(self) -> str:
        lines = [*map(str, self.findings), *(f"escaped: {line}" for line in self.escaped)]
        return "\n".join(lines) or "every listed op ran in the dtype that its list says"


def audit(model: Callable, inputs: Any = ()) -> Audit:
    """Run a model once under the conversion that is installed, and say which listed ops ran in another dtype.

    Ops of the backward pass, in-place ops, and what runs inside `disable_casts()` are not looked at; nor are the
    branches of `torch.cond`, nor ops inside an op that a list names, since the outermost decides. Compiled functions
    run eagerly. Random number generators and, of a module, buffers are put back afterwards. Only the calling thread is
    watched.

    Args:
        model: a module, or any callable.
        inputs: a tuple of positional arguments, a dict of keyword arguments, or the only argument.

    Raises:
        HmpxError: nothing is converted.

    Example:
        >>> with hmpx.convert():
        ...     print(hmpx.audit(lambda x: torch.ops.aten.mm(x, x), torch.ones(4, 4)).findings[0])
        <doctest ...>:2: mm is in the bf16 list and ran in float32 (aten.mm.default)
    """
    conversion = installed()
    if conversion is None:
        raise HmpxError("audit looks at a conversion, and there is none: call hmpx.convert() first")
    args = inputs if isinstance(inputs, tuple) else () if isinstance(inputs, dict) else (inputs,)
    kwargs = inputs if isinstance(inputs, dict) else {}
    watch = _Watch(conversion.policy)
    with torch.random.fork_rng(), _buffers_kept(model), _eager(), watch:
        model(*args, **kwargs)
    return Audit(watch.findings(), conversion.escaped)


class _Watch(TorchDispatchMode):
    """Collects the ops that ran in another dtype than `policy` says."""

    supports_higher_order_operators = True  # of torch: let `torch.cond` and its kin pass

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self._policy = policy
        self._seen: Counter[tuple] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        # Left out, as no part of the model's forward: backward passes, regions without casts, ops that write in place.
        forward = torch._C._current_autograd_node() is None and region_state.casts_on()
        if forward and isinstance(func, torch._ops.OpOverload) and not func._schema.is_mutable:
            self._look(func, args, kwargs)
        return func(*args, **kwargs)

    def _look(self, func: Any, args: tuple, kwargs: dict) -> None:
        ops = _meant(func._schema.name.removeprefix("aten::"), self._policy)
        rules = {op.name: rule for op in ops if not op.view and (rule := self._policy.listed_as(op)) in TARGETS}
        if not rules or kwargs.get("dtype") is not None:
            return
        values = tree_leaves((args, kwargs))
        written_beside = any(entry.layout.statistics for op in ops for entry in op.entries)
        dtypes = tuple(dict.fromkeys(eligible_dtypes(values[:1] if written_beside else values)))
        wrong = {name: rule for name, rule in rules.items() if any(dtype is not TARGETS[rule] for dtype in dtypes)}
        if len(wrong) < len(rules):
            return  # right for at least one of the ops that may have called it
        caller = sys._getframe(2)
        if any(map(is_computing, frames(caller))):
            return  # FP32 kernels compute an op whose inputs and results are in low precision
        deciding = (rule_of(frame) for frame in frames(caller))
        if any(rule in (*TARGETS, Rule.PROMOTE) for rule in deciding):
            return
        name, rule = next(iter(wrong.items()))
        self._seen[name, str(func), rule, dtypes, users_line(caller)] += 1

    def findings(self) -> tuple[Finding, ...]:
        return tuple(
            Finding(op, aten, rule, dtypes, where, calls)
            for (op, aten, rule, dtypes, where), calls in self._seen.items()
        )


def _meant(aten: str, policy: Policy) -> list[Op]:
    """The ops that may have been called when aten::`aten` runs; only the op of that name where a list names it."""
    ops = catalog()
    own = ops.get(canonical(aten))
    if own is not None and policy.listed_as(own):
        return [own]
    return [ops[name] for name in (canonical(aten), *callers(aten)) if name in ops]


@contextlib.contextmanager
def _buffers_kept(model: Any) -> Iterator[None]:
    buffers = list(model.buffers()) if isinstance(model, torch.nn.Module) else []
    before = [buffer.clone() for buffer in buffers]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in zip(buffers, before, strict=True):
                buffer.copy_(value)


def _eager() -> contextlib.AbstractContextManager:
    """Compiled functions, of which there are none before Dynamo is imported, run as they are written."""
    loaded = "torch._dynamo" in sys.modules
    return torch.compiler.set_stance("force_eager") if loaded else contextlib.nullcontext()
