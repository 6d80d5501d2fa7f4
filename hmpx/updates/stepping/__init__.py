"""One step: batches of FP32 shadows, the optimizer unmodified, and the write-back."""
