"""Which op runs in which dtype: op lists -> a policy -> a wrapper for each entry point of torch, which casts."""
