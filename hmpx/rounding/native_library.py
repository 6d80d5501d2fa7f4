"""The C kernels as a library: one that came in the wheel, else compiled on first use where a C compiler is found.

A wheel that is built where there is a C compiler carries a library for each level of `_LEVELS`, beside the source. It
is named after the source and the flags, so one that was made of another source is not loaded. The build reads this file
alone (`wheel_hook.py`), so it imports neither torch nor hmpx.

A library compiled on first use is kept in ``$HMPX_CACHE_DIR``, else ``$XDG_CACHE_HOME/hmpx``, else ``~/.cache/hmpx``,
under a name made of the source, the compiler and the CPU. Without either, or with ``HMPX_NATIVE=0``, the eager kernel
is used instead; the log (level INFO) says why.

A library that another user could have put there is not loaded: the folder and the file must belong to this user, and
nobody else may write to them. A symbolic link may lead to the folder, but not to a library. A file ends in the SHA-256
of what stands before it; a damaged one is compiled anew. A copy in memory of the checked bytes is loaded: nobody can
exchange or shorten it later, and the folder may lie on a file system that executes nothing.
"""

from __future__ import annotations

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
import sysconfig
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

logger = logging.getLogger("hmpx")

_FILES = ("native.c", "native.h", "native_masters.c", "native_codes.c", "native_held.c", "native_steps.c")
_SOURCES = [Path(__file__).with_name(name) for name in _FILES]  # the first includes the others
_FLAGS = ("-O3", "-std=c11", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off", "-fPIC", "-c")
# OpenMP is compiled in but not linked: its functions come from the library that torch has loaded, so that there is one
# pool of threads. Where that one does not offer them, the second variant runs on one thread.
_VARIANTS = (("-fopenmp",), ("-Wno-unknown-pragmas",))
# What a wheel for a platform carries, the best first: flags beside -march, and what the CPU must have of /proc/cpuinfo.
_V3 = "avx avx2 bmi1 bmi2 f16c fma abm movbe"
_LEVELS = {
    "linux-x86_64": {
        "x86-64-v4": ("-mavx512bf16", f"{_V3} avx512f avx512bw avx512cd avx512dq avx512vl avx512_bf16"),
        "x86-64-v3": ("", _V3),
    },
    "linux-aarch64": {"armv8-a": ("", "")},
}
_MANY = 1_000_000  # parameters of a step: from here on, the kernels save milliseconds
_DIGEST = hashlib.sha256().digest_size
_POINTER, _INT64, _UINT64, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_uint64, ctypes.c_int

_SIGNATURES = {
    "round_list": (_POINTER, _INT64, _UINT64, _INT),
    "read_list": (_POINTER, _INT64, _INT),
    "write_list": (_POINTER, _INT64, _UINT64, _INT),
    "encode_codes": (_INT, *(_POINTER,) * 3, _INT64, _UINT64, _UINT64, *(_INT64,) * 6, _INT, _INT),
    "decode_codes": (_INT, *(_POINTER,) * 3, *(_INT64,) * 5, _INT),
    "step_list": (_INT, _POINTER, _POINTER, _INT64, _UINT64, _INT),
}


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the compiled kernels; None if there are none."""
    if os.environ.get("HMPX_NATIVE", "1") == "0":
        logger.info("hmpx: no C kernels: HMPX_NATIVE=0; rounding runs in eager torch")
        return None
    try:
        return _carried() or _build()
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
            "hmpx: there are no C kernels here, so steps of BF16 weights on the CPU take up to 1.8 times as long. "
            "Install a C compiler (`apt-get install gcc libc6-dev`), or a wheel of hmpx that was built on Linux where "
            "there is one. HMPX_NATIVE=0 takes the slow way without this warning",
            stacklevel=2,
        )


def architecture() -> str:
    """Return the architecture that the kernels are compiled for: HMPX_NATIVE_ARCH, or this CPU."""
    return os.environ.get("HMPX_NATIVE_ARCH") or "native"


def libraries_of_wheel() -> Iterator[tuple[str, bytes]]:
    """Compile what a wheel for this platform carries: the name of each library, and its content.

    Raises:
        NoCompiler: there is nothing to compile them with.
        OSError, subprocess.SubprocessError: the compiler fails.
    """
    for _, _, name, flags in _of_wheel():
        yield name, _compiled(_compiler(), flags)


def _of_wheel() -> Iterator[tuple[str, str, str, tuple[str, ...]]]:
    """Yield level, needs, file name and flags of each library that a wheel carries, the best first."""
    for level, (more, needs) in _LEVELS.get(sysconfig.get_platform(), {}).items():
        for variant in _VARIANTS:
            flags = (f"-march={level}", *more.split(), *_FLAGS, *variant)
            yield level, needs, f"{level}-{_name(*flags)}", flags


def _carried() -> ctypes.CDLL | None:
    """Load the best library of the wheel that this CPU can run; None if there is none."""
    has = {*_cpu().split()}
    for level, needs, name, _ in _of_wheel():
        path = _SOURCES[0].with_name(name)
        if architecture() in ("native", level) and has.issuperset(needs.split()) and path.exists():
            try:
                return _declare(ctypes.CDLL(str(path)))
            except OSError as error:  # no OpenMP in the process, for example
                logger.info("hmpx: %s", error)
    return None


def _name(*made_of: str) -> str:
    """Return the file name of a library that is made of the source and `made_of`."""
    parts = *(source.read_bytes() for source in _SOURCES), *(part.encode() for part in made_of)
    return f"native-{hashlib.sha256(b'|'.join(parts)).hexdigest()[:16]}.so"


def _compiler() -> str:
    found = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc") or shutil.which("clang")
    if found is None:
        raise NoCompiler("no C compiler found")
    return found


def _build() -> ctypes.CDLL:
    compiler = _compiler()
    problem: Exception = OSError("no variant was tried")
    for variant in _VARIANTS:
        try:
            return _declare(_load(compiler, variant))
        except (OSError, subprocess.SubprocessError) as error:
            problem = error
    raise problem


def _load(compiler: str, variant: tuple[str, ...]) -> ctypes.CDLL:
    flags = (f"-march={architecture()}", *_FLAGS, *variant)
    name = _name(compiler, _cpu(), *flags)
    folder, built = None, None
    try:
        folder = _cache_folder()
        built = _kept(folder / name)
    except _Refused as refused:
        _warn_once(str(refused))
        folder = None
    except (OSError, RuntimeError) as error:
        logger.info("hmpx: %s; the C kernels are compiled anew", error)
    if folder is not None and built is not None:
        return _loaded(built, str(folder / name))
    built = _compiled(compiler, flags)
    if folder is not None:
        try:
            _keep(built, folder / name)
        except OSError as error:  # no room, for example
            logger.info("hmpx: %s keeps no C kernels, so that each process compiles them: %s", folder, error)
    return _loaded(built, name)


def _compiled(compiler: str, flags: Sequence[str]) -> bytes:
    with tempfile.TemporaryDirectory() as private:
        unlinked, linked = f"{private}/native.o", f"{private}/native.so"
        _run(compiler, *flags, str(_SOURCES[0]), "-o", unlinked)
        _run(compiler, "-shared", unlinked, "-lm", "-o", linked)
        return Path(linked).read_bytes()


def _loaded(built: bytes, name: str) -> ctypes.CDLL:
    """Load a library from a file in memory; from a private one where there are none, or they cannot be executed."""
    try:
        fd = os.memfd_create(name)
        try:
            with open(fd, "wb", closefd=False) as copy:
                copy.write(built)
            handle = ctypes._dlopen(f"/proc/self/fd/{fd}", ctypes.DEFAULT_MODE)  # type: ignore[attr-defined]  # not in typeshed
        except BaseException:
            os.close(fd)
            raise
        # It stays open. Else a later file could get its number, and the dynamic linker take it for this library.
        return ctypes.CDLL(name, handle=handle)
    except (OSError, AttributeError):
        with tempfile.TemporaryDirectory() as private:
            path = Path(private, "native.so")
            path.write_bytes(built)
            return ctypes.CDLL(str(path))


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
    _check(folder.stat(), folder)
    return folder


def _kept(path: Path) -> bytes | None:
    """Return a library from the cache; None if there is none.

    Raises:
        _Refused: there is one, and it may be somebody else's, or cannot be read.
        OSError: it is damaged.
    """
    more = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # no link, and no waiting for a pipe
    try:
        with open(path, "rb", opener=lambda path, flags: os.open(path, flags | more)) as file:
            _check(os.fstat(file.fileno()), path)
            raw = file.read()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise error if isinstance(error, _Refused) else _Refused(f"{path}: {error.strerror}") from None
    built, digest = raw[:-_DIGEST], raw[-_DIGEST:]
    if hashlib.sha256(built).digest() != digest:
        raise OSError(f"{path} is damaged")
    return built


def _keep(built: bytes, path: Path) -> None:
    """Write a library into the cache under another name, then rename it: several processes may build at once."""
    beside = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o700)
    try:
        with open(fd, "wb") as out:
            out.write(built + hashlib.sha256(built).digest())
            out.flush()
            os.fsync(fd)  # else the name may outlive a power failure, and the content not
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
    logger.warning("hmpx: %s; each process compiles the C kernels for itself", why)


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
