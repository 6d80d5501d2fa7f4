"""`hmpx.compare` and `hmpx.tune`: runs of a model in which some ops have another precision."""
