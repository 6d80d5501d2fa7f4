"""`doctor --files`: what one or two checkpoints tell, without a script."""
