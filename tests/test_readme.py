"""Every block of code in every README runs, and prints what stands there."""

from __future__ import annotations

import ast
import contextlib
import io
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import hmpx
from hmpx.recipes.reading import read_recipe, recipe_names
from hmpx.rounding.state_codes import STATE_CODES
from hmpx.shell.main import main
from hmpx.updates.holding.state_forms import STATE_FORMS
from hmpx.updates.holding.stores import WAYS
from tests.support import python

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
FOLDERS = ("oplists", "hmpx", "examples", "tests")
_PAGES = [Path(at) / "README.md" for each in FOLDERS for at, _, _ in os.walk(ROOT / each)]
_PAGES = [ROOT / "README.md", ROOT / "examples" / "SKILL.md", *_PAGES]
READMES = {path.relative_to(ROOT).as_posix(): path.read_text() for path in _PAGES if path.is_file()}
BLOCK = re.compile(r"^(?:<!-- (.*) command -->\n)?```(.*)\n((?s:.*?))^```$", re.MULTILINE)
BLOCKS = [(name, *found) for name, text in READMES.items() for found in BLOCK.findall(text)]
# Commands that this file runs below, in smaller form, or that CI runs; a README may show no other than these unrun.
COMMANDS = {"install", "main", "memory", "picture", "ranks"}
COMMANDS |= {f"{group}test" for group in ("", "downstream ", "fake cuda ", "older libraries ", "xla ", "versions ")}


def test_every_block_is_run_by_a_test():
    legal = {"python", "text", "console", "bash"}
    legal |= {"python before", "python after"}
    legal |= {f"python with {framework}" for framework in ("lightning", "transformers", "accelerate")}  # in downstream
    assert {kind for _, _, kind, _ in BLOCKS} <= legal
    assert {command for _, command, _, _ in BLOCKS if command} == COMMANDS
    assert sum(text.count("```") for text in READMES.values()) == 2 * len(BLOCKS)


def test_the_reference_names_every_recipe():
    assert {*recipe_names()} == {*re.findall(r"`([^`]*)`", _rows("oplists/README.md", 0))}


def _rows(page, column):
    """A column of the page's table of recipes."""
    table = re.search(r"^\| recipe \|.*\n\|[-|]*\n((?:\|.*\n)*)", READMES[page], re.MULTILINE).group(1)
    return "\n".join(line.split("|")[1 + column] for line in table.splitlines())


def test_bytes_a_parameter_are_those_of_the_recipes():
    page = "oplists/README.md"
    for names, given in zip(_rows(page, 0).splitlines(), _rows(page, 2).splitlines(), strict=True):
        sums = [sum(read_recipe(name).bytes_per_parameter().values()) for name in re.findall(r"`([^`]*)`", names)]
        assert [f"{each:.3g}" for each in sums if each != sums[0]] == given.strip().split(", ")[1:], names
        assert f"{sums[0]:.3g}" == given.strip().split(", ")[0], names


def test_bytes_of_each_way_are_those_that_it_holds():
    text = READMES["examples/README.md"]
    ways = dict(re.findall(r'^\| `"(\w+)"` \|.*\| ([\d.]+) \|$', text, re.MULTILINE))
    for code in STATE_CODES:
        assert ways.pop(code) == f"{STATE_FORMS[code].bytes_each:.4g}"
    assert ways == {
        name: f"{12 + way.bytes_beside:.3g}" for name, way in WAYS.items()
    }  # 4 of weight and gradient, 8 of state


def test_troubleshooting_has_the_texts_of_the_code():
    table = READMES["examples/README.md"].partition("## Troubleshooting")[2].partition("\n## ")[0]
    shown = [re.findall("`([^`]*)`", row.split("|")[1]) for row in table.splitlines() if row.startswith("| `")]
    trees = [ast.parse(path.read_text()) for path in (ROOT / "hmpx").rglob("*.py")]
    texts = [each.value for tree in trees for each in ast.walk(tree) if isinstance(each, ast.Constant)]
    said = [text for text in texts if isinstance(text, str)]
    assert len(shown) >= 8
    for parts in shown:
        assert all(any(part in text for text in said) for part in parts), parts


