"""Bytes per parameter on a rank, by use: weights, gradients, masters, state."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hmpx.updates.holding.state_forms import STATE_FORMS
from hmpx.updates.holding.stores import WAYS, Settings
from hmpx.updates.stepping.released import Waiting
from hmpx.updates.stepping.transfers import room_size

# Ways to distribute a model, each with the tensors that are divided among the ranks.
MODES = {
    "ddp": frozenset(),
    "zero1": frozenset({"masters", "state"}),
    "fsdp2": frozenset({"weights", "gradients", "masters", "state"}),
}
_FP32 = 4
_STEPPED_BY = {
    None: "hmpx's kernels, as of Adam: the class of the optimizer chooses (fused=None)",
    True: "hmpx's kernels (fused=True)",
    False: "the optimizer's own code (fused=False)",
}


@dataclass(frozen=True)
class Footprint:
    """Bytes per parameter, of a model that is whole on one rank.

    Attributes:
        weights, gradients: between backward and step. Released gradients count as none.
        buckets: the buffers in which DistributedDataParallel exchanges gradients, unless gradients are views of them
            (``gradient_as_bucket_view=True``, not with use_fp32_grad_acc).
        masters: beside the weights, 4 (FP32), 2 or 1 (the lower halves, of 16 or 8 bits).
        state: of the optimizer, between two steps. In codes, with the scales of rows that are whole blocks; of one
            with fewer than 128 elements, and of others' last blocks, each scale serves fewer. State of parameters of
            one dimension is in BF16, and that in rows of an odd number of elements in 8 bits where 4 are asked for.
        waiting: of a gradient that is released; so many elements wait in backward, and the parameter that makes it
            enough (`hmpx.updates.stepping.released`).
        copies: in a step, for each element that is stepped at once: FP32 weight and gradient, FP32 state that is not
            held so, and two temporaries of torch's own. These are the elements of the largest parameter, or of as many
            as `hmpx.updates.stepping.transfers` says, if that is more. 0 where hmpx's kernels step. A class that hmpx
            does not know sees all at once; on a CPU, up to 128 MiB of that stay.
        stepped_by: who takes the steps, and by whose choice.
        codes: of a weight in FP8, from its forward to its backward, on a GPU; sharded models have those of whole
            weights on each rank, and none where layers are checkpointed.
    """

    weights: int
    gradients: int
    buckets: int
    masters: float
    state: float
    copies: int
    waiting: int = 0
    codes: int = 0
    stepped_by: str = ""

    def transient(self, elements: float, device: str = "cpu", largest: float = 0) -> int:
        """Return the most bytes that a step allocates beyond the rest.

        Args:
            elements: of the parameters that this rank steps.
            largest: of the largest of them. 0: it is not known, and taken for a small one.
        """
        waiting = Waiting.ELEMENTS if device == "cpu" else Waiting.ELEMENTS_OF_ACCELERATORS
        room = max(room_size(int(elements), torch.device(device)), int(largest))
        at_once = (self.copies, room), (self.waiting, waiting)
        return sum([each * min(size, int(elements)) for each, size in at_once])

    def on_rank(self, elements: float, ranks: int, mode: str) -> float:
        """Bytes on one of `ranks`, each a GPU. For a sharded model, without the layer that is gathered at the time."""
        parts = ("weights", "gradients", "masters", "state")
        held = sum(getattr(self, part) / (ranks if part in MODES[mode] else 1) for part in parts)
        if mode != "fsdp2" and ranks > 1:
            held += self.buckets
        stepped = elements / ranks if "state" in MODES[mode] else elements
        return held * elements + max(self.transient(stepped, "cuda"), self.codes * elements)


def footprint(settings: Settings, dtype: torch.dtype, states: int = 2) -> Footprint:
    """Return the footprint of `settings` for parameters of `dtype`, float32 or bfloat16.

    Args:
        states: tensors of a parameter's size that the optimizer keeps: 2 for Adam, 1 for momentum.
    """
    if dtype is torch.float32:  # a plain step
        return Footprint(_FP32, _FP32, _FP32, 0, states * _FP32, 0, stepped_by="the optimizer's own code: FP32 weights")
    wide_gradients = settings.use_fp32_grad_acc
    form = STATE_FORMS[settings.state_dtype]
    return Footprint(
        weights=dtype.itemsize,
        gradients=0 if settings.release_gradients else _FP32 if wide_gradients else dtype.itemsize,
        buckets=dtype.itemsize,
        masters=WAYS[settings.weights].bytes_beside,
        state=states * form.bytes_each,
        copies=_FP32 * (4 + (0 if form.as_left else states)) if settings.fused is False else 0,
        stepped_by=_STEPPED_BY[settings.fused],
        waiting=dtype.itemsize if settings.release_gradients else 0,
    )
