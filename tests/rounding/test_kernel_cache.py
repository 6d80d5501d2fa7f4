"""The folder that compiled kernels are kept in: what is damaged or planted there is not loaded."""

import functools
import hashlib
import itertools
import os
import shutil
import stat
import subprocess

import pytest

from hmpx.rounding import native
from tests.support import python

pytestmark = pytest.mark.skipif(native.library() is None, reason="no C compiler here")
needs_root = pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can give files away")
SOMEBODY = 65534
PLANTED = """
#include <stdio.h>
__attribute__((constructor)) static void leave_a_mark(void) { fclose(fopen("%s", "w")); }
"""
# Says: are there kernels? Has a step that divides and takes roots, and a sum, the bits of the operators? Do denormal
# numbers stay?
STRICT = """
import torch, hmpx
from hmpx.rounding import native
is_there, bits = native.library() is not None, []
for _ in range(2):
    numbers = torch.Generator().manual_seed(0)
    p = torch.nn.Parameter((torch.randn(256, 256, generator=numbers) * 0.1).bfloat16())
    optimizer = torch.optim.NAdam([p], lr=1e-3)
    hmpx.attach(optimizer, "split")
    for _ in range(4):
        p.grad = torch.randn(p.shape, generator=numbers).bfloat16()
        optimizer.step()
    bits.append((p.detach(), *optimizer.state[p].values()))
    native.can_read = lambda *tensors: False
print(is_there, all(map(torch.equal, *bits)), (torch.tensor([1e-42]) * 1).item() != 0)
"""


