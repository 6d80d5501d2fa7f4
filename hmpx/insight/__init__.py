"""What ran in which precision, and why."""
