"""How much an optimizer reads to update one weight; a step must copy that much of the model to FP32.

``element``
    Each element by itself. The step runs on slices of a bounded number of elements.
``parameter``
    Each parameter by itself: factored moments, orthogonalised updates. The step runs on one or a few parameters.
``whole``
    Across parameters, or nobody knows: every class that is not listed here, subclasses of listed ones included.

A class is listed if its `step` does for each slice exactly what it does for the whole; the tests hold every entry
against the plain step, bit for bit.
"""

from __future__ import annotations

from torch import optim

SCOPES = {
    optim.Adadelta: "element",
    optim.Adagrad: "element",
    optim.Adam: "element",
    optim.AdamW: "element",
    optim.Adamax: "element",
    optim.ASGD: "element",
    optim.NAdam: "element",
    optim.RAdam: "element",
    optim.RMSprop: "element",
    optim.Rprop: "element",
    optim.SGD: "element",
    optim.Adafactor: "parameter",
    optim.Muon: "parameter",
}
_BY_NAME = {  # of packages that may not be there
    "lion_pytorch.lion_pytorch.Lion": "element",
    "transformers.optimization.Adafactor": "parameter",
}


def scope_of(optimizer: optim.Optimizer) -> str:
    """``element``, ``parameter`` or ``whole``."""
    cls = type(optimizer)
    return SCOPES.get(cls) or _BY_NAME.get(f"{cls.__module__}.{cls.__qualname__}", "whole")


def wants_bf16(optimizer: optim.Optimizer) -> bool:
    """Whether the class, or one that it derives from, is called Muon, SOAP or Shampoo: BF16 takes the place of codes.

    Muon brings all singular values of its momentum to one size, the small ones with the noise of 8 bits, which costs
    loss (figures: ``hmpx/bench/README.md``). One BF16 tensor takes as many bytes as two in 8 bits, which Adam has.
    Shampoo takes roots of inverses of state, which of a square weight has its shape, and SOAP turns moments into the
    directions of such state: the losses of a small network were 1.4 and 1.1 times as large in 8 bits, 4.5 and 2.5 times
    in 4 bits.
    """
    return any(name in cls.__name__.lower() for cls in type(optimizer).__mro__ for name in ("muon", "soap", "shampoo"))


def by_memory(*optimizers: optim.Optimizer) -> bool:
    """Whether a step may go through tensors in the order of memory, whatever their strides, as fused kernels do.

    It then gets weight, gradient and state in one layout. Any other step gets each in its own layout, so that sums over
    an element's neighbours come out as in a plain step.
    """
    return any(
        scope_of(optimizer) == "element" or any(group.get("fused") for group in optimizer.param_groups)
        for optimizer in optimizers
    )
