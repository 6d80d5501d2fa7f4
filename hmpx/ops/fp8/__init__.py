"""Products of matrices in FP8: a format, casts with scales, three products, and what runs them."""
