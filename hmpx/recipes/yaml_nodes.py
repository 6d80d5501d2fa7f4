"""A recipe's file as YAML nodes, which know the line that they stand in."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from hmpx.errors import HmpxError
from hmpx.yaml_files import root_of, shown, text_of


def composed(path: Path, keys: Iterable[str]) -> yaml.MappingNode:
    """The mapping that a file holds; JSON is YAML once its tabs are blanks.

    Raises:
        HmpxError: it cannot be read, is not YAML, or holds something other than a mapping of `keys`.
    """
    try:
        text = text_of(path)
    except OSError as error:
        raise HmpxError(f"{shown(path)}: cannot be read: {error.strerror}") from None
    root = root_of(path, text.replace("\t", " ") if path.suffix == ".json" else text)
    if not isinstance(root, yaml.MappingNode):
        raise HmpxError(f"{path}:1: a recipe is a mapping of {', '.join(keys)}")
    return root


def lines_inside(key: str, value: yaml.Node) -> dict[tuple, int]:
    """Where the keys of a mapping, and the names of a list, stand; of those in it, too."""
    found: dict[tuple, int] = {}
    _find_lines((key,), value, found)
    return found


def _find_lines(path: tuple, value: yaml.Node, found: dict[tuple, int]) -> None:
    inside: list[tuple[Any, yaml.Node, yaml.Node]] = []
    if isinstance(value, yaml.MappingNode):
        inside = [(key.value, key, inner) for key, inner in value.value if isinstance(key, yaml.ScalarNode)]
    elif isinstance(value, yaml.SequenceNode):
        inside = [(i, inner, inner) for i, inner in enumerate(value.value)]
    for name, where, inner in inside:
        here = (*path, name)
        found[here] = where.start_mark.line + 1
        _find_lines(here, inner, found)
