"""`doctor` from the shell: the script runs as ever, and what is wrong is told beneath it."""

import json
import re

import pytest

from hmpx.recipes.reading import read_recipe
from tests.support import python

SCRIPT = """
import sys, torch, torch.nn.functional as F
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 10)).to(DTYPE)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), fused=True)
for i in range(60):
    x = torch.randn(32, 64)
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x.to(DTYPE)).float(), x[:, :10].argmax(-1))
    loss.backward()
    optimizer.step()
print("trained", sys.argv[1:], loss.item(), [p.double().sum().item() for p in model.parameters()])
"""


@pytest.fixture
def script(tmp_path):
    def write(dtype="torch.bfloat16", source=SCRIPT):
        (tmp_path / "train.py").write_text(source.replace("DTYPE", dtype))
        return "train.py"

    return write


def doctor(tmp_path, *arguments, **more):
    return python.run("-m", "hmpx", "doctor", *arguments, cwd=tmp_path, **more)


def test_lost_updates_are_told_and_the_recipe_that_is_written_mends_them(script, tmp_path):
    files = ("--fix", "recipe.yaml", "--json", "found.json", "--html", "found.html")
    done = doctor(tmp_path, *files, script())
    assert done.returncode == 1 and done.stdout == "", done.stderr  # it ends after 50 steps
    assert "WRONG  lost updates: train.py:11: bfloat16 weights move " in done.stderr
    assert "50 steps of AdamW; beside " in done.stderr
    row = re.search(r"\nrest  .* +bf16    bf16      bf16      2x bf16  none     0\.\d\d\n", done.stderr)
    assert row, done.stderr
    assert "or --fix recipe.yaml" in " ".join(done.stderr.split()), done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["wrong"] and [each["kind"] for each in found["findings"]] == ["lost updates"]
    assert set(found["findings"][0]["names"]) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert "lost updates" in (tmp_path / "found.html").read_text()
    recipe = read_recipe(tmp_path / "recipe.yaml")
    assert (recipe.opt_level, recipe.weights, recipe.parameter_dtype) == (None, "stochastic", None)
    done = doctor(tmp_path, "--recipe", "recipe.yaml", "train.py")
    assert done.returncode == 0 and "nothing wrong was found" in done.stderr, done.stderr


def test_a_run_is_compared_with_an_earlier_one(script, tmp_path):
    assert doctor(tmp_path, "--steps", 3, "--json", "held.json", script("torch.float32")).returncode == 0
    done = doctor(tmp_path, "--steps", 3, "--expect", "held.json", "train.py")
    assert done.returncode == 0 and "expected" not in done.stderr, done.stderr
    done = doctor(tmp_path, "--steps", 3, "--expect", "held.json", script("torch.bfloat16"))
    assert done.returncode == 1 and "WRONG  expected: stored bf16 now, fp32 before" in done.stderr, done.stderr
    done = doctor(tmp_path, "--expect", "gone.json", "train.py")
    assert done.returncode == 2 and "--expect takes what doctor --json" in done.stderr, done.stderr
    assert "trained" not in done.stdout  # it is read before the script runs


PLACES = """
import torch
from torch import nn
class Positions(nn.Module):
    def forward(self, x):
        where = torch.arange(
            512, dtype=x.dtype
        )
        return x + (where[-32:] * 1e-3).to(x.dtype)
class Hidden(nn.Module):
    def forward(self, x):
        hidden = (1 - (torch.arange(32) < 20).to(x.dtype)) * torch.finfo(torch.float32).min
        return x + hidden.exp()
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.positions, self.hidden, self.last = nn.Linear(16, 32), Positions(), Hidden(), nn.Linear(32, 4)
    def forward(self, x):
        own = torch.arange(300, dtype=torch.bfloat16)
        return self.last(self.hidden(self.positions(self.first(x)))) + own[:4]
torch.manual_seed(0)
model = nn.ModuleDict({'block': Block()}).bfloat16()
with torch.no_grad():
    for p in model.parameters():
        p.mul_(1e-3)  # or else its own updates would be lost
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for i in range(4):
    optimizer.zero_grad()
    model['block'](torch.randn(8, 16).bfloat16()).float().square().mean().backward()
    optimizer.step()
"""


def test_positions_and_masks_are_mended_by_rules_for_their_modules_and_the_script_s_own_numbers_are_named(
    script, tmp_path
):
    done = doctor(tmp_path, "--fix", "recipe.yaml", script(source=PLACES))
    assert done.returncode == 1 and "WRONG  mask: train.py:12:" in done.stderr, done.stderr
    recipe = read_recipe(tmp_path / "recipe.yaml")
    assert dict(recipe.modules) == {"block.hidden": {"fp32": ["mul"]}, "block.positions": "float32"}
    edited = (tmp_path / "recipe.yaml").read_text().partition("to be edited in the script:")[2]
    assert "# integers: train.py:19: keep positions" in edited and "train.py:6" not in edited and "mask" not in edited
    done = doctor(tmp_path, "--recipe", "recipe.yaml", "train.py")
    assert "WRONG  integers: train.py:19:" in done.stderr and "1 thing wrong" in done.stderr, done.stderr


