"""``python -m hmpx run`` and HMPX_RECIPE: scripts that know nothing of hmpx, run as a user runs them."""

import json
import os
import re
import shlex
import subprocess
import sys

import pytest
import torch

from hmpx.recipes.activate import runs_a_shell_command
from hmpx.recipes.reading import recipe_names
from tests.support import python

KERNELS = "(, FP32 kernels for BF16 and FP16 on CPU)?"  # said on a CPU without BF16 instructions
SCRIPT = '''
"""Trains a small model; prints dtypes, a hash, and how it was called."""
import argparse, hashlib, pickle, sys
import torch
import torch.nn.functional as F
from torch import nn
import beside  # a module in the script's own folder

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=5)
options = parser.parse_args()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.norm(F.gelu(self.first(x))))


def digest(model):
    bits = b"".join(p.detach().view(torch.uint8).numpy().tobytes() for p in model.parameters())
    return hashlib.sha256(bits).hexdigest()[:16]


def train():
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    x, y = torch.randn(16, 8), torch.randint(4, (16,))
    for _ in range(options.steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        scheduler.step()
    state = optimizer.state[model.first.weight]
    moment = next(value for key, value in state.items() if key.endswith("exp_avg") and "scales" not in key)
    names = [str(t.dtype)[6:] for t in (model.first.weight, loss, moment)]
    return " ".join([*names, digest(model)])


if __name__ == "__main__":
    assert pickle.loads(pickle.dumps(Net)) is Net and __file__.endswith("train.py") and beside.found
    print(train(), sys.argv[1:])
'''
DTYPES = {  # of the weights, the loss and the state
    **dict.fromkeys({*recipe_names()} - {"torchao-nvfp4"}, "float32 " * 3),  # it is for a model of several blocks
    **dict.fromkeys(("bf16-sr", "fp32-head", "bf16-norms-fp32"), "bfloat16 float32 float32 "),
    **dict.fromkeys(("neuron-bf16-sr", "neuron-bf16-fp32-params-copy", "nxd-standard"), "bfloat16 float32 float32 "),
    "lean": "bfloat16 float32 bfloat16 ",
    **dict.fromkeys(("bf16-sr-8bit", "lean8", "lean4", "flash"), "bfloat16 float32 uint8 "),
    **dict.fromkeys(("torchao-bf16-sr", "xla-use-bf16", "xla-downcast-bf16"), "bfloat16 " * 3),
}


@pytest.fixture
def script(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "beside.py").write_text("found = True\n")
    return tmp_path / "train.py"


def call(*arguments, cwd=None, good=True, fresh=False, module=("-m", "hmpx", "run"), **environment):
    """What `python -m hmpx run *arguments` prints; `fresh`: by an interpreter that is started as a user starts it."""
    env = {**os.environ, **environment}
    if fresh:
        command = [sys.executable, *map(str, (*module, *arguments))]
        done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=env)
    else:
        done = python.run(*module, *arguments, cwd=cwd, env=env)
    assert (done.returncode == 0) is good, done.stderr
    return done.stdout, done.stderr


@pytest.mark.slow
def test_every_recipe_runs_an_unmodified_script(script):
    for name, dtypes in DTYPES.items():
        if name != "nxd-standard" or hasattr(torch.Tensor, "grad_dtype"):  # since torch 2.13
            out, _ = call("--recipe", name, script, "--steps", 4)
            assert out.startswith(dtypes) and out.endswith("['--steps', '4']\n"), name


def test_scripts_and_modules_with_their_own_arguments_and_lists(script, tmp_path):
    out, err = call("--recipe", "neuron-bf16-sr", script, "--steps", 3, cwd="/", fresh=True)
    assert out.startswith("bfloat16 float32 float32 ") and out.endswith("['--steps', '3']\n")
    err = re.sub("W.* No CUDA runtime is found.*\n", "", err)  # of torch with CUDA and a compiler
    assert re.fullmatch(f"hmpx: recipe neuron-bf16-sr{KERNELS}; runs {script}\n", err)
    as_module, _ = call("--recipe", "neuron-bf16-sr", "-m", "train", "--steps", 3, cwd=tmp_path)
    assert as_module == out
    (tmp_path / "mine.txt").write_text("cross_entropy\n")
    own, err = call("--recipe", "hmp-o1", "--bf16", "mine.txt", "train.py", cwd=tmp_path, XLA_USE_BF16="1")
    assert own.startswith("float32 bfloat16 float32")
    assert re.search(f"bf16 list {tmp_path}/mine.txt{KERNELS}; runs train.py", err)
    assert "recipe hmp-o1 (which goes before the variables of Neuron and XLA)" in err
    named, err = call("train.py", "--steps", 3, cwd=tmp_path, HMPX_RECIPE="neuron-bf16-sr")
    assert named == out and re.search(f"recipe neuron-bf16-sr{KERNELS}; runs", err)


