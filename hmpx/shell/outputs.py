"""Files that commands write: where they go, and that they replace nothing."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hmpx.base.files import WriteError
from hmpx.errors import HmpxError


def add_force(command: Any) -> None:
    """Add, to a command or to a group of its options, the one that lets `check_outputs` pass."""
    command.add_argument("--force", action="store_true", help="write over files that are there")


def of_rank(path: str) -> Path:
    """Return the absolute path that this rank writes to; of many, ``log.3.json`` for rank 3."""
    whole = Path(os.path.abspath(path))
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return whole.with_name(f"{whole.stem}.{os.environ.get('RANK', '0')}{whole.suffix}")
    return whole


def save(found: Any, outputs: Mapping[str, Path]) -> tuple[list[str], bool]:
    """Write files by the methods of their names; return a line for each, and whether all were written.

    Whoever has run a script gets what was found, even if the disk is full.
    """
    lines, are_all = [], True
    for kind, path in outputs.items():
        try:
            getattr(found, kind)(path)
            use = f"; next: python -m hmpx run --recipe {path} SCRIPT" if kind == "fix" else ""
            lines.append(f"hmpx: wrote {path}{use}")
        except WriteError as error:
            lines.append(f"hmpx: {error}")
            are_all = False
    return lines, are_all


def check_outputs(options: argparse.Namespace, outputs: Mapping[str, Path]) -> None:
    """Check that the files of some options can be written, and that they replace no file, unless `--force` is given.

    Raises:
        HmpxError: there is no such folder; the file is there already, and not empty; or two options name one file.
    """
    for number, (kind, path) in enumerate(outputs.items()):
        if not path.parent.is_dir():
            raise HmpxError(f"--{kind} {path}: there is no folder {path.parent}")
        if path.is_dir():
            raise HmpxError(f"--{kind} {path}: is a folder, not a file")
        if path in [*outputs.values()][:number]:
            raise HmpxError(f"--{kind} {path}: another option names this file, too")
        if path.is_file() and path.stat().st_size and not options.force:
            raise HmpxError(f"--{kind} {path}: is there already; name another file, or write over it with --force")
