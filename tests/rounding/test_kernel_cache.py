"""The folder that compiled kernels are kept in lets nobody in: libraries that somebody planted are not loaded."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess

import pytest

from hmpx.rounding import native_library

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
    assert len(said) == 1 and "compiled into a private temporary folder instead" in said[0]
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
    def interrupted(library, out):
        out.write(library.read(3))
        raise KeyboardInterrupt

    monkeypatch.setattr(native_library.shutil, "copyfileobj", interrupted)
    with pytest.raises(KeyboardInterrupt):
        native_library._build()
    assert list(folder.iterdir()) == []
