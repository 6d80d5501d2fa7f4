"""What computes an op in low precision: torch's own kernel, an FP32 one, or a product of hmpx."""
