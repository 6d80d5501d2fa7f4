"""`tune_weights`: how weights and optimizer state are to be held, found by short training runs."""
