"""The op lists are found in a wheel, in an editable install and in a checkout; a wheel may carry the C kernels."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from hmpx.rounding import native_library

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
    assert "hmpx/oplists/default/bf16.txt" in names and "hmpx/py.typed" in names
    assert "hmpx/insight/page.html" in names
    measuring = {"hmpx/bench/__init__.py", "hmpx/bench/measure.py", "hmpx/bench/memory.py"}
    assert {name for name in names if name.startswith("hmpx/bench/")} == measuring
    assert not [name for name in names if name.startswith(("tests", "oplists"))]
    venv.create(tmp_path / "env", with_pip=False)
    interpreter = tmp_path / "env" / "bin" / "python"
    site = ran(interpreter, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    ran(sys.executable, "-m", "pip", "--python", interpreter, "install", "-q", "--no-deps", wheel)
    # A .pth line would also run this environment's editable install of hmpx; a path alone does not.
    paths = os.pathsep.join([site, *(path for path in sys.path if path.endswith("site-packages"))])
    package = folder_of_hmpx(interpreter, tmp_path, PYTHONPATH=paths)
    assert package == Path(site) / "hmpx" and not (package / "oplists").is_symlink()
    for table, status, said in (
        ("memory", 0, "GiB on each rank"),
        ("rounding", 2, "bench rounding is no part of an installed hmpx"),
    ):
        command, environment = [interpreter, "-m", "hmpx", "bench", table], {**os.environ, "PYTHONPATH": paths}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == status and said in done.stdout + done.stderr


def test_a_source_distribution_builds_the_same_wheel(tmp_path):
    ran("tar", "xzf", built("--sdist", ROOT, tmp_path), "-C", tmp_path)
    wheel = built("--wheel", next(tmp_path.glob("hmpx-*/")), tmp_path)
    assert "hmpx/oplists/default/bf16.txt" in zipfile.ZipFile(wheel).namelist()


def test_an_editable_install_and_a_plain_checkout(tmp_path):
    assert folder_of_hmpx(sys.executable, tmp_path) == ROOT / "hmpx"
    assert folder_of_hmpx(sys.executable, ROOT, PYTHONPATH="") == ROOT / "hmpx"
    ran("cp", "-a", ROOT / "hmpx", ROOT / "oplists", tmp_path)
    assert folder_of_hmpx(sys.executable, tmp_path, PYTHONPATH=str(tmp_path)) == tmp_path / "hmpx"


BITS = """
import hashlib, os, torch, hmpx
from hmpx.rounding import native_library
torch.manual_seed(0)
weight = torch.nn.Parameter(torch.randn(999, 101).bfloat16())
optimizer = torch.optim.AdamW([weight], lr=0.01)
hmpx.attach(optimizer, state_dtype="8bit")
for _ in range(3):
    weight.grad = torch.randn(999, 101).bfloat16()
    optimizer.step()
found = native_library.library()
print(hashlib.sha256(bytes(weight.detach().view(torch.uint8).flatten().tolist())).hexdigest())
print(found and os.path.basename(found._name).rsplit("-native-")[0], found and found._name)
"""
LEVELS = native_library._LEVELS.get(sysconfig.get_platform(), {})


@pytest.mark.skipif(native_library.library() is None or not LEVELS, reason="no C compiler here, or no levels")
def test_a_wheel_built_with_a_compiler_carries_kernels_that_need_neither_compiler_nor_cache(tmp_path):
    """For each level that this CPU runs, the bits are those of eager torch. A changed source makes them be left out."""
    wheel = built("--wheel", ROOT, tmp_path)
    platform = sysconfig.get_platform().replace("-", "_")
    assert wheel.name.endswith(f"-py3-none-{platform}.whl") and len(zipfile.ZipFile(wheel).namelist()) > 100
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    paths = os.pathsep.join([str(tmp_path / "site"), *(path for path in sys.path if path.endswith("site-packages"))])
    bare = {**os.environ, "PYTHONPATH": paths, "PATH": "/nowhere", "CC": "", "HMPX_CACHE_DIR": str(tmp_path / "cache")}

    def run(**environment):
        return ran(sys.executable, "-c", BITS, cwd=tmp_path, env={**bare, **environment}).splitlines()

    expected, none = run(HMPX_NATIVE="0")
    assert none == "None None"
    has = {*native_library._cpu().split()}
    runs = [level for level, (_, needs) in LEVELS.items() if has.issuperset(needs.split())]
    for asked, level in [(None, runs[0]), *((level, level) for level in runs)] if runs else ():
        bits, found = run(**({"HMPX_NATIVE_ARCH": asked} if asked else {}))
        assert bits == expected and found.startswith(f"{level} {tmp_path}/site/hmpx/rounding/")
    assert run(HMPX_NATIVE_ARCH="another") == [expected, "None None"]
    assert not (tmp_path / "cache").exists()
    with open(tmp_path / "site/hmpx/rounding/native.h", "a") as source:
        source.write("/* changed */")
    assert run() == [expected, "None None"]


def test_a_wheel_built_without_a_compiler_is_pure(tmp_path):
    wheel = built("--wheel", ROOT, tmp_path, PATH="/nowhere", CC="")
    assert wheel.name.endswith("-py3-none-any.whl")
    assert not [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith((".so", "wheel_hook.py"))]
