"""The wrapper of one function of torch: it looks at the arguments, casts what the rule says, and calls the op."""
