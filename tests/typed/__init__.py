"""Code as users write it, for the type checker (`tests/test_checks.py`)."""
