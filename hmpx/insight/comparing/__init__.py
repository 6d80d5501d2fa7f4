"""`hmpx.compare`: each op beside itself in FP32, and what its error does to the loss and to the gradients."""