def _compile(path, text):
    source = path.with_suffix(".c")
    source.write_text(text + "".join(f"void {name}(void) {{}}\n" for name in native._SIGNATURES))
    subprocess.run(["cc", "-shared", "-fPIC", str(source), "-o", str(path)], check=True)
    source.unlink()
    path.chmod(0o755)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A cache to be, and kernels that are compiled in no time."""
    source = tmp_path / "native.c"
    source.write_text("".join(f"void {name}(void) {{}}\n" for name in native._SIGNATURES))
    monkeypatch.setattr(native, "_SOURCES", [source])
    monkeypatch.setenv("HMPX_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def planted(folder):
    """A cache with a library that leaves a mark when it is loaded, under the right name; and the mark."""
    native._build()
    (name,) = os.listdir(folder)
    (folder / name).unlink()
    mark, built = folder.parent / "mark", folder.parent / "planted.so"
    _compile(built, PLANTED % mark)
    name = name.rpartition("-")[0] + f"-{hashlib.sha256(built.read_bytes()).hexdigest()[:16]}.so"
    return built.rename(folder / name), mark


def test_a_planted_library_of_the_right_owner_and_mode_would_be_loaded(planted):
    """So the others below are refused for what they are refused for."""
    library, mark = planted
    assert native._build()._name == str(library) and mark.exists()


def _given_away(path):
    os.chown(path, SOMEBODY, SOMEBODY)


FOREIGN = {
    "library, group can write": lambda library: library.chmod(0o775),
    "library, world can write": lambda library: library.chmod(0o757),
    "folder, group can write": lambda library: library.parent.chmod(0o770),
    "folder, world can write": lambda library: library.parent.chmod(0o707),
    "folder, world can write, sticky": lambda library: library.parent.chmod(0o1777),
    "library of another": lambda library: _given_away(library),
    "folder of another": lambda library: _given_away(library.parent),
}


@pytest.mark.parametrize("how", [pytest.param(how, marks=needs_root if "another" in how else ()) for how in FOREIGN])
def test_what_somebody_else_may_have_written_is_not_loaded_and_that_is_said(how, planted, caplog):
    library, mark = planted
    FOREIGN[how](library)
    before = os.lstat(library).st_ino
    for _ in range(2):
        assert native._build()._name != str(library) and not mark.exists()  # the kernels run, from elsewhere
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2 and "each process compiles the C kernels for itself" in said[0]
    assert said[0].startswith(f"hmpx: {library.parent if how.startswith('folder') else library}: ")
    assert os.listdir(library.parent) == [library.name] and os.lstat(library).st_ino == before


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077])
def test_the_folder_and_what_is_in_it_are_their_owners_alone_whatever_the_umask(mask, folder):
    before = os.umask(mask)
    try:
        native._build()
    finally:
        os.umask(before)
    (library,) = folder.iterdir()
    assert [stat.S_IMODE(path.stat().st_mode) for path in (folder, library)] == [0o700, 0o700]


DAMAGED = {
    "empty": lambda content: b"",
    "cut off": lambda content: content[: len(content) // 2],
    "a page of zeros": lambda content: content[:4096] + bytes(4096) + content[8192:],
}


@pytest.mark.parametrize("how", DAMAGED)
def test_a_damaged_library_is_compiled_anew_and_kept(how, folder, caplog):
    """As a power failure may leave one: to load it could end the process."""
    caplog.set_level("INFO", "hmpx")
    native._build()
    (library,) = folder.iterdir()
    content = library.read_bytes()
    library.write_bytes(DAMAGED[how](content))
    assert native._build()._name != str(library)
    assert "is not as it was written; the C kernels are compiled anew" in caplog.text
    assert native._build()._name == str(library) and os.listdir(folder) == [library.name]
    assert library.read_bytes() == content


def test_a_library_is_on_the_disk_before_it_has_its_name(folder, monkeypatch):
    done = []
    for name in ("fsync", "replace"):
        told = functools.partial(lambda name, function, *args: (done.append(name), function(*args)), name)
        monkeypatch.setattr(native.os, name, functools.partial(told, getattr(os, name)))
    native._build()
    assert done == ["fsync", "replace"]


QUICK_FLAGS = [("-ffast-math", "before"), ("-D__FAST_MATH__", "after")]  # GCC keeps what our flags name, others do not
OTHER_FLAGS = [
    *itertools.product(("-Ofast", "-funsafe-math-optimizations"), ("before", "after")),
    ("-ffast-math", "after"),
]


@pytest.mark.parametrize(
    "flags, place", [*QUICK_FLAGS, *(pytest.param(*each, marks=pytest.mark.slow) for each in OTHER_FLAGS)]
)
def test_a_compiler_that_takes_fast_math_for_granted_gives_strict_kernels_or_none(flags, place, tmp_path):
    """Intel's icx does, and wrappers. GCC also links code that turns denormal numbers of the whole process into 0."""
    wrapper = tmp_path / "cc"
    flags = f'{flags} "$@"' if place == "before" else f'"$@" {flags}'
    wrapper.write_text(f"#!/bin/sh\nexec {shutil.which('gcc') or shutil.which('cc')} {flags}\n")
    wrapper.chmod(0o755)
    variables = {**os.environ, "HMPX_CACHE_DIR": str(tmp_path / "cache"), "CC": str(wrapper)}
    done = python.run("-c", STRICT, env=variables, check=True)
    assert done.stdout.split()[1:] == ["True", "True"], done.stderr
    if place == "before" or "FAST_MATH" in flags:
        assert done.stdout.split()[0] == str(place == "before"), done.stderr


@pytest.mark.parametrize("how", ["full", "no folder", "no home"])
def test_kernels_that_cannot_be_kept_are_compiled_each_time_and_that_is_said(how, folder, caplog, monkeypatch):
    caplog.set_level("INFO", "hmpx")
    if how == "full":

        def replace(*paths):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(native.os, "replace", replace)
    elif how == "no folder":
        folder.write_text("a file")
    else:
        monkeypatch.delenv("HMPX_CACHE_DIR")
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.setattr(native.Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    for number in (1, 2):
        assert native._build().move_list and len(caplog.records) == number
    assert {"full": "No space left", "no folder": "File exists", "no home": "no home"}[how] in caplog.text
    assert how == "no folder" or not folder.exists() or not os.listdir(folder)


def test_a_failing_compiler_is_said(folder, caplog, monkeypatch):
    monkeypatch.setattr(native, "_SOURCES", [folder.with_suffix(".c")])
    folder.with_suffix(".c").write_text("no C at all")
    assert native.library.__wrapped__() is None
    assert "no C kernels: " in caplog.text and "rounding runs in eager torch" in caplog.text
