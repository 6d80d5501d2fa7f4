"""One step: in batches by a formula, or in chunks by the optimizer's own code, and the write-back."""