def test_links_lead_somewhere():
    links = [
        (name, each) for name in READMES for each in re.findall(r"(?:\]\(|src(?:set)?=\")([^)\"]*)", READMES[name])
    ]
    for name, link in links:
        file, _, heading = link.partition("#")
        target = (ROOT / name).parent / file if file else ROOT / name
        assert target.exists(), (name, link)
        if heading:
            text = re.sub(r"```.*?```", "", target.read_text(), flags=re.DOTALL)
            headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
            known = {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings}
            assert heading in known, (name, link)


@pytest.mark.parametrize("name", [name for name, text in READMES.items() if "```python\n" in text])
def test_every_python_snippet_runs_and_prints_what_it_says(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    namespace: dict = {}
    printed = ""
    for kind, block in re.findall(r"```(python|text)\n(.*?)```", READMES[name], re.DOTALL):
        if kind == "python":
            assert not printed, "a snippet prints what the README does not show"
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                exec(compile(block, "model.py", "exec"), namespace)
            printed = out.getvalue()
        elif printed:  # by the snippet above
            assert printed == block
            printed = ""
    hmpx.restore()
    assert not printed


SKILL = READMES["examples/SKILL.md"]
NAMED = {(word, option) for _, word, rest in re.findall(r"`(python -m hmpx )?(\w+) (--[^`]*)`", SKILL)
         for option in re.findall(r"--[a-z-]+", rest)}  # fmt: skip


def test_the_page_for_agents_is_short_and_names_options_that_there_are(capsys):
    assert len(SKILL.splitlines()) <= 60 and len(NAMED) > 8
    for command in {command for command, _ in NAMED}:
        with pytest.raises(SystemExit):
            main([command, "--help"])
        said = capsys.readouterr().out
        assert not [option for name, option in NAMED if name == command and f"{option} " not in said], command


def _in_a_shell(command, cwd):
    """Run a command as in a terminal of 100 columns, which tables take their width from."""
    environment = {**python.environment(), "COLUMNS": "100"}
    return subprocess.run(command, shell=True, cwd=cwd, env=environment, capture_output=True, text=True)


CONSOLES = [block for _, _, kind, block in BLOCKS if kind == "console"]


@pytest.mark.parametrize("block", CONSOLES, ids=[block.split("\n")[0] for block in CONSOLES])
def test_every_console_block_says_what_its_commands_say(block, tmp_path):
    """Word for word, and its decimal fractions within 5 %, as they differ between machines; "..." is anything."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for part in block.removeprefix("$ ").split("\n$ "):
        command, _, shown = part.partition("\n")
        done = _in_a_shell(command, tmp_path)
        parts = re.split(r"(\.\.\.|\d+\.\d+)", shown + "\n" * (bool(shown) and not shown.endswith("\n")))
        wanted = [float(each) for each in parts[1::2] if each != "..."]
        parts[1::2] = [".*?" if each == "..." else r"(\d+\.\d+)" for each in parts[1::2]]
        parts[::2] = map(re.escape, parts[::2])
        found = re.fullmatch("".join(parts), done.stdout, re.DOTALL)
        assert found, done.stdout + done.stderr
        assert [*map(float, found.groups())] == pytest.approx(wanted, rel=0.05), done.stdout


SCRIPT = "import torch\nl = torch.nn.Linear(4, 4)\no = torch.optim.SGD(l.parameters())\nprint(l.weight.dtype)\n"
UNMARKED = [line for _, command, kind, block in BLOCKS if kind == "bash" and not command for line in block.splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("command", UNMARKED)
def test_every_other_command_runs(command, tmp_path):
    """In a folder with a training script, and a list that it may be told of."""
    (tmp_path / "train.py").write_text(f"import hmpx\n{SCRIPT}")
    (tmp_path / "mine.txt").write_text("linear\n")
    done = _in_a_shell(command, tmp_path)
    assert done.returncode == 0 and "torch.bfloat16" in done.stdout, done.stderr


PAIR = r"\n```python before\n(.*?)```\n\n```python after\n(.*?)```"
PAIRS = re.findall(r"### ([^\n]*)\n\n[^\n]*\n" + PAIR, READMES["examples/README.md"], re.DOTALL)
BY_RECIPE = "gaudi-autocast", "autocast-cuda", "neuron-bf16-fp32-params-copy", "torchao-bf16-sr"
PAIRS += [(name, "", f"hmpx.prepare(model, optimizer, {name!r})") for name in BY_RECIPE]


def _world():
    """What a training script has in hand."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    inputs, targets = torch.randn(32, 64), torch.randint(10, (32,))
    torch.nn.functional.cross_entropy(model(inputs), targets).backward()
    return {
        **{"torch": torch, "F": torch.nn.functional, "hmpx": hmpx},
        **{"model": model, "optimizer": optimizer, "inputs": inputs, "targets": targets},
        **{"batches": [(inputs, targets)]},
    }


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("system, before, after", PAIRS, ids=[pair[0] for pair in PAIRS])
def test_coming_from(system, before, after):
    compile(before, system, "exec")
    world = _world()
    exec(after, world)
    weights = [p.detach().clone() for p in world["model"].parameters()]
    world["optimizer"].zero_grad()
    world["F"].cross_entropy(world["model"](world["inputs"]), world["targets"]).backward()
    world["optimizer"].step()
    assert not all(torch.equal(p, q) for p, q in zip(world["model"].parameters(), weights, strict=True))
    assert world["model"](world["inputs"]).dtype is torch.bfloat16
    hmpx.restore()


def command_of(name):
    (block,) = (block for _, command, _, block in BLOCKS if command == name)
    return block.rstrip()


def test_the_commands_are_marked():
    assert "examples/charlm.py" in command_of("main")
    run = '-m pytest -n {} --dist worksteal -m "not slow"'
    assert command_of("test").endswith(run.format(3))
    assert command_of("downstream test").endswith(f"{run.format(2)} tests/downstream")


@pytest.mark.parametrize(
    "first, second, said, succeeds",
    [("echo 1", "echo 2", "1\n2\n", True), ("false", "echo 2", "", False), ("echo 1", "exit 5", "1\n", False)],
)
def test_ci_runs_both_test_commands_and_stops_at_one_that_fails(tmp_path, first, second, said, succeeds):
    """They run in a copy that has the name of a clone, and a space and a letter beyond ASCII on its path."""
    checkout, temporary = tmp_path / "checkout", tmp_path / "temporary"
    (checkout / ".ci").mkdir(parents=True)
    temporary.mkdir()
    first = f'case "$PWD" in "{temporary}"/*\\ *ä*/hmpx) {first};; esac'
    script = shutil.copy(ROOT / ".ci" / "run", checkout / ".ci" / "run")
    marked = README.replace(command_of("downstream test"), second).replace(command_of("test"), first)
    (checkout / "README.md").write_text(marked)
    done = subprocess.run([script], capture_output=True, text=True, env={**os.environ, "TMPDIR": str(temporary)})
    assert (done.returncode == 0) is succeeds and not [*temporary.iterdir()], done.stderr
    assert "".join(line for line in done.stdout.splitlines(True) if line[0] != "+") == said, done.stderr


MAIN_ROW = r"^(\S.{33}) +([\d.]+) +([\d.]+)$"


@pytest.mark.parametrize(
    "only_avx2", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["this CPU", "as if it had AVX2 only"]
)
def test_the_main_job_runs_and_shows_the_gap(only_avx2, tmp_path):
    """Progress, the table of the front page, two pictures, and a gap that cannot be missed."""
    light, dark = tmp_path / "curves.png", tmp_path / "dark.png"
    old_cpu = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "HMPX_KERNELS": "float32"}
    words = [ROOT / "examples" / "charlm.py", "--every", "80", "--out", light, "--dark", dark]
    if only_avx2:  # which an interpreter reads when it starts
        words, environment = [sys.executable, *words], {**os.environ, **old_cpu}
        done = subprocess.run(words, capture_output=True, text=True, check=True, env=environment)
    else:
        done = python.run(*words, check=True)
    rows, shown = (
        {name.strip(): (float(loss), float(size)) for name, loss, size in re.findall(MAIN_ROW, text, re.MULTILINE)}
        for text in (done.stdout, README)
    )
    assert rows.keys() == shown.keys() and all(rows[name] == pytest.approx(shown[name], abs=0.005) for name in rows)
    fp32, converted, nearest, stochastic = (loss for loss, _ in rows.values())
    assert [size for _, size in rows.values()] == [16.0, 16.0, 8.0, 12.0]
    assert abs(converted - fp32) < 0.02 and abs(stochastic - fp32) < 0.02 and nearest - fp32 > 0.1
    assert "Rounded stochastically, they keep up." in done.stdout
    assert "way 2 of 4" in done.stderr and "s left" in done.stderr and "step  160/160" in done.stderr
    assert all(picture.read_bytes().startswith(b"\x89PNG") for picture in (light, dark))
    assert light.read_bytes() != dark.read_bytes()


