"""Files that commands write: where they go, and that they replace nothing but what hmpx has written."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hmpx.errors import HmpxError
from hmpx.ops.policies.op_lists import SIDES

# How the recipes, lists, pictures, pages, JSON and Markdown begin that hmpx writes.
_OURS = re.compile(
    r"(# |<!-- )Written by `?hmpx\b|<!doctype html>[\s\S]*<title>hmpx |# hmpx on "
    r"|[\[{\s]*\"hmpx\": |\{\n \"schema\": \d"
)


def add_force(command: Any) -> None:
    """Add, to a command or to a group of its options, the one that lets `check_outputs` pass."""
    command.add_argument("--force", action="store_true", help="write over files that are inputs, or not hmpx's")


def of_rank(path: str) -> Path:
    """Return the absolute path that this rank writes to; of many, ``log.3.json`` for rank 3."""
    whole = Path(os.path.abspath(path))
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return whole.with_name(f"{whole.stem}.{os.environ.get('RANK', '0')}{whole.suffix}")
    return whole


def check_outputs(options: argparse.Namespace, outputs: Mapping[str, Path]) -> None:
    """Check that the files of some options can be written, and that they replace what hmpx has written, or `--force`.

    Raises:
        HmpxError: there is no such folder; the file is an input of the command, or another one's output, or was not
            written by hmpx. Links count as what they lead to.
    """
    named = [getattr(options, key, None) for key in ("script", "recipe", "file", "diff", *SIDES)]
    named.append(getattr(options, "what", "").rpartition(":")[0])
    read = [str(each) for each in named if each and os.path.exists(str(each))]
    for number, (kind, path) in enumerate(outputs.items()):
        if not path.parent.is_dir():
            raise HmpxError(f"--{kind} {path}: there is no folder {path.parent}")
        if path.is_dir():
            raise HmpxError(f"--{kind} {path}: is a folder, not a file")
        if path in [*outputs.values()][:number]:
            raise HmpxError(f"--{kind} {path}: another option names this file, too")
        if options.force or not path.is_file():
            continue
        instead = "name another file, or write over it with --force"
        if any(os.path.samefile(path, each) for each in read):
            raise HmpxError(f"--{kind} {path}: this command reads the file; {instead}")
        with open(path, encoding="utf-8", errors="replace") as file:
            beginning = file.read(1000)
        if beginning and not _OURS.match(beginning):
            raise HmpxError(f"--{kind} {path}: the file is there already, and hmpx has not written it; {instead}")
