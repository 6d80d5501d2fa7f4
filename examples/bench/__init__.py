"""Figures, each beside its peers in one run: ``python examples/bench``, in a checkout."""
