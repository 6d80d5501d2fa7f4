"""One look at a run: `Capture` sees steps, backward passes and ops, and hands them to `Look`s."""
