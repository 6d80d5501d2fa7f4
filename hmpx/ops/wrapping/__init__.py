"""The wrapper of one function of torch: it looks at the arguments, casts as the rule says, and calls the op."""
