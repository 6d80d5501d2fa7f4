"""Stochastic rounding of FP32 to BF16, one implementation for each backend; all give the same bits."""
