"""`doctor`: a region in which a training is looked at as it is."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator

from hmpx.base import process_state
from hmpx.errors import HmpxError
from hmpx.insight.doctor.diagnosis import Diagnosis
from hmpx.insight.doctor.ending import Enough
from hmpx.insight.doctor.examination import Examination
from hmpx.insight.doctor.fix import Base


def doctor(steps: int | None = None, at: Collection[int] = ()) -> contextlib.AbstractContextManager[Diagnosis]:
    """Look at a training as it is, and say what is wrong with its precision.

    Beside steps 2 to 9, 20 to 27, 40 to 47, 80 to 87 and so on, FP32 copies of weights in BF16 and FP16 take the same
    steps. Ops are looked at in iterations 3, 11, 22, 40, 41, 50 and every 13th from there, as long as that takes a
    second or a twentieth of the time. Nothing is converted, and the training has the bits that it has without. What
    could not be looked at is told: compiled code hides its ops. The thread that opens it is looked at, on each rank its
    own part.

    Args:
        steps: after so many steps of an optimizer, leave the region; None: look on until it ends.
        at: iterations, from 1, whose ops are looked at in any case.

    Returns:
        A `Diagnosis`, which is complete when the region ends, by an exception as well.

    Raises:
        HmpxError: a doctor is at work already, or `steps` is no positive integer.

    Example:
        >>> with hmpx.doctor() as found:
        ...     for _ in range(4):
        ...         model(inputs).sum().backward()
        ...         optimizer.step()
        >>> found.wrong, [each.kind for each in found.findings]
        (False, [])
    """
    return examined(steps, at)


@contextlib.contextmanager
def examined(
    steps: int | None,
    at: Collection[int],
    base: Base | None = None,
    heard: Callable[[Examination], None] = lambda examination: None,
) -> Iterator[Diagnosis]:
    """Do what `doctor` does.

    base: the recipe that the program runs under, which the recipe that is found extends. heard: is called with what
    was found so far: at the start, when a window of steps is over, and before the program is ended.
    """
    if steps is not None and (not isinstance(steps, int) or isinstance(steps, bool) or steps < 1):
        raise HmpxError(f"doctor takes a number of steps from 1 on, not {steps!r}")
    if process_state.examined:
        raise HmpxError("hmpx.doctor is open already: leave its `with` block before you open another")
    found = Diagnosis(not_checked=["all of it: the region is still open"])
    examination = Examination(found, steps, at, base, heard)
    try:
        process_state.examined.append(examination)
        heard(examination)
        with examination.hooks():
            yield found
    except Enough:
        pass
    finally:
        process_state.examined.clear()  # at most this one, and none where the region was interrupted at its start
        examination.finish()
