"""The CPU kernels in C, compiled on first use where a C compiler is found.

`kernel_cache` keeps the compiled library under a name made of the source, the compiler and the CPU. Without a compiler,
or with ``HMPX_NATIVE=0``, the eager kernel is used instead; the log (level INFO) says why.
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

import torch

from hmpx.rounding.kernel_cache import Refused, open_cache, say

logger = logging.getLogger("hmpx")

_PLAIN = (torch.Tensor, torch.nn.Parameter)  # another class may hold its values elsewhere
KeyedTensor = tuple[torch.Tensor, int]  # FP32, or BF16 with the key that it is rounded by when it is written
KeyedState = KeyedTensor | tuple[None, int]  # None where the optimizer keeps none

_SOURCE = Path(__file__).with_name("native.c")
_FLAGS = ("-O3", "-std=c11", "-fno-math-errno", "-ffp-contract=off", "-fPIC", "-c")
# OpenMP is compiled in but not linked: its functions come from the library that torch has loaded, so that there is one
# pool of threads. Where that one does not offer them, the second variant runs on one thread.
_VARIANTS = (("-fopenmp",), ("-Wno-unknown-pragmas",))
_POINTER, _INT64, _UINT64, _INT, _FLOAT = (
    ctypes.c_void_p,
    ctypes.c_int64,
    ctypes.c_uint64,
    ctypes.c_int,
    ctypes.c_float,
)


class KernelArray(ctypes.Structure):
    _fields_ = (("at", _POINTER), ("bf16", ctypes.c_int32), ("key", _UINT64))


_SIGNATURES = {
    "round_stochastic": (_POINTER, _POINTER, _INT64, _UINT64, _UINT64, _INT64, _INT64, _INT),
    "split_halves": (_POINTER, _POINTER, _POINTER, _INT64, _INT),
    "join_halves": (_POINTER, _POINTER, _POINTER, _INT64, _INT),
    "read_masters": (_POINTER, _POINTER, _POINTER, _INT64, _INT),
    "block_checksums": (_POINTER, _POINTER, _POINTER, _INT64, _INT64, _INT),
    "adam": (*(KernelArray,) * 4, _INT64, *(_FLOAT,) * 9, _INT),
    "sgd": (*(KernelArray,) * 3, _INT64, *(_FLOAT,) * 5, _INT, _FLOAT, _INT),
}


def round_(out: torch.Tensor, x: torch.Tensor, key: int, offset: int, width: int = 0, stride: int = 0) -> None:
    """`out` bfloat16 and `x` float32: of one shape, contiguous, on the CPU, within one key. Needs `library()`.

    Rows of `width` elements (0: a single row) begin `stride` elements apart in the parameter.
    """
    n, threads = x.numel(), torch.get_num_threads()
    _kernels().round_stochastic(x.data_ptr(), out.data_ptr(), n, key, offset, width or n, stride, threads)


def adam(weight: KeyedTensor, grad: KeyedTensor, mean: KeyedState, square: KeyedState, *scalars: float) -> None:
    """A step of Adam or AdamW in place; `native.c` names the scalars. Needs `library()`."""
    held = (_kernel_array(each) for each in (weight, grad, mean, square))
    _kernels().adam(*held, weight[0].numel(), *scalars, torch.get_num_threads())


def sgd(weight: KeyedTensor, grad: KeyedTensor, buffer: KeyedState, *scalars: float) -> None:
    """A step of SGD in place; `native.c` names the scalars. Needs `library()`."""
    held = (_kernel_array(each) for each in (weight, grad, buffer))
    _kernels().sgd(*held, weight[0].numel(), *scalars, torch.get_num_threads())


def _kernel_array(held: KeyedState) -> KernelArray:
    tensor, key = held
    return KernelArray() if tensor is None else KernelArray(tensor.data_ptr(), tensor.dtype is torch.bfloat16, key)


def block_checksums(weights: torch.Tensor, out: torch.Tensor, multipliers: torch.Tensor) -> None:
    """The checksum of each block, as `updates/checksums.py` defines it.

    weights: BF16 that `can_read`. multipliers: one for each weight of a block.
    """
    pointers = (tensor.data_ptr() for tensor in (weights, out, multipliers))
    _kernels().block_checksums(*pointers, weights.numel(), multipliers.numel(), torch.get_num_threads())


def call(name: str, *tensors: torch.Tensor) -> None:
    """A kernel that goes through tensors of one size, all of which it `can_read`."""
    pointers = (tensor.data_ptr() for tensor in tensors)
    getattr(_kernels(), name)(*pointers, tensors[0].numel(), torch.get_num_threads())


def _kernels() -> ctypes.CDLL:
    """`library()`, for a caller that has seen that there is one."""
    found = library()
    assert found is not None, "there are no C kernels"
    return found


def can_read(*tensors: torch.Tensor) -> bool:
    """Whether the kernels are there and can follow the pointers of these tensors, which must be of one shape."""
    shape = tensors[0].shape
    return library() is not None and all(is_plain(t) and t.is_cpu and t.shape == shape for t in tensors)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor's values lie one after the other at its pointer."""
    return type(tensor) in _PLAIN and tensor.layout is torch.strided and tensor.is_contiguous()


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels, or None where there are none."""
    if os.environ.get("HMPX_NATIVE", "1") == "0":
        logger.info("hmpx: no C kernels: HMPX_NATIVE=0; rounding runs in eager torch")
        return None
    try:
        return _build()
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        logger.info("hmpx: no C kernels: %s; rounding runs in eager torch", error)
        return None


def architecture() -> str:
    """What the kernels are compiled for, in the compiler's words: HMPX_NATIVE_ARCH, or the CPU that this runs on."""
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
    built = _SOURCE.read_bytes(), *(part.encode() for part in (compiler, _cpu(), *flags))
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
            _run(compiler, *flags, str(_SOURCE), "-o", unlinked)
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
    """What -march=native depends on."""
    try:
        flags = [
            line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith(("flags", "Features"))
        ]
    except OSError:
        flags = []
    return f"{platform.machine()} {platform.processor()} {flags[0] if flags else ''}"


def _declare(loaded: ctypes.CDLL) -> ctypes.CDLL:
    for name, arguments in _SIGNATURES.items():
        function = getattr(loaded, name)
        function.argtypes, function.restype = arguments, None
    return loaded
