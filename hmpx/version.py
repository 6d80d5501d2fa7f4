"""The version, where every file can import it from."""

__version__ = "0.3.0"
