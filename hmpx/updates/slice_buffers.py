"""FP32 shadows of a batch of segments: the weights and gradients that an optimizer sees in a step in slices.

One pair of buffers serves every slice of a step and stays in the cache.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, cast

import torch

from hmpx.updates.gradients.shadow import can_be_written
from hmpx.updates.layout import memory_order, unfolded
from hmpx.updates.ranks.sharding import held_part, like, local
from hmpx.updates.segment import Segment
from hmpx.updates.weights import StepStore

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Tensor = torch.Tensor
Parameter = torch.nn.Parameter


class SliceBuffers:
    """The buffers of one step, which hold one batch after the other.

    Args:
        by_memory: whether the optimizer reads a parameter's gradient in the layout of the parameter.

    grads: of each parameter, what this rank holds of its gradient.
    """

    def __init__(self, store: StepStore, by_memory: bool) -> None:
        self._store, self._by_memory = store, by_memory
        self._buffers: tuple[Tensor, Tensor] | None = None
        self.grads: dict[Parameter, Tensor] = {}

    def hold(self, segment: Segment) -> None:
        """Take the gradient of a parameter; one that is sharded in another way is redistributed, once a step."""
        grad = segment.grad if segment.box is None else held_part(segment.param, segment.grad)
        self.grads[segment.param] = grad

    def shadows(self, batch: list[Segment]) -> list[Tensor]:
        """FP32 weights with FP32 gradients; plain tensors, which the listed classes take for parameters."""
        counts = [segment.count for segment in batch]
        wide = [not self._is_ready(segment) for segment in batch]
        room = sum(counts), sum(itertools.compress(counts, wide))
        weights, grads = self._room(*room, batch[0].param.device)
        shadows = [
            _laid_out(segment, segment.param, flat) for segment, flat in zip(batch, weights.split(counts), strict=True)
        ]
        self._store.read_all(*_blocks(batch, shadows))
        if batch[0].is_gathered:  # a batch of its own
            shadows = [_gathered(batch[0], shadows[0])]
        copied, outs = [], []
        widths = grads.split([count if widen else 0 for count, widen in zip(counts, wide, strict=True)])
        for segment, shadow, flat, widen in zip(batch, shadows, widths, wide, strict=True):
            grad = self.grads[segment.param]
            if segment.is_gathered:
                continue
            if grad.layout is not torch.strided:
                shadow.grad = grad.float()
            elif widen:
                copied.append(segment)
                outs.append(_laid_out(segment, segment.param if self._by_memory else grad, flat))
                shadow.grad = outs[-1].data  # a version of its own
            else:
                shadow.grad = segment.of(grad).data
        if copied:
            segments, outs = _blocks(copied, outs)
            torch._foreach_copy_(outs, [segment.of(self.grads[segment.param]) for segment in segments])
        return shadows

    def hand_back(self, segment: Segment, left: Tensor | None) -> None:
        """Make `left`, which a step has put in the place of a shadow's gradient, the parameter's."""
        p = segment.param
        if left is None:
            p.grad = None if segment.is_last else p.grad
            return
        if left.layout is not torch.strided:
            p.grad = left.to(segment.grad.dtype)
            return
        if not can_be_written(segment.grad):
            p.grad = segment.grad.clone(memory_format=torch.contiguous_format)
            self.hold(segment)
        for block, part in segment.blocks(held_part(p, left) if segment.is_gathered else left):
            block.of(self.grads[p]).copy_(part)

    def _is_ready(self, segment: Segment) -> bool:
        """Whether the optimizer can be shown the parameter's own gradient: it is FP32, and lies as the shadow does."""
        grad = self.grads[segment.param]
        return (
            grad.dtype is torch.float32
            and grad.layout is torch.strided
            and segment.order is None
            and not segment.is_gathered
            and grad.is_contiguous()
            and local(segment.param).is_contiguous()
            and self._by_memory  # torch's own classes, which read gradients and do not write to them
        )

    def _room(self, weights: int, grads: int, device: torch.device) -> tuple[Tensor, Tensor]:
        if self._buffers is None or self._buffers[0].device != device:
            self._buffers = torch.empty(0, device=device), torch.empty(0, device=device)
        first, second = (
            buffer if buffer.numel() >= count else torch.empty(count, dtype=torch.float32, device=device)
            for buffer, count in zip(self._buffers, (weights, grads), strict=True)
        )
        self._buffers = first, second
        return first[:weights], second[:grads]


def _gathered(segment: Segment, shadow: Tensor) -> Tensor:
    """The whole of a sharded parameter, for an optimizer that reads whole ones; every rank computes the same."""
    whole = like(cast("DTensor", segment.param), shadow).full_tensor()
    whole.grad = cast("DTensor", segment.grad).full_tensor().float()
    return whole


def _laid_out(segment: Segment, like: Tensor, flat: Tensor) -> Tensor:
    """`flat` as the optimizer sees it: a part stays flat, a whole parameter gets the layout of `empty_like(like)`."""
    if segment.start is not None:
        return flat
    held = local(like)
    if held.is_contiguous():
        return flat.view(held.shape)
    return unfolded(flat, held.shape, memory_order(held))


def _blocks(segments: list[Segment], shown: list[Tensor]) -> tuple[list[Segment], list[Tensor]]:
    """The blocks of all segments, and the part of the shown tensors that each block has."""
    if all(segment.order is None for segment in segments):  # each is one block
        return segments, shown
    spread = [each for segment, tensor in zip(segments, shown, strict=True) for each in segment.blocks(tensor)]
    return [segment for segment, _ in spread], [tensor for _, tensor in spread]
