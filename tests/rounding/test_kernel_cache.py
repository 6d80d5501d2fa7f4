"""The folder that compiled kernels are kept in: what is damaged or planted there is not loaded."""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import subprocess
import sys

import pytest

from hmpx.rounding import native_library
from tests.support import python

pytestmark = pytest.mark.skipif(native_library.library() is None, reason="no C compiler here")
needs_root = pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can give files away")
SOMEBODY = 65534
PLANTED = """
#include <stdio.h>
__attribute__((constructor)) static void leave_a_mark(void) { fclose(fopen("%s", "w")); }
"""


def _compile(path, text):
    source = path.with_suffix(".c")
    source.write_text(text + "".join(f"void {name}(void) {{}}\n" for name in native_library._SIGNATURES))
    subprocess.run(["cc", "-shared", "-fPIC", str(source), "-o", str(path)], check=True)
    source.unlink()
    built = path.read_bytes()
    path.write_bytes(built + hashlib.sha256(built).digest())
    path.chmod(0o755)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A cache to be, and kernels that are compiled in no time."""
    source = tmp_path / "native.c"
    source.write_text("".join(f"void {name}(void) {{}}\n" for name in native_library._SIGNATURES))
    monkeypatch.setattr(native_library, "_SOURCES", [source])
    native_library._warn_once.cache_clear()
    monkeypatch.setenv("HMPX_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def planted(folder):
    """A cache with a library that leaves a mark when it is loaded, under the right name; and the mark."""
    native_library._build()
    (name,) = os.listdir(folder)
    (folder / name).unlink()
    mark = folder.parent / "mark"
    _compile(folder / name, PLANTED % mark)
    return folder / name, mark


def test_a_planted_library_of_the_right_owner_and_mode_would_be_loaded(planted):
    """So the others below are refused for what they are refused for."""
    library, mark = planted
    assert native_library._build()._name == str(library) and mark.exists()


def _given_away(path):
    os.chown(path, SOMEBODY, SOMEBODY)


def _link_from_elsewhere(library):
    shutil.move(library, library.parents[1] / "elsewhere.so")
    library.symlink_to(library.parents[1] / "elsewhere.so")


FOREIGN = {
    "library, group can write": lambda library: library.chmod(0o775),
    "library, world can write": lambda library: library.chmod(0o757),
    "folder, group can write": lambda library: library.parent.chmod(0o770),
    "folder, world can write": lambda library: library.parent.chmod(0o707),
    "folder, world can write, sticky": lambda library: library.parent.chmod(0o1777),
    "a link": _link_from_elsewhere,
    "library of another": lambda library: _given_away(library),
    "folder of another": lambda library: _given_away(library.parent),
}


@pytest.mark.parametrize("how", [pytest.param(how, marks=needs_root if "another" in how else ()) for how in FOREIGN])
def test_what_somebody_else_may_have_written_is_not_loaded_and_that_is_said_once(how, planted, caplog):
    library, mark = planted
    FOREIGN[how](library)
    before = os.lstat(library).st_ino
    for _ in range(2):
        assert native_library._build()._name != str(library) and not mark.exists()  # the kernels run, from elsewhere
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1 and "each process compiles the C kernels for itself" in said[0]
    assert said[0].startswith(f"hmpx: {library.parent if how.startswith('folder') else library}: ")
    assert os.listdir(library.parent) == [library.name] and os.lstat(library).st_ino == before


@needs_root
def test_a_link_to_a_folder_counts_as_what_it_leads_to(planted, tmp_path, monkeypatch, caplog):
    library, mark = planted
    (tmp_path / "link").symlink_to(library.parent)
    monkeypatch.setenv("HMPX_CACHE_DIR", str(tmp_path / "link"))
    _given_away(library.parent)
    native_library._build()
    assert "belongs to another user" in caplog.text and not mark.exists()
    os.chown(library.parent, 0, 0)
    native_library._build()
    assert mark.exists()


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077])
def test_the_folder_and_what_is_in_it_are_their_owners_alone_whatever_the_umask(mask, folder):
    before = os.umask(mask)
    try:
        native_library._build()
    finally:
        os.umask(before)
    (library,) = folder.iterdir()
    assert [stat.S_IMODE(path.stat().st_mode) for path in (folder, library)] == [0o700, 0o700]


def test_what_is_no_file_does_not_make_anybody_wait(planted, caplog):
    library, _ = planted
    library.unlink()
    os.mkfifo(library)
    library.chmod(0o666)
    assert native_library._build()._name != str(library) and "others can write to the library" in caplog.text


def test_an_interrupt_while_a_library_is_kept_is_one_and_leaves_no_part_of_it(folder, monkeypatch):
    def interrupted(fd):
        raise KeyboardInterrupt

    monkeypatch.setattr(native_library.os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        native_library._build()
    assert list(folder.iterdir()) == []


ROUND = "import torch, hmpx; hmpx.stochastic_round(torch.randn(9), seed=0, step=0, name='x')"


def _bytes(change):
    def write(library):
        whole = library.read_bytes()
        library.write_bytes(change(whole))

    return write


def _folder_in_its_place(library):
    library.unlink()
    library.mkdir()


DAMAGED = {
    "truncated": _bytes(lambda whole: whole[: len(whole) // 2]),
    "one byte less": _bytes(lambda whole: whole[:-1]),
    "one byte more": _bytes(lambda whole: whole + b"\0"),
    "zeros at the end": _bytes(lambda whole: whole[: len(whole) // 2] + bytes(len(whole) - len(whole) // 2)),
    "zeros": _bytes(lambda whole: bytes(len(whole))),
    "one bit": _bytes(lambda whole: whole[:5000] + bytes([whole[5000] ^ 1]) + whole[5001:]),
    "empty": _bytes(lambda whole: b""),
}


@pytest.mark.parametrize("how", DAMAGED)
def test_a_damaged_library_is_compiled_anew(how, folder, caplog):
    caplog.set_level("INFO", "hmpx")
    native_library._build()
    (library,) = folder.iterdir()
    whole = library.read_bytes()
    DAMAGED[how](library)
    native_library._build()
    assert library.read_bytes() == whole and os.listdir(folder) == [library.name]
    assert [record.getMessage() for record in caplog.records] == [
        f"hmpx: {library} is damaged; the C kernels are compiled anew"
    ]
    assert native_library._build()._name == str(library) and len(caplog.records) == 1


def test_a_program_lives_through_a_library_that_loses_its_end(tmp_path):
    """Before it is loaded, and while it is in use: a process that ran the file itself would end with SIGBUS."""
    environment = {**os.environ, "HMPX_CACHE_DIR": str(tmp_path / "cache")}
    (tmp_path / "cache").mkdir(mode=0o700)
    library = tmp_path / "cache" / os.path.basename(native_library.library()._name)  # under the name that is asked for
    library.write_bytes(bytes(100_000))
    library.chmod(0o700)
    os.truncate(library, library.stat().st_size // 2)
    python.run("-c", ROUND, env=environment, check=True)
    again = ROUND.split("; ")[1]
    python.run("-c", f"import os; {ROUND}; os.truncate({str(library)!r}, 1); {again}", env=environment, check=True)


def test_a_folder_in_the_place_of_a_library_is_left_there(folder, caplog):
    native_library._build()
    (library,) = folder.iterdir()
    _folder_in_its_place(library)
    assert native_library._build().round_list and library.is_dir()
    assert f"{library}: Is a directory; each process compiles" in caplog.text


@pytest.mark.parametrize("how", ["full", "no folder", "no home"])
def test_kernels_that_cannot_be_kept_are_compiled_each_time_and_that_is_said(how, folder, caplog, monkeypatch):
    caplog.set_level("INFO", "hmpx")
    if how == "full":

        def fsync(fd):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(native_library.os, "fsync", fsync)
    elif how == "no folder":
        folder.write_text("a file")
    else:
        monkeypatch.delenv("HMPX_CACHE_DIR")
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.setattr(native_library.Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    for number in (1, 2):
        assert native_library._build().round_list and len(caplog.records) == number
    assert {"full": "No space left", "no folder": "File exists", "no home": "no home"}[how] in caplog.text
    assert how == "no folder" or not folder.exists() or not os.listdir(folder)


def test_a_failing_compiler_is_said(folder, caplog, monkeypatch):
    monkeypatch.setattr(native_library, "_SOURCES", [folder.with_suffix(".c")])
    folder.with_suffix(".c").write_text("no C at all")
    assert native_library.library.__wrapped__() is None
    assert "no C kernels: " in caplog.text and "rounding runs in eager torch" in caplog.text


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="no files in memory here")
def test_without_files_in_memory_a_private_file_is_loaded(folder, monkeypatch):
    monkeypatch.delattr(native_library.os, "memfd_create")
    for _ in range(2):  # built, and from the cache
        assert native_library._build().round_list


@needs_root
@pytest.mark.skipif(sys.platform != "linux", reason="mounts a file system as Linux does")
def test_a_file_system_that_executes_nothing_keeps_kernels_too(folder, caplog):
    caplog.set_level("INFO", "hmpx")
    folder.mkdir(mode=0o700)
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "noexec,mode=700", "none", folder]).returncode:
        pytest.skip("this process may not mount")
    try:
        for _ in range(3):
            assert native_library._build().round_list and len(os.listdir(folder)) == 1
        assert not caplog.records
    finally:
        subprocess.run(["umount", folder], check=True)
