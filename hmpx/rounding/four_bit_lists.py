"""The numbers that codes of 4 bits mean, in FP32; `four_bit_codes.py` says of which blocks."""

from __future__ import annotations

import torch

_POSITIVE = 0.0055, 0.0325000025331974, 0.0775, 0.21249999105930328, 0.4375, 0.6625, 0.8875  # as torchao computes them

SIGNED = (*(-number for number in reversed(_POSITIVE)), 0.0, *_POSITIVE, 1.0)
ABOVE_ZERO = tuple(i / 16 for i in range(1, 17))
BEFORE_LAST = torch.tensor(_POSITIVE[-1], device="cpu").nextafter(torch.tensor(0.0, device="cpu")).item()  # in FP32
STRETCHED = 1 / _POSITIVE[-1]  # what the scale of a largest negative number is, for one of 1
