"""`record` and `report` from the shell: scripts that know nothing of hmpx, and some that do."""

import json
import os
import re
import signal
import sys

import pytest
import torch

import hmpx
from hmpx.shell.main import main
from tests.support import python

SCRIPT = """
import os, sys, torch
print("called", sys.argv[1:])
linear = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(linear.parameters(), lr=0.1)
for _ in range(3):
    linear(torch.ones(2, 4)).float().sum().backward()
    optimizer.step()
"""
RECIPE = "--recipe", "autocast-cpu"
STARTS = """
import multiprocessing, subprocess
worker = multiprocessing.get_context("fork").Process(target=int)
worker.start(), worker.join()
for command in ([sys.executable, "-S", "-c", ""], ["true"]):
    subprocess.run(command, close_fds=False)  # by posix_spawn, as Python 3.14 starts others, too
"""


@pytest.fixture
def script(tmp_path):
    def write(more="", before=""):
        (tmp_path / "train.py").write_text(before + SCRIPT + more)
        return "train.py"

    return write


def record(tmp_path, *arguments, **more):
    return python.run("-m", "hmpx", "record", *arguments, cwd=tmp_path, **more)


def test_a_script_runs_as_ever_and_a_table_follows_on_standard_error(script, tmp_path):
    done = record(tmp_path, *RECIPE, "--json", "log.json", "--html", "log.html", script(STARTS), "--steps", "2")
    assert done.returncode == 0 and done.stdout == "called ['--steps', '2']\n", done.stderr
    kernels = "(, FP32 kernels for BF16 and FP16 on CPU)?"  # said on a CPU without BF16 instructions
    assert re.match(f"hmpx: recipe autocast-cpu{kernels}; runs train.py\n", done.stderr)
    assert "9 calls of 3 ops at 3 sites in 3 steps" in done.stderr and "train.py:7" in done.stderr
    command = os.path.basename(sys.executable)
    assert f"the script started processes, which are not in this record: int (1), {command} (1)\n" in done.stderr
    log = hmpx.Log.load(tmp_path / "log.json")
    linear = next(site for site in log.sites if site.op == "linear")
    assert (linear.where, linear.calls, linear.casts) == ("train.py:7", 3, 9) and log.steps == 3
    assert (log.about["script"], log.about["recipe"]) == ("train.py --steps 2", "autocast-cpu")
    assert "<title>hmpx record: train.py --steps 2, autocast-cpu</title>" in (tmp_path / "log.html").read_text()
    assert "train.py:7" in (tmp_path / "log.html").read_text()


@pytest.mark.parametrize(
    "end, status", [("raise KeyError('no')", 1), ("sys.exit(5)", 5), ("raise KeyboardInterrupt", 130)]
)
def test_the_table_comes_however_the_script_ends(script, tmp_path, end, status):
    done = record(tmp_path, *RECIPE, "--json", "log.json", script(end))
    assert done.returncode in (status, -signal.SIGINT, 1) and done.returncode != 0
    assert "9 calls of 3 ops" in done.stderr and hmpx.Log.load(tmp_path / "log.json").steps == 3
    assert "started processes" not in done.stderr
    assert (status == 5) == (done.returncode == 5)


@pytest.fixture
def recorded(tmp_path, monkeypatch, capsys, script):
    """Run `record` on the script in this process, and return what it prints to standard error."""
    monkeypatch.chdir(tmp_path)
    for name in ("path", "argv"):
        monkeypatch.setattr(sys, name, [*getattr(sys, name)])
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    monkeypatch.setenv("HMPX_RUN", "")
    monkeypatch.delenv("HMPX_RUN")

    def run(*arguments, **more):
        assert main(["record", *arguments, script(**more)]) == 0
        hmpx.restore()
        return capsys.readouterr().err

    return run


def test_a_script_that_converts_itself(recorded):
    said = recorded(before="import hmpx\nhmpx.convert()\n")
    assert "9 calls of 3 ops" in said and "runs train.py" not in said


def test_lists_without_a_recipe(recorded, tmp_path):
    (tmp_path / "mine.txt").write_text("linear\nbmm\n")
    assert "Names in your lists that no call matched\n  mine.txt:2: bmm" in recorded("--list", "mine.txt")


def test_it_says_when_nothing_was_converted(recorded):
    said = recorded()
    assert "Nothing was converted while this recorded" in said and "record --recipe NAME script.py" in said


def test_each_rank_writes_a_file_of_its_own_and_the_first_one_prints(recorded, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    said = []
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        said.append(recorded(*RECIPE, "--json", "log.json"))
    for name in ("WORLD_SIZE", "RANK"):
        monkeypatch.setenv(name, "")  # as a container may have it
    assert "9 calls" in recorded(*RECIPE)
    assert sorted(path.name for path in tmp_path.glob("*.json")) == ["log.0.json", "log.1.json"]
    assert "9 calls" in said[0] and not said[1]


def saved(path, **lists):
    with hmpx.convert(**lists), hmpx.record() as log:
        torch.softmax(torch.ones(2, 2) @ torch.ones(2, 2), -1)
    log.json(path)
    return log


def test_a_report_says_what_the_log_said(capsys, tmp_path):
    log = saved(tmp_path / "log.json")
    assert main(["report", str(tmp_path / "log.json"), "--html", str(tmp_path / "log.html")]) == 0
    assert capsys.readouterr().out == f"{log}\n"
    log.html(tmp_path / "own.html")
    assert (tmp_path / "log.html").read_text() == (tmp_path / "own.html").read_text()


def test_a_diff_of_two_records(capsys, tmp_path, lists):
    saved(tmp_path / "log.json")
    saved(tmp_path / "other.json", **lists(bf16="matmul softmax"))
    one, other = str(tmp_path / "log.json"), str(tmp_path / "other.json")
    assert main(["report", one, "--diff", one]) == 0
    assert "2 sites with the same rule and dtypes" in capsys.readouterr().out
    assert main(["report", one, "--diff", other]) == 1
    said = capsys.readouterr().out
    assert "other rules or dtypes: 1 site\n" in said and "fp32: bf16 -> fp32" in said and "bf16: bf16" in said
    assert json.loads((tmp_path / "other.json").read_text())["schema"] == 1


def test_a_recipe_that_converts_nothing_is_named_and_not_asked_for(script, tmp_path):
    """As those are that `doctor --fix` writes."""
    (tmp_path / "mine.yaml").write_text("opt_level: null\nparameter_dtype: float32\n")
    done = record(tmp_path, "--recipe", "mine.yaml", script())
    assert done.returncode == 0 and "record --recipe" not in done.stderr
    assert "The recipe mine.yaml leaves torch's ops as they are (opt_level null)" in done.stderr
    assert "`doctor --recipe mine.yaml`" in done.stderr
    done = record(tmp_path, "--recipe", "mine.yaml", "--opt-level", "O1", script())
    assert "calls of 3 ops at 3 sites" in done.stderr
