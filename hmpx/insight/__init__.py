"""What ran in which precision, and why. `import hmpx` does not load this package; the first use of it does."""