@pytest.mark.parametrize(
    "line, message",
    [
        ("from habana_frameworks.torch.hpex import hmp", "for its hmp write: from hmpx import hmp"),
        ("import hmpx; hmpx.convert(bf16=['linaer'])", "did you mean 'linear'?"),
    ],
)
def test_an_error_of_hmpx_names_the_line_of_the_script(tmp_path, line, message):
    (tmp_path / "train.py").write_text(f"\n\n{line}\n")
    done = python.run("-m", "hmpx", "run", "--recipe", "lean", tmp_path / "train.py")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert message in done.stderr
    assert done.stderr.endswith(f"  raised at {tmp_path / 'train.py'}:3\n"), done.stderr


def test_the_exit_status_is_that_of_the_script_and_an_error_is_shown(tmp_path):
    (tmp_path / "train.py").write_text("import sys\nif sys.argv[1:]:\n    sys.exit(3)\nraise KeyError('mine')\n")
    done = python.run("-m", "hmpx", "run", "--recipe", "lean", tmp_path / "train.py", "fail")
    assert done.returncode == 3
    done = python.run("-m", "hmpx", "run", "--recipe", "lean", tmp_path / "train.py")
    assert done.returncode == 1 and done.stderr.endswith("KeyError: 'mine'\n") and 'train.py", line 4' in done.stderr


BY_HAND = """
import sys, torch

weights = torch.nn.Parameter(torch.ones(2))

def step():
    weights.square().sum().backward()
    with torch.no_grad():
        weights.sub_(weights.grad, alpha=0.1)

for _ in range(2):
    (torch.compile(step, backend="eager") if sys.argv[1:] else step)()
print(weights.dtype, torch.autograd.backward.__code__.co_filename == torch.autograd.__file__)
"""


@pytest.mark.parametrize(
    "recipe, how, told", [("bf16-sr", (), 1), ("bf16-sr", ("compiled",), 1), ("autocast-cpu", (), 0)]
)
def test_weights_that_a_script_moves_by_hand_are_told_to_be_out_of_the_recipes_reach(tmp_path, recipe, how, told):
    (tmp_path / "by_hand.py").write_text(BY_HAND)
    out, err = call("--recipe", recipe, "by_hand.py", *how, cwd=tmp_path)
    assert out == "torch.float32 True\n"
    assert err.count("there is none in the first backward pass") == told


LISTED = """
import sys, torch
x = torch.ones(2, 2, requires_grad=True)
print(str((x @ x).dtype), str(x.softmax(-1).dtype), sys.argv[1:])
"""


def test_lists_alone_lie_over_the_default_ones_with_fp32_weights(tmp_path, script):
    (tmp_path / "mine.txt").write_text("softmax\n")
    (tmp_path / "listed.py").write_text(LISTED)
    out, err = call("--list", "mine.txt", "listed.py", cwd=tmp_path)
    assert out == "torch.float32 torch.bfloat16 []\n"
    assert re.search(
        f"hmpx: the default lists, FP32 weights, bf16 list {tmp_path}/mine.txt{KERNELS}; runs listed.py", err
    )
    out, err = call("--recipe", "hmp-o2", "--low-precision", "fp16", "listed.py", cwd=tmp_path)
    assert out == "torch.float16 torch.float32 []\n" and "low precision float16" in err
    out, err = call("--set", "bf16=[cross_entropy]", script, cwd=tmp_path)
    assert out.startswith("float32 bfloat16 float32") and ", bf16=[cross_entropy]" in err
    with_masters = ("--set", "use_master_weights_in_ckpt=true")
    assert call("--recipe", "flash", *with_masters, script)[0] == call("--recipe", "flash", script)[0]


SPAWNING = """
import torch
import torch.multiprocessing as mp
from torch import nn
from torch.nn.functional import linear

def worker(rank, results):
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    out = model(torch.ones(2, 4))
    held = linear(torch.ones(2, 4), model.weight)
    results.put((rank, str(model.weight.dtype), str(out.dtype), str(held.dtype)))

if __name__ == "__main__":
    results = mp.get_context("spawn").SimpleQueue()
    mp.spawn(worker, (results,))
    print(results.get())
"""


