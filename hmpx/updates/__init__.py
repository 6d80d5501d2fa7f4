"""The weight road: an optimizer step -> FP32 shadows -> the optimizer, unmodified -> rounding -> the parameter."""
