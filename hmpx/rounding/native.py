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
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from hmpx.rounding.kernel_cache import Refused, open_cache, say

logger = logging.getLogger("hmpx")

_PLAIN = (torch.Tensor, torch.nn.Parameter)  # another class may hold its values elsewhere

_SOURCES = [
    Path(__file__).with_name(name) for name in ("native.c", "native.h", "native_steps.c", "native_codes.c")
]  # the first has all
_FLAGS = ("-O3", "-std=c11", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off", "-fPIC", "-c")
# OpenMP is compiled in but not linked: its functions come from the library that torch has loaded, so that there is one
# pool of threads. Where that one does not offer them, the second variant runs on one thread.
_VARIANTS = (("-fopenmp",), ("-Wno-unknown-pragmas",))
_POINTER, _INT64, _UINT64, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_uint64, ctypes.c_int


_SIGNATURES = {
    "round_stochastic": (_POINTER, _POINTER, _INT64, _UINT64, _UINT64, _INT64, _INT64, _INT),
    "round_list": (_POINTER, _INT64, _UINT64, _INT),
    "widen_list": (_POINTER, _INT64, _INT),
    "split_halves": (_POINTER, _POINTER, _POINTER, _INT64, _INT),
    "join_halves": (_POINTER, _POINTER, _POINTER, _INT64, _INT),
    "read_masters": (_POINTER, _POINTER, _POINTER, _INT64, _INT),
    "block_checksums": (_POINTER, _POINTER, _POINTER, _INT64, _INT64, _INT),
    "split_24": (_POINTER, _POINTER, _POINTER, _INT64, _UINT64, _UINT64, _INT64, _INT64, _INT),
    "join_24": (_POINTER, _POINTER, _POINTER, _INT64, _INT),
    "encode_8bit": (_POINTER, _POINTER, _POINTER, _INT64, _UINT64, _UINT64, *(_INT64,) * 6, _INT, _INT),
    "decode_8bit": (_POINTER, _POINTER, _POINTER, *(_INT64,) * 5, _INT),
    "step_list": (_INT, _POINTER, _POINTER, _INT64, _UINT64, _INT),
}
KERNELS = ("adam", "sgd", "lion", "adagrad", "rmsprop", "nadam")  # of `native_steps.c`, in its order
_STATES, _SCALARS = 3, 12
_WORDS, _GRAD = 2 + 4 * (2 + _STATES), 6  # of a parameter; the place of its gradient's pointer
KINDS, _CODED = {torch.float32: 1, torch.bfloat16: 2}, 3


class Rounding(NamedTuple):
    """One tensor of `round_list`: `out` bfloat16 and `x` float32, of one shape, contiguous, on the CPU.

    Rows of `width` elements begin `stride` elements apart in the parameter, the first at `offset`. The upper 32 bits of
    all indices are the same. name: the hash of the parameter's name.
    """

    out: torch.Tensor
    x: torch.Tensor
    name: int
    offset: int
    width: int
    stride: int


class Coded(NamedTuple):
    """A state tensor in 8 bits, as `eight_bits` has it: contiguous codes and scales, in rows of `row` elements."""

    codes: torch.Tensor
    scales: torch.Tensor
    row: int


class Stepped(NamedTuple):
    """One parameter of `step_list`.

    weight, grad, states: FP32 or BF16, plain and of one shape, states in 8 bits too; they stand in the order that
        `native_steps.c` has them, None where the optimizer keeps none. name, state_names: the hashes of the names that
        they are rounded by.
    scalars: at most 12, which `native_steps.c` names.
    """

    weight: torch.Tensor
    name: int
    grad: torch.Tensor
    states: tuple[torch.Tensor | Coded | None, ...]
    state_names: tuple[int, ...]
    scalars: tuple[float, ...]


def round_(out: torch.Tensor, x: torch.Tensor, key: int, offset: int, width: int = 0, stride: int = 0) -> None:
    """`out` bfloat16 and `x` float32: of one shape, contiguous, on the CPU, within one key. Needs `library()`.

    Rows of `width` elements (0: a single row) begin `stride` elements apart in the parameter.
    """
    n, threads = x.numel(), torch.get_num_threads()
    _kernels().round_stochastic(x.data_ptr(), out.data_ptr(), n, key, offset, width or n, stride, threads)


def round_list(roundings: Sequence[Rounding], step_key: int) -> None:
    """Round all of them in one call. step_key: of the seed and the step. Needs `library()`."""
    words = array("Q")
    for out, x, name, offset, width, stride in roundings:
        words.extend((x.data_ptr(), out.data_ptr(), x.numel(), name, offset, width, stride))
    round_words(words, step_key)


def round_words(words: array[int], step_key: int) -> None:
    """`round_list`, for what the kernel is told of each: addresses of `x` and `out`, elements, and the rest."""
    _kernels().round_list(words.buffer_info()[0], len(words) // 7, step_key, torch.get_num_threads())


def widen_words(words: array[int]) -> None:
    """BF16 to FP32 in one call, of each tensor: pointers from and to, elements. Needs `library()`."""
    _kernels().widen_list(words.buffer_info()[0], len(words) // 3, torch.get_num_threads())


def step_list(kernel: str, stepped: Sequence[Stepped], step_key: int) -> None:
    """Step all of these parameters in place, in one call, by one of `KERNELS`. Needs `library()`."""
    scalars = array("f")
    for each in stepped:
        scalars.extend(scalars_of(each.scalars))
    step_words(kernel, words_of(stepped), scalars, [each.grad for each in stepped], step_key)


def words_of(stepped: Sequence[Stepped]) -> array[int]:
    """What the kernels are told of each parameter, but for its gradient, which another step has another one of."""
    words = array("Q")
    for each in stepped:
        weight = each.weight
        row = next((state.row for state in each.states if isinstance(state, Coded)), weight.numel())
        words.extend((weight.numel(), row, weight.data_ptr(), KINDS[weight.dtype], each.name, 0, 0, 0, 0, 0))
        for state, name in zip(each.states, each.state_names, strict=True):
            if isinstance(state, Coded):
                words.extend((state.codes.data_ptr(), _CODED, name, state.scales.data_ptr()))
            else:
                words.extend((0, 0, 0, 0) if state is None else (state.data_ptr(), KINDS[state.dtype], name, 0))
        words.extend((0, 0, 0, 0) * (_STATES - len(each.states)))
    return words


def scalars_of(scalars: tuple[float, ...]) -> tuple[float, ...]:
    """As many as the kernels have room for."""
    return (*scalars, *(0.0,) * (_SCALARS - len(scalars)))


def step_words(
    kernel: str, words: array[int], scalars: array[float], grads: Sequence[torch.Tensor], step_key: int
) -> None:
    """`step_list`, for the words and scalars of parameters, which get these gradients."""
    words[_GRAD::_WORDS] = array("Q", [grad.data_ptr() for grad in grads])
    words[_GRAD + 1 :: _WORDS] = array("Q", [KINDS[grad.dtype] for grad in grads])
    addresses = words.buffer_info()[0], scalars.buffer_info()[0]
    _kernels().step_list(KERNELS.index(kernel), *addresses, len(grads), step_key, torch.get_num_threads())


def split_24(
    x: torch.Tensor, upper: torch.Tensor, lower: torch.Tensor, places: Sequence[Sequence[int]], key: int
) -> None:
    """`halves.split_24` on flat tensors, within one key; of each place first, last, offset, width and stride."""
    for first, last, offset, width, stride in places:
        pointers = (tensor[first:last].data_ptr() for tensor in (x, upper, lower))
        _kernels().split_24(*pointers, last - first, key, offset, width, stride, torch.get_num_threads())


def encode_8bit(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    rows: Sequence[int],
    start: int,
    places: Sequence[Sequence[int]],
    key: int,
    given: bool,
) -> None:
    """`eight_bits.encode` within one key, of tensors with elements; of each place as `split_24`."""
    for first, last, offset, width, stride in places:
        pointers = x[first:last].data_ptr(), codes[first:last].data_ptr(), scales.data_ptr()
        where = last - first, key, offset, width, stride, start + first, *rows
        _kernels().encode_8bit(*pointers, *where, given, torch.get_num_threads())


def decode_8bit(codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor, rows: Sequence[int], start: int) -> None:
    """`eight_bits.decode`, of tensors with elements."""
    pointers = codes.data_ptr(), scales.data_ptr(), out.data_ptr()
    _kernels().decode_8bit(*pointers, out.numel(), start, *rows, torch.get_num_threads())


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
    """What -march=native depends on."""
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
