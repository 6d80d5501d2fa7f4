"""The op lists are found in a wheel, in an editable install and in a plain checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CODE = """
import hmpx, torch, pathlib
with hmpx.convert() as handle:
    assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.bfloat16
    assert "softmax" in handle.policy.fp32
print(pathlib.Path(hmpx.__file__).parent)
"""

pytestmark = pytest.mark.slow


def python(interpreter, folder, **environment):
    """Run CODE away from the checkout; the name of the package's folder."""
    done = subprocess.run(
        [interpreter, "-c", CODE], cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip())


@pytest.fixture(scope="module")
def fresh(tmp_path_factory):
    """A new environment that borrows torch and the rest from this one, without hmpx."""
    folder = tmp_path_factory.mktemp("fresh")
    venv.create(folder / "env", with_pip=False)
    interpreter = folder / "env" / "bin" / "python"
    site = subprocess.run(
        [interpreter, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip
    # A .pth line would also run this environment's editable install of hmpx; a path alone does not.
    borrowed = [path for path in sys.path if path.endswith("site-packages")]
    return interpreter, Path(site), os.pathsep.join(borrowed)


def install(interpreter, what):
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", str(interpreter), "install", "-q", "--no-deps", str(what)],
        check=True, capture_output=True, text=True,
    )  # fmt: skip


def test_a_wheel_installed_elsewhere(fresh, tmp_path):
    interpreter, site, borrowed = fresh
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "hmpx/oplists/default/bf16.txt" in names and "hmpx/py.typed" in names
    assert {"hmpx/insight/page.html", "hmpx/insight/recording/page.js"} <= set(names)
    measuring = {"hmpx/bench/__init__.py", "hmpx/bench/measure.py", "hmpx/bench/memory.py"}
    assert {name for name in names if name.startswith("hmpx/bench/")} == measuring
    assert not [name for name in names if name.startswith(("tests", "oplists"))]
    install(interpreter, wheel)
    package = python(interpreter, tmp_path, PYTHONPATH=os.pathsep.join([str(site), borrowed]))
    assert package == site / "hmpx" and not (package / "oplists").is_symlink()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), borrowed])}
    for table, status, said in (
        ("memory", 0, "GiB on each rank"),
        ("rounding", 2, "bench rounding is no part of an installed hmpx"),
    ):
        done = subprocess.run(
            [interpreter, "-m", "hmpx", "bench", table], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == status and said in done.stdout + done.stderr


def test_a_source_distribution_builds_the_same_wheel(tmp_path):
    for kind, source in (("--sdist", ROOT), ("--wheel", None)):
        source = source or next(tmp_path.glob("hmpx-*/"))
        subprocess.run(
            [sys.executable, "-m", "build", kind, "--no-isolation", "--outdir", str(tmp_path), str(source)],
            check=True, capture_output=True, text=True,
        )  # fmt: skip
        if kind == "--sdist":
            (archive,) = tmp_path.glob("*.tar.gz")
            subprocess.run(["tar", "xzf", str(archive), "-C", str(tmp_path)], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert "hmpx/oplists/default/bf16.txt" in zipfile.ZipFile(wheel).namelist()


def test_an_editable_install(tmp_path):
    assert python(sys.executable, tmp_path) == ROOT / "hmpx"


def test_a_plain_checkout(tmp_path):
    assert python(sys.executable, ROOT, PYTHONPATH="") == ROOT / "hmpx"
    subprocess.run(["cp", "-a", str(ROOT / "hmpx"), str(ROOT / "oplists"), str(tmp_path)], check=True)
    assert python(sys.executable, tmp_path, PYTHONPATH=str(tmp_path)) == tmp_path / "hmpx"