def test_processes_that_a_script_spawns_go_on_under_the_recipe(tmp_path):
    """A function that the script holds by name is cast there too."""
    (tmp_path / "spawning.py").write_text(SPAWNING)
    expected = (0, "torch.bfloat16", "torch.bfloat16", "torch.bfloat16")
    out, err = call("--recipe", "neuron-bf16-sr", "--verbose", "spawning.py", cwd=tmp_path)
    assert out == f"{expected}\n"
    line = SPAWNING.splitlines().index("    out = model(torch.ones(2, 4))") + 1
    said = re.findall(rf"hmpx: linear as \S+, bf16: .* at .*spawning.py:{line}$", err, re.MULTILINE)
    assert len(said) == 1


ENDS = """
import atexit, inspect, os, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
import torch

def train():
    time.sleep(0.2)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 4)).float().sum().backward()
    optimizer.step()
    print("trained", flush=True)

def written(file):
    train()
    file.write("x")

how = sys.argv[1:]
if how[-1] == "thread":
    file = open("log.txt", "w")
    atexit.register(file.close)
    threading.Thread(target=written, args=(file,)).start()
elif how[-1] == "pool":
    ThreadPoolExecutor(2).submit(train)
    atexit.register(print, "last")
elif how[-1] == "leaves":
    train()
    os._exit(7)
elif how[-1] == "atexit":
    atexit.register(train)
    atexit.register(sys.exit, 5)
elif how[-1] == "pipe":
    train()
    raise BrokenPipeError("a worker is gone")
else:
    os.chdir("/")
    print(how, __spec__, __package__, __name__, __file__, inspect.getsource(written))
    train()
"""


def test_a_script_has_the_arguments_and_the_end_that_it_has_without_hmpx(tmp_path):
    """Its output and status are Python's; `record` has what its threads and its functions for `atexit` do.

    Under `run` the interpreter itself ends the script.
    """
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "ends.py").write_text(ENDS)
    for words in (["--", "a"], ["--l", "--", "--fp"], ["thread"], ["pool"], ["leaves"], ["atexit"], ["pipe"]):
        plain = python.run("code/ends.py", *words, cwd=tmp_path)
        assert "trained" in plain.stdout, plain.stderr
        for command in ("record",) if words[-1] in ("thread", "pool", "leaves", "atexit") else ("run", "record"):
            done = python.run("-m", "hmpx", command, "--recipe", "bf16-sr", "code/ends.py", *words, cwd=tmp_path)
            assert (done.returncode, done.stdout) == (plain.returncode, plain.stdout), (words, command, done.stderr)
            assert ("ends.py:10  " in done.stderr) == (command == "record"), (words, done.stderr)


PACKAGE = """
import warnings
warnings.simplefilter("error")
from . import data
from torch.utils.data import DataLoader, TensorDataset
import torch
print("training", __package__, __spec__.name, flush=True)
warnings.simplefilter("ignore")
print(len([*DataLoader(TensorDataset(torch.ones(4, 2)), num_workers=1, multiprocessing_context="spawn")]))
"""


def test_a_package_is_not_run_again_by_the_processes_that_it_spawns(tmp_path):
    (tmp_path / "package").mkdir()
    for name, text in (("__init__", ""), ("data", ""), ("__main__", PACKAGE)):
        (tmp_path / "package" / f"{name}.py").write_text(text)
    out, _ = call("--recipe", "bf16-sr", "-m", "package", cwd=tmp_path)
    assert out == "training package package.__main__\n4\n"


AGAIN = """
import os, subprocess, sys, __main__, beside, torch
if "RANK_1" not in os.environ:  # as Lightning's launcher has it
    os.environ["RANK_1"] = ""
    start = [os.path.abspath(sys.argv[0])] if __main__.__spec__ is None else ["-m", __main__.__spec__.name]
    assert subprocess.call([sys.executable, "other.py"]) == 0
    sys.exit(subprocess.call([sys.executable, *start, *sys.argv[1:]]))
elif "AGAIN" not in os.environ:
    os.environ["AGAIN"] = ""
    os.execv(sys.executable, [sys.executable, *sys.argv])
model = torch.nn.Linear(4, 4)
torch.optim.SGD(model.parameters(), lr=0.1)
print(sys.argv[1:], model.weight.dtype, flush=True)
os.execlp("sh", "sh", "-c", "exit 3")
"""


def test_a_script_that_starts_itself_again_keeps_the_recipe_and_of_others_it_is_said(tmp_path):
    (tmp_path / "folder").mkdir()
    for name, text in (("again", AGAIN), ("beside", ""), ("../other", "")):
        (tmp_path / "folder" / f"{name}.py").write_text(text)
    words = ("-m", "hmpx", "run", "--recipe", "bf16-sr", "folder/again.py", "--", "x")
    environment = {**os.environ, "PYTHONSAFEPATH": "", "OMP_NUM_THREADS": "1"}
    done = python.run(*words, cwd=tmp_path, env=environment)
    assert done.returncode == 3 and done.stdout == "['--', 'x'] torch.bfloat16\n", done.stderr
    said = f"the recipe does not hold in a process that the script starts: {shlex.quote(sys.executable)} other.py"
    assert done.stderr.count(said) == 1 and "as another program: sh -c 'exit 3'" in done.stderr