@pytest.mark.slow
def test_the_main_job_takes_a_users_list(tmp_path):
    (tmp_path / "mine.txt").write_text("linear\nnosuch\n")
    arguments = "--steps", "1", "--list", tmp_path / "mine.txt"
    done = python.run(ROOT / "examples" / "charlm.py", *arguments, cwd=tmp_path)
    assert done.returncode == 1 and "mine.txt:2: unknown op 'nosuch'" in done.stderr


@pytest.mark.slow
def test_8_bit_optimizers_are_set_side_by_side():
    """The table of the front page: its rows where the libraries are installed, bytes, and a loss with its spread."""
    arguments = "--seeds 2".split()  # after fewer steps BF16 is no further from FP32 than seeds are apart
    done = python.run(ROOT / "examples" / "memory.py", *arguments, check=True)
    row = r"^(\S.{16,}?) +(\d+\.\d\d) +[\d.]+ ± [\d.]+ +(?:([-+][\d.]+) ± [\d.]+)? +[\d.]+$"
    found = (re.findall(row, text, re.MULTILINE) for text in (done.stdout, README))
    rows, shown = ({name: rest for name, *rest in each} for each in found)
    assert len(shown) == 6 and rows.keys() <= shown.keys() and len(rows) >= 3, done.stdout
    assert {name: size for name, (size, _) in rows.items()} == {name: shown[name][0] for name in rows}
    losses = {name: float(above or 0) for name, (_, above) in rows.items()}
    assert abs(losses["hmpx, bf16-sr-8bit"]) < 0.01 < losses["BF16 weights, AdamW"]


