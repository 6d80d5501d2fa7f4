"""The op road: op lists -> a policy -> a wrapper for each entry point of torch, which casts as the rule says."""
