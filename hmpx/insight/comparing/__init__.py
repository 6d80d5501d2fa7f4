"""`hmpx.compare`: runs each op beside itself in FP32, and measures its effect on the loss and the gradients."""
