"""How tensors in a few bits lie in memory: codes, and a scale for each block of a row."""

from __future__ import annotations

from typing import NamedTuple

import torch

BLOCK = 128  # elements


class Rows(NamedTuple):
    """The layout of elements in blocks: rows, of which this process holds the columns from `first` on.

    Attributes:
        width: elements of a row that are held.
        first: column of the first of them.
        blocks: in a whole row.
    """

    width: int
    first: int
    blocks: int

    @classmethod
    def of(cls, length: int) -> Rows:
        """Return the layout of whole rows of `length` elements."""
        return cls(length, 0, -(-length // BLOCK))

    def floor(self, element: int) -> int:
        """Return the last element up to `element`, counted in what is held, where a block or its held part begins."""
        if not self.width:
            return 0
        row, column = divmod(element, self.width)
        begin = (self.first + column) // BLOCK * BLOCK - self.first
        return row * self.width + max(begin, 0)

    def range(self, start: int, stop: int) -> slice:
        """Return the blocks of elements `start` ... `stop - 1`, counted row by row."""
        blocks = (
            element // self.width * self.blocks + (self.first + element % self.width) // BLOCK
            for element in (start, stop - 1)
        )
        first, last = blocks
        return slice(first, last + 1)


class BlockCodes(NamedTuple):
    """Numbers in a few bits: codes, from the element `start` on, and the BF16 scales of all rows that are held.

    codes: flat uint8, one an element; or two of 4 bits in a byte, the first in the upper half.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    rows: Rows
    start: int = 0
