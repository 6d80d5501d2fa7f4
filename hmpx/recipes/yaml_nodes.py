"""A recipe's file as YAML nodes, which know the line that they stand in."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from hmpx.errors import HmpxError


def composed(path: Path, keys: Iterable[str]) -> yaml.MappingNode:
    """The mapping that a file holds; JSON is YAML once its tabs are blanks.

    Raises:
        HmpxError: it cannot be read, is not YAML, or holds something other than a mapping of `keys`.
    """
    try:
        text = path.read_text(encoding="utf-8")
        root = yaml.compose(text.replace("\t", " ") if path.suffix == ".json" else text, Loader=yaml.SafeLoader)
    except (OSError, UnicodeDecodeError) as error:
        raise HmpxError(f"{path}: cannot be read: {error}") from None
    except yaml.MarkedYAMLError as error:
        raise HmpxError(f"{path}:{error.problem_mark.line + 1}: not YAML: {error.problem}") from None
    if not isinstance(root, yaml.MappingNode):
        raise HmpxError(f"{path}:1: a recipe is a mapping of {', '.join(keys)}")
    return root


def constructed(value: yaml.Node) -> Any:
    """The value that a node stands for."""
    return yaml.SafeLoader("").construct_object(value, deep=True)


def lines_inside(key: str, value: yaml.Node) -> dict[tuple, int]:
    """Where the keys of a mapping, and the names of a list, stand; of those in it, too."""
    return _lines((key,), value)


def _lines(path: tuple, value: yaml.Node) -> dict[tuple, int]:
    inside: list[tuple[Any, yaml.Node, yaml.Node]] = []
    if isinstance(value, yaml.MappingNode):
        inside = [(key.value, key, inner) for key, inner in value.value]
    elif isinstance(value, yaml.SequenceNode):
        inside = [(i, inner, inner) for i, inner in enumerate(value.value)]
    found: dict[tuple, int] = {}
    for name, where, inner in inside:
        found |= {(*path, name): where.start_mark.line + 1, **_lines((*path, name), inner)}
    return found
