"""Files that are written as a whole or not at all: a full disk or a kill leaves the one that was there; and paths."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

from hmpx.errors import HmpxError


def beside(folder: str | os.PathLike[str], path: str | os.PathLike[str]) -> str:
    """Return a path that is given from `folder`, without ``..`` where that is the same file: links make it another."""
    whole = os.path.join(folder, path)
    short = os.path.normpath(whole)
    return short if os.path.realpath(short) == os.path.realpath(whole) else whole


class WriteError(HmpxError, OSError):
    """A file could not be written; it is as it was."""


def write(path: str | os.PathLike[str], text: str) -> None:
    """Write text beside a file, in UTF-8, and put it in the place of the file. A device is written to.

    Raises:
        WriteError: with the name of the file and the reason.
    """
    target = Path(os.path.realpath(path))
    try:
        if target.exists() and not target.is_file():
            target.write_text(text, encoding="utf-8")
            return
        part = target.with_name(f".{target.name}.{os.getpid()}.part")
        try:
            part.write_text(text, encoding="utf-8")
            if target.exists():
                shutil.copymode(target, part)
            os.replace(part, target)
        except BaseException:
            with contextlib.suppress(OSError):
                part.unlink()
            raise
    except OSError as error:
        raise WriteError(f"{path}: could not be written, and is as it was: {error.strerror or error}") from error