ANGLES = """
import torch
class Angles(torch.nn.Module):
    def forward(self, x):
        return x + (torch.arange(600).float()[:, None] @ torch.linspace(0.1, 1, 32)[None])[-1].sin()
model = torch.nn.Sequential(torch.nn.Linear(16, 32), Angles())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for i in range(4):
    with torch.autocast("cpu", enabled=AUTOCAST):
        loss = model(torch.randn(8, 16)).float().square().mean()
    loss.backward()
    optimizer.step()
"""


def test_positions_that_a_list_casts_are_mended_and_those_that_autocast_casts_are_not(script, tmp_path):
    script(source=ANGLES.replace("AUTOCAST", "False"))
    (tmp_path / "lists.yaml").write_text("bf16: [matmul]\nfp32: []\npromote: []\nparameter_dtype: float32\n")
    done = doctor(tmp_path, "--recipe", "lists.yaml", "--fix", "recipe.yaml", "train.py")
    assert "WRONG  integers: train.py:5: positions or indices in low precision (to, " in done.stderr, done.stderr
    assert dict(read_recipe(tmp_path / "recipe.yaml").modules) == {"1": {"fp32": ["matmul"]}}
    done = doctor(tmp_path, "--recipe", "recipe.yaml", "train.py")
    assert done.returncode == 0, done.stderr
    done = doctor(tmp_path, "--fix", "none.yaml", script(source=ANGLES.replace("AUTOCAST", "True")))
    assert "WRONG  integers: train.py:5:" in done.stderr and "so no recipe was written" in done.stderr, done.stderr


def test_a_script_prints_and_computes_what_it_does_without(script, tmp_path):
    plain = python.run(script(), "a", "--b", cwd=tmp_path, check=True)
    done = doctor(tmp_path, "--steps", "0", "train.py", "a", "--b")
    assert done.returncode == 1 and done.stdout == plain.stdout != ""


def test_what_is_found_under_a_recipe_extends_it_and_holds_only_what_is_new(script, tmp_path):
    own = tmp_path / "own #1: first"  # which YAML reads as a comment and a mapping, if nobody quotes it
    own.mkdir()
    (own / "plain.yaml").write_text("bf16: [linear, softmax]\nfp32: [cross_entropy]\npromote: []\nweights: nearest\n")
    source = SCRIPT.replace("F.cross_entropy(", "-(model[2].bias.softmax(-1)).log()[0] * 1e-9 + F.cross_entropy(")
    words = "--recipe", "own #1: first/plain.yaml", "--set", "seed=3", "--fix", "recipe.yaml"
    done = doctor(tmp_path, *words, script(source=source))
    assert done.returncode == 1 and "not checked: " not in done.stderr, done.stderr  # at steps in FP32, rounded after
    lines = [line for line in (tmp_path / "recipe.yaml").read_text().splitlines() if line and line[0] != "#"]
    assert lines[:2] == ['extends: "own #1: first/plain.yaml"', "seed: 3"], lines
    assert lines[2:] == ["fp32: [..., log, softmax]", "weights: stochastic"]
    policy = read_recipe(tmp_path / "recipe.yaml").policy()
    assert (policy.bf16, policy.fp32) == (("linear",), ("cross_entropy", "log", "softmax"))
    done = doctor(tmp_path, "--recipe", "recipe.yaml", "train.py")
    assert done.returncode == 0, done.stderr


def test_a_healthy_script_is_told_so_with_the_status_0(script, tmp_path):
    done = doctor(tmp_path, "--fix", "recipe.yaml", script("torch.float32"))
    assert done.returncode == 0 and "nothing wrong was found" in done.stderr
    assert "nothing to fix" in done.stderr and not (tmp_path / "recipe.yaml").exists()


def test_what_was_found_is_told_beneath_all_else_when_the_script_breaks(script, tmp_path):
    at_exit = "import atexit\natexit.register(print, 'at exit', file=sys.stderr)\nfor i in"
    broken = SCRIPT.replace("optimizer.step()", "optimizer.step(); 1 / (5 - i)").replace("for i in", at_exit)
    done = doctor(tmp_path, script(source=broken))
    places = [done.stderr.index(each) for each in ("ZeroDivisionError", "at exit", "lost updates")]
    assert done.returncode == 1 and places == sorted(places) and done.stderr.count("at exit") == 1