@pytest.mark.slow
def test_digits():
    done = python.run(ROOT / "examples" / "digits.py", check=True)
    fp32, nearest, stochastic = (float(x) for x in re.findall(r"accuracy ([\d.]+)", done.stdout))
    assert stochastic > fp32 - 0.02 and nearest < fp32 - 0.1


@pytest.mark.slow
def test_recipes_are_set_side_by_side(tmp_path):
    """A few steps: progress, a row for each way, a picture. What the README claims takes half an hour."""
    arguments = "--steps 10 --every 5 --seeds 2 --recipes neuron-bf16-sr lean --out".split()
    script = ROOT / "examples" / "compare_recipes.py"
    done = python.run(script, *arguments, tmp_path / "recipes.png", check=True)
    rows = re.findall(r"^(\S.{29}) +([\d.]+) +±([\d.]+) +([-\d.]+) % +(\d+)$", done.stdout, re.MULTILINE)
    assert [name.strip() for name, *_ in rows] == ["plain FP32", "plain BF16", "neuron-bf16-sr", "lean"]
    assert [int(size) for *_, size in rows] == [16, 8, 12, 6] and [float(row[3]) for row in rows[:2]] == [100, 0]
    assert (tmp_path / "recipes.png").read_bytes().startswith(b"\x89PNG") and "way 8 of 8" in done.stderr


def _distributed(mode, ranks, steps, *more):
    torchrun = [f"{python.folder()}/torchrun", "--standalone", "--nproc-per-node", str(ranks)]
    command = [*torchrun, ROOT / "examples" / "distributed.py", "--mode", mode, "--steps", str(steps), *more]
    done = subprocess.run(command, capture_output=True, text=True, env=python.environment())
    assert done.returncode == 0, done.stderr
    return re.search(r"^weights (\w{16})$", done.stdout, re.MULTILINE).group(1), done.stdout


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="torch before 2.11")
def test_ranks_and_modes_take_over_from_one_another(tmp_path):
    """What one mode saved, another resumes on more ranks or fewer; the weights are those of a run without a break."""
    unbroken, _ = _distributed("ddp", 1, 6)
    keeping = ("--checkpoint", tmp_path, "--every", "2")
    _distributed("ddp", 2, 2, *keeping)
    _distributed("zero1", 4, 4, *keeping)
    resumed, said = _distributed("fsdp2", 2, 6, *keeping)
    assert "resumed at step 4" in said and resumed == unbroken
