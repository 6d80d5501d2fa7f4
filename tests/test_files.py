"""A file that hmpx writes is there as a whole, or as it was."""

import contextlib
import os
import resource
import signal

import pytest
import torch

import hmpx
from hmpx.base.files import WriteError, write
from hmpx.shell.options import save


@contextlib.contextmanager
def full_disk():
    """No file can grow beyond 100 bytes, as on a full disk."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_leaves_the_file_and_nothing_beside_it(tmp_path):
    path = tmp_path / "log.json"
    write(path, "good")
    path.chmod(0o640)
    with (
        full_disk(),
        pytest.raises(WriteError, match=rf"{path}: could not be written, and is as it was: File too large"),
    ):
        write(path, "x" * 1000)
    assert path.read_text() == "good" and os.listdir(tmp_path) == ["log.json"]
    write(path, "better")
    assert path.read_text() == "better" and path.stat().st_mode & 0o777 == 0o640


def test_a_link_stays_a_link_and_a_device_is_written_to(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "file")
    write(tmp_path / "link", "text")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "file").read_text() == "text"
    write("/dev/null", "text")


def test_a_command_that_has_run_a_script_says_what_it_could_not_write(tmp_path):
    class Found:
        def json(self, path):
            write(path, "x" * 1000)

        def html(self, path):
            write(path, "x")

    outputs = {"json": tmp_path / "log.json", "html": tmp_path / "log.html"}
    with full_disk():
        lines, are_all = save(Found(), outputs)
    assert not are_all and "log.json: could not be written" in lines[0]
    assert lines[1] == f"hmpx: wrote {outputs['html']}" and os.listdir(tmp_path) == ["log.html"]


def test_a_recipe_of_tune_is_written_so(tmp_path):
    model, batches = torch.nn.Linear(4, 4), [(torch.randn(2, 4), torch.randn(2, 4)) for _ in range(4)]
    tuned = hmpx.tune(model, batches, lambda model, x, y: (model(x) - y).square().mean(), progress=False)
    tuned.save(tmp_path / "recipe.yaml")
    good = (tmp_path / "recipe.yaml").read_text()
    with full_disk(), pytest.raises(OSError, match=r"recipe\.yaml"):
        tuned.save(tmp_path / "recipe.yaml")
    assert (tmp_path / "recipe.yaml").read_text() == good
