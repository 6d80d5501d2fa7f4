"""The shell commands: ``hmpx``, which is ``python -m hmpx`` too."""
