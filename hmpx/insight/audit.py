"""`audit`: which listed ops no wrapper reaches, in one run of a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hmpx.conversion import installed
from hmpx.errors import HmpxError
from hmpx.insight.dispatched import Finding, Watch
from hmpx.insight.run_state import eager, kept


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
    watch = Watch()
    with kept(model), eager(), watch:
        model(*args, **kwargs)
    return Audit(watch.findings(), conversion.escaped)
