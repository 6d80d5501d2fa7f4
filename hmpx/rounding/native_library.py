"""The C kernels as a library, compiled on first use where a C compiler is found.

`kernel_cache` keeps it under a name made of the source, the compiler and the CPU. Without a compiler, or with
``HMPX_NATIVE=0``, the eager kernel is used instead; the log (level INFO) says why.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from hmpx.rounding.kernel_cache import Refused, open_cache, say

logger = logging.getLogger("hmpx")

_FILES = ("native.c", "native.h", "native_masters.c", "native_codes.c", "native_held.c", "native_steps.c")
_SOURCES = [Path(__file__).with_name(name) for name in _FILES]  # the first includes the others
_FLAGS = ("-O3", "-std=c11", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off", "-fPIC", "-c")
# OpenMP is compiled in but not linked: its functions come from the library that torch has loaded, so that there is one
# pool of threads. Where that one does not offer them, the second variant runs on one thread.
_VARIANTS = (("-fopenmp",), ("-Wno-unknown-pragmas",))
_POINTER, _INT64, _UINT64, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_uint64, ctypes.c_int


_SIGNATURES = {
    "round_stochastic": (_POINTER, _POINTER, _INT64, _UINT64, _UINT64, _INT64, _INT64, _INT),
    "round_list": (_POINTER, _INT64, _UINT64, _INT),
    "read_list": (_POINTER, _INT64, _INT),
    "write_list": (_POINTER, _INT64, _UINT64, _INT),
    "split_halves": (_POINTER, _POINTER, _POINTER, _INT64, _INT),
    "join_halves": (_POINTER, _POINTER, _POINTER, _INT64, _INT),
    "read_masters": (_POINTER, _POINTER, _POINTER, _INT64, _INT),
    "block_checksums": (_POINTER, _POINTER, _INT64, _INT64, _INT),
    "split_24": (_POINTER, _POINTER, _POINTER, _INT64, _UINT64, _UINT64, _INT64, _INT64, _INT),
    "join_24": (_POINTER, _POINTER, _POINTER, _INT64, _INT),
    "encode_8bit": (_POINTER, _POINTER, _POINTER, _INT64, _UINT64, _UINT64, *(_INT64,) * 6, _INT, _INT),
    "decode_8bit": (_POINTER, _POINTER, _POINTER, *(_INT64,) * 5, _INT),
    "step_list": (_INT, _POINTER, _POINTER, _INT64, _UINT64, _INT),
}


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels; None if there are none."""
    if os.environ.get("HMPX_NATIVE", "1") == "0":
        logger.info("hmpx: no C kernels: HMPX_NATIVE=0; rounding runs in eager torch")
        return None
    try:
        return _build()
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        logger.info("hmpx: no C kernels: %s; rounding runs in eager torch", error)
        return None


def architecture() -> str:
    """The architecture that the kernels are compiled for: HMPX_NATIVE_ARCH, or this CPU."""
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
    with open_cache() or contextlib.nullcontext() as cache:
        try:
            kept = cache.load(name) if cache is not None else None
        except Refused as refused:
            say(refused)
            kept = cache = None
        if kept is not None:
            return kept
        with tempfile.TemporaryDirectory() as folder:  # for its owner alone
            unlinked, linked = f"{folder}/native.o", f"{folder}/{name}"
            _run(compiler, *flags, str(_SOURCES[0]), "-o", unlinked)
            _run(compiler, "-shared", unlinked, "-lm", "-o", linked)
            with contextlib.suppress(OSError):  # no room, say
                if cache is not None:
                    cache.keep(linked, name)
                    kept = cache.load(name)
                    if kept is not None:
                        return kept
            return ctypes.CDLL(linked)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if done.returncode:
        raise OSError(f"{command[0]} failed: {done.stderr.strip()[:300]}")


def _cpu() -> str:
    """The properties of the CPU that -march=native depends on."""
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
