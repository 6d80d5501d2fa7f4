"""Gradients of BF16 parameters: accumulated in FP32, claimed by optimizers, shown to a step, released."""
