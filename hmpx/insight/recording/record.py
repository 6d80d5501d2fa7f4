"""`record`: a region in which every call of an op is written down."""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Iterator
from weakref import WeakSet

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from hmpx.errors import HmpxError
from hmpx.insight.observed import observing
from hmpx.insight.recording.forward_watch import ForwardWatch
from hmpx.insight.recording.log import Log
from hmpx.insight.recording.recorder import Recorder
from hmpx.insight.run_state import eager
from hmpx.ops.computing.kernels import capability
from hmpx.ops.forwards import replaced_forwards
from hmpx.process_state import observers
from hmpx.updates.attach import attached
from hmpx.version import __version__


@contextlib.contextmanager
def record() -> Iterator[Log]:
    """Write down every call of an op: from which line, by which rule, in which dtypes, and what it cost.

    Ops in no list and casts by hand are seen too; not seen are backward passes, and what an optimizer does in its step.
    A conversion may be put in force before, or inside. Compiled functions run eagerly meanwhile. All threads are seen;
    ops that no wrapper sees (`Log.escaped`) only in the thread that records. On CUDA the time of an op holds its casts,
    and nothing waits for the device before the end. The record grows with the program's lines, not with its calls. What
    `Attachment.updates()` counts of optimizers that step meanwhile is in it, where that was asked for.

    Returns:
        A `Log`, which may be read at any time, and is complete when the region ends, by an exception as well.

    Raises:
        HmpxError: something is recorded already.

    Example:
        >>> with hmpx.convert(), hmpx.record() as log:
        ...     loss = model(inputs).log_softmax(-1).sum()
        >>> [(site.op, site.rule, site.dtypes, site.calls) for site in log.sites if site.op == "log_softmax"]
        [('log_softmax', 'fp32', 'bfloat16 -> float32', 1)]
    """
    if any(isinstance(each, Recorder) for each in observers):
        raise HmpxError("hmpx.record is open already: read the log that it gave, or close it first")
    log = Log(about=_about())
    recorder, watch = Recorder(log), ForwardWatch()
    optimizers: WeakSet[torch.optim.Optimizer] = WeakSet()

    def stepped(optimizer: torch.optim.Optimizer, *_: object) -> None:
        optimizers.add(optimizer)
        log._stepped()

    counter = register_optimizer_step_post_hook(stepped)
    replaced = replaced_forwards()  # which `observing` wraps: the conversion is put in force again
    try:
        with eager(), observing(recorder), watch:
            yield log
    finally:
        counter.remove()
        recorder.finish()
        log.escaped += (*(line for line in replaced if line not in log.escaped), *map(str, watch.findings()))
        attachments = filter(None, map(attached, optimizers))
        log.updates = [each.watched.as_json() for each in attachments if each.watched is not None]


def _about() -> dict[str, str]:
    """What a record says of the process that it was made in."""
    return {
        "hmpx": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": capability(),
    }
