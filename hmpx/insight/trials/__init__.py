"""Runs of a model in which some ops have another precision: what `compare` and `tune` are made of."""
