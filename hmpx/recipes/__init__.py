"""A recipe: one file for what a whole training run does with precision, and the ways to set it in force."""
