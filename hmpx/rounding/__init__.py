"""The numbers: stochastic rounding of FP32 to BF16, one implementation a backend; every one gives the same bits."""
