"""Where two runs part: what `record --hash` keeps of a run, and what `report --diff` says of two."""

import itertools
import json
import math
import os
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.nn.attention import SDPBackend, sdpa_kernel

from hmpx.insight.capture import Capture
from hmpx.insight.recording.hashes import _LANES, Hashes
from hmpx.insight.recording.parting import parting
from hmpx.shell.main import main
from tests.support import python, ranks

NOISE = itertools.count(1)


LIBRARY = torch.library.Library("parting", "DEF")
LIBRARY.define("rows(Tensor x) -> Tensor")
SHORT = [False]  # whether the kernel leaves out the last row


def rows(x):
    y = 2 * x
    y.view(-1, y.shape[-1])[-1] *= 0.5 if SHORT[0] else 1
    return y


LIBRARY.impl("rows", rows, "CPU")


class Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return torch.ops.parting.rows(x)  # rows

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


class Net(torch.nn.Module):
    """Its lines are known by their ends: # norm, # attention, # out."""

    def __init__(self, planted=""):
        super().__init__()
        self.planted = planted
        self.embed, self.inner = torch.nn.Embedding(20, 16), torch.nn.Linear(16, 48)
        self.out, self.drop = torch.nn.Linear(16, 20), torch.nn.Dropout(0.2 * ("dropout" in planted))

    def forward(self, tokens):
        x = F.layer_norm(self.embed(tokens), [16], eps=1e-3 if "eps" in self.planted else 1e-5)  # norm
        if "rows" in self.planted:
            SHORT[0] = "short" in self.planted
            x = Rows.apply(x)
        if self.planted == "noise":
            x = x + next(NOISE) / 64  # noise
        q, k, v = self.inner(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        with sdpa_kernel(SDPBackend.MATH if "math" in self.planted else SDPBackend.FLASH_ATTENTION):
            y = F.scaled_dot_product_attention(q, k, v)  # attention
        y = self.drop(y.transpose(1, 2).flatten(2))  # dropout
        with torch.autocast("cpu", torch.bfloat16, self.planted == "dtype"):
            return self.out(y) * math.nan if "nan" in self.planted else self.out(y)  # out


def train(planted="", steps=3, wrapped=lambda model: model):
    torch.manual_seed(0)
    model = Net(planted)
    if planted == "weights":
        model.inner.weight.data[0, 0] += 1e-3
    run = wrapped(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(int(planted == "data"))
    torch.manual_seed(1 + (planted == "dropout, other seed"))
    losses = []
    for _ in range(steps):
        tokens = torch.randint(20, (8, 10), generator=data)
        loss = F.cross_entropy(run(tokens).float().flatten(0, 1), tokens.flatten())
        if "loss" in planted:
            loss = loss * 1.0 if planted == "loss" else -(-loss - 0.1)  # loss
        loss.backward()
        if planted == "clipped":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)  # clips
        optimizer.step()
        optimizer.zero_grad()
        model.inner.weight.data[0, 0] += 1e-3 * (planted == "weights later")
        losses.append(loss.item())
    return losses, [p.detach().clone() for p in model.parameters()]


def hashed(path, function, *arguments, at=(1, 2), **more):
    """Run a training, and save its hashes."""
    hashes = Hashes(at)
    capture = Capture([hashes], at, only_at=True)
    with capture.hooks():
        result = function(*arguments, **more)
    capture.close()
    assert not capture.trouble
    hashes.named(capture.names, capture.compiles)
    hashes.json(path)
    return result


def line(mark):
    """The line of this file that ends so."""
    lines = Path(__file__).read_text().splitlines()
    return f"{os.path.basename(__file__)}:{next(i for i, each in enumerate(lines, 1) if each.endswith(f'# {mark}'))}"


@pytest.fixture
def runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    hashed("run1.json", train)
    return tmp_path


def figures(tensor, offset=0, whole=None, in_words=True):
    hashes = Hashes([1])
    hashes._hash(tensor, offset, whole, in_words)
    (found,) = hashes._figures
    return found.view(torch.int64).tolist()[0], found[1:].tolist(), hashes._weights[tensor.device].tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool])
def test_the_hash_is_a_sum_of_words_times_weights_of_their_places(dtype):
    """As computed from the bytes, in Python's integers."""
    tensor = (torch.arange(6126).sin() * 9).to(dtype)
    value, (least, most, *some), weights = figures(tensor)
    size = 8 if tensor.numel() * tensor.element_size() % 8 == 0 else tensor.element_size()
    data = bytes(tensor.view(torch.uint8).tolist())
    words = [int.from_bytes(data[i : i + size], "little", signed=size > 1) for i in range(0, len(data), size)]
    wanted = sum(word * weights[i % _LANES] for i, word in enumerate(words))
    assert (value - wanted) % 2**64 == 0 and len({*weights}) == _LANES
    assert (least, most) == (float(tensor.min()), float(tensor.max())) and len(some) <= 16


