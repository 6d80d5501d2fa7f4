"""The C kernels as a library, compiled on first use where a C compiler is found.

The library is kept in ``$HMPX_CACHE_DIR``, else ``$XDG_CACHE_HOME/hmpx``, else ``~/.cache/hmpx``, under a name made of
the source, the compiler and the CPU. Without a compiler, or with ``HMPX_NATIVE=0``, the eager kernel is used instead;
the log (level INFO) says why.

A library that another user could have put there is not loaded: the folder and the file must belong to this user, and
nobody else may write to them. The file is opened first, then checked and loaded through its file descriptor, so nobody
can exchange it after the check. A symbolic link may lead to the folder, but not to a library.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import secrets
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

logger = logging.getLogger("hmpx")

_FILES = ("native.c", "native.h", "native_masters.c", "native_codes.c", "native_held.c", "native_steps.c")
_SOURCES = [Path(__file__).with_name(name) for name in _FILES]  # the first includes the others
_FLAGS = ("-O3", "-std=c11", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off", "-fPIC", "-c")
# OpenMP is compiled in but not linked: its functions come from the library that torch has loaded, so that there is one
# pool of threads. Where that one does not offer them, the second variant runs on one thread.
_VARIANTS = (("-fopenmp",), ("-Wno-unknown-pragmas",))
_POINTER, _INT64, _UINT64, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_uint64, ctypes.c_int

_SIGNATURES = {
    "round_list": (_POINTER, _INT64, _UINT64, _INT),
    "read_list": (_POINTER, _INT64, _INT),
    "write_list": (_POINTER, _INT64, _UINT64, _INT),
    "block_checksums": (_POINTER, _POINTER, _INT64, _INT64, _INT),
    "encode_8bit": (_POINTER, _POINTER, _POINTER, _INT64, _UINT64, _UINT64, *(_INT64,) * 6, _INT, _INT),
    "decode_8bit": (_POINTER, _POINTER, _POINTER, *(_INT64,) * 5, _INT),
    "step_list": (_INT, _POINTER, _POINTER, _INT64, _UINT64, _INT),
}


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the compiled kernels; None if there are none."""
    if os.environ.get("HMPX_NATIVE", "1") == "0":
        logger.info("hmpx: no C kernels: HMPX_NATIVE=0; rounding runs in eager torch")
        return None
    try:
        return _build()
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        logger.info("hmpx: no C kernels: %s; rounding runs in eager torch", error)
        return None


def architecture() -> str:
    """Return the architecture that the kernels are compiled for: HMPX_NATIVE_ARCH, or this CPU."""
    return os.environ.get("HMPX_NATIVE_ARCH") or "native"


def _build() -> ctypes.CDLL:
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise RuntimeError("no C compiler found")
    problem: Exception = RuntimeError("no variant was tried")
    for variant in _VARIANTS:
        try:
            return _declare(_load(compiler, variant))
        except (OSError, subprocess.SubprocessError) as error:
            problem = error
    raise problem


def _load(compiler: str, variant: tuple[str, ...]) -> ctypes.CDLL:
    flags = (f"-march={architecture()}", *_FLAGS, *variant)
    built = *(source.read_bytes() for source in _SOURCES), *(part.encode() for part in (compiler, _cpu(), *flags))
    name = f"native-{hashlib.sha256(b'|'.join(built)).hexdigest()[:16]}.so"
    folder = kept = None
    try:
        folder = _cache_folder()
        kept = _kept(folder / name) if folder is not None else None
    except _Refused as refused:
        _warn_once(str(refused))
        folder = None
    if kept is not None:
        return kept
    with tempfile.TemporaryDirectory() as private:
        unlinked, linked = f"{private}/native.o", f"{private}/{name}"
        _run(compiler, *flags, str(_SOURCES[0]), "-o", unlinked)
        _run(compiler, "-shared", unlinked, "-lm", "-o", linked)
        if folder is not None:
            with contextlib.suppress(OSError):  # no room, for example
                _keep(linked, folder / name)
                kept = _kept(folder / name)
        return kept or ctypes.CDLL(linked)


class _Refused(OSError):
    """A folder or library that somebody else may have written."""


def _cache_folder() -> Path | None:
    """Return the folder that libraries are kept in; None if it cannot be made.

    Raises:
        _Refused: another user may write to it.
    """
    if not hasattr(os, "geteuid"):
        return None
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(os.environ.get("HMPX_CACHE_DIR") or Path(home) / "hmpx")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        return None
    _check(folder.stat(), folder)
    return folder


def _kept(path: Path) -> ctypes.CDLL | None:
    """Load a library from the cache; None if there is none.

    Raises:
        _Refused: there is one, and it may be somebody else's.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)  # does not wait for a pipe
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _Refused(f"{path}: {error.strerror}") from None
    try:
        _check(os.fstat(fd), path)
        opened = f"/proc/self/fd/{fd}"
        if not os.path.exists(opened):  # not Linux: by its name, in a folder that only its owner can write to
            opened = str(path)
        # The file stays open. Else a later one could get its number, and the dynamic linker take it for this library.
        handle = ctypes._dlopen(opened, ctypes.DEFAULT_MODE)  # type: ignore[attr-defined]  # not in typeshed
        return ctypes.CDLL(str(path), handle=handle)
    except BaseException:
        os.close(fd)
        raise


def _keep(built: str, path: Path) -> None:
    """Copy a library into the cache under another name, then rename it: several processes may build at once."""
    beside = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o700)
    try:
        with open(fd, "wb") as out, open(built, "rb") as library:
            shutil.copyfileobj(library, out)
        beside.rename(path)
    except BaseException:
        beside.unlink()
        raise


def _check(found: os.stat_result, path: Path) -> None:
    """Check that only this user can write to a file or folder."""
    what = "folder" if stat.S_ISDIR(found.st_mode) else "library"
    if found.st_uid != os.geteuid():
        raise _Refused(f"{path}: nothing is loaded from here, because the {what} belongs to another user")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        way_out = f"empty it, then `chmod go-w {path}`" if what == "folder" else "delete it"
        raise _Refused(f"{path}: nothing is loaded from here, because others can write to the {what} ({way_out})")


@functools.cache
def _warn_once(why: str) -> None:
    logger.warning("hmpx: %s; the C kernels are compiled into a private temporary folder instead", why)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if done.returncode:
        raise OSError(f"{command[0]} failed: {done.stderr.strip()[:300]}")


def _cpu() -> str:
    """Return the properties of the CPU that -march=native depends on."""
    try:
        flags = [
            line
            for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
            if line.startswith(("flags", "Features"))
        ]
    except OSError:
        flags = []
    return f"{platform.machine()} {platform.processor()} {flags[0] if flags else ''}"


def _declare(loaded: ctypes.CDLL) -> ctypes.CDLL:
    for name, arguments in _SIGNATURES.items():
        function = getattr(loaded, name)
        function.argtypes, function.restype = arguments, None
    return loaded
