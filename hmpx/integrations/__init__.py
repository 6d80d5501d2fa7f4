"""Recipes for frameworks that own the training loop. Importing hmpx imports none of them, nor this folder."""