def test_a_reader_that_goes_away_is_no_error_of_a_command(tmp_path):
    """Which is said of hmpx's own output alone: a script that dies of it has failed, as the test of its end shows."""
    command = ["/bin/bash", "-c", "python -m hmpx explain --all | head -1; exit ${PIPESTATUS[0]}"]
    done = subprocess.run(command, env=python.environment(), capture_output=True, text=True)
    assert (done.returncode, done.stdout.count("\n"), "BrokenPipe" in done.stderr) == (0, 1, False), done.stderr


def test_hmpx_recipe_serves_a_script_that_imports_hmpx(script, tmp_path):
    (tmp_path / "imports.py").write_text("import hmpx\n" + SCRIPT.replace("train.py", "imports.py"))
    arguments = dict(module=(tmp_path / "imports.py",), HMPX_RECIPE="neuron-bf16-sr")
    assert call(**arguments)[0] == call("--recipe", "neuron-bf16-sr", script)[0]
    wrong = {**arguments, "HMPX_RECIPE": "neuron-bf16-rs"}
    said = "hmpx: HMPX_RECIPE=neuron-bf16-rs: there is no recipe 'neuron-bf16-rs'; did you mean 'neuron-bf16-sr'?\n"
    assert call(**wrong, good=False) == ("", said)  # one line, and the script has not begun


@pytest.mark.slow
def test_a_wrong_hmpx_recipe_is_a_matter_of_the_shell_command_however_python_was_told_to_run_it(script):
    """`torchrun` says ``-u -m``."""
    told = "-uB", "-Wignore", "-X", "dev", "-m", "hmpx"
    _, err = call("run", script, module=told, good=False, fresh=True, HMPX_RECIPE="nowhere")
    assert err.startswith("hmpx: there is no recipe 'nowhere'") and err.count("\n") == 1


LINES = [
    ("-m hmpx run x.py", "-m run x.py", True),
    ("-um hmpx", "-m", True),
    ("-uBmhmpx --recipe x", "-m --recipe x", True),
    ("-W error -X dev -m hmpx.__main__", "-m", True),
    ("-m other -m hmpx", "-m -m hmpx", False),
    ("-mother hmpx", "-m hmpx", False),
    ("train.py -m hmpx", "train.py -m hmpx", False),
    ("/bin/hmpx run", "/bin/hmpx run", True),  # the console script is known by its name
    ("-c pass", "-c", False),
    ("", "", False),
]


def test_a_shell_command_is_known_while_the_module_is_looked_for(monkeypatch):
    for line, argv, is_one in LINES:
        monkeypatch.setattr(sys, "orig_argv", ["python", *line.split()])
        monkeypatch.setattr(sys, "argv", argv.split())
        assert runs_a_shell_command() == is_one, line


def test_variables_of_neuron_and_xla_under_run(script):
    out, err = call(script, XLA_USE_BF16="1", NEURON_RT_STOCHASTIC_ROUNDING_SEED="7")
    assert out.startswith("bfloat16 bfloat16 bfloat16 ") and "XLA_USE_BF16=1" in err and "seed 7" in err


UNDER_AUTOCAST = """
import torch
model = torch.nn.Linear(4, 4)
with torch.autocast("hpu", dtype=torch.bfloat16):
    out = model(torch.ones(2, 4))
    print(out.dtype, out.softmax(-1).dtype, (out / 2).dtype)
"""


def test_lists_of_a_gaudi_configuration_under_run(tmp_path):
    """The script keeps its `torch.autocast("hpu")`, which casts nothing where there is no such device."""
    lists = {"use_torch_autocast": True, "autocast_bf16_ops": ["linear", "div"], "autocast_fp32_ops": ["softmax"]}
    (tmp_path / "gaudi_config.json").write_text(json.dumps(lists | {"hmp_bf16_ops": ["add"]}))
    (tmp_path / "mine.yaml").write_text("extends: gaudi-autocast\nbf16_file_path: gaudi_config.json\n")
    (tmp_path / "train.py").write_text(UNDER_AUTOCAST)
    out, _ = call("--recipe", "mine.yaml", "train.py", cwd=tmp_path)
    assert out == "torch.bfloat16 torch.float32 torch.bfloat16\n"
    err = call("--recipe", "gaudi_config.json", "train.py", cwd=tmp_path, good=False)[1]
    assert "under Gaudi's autocast that is extends: gaudi-autocast, bf16_file_path: gaudi_config.json" in err