def test_a_module_and_the_status_of_its_own(script, tmp_path):
    script("torch.float32", SCRIPT.replace("for i in range(60)", "for i in range(3)") + "sys.exit(7)\n")
    done = doctor(tmp_path, "-m", "train")
    assert done.returncode == 7 and done.stdout.startswith("trained")


RANKS = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for i in range(5):
    optimizer.zero_grad()
    model(torch.randn(4, 8, generator=torch.Generator().manual_seed(dist.get_rank() + 2 * i))).square().sum().backward()
    for p in model.parameters():
        if SICK:
            continue
        dist.all_reduce(p.grad)
    optimizer.step()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("sick", [True, False])
def test_ranks_whose_weights_differ(sick, tmp_path):
    (tmp_path / "train.py").write_text(RANKS.replace("SICK", str(sick)))
    command = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", "-m", "hmpx", "doctor")
    done = python.run(*command, "train.py", cwd=tmp_path, env=python.environment())
    assert ("began equal on 2 ranks and differ now" in done.stderr) == sick, done.stderr
    assert (done.returncode == 0) == (not sick)


def test_ranks_write_the_recipe_once_under_the_name_that_was_asked_for(script, tmp_path):
    begins = "torch.distributed.init_process_group('gloo')"
    script(source=SCRIPT.replace("torch.manual_seed(0)", f"{begins}; torch.manual_seed(0)"))
    command = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", "-m", "hmpx", "doctor")
    done = python.run(*command, "--fix", "recipe.yaml", "train.py", cwd=tmp_path, env=python.environment())
    assert done.stderr.count("hmpx: wrote ") == 1, done.stderr
    assert {each.name for each in tmp_path.iterdir() if each.is_file()} == {"train.py", "recipe.yaml"}
    assert read_recipe(tmp_path / "recipe.yaml").weights == "stochastic"


def test_a_script_that_saves_while_it_is_ended_is_told_so_once(script, tmp_path):
    body, _, last = SCRIPT.partition("for i in range(60):")
    saved = "    torch.save(model.state_dict(), 'model.pt')\n"
    script(source=f"{body}try:\n  for i in range(60):" + last.replace("\n", "\n  ").rstrip() + f"\nfinally:\n{saved}")
    done = doctor(tmp_path, "train.py")
    lines = [line for line in done.stderr.splitlines() if "is ending the script" in line]
    assert len(lines) == 1 and "`finally` blocks save is of an early step" in lines[0], done.stderr
    assert (tmp_path / "model.pt").exists()


def test_a_step_that_is_asked_for_is_gone_to_and_one_that_never_comes_is_not_checked(script, tmp_path):
    source = SCRIPT.replace("loss.backward()", "(loss * (float('nan') if i == 55 else 1)).backward()")
    done = doctor(tmp_path, "--at", "56", script("torch.float32", source))
    assert done.returncode == 1 and "inf or NaN: train.py:10:" in done.stderr, done.stderr
    done = doctor(tmp_path, "--at", "70", script("torch.float32"))
    assert done.returncode == 2 and "not checked: step 70: the script ended after 60 iterations" in done.stderr


def test_the_report_is_told_of_a_script_that_leaves_hides_its_errors_or_has_a_thread_that_waits(script, tmp_path):
    leaving = "    if i == 30: import os; sys.stderr = None; os.dup2(os.open(os.devnull, 1), 2); os._exit(0)\n"
    waiting = "import hmpx.shell.doctor, queue, threading\nhmpx.shell.doctor._GRACE = 1\n"
    waiting += "threading.Thread(target=queue.Queue().get).start()\n"
    for source in (SCRIPT.replace("print(", f"{leaving}print("), waiting + SCRIPT):
        done = doctor(tmp_path, script(source=source))
        assert done.returncode == 1 and "WRONG  lost updates: train.py:11:" in done.stderr.replace(":14:", ":11:")


def test_processes_are_not_checked_and_workers_of_a_loader_are_no_news(script, tmp_path):
    started = "import multiprocessing\nchild = multiprocessing.get_context('fork').Process(target=print)\n"
    started += "child.start(), child.join()\n"
    loaded = "from torch.utils.data import DataLoader\n"
    loaded += "list(DataLoader(range(4), num_workers=1, multiprocessing_context='fork'))\n"
    for before, status in ((started, 2), (loaded, 0)):
        source = before + SCRIPT.replace("torch.manual", "import torch; torch.manual", 1)
        done = doctor(tmp_path, "--steps", "5", script("torch.float32", source))
        assert done.returncode == status, done.stderr
        assert ("processes that the script started: print (1)" in done.stderr) == (status == 2)
