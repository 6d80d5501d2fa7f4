"""The folder of compiled kernels. A library that another user could have put there is not loaded.

It is ``$HMPX_CACHE_DIR``, else ``$XDG_CACHE_HOME/hmpx``, else ``~/.cache/hmpx``, and only its owner may enter it. The
folder is opened once, then checked and used through its file descriptor; so is each library in it. Somebody who can
replace the folder under its name (because a folder above it is open to all) cannot replace what was checked, and the
one that he puts there belongs to him and is refused. A symbolic link may lead to the folder, but not to a library.
"""

from __future__ import annotations

import ctypes
import logging
import os
import secrets
import shutil
import stat
from pathlib import Path

logger = logging.getLogger("hmpx")
_OPEN_TO_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_said: set[str] = set()


class Refused(OSError):
    """A folder or library that somebody else may have written."""


class Cache:
    """The folder, opened. As a context manager it closes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            _check(self._fd, folder)
        except BaseException:
            os.close(self._fd)
            raise

    def __enter__(self) -> Cache:
        return self

    def __exit__(self, *exception: object) -> None:
        os.close(self._fd)

    def load(self, name: str) -> ctypes.CDLL | None:
        """The cached library of a name; None if there is none.

        Raises:
            Refused: there is one, and it may be somebody else's.
        """
        path = self._folder / name
        try:
            # O_NONBLOCK: not to wait for a pipe or the like.
            fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=self._fd)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise Refused(f"{path}: {error.strerror}") from None
        try:
            _check(fd, path)
            opened = f"/proc/self/fd/{fd}"
            if not os.path.exists(opened):  # not Linux: by its name, in a folder that only its owner can write to
                opened = str(path)
            # It stays open, or a later file could get its number, and the dynamic linker take it for this library.
            handle = ctypes._dlopen(opened, ctypes.DEFAULT_MODE)  # type: ignore[attr-defined]  # not in typeshed
            return ctypes.CDLL(str(path), handle=handle)
        except BaseException:
            os.close(fd)
            raise

    def keep(self, built: str, name: str) -> None:
        """Keep a library. It is written under another name and renamed, so several processes may build at once."""
        beside = f".{name}.{secrets.token_hex(8)}"
        fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o700, dir_fd=self._fd)
        try:
            with open(fd, "wb") as out, open(built, "rb") as library:
                shutil.copyfileobj(library, out)
            os.rename(beside, name, src_dir_fd=self._fd, dst_dir_fd=self._fd)
        except BaseException:
            os.unlink(beside, dir_fd=self._fd)
            raise


def open_cache() -> Cache | None:
    """The folder; None if it cannot be made or if another user could write to it, which is logged once."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(os.environ.get("HMPX_CACHE_DIR") or Path(home) / "hmpx")
    if not hasattr(os, "geteuid"):
        return None
    try:
        return Cache(folder)
    except Refused as refused:
        say(refused)
    except OSError:
        pass
    return None


def say(refused: Refused) -> None:
    """Log that something is not loaded, and what is done instead; once."""
    if str(refused) not in _said:
        _said.add(str(refused))
        logger.warning("hmpx: %s; the C kernels are compiled into a private temporary folder instead", refused)


def _check(fd: int, path: Path) -> None:
    """Check that only this user can write to the open file or folder."""
    found = os.fstat(fd)
    what = "folder" if stat.S_ISDIR(found.st_mode) else "library"
    if found.st_uid != os.geteuid():
        raise Refused(f"{path}: nothing is loaded from here, because the {what} belongs to another user")
    if found.st_mode & _OPEN_TO_OTHERS:
        way_out = f"empty it, then `chmod go-w {path}`" if what == "folder" else "delete it"
        raise Refused(f"{path}: nothing is loaded from here, because others can write to the {what} ({way_out})")
