"""A class and all classes that derive from it, in one order."""

from __future__ import annotations


def with_subclasses(cls: type) -> list[type]:
    """Return a class and every class that derives from it, each once, a class before those that derive from it."""
    found = [cls]
    for each in found:
        derived: list[type] = each.__subclasses__()
        found += [sub for sub in derived if sub not in found]
    return found
