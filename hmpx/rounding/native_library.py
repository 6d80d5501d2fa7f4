"""The C kernels as a library, compiled on first use where a C compiler is found.

It is kept in ``$HMPX_CACHE_DIR``, else ``$XDG_CACHE_HOME/hmpx``, else ``~/.cache/hmpx``, under a name made of the
source, the compiler and the CPU. Without a compiler, or with ``HMPX_NATIVE=0``, the eager kernel is used instead; the
log (level INFO) says why. Folder and library must belong to this user, and nobody else may write to them.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import stat
import subprocess
import tempfile
import warnings
from pathlib import Path

from hmpx.rounding.kinds import for_c

logger = logging.getLogger("hmpx")

_PARTS = ("masters", "codes", "stored", "steps", "bits")
_FILES = ("native.c", "native.h", *(f"native_{part}.c" for part in _PARTS))
_SOURCES = [Path(__file__).with_name(name) for name in _FILES]  # the first includes the others
# A compiler, or a wrapper of one, may take fast math for granted, which has other bits. Each part of it is taken back:
# GCC keeps a part that somebody has named where only the whole is. Linked so, a library would turn the denormal numbers
# of the whole process into 0 at its start: ours has no start files.
_STRICT = (
    *("-fno-fast-math", "-fno-unsafe-math-optimizations", "-fno-finite-math-only", "-fno-associative-math"),
    *("-fno-reciprocal-math", "-fsigned-zeros", "-ffp-contract=off"),
)
_FLAGS = ("-O3", "-std=c11", *_STRICT, "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-c")
# OpenMP is compiled in but not linked: its functions come from the library that torch has loaded, so that there is one
# pool of threads. Where that one does not offer them, the second variant runs on one thread.
_VARIANTS = (("-fopenmp",), ("-Wno-unknown-pragmas",))
_MANY = 1_000_000  # parameters of a step: from here on, the kernels save milliseconds
_POINTER, _INT64, _UINT64, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_uint64, ctypes.c_int

_SIGNATURES = {
    "move_list": (_POINTER, _INT64, _INT),
    "step_list": (_POINTER, _INT64, _INT, _INT, _POINTER),
    "put_keys": (*(_POINTER,) * 3, _INT64, _UINT64),
    "read_floats": (_POINTER, _INT64, _POINTER),
    "add_one": (_POINTER, _INT64),
    "copy_bytes": (_UINT64, *(_POINTER,) * 3, _INT64, _INT),
    "compare_bytes": (_UINT64, *(_POINTER,) * 3, _INT64, _INT, _POINTER),
    "compare_widened": (_UINT64, *(_POINTER,) * 3, _INT64, _INT, _POINTER),
}


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the compiled kernels; None if there are none."""
    if os.environ.get("HMPX_NATIVE", "1") == "0":
        logger.info("hmpx: no C kernels: HMPX_NATIVE=0; rounding runs in eager torch")
        return None
    try:
        return _build()
    except NoCompiler as error:
        logger.info("hmpx: no C kernels: %s; rounding runs in eager torch", error)
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning("hmpx: no C kernels: %s; rounding runs in eager torch", error)
    return None


def expect_kernels(parameters: int) -> None:
    """Warn, once, where a step of many parameters on a CPU has no kernels. HMPX_NATIVE=0 asked for that."""
    if parameters > _MANY and os.environ.get("HMPX_NATIVE", "1") != "0":
        _warn_of_slow_steps()


@functools.cache
def _warn_of_slow_steps() -> None:
    if library() is None:
        warnings.warn(
            "hmpx: there are no C kernels here, so steps of BF16 weights on the CPU take about 20 times as long, and "
            "80 times with state in 8 bits, to the same bits. Install a C compiler (`apt-get install gcc libc6-dev`). "
            "HMPX_NATIVE=0 takes the slow way without this warning",
            stacklevel=2,
        )


def architecture() -> str:
    """Return the architecture that the kernels are compiled for: HMPX_NATIVE_ARCH, or this CPU."""
    return os.environ.get("HMPX_NATIVE_ARCH") or "native"


def _build() -> ctypes.CDLL:
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise NoCompiler("no C compiler found")
    problem: Exception = OSError("no variant was tried")
    for variant in _VARIANTS:
        try:
            return _load(compiler, variant)
        except (OSError, subprocess.SubprocessError) as error:
            problem = error
    raise problem


def _load(compiler: str, variant: tuple[str, ...]) -> ctypes.CDLL:
    flags = (f"-march={architecture()}", *_FLAGS, *for_c(), *variant)
    parts = *(source.read_bytes() for source in _SOURCES), *(part.encode() for part in (compiler, _cpu(), *flags))
    name = f"native-{_digest(b'|'.join(parts))}"
    folder = None
    try:
        folder = _cache_folder()
        for kept in sorted(folder.glob(f"{name}-*.so")):
            _check(kept)
            if kept.stem == f"{name}-{_digest(kept.read_bytes())}":
                return _declare(ctypes.CDLL(str(kept)))
            logger.info("hmpx: %s is not as it was written; the C kernels are compiled anew", kept)
    except _Refused as refused:
        logger.warning("hmpx: %s; each process compiles the C kernels for itself", refused)
        folder = None
    except (OSError, RuntimeError) as error:  # on a file system that executes nothing, for example
        logger.info("hmpx: %s; the C kernels are compiled anew", error)
    with tempfile.TemporaryDirectory() as private:
        unlinked, linked = f"{private}/native.o", f"{private}/native.so"
        _run(compiler, *flags, str(_SOURCES[0]), "-o", unlinked)
        _run(compiler, "-shared", "-nostartfiles", unlinked, "-lm", "-o", linked)
        if folder is not None:
            try:
                _keep(Path(linked).read_bytes(), folder, name)
            except OSError as error:  # no room, for example
                logger.info("hmpx: %s keeps no C kernels, so that each process compiles them: %s", folder, error)
        return _declare(ctypes.CDLL(linked))


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _keep(built: bytes, folder: Path, name: str) -> None:
    """Write a library to the disk, then give it its name, with a digest in it: several processes may build at once."""
    with tempfile.TemporaryDirectory(dir=folder) as beside:
        path = Path(beside) / f"{name}-{_digest(built)}.so"
        with open(path, "wb") as file:
            file.write(built)
            file.flush()
            os.fsync(file.fileno())  # else the name may be there after a power failure, and not all of the content
        path.chmod(0o700)
        os.replace(path, folder / path.name)


class NoCompiler(Exception):
    """There is nothing to compile the kernels with."""


class _Refused(OSError):
    """A folder or library that somebody else may have written."""


def _cache_folder() -> Path:
    """Return the folder that libraries are kept in.

    Raises:
        OSError, RuntimeError: it cannot be made.
        _Refused: another user may write to it.
    """
    if not hasattr(os, "geteuid"):
        raise OSError("files have no owners here")
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(os.environ.get("HMPX_CACHE_DIR") or Path(home) / "hmpx")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check(folder)
    return folder


def _check(path: Path) -> None:
    """Check that only this user can write to a file or folder."""
    found = path.stat()
    if found.st_uid != os.geteuid():
        raise _Refused(f"{path}: nothing is loaded from here, because it belongs to another user")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise _Refused(f"{path}: nothing is loaded from here, because others can write to it (`chmod go-w {path}`)")


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