def test_numbers_that_change_places_have_another_hash_and_views_have_the_same():
    x = torch.randn(64, 48)
    value = figures(x)[0]
    assert figures(x.t())[0] == figures(x.view(2, -1))[0] == value
    assert figures(x.flip(0))[0] != value and figures(x[[1, 0, *range(2, 64)]])[0] != value
    assert figures(torch.cat([x[:1], -x[1:2], x[2:]]))[0] != value


def test_hashes_of_parts_add_up_to_that_of_the_whole():
    x = torch.randn(97, 33)
    parts = [figures(x[a:b], 33 * a, x.numel(), False) for a, b in ((0, 40), (40, 41), (41, 97))]
    whole = figures(x, in_words=False)
    assert (sum(part[0] for part in parts) - whole[0]) % 2**64 == 0
    assert [each for part in parts for each in part[1][2:]] == whole[1][2:]


def test_the_run_has_the_same_numbers(tmp_path):
    plain, seen = train("dropout"), hashed(tmp_path / "run.json", train, "dropout")
    assert seen[0] == plain[0] and all(map(torch.equal, seen[1], plain[1]))


@pytest.mark.parametrize("planted", ["", "dropout"])
def test_the_same_run_twice_agrees(tmp_path, planted):
    for name in ("1", "2"):
        hashed(tmp_path / name, train, planted)
    found = parting(tmp_path / "1", tmp_path / "2")
    assert not found and found.same > 40 and "They agree to the bit" in str(found)


def test_eager_and_compiled_agree_where_only_the_lines_differ(runs):
    torch._dynamo.reset()
    hashed("2", train, wrapped=lambda model: torch.compile(model, backend="aot_eager"))
    found = parting("run1.json", "2")
    assert not found and found.same > 40 and found.settings == ["torch.compile not used and used"]


PART, INPUTS = "They part at ", "Their inputs differ already, at "


@pytest.mark.parametrize(
    "first, second, begins, mark, said",
    [
        ("", "dtype", PART, "out", "fp32 -> bf16; bf16"),
        ("", "math", PART, "attention", "last digits, as of sums in another order"),
        ("", "eps", PART, "norm", "more than rounding makes"),
        ("rows", "short rows", PART, "rows", "more than rounding makes"),
        ("nan", "nan, eps", PART, "norm", "native_layer_norm"),  # losses that are NaN in both hide nothing
        ("", "dropout", PART, "dropout", "random numbers differ"),
        ("dropout", "dropout, other seed", PART, "dropout", "seed both alike"),
        ("", "data", INPUTS, "", "the same batches"),
        ("", "weights", INPUTS, "", "the same weights"),
        ("loss", "loss by parts", PART, "loss", "of the largest number"),
        ("", "weights later", INPUTS, "", "the iteration before agrees"),  # somebody writes to them between two steps
    ],
)
def test_the_first_call_that_differs_is_named(tmp_path, first, second, begins, mark, said):
    for name, planted in (("1", first), ("2", second)):
        hashed(tmp_path / name, train, planted)
    found = parting(tmp_path / "1", tmp_path / "2")
    call = found.parts[0].call
    assert str(found).startswith(begins) and said in str(found), str(found)
    assert call.stage == ("forward" if mark else "input")
    assert not mark or os.path.basename(call.where) == line(mark), str(found)


def test_what_writes_to_gradients_in_one_run_alone_is_pointed_at(runs):
    hashed("run2.json", train, "clipped")
    found = parting("run1.json", "run2.json")
    assert not found.parts and found.gradients and line("clips") in {site.where for site in found.sites.new}
    assert "one may write to gradients" in str(found), str(found)
    assert "have no like in the other run" in str(found) and "numbers that agree" not in str(found), str(found)
    assert re.search(r"\nop +line.*\n_foreach_mul_ ", str(found)), "what writes comes first of the five that are shown"


def test_weights_that_differ_in_the_one_iteration_that_is_known_ask_for_the_first(tmp_path):
    for name, planted in (("1", ""), ("2", "weights later")):
        hashed(tmp_path / name, train, planted, at=(2,))
    assert "record both with --at 1" in str(parting(tmp_path / "1", tmp_path / "2"))


