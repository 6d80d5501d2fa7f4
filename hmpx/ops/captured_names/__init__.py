"""Finds, rebinds and restores names that were captured from torch before it was patched."""
