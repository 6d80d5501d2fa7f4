"""Figures, each beside its peers in one run: ``python -m hmpx bench``."""
