"""What settings and scalers say about the training, as problems."""

from __future__ import annotations

from collections.abc import Iterator

from hmpx.insight.doctor.op_watch import OpWatch
from hmpx.insight.doctor.problem import Problem, percent
from hmpx.insight.doctor.scaling import Scaling

_SETTLED = 5  # calls of a scaler after which it should have found its scale


def of_run(watch: OpWatch, scaling: Scaling) -> Iterator[Problem]:
    """The problems that belong to no op and no parameter."""
    skipped, of = scaling.late
    if of >= _SETTLED and 2 * skipped >= of:
        yield Problem(
            "GradScaler",
            True,
            f"GradScaler has skipped {skipped} of the last {of} steps, and its scale is down to {scaling.scale:g}: "
            "gradients are inf or NaN at any scale",
            "look for the first op that makes them (doctor --at 3), or use BF16, which needs no scale",
            weight=0.9,
        )
    precision = watch.precision
    on_cuda = "cuda" in watch.devices
    if watch.wide_products and (precision == "medium" or (precision == "high" and on_cuda)):
        digits = "8 bits (BF16)" if precision == "medium" else "11 bits (TF32)"
        share = watch.wide_products / (watch.wide_products + watch.low_products)
        yield Problem(
            "matmul precision",
            False,
            f'float32_matmul_precision is "{precision}": products in float32, {percent(share)} of all, may keep '
            f"{digits} of each number",
            'torch.set_float32_matmul_precision("highest") where they are in float32 for a reason',
            weight=0.1,
        )
