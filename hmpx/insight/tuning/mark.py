"""`Mark`: lists as a point of a plot."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mark:
    """Lists as a point of a plot.

    Attributes:
        name: of the lists; "" of a point of the curve. cost: in the unit of the objective. gradient_error: in units of
            the noise between batches. share: of the FLOPs, what is in BF16. measured: whether the error was, on
            held-out batches; else it is added up from single names. raised: what the program raises under these lists;
            its error is infinite then, and its cost that of the ops that they name.

    Example:
        >>> hmpx.Mark("all in FP32", cost=1.9e-3, gradient_error=0.0, share=0.0, measured=True).name
        'all in FP32'
    """

    name: str
    cost: float
    gradient_error: float
    share: float
    measured: bool
    raised: str = ""
