"""The kernels that compute an op in low precision: torch's own, an FP32 one, or a product of hmpx."""
