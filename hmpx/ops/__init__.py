"""The op road: op lists -> a policy -> a wrapper for each entry point of torch, which casts what the rule says."""
