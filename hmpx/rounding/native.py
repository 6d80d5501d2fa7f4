"""The CPU kernels in C: how Python calls them, and the library that has them, compiled on first use.

The library is kept in ``$HMPX_CACHE_DIR``, else ``$XDG_CACHE_HOME/hmpx``, else ``~/.cache/hmpx``, under a name made of
the source, the compiler and the CPU. Without a compiler, or with ``HMPX_NATIVE=0``, the eager kernel is used instead;
the log (level INFO) says why. Folder and library must belong to this user, and nobody else may write to them.
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
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from hmpx.rounding.shared import (  # noqa: F401  whoever makes a `StoredTensor` asks this module for its kind
    BF16,
    FOUR,
    FP32,
    KERNELS,
    MASTER,
    NEAREST,
    SCALARS,
    SPLIT,
    SPLIT8,
    for_c,
    key_of,
)

PLAIN = (torch.Tensor, torch.nn.Parameter)  # another class may hold its values elsewhere

KINDS = {torch.float32: FP32, torch.bfloat16: BF16}
_STATES = 3  # of a parameter


class StoredTensor(NamedTuple):
    """A contiguous tensor of a parameter, in the form in which it is held between two steps.

    kind: a kind of `native_stored.c`. name: the hash of its name.
    beside: masters or lower halves, of the same shape; or the scales of codes, which lie in rows of `row` elements.
    """

    tensor: torch.Tensor
    kind: int
    name: int = 0
    beside: torch.Tensor | None = None
    row: int = 0

    @property
    def size(self) -> int:
        return self.tensor.numel() * (2 if self.kind == FOUR else 1)

    @classmethod
    def of(cls, tensor: torch.Tensor, name: int = 0) -> StoredTensor:
        """Return an FP32 tensor, or a BF16 one that is rounded stochastically."""
        return cls(tensor, KINDS[tensor.dtype], name)


class StepArguments(NamedTuple):
    """One parameter of `step_list`.

    weight, grad, states: of one shape; the gradient is FP32 or BF16. States stand in the order of `native_steps.c`,
        with None where the optimizer keeps none.
    scalars: at most 12, which `native_steps.c` names.
    first: the index of the first element in the whole parameter, of which this may be a part: elements that follow one
        another, among the first 2^32.
    """

    weight: StoredTensor
    grad: StoredTensor
    states: tuple[StoredTensor | None, ...]
    scalars: tuple[float, ...] = ()
    first: int = 0

    def tensors(self) -> tuple[StoredTensor | None, ...]:
        """Return all of them, with as many states as kernels have room for."""
        return self.weight, self.grad, *self.states, *(None,) * (_STATES - len(self.states))

    @property
    def row(self) -> int:
        """The length of the rows in which codes of state lie; without codes, that of the parameter."""
        return max([state.row for state in self.states if state is not None], default=0) or self.weight.tensor.numel()


def start(kernel: str, address: int, count: int, *more: int) -> None:
    """Call a kernel for `count` rows of a table that begin at this address. Needs `library()`."""
    getattr(_kernels(), kernel)(address, count, torch.get_num_threads(), *more)


def scalars_of(scalars: tuple[float, ...]) -> tuple[float, ...]:
    """Return the scalars, padded to the number that the kernels read."""
    return (*scalars, *(0.0,) * (SCALARS - len(scalars)))


def padded(scalars: Sequence[tuple[float, ...]]) -> array[float]:
    """Return the scalars of parameters one after the other; most lists have the same object again and again."""
    if scalars and scalars.count(scalars[0]) == len(scalars):
        return array("f", scalars_of(scalars[0])) * len(scalars)
    return array("f", [number for each in scalars for number in scalars_of(each)])


def put_keys(words: array[int], places: array[int], names: array[int], step_key: int) -> None:
    """Write the key of each name into its place among the words."""
    found = library()
    if found is None:
        for place, name in zip(places, names, strict=True):
            words[place] = key_of(step_key, name)
    elif names:
        found.put_keys(*(each.buffer_info()[0] for each in (words, places, names)), len(names), step_key)


def counts_at(addresses: array[int]) -> array[float]:
    """Return FP32 numbers on the CPU. Needs `library()`."""
    found = array("f", bytes(4 * len(addresses)))
    _kernels().read_floats(addresses.buffer_info()[0], len(addresses), found.buffer_info()[0])
    return found


def raise_counts(addresses: array[int]) -> None:
    """Add 1 to each of these FP32 numbers on the CPU. Needs `library()`."""
    _kernels().add_one(addresses.buffer_info()[0], len(addresses))


class Spans(NamedTuple):
    """Where tensors lie in one block of memory: the byte at which each begins there, and how many it has."""

    offsets: array[int]
    sizes: array[int]

    def fill(self, base: int, addresses: array[int]) -> None:
        """Copy the bytes at these addresses to their places. Needs `library()`, as the next."""
        _kernels().copy_bytes(base, *self._arguments(addresses))

    def differing(self, base: int, addresses: array[int], *, widened: bool = False) -> list[int]:
        """Return the indices of the places that hold other bytes than their addresses.

        widened: FP32 numbers lie in the places, and BF16 ones, which have the `sizes`, at the addresses.
        """
        differ = array("B", bytes(len(addresses)))
        compare = _kernels().compare_widened if widened else _kernels().compare_bytes
        compare(base, *self._arguments(addresses), differ.buffer_info()[0])
        return [i for i, one in enumerate(differ) if one] if any(differ) else []

    def _arguments(self, addresses: array[int]) -> tuple[int, ...]:
        arrays = self.offsets, addresses, self.sizes
        return *[each.buffer_info()[0] for each in arrays], len(addresses), torch.get_num_threads()


def _kernels() -> ctypes.CDLL:
    """Return `library()` for callers that have checked that it exists."""
    found = library()
    assert found is not None, "there are no C kernels"
    return found


def can_read(*tensors: torch.Tensor) -> bool:
    """Return whether the kernels exist and can read these tensors of equal shape."""
    if library() is None:
        return False
    shape = tensors[0].shape
    for tensor in tensors:  # a loop, as every step asks this of every parameter
        if not tensor.is_cpu or not is_plain(tensor) or tensor.shape != shape:
            return False
    return True


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's values lie one after the other at its pointer, with their own signs."""
    if type(tensor) not in PLAIN or tensor.layout is not torch.strided or not tensor.is_contiguous():
        return False
    return not tensor.is_neg() and (tensor.data_ptr() != 0 or not tensor.numel())


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
    with tempfile.TemporaryDirectory(dir=folder) as private:
        path = Path(private) / f"{name}-{_digest(built)}.so"
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
