"""The op lists are found in a wheel, in an editable install and in a checkout, and a wheel is pure."""

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


def ran(*command, **how):
    """What a command prints that succeeds."""
    return subprocess.run([*map(str, command)], check=True, capture_output=True, text=True, **how).stdout


def folder_of_hmpx(interpreter, folder, **environment):
    """Run CODE away from the checkout; where hmpx was found."""
    return Path(ran(interpreter, "-c", CODE, cwd=folder, env={**os.environ, **environment}).strip())


def built(kind, source, folder, **environment):
    how = {"env": {**os.environ, **environment}}
    ran(sys.executable, "-m", "build", kind, "--no-isolation", "--outdir", folder, source, **how)
    (archive,) = folder.glob("*.whl" if kind == "--wheel" else "*.tar.gz")
    return archive


def test_a_wheel_installed_elsewhere(tmp_path):
    """In a new environment that borrows torch and the rest from this one."""
    wheel = built("--wheel", ROOT, tmp_path)
    names = zipfile.ZipFile(wheel).namelist()
    assert wheel.name.endswith("-py3-none-any.whl")
    assert "hmpx/oplists/default/bf16.txt" in names and "hmpx/py.typed" in names
    assert "hmpx/insight/page.html" in names
    assert not [name for name in names if name.startswith(("tests", "oplists", "examples"))]
    venv.create(tmp_path / "env", with_pip=False)
    interpreter = tmp_path / "env" / "bin" / "python"
    site = ran(interpreter, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    ran(sys.executable, "-m", "pip", "--python", interpreter, "install", "-q", "--no-deps", wheel)
    # A .pth line would also run this environment's editable install of hmpx; a path alone does not.
    paths = os.pathsep.join([site, *(path for path in sys.path if path.endswith("site-packages"))])
    package = folder_of_hmpx(interpreter, tmp_path, PYTHONPATH=paths)
    assert package == Path(site) / "hmpx" and not (package / "oplists").is_symlink()
    command, environment = (
        [interpreter, "-m", "hmpx", "explain", "--params", "7e9"],
        {**os.environ, "PYTHONPATH": paths},
    )
    assert "GiB on each rank" in ran(*command, cwd=tmp_path, env=environment)


def test_a_source_distribution_builds_the_same_wheel(tmp_path):
    ran("tar", "xzf", built("--sdist", ROOT, tmp_path), "-C", tmp_path)
    wheel = built("--wheel", next(tmp_path.glob("hmpx-*/")), tmp_path)
    assert "hmpx/oplists/default/bf16.txt" in zipfile.ZipFile(wheel).namelist()


def test_an_editable_install_and_a_plain_checkout(tmp_path):
    assert folder_of_hmpx(sys.executable, tmp_path) == ROOT / "hmpx"
    assert folder_of_hmpx(sys.executable, ROOT, PYTHONPATH="") == ROOT / "hmpx"
    ran("cp", "-a", ROOT / "hmpx", ROOT / "oplists", tmp_path)
    assert folder_of_hmpx(sys.executable, tmp_path, PYTHONPATH=str(tmp_path)) == tmp_path / "hmpx"