def test_what_the_first_program_does_not_repeat_is_not_blamed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("1", "1-again", "2"):
        hashed(name, train, "noise")
    assert os.path.basename(parting("1", "2").parts[0].call.where) == line("noise")
    found = parting("1", "2", "1-again")
    assert not found.parts and "differ when the first program runs twice: not blamed" in str(found)


def batches():
    data = torch.Generator().manual_seed(0)
    return [torch.randint(20, (8, 10), generator=data) for _ in range(2)]


def of_a_share(rank=0, ranks=1, parts=1):
    """A training whose batches are shared out to ranks, and taken in parts."""
    torch.manual_seed(0)
    model = Net()
    if ranks > 1:
        fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for tokens in batches():
        for part in tokens.chunk(ranks)[rank].chunk(parts):
            F.cross_entropy(model(part).flatten(0, 1), part.flatten()).backward()
        optimizer.step()


def of_a_rank(rank, folder):
    for name in ("two", "again"):
        hashed(f"{folder}/{name}.{rank}.json", of_a_share, rank, 2)


def test_one_rank_and_two_of_fsdp2(tmp_path, monkeypatch):
    """Gradients of one rank are those of the parts on two, put together; another order of sums is told as such."""
    monkeypatch.chdir(tmp_path)
    ranks.run(2, of_a_rank, str(tmp_path))
    hashed("one.json", of_a_share)
    assert not parting("two.json", "again.json")
    found = parting("one.json", "two.json")
    assert 0 < len(found.gradients) < 7 and found.settings[-1] == "ranks 1 and 2"
    assert "Each run, or rank, has another part of the batch" in str(found)
    assert "in iteration 1: gradients agree but for the order of sums\n" in str(found)
    assert found.losses is None or math.isclose(*found.losses[1:], rel_tol=1e-6)


def of_optimizer(make, momentum=False):
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 4)
    optimizer = make(model.parameters())
    for step in range(2):
        if momentum and step == 0:
            optimizer.state[model.weight]["momentum_buffer"] = torch.ones(4, 8)
        optimizer.zero_grad()
        model(torch.ones(2, 8)).square().sum().backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda p: torch.optim.SGD(p, 0.2, momentum=0.9), "second   SGD, lr 0.2\n"),
        (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.5), "weight_decay 0.5"),
        (lambda p: torch.optim.Adam(p, 0.1), "second   Adam, lr 0.1, "),
        (None, "the settings are the same: start both with the same state of the optimizer"),
    ],
)
def test_runs_that_differ_in_the_step_alone_part_there(make, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def base(p):
        return torch.optim.SGD(p, 0.1, momentum=0.9)

    hashed("a", of_optimizer, base)
    hashed("b", of_optimizer, make or base, make is None)
    text = str(parting("a", "b"))
    assert text.startswith("The step of iteration 1 differs: it leaves other weights in") and said in text, text
    hashed("b", of_optimizer, base)
    assert not parting("a", "b")


def test_from_the_shell_with_what_says_no(runs, capsys):
    (runs / "train.py").write_text("import torch\nl = torch.nn.Linear(4, 4)\no = torch.optim.SGD(l.parameters())\n")
    with open("train.py", "a") as file:
        file.write("for _ in range(3): l(torch.ones(2, 4)).sum().backward(), o.step()\n")
    done = python.run("-m", "hmpx", "record", "--hash", "a.json", "train.py", check=True)
    assert done.stderr == f"hmpx: wrote {runs / 'a.json'}\n"
    assert {call[0] for call in json.loads((runs / "a.json").read_text())["calls"]} == {1, 2}
    python.run("-m", "hmpx", "record", "--hash", "b.json", "--at", "3", "train.py", check=True)
    (runs / "log.json").write_text('{"schema": 1}')
    for arguments, said in (
        (["a.json", "--diff", "b.json"], "a.json has hashes of iterations 1, 2, b.json of 3: record both with"),
        (["a.json", "--diff", "none.json"], "none.json: No such file or directory; `python -m hmpx record --hash none"),
        (["a.json", "--diff", "train.py"], "train.py: no file of `record --hash`"),
        (["a.json"], "a.json: hashes of a run: compare them with those of another, by --diff OTHER"),
        (["log.json", "--diff", "a.json"], "log.json: has no hashes; `record --hash NAME train.py` writes"),
    ):
        capsys.readouterr()
        assert main(["report", *arguments]) == 2 and said in capsys.readouterr().err, arguments
    assert main(["report", "a.json", "--diff", "a.json"]) == 0
    assert main(["report", "a.json", "--diff", "run1.json"]) == 1
    assert "The two did not run the same program" in capsys.readouterr().out
