"""Names that were taken of torch before it was patched: found, rebound, put back."""
