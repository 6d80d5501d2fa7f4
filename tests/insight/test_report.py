"""A record as it is shown: the table in a terminal, the page in a browser, and two records side by side."""

import csv
import importlib.util
import json
import os
import re
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

import hmpx
from hmpx.insight.finding import short_places
from hmpx.insight.recording.log import Log
from hmpx.insight.recording.record import DeviceSide
from hmpx.insight.recording.recorded import RoundTrip
from hmpx.insight.report import Field, table
from tests.support import browser, python
from tests.support.recorded import log_of, site


def shown(log, monkeypatch, columns=100):
    monkeypatch.setenv("COLUMNS", str(columns))
    return str(log)


def everything():
    """A record with each kind of finding: more sites than the table shows, equal blocks among them."""
    long = site("scaled_dot_product_attention", where="/a/modeling_something_rather_long.py:1234", module="a.b." * 20)
    sites = [
        *(site(module=f"layers.{i}.up", op_seconds=0.02) for i in range(12)),
        *(site(f"op{i}", casts=0, bytes_cast=0, cast_seconds=0.0) for i in range(18)),
        *(site(op, nonfinite=i, nonfinite_at=10 - i, op_seconds=0.5 / i) for i, op in enumerate(("exp", "div"), 2)),
        site("add", rule="", unchosen="float32 comes out, as parameter scale in float32 met bfloat16"),
        site("sin", module="", outside=2),
        site("mm", in_low={"an inner size of 3": 2}, fp8={"inputs": FP8, "weights": FP8 | {"saturated": 5}}),
        *(long, replace(long, given=("bfloat16", "float32", "float16"))),
    ]
    narrow = "bfloat16", "float32", "bfloat16"
    trips = [
        RoundTrip("a.py:1", "a.py:2", ("softmax", "matmul"), narrow, 1, 5_000_000, True),
        RoundTrip("a.py:3", "a.py:4", ("add", "linear"), narrow, 2, 10),
        RoundTrip("a.py:3", "a.py:4", ("add", "linear"), narrow, 3, 10),
    ]
    return log_of(
        *sites, steps=3, round_trips=trips, unmatched=tuple(f"mine.txt:{i}: op" for i in range(11)),
        unmatched_of_hmpx=("bmm", "conv1d"), escaped=("a.py:9: mm is in the bf16 list and ran in float32",),
    )  # fmt: skip


FP8 = {"largest": 448.0, "elements": 100, "underflowed": 10, "saturated": 0}


@pytest.mark.parametrize("columns", [40, 120])
def test_a_record_prints_the_table_and_what_calls_for_attention(columns, monkeypatch, stored):
    """The dearest first, equal blocks in a row, as wide as the terminal and at least 80."""
    said = shown(everything(), monkeypatch, columns)
    assert max(map(len, said.split("\n\n")[1].splitlines())) <= max(80, columns)
    stored(f"record-{columns}", said)


def test_a_table_never_cuts_what_may_not_be_cut():
    fields = (
        Field("a", lambda _: "x" * 50),
        Field("b", lambda _: "y" * 50, least=4),
        Field("c", lambda _: "z" * 50, rank=1),
    )
    lines = table(fields, [None], 60)
    assert lines == ["a".ljust(52) + "b", "x" * 50 + "  yyyyyyy…"]


def test_a_path_that_is_cut_keeps_its_end():
    path = Field("line", lambda _: "/a/long/way/to/model.py:1234", "end", least=8)
    assert table([path], [None], 14)[1] == "…model.py:1234"


def test_a_diff_shows_what_is_new_gone_and_changed(monkeypatch, stored, tmp_path):
    """The line of `exp` moved and `cat` took longer: neither is a difference. Equal blocks share a row."""
    monkeypatch.setenv("COLUMNS", "80")
    blocks = [site(module=f"layers.{i}.up", where="m.py:20") for i in range(30)]
    wide = {"seen": ("float32",), "result": ("float32",), "rule": "fp32"}
    before = [site("relu", module="old"), site("exp", where="m.py:3"), site("cat", where="m.py:9"), *blocks]
    after = [site("gelu", module="new"), site("exp", where="m.py:5"), site("cat", where="m.py:9", op_seconds=9.0)]
    after += [replace(each, **wide) for each in blocks]
    before += [site(f"op{i}") for i in range(25)]
    found = log_of(*before).diff(log_of(*after))
    assert ([each.op for each in found.new], found.same, len(found.changed)) == (["gelu"], 2, 30)
    assert found and not log_of(*before).diff(log_of(*before))
    stored("diff", str(found))
    found.html(tmp_path / "diff.html")
    tables = browser.shown_in((tmp_path / "diff.html").read_text())["sections"]
    assert [(each["head"], len(each["rows"])) for each in tables] == [
        *(("other rules or dtypes: 30 sites", 1), ("new: 1 site", 1), ("gone: 26 sites", 26)),
    ]
    found.json(tmp_path / "diff.json")
    saved = json.loads((tmp_path / "diff.json").read_text())
    assert saved["same"] == 2 and [len(saved[each]) for each in ("new", "gone", "changed")] == [1, 26, 30]


def test_of_a_device_only_a_call_that_was_not_finite_before_the_known_one_counts():
    """What a device has noted, number of the call among all << 31 | that of the site, here on the CPU."""
    sites = [site(op, nonfinite_at=known) for op, known in (("a", None), ("b", None), ("c", 5), ("d", 5))]
    devices, noted = DeviceSide(), (2**62, 7 << 31 | 3, 4 << 31 | 2, 6 << 31 | 1)
    for each, number in zip(sites, noted, strict=True):
        devices._first[id(each), torch.device("cpu")] = each, torch.tensor(number)
    devices.finish()
    assert [(each.nonfinite_at, each.nonfinite) for each in sites] == [(None, None), (7, 3), (4, 2), (5, None)]


class OnCuda(torch.Tensor):
    """Says that it is on a GPU."""

    is_cuda = True


def test_events_time_calls_whose_first_argument_is_on_a_gpu(monkeypatch):
    made = []
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: made.append(Mock()) or made[-1])
    here, there = torch.ones(2), torch.ones(2).as_subclass(OnCuda)
    devices = DeviceSide()
    assert [devices.begin(args) for args in ((), (2,), (here,), (here, there))] == [None] * 4 and not made
    assert devices.begin((there, 2)) is made[0] and made[0].record.called


def test_sites_of_one_line_are_matched_by_their_dtypes_first():
    """One line that was called in two dtypes: what stays is no change."""
    low = site(given=("bfloat16",))
    found = log_of(site(), low).diff(log_of(low))
    assert not found.changed and [each.given for each in found.gone] == [("float32",)]


def test_the_example_writes_rows_while_a_model_trains(tmp_path):
    script = Path(__file__).parents[2] / "examples" / "watch_precision.py"
    done = python.run(script, tmp_path / "rows", check=True, cwd=tmp_path)
    with open(tmp_path / "rows" / "sites.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["module"] == "0"]
    assert [(row["step"], row["op"], row["calls"], row["casts"]) for row in rows] == [
        (str(steps), "linear", str(steps), str(3 * steps)) for steps in (10, 20, 30)
    ]
    assert "in 30 steps" in done.stdout
    events = [*(tmp_path / "rows").glob("events.*")]
    assert len(events) == (importlib.util.find_spec("tensorboard") is not None)


def foreign(tmp_path, change):
    """The file of a good record with one change made to its JSON."""
    trip = RoundTrip("a.py:1", "a.py:2", ("add", "mul"), ("bfloat16", "float32", "bfloat16"), 1, 2)
    path = tmp_path / "log.json"
    log_of(site(), round_trips=[trip]).json(path)
    found = json.loads(path.read_text())
    change(found)
    path.write_text(json.dumps(found))
    return path


def test_a_record_from_elsewhere_cannot_command_the_terminal(tmp_path, monkeypatch):
    evil = "\x1b]0;owned\x07\x1b[2J\u202e\x9b31m"

    def change(found):
        found["sites"][0] |= {"op": f"lin{evil}ear", "where": f"{evil}m.py:1", "module": evil, "unchosen": f"x{evil}"}
        found["round_trips"][0]["ops"][0] += evil
        found["unmatched"] = [f"{evil}mine.txt:1: op"]

    log = Log.load(foreign(tmp_path, change))
    said = shown(log, monkeypatch) + str(log.diff(log))
    assert "mine.txt:1: op" in said
    assert all(each.isprintable() for line in said.split("\n") for each in line)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda found: found["sites"][0].update(calls="3"), "TypeError: "),
        (lambda found: found.update(sites={"op": 1}), "TypeError: "),
        (lambda found: found.pop("sites"), "KeyError: 'sites'"),
        (lambda found: found["round_trips"][0].update(ops=["add"]), "ValueError: not enough values"),
        (lambda found: found.update(policy=None), "AttributeError: 'NoneType' object has no attribute"),
    ],
)
def test_a_record_with_values_that_cannot_be_shown_is_refused(tmp_path, change, message):
    with pytest.raises(hmpx.HmpxError, match=re.escape(message)) as raised:
        Log.load(foreign(tmp_path, change))
    assert str(raised.value).startswith(f"{tmp_path / 'log.json'}: a record that is not whole: ")
    assert "\n" not in str(raised.value)


def test_a_record_that_is_nested_too_deep_is_no_json(tmp_path):
    (tmp_path / "deep.json").write_text("[" * 100_000)
    with pytest.raises(hmpx.HmpxError, match=r"deep\.json: no JSON"):
        Log.load(tmp_path / "deep.json")


def test_names_that_a_later_version_adds_are_left_out_and_what_is_read_is_what_was_saved(tmp_path):
    path = foreign(tmp_path, lambda found: found["sites"][0].update(later=3))
    first = Log.load(path)
    first.json(path)
    assert Log.load(path) == first and first.sites == [site(shapes=[])]


def test_paths_are_shortened_in_a_folder_with_a_space(tmp_path, monkeypatch):
    (tmp_path / "ein Härtetest").mkdir()
    monkeypatch.chdir(tmp_path / "ein Härtetest")
    said = f"{os.getcwd()}/model.py:7 and {os.getcwd()}/layers/norm.py:8 and /elsewhere/far.py:9: slow"
    assert short_places(said) == "model.py:7 and layers/norm.py:8 and far.py:9: slow"
